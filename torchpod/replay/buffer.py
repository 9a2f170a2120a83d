"""What was seen, kept on the device in a ring: written in place, sampled inside compiled or captured programs.

Every step of every environment is stored once, as the rollout made it: slot `t % S` of the ring holds what `Trajectory`
says of time t, for all environments. What is sampled are trajectories again, the windows that begin at some (t, b), so
that `Agent.prepare` makes of them what it makes of any trajectory: n-step targets, masks, weights.

Positions follow from the number of the iteration alone. So a program that is run twice (to compile it, or again after a
failure) writes the same twice. The ring is longer than what is sampled from by `slack` iterations: a call of so many
iterations overwrites nothing that it could need if it were given up and made again.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.bounds import bounded
from torchpod.hints import human_bytes
from torchpod.replay import frames, memory, sum_tree
from torchpod.trees import copy, reader
from torchpod.types import LAST, ActorOutput, TimeStep, Trajectory, Tree

_CANDIDATES = 4
"""Steps drawn per row, of which the first counts that is no reset."""
_LEAST = 1e-6
"""Added to priorities, so that nothing is never seen again."""


@dataclass(frozen=True)
class ReplayConfig:
    """What is kept, and how it is sampled."""

    capacity: int = 100_000
    """Steps that are sampled from, over all environments and ranks, the newest; rounded up to whole unrolls."""
    batch_size: int = 128
    """Rows, or sequences of a recurrent agent, per update, over all ranks."""
    min_size: int = bounded(1_000, least=0)
    """Steps before the first update."""
    prioritised: bool = False
    """Sample in proportion to `priority ** alpha` (Schaul et al. 2016, https://arxiv.org/abs/1511.05952) instead of
    evenly, and weigh rows by `probability ** -beta`. The agent's loss must say priorities."""
    alpha: float = bounded(0.6, least=0)
    """How much priorities count; 0: not at all."""
    beta: float = bounded(0.4, least=0, most=1)
    """How far weights make up for priorities; it rises linearly to 1 over the run."""
    host: bool = False
    """Keep what is stored in the host's memory, pinned, for more than fits into a GPU's."""
    folder: str | None = None
    """Keep what is stored in memory-mapped files there, for more than fits into memory; on a CPU. null: in memory."""
    frame_stack: int = 1
    """Frames that an observation `[..., C]` holds side by side in its last axis. The newest is kept, and samples are
    put together again, to the same bits (frames.py)."""


class Priorities(NamedTuple):
    """The part of a buffer that is in checkpoints as a whole, and in `RunState`; written in place."""

    tree: list[Tensor]
    """See sum_tree.py; a leaf per step or, for a recurrent agent, per unroll of every environment."""
    largest: Tensor
    """float32 scalar: what new leaves begin with."""


class Sample(NamedTuple):
    """What was drawn."""

    trajectory: Trajectory
    """`timestep [L + 1, K, ...]`, `output [L, K, ...]`; without extras of the environment, and with `last_actor_state`
    empty."""
    leaf: Tensor
    """int64 `[K]`: of the tree, if there is one."""
    weight: Tensor
    """float32 `[K]`: how much a row counts, to make up for its probability; all 1 without priorities."""


def _shortest(length: int, unroll_length: int, sequences: bool) -> int:
    """Steps of an environment from which one sample can be drawn."""
    # One step for the one after the last, and one in case that the last is a reset.
    return length + 2 + (unroll_length if sequences else 0)


def fill_iterations(config: ReplayConfig, *, num_envs: int, unroll_length: int, length: int, sequences: bool) -> int:
    """Iterations of a run that only collect; the one after them samples for the first time.

    Args:
      config: see `ReplayConfig`.
      num_envs: B on all ranks.
      unroll_length: T of an iteration.
      length: L of what is sampled, in steps.
      sequences: see `ReplayBuffer`.
    """
    enough = max(_shortest(length, unroll_length, sequences), -(-config.min_size // num_envs))
    return -(-enough // unroll_length) - 1


class ReplayBuffer:
    """See the module.

    Args:
      config: see `ReplayConfig`.
      num_envs: B on this rank.
      unroll_length: T of an iteration.
      length: L of what is sampled, in steps.
      sequences: sample whole sequences, which begin where unrolls began, with the actor's state there; otherwise rows
        that begin at any step but a reset.
      num_ranks: over which the capacity is shared out.
      population: P; above 1 everything has a leading P axis.
      slack: iterations per call to the device, at most.

    Raises:
      ValueError: if nothing could be sampled.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        num_envs: int,
        unroll_length: int,
        length: int,
        sequences: bool,
        num_ranks: int = 1,
        population: int = 1,
        slack: int = 8,
    ) -> None:
        self.config, self.num_envs, self.unroll_length, self.length = config, num_envs, unroll_length, length
        self.sequences, self.slack, self._num_ranks = sequences, slack, num_ranks
        self.axis = 0 if population == 1 else 1
        per_step = num_envs * num_ranks
        unrolls = -(-config.capacity // (per_step * unroll_length))
        self.window = unrolls * unroll_length
        """Steps of each environment that are sampled from."""
        self.history = -(-(config.frame_stack - 1) // unroll_length)
        """Unrolls before those, of which frames are still needed."""
        self.num_unrolls = unrolls + self.history + slack
        self.num_slots = self.num_unrolls * unroll_length
        self._period = unroll_length if sequences else 1
        shortest = _shortest(length, unroll_length, sequences)
        self._least = per_step * shortest
        if self.window < shortest:
            raise ValueError(
                f"algo.replay.capacity={config.capacity} is {config.capacity // per_step} step(s) of each of "
                f"{per_step} environments, and what is sampled takes {shortest}; use at least {self._least}."
            )
        if config.frame_stack < 1:
            raise ValueError(f"algo.replay.frame_stack={config.frame_stack} must be at least 1.")
        if config.folder is not None and config.host:
            raise ValueError(
                f"algo.replay.host=true keeps rows in memory, and algo.replay.folder={config.folder} in a file; leave "
                "one of them out."
            )
        if config.folder is not None and not os.path.isdir(config.folder):
            raise ValueError(f"algo.replay.folder={config.folder} is no folder; make it, or leave it out.")
        if config.min_size > config.capacity:
            raise ValueError(
                f"algo.replay.min_size={config.min_size} is never reached with "
                f"algo.replay.capacity={config.capacity}; lower the one or raise the other."
            )
        sizes = {"num_envs": per_step, "unroll_length": unroll_length, "length": length}
        self.fill_iterations = fill_iterations(config, **sizes, sequences=sequences)
        self.rehearses = False
        """What is inserted is an example, to compile with: one step repeated, whose frames do not go on."""
        self.restore: Callable[[Tree], None] | None = None
        """What fills the storage as soon as there is one (segments.py)."""
        self._read: Callable[[Tree], tuple[Tensor, ...]] | None = None
        self.storage: Tree = None
        """`{"timestep", "output": [S, B, ...], "actor_state": [S / T, B, ...]}`, from the first `insert` on. Of
        frames, `timestep` has the newest as its observation, and `goes_on`: whether the stack of the next step does."""

    @property
    def nbytes(self) -> int:
        """Of the storage; 0 before there is one."""
        return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(self.storage) if isinstance(x, Tensor))

    def priorities(self, device: torch.device | str) -> Priorities | tuple[()]:
        """Those of an empty buffer, of one member; () if it samples evenly."""
        if not self.config.prioritised:
            return ()
        num_leaves = self.num_slots // self._period * self.num_envs
        return Priorities(sum_tree.make(num_leaves, device=device), torch.ones((), device=device))

    def check_memory(self, trajectory: Trajectory) -> None:
        """Raises `ValueError` if there is not enough for all slots, or if observations are no stacks of frames.

        Args:
          trajectory: as those to be stored, of any number of steps, the first of which begins episodes.
        """
        given = self._given(trajectory)
        self._check_frames(trajectory, given, begins=True)
        self._check_memory(given)

    def check_frames(self, trajectory: Trajectory) -> None:
        """Raises `ValueError` if observations are no stacks of frames; waits for a GPU."""
        self._check_frames(trajectory, self._given(trajectory), begins=False)

    def insert(self, trajectory: Trajectory, iteration: Tensor, priorities: Priorities | tuple[()]) -> None:
        """Writes the trajectory of an iteration into its place.

        Args:
          trajectory: `timestep [T + 1, B, ...]`, `output [T, B, ...]`.
          iteration: int64 scalar, or `[P]` of equal numbers.
          priorities: written in place.

        Raises:
          ValueError: at the first call, if there is not enough memory; if observations are no stacks of frames, on a
            GPU at the first call alone, unless it `rehearses`: then somebody else asks `check_frames`.
        """
        given = self._given(trajectory)
        if self._read is None or trajectory.timestep.step_type.device.type == "cpu":  # a GPU would be waited for
            self._check_frames(trajectory, given, begins=False)
        if self._read is None:
            self.storage, self._read = self._allocate(given), reader(given)
            if self.restore:
                self.restore(self.storage)
        number = iteration.reshape(-1)[:1]
        unroll = number % self.num_unrolls
        stored, axis = self._read(self.storage), self.axis
        lengths = [to.shape[axis] // self.num_unrolls for to in stored]
        parts = [x.narrow(axis, 0, length) for x, length in zip(self._read(given), lengths, strict=True)]
        if unroll.device.type == "cpu":  # memory that lies together; `index_copy_` takes ten times as long
            place = int(unroll)
            copy(parts, [to.narrow(axis, place * length, length) for to, length in zip(stored, lengths, strict=True)])
        else:
            for to, x, length in zip(stored, parts, lengths, strict=True):
                to.index_copy_(axis, unroll * length + torch.arange(length, device=to.device), x)
        if isinstance(priorities, Priorities):
            self._make_room(priorities, (number + 1) * self.unroll_length)

    def sample(
        self, storage: Tree, priorities: Priorities | tuple[()], iteration: Tensor, beta: Tensor, num: int, key: Tensor
    ) -> Sample:
        """Draws windows; pure, of one member, to be compiled.

        Args:
          storage: `self.storage`, of one member.
          priorities: of one member.
          iteration: int64 scalar, that of the last `insert`.
          beta: float32 scalar.
          num: K, how many.
          key: `[3]`.
        """
        end = (iteration + 1) * self.unroll_length  # of time: slots hold 0 ... end - 1
        if isinstance(priorities, Priorities):
            total = sum_tree.total(priorities.tree)
            strata = torch.arange(num, device=key.device)
            # In float64: in float32 heights would have 2^24 places, some 16 for each of a million leaves.
            height = (strata + random.uniform(key, num).double()) / num * total
            # Programs are warmed up with an empty tree, where what is found is the last of the padding.
            last = self.num_slots // self._period * self.num_envs - 1
            leaf = sum_tree.find(priorities.tree, height).clamp(max=last)
            mass = priorities.tree[0][leaf]
            # By N times the probability, which ranks can compare.
            weight = (mass / total * (self.window * self.num_envs)).clamp(min=1e-12) ** -beta
            first, env = leaf // self.num_envs * self._period, leaf % self.num_envs
        else:
            first, env = self._evenly(storage, end, num, key)
            leaf = first // self._period * self.num_envs + env
            weight = torch.ones(num, device=key.device)
        first, env = torch.stack([first, env])  # computed once, and not for every number that is read there
        return Sample(self._windows(storage, first, env), leaf, weight)

    def write_back(self, priorities: Priorities, leaf: Tensor, priority: Tensor) -> None:
        """New priorities of what was sampled, in place.

        Args:
          priorities: to be written to.
          leaf: `[..., K]`, of the sample.
          priority: `[..., K]`, at least 0, e.g. absolute TD errors.
        """
        # In float64: powers in float32 differ in the last bit between the vectors and the rest of a tensor.
        mass = ((priority.detach().abs().double() + _LEAST) ** self.config.alpha).float()
        mass = torch.where(mass.isfinite(), mass, priorities.largest.unsqueeze(-1))
        sum_tree.write(priorities.tree, leaf, mass)
        torch.maximum(priorities.largest, mass.amax(-1), out=priorities.largest)

    def _evenly(self, storage: Tree, end: Tensor, num: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and environments of windows, each that fits as likely as any other."""
        oldest = (end - self.window).clamp(min=0)
        if self.sequences:
            low, high = oldest // self._period, (end - 1 - self.length) // self._period
            words = random.bits(key, num)
            place = random.to_integer(words, (high - low + 1) * self.num_envs)
            time = (low + place // self.num_envs) * self._period
            return time % self.num_slots, place % self.num_envs
        # One step is left out at the end, so that after a reset there is always the step after it.
        words = random.bits(key, num * _CANDIDATES).reshape(_CANDIDATES, num)
        place = random.to_integer(words, (end - 1 - self.length - oldest) * self.num_envs)
        slot, env = (oldest + place // self.num_envs) % self.num_slots, place % self.num_envs
        step_type = storage["timestep"]["step_type"].flatten(0, 1)
        is_reset = step_type[slot * self.num_envs + env] == LAST  # [candidates, num]
        # All were resets, about 1 in 10,000 rows with episodes of 10 steps: the first step of the episode after it.
        slot_of, env_of = (slot[-1] + is_reset[-1]) % self.num_slots, env[-1]
        for i in reversed(range(_CANDIDATES - 1)):
            slot_of = torch.where(is_reset[i], slot_of, slot[i])
            env_of = torch.where(is_reset[i], env_of, env[i])
        return slot_of, env_of

    def _windows(self, storage: Tree, first: Tensor, env: Tensor) -> Trajectory:
        """The trajectories that begin in slots `first` `[K]` of environments `env` `[K]`."""
        slot = (first + torch.arange(self.length + 1, device=first.device)[:, None]) % self.num_slots
        index = slot * self.num_envs + env  # [L + 1, K]

        def rows(tree: Tree, index: Tensor) -> Tree:
            return pytree.tree_map(lambda x: x.flatten(0, 1)[index], tree)

        kept, stacks, count = dict(storage["timestep"]), {}, self.config.frame_stack
        if count > 1:
            newest, goes_on = kept.pop("observation"), kept.pop("goes_on")
            stacks["observation"] = frames.together(newest, goes_on, slot, env, count)
        timestep = rows(kept, index) | stacks
        output = rows(storage["output"], index[:-1])
        begun = first // self.unroll_length * self.num_envs + env
        return Trajectory(
            TimeStep(**timestep, extras={}), ActorOutput(**output), rows(storage["actor_state"], begun), ()
        )

    def _make_room(self, priorities: Priorities, end: Tensor) -> None:
        """Leaves that can be sampled from now on, and those that cannot any more."""
        period, num_envs, num_units = self._period, self.num_envs, self.num_slots // self._period
        count = self.unroll_length // period
        offsets = torch.arange(-count + 1, 1, device=end.device)
        new = (end - 1 - self.length).div(period, rounding_mode="floor") + offsets  # units of time, [count]
        old = (end - self.window).div(period, rounding_mode="floor") - 1 + offsets
        unit = torch.cat([new, old]) % num_units
        leaf = (unit[:, None] * num_envs + torch.arange(num_envs, device=end.device)).flatten()
        lead = priorities.largest.shape
        fresh = priorities.largest.reshape(*lead, 1, 1).expand(*lead, count, num_envs)
        # In a short window what is whole at last may be too old already.
        fresh = fresh * ((new >= 0) & (new * period >= end - self.window))[:, None]
        if not self.sequences:
            is_last = self.storage["timestep"]["step_type"].index_select(self.axis, unit[:count]) == LAST
            fresh = fresh * ~is_last
        values = torch.cat([fresh, torch.zeros_like(fresh)], -2).flatten(-2)
        sum_tree.write(priorities.tree, leaf.expand(*lead, -1), values)

    def _given(self, trajectory: Trajectory) -> dict[str, Tree]:
        """What there is to store of a trajectory; of the timesteps the last one too many."""
        t, out = trajectory.timestep, trajectory.output
        steps = {name: x for name, x in t._asdict().items() if name != "extras"}
        if self.config.frame_stack > 1:
            steps |= frames.apart(t.observation, self.config.frame_stack, self.axis)
        begun = trajectory.actor_state if self.sequences else ()
        begun = pytree.tree_map(lambda x: x.unsqueeze(self.axis), begun)
        return {"timestep": steps, "output": {"action": out.action, "extras": out.extras}, "actor_state": begun}

    def _check_frames(self, trajectory: Trajectory, given: dict[str, Tree], *, begins: bool) -> None:
        if self.config.frame_stack > 1 and not self.rehearses:
            observation, parts = trajectory.timestep.observation, cast(dict[str, Tensor], given["timestep"])
            frames.check(observation, parts, self.config.frame_stack, self.axis, begins=begins)

    def _shape(self, name: str, x: Tensor) -> tuple[int, ...]:
        """Of all slots, for a leaf of `given[name]`."""
        size = self.num_unrolls if name == "actor_state" else self.num_slots
        return (*x.shape[: self.axis], size, *x.shape[self.axis + 1 :])

    def _check_memory(self, given: dict[str, Tree]) -> None:
        leaves = [(name, x) for name, tree in given.items() for x in pytree.tree_leaves(tree)]
        needed = sum(math.prod(self._shape(name, x)) * x.element_size() for name, x in leaves)
        device, host, folder = leaves[0][1].device, self.config.host, self.config.folder
        if folder is not None and device.type != "cpu":
            raise ValueError(f"algo.replay.folder={folder} is for device=cpu, and this run has {device}; leave it out.")
        free, where = memory.free_bytes(device, host, folder)
        if needed > 0.9 * free:
            per_step = needed / (self.num_slots * self.num_envs)
            rounding = (self.slack + self.history + 1) * self.unroll_length * self.num_envs
            fitting = (int(0.9 * free / per_step) - rounding) * self._num_ranks
            advice = f"use at most algo.replay.capacity={fitting}"
            if fitting < max(self.config.min_size, self._least):  # with which nothing would be learned
                there, elsewhere = (folder, "folder=DIR") if device.type == "cpu" else (host, "host=true")
                others = "" if there else f"algo.replay.{elsewhere}, or "
                advice = f"use {others}fewer num_envs, or a shorter algo.unroll_length"
            raise ValueError(
                f"algo.replay.capacity={self.config.capacity} takes {human_bytes(needed)}, {per_step:,.0f} bytes "
                f"per step, and {where} has {human_bytes(free)} left; {advice}."
            )

    def _allocate(self, given: dict[str, Tree]) -> dict[str, Tree]:
        """Memory for all slots.

        Raises:
          ValueError: if the device has not so much.
        """
        self._check_memory(given)
        host, folder = self.config.host, self.config.folder

        def zeros(name: str, x: Tensor) -> Tensor:
            return memory.zeros(self._shape(name, x), x.dtype, x.device, host, folder)

        return {name: pytree.tree_map(lambda x, name=name: zeros(name, x), tree) for name, tree in given.items()}
