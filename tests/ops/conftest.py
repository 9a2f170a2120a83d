import secrets

import pytest


@pytest.fixture
def seed() -> int:
    """A fresh one for each test; printed, so that a failure can be repeated."""
    value = secrets.randbits(32)
    print(f"seed={value}")
    return value
