"""Gradients through environment steps: `unroll(grad=True)` on Pendulum."""

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, variables_of
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.rollout import make_step, start, unroll
from torchpod.types import FIRST, ActorOutput

B = 5


class Controller(Agent):
    """Torque `1.5 tanh(w x + b) + noise`, well inside the limits of the motor."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def act(self, timestep, state, keys, explore=True):
        noise = random.uniform(keys, 1, -0.2, 0.2) if explore else 0.0
        return ActorOutput(1.5 * torch.tanh(self.net(timestep.observation)) + noise, {}), state


def double(tree):
    return pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, tree)


def setting(seed, **env):
    torch.manual_seed(seed)
    env, agent = Pendulum(**env), Controller().double()
    env_keys, actor_keys = (random.split(random.key(seed + i), B) for i in range(2))
    carry = double(start(agent, env, env_keys))
    return make_step(agent, env), variables_of(agent)[0], carry, env_keys, actor_keys


def total_reward(step, params, carry, env_keys, actor_keys, length=3, grad=True):
    _, trajectory = unroll(step, params, carry, env_keys, actor_keys, length=length, grad=grad)
    return trajectory.timestep.reward[1:].sum()


def test_gradient_through_three_steps_equals_finite_differences(seed):
    step, params, carry, *keys = setting(seed)
    gradient = torch.func.grad(lambda p: total_reward(step, p, carry, *keys))(params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    plain = torch.autograd.grad(total_reward(step, leaves, carry, *keys), list(leaves.values()))
    size = 1e-6
    for (name, value), other in zip(gradient.items(), plain, strict=True):
        torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-12)
        for i in range(value.numel()):
            nudge = torch.zeros(value.numel(), dtype=torch.float64)
            nudge[i] = size
            up, down = (
                total_reward(step, params | {name: params[name] + sign * nudge.view_as(value)}, carry, *keys)
                for sign in (1, -1)
            )
            torch.testing.assert_close(value.flatten()[i], (up - down) / (2 * size), rtol=1e-5, atol=1e-7)
        assert (value != 0).all()


def test_gradient_reaches_the_state_three_steps_before(seed):
    step, params, carry, *keys = setting(seed)

    def last_angle(state):
        inner, *rest = carry.env_state
        moved = carry._replace(env_state=(state, *rest))
        after, _ = unroll(step, params, moved, *keys, length=3, grad=True)
        return after.env_state[0][:, 0].sum()

    state = carry.env_state[0]
    gradient = torch.func.grad(last_angle)(state)
    nudge = torch.zeros_like(state)
    nudge[1, 1] = 1e-6
    slope = (last_angle(state + nudge) - last_angle(state - nudge)) / 2e-6
    torch.testing.assert_close(gradient[1, 1], slope, rtol=1e-5, atol=1e-7)
    assert gradient[1, 1] > 0.1  # 0.05 s per step at least


def test_no_gradient_crosses_a_reset(seed):
    step, params, carry, *keys = setting(seed, max_episode_steps=2)
    state = carry.env_state[0].clone().requires_grad_()
    moved = carry._replace(env_state=(state, *carry.env_state[1:]))
    after, trajectory = unroll(step, params, moved, *keys, length=5, grad=True)
    assert (trajectory.timestep.step_type[3] == FIRST).all()
    (before,) = torch.autograd.grad(trajectory.timestep.reward[2].sum(), state, retain_graph=True)
    (behind,) = torch.autograd.grad(trajectory.timestep.reward[4:].sum(), state)
    assert (before != 0).any() and (behind == 0).all()


def test_without_grad_nothing_is_kept(seed):
    step, params, carry, *keys = setting(seed)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    assert not total_reward(step, leaves, carry, *keys, grad=False).requires_grad
    assert total_reward(step, leaves, carry, *keys, grad=True).requires_grad
