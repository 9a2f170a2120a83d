"""The steps of an unroll in C++ beside the same steps called from Python: equal to the bit."""

import os
import secrets
import signal
import time

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import variables_of
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.envs import CartPole
from torchpod.host_memory import status_bytes
from torchpod.kernels import cpu_calls
from torchpod.kernels.inductor import Compiled
from torchpod.makers import make_agent, make_env
from torchpod.rollout import Recorder, make_step, start, unroll
from torchpod.trees import stack
from torchpod.types import Carry, TimeStep

OP = f"test{secrets.token_hex(4)}::step"


def called_from_python(step, variables, carry, env_keys, actor_keys, length, time_axis):
    recorder = Recorder(carry)
    for _ in range(length):
        carry, output = step(variables, carry, env_keys, actor_keys)
        recorder.add(carry, output)
    return carry, recorder.trajectory(time_axis)


@pytest.fixture
def runs(monkeypatch):
    """The lengths of all loops in C++."""
    lengths = []
    run = cpu_calls.Unroll.run

    def watched(self, inputs, length, axis):
        lengths.append(length)
        return run(self, inputs, length, axis)

    monkeypatch.setattr(cpu_calls.Unroll, "run", watched)
    return lengths


@pytest.mark.parametrize(
    ("env_name", "overrides", "population"),
    [
        ("cartpole", ["algo=impala"], 1),
        pytest.param("memory_chain", ["algo.agent.recurrent=8"], 3, marks=pytest.mark.slow),
        pytest.param("pendulum", [], 1, marks=pytest.mark.slow),
    ],
)
def test_an_unroll_in_cpp_is_one_in_python(env_name, overrides, population, seed, runs):
    config = load([f"env={env_name}", "algo.agent.hidden=[16]", *overrides])
    env = make_env(config.env)
    make = make_agent(config.algo, env.spec)
    members = []
    for i in range(population):
        torch.manual_seed(seed + i)
        agent = make()
        keys = random.split(random.key(seed + i), 16).reshape(2, 8, 3)
        members.append((dict(variables_of(agent)[0] | variables_of(agent)[1]), start(agent, env, keys[0]), *keys))
    arguments = members[0] if population == 1 else stack(members)
    variables, carry, env_keys, actor_keys = arguments
    axis = int(population > 1)
    step = Compiler(True, population)(make_step(make(), env))
    assert isinstance(step, Compiled)
    for length in (5, 12, 1):
        inside = unroll(step, variables, carry, env_keys, actor_keys, length=length, time_axis=axis)
        outside = called_from_python(step, variables, carry, env_keys, actor_keys, length, axis)
        for a, b in zip(pytree.tree_leaves(inside), pytree.tree_leaves(outside), strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        carry = inside[0]
    assert runs == [12, 1]  # the first one compiles


def test_what_goes_in_stays_as_it_was_and_what_comes_out_is_the_callers(seed, runs):
    def step(variables, carry, env_keys, actor_keys):
        timestep = carry.timestep._replace(reward=carry.timestep.reward + variables["w"] + env_keys[:, 0])
        return Carry(carry.env_state, timestep, (), carry.step + 1), {"same": variables["w"], "twice": timestep.reward}

    def zeros(dtype=torch.float32):
        return torch.zeros(4, dtype=dtype)

    timestep = TimeStep(zeros(torch.int32), zeros(), zeros(), torch.rand(4, 2), {"x": torch.rand(4)})
    carry = Carry((torch.rand(3),), timestep, (), torch.tensor(0))
    arguments = ({"w": torch.rand(4)}, carry, torch.ones(4, 3), torch.ones(4, 3))
    before = pytree.tree_map(torch.clone, arguments)
    compiled = Compiler(True)(step)
    for _ in range(2):
        last, trajectory = unroll(compiled, *arguments, length=7)
        assert last.step == 7
        torch.testing.assert_close(trajectory.timestep.reward[-1], 7 * (before[0]["w"] + 1))
        assert torch.equal(trajectory.output["twice"], trajectory.timestep.reward[1:])
        assert torch.equal(trajectory.output["same"], before[0]["w"].expand(7, 4))
        for x in pytree.tree_leaves((trajectory.timestep, trajectory.output)):
            x.zero_()  # were it shared with what went in, the next round would see it
        for a, b in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(before), strict=True):
            assert torch.equal(a, b)
    assert runs == [7]


