"""An environment that overrides `step` and keeps what `TensorEnv` adds to its state."""

import torch

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.specs import Array, Box, EnvSpec
from torchpod.types import LAST, MID


class Boat(TensorEnv):
    """Row to the buoy at 0; where the chart ends, so does the episode."""

    spec = EnvSpec(
        "boat", {"place": Array((2,)), "current": Array((2,))}, Box((2,), -1.0, 1.0), 50, truncates_early=True
    )

    def reset(self, keys):
        place, current = random.uniform(keys, 4, -1.0, 1.0).split(2, -1)
        return {"place": place, "current": 0.05 * current}

    def transition(self, state, action, keys):
        place = state["place"] + state["current"] + 0.2 * action.clamp(-1, 1)
        distance = place.norm(dim=-1)
        return state | {"place": place}, -distance, distance < 0.1

    def observe(self, state):
        return state

    def step(self, state, action, keys):
        (inner, count, _), timestep = super().step(state, action, keys)
        cut = (inner["place"].abs() > 2).any(-1) & (timestep.step_type == MID)
        step_type = torch.where(cut, LAST, timestep.step_type)
        extras = timestep.extras | {"game_over": step_type == LAST}
        return (inner, count, step_type == LAST), timestep._replace(step_type=step_type, extras=extras)
