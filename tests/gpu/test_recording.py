"""Episodes that are recorded on a GPU, beside the same actions on the CPU.

Without a GPU the same code records on the CPU.
"""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random, recording
from torchpod.agent import Agent, variables_of
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.envs import CovidEconomy, TagContinuous, TagGridWorld
from torchpod.recording import arrays_of, record_episode

GAMES = {
    "gridworld": lambda: TagGridWorld(4, 6, start="uniform", max_episode_steps=70),
    "continuous": lambda: TagContinuous(2, 6, 5.0, num_other_agents_observed=3, max_episode_steps=70),
    "covid": lambda: CovidEconomy(70),
}
"""Longer than the steps after which one looks whether the episode is over."""


class Again(Agent):
    """Takes actions `[T, 1, ...]` that were recorded, and after them the last."""

    def __init__(self, agent, actions):
        super().__init__()
        self.agent, self.actions, self.count = agent, actions, 0

    def initial_state(self, batch_size):
        return self.agent.initial_state(batch_size)

    def act(self, timestep, state, keys, explore=True):
        output, state = self.agent.act(timestep, state, keys, explore)
        action = pytree.tree_map(lambda x: x[min(self.count, len(x) - 1)], self.actions)
        self.count += 1
        return output._replace(action=action), state


def play(agent, env, seed, device):
    """An episode with actions that are drawn on the device."""
    params, buffers = variables_of(agent)
    variables = {name: x.to(device) for name, x in (params | buffers).items()}
    return record_episode(agent.to(device), env, variables, random.key(seed, device), num_episodes=2, explore=True)


def record(game, seed, device, monkeypatch):
    """On the device and then, with the actions of that, on the CPU."""
    torch.manual_seed(seed)
    env, moved, to_cpu = GAMES[game](), [], recording._cat
    agent = IPPO(env.spec, IPPOConfig(hidden=(8,)))

    def watched(parts):
        moved.append({x.device.type for x in pytree.tree_leaves(parts)})
        return to_cpu(parts)

    with monkeypatch.context() as patch:
        patch.setattr(recording, "_cat", watched)
        found = play(agent, env, seed, device)
    assert moved == [{device}, {device}]  # once, of all steps: what was seen, and what was done
    assert not any(x.is_cuda for x in pytree.tree_leaves(found))

    again = play(Again(agent.to("cpu"), found.action), env, seed, "cpu")
    on_device, on_cpu = arrays_of(env, found), arrays_of(env, again)
    assert on_device.keys() == on_cpu.keys() and any(name.startswith("state/") for name in on_cpu)
    for name, expected in on_cpu.items():
        if name.endswith("action_log_prob"):  # of the action that was drawn
            continue
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(on_device[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(on_device[name], expected, err_msg=name)


@pytest.mark.parametrize("game", GAMES)
def test_recorded_actions_lead_through_the_same_episode_again(game, seed, monkeypatch):
    record(game, seed, "cpu", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("game", GAMES)
def test_an_episode_stays_on_the_device_and_is_the_one_of_the_cpu(game, seed, monkeypatch):
    record(game, seed, "cuda", monkeypatch)