def test_what_a_step_makes_equal_keeps_its_own_beginning(seed, runs):
    def step(variables, carry, env_keys, actor_keys):
        reward = carry.timestep.reward + variables["w"]
        timestep = carry.timestep._replace(reward=reward, discount=reward)
        return Carry((), timestep, (), carry.step + 1), {}

    def zeros(dtype=torch.float32):
        return torch.zeros(4, dtype=dtype)

    timestep = TimeStep(zeros(torch.int32), torch.rand(4), torch.rand(4), torch.rand(4, 2), {})
    arguments = ({"w": torch.rand(4)}, Carry((), timestep, (), torch.tensor(0)), torch.ones(4, 3), torch.ones(4, 3))
    compiled = Compiler(True)(step)
    for _ in range(2):
        _, trajectory = unroll(compiled, *arguments, length=3)
        assert torch.equal(trajectory.timestep.reward[0], timestep.reward)
        assert torch.equal(trajectory.timestep.discount[0], timestep.discount)
        assert torch.equal(trajectory.timestep.reward[1:], trajectory.timestep.discount[1:])
    assert runs == [3]


class Remembers(CartPole):
    """Its state is the state of CartPole, and the last action."""

    def reset(self, keys):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(keys), torch.zeros_like(keys[..., 0])

    def transition(self, state, action, keys):  # pyright: ignore[reportIncompatibleMethodOverride]
        state, reward, terminated = super().transition(state[0], action, keys)
        return (state, action), reward, terminated

    def observe(self, state):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().observe(state[0])


@pytest.mark.parametrize("population", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_action_that_the_state_keeps_is_two_outputs_of_one_tensor(population, seed, runs):
    env = Remembers()
    agent = make_agent(load(["algo.agent.hidden=[16]"]).algo, env.spec)()
    keys = random.split(random.key(seed), 16).reshape(2, 8, 3)
    one = (dict(variables_of(agent)[0] | variables_of(agent)[1]), start(agent, env, keys[0]), *keys)
    variables, carry, *keys = one if population == 1 else stack([one] * population)
    step, axis = Compiler(True, population)(make_step(agent, env)), int(population > 1)
    carry, _ = unroll(step, variables, carry, *keys, length=1, time_axis=axis)
    inside = unroll(step, variables, carry, *keys, length=9, time_axis=axis)
    outside = called_from_python(step, variables, carry, *keys, 9, axis)
    for a, b in zip(pytree.tree_leaves(inside), pytree.tree_leaves(outside), strict=True):
        assert torch.equal(a, b)
    assert runs == [9]


@pytest.mark.parametrize("same", [torch.Tensor.detach, lambda x: x[:], lambda x: x.view(4)])
def test_one_tensor_may_be_several_outputs_and_its_own_successor(same, runs):
    def step(variables, carry, env_keys, actor_keys):
        reward = carry.timestep.reward + 1.0
        timestep = carry.timestep._replace(reward=reward, discount=same(reward))
        return Carry(same(reward), timestep, (), carry.step + 1), (same(reward), same(reward))

    timestep = TimeStep(torch.zeros(4).int(), torch.zeros(4), torch.ones(4), torch.rand(4), {})
    carry, keys = Carry(torch.ones(4), timestep, (), torch.tensor(0)), torch.zeros(2, 4, 3)
    compiled = Compiler(True)(step)
    unroll(compiled, {}, carry, *keys, length=1)
    for _ in range(3):
        last, trajectory = unroll(compiled, {}, carry, *keys, length=6)
    counted = torch.arange(1.0, 7.0)[:, None].expand(6, 4)
    for x in (*trajectory.output, trajectory.timestep.reward[1:], trajectory.timestep.discount[1:]):
        assert torch.equal(x, counted)
    assert torch.equal(last.env_state, counted[-1]) and runs == [6, 6, 6]


@pytest.mark.parametrize("reward", [torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]], ids=["dtype", "strides"])
def test_a_carry_that_changes_after_the_first_step_is_left_to_python(reward, runs):
    def step(variables, carry, env_keys, actor_keys):
        timestep = carry.timestep._replace(reward=(carry.timestep.reward + torch.ones(4)).float())
        return carry._replace(timestep=timestep), ()

    timestep = TimeStep(torch.zeros(4).int(), reward, torch.ones(4), torch.rand(4), {})
    carry, keys = Carry((), timestep, (), torch.tensor(0)), torch.zeros(2, 4, 3)
    compiled = Compiler(True, max_compilations=2)(step)
    for length in (1, 3, 3):
        last, _ = unroll(compiled, {}, carry, *keys, length=length)
        assert torch.equal(last.timestep.reward, torch.full((4,), float(length)))
    assert runs == []


