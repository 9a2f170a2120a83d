import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, NonFiniteError, train
from torchpod.compile import Compiler
from torchpod.distributed import Ranks
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import LearnerConfig
from torchpod.types import LAST


class Cursed(CartPole):
    """The reward of the 10th step since the start of an environment is not a number."""

    def reset(self, keys):
        return torch.cat([super().reset(keys), torch.zeros(keys.shape[0], 1)], -1)

    def transition(self, state, action, keys):
        moved, reward, _ = super().transition(state[:, :4], action, keys)
        count = state[:, 4] + 1
        never = torch.zeros_like(count, dtype=torch.bool)
        return torch.cat([moved, count[:, None]], -1), torch.where(count == 10, torch.nan, reward), never

    def observe(self, state):
        return state[:, :4].clone()


def make(env=None, **overrides):
    env = env or CartPole(max_episode_steps=7)
    options = {
        "num_envs": 4,
        "unroll_length": 4,
        "learner": LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=1e-2),
        "num_iterations": 12,
        "compiler": Compiler(enabled=False),
    }
    return Anakin(lambda: PPO(env.spec, PPOConfig(hidden=(8,))), env, **(options | overrides))


def run(anakin, state, **options):
    reports, replays = zip(*train(anakin, state, **options), strict=True)
    return pytree.tree_map(torch.clone, replays[-1].state), list(reports)


def assert_equal(a, b):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), a, b)


def test_calls_of_several_iterations_equal_single_ones(seed):
    anakin = make()
    start = anakin.init(seed)
    single, each = run(anakin, start)
    several, calls = run(anakin, start, iterations_per_call=5)
    assert_equal(several, single)
    assert [r.iteration for r in calls] == [5, 10, 12] and [r.iteration for r in each] == list(range(1, 13))
    for call, rows in zip(calls, (each[:5], each[5:10], each[10:]), strict=True):
        assert call.env_steps == rows[-1].env_steps
        for name in ("loss", "grad_norm", "entropy"):
            mean = sum(float(r.metrics[name]) for r in rows) / len(rows)
            assert float(call.metrics[name]) == pytest.approx(mean, rel=1e-5, abs=1e-6)
        episodes = sum(int(r.metrics["episodes"]) for r in rows)
        assert int(call.metrics["episodes"]) == episodes > 0
        total = sum(float(r.metrics["episode_return"] * r.metrics["episodes"]) for r in rows if r.metrics["episodes"])
        assert float(call.metrics["episode_return"]) == pytest.approx(total / episodes)


def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(seed):
    anakin = make()
    whole, _ = run(anakin, anakin.init(seed), iterations_per_call=3)
    half, first = run(anakin, anakin.init(seed), until=5, iterations_per_call=3)
    resumed, second = run(make(), half, iterations_per_call=3)
    assert_equal(resumed, whole)
    assert [r.iteration for r in first + second] == [3, 5, 6, 9, 12]


def test_the_same_seed_repeats_and_another_does_not(seed):
    anakin = make()
    one, _ = run(anakin, anakin.init(seed), until=2)
    torch.rand(7)  # torch's global generator plays no part
    two, _ = run(make(), make().init(seed), until=2)
    other, _ = run(anakin, anakin.init(seed + 1), until=2)
    assert_equal(one, two)
    assert not torch.equal(one.carry.timestep.observation, other.carry.timestep.observation)
    assert not torch.equal(one.learner.params["policy.weight"], other.learner.params["policy.weight"])


def test_train_leaves_torchs_generator_and_the_given_state_alone(seed):
    anakin = make()
    torch.manual_seed(seed)
    generator = torch.get_rng_state()
    start = anakin.init(seed)
    copy = pytree.tree_map(torch.clone, start)
    run(anakin, start, until=3)
    assert_equal(start, copy)
    assert torch.equal(torch.get_rng_state(), generator)


def test_env_steps_count_transitions_without_resets(seed):
    anakin = make()
    state, transitions = anakin.init(seed), 0
    for _ in range(5):
        _, trajectory = anakin.rollout(state)
        transitions += int((trajectory.timestep.step_type[:-1] != LAST).sum())
        state, _ = anakin.iterate(state)
        assert state.env_steps == transitions
    assert transitions < 5 * 4 * 4


def test_an_iteration_is_a_function_of_its_state(seed):
    anakin = make()
    state = anakin.iterate(anakin.init(seed))[0]
    copy = pytree.tree_map(torch.clone, state)
    one, two = anakin.iterate(state), anakin.iterate(state)
    assert_equal(one, two)
    assert_equal(state, copy)


