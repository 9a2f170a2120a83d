"""Learning from replay: when it begins, which rows count how much, and what priorities become."""

import re

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.replay.agents import AGENTS, CONTINUOUS
from torchpod import random
from torchpod.agent import bind
from torchpod.algos.dqn import DQN, DQNConfig
from torchpod.algos.r2d2 import R2D2, R2D2Config
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import LearnerConfig
from torchpod.replay import Priorities, ReplayConfig
from torchpod.replay.learning import ReplayLearner
from torchpod.types import Batch, LossOutput

B, T, M, R = 4, 6, 2, 16
"""Environments, steps and updates per iteration, rows per update."""


class Silent(DQN):
    """Says no priorities."""

    def loss(self, batch, keys, target):
        return LossOutput(*super().loss(batch, keys, target)[:2])


class Acting(DQN):
    """Says with what it acts."""

    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        told = {"epsilon": self.epsilon, "remaining": self.remaining}
        return output._replace(extras={k: x.expand_as(output.action) for k, x in told.items()}), state


class Telling(DQN):
    """Says with what `remaining` it prepared and learned."""

    def prepare(self, trajectory, keys):
        steps = super().prepare(trajectory, keys).steps
        return Batch(steps | {"prepared": self.remaining.expand_as(steps["weight"])})

    def loss(self, batch, keys, target):
        out, b = super().loss(batch, keys, target), batch.steps
        said = {"prepared": (b["prepared"] * b["weight"]).sum(), "learned": self.remaining * b["weight"].sum()}
        return out._replace(metrics=out.metrics | said)


def make(
    prioritised=True,
    *,
    cls=DQN,
    name=None,
    population=1,
    compile=False,
    agent=None,
    learner=None,
    num_iterations=20,
    **replay,
):
    """With an agent of this class, or the one of this name in agents.py."""
    env = Pendulum(max_episode_steps=6) if name in CONTINUOUS else CartPole(max_episode_steps=6)
    maker = R2D2Config if cls is R2D2 else DQNConfig
    config = maker(**({"hidden": (8,), "n_step": 3, "target_rate": 0.1, "target_interval": 1} | (agent or {})))
    settings = {"num_epochs": 1, "num_minibatches": M, "learning_rate": 1e-2} | (learner or {})
    return Anakin(
        lambda: AGENTS[name](env.spec) if name else cls(env.spec, config),
        env,
        num_envs=B,
        unroll_length=T,
        learner=LearnerConfig(**settings),
        num_iterations=num_iterations,
        compiler=Compiler(compile, population),
        replay=ReplayConfig(
            **({"capacity": 240, "batch_size": R, "min_size": 100, "prioritised": prioritised} | replay)
        ),
    )


def run(anakin, state, until=None):
    """The state and the reports of every iteration."""
    reports = []
    for report, program in train(anakin, state, until=until):
        reports.append((report, pytree.tree_map(torch.clone, program.state)))
    return reports


def assert_equal(a, b):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), a, b)


def replay_of(anakin) -> ReplayLearner:
    assert anakin.replay is not None
    return anakin.replay


def before_update(seed, iterations=12, **settings):
    """A run that has come so far, and what its next iteration would see and do."""
    anakin = make(**settings)
    *_, (_, state) = run(anakin, anakin.init(seed), until=iterations)
    _, trajectory = anakin.rollout(state)
    keys = random.at(state.learner_keys, state.iteration * anakin.learner.counters_per_update)
    return anakin, state, trajectory, keys


@pytest.mark.parametrize(("min_size", "iterations"), [(1, 1), (24, 1), (25, 2), (100, 5), (240, 10)])
@pytest.mark.parametrize("prioritised", [False, True])
def test_nothing_is_learned_before_there_are_min_size_steps(seed, min_size, iterations, prioritised):
    anakin = make(prioritised, min_size=min_size)
    (first, state), (second, after), *_ = run(anakin, anakin.init(seed), until=iterations + 1)
    assert first.iteration == iterations and second.iteration == iterations + 1
    assert first.iteration * B * T >= min_size > (first.iteration - 1) * B * T or min_size < B * T
    assert state.learner.num_steps == M and after.learner.num_steps == 2 * M
    assert torch.isfinite(first.metrics["loss"]) and state.iteration == iterations
    started = anakin.init(seed)
    filled, _ = anakin.fill(started)
    assert_equal(filled.learner, started.learner)  # what only collects changes nothing else
    # What was only collected is counted too: in every environment a reset follows upon 6 steps at most.
    full = iterations * T // 7
    assert first.env_steps <= B * (iterations * T - full) and first.env_steps >= B * iterations * T * 0.6
    assert first.metrics["episodes"] >= B * full


