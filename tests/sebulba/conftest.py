"""No test leaves an actor thread behind."""

import pytest

from tests.sebulba.runs import threads


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []
