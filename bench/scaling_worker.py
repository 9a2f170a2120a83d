"""One rank of suite `scaling`: PPO on CartPole, and sums over all ranks alone; rank 0 prints one JSON line.

torchrun --standalone --nproc-per-node 2 -m torchpod.bench.scaling_worker --num-envs 2048
"""

import argparse
import json
import statistics
import time
from typing import ClassVar, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.bench.anakin_worker import UNROLL_LENGTH, Prepared
from torchpod.bench.harness import Measurement
from torchpod.compile import Compiler
from torchpod.distributed import ALONE, Ranks, init
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import LearnerConfig

SIZES = (8, 32 * 2**10, 2**20, 16 * 2**20)
"""Bytes of the sums that are measured alone."""


class Sums(TypedDict):
    """What rank 0 adds to its `Measurement`."""

    ranks: int
    sums_per_iteration: int
    bytes_per_iteration: int
    share_in_sums: float
    """Of the time of an iteration, waiting for the slowest rank included."""
    alone: dict[str, float]
    """Bytes -> seconds of one sum that all ranks begin together, the median of many."""


class ScalingMeasurement(Measurement, Sums):
    """A `Measurement` of all ranks together; `num_envs` is of all of them."""


class WatchedRanks(Ranks):
    """Ranks that keep the bytes and the seconds of their sums."""

    sums: ClassVar[list[tuple[int, float]]] = []

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        _wait(x.device)
        began = time.perf_counter()
        total = super().sum(x)
        _wait(x.device)
        self.sums.append((x.nbytes, time.perf_counter() - began))
        return total


def measure(
    num_envs: int, iterations: int, repeats: int, *, device: str, compiled: bool, apart: bool = False
) -> ScalingMeasurement:
    """PPO as suite `anakin` measures it, its environments shared out to the ranks.

    Args:
      num_envs: of all ranks.
      iterations: within one timed call.
      repeats: timed calls.
      device: cpu (gloo) or cuda (NCCL).
      compiled: False for tests.
      apart: every rank trains on its own, without sums: what the machine has for so many processes.
    """
    ranks, where = init(device)
    ranks = WatchedRanks(*ranks)
    env, config = CartPole(), LearnerConfig()
    anakin = Anakin(
        lambda: PPO(env.spec, PPOConfig()),
        env,
        num_envs=ranks.share(num_envs, "num_envs"),
        unroll_length=UNROLL_LENGTH,
        learner=config,
        num_iterations=iterations * (1 + repeats),
        compiler=Compiler(compiled),
        ranks=ALONE if apart else ranks,
        device=where,
    )
    prepared = Prepared(anakin, "update", iterations)
    ranks.barrier()
    measured = prepared.measure(repeats)
    per_iteration = config.num_epochs * (config.num_minibatches + 1) + 2  # metrics before learning, and episodes
    if apart:
        per_iteration = 0
        measured["env_steps"] = [ranks.world_size * steps for steps in measured["env_steps"]]
    timed_sums = WatchedRanks.sums[len(WatchedRanks.sums) - repeats * iterations * per_iteration :]
    return {
        **measured,
        "num_envs": num_envs,
        "batch_rows": UNROLL_LENGTH * num_envs,
        "ranks": ranks.world_size,
        "sums_per_iteration": per_iteration,
        "bytes_per_iteration": sum(size for size, _ in timed_sums[:per_iteration]),
        "share_in_sums": sum(seconds for _, seconds in timed_sums) / sum(measured["wall_s"]),
        "alone": {str(size): sum_alone(ranks, size, where) for size in SIZES},
    }


def sum_alone(ranks: Ranks, size: int, device: torch.device) -> float:
    """Seconds of a sum of so many bytes that all ranks begin together."""
    x, seconds = torch.zeros(size // 4, device=device), []
    for i in range(60):
        ranks.barrier()
        _wait(device)
        began = time.perf_counter()
        ranks.sum(x)
        _wait(device)
        if i >= 10:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=1024, help="of all ranks")
    parser.add_argument("--iterations", type=int, default=4, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--apart", action="store_true", help="every rank trains on its own")
    parser.add_argument("--eager", action="store_true", help="without compilation: does it work at all?")
    args = parser.parse_args()
    options = {"device": args.device, "compiled": not args.eager, "apart": args.apart}
    measured = measure(args.num_envs, args.iterations, args.repeats, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(measured), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
