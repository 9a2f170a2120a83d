"""TimeSteps of what a vector environment on the host answers."""

import numpy as np
import torch

from torchpod.types import MID, TimeStep, Tree


def host_timestep(
    observation: Tree,
    reset: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    raw_reward: np.ndarray | None = None,
    game_over: np.ndarray | None = None,
) -> tuple[TimeStep, np.ndarray]:
    """`env.make_timestep` in NumPy, and which episodes are over. All `[B]`; they share memory, which nobody writes to.

    For small batches NumPy is faster than torch, and it never gives Python's lock away in between, which costs an actor
    thread more than its own work when others wait for it.
    """
    last = (terminated | truncated) & ~reset
    reward = np.where(reset, 0.0, reward).astype(np.float32)
    raw = reward if raw_reward is None else np.where(reset, 0.0, raw_reward).astype(np.float32)
    over = last if game_over is None else game_over & ~reset
    columns = (
        (MID + last.astype(np.int32) - reset).astype(np.int32),  # FIRST, MID, LAST = 0, 1, 2
        reward,
        1.0 - (terminated & ~reset).astype(np.float32),
    )
    step_type, reward_, discount = map(torch.from_numpy, columns)
    extras = {"raw_reward": torch.from_numpy(raw), "game_over": torch.from_numpy(over)}
    return TimeStep(step_type, reward_, discount, observation, extras), last


def grouped_timestep(
    observation: Tree,
    reset: np.ndarray,
    reward: dict[str, np.ndarray],
    terminated: np.ndarray,
    truncated: np.ndarray,
    alive: dict[str, np.ndarray] | None = None,
) -> tuple[TimeStep, np.ndarray]:
    """`host_timestep` for groups of agents: rewards, and who is alive if agents can leave, `{group: [B, N]}`."""
    timestep, last = host_timestep(observation, reset, np.zeros(len(reset)), terminated, truncated)
    rewards = {g: torch.from_numpy(np.where(reset[:, None], 0.0, r).astype(np.float32)) for g, r in reward.items()}
    discount = {g: timestep.discount[:, None].repeat(1, r.shape[1]) for g, r in rewards.items()}
    extras: dict[str, Tree] = timestep.extras | {"raw_reward": rewards}
    if alive is not None:
        extras["alive"] = {g: torch.from_numpy(x != 0) for g, x in alive.items()}
        first = torch.from_numpy(reset)[:, None]
        discount = {g: discount[g] * (extras["alive"][g] | first) for g in rewards}
    return timestep._replace(reward=rewards, discount=discount, extras=extras), last
