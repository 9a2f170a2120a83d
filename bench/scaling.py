"""Suite `scaling`: one run on more ranks: more environments (weak) or the same shared out (strong).

    torchpod bench scaling [--json FILE] [--quick]

The peer of each row is one rank, so that `ratio` is the speed-up; K is what K ranks could reach at most. Sums over all
ranks are measured alone as well, and give the two numbers of a model, latency and bandwidth, that predicts how long the
sums of an iteration take on more devices than there are here: docs/scaling.md, which this suite writes.
"""

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpod.bench import harness
from torchpod.bench.harness import RowMaker, Worker, WorkerError

PAGE = harness.ROOT / "docs" / "scaling.md"
NUM_RANKS = (1, 2, 4)
PER_RANK = 1024
"""Environments of each rank in the weak rows."""
IN_ALL = 4096
"""Environments of all ranks in the strong rows."""
PREDICTED = (8, 128, 2048)


class Network(NamedTuple):
    """What a sum over all ranks costs: latency of one message, and bytes per second out of each device."""

    latency_s: float
    bandwidth: float

    def sum_s(self, ranks: int, size: float) -> float:
        """Seconds of one sum: the better of a ring, 2 (K - 1) messages of size / K, and a tree, 2 log2 K of size."""
        if ranks == 1:
            return 0.0
        ring = 2 * (ranks - 1) * (self.latency_s + size / ranks / self.bandwidth)
        tree = 2 * math.ceil(math.log2(ranks)) * (self.latency_s + size / self.bandwidth)
        return min(ring, tree)


ASSUMED = {
    "10 Gbit/s Ethernet": Network(50e-6, 1.25e9),
    "one 400 Gbit/s link per device": Network(5e-6, 50e9),
}
"""Round numbers of data sheets, not measured."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    num_ranks: Sequence[int] = NUM_RANKS,
    rounds: int = 2,
    repeats: int = 3,
    worker: Callable[[int], Worker] | None = None,
    page: Path = PAGE,
) -> int:
    """Measures, writes the result file and the page, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/, and then the page is written as well, if not `quick`.
      quick: two ranks at most, one round of one call.
      num_ranks: 1 first.
      rounds: times that each number of ranks runs, in turn.
      repeats: timed calls in a round.
      worker: of a number of ranks; None for the real one.
      page: docs/scaling.md.

    Returns:
      0, or 1 if something failed.
    """
    if quick:
        num_ranks, rounds, repeats = tuple(k for k in num_ranks if k <= 2), 1, 1
    load_average, calibrations = os.getloadavg(), [harness.calibrate(None)]
    make, rows, failures, found = RowMaker(), [], [], {}
    workers = [(worker or real_worker)(k) for k in num_ranks]
    for kind in ("weak", "strong"):
        results: dict[int, list[Any] | WorkerError] = {k: [] for k in num_ranks}
        with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
            for _ in range(rounds):
                for k, one in zip(num_ranks, workers, strict=True):
                    arguments = [case_arguments(kind, k, repeats)]
                    measured = harness.interleave((one,), arguments, core=None, cache_dir=Path(cache))[one.name]
                    done = results[k]
                    if isinstance(done, list) and isinstance(measured, list):
                        done += measured
                    elif isinstance(measured, WorkerError):
                        results[k] = measured
        for k in num_ranks:
            own = results[k]
            row = make.rate(f"{kind}_ppo_cartpole/{k} ranks", own, results[num_ranks[0]], peer_name="1 rank")
            if isinstance(own, WorkerError):
                failures.append(f"{row.name}: {own}")
            else:
                found[kind, k] = summary(own)
            rows.append(row)
            print(f"{row.name}: {row.value} {row.unit}, speed-up {row.ratio}", flush=True)
    calibrations.append(harness.calibrate(None))
    status = harness.finish(
        "scaling",
        rows,
        failures=failures,
        calibrations=calibrations,
        load_average=load_average,
        json_path=json_path,
        extra={
            "rounds": rounds,
            "repeats_per_round": repeats,
            "quick": quick,
            "sums": {f"{kind}/{k}": x for (kind, k), x in found.items()},
        },
    )
    if json_path is None and not failures and not quick:
        page.write_text(render(rows, found, make.hardware["name"]))
        print(f"{page} is written")
    return status


def real_worker(ranks: int) -> Worker:
    """`torchrun` on this host: NCCL if there are enough GPUs, gloo otherwise."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    command = (sys.executable, *torchrun, "-m", "torchpod.bench.scaling_worker", "--device", device)
    return Worker(f"{ranks}-ranks", command)  # the name is part of a path that compilers get


def case_arguments(kind: str, ranks: int, repeats: int) -> list[str]:
    """Of `ranks` ranks in all."""
    num_envs = PER_RANK * ranks if kind == "weak" else IN_ALL
    return ["--num-envs", str(num_envs), "--iterations", "4", "--repeats", str(repeats)]


