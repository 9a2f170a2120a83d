"""What a CUDA graph cannot hold, found without CUDA: one iteration on the meta device, where no tensor has a value.

Reading a value on the host raises there. Tensors made from host data (a copy from pageable memory, which capture
refuses) and operations over two devices are seen by the two modes below. What is captured is compiled; here it is
not, and stands for what it is compiled from.
"""

import dataclasses

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchpod import random
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.bsuite.deep_sea import DeepSea
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.delayed_chain import DelayedChain
from torchpod.envs.grids.four_rooms import FourRooms
from torchpod.envs.grids.grid_world import GridWorld
from torchpod.envs.minatar import Asterix, Breakout, Freeway, Seaquest, SpaceInvaders
from torchpod.learner import LearnerConfig
from torchpod.specs import Discrete

ENVS = [
    CartPole(),
    Pendulum(),
    Catch(),
    MemoryChain(),
    DeepSea(),
    Asterix(),
    Breakout(),
    Freeway(),
    Seaquest(),
    SpaceInvaders(),
    DelayedChain(num_distractors=3),
    FourRooms(goal=None, start=None),
    GridWorld("sparse"),
    GridWorld("random_small"),
]


class HostData(TorchFunctionMode):
    """Collects calls that make tensors of Python or NumPy data."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.from_numpy, torch.Tensor.to) or (
            func is torch.as_tensor and not isinstance(args[0], torch.Tensor)
        ):
            out = func(*args, **(kwargs or {}))
            if not (isinstance(args[0], torch.Tensor) and args[0].device == out.device):
                self.calls.append((func.__name__, args[0]))
            return out
        return func(*args, **(kwargs or {}))


class Devices(TorchDispatchMode):
    """Collects copies between devices, and operations on tensors of another device than meta.

    A single number on the host is an argument of a kernel, and allowed.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.count = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += 1
        tensors = [x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if any(x.device.type != "meta" and x.ndim for x in tensors) or (
            copies and len({x.device for x in tensors}) > 1
        ):
            self.calls.append(func)
        return out


def iterate(agent, env, population=1):
    anakin = Anakin(
        agent,
        env,
        num_envs=4,
        unroll_length=4,
        learner=LearnerConfig(num_epochs=2, num_minibatches=2),
        num_iterations=2,
        compiler=Compiler(enabled=False, population=population),
        device="meta",
    )
    state = anakin.init(0)
    with HostData() as host, Devices() as devices:
        anakin.iterate(state)
    assert devices.count > 100
    return host.calls, devices.calls


@pytest.mark.parametrize("population", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("env", ENVS, ids=lambda env: env.spec.name)
def test_an_iteration_needs_nothing_from_the_host(env, population):
    assert iterate(lambda: PPO(env.spec, PPOConfig(hidden=(8,))), env, population) == ([], [])


@pytest.mark.parametrize("population", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("env", [CartPole(), Seaquest()], ids=lambda env: env.spec.name)
@pytest.mark.parametrize(("make", "config"), [(A2C, A2CConfig(hidden=(8,))), (IMPALA, IMPALAConfig(hidden=(8,)))])
def test_an_iteration_of_other_agents_needs_nothing_from_the_host(make, config, env, population):
    assert iterate(lambda: make(env.spec, config), env, population) == ([], [])


def test_a_recurrent_iteration_needs_nothing_from_the_host():
    env = MemoryChain()
    assert iterate(lambda: PPO(env.spec, PPOConfig(hidden=(8,), recurrent=8)), env) == ([], [])


class Numbered(CartPole):
    """Observes a choice, which networks see one-hot."""

    def __init__(self):
        super().__init__()
        self.spec = dataclasses.replace(self.spec, observation=Discrete(5))

    def observe(self, state):
        return (super().observe(state)[:, 0] > 0).to(torch.int64)


@pytest.mark.parametrize("more", [{}, {"normalize_observation": True}, {"recurrent": 8}])
def test_an_observed_choice_needs_nothing_from_the_host(more):
    env = Numbered()
    assert iterate(lambda: PPO(env.spec, PPOConfig(hidden=(8,), **more)), env) == ([], [])


def test_keys_of_plain_integers_need_nothing_from_the_host():
    keys = random.split(random.key(0, "meta"), 4)
    with HostData() as host, Devices() as devices:
        for change in (random.at, random.fold_in, random.advance):
            change(keys, 3)
    assert (host.calls, devices.calls) == ([], [])
    assert devices.count > 100


class Leaky(CartPole):
    """Multiplies by host data in its reset."""

    def reset(self, keys):
        return super().reset(keys) * torch.tensor([1.0, 1.0, 1.0, 1.0], device=keys.device)


class Mixed(CartPole):
    """Reads a table that lies on the host."""

    table = torch.ones(4)

    def observe(self, state):
        return super().observe(state) * self.table.to(state.device)


class Synchronising(CartPole):
    """Looks at a value."""

    def transition(self, state, action, keys):
        if action.sum() > 2:
            return super().transition(state, action, keys)
        return super().transition(state, 1 - action, keys)


def test_what_capture_refuses_is_found():
    host, _ = iterate(lambda: PPO(Leaky().spec), Leaky())
    assert [name for name, _ in host] == ["tensor"] * 4
    host, devices = iterate(lambda: PPO(Mixed().spec), Mixed())
    assert [name for name, _ in host] == ["to"] * 4
    assert devices == [torch.ops.aten._to_copy.default] * 4
    with pytest.raises(RuntimeError, match="meta"):
        iterate(lambda: PPO(Synchronising().spec), Synchronising())
