"""APG and SHAC against their papers: losses by a loop in NumPy, who feels which gradient."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.apg import APG, APGConfig
from torchpod.algos.shac import SHAC, SHACConfig
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.point_mass import PointMass
from torchpod.rollout import make_step, start, unroll
from torchpod.testing import check_agent
from torchpod.types import FIRST, LAST, MID

T, B = 9, 3


def make(cls, seed, **config):
    """An agent whose heads are not almost zero, as they are at the start."""
    torch.manual_seed(seed)
    agent = cls(Pendulum().spec, {APG: APGConfig, SHAC: SHACConfig}[cls](hidden=(6, 7), **config))
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return agent


def trajectory_of(agent, seed):
    """Nine steps that begin in the middle of an episode, at a reset, and at a start; one episode terminates."""
    env, keys = Pendulum(max_episode_steps=50), random.split(random.key(seed), B)
    _, trajectory = unroll(make_step(agent, env), {}, start(agent, env, keys), keys, keys, length=T)
    kinds = torch.full((T + 1, B), MID)
    kinds[4, 0], kinds[5, 0] = LAST, FIRST  # truncated
    kinds[0, 1], kinds[1, 1], kinds[7, 1], kinds[8, 1] = LAST, FIRST, LAST, FIRST  # terminated
    kinds[0, 2], kinds[T, 2] = FIRST, LAST
    discount = torch.ones(T + 1, B)
    discount[7, 1] = 0.0
    reward = trajectory.timestep.reward.masked_fill(kinds == FIRST, 0.0)
    return trajectory._replace(
        timestep=trajectory.timestep._replace(step_type=kinds.int(), discount=discount, reward=reward)
    )


def reference_policy_loss(t, gamma, value):
    """Eq. 5 of SHAC for each stretch of an episode in the unroll; with values of zero, that is APG."""
    kinds, reward, discount = t.step_type.numpy(), t.reward.double().numpy(), t.discount.double().numpy()
    total = 0.0
    for b in range(B):
        factor = 1.0
        for i in range(T):
            if kinds[i, b] == LAST:
                factor = 1.0  # a reset
                continue
            total -= factor * reward[i + 1, b]
            factor *= gamma * discount[i + 1, b]
            if kinds[i + 1, b] == LAST or i + 1 == T:
                total -= factor * value[i + 1, b]
    return total


def reference_td_lambda(t, gamma, lambda_, value):
    """Eq. 7 of SHAC as a recursion: `y_t = r + gamma ((1 - lambda) V(s_{t+1}) + lambda y_{t+1})`."""
    kinds, reward, discount = t.step_type.numpy(), t.reward.double().numpy(), t.discount.double().numpy()
    target = np.zeros((T, B))
    for b in range(B):
        for i in reversed(range(T)):
            ends = kinds[i + 1, b] == LAST or i + 1 == T
            beyond = value[i + 1, b] if ends else (1 - lambda_) * value[i + 1, b] + lambda_ * target[i + 1, b]
            target[i, b] = reward[i + 1, b] + gamma * discount[i + 1, b] * beyond
    return target


def test_apg_loss_equals_the_discounted_return(seed):
    agent = make(APG, seed, discount=0.9)
    trajectory = trajectory_of(agent, seed)
    loss = agent.loss(agent.prepare(trajectory, torch.zeros(B, 3)), torch.zeros(3), None).loss
    expected = reference_policy_loss(trajectory.timestep, 0.9, np.zeros((T + 1, B)))
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_shac_losses_equal_the_paper(seed):
    agent, old = make(SHAC, seed, discount=0.9, lambda_=0.8), make(SHAC, seed + 1)
    trajectory = trajectory_of(agent, seed)
    target = bind(old, dict(old.named_parameters()))
    loss = agent.loss(agent.prepare(trajectory, torch.zeros(B, 3)), torch.zeros(3), target).loss
    t = trajectory.timestep
    with torch.no_grad():
        value, own = (a.value_of(t.observation).double().numpy() for a in (old, agent))
    assert loss["policy"].item() == pytest.approx(reference_policy_loss(t, 0.9, value), rel=1e-4)
    error = own[:-1] - reference_td_lambda(t, 0.9, 0.8, value)
    expected = 0.5 * (error**2 * (t.step_type[:-1] != LAST).numpy()).sum()
    assert loss["value"].item() == pytest.approx(expected, rel=1e-4)


def test_the_critic_feels_no_gradient_of_the_policys_loss_nor_the_trajectory_one_of_the_critics(seed):
    agent = make(SHAC, seed)
    trajectory = trajectory_of(agent, seed)
    params, buffers = variables_of(agent)

    def losses(params, observation, reward):
        timestep = trajectory.timestep._replace(observation=observation, reward=reward)
        bound = bind(agent, params | buffers)
        batch = bound.prepare(trajectory._replace(timestep=timestep), torch.zeros(B, 3))
        return bound.loss(batch, torch.zeros(3), bind(agent, variables_of(agent)[0] | buffers)).loss

    arguments = params, trajectory.timestep.observation, trajectory.timestep.reward
    by_policy = torch.func.grad(lambda *a: losses(*a)["policy"], argnums=(0, 1, 2))(*arguments)
    by_value = torch.func.grad(lambda *a: losses(*a)["value"], argnums=(0, 1, 2))(*arguments)
    assert not any(g.any() for g in by_policy[0].values()) and by_policy[1].any() and by_policy[2].any()
    assert by_value[0]["value.weight"].any() and not by_value[1].any() and not by_value[2].any()
    # values count where an episode or the unroll ends: at T, and at the truncation of environment 0
    felt = by_policy[1].abs().sum(-1) > 0
    assert felt.nonzero().tolist() == [[4, 0], [T, 0], [T, 1], [T, 2]]


@pytest.mark.parametrize(
    "env", [Pendulum(max_episode_steps=10), PointMass(max_episode_steps=10)], ids=["pendulum", "mass"]
)
def test_apg_and_shac_keep_the_contract(env):
    """A deterministic APG and a noisy SHAC; what a step does is compiled in tests/test_through_env.py."""
    check_agent(APG(env.spec, APGConfig(hidden=(8,))), env, unroll_length=16, compile=False)
    check_agent(SHAC(env.spec, SHACConfig(hidden=(8,))), env, unroll_length=16, compile=False)


def test_actions_stay_within_their_range_and_noise_follows_log_std(seed):
    agent = make(APG, seed, initial_log_std=-1.0)
    keys = random.split(random.key(seed), 4000)
    _, timestep = Pendulum().init(keys[:1])
    timestep = pytree.tree_map(lambda x: x.expand(4000, *x.shape[1:]), timestep)
    raw = (agent.act(timestep, (), keys)[0].action / 2).atanh()
    assert agent.log_std is not None
    mean = (agent.act(timestep, (), keys, False)[0].action / 2).atanh()
    assert (raw - mean).mean().abs() < 0.05 * agent.log_std.exp()
    torch.testing.assert_close((raw - mean).std(), agent.log_std.exp()[0], rtol=0.05, atol=0)


@pytest.mark.parametrize("cls", [APG, SHAC])
def test_discrete_actions_are_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__} needs one Box action, which has gradients, and cartpole has"):
        cls(CartPole().spec)
