"""The sentence with which overrides are refused."""

import pytest

from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.makers import make_agent, make_env


def refused(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        config = load(overrides)
        make_agent(config.algo, make_env(config.env).spec)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message
