"""DDPG against its paper; td3 is in test_td3.py."""

import numpy as np
import pytest
import torch

from tests.algos.references import CONTINUOUS, ROWS, critic, perturbed, policy, rows_of, to_batch
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.ddpg import DDPG, DDPGConfig
from torchpod.compile import Compiler
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.testing import check_agent
from torchpod.types import FIRST, LAST, MID, ActorOutput, Batch, TimeStep, Trajectory


def make(seed, **config):
    return perturbed(lambda: DDPG(CONTINUOUS, DDPGConfig(hidden=(6, 7), activation="tanh", **config)), seed)


def minibatch(seed):
    return rows_of(seed, action=lambda rng: rng.uniform(-1, 1, (ROWS, 2)))


def test_losses_equal_the_paper(seed):
    agent, params, buffers, targets = make(seed)
    b = minibatch(seed)
    out = bind(agent, params | buffers).loss(to_batch(b), torch.zeros(3), bind(agent, targets | buffers))
    policy_loss = value_loss = 0.0
    td = []
    for i in range(ROWS):
        x, y = b["observation"][i], b["next_observation"][i]
        target = b["reward"][i] + b["discount"][i] * critic(targets, 0, y, policy(targets, y))
        td.append(target - critic(params, 0, x, b["action"][i]))
        value_loss += b["weight"][i] * td[-1] ** 2 / 2
        policy_loss -= b["weight"][i] * critic(params, 0, x, policy(params, x))
    assert out.loss["policy"].item() == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert out.loss["value"].item() == pytest.approx(value_loss, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(out.priority, np.abs(td), rtol=1e-4, atol=1e-5)
    assert out.metrics["td_error"].item() == pytest.approx(np.dot(b["weight"], np.abs(td)), rel=1e-4)


def test_every_group_follows_its_own_loss_alone(seed):
    """The loss of the policy says much to the critic, which is left out."""
    agent, params, buffers, targets = make(seed)
    batch = to_batch(minibatch(seed))
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    losses = bind(agent, leaves | buffers).loss(batch, torch.zeros(3), bind(agent, targets | buffers)).loss
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1, max_grad_norm=1e9), num_iterations=1)
    state = learner.init(params, buffers)._replace(targets=targets)
    one = Batch({k: v[None] for k, v in batch.steps.items()})
    after, _, (priority,) = learner.learn(state, one, learner.dealer.moments_of(one.steps), random.key(seed))
    mu = learner.groups.by_parameter(after.mu)
    assert priority.shape == (ROWS,)
    for group, names in learner.groups.names.items():
        found = torch.autograd.grad(losses[group], list(leaves.values()), retain_graph=True, allow_unused=True)
        want = dict(zip(leaves, found, strict=True))
        for name in names:
            torch.testing.assert_close(mu[name] / 0.1, want[name], rtol=1e-3, atol=1e-5)
            assert want[name].any()
        assert group == "value" or want["critics.0.value.weight"].any()


@pytest.mark.slow
def test_compiled_gradients_equal_eager_ones(seed):
    agent, params, buffers, targets = make(seed)
    learner = Learner(agent, LearnerConfig(), num_iterations=1, compiler=Compiler(True))
    zero = torch.zeros((), dtype=torch.int64)
    args = params, buffers, targets, to_batch(minibatch(seed)), random.key(seed), zero, ()
    torch.testing.assert_close(learner._gradient(*args), learner._gradient_one(*args), rtol=1e-4, atol=1e-5)


