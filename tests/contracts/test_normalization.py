"""Statistics of observations and returns: of everything seen, and the same however the run is cut up."""

import numpy as np
import pytest
import torch

from torchpod.agent import variables_of
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.evaluate import evaluate
from torchpod.learner import Learner, LearnerConfig
from torchpod.nets import RunningMoments
from torchpod.ops.moments import merge, sums_about
from torchpod.random import key
from torchpod.testing import check_agent
from torchpod.types import FIRST, LAST

BOTH = {"normalize_observation": True, "normalize_reward": True}


def make(config, env, *, num_envs=8, length=16, iterations=5, **options):
    return Anakin(
        lambda: PPO(env.spec, config),
        env,
        num_envs=num_envs,
        unroll_length=length,
        learner=LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=3e-3, anneal_learning_rate=False),
        num_iterations=iterations,
        compiler=Compiler(**({"enabled": False} | options)),
    )


def test_the_statistics_are_those_of_everything_that_was_seen(seed):
    anakin = make(PPOConfig(hidden=(8,), **BOTH), CartPole(max_episode_steps=30))
    state = anakin.init(seed)
    observations, returns, total = [], [], np.zeros(8)
    for _ in range(5):
        _, trajectory = anakin.rollout(state)
        state, _ = anakin.iterate(state)
        timestep = trajectory.timestep
        observations.append(timestep.observation[:-1].double().numpy())
        for t in range(16):
            total = np.where(timestep.step_type[t] == FIRST, 0.0, 0.99 * total) + timestep.reward[t].double().numpy()
            real = (timestep.step_type[t] != LAST).numpy()
            returns += (0.99 * total + timestep.reward[t + 1].double().numpy())[real].tolist()
        buffers = state.learner.buffers
        seen = np.concatenate(observations).reshape(-1, 4)
        assert buffers["return_moments.total"] == len(returns)
        np.testing.assert_allclose(buffers["normalizer.moments.observation.mean"], seen.mean(0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(buffers["normalizer.moments.observation.variance"], seen.var(0), rtol=1e-9)
        np.testing.assert_allclose(buffers["return_moments.variance"], np.var(returns), rtol=1e-5)
    assert len(returns) < len(seen)  # resets are observations, but no steps
    assert np.max(returns) > 10  # whole episodes were added up, over several unrolls


def test_what_never_changed_is_not_enlarged():
    """A reward that comes for the first time in the second iteration, when all so far were 0."""
    moments = RunningMoments((2,))
    seen = torch.tensor([[0.0, 1.0], [0.0, 5.0]])
    moments.load_state_dict(merge(moments.moments, sums_about(moments.mean, seen))._asdict())
    torch.testing.assert_close(moments.std, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("recurrent", [pytest.param(0, marks=pytest.mark.slow), 6])
def test_an_agent_that_normalises_keeps_the_contract(recurrent):
    env = CartPole(max_episode_steps=7)
    check_agent(PPO(env.spec, PPOConfig(hidden=(8,), recurrent=recurrent, **BOTH)), env)


@pytest.mark.slow
def test_compiled_populations_keep_statistics_of_their_own(seed):
    config, env = PPOConfig(hidden=(8,), **BOTH), CartPole(max_episode_steps=7)
    compiled = make(config, env, enabled=True, population=2)
    *_, (_, program) = train(compiled, compiled.init(seed))
    got = program.state.learner.buffers
    for p in range(2):
        alone = make(config, env)
        *_, (_, program) = train(alone, alone.init(seed + p))
        for name, value in program.state.learner.buffers.items():
            torch.testing.assert_close(got[name][p], value, rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_is_not_added(seed):
    env = CartPole()
    agent = PPO(env.spec, PPOConfig(hidden=(8,), **BOTH))
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1), num_iterations=1)
    anakin = make(agent.config, env)
    state = anakin.init(seed)
    _, trajectory = anakin.rollout(state)
    broken = trajectory._replace(
        timestep=trajectory.timestep._replace(observation=trajectory.timestep.observation * float("nan"))
    )
    before = learner.init(*variables_of(agent))
    after, _ = learner.update(before, broken, state.learner_keys)
    assert not after.healthy
    for name, value in before.buffers.items():
        assert torch.equal(after.buffers[name], value)


class Disguised(CartPole):
    """Observations far from 0 and hardly different from each other; large rewards."""

    def transition(self, state, action, keys):
        state, reward, terminated = super().transition(state, action, keys)
        return state, 1000 * reward, terminated

    def observe(self, state):
        return 30 + 0.03 * state


@pytest.mark.slow
def test_it_learns_what_is_badly_scaled_where_it_could_not_without():
    env, returns = Disguised(max_episode_steps=200), {}
    for name, options in (("normalised", BOTH), ("raw", {})):
        anakin = make(PPOConfig(hidden=(32,), **options), env, num_envs=32, length=32, iterations=60)
        *_, (_, program) = train(anakin, anakin.init(0), iterations_per_call=20)
        learner = program.state.learner
        score = evaluate(anakin.agent, env, learner.params | learner.buffers, key(7), num_episodes=20)
        returns[name] = score.returns.mean() / 1000
    print(returns)
    assert returns["normalised"] > 150 > 100 > returns["raw"]
