"""Sebulba with captured inference and update on a GPU; its logic on the CPU is in tests/sebulba."""

import copy
import dataclasses
import time

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.interop.test_fall_back import agent_of_a_reading_actor, reading_agent
from tests.marks import with_slow
from tests.replay import agents as replay_agents
from tests.sebulba.runs import InParts
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent
from torchpod.bench import gpu, gpu_checks, kernels
from torchpod.bench.compare import Row, RowMaker
from torchpod.bench.gpu import HostCase
from torchpod.bench.harness import Record
from torchpod.bench.targets import Failure
from torchpod.compile import Compiler
from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.graph import Replay
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.sebulba import Sebulba, SebulbaConfig, train, transfer
from torchpod.sebulba.exchange import Exchange
from torchpod.sebulba.program import Program
from torchpod.specs import Array

pytestmark = pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for

AGENTS = {
    "ppo": lambda spec: PPO(spec, PPOConfig(hidden=(16,))),
    "lstm": lambda spec: IMPALA(spec, IMPALAConfig(hidden=(16,), recurrent=8, cell="lstm")),
    **{
        name: lambda spec, name=name: IMPALA(spec, IMPALAConfig(hidden=(16,), torso=name))
        for name in ("nature", "impala_shallow", "impala_deep")
    },
    "deep_lstm": lambda spec: IMPALA(
        spec, IMPALAConfig(hidden=(16,), torso="impala_deep", width=2, depth=2, recurrent=8, cell="lstm")
    ),
    "clip_ppo_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("ClipPPOLoss", hidden=(16,))),
    "reading_loss": lambda spec: reading_agent(),
    "reading_actor": lambda spec: agent_of_a_reading_actor(),
}
FALL_BACK = ("reading_loss", "reading_actor")
LAGS = {"ppo": 1, "clip_ppo_loss": 1, "reading_loss": 0, "reading_actor": 0}
"""What they can correct for; the others for more."""
IMAGES = ("nature", "impala_shallow", "impala_deep", "deep_lstm")


class Drawn(CartPole):
    """CartPole as an image of bytes in which each number is a bar."""

    def __init__(self, **own):
        super().__init__(**own)
        self.spec = dataclasses.replace(self.spec, observation=Array((84, 84, 4), torch.uint8))

    def observe(self, state):
        size = (128 + 40 * super().observe(state).clamp(-3, 3)).to(torch.uint8)
        return size[:, None, None].expand(-1, 84, 84, -1).contiguous()


def make(agent, config, *, compiled, host=True, iterations=6, device="cuda", kind=HostEnv):
    env = Drawn(max_episode_steps=20) if agent in IMAGES else CartPole(max_episode_steps=20)
    env = kind(env) if host else env
    return Sebulba(
        lambda: AGENTS[agent](env.spec),
        lambda: copy.copy(env),
        num_envs=16,
        unroll_length=8,
        learner=LearnerConfig(num_epochs=2, num_minibatches=2),
        num_iterations=iterations,
        compiler=Compiler(compiled),
        config=config,
        device=device,
    )


def final_state(agent, config, **how):
    sebulba = make(agent, config, **how)
    state = sebulba.init(0)
    for _, program in train(sebulba, state):
        state = program.state
    assert sebulba.compiler.fell_back == (sebulba.compiler.enabled and agent in FALL_BACK)
    return state


@pytest.mark.gpu
def test_the_learner_asks_the_device_once_in_an_iteration_whether_its_gradients_are_finite():
    """With an environment on the device, in the main thread: what acts and what learns is seen."""
    sebulba = make("ppo", SebulbaConfig(num_actor_threads=0, lag=0), compiled=True, host=False)
    program = Program(sebulba, sebulba.init(0))
    program.begin(sebulba.num_iterations)
    try:
        for _ in range(2):
            program()
        found = kernels.waits(kernels.profiled(program))
    finally:
        program.close()
    assert sum("Memcpy DtoH" in name for name in found) == 1
    assert len(found) == 2  # the copy, and that it is waited for


