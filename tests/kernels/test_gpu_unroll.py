"""The steps of an unroll as one kernel of a GPU, interpreted; and on a GPU."""

import json
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.algos.ppo import PPO
from torchpod.anakin import Anakin
from torchpod.bench import lowered
from torchpod.compile import Compiler
from torchpod.envs import CartPole
from torchpod.graph import Replay
from torchpod.kernels import gpu_unroll
from torchpod.kernels.cpu_calls import NotRecordable
from torchpod.kernels.inductor import Compiled, simplify, trace
from torchpod.learner import LearnerConfig

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor of an H100, for one block of threads."""
NUM_ENVS = 20
"""More than a block has rows, and not twice as many."""
RUNS = {
    "cartpole": ["env=cartpole"],
    "normalised": ["env=cartpole", "algo.agent.normalize_observation=true", "algo.agent.hidden=[16]"],
    "pendulum": ["env=pendulum", "algo.agent.activation=relu"],
    "acrobot": ["env=acrobot"],
    "memory_chain": ["env=memory_chain"],
    "impala": ["algo=impala", "env=bernoulli_bandit"],
    "telling": ["algo=tests/kernels/unrolls_on_a_gpu.py:Telling", "env=cartpole"],
}


def printed(runs, *arguments):
    ended = lowered.run("tests.kernels.unrolls_on_a_gpu", json.dumps(runs), *arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_steps_are_those_of_a_loop(seed):
    runs = [["algo=ppo", f"num_envs={NUM_ENVS}", f"seed={seed}", *own] for own in RUNS.values()]
    for name, (difference, is_equal) in zip(RUNS, printed(runs, "--check"), strict=True):
        assert difference < 2e-5 and is_equal, name


@pytest.mark.slow
def test_what_has_no_kernel_is_named():
    runs = [
        ["algo=ppo", "env=minatar_breakout"],
        ["algo=ppo", "env=catch"],
        ["algo=ppo", "env=cartpole", "algo.agent.hidden=[128]"],
        ["algo=ppo", "env=cartpole", "algo.agent.recurrent=4"],
    ]
    breakout, convolution, wide, recurrent = printed([[*own, f"num_envs={NUM_ENVS}"] for own in runs], "--check")
    assert breakout == "a row of 400 numbers has no room in registers"
    assert convolution == "aten.convolution.default has no kernel here"
    assert "has too many numbers" in wide and recurrent == "aten.addmm.default has no kernel here"


class Step(NamedTuple):
    """As much of a `Carry` as an unroll needs."""

    timestep: torch.Tensor
    x: torch.Tensor
    step: torch.Tensor


def text_of(fn, size=4, timestep=None, x=None, given=None):
    """The kernel of `(variables, carry) -> ((timestep, x, count), output)` that a function of these makes."""
    carry = Step(
        torch.ones(size) if timestep is None else timestep,
        torch.ones(size, 2) if x is None else x,
        torch.tensor(0),
    )

    def step(variables, carry):
        timestep, x, output = fn(variables, carry)
        return Step(timestep, x, carry.step + 1), output

    args = (torch.ones(3) if given is None else given), carry
    graph, *_ = trace(step, args)
    simplify(graph)
    return gpu_unroll.GpuUnroll(graph, args, step(*args)).source


def test_truth_values_are_added_as_truth_values_and_carries_are_what_they_were():
    ends = torch.tensor([True, False, True, False])
    text = text_of(lambda v, c: (c.timestep + (c.timestep > 1), c.x, c.timestep), timestep=ends)
    assert " | " in text
    with pytest.raises(NotRecordable, match="what is carried becomes a table of the environments"):
        text_of(lambda v, c: (torch.arange(4.0), c.x, c.x))


@pytest.mark.parametrize(
    ("fn", "how", "told"),
    [
        (lambda v, c: (c.timestep, c.x, c.x.flatten(0, 1)[:4]), {}, "rows are brought together"),
        (lambda v, c: (c.timestep, c.x.flip(0), c.x), {}, "has no kernel here"),
        (lambda v, c: (c.timestep + v.sum(), c.x, c.x), {"given": torch.arange(8.0)[::2]}, "is not contiguous"),
        (lambda v, c: (c.timestep, c.x, c.x), {"timestep": torch.tensor(1.0)}, "what a timestep tells has no rows"),
        (lambda v, c: (c.timestep, c.x + torch.arange(4.0)[:, None], c.x), {}, "rows are moved|a table has a number"),
        (lambda v, c: (c.timestep, c.x, c.x * c.timestep[0]), {}, "rows are moved"),
        (lambda v, c: (c.timestep, c.x, c.x * c.x[2]), {}, "select.int chooses rows"),
        (lambda v, c: (c.timestep, c.x, c.x * c.x.split(2)[1].repeat(2, 1)), {}, "split.Tensor chooses rows"),
        (lambda v, c: (c.timestep, c.x, c.x * c.step.sum(0)), {}, "sum.dim_IntList of a number"),
        (
            lambda v, c: (c.timestep, c.x, torch.cond(c.step > 0, torch.exp, torch.sin, (c.x,))),
            {},
            "graph_0 is no tensor",
        ),
        (lambda v, c: (c.timestep, c.x, v), {"given": torch.ones(4, 20)}, "a result is a large tensor"),
    ],
)
def test_what_would_be_another_step_has_no_kernel(fn, how, told):
    with pytest.raises(NotRecordable, match=told):
        text_of(fn, **how)


def test_more_environments_than_it_pays_for_go_step_by_step(monkeypatch):
    monkeypatch.setattr(gpu_unroll, "MOST_ROWS", 3)
    with pytest.raises(NotRecordable, match="4 environments fill a GPU step by step"):
        text_of(lambda v, c: (c.timestep, c.x, c.x))


def test_a_gpu_without_room_for_it_goes_step_by_step(monkeypatch):
    class OutOfResources(Exception):
        pass

    def run(*given):
        raise OutOfResources("out of resource: shared memory")

    monkeypatch.setitem(sys.modules, "triton.runtime.errors", SimpleNamespace(OutOfResources=OutOfResources))
    monkeypatch.setattr(gpu_unroll.GpuUnroll, "run", run)
    args = torch.ones(3), Step(torch.ones(4), torch.ones(4, 2), torch.tensor(0))

    def step(variables, carry):
        return carry._replace(step=carry.step + 1), carry.x

    graph, *_ = trace(step, args)
    simplify(graph)
    with pytest.raises(NotRecordable, match="no room on this GPU .out of resource"):
        gpu_unroll.GpuUnroll(graph, args, step(*args)).check([])


def test_a_kernel_that_is_written_wrongly_is_an_error_here_and_a_warning_elsewhere(monkeypatch):
    def step(variables, carry):
        return carry._replace(step=carry.step + 1), 2 * carry.x

    compiled = Compiled(step, "step", 1)
    args = torch.ones(3), Step(torch.ones(4), torch.ones(4, 2), torch.tensor(0))
    compiled(*args)
    (program,) = compiled._programs
    program.entry, program._on_gpu = None, True
    monkeypatch.setattr(
        gpu_unroll, "POINTWISE", {torch.ops.aten.add.Tensor: "{} + {}", torch.ops.aten.mul.Tensor: "{2}"}
    )
    with pytest.warns(UserWarning, match="step by step.*a bug of torchpod's.*IndexError"):
        assert compiled.loop(args) is None
    assert compiled.loop(args) is None  # told once


@pytest.mark.slow
def test_machine_code_of_it_fits_on_an_h100():
    runs = [["algo=ppo", *RUNS[name], "num_envs=1024"] for name in ("cartpole", "acrobot")]
    for found in printed(runs):
        assert 0 < found["shared"] <= SHARED_BYTES and found["lines"] > 500


@pytest.mark.gpu
@pytest.mark.parametrize("num_envs", [20, 1024])
def test_iterations_with_it_are_those_without(num_envs, monkeypatch):
    def after(is_enabled):
        monkeypatch.setattr(gpu_unroll, "ENABLED", is_enabled)
        env = CartPole()
        anakin = Anakin(
            lambda: PPO(env.spec),
            env,
            num_envs=num_envs,
            unroll_length=16,
            learner=LearnerConfig(),
            num_iterations=2,
            compiler=Compiler(True),
            device="cuda",
        )
        replay = Replay(anakin.iterate, anakin.init(0), capture=True)
        replay()
        (program,) = anakin._step._programs  # pyright: ignore[reportFunctionMemberAccess]: it is compiled
        assert isinstance(program._loop, gpu_unroll.GpuUnroll) == is_enabled
        return pytree.tree_map(torch.clone, replay.state)

    one, other = after(True), after(False)
    for name, x in one.learner.params.items():
        torch.testing.assert_close(x, other.learner.params[name], rtol=1e-3, atol=1e-4)
    assert one.env_steps == other.env_steps > 0
