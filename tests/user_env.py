"""A user's environment, in a file of its own, with faults to choose from. Tests name it as `env=PATH:MyEnv`."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from torchpod.env import HostEnv, TensorEnv
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import Tree


class MyEnv(TensorEnv):
    """Walks left and right; reward is the position.

    Args:
      limit: steps of an episode.
      fault: what goes wrong in batches of more than 4, which are training: "raise", "bad_reward", "sleep" or "hang".
      at: the step (of an episode for "bad_reward", else of the process) at which it does.
      rank: on which rank.
      marker: a file that is written when it does, so that it happens once; empty: it happens always.
    """

    def __init__(self, limit: int = 20, fault: str = "", at: int = 0, rank: int = 0, marker: str = "") -> None:
        self.spec = EnvSpec("my_env", Array((2,)), Discrete(2), limit)
        self.fault, self.at, self.marker, self.calls = fault, at, marker, 0
        if os.environ.get("RANK", "0") != str(rank):
            self.fault = ""

    def reset(self, keys: Tensor) -> Tensor:
        """`[B, 2]`: position, steps."""
        return torch.zeros(keys.shape[0], 2)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A step, or a fault."""
        position, count = state[:, 0] + 0.2 * action - 0.1, state[:, 1] + 1
        reward = torch.where(count == self.at, torch.nan, position) if self.fault == "bad_reward" else position
        if keys.shape[0] > 4:
            self.calls += 1
            if self.fault == "sleep" and self.calls > self.at:
                time.sleep(0.3)
            if self.fault == "hang" and self.calls > self.at:
                Path(self.marker).touch()
                time.sleep(60)
            if self.fault == "raise" and self.calls > self.at and not (self.marker and Path(self.marker).exists()):
                if self.marker:
                    Path(self.marker).touch()
                raise RuntimeError("the simulator lost its licence")
        return torch.stack([position, count], -1), reward, position.abs() > 10.0

    def observe(self, state: Tensor) -> Tensor:
        """Position and time."""
        return state * torch.tensor([1.0, 0.01])


class Hosted(HostEnv):
    """`MyEnv`, as an environment on the host."""

    def __init__(self, limit: int = 20, fault: str = "", at: int = 0, rank: int = 0, marker: str = "") -> None:
        super().__init__(MyEnv(limit, fault, at, rank, marker))


class Closing(MyEnv):
    """From step `at` on, its mask allows nothing."""

    def __init__(self, limit: int = 20, at: int = 0) -> None:
        super().__init__(limit, at=at)
        seen = {"x": Array((2,)), "action_mask": Array((2,), torch.bool)}
        self.spec = EnvSpec("closing", seen, Discrete(2), limit)

    def observe(self, state: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # a tree too
        """Position and time, and what may be done."""
        return {"x": super().observe(state), "action_mask": (state[:, 1:] < self.at).expand(-1, 2)}


class ClosingOfTwo(Closing):
    """The same for the second of two agents of a group alone."""

    def __init__(self, limit: int = 20, at: int = 0) -> None:
        super().__init__(limit, at)
        spec = self.spec
        self.spec = EnvSpec("closing", {"pair": spec.observation}, {"pair": Discrete(2)}, limit, groups={"pair": 2})

    def transition(self, state: Tensor, action: Tree, keys: Tensor) -> tuple[Tensor, Tree, Tensor]:
        """Both walk by the action of the first."""
        state, reward, over = super().transition(state, action["pair"][:, 0], keys)
        return state, {"pair": reward[:, None].expand(-1, 2)}, over

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        """Position and time of both, and what each may do."""
        own = super().observe(state)
        open_, closing = torch.ones_like(own["action_mask"]), own["action_mask"]
        return {"pair": {"x": own["x"][:, None].expand(-1, 2, -1), "action_mask": torch.stack([open_, closing], 1)}}


class Impolite(MyEnv):
    """Breaks the contract: rewards in the wrong precision."""

    def step(self, state, action, keys):  # noqa: ANN001, ANN201
        """See `Env.step`."""
        state, timestep = super().step(state, action, keys)
        return state, timestep._replace(reward=timestep.reward.double())


class Picky(MyEnv):
    """Needs an argument."""

    def __init__(self, size: int) -> None:
        super().__init__(limit=size)