@pytest.mark.slow
def test_memory_does_not_grow(seed):
    env = make_env(load([]).env)
    agent = make_agent(load(["algo.agent.hidden=[16]"]).algo, env.spec)()
    keys = random.split(random.key(seed), 512).reshape(2, 256, 3)
    variables, step = variables_of(agent)[0] | variables_of(agent)[1], Compiler(True)(make_step(agent, env))
    carry = start(agent, env, keys[0])

    for i in range(200):
        carry, _ = unroll(step, variables, carry, *keys, length=64)
        if i == 20:
            settled = status_bytes(os.getpid(), "VmRSS")
    assert status_bytes(os.getpid(), "VmRSS") - settled < 20_000_000  # a trajectory has 700 KB, 180 of them 126 MB


@torch.library.custom_op(OP, mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    if float(x[0]) > 2.5:
        raise ValueError("I do not feel like it")
    return x + 1


@moody.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_error_in_the_middle_ends_the_unroll_with_an_error(runs):
    def step(variables, carry, env_keys, actor_keys):
        timestep = carry.timestep._replace(reward=moody(carry.timestep.reward))
        return carry._replace(timestep=timestep), ()

    zeros = torch.zeros(4)
    timestep = TimeStep(zeros.int(), zeros, zeros + 1, zeros + 2, {})
    carry, keys = Carry((), timestep, (), torch.tensor(0)), torch.zeros(2, 4, 3)
    compiled = Compiler(True)(step)
    unroll(compiled, {}, carry, *keys, length=2)
    with pytest.raises((RuntimeError, ValueError)) as inside:
        unroll(compiled, {}, carry, *keys, length=9)
    with pytest.raises((RuntimeError, ValueError)) as outside:
        called_from_python(compiled, {}, carry, *keys, 9, 0)
    assert runs == [9] and type(inside.value) is type(outside.value) and str(inside.value) == str(outside.value)
    last, _ = unroll(compiled, {}, carry, *keys, length=2)  # and it goes on
    assert torch.equal(last.timestep.reward, zeros + 2)


def test_a_signal_is_heard_between_two_calls(runs):
    def step(variables, carry, env_keys, actor_keys):
        reward = carry.timestep.reward
        for _ in range(100):  # so that it takes time, and no room in the stack of all steps
            reward = reward.sin()
        return carry._replace(timestep=carry.timestep._replace(reward=reward)), ()

    def heard(number, frame):
        raise TimeoutError("enough")

    zeros = torch.zeros(512)
    timestep = TimeStep(zeros.int(), zeros + 1, zeros + 1, zeros + 2, {})
    carry, keys = Carry((), timestep, (), torch.tensor(0)), torch.zeros(2, 512, 3)
    compiled = Compiler(True)(step)
    unroll(compiled, {}, carry, *keys, length=2)
    ends, seconds, before = [], [], signal.signal(signal.SIGALRM, heard)
    try:
        for _ in range(2):  # in the first the list of calls is put together
            began = time.perf_counter()
            ends.append(unroll(compiled, {}, carry, *keys, length=20_000)[0].timestep.reward)
            seconds.append(time.perf_counter() - began)
        signal.setitimer(signal.ITIMER_REAL, seconds[1] / 5)
        began = time.perf_counter()
        with pytest.raises(TimeoutError, match="enough"):
            unroll(compiled, {}, carry, *keys, length=20_000)
        assert time.perf_counter() - began < 0.7 * seconds[1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    ends.append(unroll(compiled, {}, carry, *keys, length=20_000)[0].timestep.reward)  # and it goes on
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[1], ends[2]) and runs == [20_000] * 4
