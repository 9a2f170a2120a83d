"""Random actions, with which agents explore and tests, pictures and benchmarks play; and what is no action."""

import math

import torch
from torch import Tensor

from torchpod import random
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete, SpecTree
from torchpod.types import ACTION_MASK, Tree


def lead_of(spec: EnvSpec, group: str | None, num_envs: int) -> tuple[int, ...]:
    """The axes before those of a spec: `[B]`, or `[B, N]` for a group."""
    return (num_envs,) if group is None or spec.groups is None else (num_envs, spec.groups[group])


def random_action(spec: EnvSpec, observation: Tree, keys: Tensor) -> Tree:
    """Actions drawn uniformly from those that spec and action mask allow, one row per key `[B, 3]`."""
    if spec.groups is None:
        return _draw(spec.action, (keys.shape[0],), mask_of(observation), keys)
    return {
        group: _draw(
            spec.action[group],
            lead_of(spec, group, keys.shape[0]),
            mask_of(observation[group]),
            random.fold_in(keys, i),
        )
        for i, group in enumerate(spec.groups)
    }


def any_allowed(num_actions: int, observation: Tree, words: Tensor) -> Tensor:
    """One of the discrete actions `[...]` that the observation's action mask allows, if it has one, by random words.

    The last one, where it allows none.
    """
    mask = mask_of(observation)
    if mask is None:
        return random.to_integer(words, num_actions)
    upto = mask.cumsum(-1)
    return (upto <= random.to_integer(words, upto[..., -1]).unsqueeze(-1)).sum(-1).clamp(max=num_actions - 1)


def require_finite(action: Tensor, what: str) -> None:
    """Raises `ValueError` for NaN and infinity in actions `[B, ...]` on the CPU; `what` says who takes what."""
    finite = action.isfinite().reshape(action.shape[0], -1).all(-1)
    if not finite.all():
        row = int(finite.int().argmin())
        raise ValueError(
            f"{what}, and that of environment {row} is {action[row].tolist()}; look for NaN in the policy."
        )


def closed_masks(spec: EnvSpec, observation: Tree) -> list[str]:
    """A sentence for each action mask in which a row allows nothing, whatever axes there are before the last."""
    told, axes = [], ("environment", "agent") if spec.groups is not None else ("environment",)
    for sentence, is_open in open_masks(spec, observation).items():
        if not is_open.all():
            row = (~is_open).nonzero()[0].tolist()
            names = ("member", "step", *axes)[-len(row) :]
            where = ", ".join(f"{name} {i}" for name, i in zip(names, row, strict=True))
            more = "; leave something to agents that are out of the game too" if spec.groups is not None else ""
            told.append(f"{sentence.removesuffix('.')}; in {where} it allows none{more}.")
    return told


def open_masks(spec: EnvSpec, observation: Tree) -> dict[str, Tensor]:
    """Whether each row of each action mask allows something, bool `[...]`, by the sentence that says it should."""
    owners = {"": (spec.action, observation)}
    if spec.groups is not None:
        owners = {f"[{group!r}]": (spec.action[group], observation[group]) for group in spec.groups}
    found = {}
    for name, (action, own) in owners.items():
        mask = mask_of(own)
        if mask is None:
            continue
        parts = mask_by_choice(mask, action)
        for i, part in enumerate(parts):
            where = f" of choice {i}" if len(parts) > 1 else ""
            sentence = f"observation{name}['action_mask'] must allow at least one action{where} in every row."
            found[sentence] = part.any(-1)
    return found


def mask_of(observation: Tree) -> Tensor | None:
    """The `action_mask` of an observation, if it has one."""
    return observation.get(ACTION_MASK) if isinstance(observation, dict) else None


def mask_by_choice(mask: Tensor, action: SpecTree) -> tuple[Tensor, ...]:
    """The parts of a mask `[..., A]`: as many as a MultiDiscrete has integers, one of anything else."""
    return mask.split(list(action.nvec) if isinstance(action, MultiDiscrete) else mask.shape[-1], -1)


def _draw(spec: SpecTree, lead: tuple[int, ...], mask: Tensor | None, keys: Tensor) -> Tree:
    if isinstance(spec, dict):
        return {k: _draw(s, lead, mask, random.fold_in(keys, i)) for i, (k, s) in enumerate(spec.items())}
    shape = (*lead, *spec.shape)
    uniform = random.uniform(keys, math.prod(shape[1:])).reshape(shape)
    if isinstance(spec, Discrete):
        if mask is None:
            return (uniform * spec.num_values).to(spec.dtype)
        return _allowed(uniform, mask).to(spec.dtype)
    if isinstance(spec, MultiDiscrete):
        if mask is None:
            return (uniform * torch.tensor(spec.nvec, device=keys.device)).to(spec.dtype)
        parts = zip(uniform.unbind(-1), mask_by_choice(mask, spec), strict=True)
        return torch.stack([_allowed(u, own) for u, own in parts], -1).to(spec.dtype)
    low, high = (spec.low, spec.high) if isinstance(spec, Box) else (-1.0, 1.0)
    low, high = (low if math.isfinite(low) else high - 2.0), (high if math.isfinite(high) else low + 2.0)
    if not math.isfinite(low):
        low, high = -1.0, 1.0
    return (low + (high - low) * uniform).to(spec.dtype)


def _allowed(uniform: Tensor, mask: Tensor) -> Tensor:
    """One of the actions that `mask` `[..., A]` allows, by a uniform number `[...]`."""
    nth = (uniform * mask.sum(-1)).long()
    return (mask.cumsum(-1) > nth[..., None]).int().argmax(-1)