@pytest.mark.parametrize("iterations_per_call", [1, 4])
def test_a_reward_that_is_not_finite_stops_the_run_with_the_offending_trajectory(seed, iterations_per_call):
    anakin = make(Cursed())  # 4 steps per iteration: the 10th is in the third
    start, seen = anakin.init(seed), []
    with pytest.raises(NonFiniteError, match="iteration 3 must be finite and is not; look in `trajectory`") as error:
        for report, _ in train(anakin, start, iterations_per_call=iterations_per_call):
            seen.append(report.iteration)
    assert error.value.iteration == 3
    assert seen == ([1, 2] if iterations_per_call == 1 else [])
    trajectory = error.value.trajectory
    assert torch.equal(trajectory.timestep.reward.isnan(), (torch.arange(5) == 2)[:, None].expand(5, 4))
    good, _ = run(anakin, start, until=2)
    assert_equal(trajectory, anakin.rollout(good)[1])
    broken, _ = anakin.iterate(good)
    assert not broken.learner.healthy
    assert_equal(broken.learner.params, good.learner.params)


def test_compile_time_is_reported_once(seed):
    anakin = make()
    _, reports = run(anakin, anakin.init(seed), until=3)
    assert reports[0].compile_s > 0 and [r.compile_s for r in reports[1:]] == [0, 0]
    assert all(r.wall_s > 0 for r in reports)


def test_two_ranks_draw_the_same_as_one(seed, monkeypatch):
    """The halves of the environments, each with the keys that it has on one rank."""
    monkeypatch.setattr(dist, "broadcast", lambda x, source: None)
    whole = make().init(seed)
    for rank in range(2):
        part = make(num_envs=2, ranks=Ranks(rank, 2)).init(seed)
        rows = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(part.env_keys, whole.env_keys[rows])
        assert torch.equal(part.actor_keys, whole.actor_keys[rows])
        assert torch.equal(part.learner_keys, whole.learner_keys[rows])
        assert torch.equal(part.carry.timestep.observation, whole.carry.timestep.observation[rows])
        assert_equal(part.learner.params, whole.learner.params)


class Drawn(PPO):
    """Begins with numbers that are not torch's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("offset", torch.from_numpy(np.random.random(3)))
        with torch.no_grad():
            for x in self.parameters():
                x.copy_(torch.from_numpy(np.random.random(x.shape)))


def test_ranks_begin_with_the_parameters_of_the_first_whatever_each_has_drawn(seed, monkeypatch):
    states, sent = [], []
    for rank, broadcast in enumerate((lambda x, _: sent.append(x.clone()), lambda x, _: x.copy_(sent.pop(0)))):
        monkeypatch.setattr(dist, "broadcast", broadcast)
        anakin = make(num_envs=2, ranks=Ranks(rank, 2))
        anakin.make_agent = lambda: Drawn(CartPole().spec, PPOConfig(hidden=(8,)))
        states.append(anakin.init(seed))
    assert_equal(states[0].learner, states[1].learner)
    assert not sent and not torch.equal(*(x.carry.timestep.observation for x in states))


def test_environments_actors_and_learner_have_keys_of_their_own(seed):
    state = make().init(seed)
    keys = torch.cat([state.env_keys, state.actor_keys, state.learner_keys]).tolist()
    assert len({tuple(k) for k in keys}) == 12


def test_a_call_that_is_interrupted_leaves_the_state_of_the_last_report(seed, monkeypatch):
    anakin = make()
    iterate, calls = anakin.iterate, []

    def interrupted(state):
        calls.append(1)
        if len(calls) == 6:  # one to warm up, three of the first call, one of the second
            raise KeyboardInterrupt
        return iterate(state)

    monkeypatch.setattr(anakin, "iterate", interrupted)
    reports = train(anakin, anakin.init(seed), iterations_per_call=3)
    _, replay = next(reports)
    before = pytree.tree_map(torch.clone, replay.state)
    with pytest.raises(KeyboardInterrupt):
        next(reports)
    assert int(replay.state.iteration) == 3
    pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), replay.state, before)


class CursedIfSlow(Cursed):
    """As `Cursed`, for members whose first environment begins with the cart on the left."""

    def reset(self, keys):
        state = super().reset(keys)
        state[:, 4] = torch.where(state[0, 0] < 0, 0.0, 1000.0)
        return state


@pytest.mark.parametrize("iterations_per_call", [1, 4])
def test_members_that_fail_are_reported_with_their_trajectory_while_others_go_on(iterations_per_call):
    def failing(seed):
        return make(CursedIfSlow()).init(seed).carry.timestep.observation[0, 0] < 0

    bad = next(seed for seed in range(100) if failing(seed) and not failing(seed + 1))
    anakin = make(CursedIfSlow(), compiler=Compiler(enabled=False, population=2))
    reports = [report for report, _ in train(anakin, anakin.init(bad), iterations_per_call=iterations_per_call)]
    failures = [report.failure for report in reports if report.failure is not None]
    assert len(failures) == 1 and failures[0].iteration == 3  # the tenth step
    nan = failures[0].trajectory.timestep.reward.isnan()
    assert nan[0].any() and not nan[1].any()
    assert reports[-1].metrics["healthy"].tolist() == [0.0, 1.0]
