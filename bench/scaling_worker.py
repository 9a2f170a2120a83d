"""One rank of suite `scaling`: PPO on CartPole, and sums over all ranks alone; rank 0 prints one JSON line.

torchrun --standalone --nproc-per-node 2 -m torchpod.bench.scaling_worker --num-envs 2048
"""

import argparse
import json
import statistics
import time
from typing import ClassVar, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.bench.anakin_worker import UNROLL_LENGTH, Prepared
from torchpod.bench.processes import Measurement
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
    share_waiting: float
    """The same of iterations with a barrier before every sum: until the slowest rank is there, and its message."""
    share_summing: float
    """Of those iterations, sums that all ranks begin together."""
    alone: dict[str, float]
    """Bytes -> seconds of one sum that all ranks begin together, the median of many."""


class ScalingMeasurement(Measurement, Sums):
    """A `Measurement` of all ranks together; `num_envs` is of all of them."""


class CallsOfAll(TypedDict):
    """Of a `Measurement`."""

    env_steps: list[float]
    wall_s: list[float]


class Sum(NamedTuple):
    """One over all ranks."""

    num_bytes: int
    waiting_s: float
    """At the barrier before it; 0 without."""
    summing_s: float


class WatchedRanks(Ranks):
    """Ranks that keep what their sums took."""

    sums: ClassVar[list[Sum]] = []
    together: ClassVar[bool] = False
    """A barrier before every sum: what is left of its time is its own."""

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        _wait(x.device)
        began = time.perf_counter()
        if self.together:
            self.barrier()
        met = time.perf_counter()
        total = super().sum(x)
        _wait(x.device)
        self.sums.append(Sum(x.nbytes, met - began, time.perf_counter() - met))
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
        num_iterations=iterations * (1 + 2 * repeats),
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
    num_sums = repeats * iterations * per_iteration
    timed_sums, wall_s = WatchedRanks.sums[len(WatchedRanks.sums) - num_sums :], sum(measured["wall_s"])
    calls = of_all(ranks, measured["env_steps"], measured["wall_s"], apart=apart, device=where)
    WatchedRanks.together = True
    met_s = sum(prepared.measure(repeats)["wall_s"])
    WatchedRanks.together = False
    met = WatchedRanks.sums[len(WatchedRanks.sums) - num_sums :]
    return {
        **measured,
        **calls,
        "num_envs": num_envs,
        "batch_rows": UNROLL_LENGTH * num_envs,
        "ranks": ranks.world_size,
        "sums_per_iteration": per_iteration,
        "bytes_per_iteration": sum(x.num_bytes for x in timed_sums[:per_iteration]),
        "share_in_sums": sum(x.summing_s for x in timed_sums) / wall_s,
        "share_waiting": sum(x.waiting_s for x in met) / met_s,
        "share_summing": sum(x.summing_s for x in met) / met_s,
        "alone": {str(size): sum_alone(ranks, size, where) for size in SIZES},
    }


def of_all(
    ranks: Ranks, env_steps: list[float], wall_s: list[float], *, apart: bool, device: torch.device
) -> CallsOfAll:
    """The timed calls of all ranks: their steps, and seconds with which the rate is the sum of the ranks' own rates.

    Args:
      ranks: all of them.
      env_steps: of each call: of this rank where they are apart, else of all ranks.
      wall_s: of this rank.
      apart: see `measure`.
      device: of this rank.
    """
    steps = torch.tensor(env_steps, dtype=torch.float64, device=device) / (1 if apart else ranks.world_size)
    rates = steps / torch.tensor(wall_s, dtype=torch.float64, device=device)
    steps, rates = Ranks.sum(ranks, torch.stack([steps, rates])).unbind()
    return {"env_steps": steps.tolist(), "wall_s": (steps / rates).tolist()}


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
