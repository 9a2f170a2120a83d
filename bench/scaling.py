"""Suite `scaling`: one run on more ranks: more environments (weak) or the same shared out (strong).

    torchpod bench scaling [--json FILE] [--quick]

The peer of each row is one rank, so that `ratio` is the speed-up; K is what K ranks could reach at most. Rows
`apart_...` are those of weak scaling without sums: processes that know nothing of each other, which is what the machine
has for so many. Sums over all ranks are measured alone as well, and give the two numbers of a model, latency and
bandwidth, that predicts how long the sums of an iteration take on more devices than there are here: docs/scaling.md,
which `torchpod bench report` writes.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpod.bench import processes
from torchpod.bench.anakin import UNROLL_LENGTH
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Worker, WorkerError
from torchpod.learner import LearnerConfig

KINDS = ("weak", "apart", "strong")
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
) -> int:
    """Measures, writes the result file, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: two ranks at most, one round of one call.
      num_ranks: 1 first.
      rounds: times that each number of ranks runs, in turn.
      repeats: timed calls in a round.
      worker: of a number of ranks; None for the real one.

    Returns:
      0, or 1 if something failed.
    """
    if quick:
        num_ranks, rounds, repeats = tuple(k for k in num_ranks if k <= 2), 1, 1
    make, sums = RowMaker(), dict[str, Any]()
    device, wanted = device_for(num_ranks), num_ranks
    if device == "cuda":
        num_ranks = [k for k in wanted if k <= torch.cuda.device_count()]
    workers = [worker(k) if worker else real_worker(k, device) for k in num_ranks]
    with Record("scaling", json_path, rounds=rounds, repeats_per_round=repeats, quick=quick, sums=sums) as record:
        record.calibrate(None)
        for kind in KINDS:
            few = [k for k in wanted if k not in num_ranks]
            record.failures += [(row_name(kind, k), "not measured, for there is no GPU for each.") for k in few]
            results: dict[int, list[Any] | WorkerError] = {k: [] for k in num_ranks}
            with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
                for _ in range(rounds):
                    for k, one in zip(num_ranks, workers, strict=True):
                        arguments = [case_arguments(kind, k, repeats)]
                        measured = processes.interleave((one,), arguments, core=None, cache_dir=Path(cache))[one.name]
                        done = results[k]
                        if isinstance(done, list) and isinstance(measured, list):
                            done += measured
                        elif isinstance(measured, WorkerError):
                            results[k] = measured
            for k in num_ranks:
                own, one = results[k], results[num_ranks[0]]
                row = make.rate(row_name(kind, k), own, one, peer_name="1 rank", waits=True)
                if isinstance(own, WorkerError):
                    record.failures.append((row.name, str(own)))
                else:
                    sums[f"{kind}/{k}"] = summary(own)
                record.rows.append(row)
                print(f"{row.name}: {row.value} {row.unit}, speed-up {row.ratio}", flush=True)
        record.calibrate(None)
    return record.status


def row_name(kind: str, ranks: int) -> str:
    """Of a kind of scaling with so many ranks."""
    return f"{kind}_ppo_cartpole/{ranks} ranks"


def device_for(num_ranks: Sequence[int]) -> str:
    """Of all ranks of a run, so that speed-ups compare like with like: cuda if there are GPUs for more than one."""
    return "cuda" if torch.cuda.device_count() >= min((k for k in num_ranks if k > 1), default=1) else "cpu"


def real_worker(ranks: int, device: str) -> Worker:
    """`torchrun` on this host: NCCL on GPUs, gloo on CPUs."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = (sys.executable, *torchrun, "-m", "torchpod.bench.scaling_worker", "--device", device)
    return Worker(f"{ranks}-ranks", command)  # the name is part of a path that compilers get


def case_arguments(kind: str, ranks: int, repeats: int) -> list[str]:
    """Of `ranks` ranks in all."""
    num_envs = IN_ALL if kind == "strong" else PER_RANK * ranks
    size = ["--num-envs", str(num_envs), "--iterations", "4", "--repeats", str(repeats)]
    return [*size, "--apart"] if kind == "apart" else size


