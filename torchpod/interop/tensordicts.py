"""Trajectories as TensorDicts with TorchRL's keys, and back: what crosses a boundary (docs/design.md section 3).

| key | shape | from |
|---|---|---|
| `observation` | `[B, T, ...]`, nested if it is a dict | `timestep.observation` |
| `action` | `[B, T]` or `[B, T, A]` | `output.action` |
| `action_log_prob`, ... | `[B, T, ...]` | `output.extras` |
| `state_value` | `[B, T, 1]` | `output.extras` |
| `reward` | `[B, T, 1]` | `timestep.reward` |
| `done`, `terminated`, `truncated`, `is_init` | `[B, T, 1]` bool | `timestep.step_type`, `timestep.discount` |
| `step_type`, `discount`, `raw_reward`, `game_over`, ... | `[B, T, ...]` | `timestep` |

`("next", key)` is there for everything of a timestep, one step later. A row whose `done` is True is the reset between
two episodes, no transition: mask it. Except for the four booleans nothing is copied: `observation` and
`("next", "observation")` are views of the same memory. A buffer of TorchRL's holds them so in a ListStorage; a
LazyTensorStorage copies.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.types import FIRST, LAST, ActorOutput, TimeStep, Trajectory, Tree

if TYPE_CHECKING:
    from tensordict import TensorDict

_COLUMNS = ("reward", "state_value")
"""What TorchRL wants with an axis of size 1 at the end."""
_DERIVED = ("done", "terminated", "truncated", "is_init")


def to_tensordict(trajectory: Trajectory) -> "TensorDict":
    """The steps of a trajectory, batch size `[B, T]`, without the recurrent states.

    Args:
      trajectory: `timestep [T + 1, B, ...]`, `output [T, B, ...]`.

    Raises:
      ValueError: if the agent or the environment uses a name of the table above for something of its own.
    """
    from tensordict import TensorDict  # its import takes a second, which runs without it need not wait

    timestep, output = trajectory.timestep, trajectory.output
    length, size = timestep.step_type.shape[0] - 1, timestep.step_type.shape[1]
    done = timestep.step_type == LAST
    alive = torch.stack([d.reshape(length + 1, size, -1).amax(-1) for d in pytree.tree_leaves(timestep.discount)])
    terminated = done & (alive.amax(0) == 0)
    entries: dict[str, Tree] = {
        **{name: value for name, value in timestep._asdict().items() if name != "extras"},
        "done": done,
        "terminated": terminated,
        "truncated": done & ~terminated,
        "is_init": timestep.step_type == FIRST,
    }
    chosen: dict[str, Tree] = {"action": output.action}
    for target, extras, whose in ((entries, timestep.extras, "environment"), (chosen, output.extras, "agent")):
        for name, value in extras.items():
            if name in entries or name in chosen or name == "next":
                raise ValueError(f"the {whose}'s extras[{name!r}] has the name of a key of TorchRL; choose another.")
            target[name] = value

    def shifted(start: int) -> dict[str, Tree]:
        return {name: _map(name, lambda x: x[start : start + length], value) for name, value in entries.items()}

    steps = shifted(0) | {name: _map(name, lambda x: x, value) for name, value in chosen.items()}
    return TensorDict({**steps, "next": shifted(1)}, batch_size=[size, length])


def to_trajectory(
    parts: "Sequence[TensorDict] | TensorDict",
    actor_state: Tree = (),
    last_actor_state: Tree = (),
    *,
    device: torch.device | None = None,
) -> Trajectory:
    """The trajectory of all environments of several TensorDicts, each from `to_tensordict`.

    One part that is on `device` already is not copied: what comes back are views of the same memory. Several are
    copied once, side by side; so are timesteps whose `next` does not lie one step behind them in the same memory, as
    in a TensorDict whose values were copied.

    Args:
      parts: batch sizes `[B_0, T]`, `[B_1, T]`, ...; one alone needs no list.
      actor_state: recurrent state before the first step, `[B_0 + B_1 + ..., ...]`.
      last_actor_state: the same after the last.
      device: of the trajectory; that of the first part if None.

    Raises:
      ValueError: if there is no part, or one has not the keys, dtypes and shapes of `to_tensordict` and of part 0; if
        `next` is not one step later, which on a GPU is not looked at, as the host would have to wait for it. That a
        discrete action is `[B, T]` and not `[B, T, 1]` is known to the environment alone.
    """
    parts = cast("list[TensorDict]", [parts] if hasattr(parts, "batch_dims") else list(parts))
    _check(parts)
    trees = [part.to_dict() for part in parts]
    nexts = [tree.pop("next") for tree in trees]

    def joined(name: str) -> Tree:
        return pytree.tree_map(
            lambda *xs: _join(name, device, xs[: len(parts)], xs[len(parts) :]),
            *(tree.pop(name) for tree in trees),
            *(tree.pop(name) for tree in nexts),
        )

    for name in _DERIVED:
        for tree in (*trees, *nexts):
            tree.pop(name, None)
    fields = {name: joined(name) for name in TimeStep._fields if name != "extras"}
    timestep = TimeStep(**fields, extras={name: joined(name) for name in list(nexts[0])})
    rest = {
        name: pytree.tree_map(lambda *xs, name=name: _join(name, device, xs), *(tree[name] for tree in trees))
        for name in trees[0]
    }
    return Trajectory(timestep, ActorOutput(rest.pop("action"), rest), actor_state, last_actor_state)


def _check(parts: "Sequence[TensorDict]") -> None:
    """That all parts, and their `next`, have the keys, dtypes and shapes of part 0, and that those of a trajectory."""
    if not parts:
        raise ValueError("to_trajectory needs at least one TensorDict of to_tensordict, and got none.")
    for i, part in enumerate(parts):
        if not hasattr(part, "batch_dims"):
            raise ValueError(f"part {i} is a {type(part).__name__}; give to_trajectory what to_tensordict returns.")
    fields = [name for name in TimeStep._fields if name != "extras"]
    needed = [*((name,) for name in (*fields, "action")), *(("next", name) for name in fields)]
    length = parts[0].batch_size[1] if parts[0].batch_dims == 2 else "T"
    leaves = [_leaves(part) for part in parts]
    found = [key for own in leaves for key in own]
    now, timed = dict.fromkeys(map(_now, found)), {*fields, *(key[1] for key in found if key[0] == "next")}
    keys = dict.fromkeys([*needed, *now, *(("next", *key) for key in now if key[0] in timed)])
    for i, (part, own) in enumerate(zip(parts, leaves, strict=True)):
        present = {key[:n] for key in own for n in range(1, len(key) + 1)}
        for key in keys:
            if key not in present:
                raise ValueError(
                    f"part {i} has no {_shown(key)} of shape [B, T, ...], but {list(part.keys(True, True))}; "
                    "to_trajectory takes all keys that to_tensordict makes of a trajectory, the same in all parts, and "
                    "not those of TorchRL's own rollouts."
                )
        if part.batch_dims != 2 or part.batch_size[1] != length:
            raise ValueError(
                f"part {i} has batch size {list(part.batch_size)}, and must have [B, {length}]; give all parts as many "
                "steps as part 0."
            )
        for key, x in own.items():
            name, *inner = _now(key)
            if name in _COLUMNS and (x.ndim < 3 or x.shape[-1] != 1):
                raise ValueError(
                    f"part {i}: {_shown(key)} has shape {list(x.shape)}, and must have [B, T, ..., 1]; "
                    "unsqueeze(-1) it."
                )
            like = leaves[0][(name, *inner)]
            rest = like.shape[2:]
            if name == "step_type":
                rest = torch.Size()
            elif name == "discount":
                rest = leaves[0].get(("reward", *inner), like[..., None]).shape[2:-1]
            if (x.dtype, x.shape[2:]) != (like.dtype, rest):
                raise ValueError(
                    f"part {i}: {_shown(key)} is {x.dtype} of shape {list(x.shape)}, and must be {like.dtype} of shape "
                    f"{[*x.shape[:2], *rest]}; give all parts, and their 'next', the dtypes and shapes of "
                    "to_tensordict."
                )
        step_type, following = own["step_type",], own["next", "step_type"]
        if step_type.device.type == "cpu" and not torch.equal(step_type[:, 1:], following[:, :-1]):
            raise ValueError(
                f"part {i}: ('next', 'step_type') must be 'step_type' one step later along axis 1 of "
                f"{list(part.batch_size)}, and is not; give consecutive steps, and transpose(0, 1) what is [T, B]."
            )


def _leaves(part: "TensorDict") -> dict[tuple[str, ...], Tensor]:
    """What is read of a part."""
    leaves = {(key,) if isinstance(key, str) else key: x for key, x in part.items(True, True)}
    return {key: x for key, x in leaves.items() if _now(key)[0] not in _DERIVED}


def _now(key: tuple[str, ...]) -> tuple[str, ...]:
    """The key of the same thing, not of the next step."""
    return key[1:] if key[0] == "next" else key


def _shown(key: tuple[str, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)


def _map(name: str, cut: Callable[[Tensor], Tensor], value: Tree) -> Tree:
    """`[B, T, ...]` of `[T, B, ...]`, cut in time."""
    column = name in _COLUMNS or name in _DERIVED

    def entry(x: Tensor) -> Tensor:
        x = cut(x).transpose(0, 1)
        return x.unsqueeze(-1) if column else x

    return pytree.tree_map(entry, value)


def _join(name: str, device: torch.device | None, parts: Sequence[Tensor], nexts: Sequence[Tensor] = ()) -> Tensor:
    """`[T, B, ...]` of parts `[B_k, T, ...]`, or `[T + 1, B, ...]` with the last one of the next ones."""
    if name in _COLUMNS:
        parts, nexts = [x.squeeze(-1) for x in parts], [x.squeeze(-1) for x in nexts]
    if len(parts) == 1 and device in (None, parts[0].device):
        if not nexts:
            return parts[0].transpose(0, 1)
        if (whole := _one_longer(parts[0], nexts[0])) is not None:
            return whole.transpose(0, 1)
    size, length = sum(x.shape[0] for x in parts), parts[0].shape[1]
    whole = parts[0].new_empty(length + bool(nexts), size, *parts[0].shape[2:], device=device)
    shares = whole.split([x.shape[0] for x in parts], 1)
    for share, x in zip(shares, parts, strict=True):
        share[:length].copy_(x.transpose(0, 1), non_blocking=True)
    for share, x in zip(shares, nexts, strict=False):
        share[length].copy_(x[:, -1], non_blocking=True)
    return whole


def _one_longer(x: Tensor, following: Tensor) -> Tensor | None:
    """`[B, T + 1, ...]`: x `[B, T, ...]` and the last step of `following`, if that lies one step behind x in memory."""
    shift = following.storage_offset() - x.storage_offset()
    same = x.untyped_storage().data_ptr() == following.untyped_storage().data_ptr() and x.dtype == following.dtype
    if not same or x.stride() != following.stride() or shift != x.stride(1):
        return None
    return x.as_strided((x.shape[0], x.shape[1] + 1, *x.shape[2:]), x.stride())