def test_rows_are_returns_of_n_steps(seed):
    """Three steps, of which the second row's episode has two, and the third row begins with a reset."""
    agent, *_ = make(seed, n_step=3, discount=0.9, reward_scale=0.5)
    assert agent.replayed == 3
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.full((4, 3), MID, dtype=torch.int32)
    step_type[2, 1], step_type[3, 1], step_type[0, 2], step_type[1, 2] = LAST, FIRST, LAST, FIRST
    reward, x = torch.randn(4, 3, generator=generator), torch.randn(4, 3, 5, generator=generator)
    action = torch.rand(3, 3, 2, generator=generator) * 8 - 3
    discount = torch.ones(4, 3)
    trajectory = Trajectory(TimeStep(step_type, reward, discount, x, {}), ActorOutput(action, {}), (), ())
    row = {k: v[0] for k, v in agent.prepare(trajectory, random.split(random.key(seed), 3)).steps.items()}
    r = 0.5 * reward.numpy()
    want = [r[1, 0] + 0.9 * r[2, 0] + 0.81 * r[3, 0], r[1, 1] + 0.9 * r[2, 1]]
    np.testing.assert_allclose(row["reward"][:2], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(row["discount"][:2], [0.9**3, 0.81], rtol=1e-5)
    assert torch.equal(row["next_observation"][:2], torch.stack([x[3, 0], x[2, 1]]))
    assert row["weight"].tolist() == [1, 1, 0]
    torch.testing.assert_close(row["action"], (action[0] - 1) / 4)


def actions(agent, seed, step_type, explore=True):
    """What is done `[T, B, A]` in units of the range, and what the policy alone would do, of one observation."""
    x = torch.randn(5, generator=torch.Generator().manual_seed(seed)).expand(step_type.shape[1], 5)
    zero, keys = torch.zeros(len(x)), random.split(random.key(seed), len(x))
    state, seen = agent.initial_state(len(x)), []
    with torch.no_grad():
        for t, now in enumerate(step_type):
            out, state = agent.act(TimeStep(now, zero, zero, x, {}), state, random.at(keys, t), explore)
            seen.append((out.action - 1) / 4)
    return torch.stack(seen), torch.tensor(policy(dict(agent.named_parameters()), x[0].double().detach().numpy()))


def quiet(seed, **config):
    """An agent that does almost nothing, so that no noise is cut off at the bounds."""
    agent, *_ = make(seed, **config)
    with torch.no_grad():
        agent.policy.weight.mul_(0.01)
        agent.policy.bias.mul_(0.01)
        for p in agent.parameters():
            p.requires_grad_(False)
    return agent


def test_gaussian_noise_is_new_in_every_step(seed):
    agent = quiet(seed, noise_std=0.1)
    seen, mean = actions(agent, seed, torch.full((8, 4000), MID, dtype=torch.int32))
    noise = (seen - mean).double()
    n = noise.numel()
    assert abs(noise.mean()) < 6 * 0.1 / n**0.5
    assert noise.std().item() == pytest.approx(0.1, rel=6 / (2 * n) ** 0.5)
    assert abs((noise[1:] * noise[:-1]).mean()) < 6 * 0.01 / n**0.5


def test_ou_noise_is_correlated_and_starts_again_with_every_episode(seed):
    """x' = (1 - rate) x + std n: the variance is std^2 (1 - a^2t) / (1 - a^2) after t steps, a = 1 - rate."""
    agent = quiet(seed, noise="ou", noise_std=0.1, ou_rate=0.3)
    size, length = 10_000, 12
    step_type = torch.full((length, size), MID, dtype=torch.int32)
    step_type[0], step_type[7, : size // 2] = FIRST, FIRST
    seen, mean = actions(agent, seed, step_type)
    noise, a = (seen - mean).double(), 0.7
    assert noise.abs().max() < 0.95
    begun = np.array([[t + 1 for t in range(length)], [t + 1 if t < 7 else t - 6 for t in range(length)]])
    for half, since in zip((noise[:, size // 2 :], noise[:, : size // 2]), begun, strict=True):
        want = 0.01 * (1 - a ** (2 * since)) / (1 - a**2)
        np.testing.assert_allclose(half.square().mean((1, 2)), want, rtol=6 * (2 / size) ** 0.5)
    went_on, reset = noise[:, size // 2 :], noise[:, : size // 2]
    slope = (went_on[7] * went_on[6]).mean() / went_on[6].square().mean()
    assert slope.item() == pytest.approx(a, abs=6 / size**0.5)
    assert abs((reset[7] * reset[6]).mean() / reset[6].square().mean()) < 6 / size**0.5


@pytest.mark.parametrize("noise", ["gaussian", "ou"])
def test_greedy_actions_are_the_policys_and_all_lie_in_the_box(seed, noise):
    agent, *_ = make(seed, noise=noise, noise_std=2.0)
    for p in agent.parameters():
        p.requires_grad_(False)
    step_type = torch.full((5, 100), MID, dtype=torch.int32)
    seen, mean = actions(agent, seed, step_type)
    assert (seen.abs() <= 1.0 + 1e-6).all() and (seen.abs() > 0.999).any()
    greedy, _ = actions(agent, seed, step_type, explore=False)
    torch.testing.assert_close(greedy.double(), mean.expand(greedy.shape), rtol=1e-4, atol=1e-5)


def test_the_state_of_the_noise_travels_with_the_loop(seed):
    env = Pendulum(max_episode_steps=5)
    agent = DDPG(env.spec, DDPGConfig(hidden=(6,), noise="ou"))
    keys = random.split(random.key(seed), 4)
    params, buffers = variables_of(agent)
    carry, trajectory = unroll(make_step(agent, env), params | buffers, start(agent, env, keys), keys, keys, length=3)
    assert trajectory.actor_state.shape == (4, 1) and not trajectory.actor_state.any()
    assert carry.actor_state.shape == (4, 1) and (carry.actor_state != 0).all()


def test_what_ddpg_cannot_do_is_refused():
    for action, told in (
        (Discrete(3), "use algo=dqn, ppo or sac"),
        (MultiDiscrete((3, 2)), "use algo=ppo, a2c or impala"),
        (Box((2,)), "give it finite bounds, low < high, or use algo=ppo, a2c or impala"),
        ({"a": Box((2,), -1.0, 1.0)}, "give it one Discrete, MultiDiscrete or Box action"),
    ):
        with pytest.raises(ValueError, match=f"DDPG needs a Box action with bounds, and odd has .*; {told}.$"):
            DDPG(EnvSpec("odd", Array((1,)), action))
    with pytest.raises(ValueError, match="noise=pink is not known"):
        DDPG(CONTINUOUS, DDPGConfig(noise="pink"))
    with pytest.raises(ValueError, match="n_step=0"):
        DDPG(CONTINUOUS, DDPGConfig(n_step=0))


@pytest.mark.parametrize("noise", ["gaussian", "ou"])
def test_ddpg_keeps_the_contract(noise):
    env = Pendulum(max_episode_steps=5)
    check_agent(DDPG(env.spec, DDPGConfig(hidden=(6,), noise=noise)), env, compile=False)
