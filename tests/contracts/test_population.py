"""A population of 8: each member is its single run."""

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import LearnerConfig
from torchpod.types import Tree

P = 8
# A large epsilon keeps Adam from turning the ulps of a small gradient into a whole step.
GENTLE = {"learning_rate": 1e-3, "epsilon": 1e-3}


def make(population=P, compile=False, **learner):
    env = CartPole(max_episode_steps=6)
    return Anakin(
        lambda: PPO(env.spec, PPOConfig(hidden=(8,))),
        env,
        num_envs=4,
        unroll_length=8,
        learner=LearnerConfig(**({"num_epochs": 2, "num_minibatches": 2, "learning_rate": 1e-2} | learner)),
        num_iterations=4,
        compiler=Compiler(enabled=compile, population=population),
    )


def run(anakin, state, iterations=2):
    history = []
    for report, replay in train(anakin, state, until=iterations):
        history.append(report)
        state = replay.state
    return state, history


def member(tree: Tree, p: int) -> Tree:
    return pytree.tree_map(lambda x: x[p], tree)


def assert_equal(a: Tree, b: Tree) -> None:
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), a, b)


def test_every_member_equals_its_single_run_to_the_bit(seed):
    population, single = make(), make(population=1)
    state, reports = run(population, population.init(seed))
    for p in range(P):
        alone, alone_reports = run(single, single.init(seed + p))
        assert_equal(member(state, p), alone)
        for together, one in zip(reports, alone_reports, strict=True):
            assert_equal(member(together.metrics, p), one.metrics)
    assert len({tuple(w.flatten().tolist()) for w in state.learner.params["policy.weight"]}) == P


def test_members_may_be_any_seeds(seed):
    seeds = [seed + 5, seed, seed + 100, 1, 2, 3, 4, 5]
    population, single = make(), make(population=1)
    state = population.init(0, members=seeds)
    for p in (0, 2, 3):
        assert_equal(member(state, p), single.init(seeds[p]))


def test_members_differ_in_learning_rate_and_discount_as_asked(seed):
    population = make()
    rates, discounts = torch.linspace(1e-3, 1e-1, P), torch.linspace(0.5, 0.99, P)
    state = population.init(seed, members=[seed] * P)
    state = state._replace(
        learner=state.learner._replace(
            learning_rate={"loss": rates}, buffers=state.learner.buffers | {"discount": discounts}
        )
    )
    state, _ = run(population, state)
    for p in (0, 3, 7):
        single = make(population=1, learning_rate=float(rates[p]))
        alone = single.init(seed)
        buffers = alone.learner.buffers | {"discount": discounts[p]}
        alone, _ = run(single, alone._replace(learner=alone.learner._replace(buffers=buffers)))
        assert_equal(member(state, p), alone)
    assert not torch.equal(state.learner.params["policy.weight"][0], state.learner.params["policy.weight"][1])


def test_a_member_with_a_broken_gradient_stops_alone(seed):
    population = make()
    state = population.init(seed)
    state.learner.buffers["reward_scale"][3] = float("nan")
    after, _ = run(population, state)
    assert after.learner.healthy.tolist() == [p != 3 for p in range(P)]
    assert_equal(member(after.learner.params, 3), member(state.learner.params, 3))
    single = make(population=1)
    assert_equal(member(after, 4), run(single, single.init(seed + 4))[0])


@pytest.fixture(scope="module")
def compiled():
    return make(compile=True, **GENTLE)


@pytest.mark.slow
def test_the_compiled_population_agrees_with_eager_for_one_iteration(seed, compiled):
    """Actions and steps equal, other floats to 1e-5, parameters to 1e-5 after 4 steps of Adam."""
    eager = make(**GENTLE)
    start = eager.init(seed)
    _, want = eager.rollout(start)
    _, got = compiled.rollout(start)
    assert_equal(got.timestep.step_type, want.timestep.step_type)
    assert_equal(got.output.action, want.output.action)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    after, metrics = eager.iterate(start)
    compiled_after, compiled_metrics = compiled.iterate(start)
    for name, value in metrics.items():
        torch.testing.assert_close(compiled_metrics[name], value, rtol=1e-3, atol=1e-5)
    for name, value in after.learner.params.items():
        torch.testing.assert_close(compiled_after.learner.params[name], value, rtol=0, atol=1e-5)
    moved = [(value - start.learner.params[name]).flatten(1) for name, value in after.learner.params.items()]
    assert torch.cat(moved, 1).abs().amax(1).min() > 1e-3  # of every member; a hundred times the tolerance
    assert_equal(compiled_after.env_steps, after.env_steps)
    run(compiled, start)  # a second iteration compiles nothing