def require_the_same_update(agent, host, *, device):
    """One of compiled programs, as one of uncompiled ones on the CPU."""
    one = {"config": SebulbaConfig(num_actor_threads=1, lag=0), "host": host, "iterations": 1}
    found = final_state(agent, compiled=True, device=device, **one)
    plain = final_state(agent, compiled=False, device="cpu", **one)
    for name, x in plain.learner.params.items():
        torch.testing.assert_close(found.learner.params[name].cpu(), x, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize(
    ("agent", "host"),
    [("ppo", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("clip_ppo_loss", *FALL_BACK))],
)
def test_compiled_actors_and_learner_do_what_uncompiled_ones_do(agent, host):
    require_the_same_update(agent, host, device="cpu")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("agent", AGENTS)
def test_captured_actors_and_learner_do_what_uncompiled_ones_do_on_the_cpu(agent, host, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    require_the_same_update(agent, host, device="cuda")


@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("clip_ppo_loss", 2), ("reading_loss", 1))),
        ("reading_actor", 0),
    ],
)
def test_what_falls_back_is_left_out_of_the_captures_and_does_the_same(agent, expected, monkeypatch):
    """On the CPU, where a stand-in asks and warms up as `Replay` does for a GPU, and counts what it would capture."""
    captured, priorities = [], []

    class StandIn(Replay):
        def __init__(self, fn, state, *, capture, capturable, priority):
            super().__init__(fn, state, capture=capture)
            priorities.append(priority)
            for _ in range(2):
                fn(pytree.tree_map(torch.clone, self.state))
            if capturable():
                captured.append(fn)

    monkeypatch.setattr(transfer, "Replay", StandIn)
    ends, config = [], SebulbaConfig(num_actor_threads=1, lag=0)
    for static in (False, True):
        sebulba = make(agent, config, compiled=True, iterations=2, device="cpu")
        sebulba.static = static
        state = sebulba.init(0)
        for _, program in train(sebulba, state):
            state = program.state
        ends.append(state.learner.params)
    assert sebulba.compiler.fell_back == (agent in FALL_BACK) and len(captured) == expected
    assert priorities == [-1, 0]  # of one pool, and of the update
    for name, x in ends[0].items():
        torch.testing.assert_close(ends[1][name], x, rtol=0, atol=0)


def require_two_equal_runs(agent, **how):
    lag = LAGS.get(agent, 2)
    config = SebulbaConfig(num_actor_threads=2, pools_per_actor=2, lag=lag, updates_per_batch=2 if lag != 0 else 1)
    ends = [final_state(agent, config, **how) for _ in range(2)]
    for a, b in zip(*map(pytree.tree_leaves, ends), strict=True):
        assert torch.equal(a, b)
    assert ends[0].learner.healthy


@pytest.mark.parametrize(
    "agent", with_slow(["ppo", "lstm", "impala_shallow", "deep_lstm", "clip_ppo_loss", *FALL_BACK], ("deep_lstm",))
)
def test_with_a_fixed_lag_two_runs_are_equal(agent):
    require_two_equal_runs(agent, compiled=False, iterations=2, device="cpu")


@pytest.fixture
def begun(monkeypatch):
    """What each unroll that could have begun early found to begin with."""
    begun, known = [], Exchange.known
    monkeypatch.setattr(Exchange, "known", lambda *args: begun.append(known(*args)) or begun[-1])
    return begun


def test_with_unrolls_that_begin_early_two_runs_are_equal(begun):
    require_two_equal_runs("lstm", compiled=False, iterations=4, device="cpu", kind=InParts)
    assert any(begun)


@pytest.mark.gpu
@pytest.mark.parametrize("agent", ["ppo", "lstm", "impala_shallow"])
def test_with_unrolls_that_begin_early_two_captured_runs_are_equal(agent, begun):
    require_two_equal_runs(agent, compiled=True, iterations=30, kind=InParts)
    assert any(begun)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("agent", ["ppo", *FALL_BACK])
