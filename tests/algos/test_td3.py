"""TD3 against its paper: what it does not share with DDPG (test_ddpg.py)."""

import numpy as np
import pytest
import torch

from tests.algos.references import CONTINUOUS, ROWS, critic, perturbed, policy, rows_of, to_batch
from torchpod import random
from torchpod.agent import bind
from torchpod.algos.td3 import TD3, TD3Config
from torchpod.compile import Compiler
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import Learner, LearnerConfig
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.testing import check_agent
from torchpod.types import MID, ActorOutput, Batch, TimeStep, Trajectory


def make(seed, **config):
    return perturbed(lambda: TD3(CONTINUOUS, TD3Config(hidden=(6, 7), activation="tanh", **config)), seed)


def minibatch(seed):
    actions = {
        "action": lambda rng: rng.uniform(-1, 1, (ROWS, 2)),
        "noise": lambda rng: rng.uniform(-2, 2, (ROWS, 2)),
    }
    return rows_of(seed, **actions)


def critics(params, observation, action):
    return [critic(params, i, observation, action) for i in range(2)]


def test_losses_equal_algorithm_1(seed):
    agent, params, buffers, targets = make(seed)
    b = minibatch(seed)
    out = bind(agent, params | buffers).loss(to_batch(b), torch.zeros(3), bind(agent, targets | buffers))
    policy_loss = value_loss = 0.0
    td, clipped = [], 0
    for i in range(ROWS):
        x, y = b["observation"][i], b["next_observation"][i]
        next_action = policy(targets, y) + b["noise"][i]
        clipped += (np.abs(next_action) > 1).any()
        next_action = np.clip(next_action, -1, 1)
        target = b["reward"][i] + b["discount"][i] * min(critics(targets, y, next_action))
        errors = [target - q for q in critics(params, x, b["action"][i])]
        td.append(np.abs(errors).mean())
        value_loss += b["weight"][i] * (errors[0] ** 2 + errors[1] ** 2) / 2
        policy_loss -= b["weight"][i] * critics(params, x, policy(params, x))[0]
    assert clipped  # or the bounds would go untested
    assert out.loss["policy"].item() == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert out.loss["value"].item() == pytest.approx(value_loss, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(out.priority, td, rtol=1e-4, atol=1e-5)


def test_the_noise_of_the_targets_has_its_spread_and_bounds(seed):
    agent, *_ = make(seed, target_noise_std=0.4, target_noise_clip=0.5)
    size = 20_000
    step_type, zero = torch.full((2, size), MID, dtype=torch.int32), torch.zeros(2, size)
    trajectory = Trajectory(
        TimeStep(step_type, zero, zero, torch.zeros(2, size, 5), {}), ActorOutput(torch.zeros(1, size, 2), {}), (), ()
    )
    noise = agent.prepare(trajectory, random.split(random.key(seed), size)).steps["noise"].double()
    assert noise.shape == (1, size, 2)
    inside = noise[noise.abs() < 0.5 - 1e-6]
    assert noise.abs().max().item() == pytest.approx(0.5)
    share = inside.numel() / noise.numel()
    want = torch.special.erf(torch.tensor(0.5 / 0.4 / 2**0.5)).item()
    assert share == pytest.approx(want, abs=6 * (want * (1 - want) / noise.numel()) ** 0.5)
    assert abs((noise[0, :, 0] * noise[0, :, 1]).mean()) < 6 * 0.16 / size**0.5
    assert abs(noise.mean()) < 6 * 0.4 / noise.numel() ** 0.5


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_policy_and_targets_wait_for_the_critics(seed, interval):
    agent, params, buffers, _ = make(seed, policy_interval=interval)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1), num_iterations=10)
    state = learner.init(params, buffers)
    for step in range(1, 7):
        one = Batch({k: v[None] for k, v in to_batch(minibatch(seed + step)).steps.items()})
        after, *_ = learner.learn(state, one, learner.dealer.moments_of(one.steps), random.key(seed + step))
        due = step % interval == 0
        for name, old in state.params.items():
            moved = not torch.equal(after.params[name], old)
            assert moved if name.startswith("critics.") else moved == due, (step, name)
        for name, old in state.targets.items():
            want = torch.lerp(old, after.params[name], 0.005) if due else old
            assert torch.equal(after.targets[name], want), (step, name)
        state = after


def test_every_group_follows_its_own_loss_alone(seed):
    agent, params, buffers, targets = make(seed)
    batch = to_batch(minibatch(seed))
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    losses = bind(agent, leaves | buffers).loss(batch, torch.zeros(3), bind(agent, targets | buffers)).loss
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1, max_grad_norm=1e9), num_iterations=1)
    state = learner.init(params, buffers)._replace(targets=targets)
    state = state._replace(num_steps=torch.ones((), dtype=torch.int64))  # the next step is even: the policy moves too
    one = Batch({k: v[None] for k, v in batch.steps.items()})
    after, *_ = learner.learn(state, one, learner.dealer.moments_of(one.steps), random.key(seed))
    mu = learner.groups.by_parameter(after.mu)
    for group, names in learner.groups.names.items():
        want = torch.autograd.grad(losses[group], [leaves[name] for name in names], retain_graph=True)
        for name, gradient in zip(names, want, strict=True):
            torch.testing.assert_close(mu[name] / 0.1, gradient, rtol=1e-3, atol=1e-5)
            assert gradient.any()


@pytest.mark.slow
def test_compiled_gradients_equal_eager_ones(seed):
    agent, params, buffers, targets = make(seed)
    learner = Learner(agent, LearnerConfig(), num_iterations=1, compiler=Compiler(True))
    zero = torch.zeros((), dtype=torch.int64)
    args = params, buffers, targets, to_batch(minibatch(seed)), random.key(seed), zero, ()
    torch.testing.assert_close(learner._gradient(*args), learner._gradient_one(*args), rtol=1e-4, atol=1e-5)


def test_what_td3_cannot_do_is_refused():
    with pytest.raises(
        ValueError, match="TD3 needs a Box action with bounds, and odd has .*; use algo=dqn, ppo or sac."
    ):
        TD3(EnvSpec("odd", Array((1,)), Discrete(3)))
    with pytest.raises(ValueError, match="policy_interval=0 must be at least 1"):
        TD3(CONTINUOUS, TD3Config(policy_interval=0))


def test_td3_keeps_the_contract():
    env = Pendulum(max_episode_steps=5)
    check_agent(TD3(env.spec, TD3Config(hidden=(6,))), env, compile=False)
