"""Reusing the rollout's forward pass: the same updates as without it, and less work."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.distributed import Ranks
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import LearnerConfig
from torchpod.run.execute import execute
from torchpod.sebulba import Sebulba, SebulbaConfig
from torchpod.testing import ContractError, check_agent

T, B, HIDDEN = 12, 6, 16
CONFIG = LearnerConfig(num_epochs=1, num_minibatches=1, learning_rate=1e-2, max_grad_norm=1.0)
CASES = {
    "a2c": (A2C, A2CConfig, Catch(), {"channels": ()}),
    "a2c_recurrent": (A2C, A2CConfig, Catch(), {"recurrent": 8}),
    "impala": (IMPALA, IMPALAConfig, Pendulum(max_episode_steps=7), {}),
    "impala_lstm": (IMPALA, IMPALAConfig, Catch(), {"recurrent": 4, "cell": "lstm", "channels": ()}),
    "ppo": (PPO, PPOConfig, Catch(), {"normalize_reward": True, "normalize_observation": True, "shared": True}),
}


def make(case, *, reuse=True, num_envs=B, compiler=None, learner=CONFIG, **options):
    cls, config_cls, env, settings = CASES[case]
    config = config_cls(**{"hidden": (HIDDEN, HIDDEN), "reuse_forward": reuse} | settings)
    return Anakin(
        lambda: cls(env.spec, config),
        env,
        num_envs=num_envs,
        unroll_length=T,
        learner=learner,
        num_iterations=8,
        compiler=compiler or Compiler(enabled=False),
        **options,
    )


def iterate(anakin, seed, iterations=3):
    state, metrics = anakin.init(seed % 2**31), {}
    for _ in range(iterations):
        state, metrics = anakin.iterate(state)
    return state, metrics


def require_equal_runs(ours, theirs, **tolerance):
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_that_compute_the_pass_again(case, seed):
    ours, our_metrics = iterate(make(case), seed)
    theirs, metrics = iterate(make(case, reuse=False), seed)
    require_equal_runs(ours.learner, theirs.learner, rtol=1e-4, atol=1e-5)
    assert our_metrics.keys() == metrics.keys()
    require_equal_runs(our_metrics, metrics, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "population"),
    [
        ("impala", 1),
        pytest.param("a2c_recurrent", 2, marks=pytest.mark.slow),
        pytest.param("ppo", 2, marks=pytest.mark.slow),
    ],
)
def test_compiled_updates_are_the_eager_ones(case, population, seed):
    ours, our_metrics = iterate(make(case, compiler=Compiler(True, population)), seed)
    theirs, metrics = iterate(make(case, compiler=Compiler(False, population)), seed)
    require_equal_runs(ours.learner.mu, theirs.learner.mu, rtol=1e-3, atol=1e-5)
    # A step of Adam is the learning rate (0.01) times g / (|g| + 1e-5): where g is near 0 its rounding shows, up to
    # 7e-4 in 25 seeds. A gradient that is wrong changes whole steps.
    require_equal_runs(ours.learner.params, theirs.learner.params, rtol=1e-3, atol=3e-3)
    require_equal_runs(our_metrics, metrics, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_compiled_run_begins_and_learns(seed):
    """Its programs, unlike others, are needed while the next ones are traced."""
    anakin = make("a2c", compiler=Compiler(True))
    report, replay = next(train(anakin, anakin.init(seed)))
    expected, _ = make("a2c").iterate(anakin.init(seed))
    assert report.iteration == 1
    require_equal_runs(replay.state.learner.mu, expected.learner.mu, rtol=1e-3, atol=1e-5)


def test_members_of_a_population_equal_runs_of_their_own(seed):
    together, _ = iterate(make("a2c", compiler=Compiler(False, 2)), seed)
    for i in range(2):
        alone, _ = iterate(make("a2c"), seed % 2**31 + i)
        require_equal_runs(pytree.tree_map(lambda x, i=i: x[i], together), alone, rtol=0, atol=0)


class Flops(TorchDispatchMode):
    """Floating-point operations of matrix products, below functorch (FlopCounterMode's hooks do not work there)."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize(("case", "saved"), [("a2c", 1), ("impala", 2)])
def test_it_saves_forward_passes(case, saved):
    """IMPALA's V-trace targets need one as well."""
    work = {}
    for reuse in (True, False):
        anakin = make(case, reuse=reuse)
        state, _ = anakin.iterate(anakin.init(0))  # the first looks for the names of metrics as well
        with Flops() as counter:
            anakin.iterate(state)
        work[reuse] = counter.total
    spec = anakin.env.spec
    size = torch.Size(spec.observation.shape).numel()
    heads = 3 + 1 if case == "a2c" else 1 + 1
    one_pass = 2 * T * B * (2 * size * HIDDEN + 2 * HIDDEN * HIDDEN + heads * HIDDEN)
    extra = 0.3 * one_pass  # of the bootstrap, which V-trace's pass over T + 1 steps includes
    assert abs(work[False] - work[True] - saved * one_pass) <= extra


class Threads(Ranks):
    """Two ranks in one process, in threads that meet at every sum."""

    meeting, handed = threading.Barrier(2, timeout=60), {}

    def first(self, x):
        return x  # both have the same

    def sum(self, x):
        self.handed[self.rank] = x.clone()
        self.meeting.wait()
        x.copy_(self.handed[0] + self.handed[1])
        self.meeting.wait()
        return x


def test_two_ranks_take_the_step_of_one(seed):
    whole, _ = iterate(make("ppo"), seed, 1)
    ranks = [make("ppo", num_envs=B // 2, ranks=Threads(rank, 2)) for rank in range(2)]
    states = [anakin.init(seed % 2**31) for anakin in ranks]  # here: torch's generator is one for all threads
    with ThreadPoolExecutor(2) as pool:
        halves = [*pool.map(lambda anakin, state: anakin.iterate(state)[0], ranks, states)]
    for half in halves:  # mu is the gradient, but for a factor
        require_equal_runs(half.learner.mu, whole.learner.mu, rtol=1e-3, atol=1e-6)


def test_a_run_that_is_resumed_equals_one_that_is_not(seed):
    anakin = make("a2c_recurrent")
    *_, (_, replay) = train(anakin, anakin.init(seed))
    whole = pytree.tree_map(torch.clone, replay.state)
    *_, (_, replay) = train(anakin, anakin.init(seed), until=3)
    *_, (_, replay) = train(anakin, pytree.tree_map(torch.clone, replay.state))
    require_equal_runs(replay.state, whole, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["a2c", "impala_lstm"])
def test_agents_keep_the_contract(case):
    cls, config_cls, env, settings = CASES[case]
    check_agent(cls(env.spec, config_cls(**{"hidden": (8,), "reuse_forward": True} | settings)), env, compile=False)


def test_on_the_command_line(tmp_path):
    overrides = ["experiment=a2c_catch", "algo.agent.reuse_forward=true", "compile=false", "total_env_steps=2000"]
    folder = execute(load([*overrides, f"run_dir={tmp_path / 'run'}", "evaluation.episodes=4", "logger.console=false"]))
    assert (tmp_path / "run" / "summary.json").exists(), folder


class Biases(A2C):
    """Two parameters that only appear as a sum, so that autograd may give both the same gradient."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.one, self.other = (nn.Parameter(torch.zeros(spec.action.num_values)) for _ in range(2))

    def _heads(self, features, observation):
        policy, value = super()._heads(features, observation)
        return policy + (self.one + self.other), value


class Reordered(A2C):
    def prepare(self, trajectory, keys):
        batch = super().prepare(trajectory, keys)
        return batch._replace(
            steps={k: dict(reversed(x.items())) if k == "forward" else x for k, x in batch.steps.items()}
        )


@pytest.mark.parametrize(
    ("cls", "compiled"),
    [
        (Biases, False),
        (Reordered, False),
        *(pytest.param(cls, True, marks=pytest.mark.slow) for cls in (Reordered, Biases)),
    ],
)
def test_gradients_of_unusual_agents(monkeypatch, cls, compiled, seed):
    monkeypatch.setitem(CASES, "other", (cls, A2CConfig, Catch(), {"channels": ()}))
    ours, _ = iterate(make("other", compiler=Compiler(compiled)), seed, 1)
    theirs, _ = iterate(make("other", reuse=False), seed, 1)
    require_equal_runs(ours.learner.mu, theirs.learner.mu, rtol=1e-3, atol=1e-6)


class TwoLosses(A2C):
    def optimizer_groups(self):
        return {"policy": ("encoder.", "policy."), "value": ("value",)}


class Counting(A2C):
    def initial_state(self, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64)


class Silent(A2C):
    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        return output._replace(extras={k: x for k, x in output.extras.items() if k != "forward"}), state


class Integers(A2C):
    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        said = output.extras["forward"] | {"first": timestep.step_type}
        return output._replace(extras=output.extras | {"forward": said}), state


class Forgetful(A2C):
    def _reused(self, output):
        return {"forward": {"policy": output.extras["forward"]["policy"]}}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Silent, r"extras\['forward'\]"),
        (Integers, "floating-point"),
        (Forgetful, r"hand extras\['forward'\] of act\(\) on as"),
    ],
)
def test_agents_that_break_the_contract_are_told(monkeypatch, cls, message):
    monkeypatch.setitem(CASES, "other", (cls, A2CConfig, Catch(), {}))
    if cls is not Silent:  # whose `prepare` fails first
        with pytest.raises(ContractError, match=message):
            check_agent(cls(Catch().spec, A2CConfig(reuse_forward=True)), Catch(), compile=False)
    with pytest.raises(ValueError, match=message):
        iterate(make("other"), 0, 1)


def test_what_cannot_work_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"algo\.learner\.num_epochs=1 and .*num_minibatches=1, not 4 and 4\."):
        make("ppo", learner=LearnerConfig())
    for cls, message in ((TwoLosses, "one loss back, and TwoLosses has"), (Counting, "Counting has one of integers")):
        monkeypatch.setitem(CASES, "other", (cls, A2CConfig, Catch(), {}))
        with pytest.raises(ValueError, match=message):
            make("other")
    env = Catch()
    with pytest.raises(ValueError, match="use reuse_forward=false or loop=anakin"):
        Sebulba(
            lambda: A2C(env.spec, A2CConfig(reuse_forward=True)),
            lambda: env,
            config=SebulbaConfig(lag=0),
            num_envs=B,
            unroll_length=T,
            learner=CONFIG,
            num_iterations=1,
            compiler=Compiler(False),
        )
