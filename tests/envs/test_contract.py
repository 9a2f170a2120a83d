"""Every tensor environment under the public conformance test: eager, vmapped, and compiled once."""

import pytest

from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import MAKERS
from torchpod.testing import check_env

TENSOR = [name for name, maker in MAKERS.items() if isinstance(maker, type) and issubclass(maker, TensorEnv)]


@pytest.mark.parametrize("name", TENSOR)
def test_environment_keeps_the_contract(name):
    env = MAKERS[name]()
    assert env.spec.name == name
    assert env.traits.pure and env.traits.capturable and env.traits.vmappable
    check_env(env)


@pytest.mark.parametrize("name", TENSOR)
def test_environment_keeps_the_contract_as_a_host_environment(name):
    check_env(HostEnv(MAKERS[name]()))