def summary(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rounds of one case: seconds per iteration, and what `scaling_worker.Sums` holds."""
    seconds = [wall / m["iterations"] for m in measured for wall in m["wall_s"]]
    first = measured[0]
    return {
        "iteration_s": statistics.median(seconds),
        "sums_per_iteration": first["sums_per_iteration"],
        "bytes_per_iteration": first["bytes_per_iteration"],
        "share_in_sums": statistics.median(m["share_in_sums"] for m in measured),
        "alone": {size: min(m["alone"][size] for m in measured) for size in first["alone"]},
    }


def fit(alone: Mapping[str, float], ranks: int) -> Network:
    """Latency and bandwidth from the smallest and the largest sum over `ranks` ranks, as `Network.sum_s` has them."""
    small, large = min(map(int, alone)), max(map(int, alone))
    messages = 2 * (ranks - 1)
    latency = alone[str(small)] / messages
    return Network(latency, large / ranks / max(alone[str(large)] / messages - latency, 1e-9))


# --- The page ---------------------------------------------------------------------------------------------------------


def render(rows: Sequence[harness.Row], found: Mapping[tuple[str, int], Mapping[str, Any]], machine: str) -> str:
    """docs/scaling.md."""
    ranks = sorted({k for _, k in found})
    cores = os.cpu_count() or 1
    few = min(k for k in ranks if k > 1)
    one, two = found["weak", 1], found["weak", few]
    network = fit(two["alone"], few)
    size = two["bytes_per_iteration"] / two["sums_per_iteration"]
    by_name = {row.name: row for row in rows}
    lines = [
        "# Scaling",
        "",
        f"Written by `torchpod bench scaling` on {machine} ({cores} cores, so that more than {cores} ranks share them);"
        " PPO on CartPole, one process per rank, gloo on CPUs. Weak: every rank has"
        f" {PER_RANK} environments. Strong: {IN_ALL} in all. A speed-up of K on K ranks would be perfect.",
        "",
        "## Measured",
        "",
        "| | ranks | env steps/s | speed-up | time in sums over ranks | by the model below |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for (kind, k), own in found.items():
        row = by_name[f"{kind}_ppo_cartpole/{k} ranks"]
        sums_s = own["sums_per_iteration"] * network.sum_s(k, size) if k > 1 else 0.0
        cells = (f"{row.value:,.0f}", f"{row.ratio:.2f}", f"{own['share_in_sums']:.1%}")
        lines.append(f"| {kind} | {k} | {' | '.join(cells)} | {sums_s / own['iteration_s']:.1%} |")
    lines += [
        "",
        "Time in sums is that of rank 0, and includes waiting for the slowest rank, which the model leaves out"
        + (f" (with more than {cores} ranks, also for a core)." if max(ranks) > cores else "."),
        "",
        "## A model of the sums",
        "",
        f"An iteration has {two['sums_per_iteration']} sums ({two['bytes_per_iteration'] / 1e3:,.0f} kB: gradients,"
        " moments of the advantages, episodes). A sum of n bytes over K ranks takes 2 (K - 1) messages of n / K bytes"
        " in a ring or 2 log2 K messages of n bytes in a tree, the better of which is counted; a message takes a"
        f" latency plus its bytes over a bandwidth. From sums over {few} ranks on this machine, of"
        f" 8 bytes and of 16 MiB: {1e6 * network.latency_s:.0f} us and {network.bandwidth / 1e9:.2f} GB/s. What these"
        " two numbers say of the other sizes and numbers of ranks:",
        "",
        "| ranks | bytes | measured alone | model |",
        "|--:|--:|--:|--:|",
    ]
    for k in ranks:
        if k > 1:
            for nbytes, seconds in found["weak", k]["alone"].items():
                predicted = network.sum_s(k, int(nbytes))
                lines.append(f"| {k} | {int(nbytes):,} | {1e6 * seconds:,.0f} us | {1e6 * predicted:,.0f} us |")
    lines += [
        "",
        "## Prediction",
        "",
        "**Nothing below was measured.** Efficiency is t / (t + sums), for an iteration that computes for t on each"
        f" device and makes the {two['sums_per_iteration']} sums of PPO on CartPole one after the other, without"
        " overlap and without waiting for the slowest rank, which costs more here than the sums do. The first t is that"
        " of one core of this machine with"
        f" {PER_RANK} environments; the others stand for faster devices, whose t a GPU run will replace. Networks are"
        " round numbers of data sheets: "
        + "; ".join(f"{name}: {1e6 * x.latency_s:.0f} us, {x.bandwidth / 1e9:.2f} GB/s" for name, x in ASSUMED.items())
        + ".",
        "",
        "| network | t | " + " | ".join(f"{k:,} devices" for k in PREDICTED) + " |",
        "|---|--:|" + "--:|" * len(PREDICTED),
    ]
    for name, assumed in ASSUMED.items():
        for t in (one["iteration_s"], 0.1, 0.01):
            sums = (two["sums_per_iteration"] * assumed.sum_s(k, size) for k in PREDICTED)
            lines.append(f"| {name} | {1e3 * t:,.0f} ms | " + " | ".join(f"{t / (t + s):.1%}" for s in sums) + " |")
    return "\n".join(lines) + "\n"
