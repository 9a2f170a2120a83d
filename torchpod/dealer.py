"""The dealer: a batch's rows shuffled into minibatches, standardised, and cut into chunks. Read agent.py first.

Columns of `Batch.steps` named `weight` (`POLICY/weight` of several policies) say how much a row counts; those that the
agent's `standardise` names are brought to mean 0 and std 1. Sums over ranks lie between dealing and standardising: one
rank alone does both in one program.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent
from torchpod.compile import Compiler
from torchpod.distributed import ALONE, Ranks, SplitError
from torchpod.trees import paths, reader, writer
from torchpod.types import Batch, Tree

DEFAULT_CHUNK_ROWS = {"cpu": 2048, "cuda": 1 << 22}
"""By the kind of device: rows whose activations stay in a CPU's cache, or take little of a GPU's memory (3 GB of two
layers of 32 units, by estimate)."""


def weights_of(steps: dict[str, Tree]) -> list[str]:
    """Names of the weights among the columns of a batch: `weight`, and `POLICY/weight` of several policies."""
    return [name for name in steps if name.rpartition("/")[2] == "weight"]


def weight_of(name: str) -> str:
    """The weights that belong to a column: those with the same prefix."""
    return "/".join([*name.split("/")[:-1], "weight"])


def weight_of_buffer(name: str, steps: dict[str, Tensor]) -> str:
    """The weights that belong to a buffer: of `policies.NAME.x` those of that policy."""
    first, _, rest = name.partition(".")
    own = weight_of(f"{rest.partition('.')[0]}/")
    return own if first == "policies" and own in steps else "weight"


class Dealer:
    """Makes minibatches of batches.

    Args:
      agent: whose they are; its `recurrent`, `standardise` and `reuse_forward` are used.
      num_minibatches: M, in each of which every environment has its share.
      chunk_rows: see `LearnerConfig`.
      compiler: how to compile (and vmap) the parts.
      ranks: over whom moments are summed.
    """

    minibatch_rows: int = 0
    """Rows of agents, of the policy that has most, in a minibatch of which `num_chunks` was last asked."""

    def __init__(
        self,
        agent: Agent,
        num_minibatches: int,
        chunk_rows: int | None = None,
        *,
        compiler: Compiler | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.agent, self.num_minibatches, self.chunk_rows, self.ranks = agent, num_minibatches, chunk_rows, ranks
        compiler = compiler or Compiler(enabled=False)
        self._axis = 0 if compiler.population == 1 else 1  # where the axes of one member begin
        self._deal = compiler(self._deal_one)
        self._standardise = compiler(self.standardised)
        self._deal_alone = compiler(lambda *args: self.standardised(*self._deal_one(*args)))
        self._tree: Any = None

    def deal(self, batch: Batch, keys: Tensor, counter: Tensor) -> Batch:
        """Minibatches `[M, ...]`, standardised.

        Args:
          batch: of this rank, `[T, B, ...]`.
          keys: `[B, 3]`, one per environment.
          counter: int64 scalar, where in the streams of the keys this shuffle is drawn.

        Raises:
          SplitError: B is no multiple of M, where environments are dealt whole: if the agent is recurrent or T is none.
        """
        if self.ranks.world_size == 1:
            return self._deal_alone(batch, keys, counter)
        return self.standardise(*self._deal(batch, keys, counter))

    def standardise(self, minibatches: Batch, moments: Tensor) -> Batch:
        """Minibatches `[M, ...]` with weights that sum to 1 over all ranks, and columns of mean 0 and std 1.

        Args:
          minibatches: of this rank.
          moments: theirs, from `moments_of`.
        """
        return self._standardise(minibatches, self.ranks.sum(moments))

    def num_chunks(self, steps: dict[str, Tree], *, dealt: bool) -> int:
        """Into how many chunks a minibatch is cut.

        Args:
          steps: of minibatches `[M, rows, ...]`, of recurrent agents `[M, T, B / M, ...]`; or of a batch `[T, B, ...]`.
          dealt: whether they are minibatches.
        """
        if self.agent.reuse_forward:  # the loss begins behind the networks
            return 1
        weights: list[Any] = [steps[name] for name in weights_of(steps)]
        shapes = [x.shape[self._axis :] for x in weights]
        m, recurrent, first = self.num_minibatches, self.agent.recurrent, shapes[0]
        self.minibatch_rows = total = max(shape.numel() for shape in shapes) // m
        splittable = first[2 if recurrent else 1] if dealt else (1 if recurrent else first[0]) * first[1] // m
        limit = self.chunk_rows or DEFAULT_CHUNK_ROWS["cpu" if weights[0].device.type == "cpu" else "cuda"]
        return _divisor_near(total, splittable, limit)

    def cut(self, minibatches: Batch, num_chunks: int) -> list[Batch]:
        """The chunks of all minibatches, in order: views of rows, or of whole environments for recurrent agents."""
        axis = self._axis + (1 if self.agent.recurrent else 0)  # of rows, or environments, once M is gone
        if self._tree is None:  # made once: batches of one agent are built alike
            self._tree = reader(minibatches), writer(minibatches), len(paths(minibatches.steps))
        read, write, num_steps_tensors = self._tree
        columns = []
        for i, x in enumerate(read(minibatches)):
            column, own_axis = x.unbind(self._axis), axis if i < num_steps_tensors else self._axis
            if num_chunks > 1:
                column = [chunk for minibatch in column for chunk in minibatch.chunk(num_chunks, own_axis)]
            columns.append(column)
        return [write(row) for row in zip(*columns, strict=True)]

    def some_of(self, chunk: Batch) -> Batch:
        """The first rows of a chunk of one member, or its first environments for recurrent agents."""
        axis = 1 if self.agent.recurrent else 0
        steps = pytree.tree_map(lambda x: x.narrow(axis, 0, min(x.shape[axis], 64)), chunk.steps)
        return Batch(steps, pytree.tree_map(lambda x: x[:64], chunk.actor_state))

    # The functions below see one member of the population, and are compiled.

    def _deal_one(self, batch: Batch, keys: Tensor, counter: Tensor) -> tuple[Batch, Tensor]:
        """Shuffles rows into minibatches `[M, ...]`, and takes their moments `[M, W + 2 * S]`.

        Rows are dealt like cards: out of every M that lie together (in the shuffled time of one environment, or side
        by side in M environments) each minibatch gets one. The deal depends only on the environments' own keys, so
        that K ranks, without talking, form the same minibatches as one.
        """
        m, keys = self.num_minibatches, random.advance(keys, counter)
        length, size = batch.steps["weight"].shape
        index = torch.arange(size, device=keys.device)
        if m == 1:

            def deal(x: Tensor) -> Tensor:  # [T, B, ...] -> [1, T, B, ...]: there is nothing to shuffle
                return x[None]
        elif self.agent.recurrent or length % m:
            if size % m:
                raise SplitError(
                    f"num_envs={size} per rank cannot be dealt to num_minibatches={m}; use a multiple of {m}."
                )
            # order[g, i]: which of the M environments of group g goes to minibatch i
            order = random.bits(keys, 1).reshape(size // m, m).argsort(1)
            index = (index[::m, None] + order).T.flatten()  # [M * B/M]

            def deal(x: Tensor) -> Tensor:  # [T, B, ...] -> [M, T, B/M, ...]
                return x[:, index].reshape(length, m, size // m, *x.shape[2:]).movedim(1, 0)
        else:
            order = random.permutation(keys, length)  # [B, T]
            envs = torch.arange(size, device=keys.device)[:, None]

            # Environment by environment, so that the rows of one stay in cache while they are picked.
            def deal(x: Tensor) -> Tensor:  # [T, B, ...] -> [M, B, T/M, ...]
                return x[order, envs].reshape(size, m, length // m, *x.shape[2:]).movedim(1, 0)

        steps = pytree.tree_map(deal, batch.steps)
        if self.agent.recurrent:
            actor_state = pytree.tree_map(lambda x: x[index].reshape(m, size // m, *x.shape[1:]), batch.actor_state)
        else:
            steps, actor_state = pytree.tree_map(lambda x: x.flatten(1, 2), steps), ()
        return Batch(steps, actor_state), self.moments_of(steps)

    def moments_of(self, steps: dict[str, Tensor]) -> Tensor:
        """`[M, W + 2 * S]` of minibatches `[M, ...]`: the sums of weights, and what standardised columns need."""
        columns = [steps[name].double().flatten(1).sum(1) for name in weights_of(steps)]
        for name in self.agent.standardise:
            weight, x = (steps[k].double().flatten(1) for k in (weight_of(name), name))
            columns += [(weight * x).sum(1), (weight * x * x).sum(1)]
        return torch.stack(columns, 1)

    def standardised(self, minibatches: Batch, moments: Tensor) -> Batch:
        """Weights that sum to 1, and columns of mean 0 and std 1, per minibatch over all ranks."""
        steps, columns, counts = dict(minibatches.steps), list(moments.unbind(1)), {}

        def like(column: Tensor, x: Tensor) -> Tensor:
            return column.reshape(-1, *[1] * (x.ndim - 1))

        for name in weights_of(steps):
            column = columns.pop(0)
            counts[name] = torch.where(column > 0, column, 1.0)
            steps[name] = (steps[name] / like(counts[name], steps[name])).to(steps[name].dtype)
        for name in self.agent.standardise:
            x, (mean, square) = steps[name], (columns.pop(0) / counts[weight_of(name)] for _ in range(2))
            std = (square - mean * mean).clamp(min=0.0).sqrt() + 1e-8
            steps[name] = ((x - like(mean, x)) / like(std, x)).to(x.dtype)
        return minibatches._replace(steps=steps)


@functools.cache
def _divisor_near(total_rows: int, splittable: int, limit: int) -> int:
    """The divisor of `splittable` that brings the rows of a chunk nearest to `limit`, by their ratio.

    Chunks are equal, so that one program serves all; a prime number of rows stays in one piece.
    """
    divisors = [n for n in range(1, splittable + 1) if splittable % n == 0]
    return min(divisors, key=lambda n: abs(math.log(total_rows / n / limit)), default=1)
