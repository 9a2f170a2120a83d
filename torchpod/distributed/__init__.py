"""Ranks: who we are, and sums over all of us. One process without `torchrun` is rank 0 of 1.

Environments, not rows, are divided: rank r of K owns environments `r * B / K ... (r + 1) * B / K - 1` of the B of the
whole run, with the keys that they would have on one rank.
"""

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


class SplitError(ValueError):
    """Something cannot be divided among the ranks. Every rank raises it."""


class RankError(RuntimeError):
    """Another rank failed, and so this one cannot go on. The message of the other says why."""


class Ranks(NamedTuple):
    """This process among all processes of the run."""

    rank: int = 0
    world_size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            with _together():
                dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            with _together():
                dist.barrier()

    def same(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.world_size > 1:
            with _together():
                dist.broadcast_object_list(values)
        return values[0]

    def first(self, x: Tensor) -> Tensor:
        """Rank 0's values, on every rank, in place."""
        if self.world_size > 1:
            whole = x.detach().contiguous()
            with _together():
                dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # as bytes: neither gloo nor NCCL sends all types
            x.detach().copy_(whole)
        return x

    def share(self, total: int, what: str) -> int:
        """This rank's equal part of `total`.

        Raises:
          SplitError: if it cannot be split.
        """
        if total % self.world_size:
            raise SplitError(
                f"{what}={total} cannot be split over {self.world_size} ranks; use a multiple of {self.world_size}, "
                f"e.g. {what}={max(1, total // self.world_size) * self.world_size}."
            )
        return total // self.world_size


ALONE = Ranks()
"""One process."""


def init(device: str, timeout_s: float = 300.0) -> tuple[Ranks, torch.device]:
    """Joins the process group that `torchrun` describes in the environment, if it does.

    Args:
      device: "cpu" (gloo) or "cuda" (NCCL, one GPU per local rank).
      timeout_s: a collective that takes longer raises.

    Returns:
      The ranks, and the device of this one.
    """
    global _made
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device.startswith("cuda"):
        index = local if ":" not in device else int(device.split(":")[1])
        if not torch.cuda.is_available():
            raise ValueError(f"device={device}: PyTorch sees no CUDA device here; use device=cpu.")
        if index >= torch.cuda.device_count():
            raise ValueError(f"device={device}: index {index}, but there are {torch.cuda.device_count()} CUDA devices.")
        torch.cuda.set_device(index)
        where = torch.device("cuda", index)
    elif device == "cpu":
        where = torch.device("cpu")
    else:
        raise ValueError(f"device={device} is not known; use cpu, cuda or cuda:INDEX.")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not dist.is_initialized():
        limit = datetime.timedelta(seconds=timeout_s)
        backend = "gloo" if where.type == "cpu" else "nccl"
        store = _store_of_this_group(limit)
        if store is None:
            dist.init_process_group(backend, timeout=limit)
        else:
            rank = int(os.environ["RANK"])
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)
        _made = dist.group.WORLD
    return Ranks(int(os.environ.get("RANK", 0)), world_size), where


_made: dist.ProcessGroup | None = None
"""The process group that `init` has made."""
_number = itertools.count()
"""Of the group that is made next, in this process."""


def _store_of_this_group(timeout: datetime.timedelta) -> Store | None:
    """Torchrun's key-value store under a prefix of this attempt and group, or None without one.

    After a restart gloo may find the addresses of the processes that died under torch's own prefix, and then every
    connection is refused (torch 2.13: in two of three restarts of a ten-line script); and a second group of the same
    processes those of the first.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore(f"torchpod/{os.environ['TORCHELASTIC_RESTART_COUNT']}/{next(_number)}", store)


LATE = ("timed out", "timeout")
GONE = (
    "gloo/transport/",  # the file in which gloo raises
    *("connection closed", "connection refused", "connection reset", "broken pipe"),  # either's
    *("ncclremoteerror", "communicator was aborted"),
    *("connection was likely closed", "crash on rank 0"),  # of who keeps the store
)
"""What gloo and NCCL say of another rank, in small letters; all else that they raise is this rank's own error."""


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Names the cause of a broken connection: the rank at its other end is gone, or does not come.

    Raises:
      RankError: instead of what gloo or NCCL say of that.
    """
    try:
        yield
    except RuntimeError as error:
        told = str(error).lower()
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError) or "enforce fail" in told:
            raise  # CUDA's, or what gloo asserts
        if any(words in told for words in LATE):
            raise RankError(
                "another rank has not come; if one may take so long, play fewer evaluation.episodes, or in "
                "loop=sebulba raise loop.timeout_s"
            ) from error
        if isinstance(error, dist.DistNetworkError) or any(words in told for words in GONE):
            raise RankError("another rank failed; its own message says why") from error
        raise


def shutdown() -> None:
    """Leaves the process group, if `init` has made it."""
    global _made
    if _made is not None and _made is dist.group.WORLD:
        dist.destroy_process_group()
    _made = None
