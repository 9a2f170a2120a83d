"""Rows between two episodes count nothing in any TorchRL loss, in what it adapts and in what is reported."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.interop.actors import SPEC
from tests.interop.rows import NORMS, THERE, B, T, batch_of, collect, config, in_torchrls_words, mappo_agent, of_both
from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.torchrl import CONTINUOUS, torchrl_agent
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.interop.torchrl import _of_rows_that_count
from torchpod.learner import Learner, LearnerConfig
from torchpod.testing import check_agent
from torchpod.types import LAST, Batch, Trajectory


def with_nonsense(batch, seed):
    """In the rows that weigh nothing everything is replaced by other numbers."""
    generator = torch.Generator().manual_seed(seed)
    steps = dict(batch.steps)
    weight = steps.pop("weight")

    def other(x):
        nonsense = torch.rand(x.shape, generator=generator) * 50
        mask = (weight == 0).reshape(-1, *[1] * (x.ndim - 1))
        return torch.where(mask, nonsense.to(x.dtype) if x.is_floating_point() else (nonsense < 25).to(x.dtype), x)

    return batch._replace(steps=pytree.tree_map(other, steps) | {"weight": weight})


@pytest.mark.parametrize("name", [*NORMS, *THERE, "IPPOLoss"])
def test_a_reset_contributes_nothing(name, seed):
    env = Pendulum(max_episode_steps=3) if name in CONTINUOUS else CartPole(max_episode_steps=3)
    agent = mappo_agent(name) if name in NORMS else torchrl_agent(env.spec, config(name))
    trajectory = collect(agent, env, seed)
    reset = trajectory.timestep.step_type[:-1] == LAST
    assert 0 < reset.sum() < reset.numel()
    batch = batch_of(agent, trajectory, seed)
    key, learner = random.key(seed), Learner(agent, LearnerConfig(), num_iterations=1)
    state = learner.init(*variables_of(agent))

    def gradient(batch):
        flat, _ = learner._gradient_one(state.params, state.buffers, state.targets, batch, key, torch.tensor(0), ())
        metrics = dict(zip(learner._metric_names, flat[len(learner.groups.flat(state.params)) :], strict=False))
        kept = [x[None] for k, x in metrics.items() if k.startswith("buffer")]
        assert len(kept) == (6 if name in NORMS else 2 if name == "KLPENPPOLoss" else 0)  # and how much each counts
        return torch.cat([flat[: len(learner.groups.flat(state.params))], *kept])

    a, b = gradient(batch), gradient(with_nonsense(batch, seed))
    assert (a != 0).any() and torch.equal(a, b)
    all_count = batch._replace(steps=batch.steps | {"weight": torch.full_like(batch.steps["weight"], 1 / (T * B))})
    assert not torch.equal(gradient(with_nonsense(batch, seed)._replace(steps=all_count.steps)), a)


@pytest.mark.parametrize(
    ("name", "make_env"),
    [
        ("A2CLoss", Pendulum),
        ("ClipPPOLoss", CartPole),
        ("KLPENPPOLoss", CartPole),
        ("PopArtValueNorm", CartPole),
        ("DQNLoss", CartPole),
        ("DiscreteSACLoss", CartPole),
        ("SACLoss", Pendulum),
    ],
)
def test_what_is_chosen_and_earned_at_a_reset_changes_no_update(name, make_env, seed):
    """From the trajectory on: through advantages, their standardisation, minibatches and chunks."""
    env, generator = make_env(max_episode_steps=3), torch.Generator().manual_seed(seed)
    settings = dataclasses.replace(config(name), normalize_advantage=True)
    agent = mappo_agent(name) if name in NORMS else torchrl_agent(env.spec, settings)
    if name in NORMS:
        agent.standardise = ("advantage",)
    assert ("advantage" in agent.standardise) == (agent.max_lag is not None)
    trajectory, keys = collect(agent, env, seed), random.split(random.key(seed), B)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=2, chunk_rows=T * B // 4), num_iterations=1)
    state = learner.init(*variables_of(agent))
    reset = trajectory.timestep.step_type[:-1] == LAST
    assert 0 < reset.sum() < reset.numel()

    def updated(rows):
        """By other actions and what was written beside them, rewards and discounts, in rows `[T, B]`."""

        def other(x):
            drawn = torch.rand(x.shape, generator=generator)
            mask = rows.reshape(*rows.shape, *[1] * (x.ndim - 2))
            return torch.where(mask, drawn if x.is_floating_point() else (drawn > 0.5).to(x.dtype), x)

        t = trajectory.timestep
        reward, discount = (torch.cat([x[:1], other(x[1:])]) for x in (t.reward, t.discount))
        changed = t._replace(reward=reward, discount=discount), pytree.tree_map(other, trajectory.output)
        after, _ = learner.update(state, Trajectory(*changed, (), ()), keys)
        return after.params | after.buffers | after.targets

    before = state.params | state.buffers | state.targets
    a, b, c = (updated(rows) for rows in (torch.zeros_like(reset), reset, ~reset))
    assert all(torch.equal(x, b[key]) for key, x in a.items())
    assert all(x.isfinite().all() for x in a.values())
    assert any(not torch.equal(x, before[key]) for key, x in a.items())
    assert any(not torch.equal(x, c[key]) for key, x in a.items())


def test_running_statistics_of_values_are_those_of_torchrl(seed):
    """Of MAPPO's paper: targets and values are normalised in the loss, by what was seen so far."""
    env = CartPole()
    agent, theirs = of_both("MAPPOLoss", env, seed)
    assert not agent.variables()["value_norm.debiasing_term"].any()  # trial runs have left no trace
    trajectory = collect(agent, env, seed)
    agent.double()
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1, chunk_rows=T * B), num_iterations=1)
    before = learner.init(*variables_of(agent))
    trajectory = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, trajectory)
    after, metrics = learner.update(before, trajectory, random.split(random.key(seed), B))
    theirs.double().reduction = "none"
    out = theirs(in_torchrls_words(trajectory, batch_of(agent, trajectory, seed)))
    torch.testing.assert_close(metrics["loss_critic"], out["loss_critic"].mean().detach(), rtol=1e-9, atol=1e-9)
    assert theirs.value_norm is not None
    for name, x in theirs.value_norm.named_buffers():
        assert (x != before.buffers[f"value_norm.{name}"]).all()
        torch.testing.assert_close(after.buffers[f"value_norm.{name}"], x.reshape(()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("per_row", [1, 2])
def test_running_statistics_of_values_are_of_the_rows_that_count(norm, per_row, seed):
    """Where as many rows of weight 0 come on each that counts: those of TorchRL without them."""
    agent = mappo_agent(norm)
    batch = batch_of(agent, collect(agent, CartPole(), seed), seed)
    size = T * B // (1 + per_row) * (1 + per_row)
    counts = torch.arange(size) % (1 + per_row) == 0
    counts = counts[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]
    rows = {name: x[:size] for name, x in batch.steps.items()} | {"weight": counts / counts.sum()}
    theirs, target = NORMS[norm](), rows["value_target"]
    theirs.update(target[counts][:, None])
    out = agent.loss(Batch(rows), random.key(seed), None)
    for name, x in theirs.named_buffers():
        if name not in ("count", "m2"):
            torch.testing.assert_close(out.buffers[f"value_norm.{name}"], x.reshape(()))
    if norm == "RunningValueNorm":
        variance = out.buffers["value_norm.m2"] / out.buffers["value_norm.count"]
        torch.testing.assert_close(variance, target[counts].var(correction=0))


@pytest.mark.parametrize("norm", NORMS)
def test_an_agent_with_running_statistics_keeps_the_contract(norm, seed):
    torch.manual_seed(seed)
    check_agent(mappo_agent(norm), CartPole(), quick=True)


def test_a_row_that_does_not_count_becomes_a_copy_of_one_that_does(seed):
    generator = torch.Generator().manual_seed(seed)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        weight = (torch.rand(50, generator=generator) < share).float()
        x = torch.arange(50.0)
        counts, found = weight > 0, _of_rows_that_count(x, weight)
        assert torch.equal(found[counts], x[counts])
        if counts.any():
            often = found.to(torch.int64).bincount(minlength=50)
            assert not often[~counts].any() and often[counts].max() - often[counts].min() <= 1


def test_explained_variance_is_that_of_the_rows_that_count(seed):
    """TorchRL's own counts resets."""
    agent = torchrl_agent(SPEC, config("ClipPPOLoss"))
    trajectory = collect(agent, CartPole(max_episode_steps=3), seed)
    keys = random.split(random.key(seed), B)
    batch = agent.prepare(trajectory, keys)
    reset = trajectory.timestep.step_type[:-1] == LAST
    assert reset.any()
    target, value = (batch.steps[x][~reset].double() for x in ("value_target", "state_value"))
    learner = Learner(agent, LearnerConfig(), num_iterations=1)
    _, metrics = learner.update(learner.init(*variables_of(agent)), trajectory, keys)
    expected = 1 - (target - value).var(correction=0) / target.var(correction=0)
    torch.testing.assert_close(metrics["explained_variance"], expected.detach())
    told = trajectory.timestep.reward[1:][~reset].double()
    torch.testing.assert_close(metrics["reward_mean"], told.mean())
    # Not only hidden behind ours.
    assert "explained_variance" not in agent.loss(batch_of(agent, trajectory, seed), random.key(seed), None).metrics