def summary(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rounds of one case: seconds per iteration, and what `scaling_worker.Sums` holds."""
    seconds = [wall / m["iterations"] for m in measured for wall in m["wall_s"]]
    first = measured[0]
    return {
        "device": first.get("device", "cpu"),
        "iteration_s": statistics.median(seconds),
        "sums_per_iteration": first["sums_per_iteration"],
        "bytes_per_iteration": first["bytes_per_iteration"],
        **{x: statistics.median(m[x] for m in measured) for x in ("share_in_sums", "share_waiting", "share_summing")},
        "alone": {size: min(m["alone"][size] for m in measured) for size in first["alone"]},
    }


def fit(alone: Mapping[str, float], ranks: int) -> Network:
    """Latency and bandwidth from the smallest and the largest sum over `ranks` ranks, as `Network.sum_s` has them."""
    small, large = min(map(int, alone)), max(map(int, alone))
    messages = 2 * (ranks - 1)
    latency = alone[str(small)] / messages
    return Network(latency, large / ranks / max(alone[str(large)] / messages - latency, 1e-9))


# --- The page ---------------------------------------------------------------------------------------------------------

BACKENDS = {"cpu": "gloo on CPUs", "cuda": "NCCL on GPUs"}


def tells(document: Mapping[str, Any]) -> bool:
    """Whether a run has what the page is about: weak scaling on one rank and on more."""
    ranks = {name for name in document["sums"] if name.startswith("weak/")}
    return "weak/1" in ranks and len(ranks) > 1


def render(document: Mapping[str, Any], gpu: Mapping[str, Any] | None) -> str:
    """docs/scaling.md.

    Args:
      document: the result file of a run of this suite that `tells`.
      gpu: that of suite `gpu`, whose iterations the prediction takes; None if there is none.
    """
    found = {(kind, int(k)): x for name, x in document["sums"].items() for kind, k in [name.split("/")]}
    few, *more = sorted(k for kind, k in found if kind == "weak" and k > 1)
    machine, cores = document["hardware"]["name"], document["hardware"]["cores"]
    one, two = found["weak", 1], found["weak", few]
    backend = BACKENDS[one.get("device", "cpu")]  # told since 2026-11-26; all were CPUs before
    network = fit(two["alone"], few)
    size = two["bytes_per_iteration"] / two["sums_per_iteration"]
    by_name = {row["name"]: row for row in document["rows"]}
    lines = [
        "# Scaling",
        "",
        f"Measured by `torchpod bench scaling` on {machine} ({cores} cores, so that more than {cores} ranks share"
        f" them), {document['date'][:10]}, commit {document['commit']}; written by `torchpod bench report`, do not"
        f" edit. PPO on CartPole, one process per rank, {backend}. Weak: every rank has {PER_RANK} environments."
        f" Strong: {IN_ALL} in all. Apart: weak without sums, processes that know nothing of each other. A speed-up of"
        " K on K ranks would be perfect.",
        "",
        "## Measured",
        "",
        "| | ranks | env steps/s | speed-up | time in sums over ranks | waiting | summing | by the model below |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (kind, k), own in found.items():
        row = by_name[row_name(kind, k)]
        sums_s = own["sums_per_iteration"] * network.sum_s(k, size)
        shares = (own["share_in_sums"], own["share_waiting"], own["share_summing"], sums_s / own["iteration_s"])
        speed_up = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        cells = (f"{row['value']:,.0f}", speed_up, *(f"{share:.1%}" for share in shares))
        lines.append(f"| {kind} | {k} | {' | '.join(cells)} |")
    failures = [f"- **{name}: {sentence}**" for name, sentence in document["failures"]]
    lines += [
        *(["", *failures] if failures else []),
        "",
        "Time in sums is that of rank 0, and includes waiting for the slowest rank"
        + (f" (with more than {cores} ranks, also for a core)." if max([few, *more]) > cores else ".")
        + " Waiting and summing are of iterations of their own, with a barrier before every sum: the share of the time"
        " until all ranks are there, the barrier's messages included, and that of the sum alone, which is what the"
        " model is of.",
        *_of_the_machine(by_name, few),
        *_in_an_iteration(two, few),
        "",
        "## A model of the sums",
        "",
        f"An iteration has {_sums(two)}. A sum of n bytes over K ranks takes 2 (K - 1) messages of n / K bytes"
        " in a ring or 2 log2 K messages of n bytes in a tree, the better of which is counted; a message takes a"
        f" latency plus its bytes over a bandwidth. From sums over {few} ranks on this machine, of"
        f" 8 bytes and of 16 MiB: {1e6 * network.latency_s:.0f} us and {network.bandwidth / 1e9:.2f} GB/s. What these"
        " two numbers say of the other sizes and numbers of ranks:",
        "",
        "| ranks | bytes | measured alone | model |",
        "|--:|--:|--:|--:|",
    ]
    alone = [
        (k, int(nbytes), 1e6 * seconds, 1e6 * network.sum_s(k, int(nbytes)))
        for k in (few, *more)
        for nbytes, seconds in found["weak", k]["alone"].items()
    ]
    lines += [f"| {k} | {n:,} | {measured:,.0f} us | {model:,.0f} us |" for k, n, measured, model in alone]
    k, n, measured, model = max(alone, key=lambda x: x[2] / x[3])
    why = f": {k} ranks share {cores} cores, and a sum waits until each has had its turn on one" if k > cores else ""
    lines += [
        "",
        f"Of sums alone the model is off most with {k} ranks and {n:,} bytes: {measured:,.0f} us measured, {model:,.0f}"
        f" by the model, {measured / model:.1f} x{why}. {_inside(found, network, size)}"
        f"{_exact(two['alone'], few, network)} {_nearest(two['alone'], few, size, network)}",
        "",
        *_prediction(one, two, few, gpu, machine, backend),
    ]
    return "\n".join(lines) + "\n"


def _of_the_machine(rows: Mapping[str, Mapping[str, Any]], ranks: int) -> list[str]:
    """How much of what is lost is not the sums': measured since 2026-11-27."""
    apart, weak = rows.get(row_name("apart", ranks), {}).get("ratio"), rows[row_name("weak", ranks)]["ratio"]
    if apart is None:
        return []
    return [
        f"Without any sums {ranks} processes are {apart:.2f} times as fast as one here, which the machine decides"
        f" (memory, clocks, its neighbours); with them {weak:.2f}, {weak / apart:.0%} of that."
    ]


def _in_an_iteration(own: Mapping[str, Any], ranks: int) -> list[str]:
    """What a sum takes between computations, beside the same one after the other."""
    each = own["share_summing"] * own["iteration_s"] / own["sums_per_iteration"]
    size = min(own["alone"], key=lambda n: abs(int(n) - own["bytes_per_iteration"] / own["sums_per_iteration"]))
    return [
        f"Between computations a sum of {ranks} ranks that all begin together takes rank 0 about {1e6 * each:,.0f} us"
        f" in the mean; made again and again, of {int(size):,} bytes, {1e6 * own['alone'][size]:,.0f} in the median."
    ]


def _sums(own: Mapping[str, Any]) -> str:
    """Of an iteration, in words."""
    config, num_sums = LearnerConfig(), own["sums_per_iteration"]
    updates = config.num_epochs * config.num_minibatches
    return (
        f"{num_sums} sums ({own['bytes_per_iteration'] / 1e3:,.0f} kB): {updates} of gradients, one for each update"
        f" ({config.num_epochs} epochs x {config.num_minibatches} minibatches), which are nearly all of the bytes,"
        f" {config.num_epochs} of the advantages' moments and {num_sums - updates - config.num_epochs} of metrics and"
        " episodes"
    )


def _inside(found: Mapping[tuple[str, int], Mapping[str, Any]], network: Network, size: float) -> str:
    """What the model is off by inside iterations."""
    off = {
        f"{kind} scaling with {k} ranks": own["share_summing"] * own["iteration_s"] / (sums * network.sum_s(k, size))
        for (kind, k), own in found.items()
        if (sums := own["sums_per_iteration"]) > 0 and k > 1
    }
    worst = max(off, key=lambda name: off[name])
    return (
        f"Inside iterations a sum takes {min(off.values()):.1f} to {off[worst]:.1f} x what the model says (summing"
        f" beside the model, in the first table), most in {worst}."
    )


def _exact(alone: Mapping[str, float], ranks: int, network: Network) -> str:
    """That the model says nothing where it was fitted; with many ranks it does, for it takes a tree there."""
    ends = min(map(int, alone)), max(map(int, alone))
    if not all(math.isclose(network.sum_s(ranks, n), alone[str(n)], rel_tol=0.01) for n in ends):
        return ""
    return (
        f" With {ranks} ranks it is exact at {ends[0]:,} and {ends[1]:,} bytes by construction: it was fitted to these."
    )


def _nearest(alone: Mapping[str, float], ranks: int, size: float, network: Network) -> str:
    """What the model is off by where it is used: at the measured sum that is nearest to those of an iteration."""
    n = min(map(int, alone), key=lambda n: abs(n - size))
    return (
        f"A sum of an iteration has {size / 1e3:,.0f} kB in the mean, and {n:,} bytes were measured: with {ranks} ranks"
        f" {1e6 * alone[str(n)]:,.0f} us, where the model says {1e6 * network.sum_s(ranks, n):,.0f}."
    )


def _prediction(
    one: Mapping[str, Any],
    two: Mapping[str, Any],
    ranks: int,
    gpu: Mapping[str, Any] | None,
    machine: str,
    backend: str,
) -> list[str]:
    num_sums, num_bytes = two["sums_per_iteration"], two["bytes_per_iteration"]
    never = ", and NCCL was never run with several GPUs" if backend == BACKENDS["cpu"] else ""
    lines = [
        "## Prediction",
        "",
        f"**No efficiency below was measured{never}.** It is t / (t + sums), for an iteration that computes for t on"
        f" each device and makes its {num_sums} sums ({num_bytes / 1e3:,.0f} kB) one after the other, without overlap,"
        f" without waiting for the slowest rank (with {ranks} here {two['share_waiting']:.1%} of the time, sums"
        f" {two['share_summing']:.1%}), and without what the model is off by. Every t was measured, on one device."
        " Networks are round numbers of data sheets: "
        + "; ".join(f"{name}: {1e6 * x.latency_s:.0f} us, {x.bandwidth / 1e9:.2f} GB/s" for name, x in ASSUMED.items())
        + ".",
        "",
        "| network | device | environments of each | t | " + " | ".join(f"{k:,} devices" for k in PREDICTED) + " |",
        "|---|---|--:|--:|" + "--:|" * len(PREDICTED),
    ]
    for name, assumed in ASSUMED.items():
        for device, num_envs, t in [(f"1 rank on {machine}", PER_RANK, one["iteration_s"]), *iterations_of(gpu)]:
            shares = (t / (t + num_sums * assumed.sum_s(k, num_bytes / num_sums)) for k in PREDICTED)
            cells = (name, device, f"{num_envs:,}", f"{1e3 * t:,.2f} ms", *(f"{share:.1%}" for share in shares))
            lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "What others measured: almost linear from 16 to 128 TPU cores, Anakin and MuZero in Sebulba ([Podracer"
        " architectures](https://arxiv.org/abs/2104.06272)); 444,200 env steps/s of R2D2 on MinAtar by Anakin on 2 GPUs"
        " (the notebook of [Earl](https://www.garymm.org/blog/2025/03/03/earl/)).",
    ]


def iterations_of(gpu: Mapping[str, Any] | None) -> list[tuple[str, int, float]]:
    """The GPU, environments, and seconds per iteration of PPO on CartPole, in the smallest and the largest size."""
    if gpu is None:
        return []
    rates = {
        row["name"]: row["value"] for row in gpu["rows"] if row["name"].startswith("ppo_cartpole/") and row["value"]
    }
    sizes = sorted(int(name.partition("/")[2]) for name in rates)
    device = gpu["hardware"]["gpu"]
    return [(device, n, UNROLL_LENGTH * n / rates[f"ppo_cartpole/{n}"]) for n in (*sizes[:1], *sizes[1:][-1:])]