def test_a_run_that_ends_before_anything_is_learned_is_refused(seed):
    assert replay_of(make(min_size=240, num_iterations=10)).buffer.fill_iterations == 9
    with pytest.raises(ValueError, match=r"9 iterations of \d+ steps end before anything is learned.*min_size=240"):
        make(min_size=240, num_iterations=9)


def test_what_falls_over_the_run_falls_while_it_learns(seed):
    """To 0 after the last iteration, however many have only collected."""
    anakin = make(min_size=240, num_iterations=30)
    *_, (_, state) = run(anakin, anakin.init(seed))
    assert state.learner.num_steps == 21 * M
    assert anakin.learner.acting(state.learner, state.iteration)["remaining"] == 0


def test_as_many_priorities_as_windows_are_wanted(seed):
    class Doubled(DQN):
        def loss(self, batch, keys, target):
            out = super().loss(batch, keys, target)
            assert out.priority is not None
            return out._replace(priority=out.priority.repeat(2))

    anakin = make(cls=Doubled)
    with pytest.raises(ValueError, match=rf"gives {2 * M * R} priorities for {M * R} windows"):
        next(train(anakin, anakin.init(seed)))


def by_hand(anakin, state, trajectory, keys):
    """What is drawn in an iteration, row by row: the agent's rows, leaves and weights of every minibatch."""
    replay = replay_of(anakin)
    priorities = pytree.tree_map(torch.clone, state.priorities)
    replay.buffer.insert(trajectory, state.iteration, priorities)
    inserted = pytree.tree_map(torch.clone, priorities)
    beta = 1 - 0.6 * anakin.learner.remaining(state.learner.num_steps)
    key = random.advance(keys[0], 1)
    sample = replay.buffer.sample(replay.buffer.storage, priorities, state.iteration, beta, M * R, key)
    batch = bind(anakin.agent, anakin.learner.acting(state.learner, state.iteration)).prepare(sample.trajectory, keys)
    rows = pytree.tree_map(lambda x: x[0], batch.steps)
    minibatches = [pytree.tree_map(lambda x, m=m: x[m::M], rows) for m in range(M)]
    return inserted, sample, minibatches


def td_error(agent, variables, targets, row):
    """Of double DQN, row by row."""
    with torch.no_grad():
        q = bind(agent, variables)("outputs_of", row["observation"])[..., 0]
        best = bind(agent, variables)("outputs_of", row["next_observation"])[..., 0].argmax(-1)
        following = bind(agent, targets)("outputs_of", row["next_observation"])[..., 0]
    index = torch.arange(len(best))
    return row["reward"] + row["discount"] * following[index, best] - q[index, row["action"]]


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_priorities_change_at_the_sampled_leaves_to_the_errors_before_the_update(seed, chunk_rows):
    # With a learning rate of 0 the errors of the second minibatch are those before the first as well.
    learner = {"learning_rate": 0.0, "chunk_rows": chunk_rows}
    anakin, state, trajectory, keys = before_update(seed, learner=learner)
    inserted, sample, minibatches = by_hand(anakin, state, trajectory, keys)
    priorities = pytree.tree_map(torch.clone, state.priorities)
    assert isinstance(priorities, Priorities)
    new, metrics = replay_of(anakin).update(state.learner, trajectory, priorities, state.iteration, keys)
    want = inserted.tree[0].clone()
    errors = {}
    for m, row in enumerate(minibatches):
        td = td_error(anakin.agent, state.learner.params | state.learner.buffers, state.learner.targets, row)
        for leaf, error in zip(sample.leaf[m::M].tolist(), td.abs().tolist(), strict=True):
            errors[leaf] = error
    assert 5 < len(errors) < len(want)
    for leaf, error in errors.items():
        want[leaf] = (error + 1e-6) ** 0.6
    torch.testing.assert_close(priorities.tree[0], want, rtol=1e-4, atol=1e-6)
    untouched = torch.ones(len(want), dtype=torch.bool)
    untouched[list(errors)] = False
    assert torch.equal(priorities.tree[0][untouched], inserted.tree[0][untouched])
    largest = max(float(inserted.largest), *((e + 1e-6) ** 0.6 for e in errors.values()))
    assert priorities.largest.item() == pytest.approx(largest, rel=1e-5)
    td = torch.tensor([abs(x) for x in errors.values()])
    assert td.min() < metrics["td_error"] < td.max() and new.num_steps == state.learner.num_steps + M


