"""Operators of a user's own, honest and not: small ones in Python stand for kernels."""

import secrets

import pytest
import torch

from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.env import TensorEnv
from torchpod.run.execute import execute
from torchpod.specs import Box, Discrete, EnvSpec, Traits
from torchpod.testing import ContractError, check_env
from torchpod.testing.kernels import compare_with_fakes

OP = f"test{secrets.token_hex(4)}::step"
HONEST = staticmethod(lambda x: (x + 0.01, x[:, 0] > 5))


@torch.library.custom_op(OP, mutates_args=())
def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return WithKernel.real(x)


@step.register_fake
def _(x):
    return WithKernel.fake(x)


class WithKernel(TensorEnv):
    """Its operator does `real` and promises `fake`."""

    traits = Traits(vmappable=False)
    real = fake = HONEST

    def __init__(self) -> None:
        self.spec = EnvSpec("with_kernel", Box((2,)), Discrete(2), 10)

    def reset(self, keys):
        return torch.zeros(keys.shape[0], 2)

    def transition(self, state, action, keys):
        state, terminated = step(state)
        return state, torch.ones_like(state[:, 0]), terminated

    def observe(self, state):
        return state


LIES = {
    "shape": (lambda x: (x[:, :1] + 0, x[:, 0] > 5), "float32 tensor of shape [8, 2] on cpu", "shape [8, 1] on cpu"),
    "dtype": (lambda x: (x.double(), x[:, 0] > 5), "float32 tensor of shape [8, 2]", "float64 tensor of shape [8, 2]"),
    "strides": (lambda x: (x.t().clone(memory_format=torch.contiguous_format).t(), x[:, 0] > 5), "[8, 2] on", "[1, 8]"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_result_that_is_not_as_promised_is_named(lie, monkeypatch):
    real, expected, came = LIES[lie]
    monkeypatch.setattr(WithKernel, "real", staticmethod(real))
    with pytest.raises(ContractError) as error:
        check_env(WithKernel())
    message = str(error.value)
    assert message.startswith(f"result 0 of the operator {OP} must be a torch.") and "\n" not in message
    assert expected in message and came in message.partition("it is")[2]


def test_an_honest_operator_passes_compiled_too():
    check_env(WithKernel())


def test_a_run_with_a_false_promise_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(WithKernel, "real", staticmethod(LIES["shape"][0]))
    config = load([f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(
        ConfigError, match=r"WithKernel breaks the contract: result 0 of the operator test\w+::step must"
    ):
        execute(config, env=WithKernel())
    assert not (tmp_path / "run").exists()


def test_without_a_fake_implementation_the_error_says_how_to_write_one(monkeypatch):
    def missing(x):
        raise NotImplementedError("no fake")

    monkeypatch.setattr(WithKernel, "fake", staticmethod(missing))
    with pytest.raises(ContractError, match="has no fake implementation that works.*register_fake.*capturable=False"):
        check_env(WithKernel())


def test_what_is_never_compiled_promises_nothing(monkeypatch):
    monkeypatch.setattr(WithKernel, "fake", staticmethod(lambda x: (x.double(), x[:, 0] > 5)))
    monkeypatch.setattr(WithKernel, "traits", Traits(capturable=False, vmappable=False))
    check_env(WithKernel())


def test_an_operator_that_writes_into_its_argument_is_refused(monkeypatch):
    monkeypatch.setattr(WithKernel, "real", staticmethod(lambda x: (x.add_(0.01).clone(), x[:, 0] > 5)))
    with pytest.raises(ContractError, match="step.. must not modify its arguments"):
        check_env(WithKernel())


def test_conditional_operators_of_torch_still_work_uncompiled():
    class Conditional(WithKernel):
        def transition(self, state, action, keys):
            state = torch.cond((action < 1).all(), torch.sin, torch.cos, (state,))
            return state, torch.ones_like(state[:, 0]), state[:, 0] > 5

    env = Conditional()
    state, timestep = env.init(torch.zeros(8, 3, dtype=torch.int64))

    def call():
        return env.step(state, torch.zeros(8, dtype=torch.int64), torch.zeros(8, 3, dtype=torch.int64))

    with pytest.warns(UserWarning, match="operators could not be compared with their fakes"):
        compare_with_fakes(call)
    assert torch.isfinite(call()[0][0]).all()


def test_an_error_of_the_environments_own_is_not_hidden():
    def call():
        raise LookupError("no map")

    with pytest.raises(LookupError, match="no map"):
        compare_with_fakes(call)
