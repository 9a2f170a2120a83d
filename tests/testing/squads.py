"""Groups of agents, and timesteps that are altered, for tests of `check_env`."""

from typing import Any

import torch

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.specs import Array, Box, Discrete, EnvSpec


class Altered(TensorEnv):
    """Before an environment: its timesteps go through `self.change`."""

    change: Any

    def init(self, keys):
        state, timestep = super().init(keys)
        return state, self.change(timestep)

    def step(self, state, action, keys):
        state, timestep = super().step(state, action, keys)
        return state, self.change(timestep)


class Squad(TensorEnv):
    """Two kinds of agents, three scouts with four actions, one of which is never allowed, and a tank with a box."""

    def __init__(self):
        observation = {
            "scouts": {"place": Array((2,)), "action_mask": Array((4,), torch.bool)},
            "tank": Array((3,)),
        }
        action = {"scouts": Discrete(4), "tank": Box((2,), -1.0, 1.0)}
        self.spec = EnvSpec("squad", observation, action, 6, groups={"scouts": 3, "tank": 1})

    def reset(self, keys):
        return random.uniform(keys, 6).reshape(-1, 3, 2)

    def transition(self, state, action, keys):
        state = state + action["scouts"][..., None] + action["tank"]
        return state, {"scouts": state[..., 0], "tank": state.sum((1, 2))[:, None]}, state[:, 0, 0] > 9

    def observe(self, state):
        mask = torch.tensor([True, True, False, True], device=state.device).expand(*state.shape[:2], 4)
        return {"scouts": {"place": state, "action_mask": mask}, "tank": state[:, :1, :1].expand(-1, -1, 3).clone()}