@pytest.mark.parametrize("name", [None, *(name for name in AGENTS if name != "r2d2")], ids=str)
def test_rows_and_sequences_count_as_much_as_their_importance_weights_say(seed, name, monkeypatch):
    """The gradient, through Adam's first moment: that of a weighted mean of the rows' own losses. None: R2D2."""
    made = {"cls": R2D2, "agent": {"recurrent": 4, "burn_in": 2, "length": T}} if name is None else {"name": name}
    made["learner"] = {"max_grad_norm": 1e9, "num_minibatches": 1}
    anakin, state, trajectory, keys = before_update(seed, **made)
    replay, agent, learner = replay_of(anakin), anakin.agent, anakin.learner
    assert isinstance(state.priorities, Priorities)
    leaf = state.priorities.tree[0].nonzero()[:, 0]
    some = torch.rand(len(leaf), generator=torch.Generator().manual_seed(seed))
    replay.buffer.write_back(state.priorities, leaf, 100.0**some)
    priorities = pytree.tree_map(torch.clone, state.priorities)
    replay.buffer.insert(trajectory, state.iteration, priorities)
    beta = 1 - 0.6 * learner.remaining(state.learner.num_steps)
    key = random.advance(keys[0], 1)
    sample = replay.buffer.sample(replay.buffer.storage, priorities, state.iteration, beta, R, key)
    weight = priorities.tree[0][sample.leaf] ** -float(beta)
    assert weight.max() > 1.2 * weight.min()
    acting, targets = learner.acting(state.learner, state.iteration), bind(agent, state.learner.targets)
    own = bind(agent, acting).prepare(sample.trajectory, random.split(random.key(seed), R)).steps
    if not agent.recurrent:
        own = pytree.tree_map(lambda x: x[0], own)

    seen, loss_of = [], type(agent).loss

    def loss(self, batch, keys, target):
        seen.append((batch, keys))
        return loss_of(self, batch, keys, target)

    monkeypatch.setattr(type(agent), "loss", loss)
    new, _ = replay.update(
        state.learner, trajectory, pytree.tree_map(torch.clone, state.priorities), state.iteration, keys
    )
    monkeypatch.undo()
    batch, drawn_with = seen[0]  # for its noise; of several groups one after the other
    assert all(torch.equal(x, drawn_with) for _, x in seen) and torch.equal(own["action"], batch.steps["action"])

    def gradient(weight):
        params = {k: v.clone().requires_grad_() for k, v in state.learner.params.items()}
        weight = own["weight"] * weight  # of a sequence, all its steps
        steps = batch.steps | {"weight": weight / weight.sum()}
        loss = bind(agent, acting | params).loss(batch._replace(steps=steps), drawn_with, targets).loss
        losses, gradients = loss if isinstance(loss, dict) else dict.fromkeys(learner.groups.names, loss), {}
        for group, names in learner.groups.names.items():
            found = torch.autograd.grad(losses[group], [params[x] for x in names], retain_graph=True)
            interval = agent.optimizer_intervals.get(group, 1)  # TD3's policy awaits its turn
            if int(state.learner.num_steps + 1) % interval == 0:
                gradients |= dict(zip(names, found, strict=True))
        return gradients

    before, after = (learner.groups.by_parameter(x.mu) for x in (state.learner, new))
    weighted, plain = gradient(weight), gradient(torch.ones(R))
    for name, want in weighted.items():
        got = (after[name] - 0.9 * before[name]) / 0.1
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(weighted[name], plain[name], rtol=2e-2, atol=1e-3) for name in plain)


