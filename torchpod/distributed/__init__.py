"""Ranks: who we are, and sums over all of us. One process without `torchrun` is rank 0 of 1.

Environments, not rows, are divided: rank r of K owns environments `r * B / K ... (r + 1) * B / K - 1` of the B of the
whole run, with the keys that they would have on one rank.
"""

import datetime
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(NamedTuple):
    """This process among all processes of the run."""

    rank: int = 0
    world_size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def share(self, total: int, what: str) -> int:
        """This rank's equal part of `total`.

        Raises:
          ValueError: if it cannot be split.
        """
        if total % self.world_size:
            raise ValueError(
                f"{what}={total} cannot be split over {self.world_size} ranks; use a multiple of {self.world_size}, "
                f"e.g. {what}={max(1, total // self.world_size) * self.world_size}."
            )
        return total // self.world_size


def init(device: str, timeout_s: float = 300.0) -> tuple[Ranks, torch.device]:
    """Joins the process group that `torchrun` describes in the environment, if it does.

    Args:
      device: "cpu" (gloo) or "cuda" (NCCL, one GPU per local rank).
      timeout_s: a collective that takes longer raises.

    Returns:
      The ranks, and the device of this one.
    """
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
        dist.init_process_group(
            "gloo" if where.type == "cpu" else "nccl", timeout=datetime.timedelta(seconds=timeout_s)
        )
    return Ranks(int(os.environ.get("RANK", 0)), world_size), where


def shutdown() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
