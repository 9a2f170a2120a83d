"""One whole episode of one environment, recorded where it runs: what `torchpod eval RUN --episode FILE` writes.

The file is read with NumPy alone, `numpy.load(FILE)`. With T steps, and N agents where there are groups:

| name | array |
|---|---|
| `step_type` | `[T + 1]`, 0 first, 1 middle, 2 last |
| `observation`, `reward`, `discount` | `[T + 1, ...]`; of groups `reward/GROUP` `[T + 1, N]` and so on |
| `raw_reward`, `game_over`, and what else is in `TimeStep.extras`, e.g. `alive/GROUP` `[T + 1, N]` | `[T + 1, ...]` |
| `action`, or `action/GROUP` | `[T, ...]`; the t-th led from the t-th row of all else to the next |
| `agent/NAME`, or `agent/POLICY/NAME`: what the agent says besides, e.g. `action_log_prob` | `[T, ...]` |
| `state`, or `state/FIELD` | `[T + 1, ...]`, the tensor environment's own state, behind its transforms |

`agent` is missing where somebody else plays (`--instead`).
Entries of dicts are named likewise, `observation/governor/action_mask`. Row 0 is the start of the episode.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables
from torchpod.env import Env
from torchpod.envs.transforms import innermost
from torchpod.evaluate import MAX_STEPS
from torchpod.files import replacing
from torchpod.metrics import short
from torchpod.rollout import make_step, start
from torchpod.types import FIRST, TimeStep, Tree

_CHUNK = 64
"""After so many steps one looks whether the episode is over."""


class Recording(NamedTuple):
    """An episode of T steps, on the CPU."""

    timestep: TimeStep
    """`[T + 1, 1, ...]`."""
    action: Tree
    """`[T, 1, ...]`."""
    said: Tree
    """`[T, 1, ...]`, the `extras` of the agent."""
    env_state: Tree
    """`[T + 1, 1, ...]`; () of a host environment."""

    @property
    def rewards(self) -> Tensor:
        """`[T + 1]`, raw; of groups the sum over groups of the mean over agents, as `evaluate` counts."""
        leaves = pytree.tree_leaves(self.timestep.extras["raw_reward"])
        return torch.stack([x.flatten(1).mean(1) for x in leaves]).sum(0)


def record_episode(
    agent: Agent, env: Env, variables: Variables, key: Tensor, *, num_episodes: int, explore: bool = False
) -> Recording:
    """The first episode that `evaluate` plays with the same arguments.

    A tensor environment stays on its device until the episode is over; the host only looks, now and then, whether it
    is.

    Args:
      agent: the agent; only its methods are used.
      env: any environment.
      variables: parameters and buffers of one agent.
      key: `[3]`.
      num_episodes: of the evaluation.
      explore: as in `evaluate`.
    """
    size = getattr(env, "rows_each", 1)  # of which the first is recorded
    env_keys, actor_keys = (random.split(k, max(num_episodes, size))[:size] for k in random.split(key, 2))
    step, limit = make_step(agent, env, explore=explore), env.spec.max_episode_steps or MAX_STEPS
    every = _CHUNK if env.traits.pure else 1  # a host environment would go on, and may reuse its memory

    def shown(carry: Any) -> tuple[TimeStep, Tree]:
        return carry.timestep, () if carry.env_state is None else carry.env_state

    with torch.no_grad():
        carry = start(agent, env, env_keys)
        seen, acted, moved, over = [_stack([shown(carry)])], [], 0, False
        while moved < limit and not over:
            rows, actions = [], []
            for _ in range(min(every, limit - moved)):
                carry, output = step(variables, carry, env_keys, actor_keys)
                rows.append(shown(carry))
                actions.append((output.action, output.extras))
            seen.append(_stack(rows))
            acted.append(_stack(actions))
            moved += int((seen[-1][0].step_type != FIRST).sum())  # the reset between two lives is no step
            over = bool(seen[-1][0].extras["game_over"].any())
    (timestep, env_state), decided = (_cat(parts) for parts in (seen, acted))
    ends = timestep.extras["game_over"].flatten().nonzero().flatten().tolist()
    length = ends[0] if ends else len(timestep.step_type) - 1
    whole = pytree.tree_map(lambda x: x[: length + 1], (timestep, env_state))
    action, said = pytree.tree_map(lambda x: x[:length], decided)
    return Recording(whole[0], action, said, whole[1])


def check_recording(path: Path) -> None:
    """Refuses a file that is not to be written, before anything is played.

    Raises:
      ValueError: if the suffix is another.
    """
    if path.suffix != ".npz":
        raise ValueError(f"{path} has the suffix {path.suffix or 'none'!r}; use .npz, which numpy.load reads.")


def save_recording(path: Path, env: Env, recording: Recording) -> str:
    """Writes the arrays of an episode, see the module; returns a line that says what is in the file.

    Raises:
      ValueError: if the environment uses a name of the table for something of its own.
      OSError: if the file cannot be written, which it names.
    """
    arrays = arrays_of(env, recording)
    with replacing(path) as part, open(part, "wb") as file:  # of a name numpy would change the suffix
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]: no array is named allow_pickle
    length = recording.timestep.step_type.shape[0] - 1
    return f"{path}: {length} steps in {len(arrays)} arrays, return {short(float(recording.rewards.sum()))}"


def arrays_of(env: Env, recording: Recording) -> dict[str, NDArray[Any]]:
    """By name, without the axis of environments."""
    t = recording.timestep
    tree: dict[str, Tree] = {
        "step_type": t.step_type,
        "observation": t.observation,
        "reward": t.reward,
        "discount": t.discount,
        "action": recording.action,
        "agent": recording.said,
        "state": innermost(env, recording.env_state)[1] if env.traits.pure else (),
    }
    for name, value in t.extras.items():
        if name in tree:
            raise ValueError(f"extras[{name!r}] of {env.spec.name} has the name of another array; rename it.")
        tree[name] = value
    return {
        "/".join(str(_name(key)) for key in path): (x.float() if x.dtype == torch.bfloat16 else x)[:, 0].numpy()
        for path, x in pytree.tree_flatten_with_path(tree)[0]
    }


def _name(key: Any) -> Any:
    """Of a field, an entry or a place."""
    return next(getattr(key, kind) for kind in ("name", "key", "idx") if hasattr(key, kind))


def _stack(rows: list[Any]) -> Any:
    """Of the first environment."""
    return pytree.tree_map(lambda *xs: torch.stack([x[:1] for x in xs]), *rows)


def _cat(parts: list[Any]) -> Any:
    return pytree.tree_map(lambda *xs: torch.cat(xs).cpu(), *parts)