def test_a_compiled_run_equals_an_eager_one(seed):
    # A large epsilon keeps Adam from turning the ulps of a small gradient into a whole step.
    learner = {"learning_rate": 1e-3, "epsilon": 1e-3}
    ends = []
    for compile in (False, True):
        anakin = make(compile=compile, learner=learner)
        ends.append(run(anakin, anakin.init(seed), until=9))
    for (eager, a), (compiled, b) in zip(*ends, strict=True):
        torch.testing.assert_close(eager.metrics, compiled.metrics, rtol=1e-3, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(a.learner.params, b.learner.params, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a.priorities, b.priorities, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prioritised", [False, True])
def test_the_same_seed_is_the_same_run(seed, prioritised):
    ends = []
    for s in (seed, seed, seed + 1):
        anakin = make(prioritised)
        ends.append(run(anakin, anakin.init(s))[-1])
    assert_equal(ends[0][1], ends[1][1])
    assert_equal(ends[0][0].metrics, ends[1][0].metrics)
    different = zip(ends[0][1].learner.params.values(), ends[2][1].learner.params.values(), strict=True)
    assert not any(torch.equal(a, b) for a, b in different if a.any())


@pytest.mark.parametrize("prioritised", [False, True])
def test_every_member_of_a_population_is_its_single_run(seed, prioritised):
    both = make(prioritised, population=2)
    reports = run(both, both.init(seed))
    for p in range(2):
        single = make(prioritised)
        alone = run(single, single.init(seed + p))
        for (together, state), (report, own) in zip(reports, alone, strict=True):
            assert_equal(pytree.tree_map(lambda x, p=p: x[p], state), own)
            assert_equal({k: v[p] for k, v in together.metrics.items()}, report.metrics)


def test_more_rows_at_once_than_there_may_be_are_refused():
    with pytest.raises(
        ValueError, match=r"algo\.replay\.batch_size=601 is more than algo\.replay\.capacity=600; lower"
    ):
        make(batch_size=601, capacity=600)


def test_epochs_are_refused():
    with pytest.raises(ValueError, match=r"algo\.learner\.num_epochs=2: DQN draws new rows .*; use num_epochs=1"):
        make(learner={"num_epochs": 2})


def test_unrolls_of_which_a_part_is_never_learned_from_are_refused():
    message = f"algo.unroll_length={T}: R2D2 learns from {T - 1} steps .*; use algo.unroll_length={T - 1}, or raise"
    whole, short = (make(cls=R2D2, agent={"length": length}) for length in (T, T - 1))
    next(train(whole, whole.init(0)))
    with pytest.raises(ValueError, match=message):
        next(train(short, short.init(0)))


def test_prioritised_replay_needs_priorities(seed):
    message = (
        "algo.replay.prioritised=true needs priorities, and the loss of Silent gives none; return "
        "LossOutput(..., priority=...), or set it to false."
    )
    anakin = make(cls=Silent)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(anakin, anakin.init(seed))
    evenly = make(False, cls=Silent)
    assert run(evenly, evenly.init(seed), until=6)


def test_what_is_random_becomes_less_during_the_run(seed):
    """`annealed`: `remaining` falls, and with it the share of random actions, which the loop acts with."""
    anakin = make(agent={"epsilon": 0.0, "exploration_fraction": 0.5}, num_iterations=40)
    remaining = []
    for _, state in run(anakin, anakin.init(seed)):
        acting = anakin.learner.acting(state.learner, state.iteration)
        remaining.append(acting["remaining"].item())
        assert state.learner.buffers["remaining"] == 1
        greedy = 0.0
        for seed_ in range(20):
            timestep = state.carry.timestep
            keys = random.at(random.split(random.key(seed_), B), 1)
            action = bind(anakin.agent, acting).act(timestep, (), keys)[0].action
            greedy += (action == bind(anakin.agent, acting)("greedy", timestep.observation)).float().mean() / 20
        share = 1 - min(1.0, (1 - remaining[-1]) / 0.5)
        assert abs(greedy - (1 - share / 2)) < 6 * (0.25 / 80) ** 0.5 + 1e-6
        if share == 0:
            assert greedy == pytest.approx(1)
    assert all(a > b for a, b in zip(remaining[:-1], remaining[1:], strict=True))
    assert remaining[0] == pytest.approx(1 - 1 / (40 - replay_of(anakin).buffer.fill_iterations))
    assert remaining[-1] < 0.1


@pytest.mark.parametrize(
    ("compile", "population"), [(False, 1), (False, 2), pytest.param(True, 1, marks=pytest.mark.slow)]
)
def test_schedules_begin_with_the_steps_that_only_fill_it(seed, compile, population):
    """After 0 steps, and not with what the filling ends with; what falls while it learns stays what it is."""
    points = ((0.0, 1.0), (10.0 * B * T, 0.0))
    anakin = make(cls=Acting, learner={"schedules": {"epsilon": points}}, compile=compile, population=population)
    run(anakin, anakin.init(seed), until=8)
    buffer = replay_of(anakin).buffer
    told = buffer.storage["output"]["extras"]
    assert buffer.fill_iterations == 4
    for name, want in (
        ("epsilon", [1 - i / 10 for i in range(8)]),
        ("remaining", [*[1.0] * 4, *(1 - i / 16 for i in range(4))]),
    ):
        found = told[name].movedim(buffer.axis, 0)[: 8 * T].reshape(8, -1)
        torch.testing.assert_close(found, torch.tensor(want)[:, None].expand_as(found))


def test_several_iterations_per_call_are_as_many_single_ones(seed):
    one, four = make(), make()
    *_, (_, a) = run(one, one.init(seed), until=12)
    for _, program in train(four, four.init(seed), until=12, iterations_per_call=4):
        b = program.state
    assert_equal(a, b)


def test_a_call_with_more_iterations_than_there_is_room_for_is_refused(seed):
    anakin = make()
    with pytest.raises(ValueError, match="iterations_per_call=9: replay has room for 8"):
        list(train(anakin, anakin.init(seed), iterations_per_call=9))


def test_prepare_and_loss_see_what_is_annealed(seed):
    anakin = make(cls=Telling)
    first, *rest = run(anakin, anakin.init(seed), until=12)
    for i, (report, _) in enumerate([first, *rest]):
        for name in ("prepared", "learned"):
            falls_for = 20 - replay_of(anakin).buffer.fill_iterations
            assert report.metrics[name].item() == pytest.approx(1 - i / falls_for, rel=1e-5)