def test_uncompiled_on_a_gpu_two_runs_are_equal(agent):
    require_two_equal_runs(agent, compiled=False, iterations=3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("agent", AGENTS)
def test_with_a_fixed_lag_two_captured_runs_are_equal_whatever_threads_and_streams_do(agent):
    require_two_equal_runs(agent, compiled=True, iterations=30)


def require_learning_from_the_newest(refresh, **how):
    config = SebulbaConfig(num_actor_threads=2, lag="free", refresh=refresh, updates_per_batch=2)
    state = final_state("lstm", config, **how)
    assert state.learner.healthy and state.learner.num_steps == how["iterations"] * 2 * 2 * 2
    assert 0.8 < int(state.env_steps) / (how["iterations"] * 16 * 8) < 1  # the others were resets


@pytest.mark.parametrize("refresh", ["unroll", "step"])
def test_with_a_free_lag_all_that_is_acted_is_learned_from(refresh):
    require_learning_from_the_newest(refresh, compiled=False, iterations=4, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refresh", ["unroll", "step"])
def test_captured_with_a_free_lag_all_that_is_acted_is_learned_from(refresh):
    require_learning_from_the_newest(refresh, compiled=True, iterations=30)


def replayed_twice(name, *, compiled, device):
    """The ends of two runs by two actors, with what is learned from in the host's memory in one of them."""
    env = Pendulum(max_episode_steps=9) if name in replay_agents.CONTINUOUS else CartPole(max_episode_steps=9)
    prioritised = name not in replay_agents.WITHOUT_PRIORITIES
    for host in (False, True):
        sebulba = Sebulba(
            lambda: replay_agents.AGENTS[name](env.spec),
            lambda: copy.copy(env),
            num_envs=16,
            unroll_length=4,
            learner=LearnerConfig(num_epochs=1, num_minibatches=2),
            num_iterations=20,
            compiler=Compiler(compiled),
            config=SebulbaConfig(num_actor_threads=2, lag=1),
            device=device,
            replay=ReplayConfig(640, batch_size=32, min_size=256, prioritised=prioritised, host=host),
        )
        state = sebulba.init(0)
        for _, program in train(sebulba, state):
            state = program.state
        yield state


def unlike_ends(states):
    """Of runs that learned."""
    first, second = states
    assert first.learner.healthy and first.learner.num_steps > 0
    return gpu_checks.different(first, second)


@pytest.mark.parametrize("name", with_slow(replay_agents.AGENTS, {*replay_agents.AGENTS} - {"dqn", "sac", "r2d2"}))
def test_with_replay_two_runs_are_equal(name):
    assert unlike_ends(replayed_twice(name, compiled=False, device="cpu")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", replay_agents.AGENTS)
def test_with_replay_two_compiled_runs_are_equal(name):
    assert unlike_ends(replayed_twice(name, compiled=True, device="cpu")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", replay_agents.AGENTS)
def test_with_replay_two_captured_runs_are_equal_wherever_it_lies(name):
    assert unlike_ends(replayed_twice(name, compiled=True, device="cuda")) == []


def host_rows(case: HostCase, device: str) -> tuple[list[Row], list[Failure]]:
    record = Record("gpu", None)
    gpu.host_rows(record, RowMaker(), [case], device, time.monotonic() + 300, quick=True)
    return record.rows, record.failures


@pytest.mark.gpu
def test_envpool_feeds_a_gpu():
    rows, failures = host_rows(HostCase("CartPole-v1", 64, 16), "cuda")
    assert failures == [] and all((row.value or 0.0) > 0 for row in rows)
    assert rows[-1].name == "gpu_idle_CartPole-v1/64x16" and 0 < (rows[-1].value or 0.0) < 1


@pytest.mark.slow
def test_the_rows_of_host_environments_are_measured_on_the_cpu_too():
    rows, failures = host_rows(HostCase("CartPole-v1", 8, 8), "cpu")
    assert failures == []
    assert [row.name for row in rows] == [
        "raw_envpool_CartPole-v1/8x8",
        "impala_CartPole-v1/8x8",
        "impala_of_raw_CartPole-v1/8x8",
    ]
    raw, ours, share = (row.value or 0.0 for row in rows)
    assert share == pytest.approx(ours / raw) and ours > 0
