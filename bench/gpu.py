"""Suite `gpu`: is the captured iteration right, free of host syncs, and how fast is it.

    torchpod bench gpu [--json FILE] [--quick]

Correctness first: random words as on the CPU; one iteration from the same carry, eager against compiled against
captured, where the captured one must also agree in every integer; a replay under the profiler, in which the host must
not wait for the device. Then PPO CartPole at several sizes: steps per second, kernels per iteration, capture time,
memory. Then Sebulba with IMPALA on EnvPool, beside EnvPool alone. With `device="cpu"` the same code runs uncaptured,
which is how it is tested.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, RunState
from torchpod.bench import harness
from torchpod.bench.harness import Row, RowMaker
from torchpod.bench.sebulba_worker import measure
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.graph import Replay
from torchpod.learner import LearnerConfig

NUM_ENVS = (1024, 4096, 16_384, 65_536)
HOST_CASES = (("Pong-v5", 32, 20), ("Pong-v5", 256, 20), ("Pong-v5", 256, 60), ("Breakout-v5", 256, 20))
"""Task, environments over all actors, unroll length."""
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TOLERANCE = 1e-4
"""On parameters after one iteration: floats differ by ulps between eager, compiled and captured kernels."""


def main(json_path: str | None = None, *, quick: bool = False, device: str = "cuda") -> int:
    """Measures and writes the rows; returns 1 if something is wrong, 2 if there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        print("torchpod bench gpu: PyTorch sees no CUDA device here.", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = True  # as JAX multiplies by default
    load_average = os.getloadavg()
    rows, failures = correctness(device, num_envs=64 if quick else 1024)
    for num_envs in NUM_ENVS[:1] if quick else NUM_ENVS:
        rows += throughput(device, num_envs, iterations=2 if quick else 20)
        print(f"{rows[-1].name}: {rows[-1].value:,.0f} {rows[-1].unit}", flush=True)
    cases = (("CartPole-v1", 8, 8),) if quick else HOST_CASES
    if importlib.util.find_spec("envpool") is None:
        cases = ()
        failures.append("EnvPool is not installed, so no host environment was measured; pip install envpool.")
    for task, num_envs, unroll_length in cases:
        rows += host_throughput(device, task, num_envs, unroll_length, iterations=2 if quick else 10)
        print(f"{rows[-1].name}: {rows[-1].value:.2f} {rows[-1].unit}", flush=True)
    return harness.finish(
        "gpu",
        rows,
        failures=failures,
        load_average=load_average,
        json_path=json_path,
        extra={"tf32": torch.backends.cuda.matmul.allow_tf32, "cuda": torch.version.cuda, "quick": quick},
    )


def build(device: str, num_envs: int, *, compiled: bool) -> Anakin:
    """PPO on CartPole, as the `anakin` suite measures it."""
    env = CartPole()
    return Anakin(
        lambda: PPO(env.spec, PPOConfig()),
        env,
        num_envs=num_envs,
        unroll_length=128,
        learner=LearnerConfig(),
        num_iterations=1000,
        compiler=Compiler(compiled),
        device=device,
    )


def correctness(device: str, num_envs: int) -> tuple[list[Row], list[str]]:
    """Eager, compiled and captured from the same carry; and the number of host syncs in a replay."""
    eager, compiled = build(device, num_envs, compiled=False), build(device, num_envs, compiled=True)
    state = eager.init(0)
    replay = Replay(compiled.iterate, state, capture=device == "cuda")
    replay()
    results = {
        "eager": eager.iterate(state)[0],
        "compiled": compiled.iterate(state)[0],
        "captured": pytree.tree_map(torch.clone, replay.state),
    }
    make, rows, failures = RowMaker(), [], []
    for a, b in (("eager", "compiled"), ("compiled", "captured")):
        difference = largest_difference(results[a], results[b])
        rows.append(make.alone(f"difference_{a}_{b}/{num_envs}", difference, "largest over parameters"))
        if not difference <= TOLERANCE:
            failures.append(f"{b} differs from {a} by {difference:.2e} after one iteration; {TOLERANCE} is allowed.")
    unlike = different_integers(results["compiled"], results["captured"])
    rows.append(make.alone(f"different_integers_compiled_captured/{num_envs}", len(unlike), "leaves"))
    if unlike:
        failures.append(f"captured and compiled differ after one iteration in {unlike}.")
    keys = random.split(random.key(3), num_envs)
    same = torch.equal(random.bits(keys, 8), random.bits(keys.to(device), 8).cpu())
    rows.append(make.alone(f"random_words_as_on_cpu/{num_envs}", int(same), "bool"))
    if not same:
        failures.append(f"random words on {device} are not those on the CPU.")
    syncs = host_syncs(replay)
    rows.append(make.alone(f"host_syncs_per_replay/{num_envs}", len(syncs), "calls"))
    if syncs:
        failures.append(f"the host waits for the device during a replay: {sorted(set(syncs))}.")
    return rows, failures


def largest_difference(a: RunState, b: RunState) -> float:
    """Over all parameters."""
    return max(float((x - b.learner.params[name]).abs().max()) for name, x in a.learner.params.items())


def different_integers(a: RunState, b: RunState) -> list[str]:
    """Names of the leaves of whole numbers - keys, actions' consequences, counters - that are not equal."""
    pairs = zip(pytree.tree_flatten_with_path(a)[0], pytree.tree_leaves(b), strict=True)
    return [pytree.keystr(path) for (path, x), y in pairs if not x.is_floating_point() and not torch.equal(x, y)]


def host_syncs(replay: Replay) -> list[str]:
    """Names of the calls in which the host waited during one replay; the last synchronisation is the profiler's."""
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
        torch.profiler.record_function("replay"),
    ):
        replay()
    events = profile.events()
    if events is None:
        return []
    return waits(events)


def waits(events: Iterable[Any]) -> list[str]:
    """Names of the events within the range "replay" in which the host waits, or a copy to it goes on."""
    events = list(events)
    window = next(e.time_range for e in events if e.name == "replay")
    return [
        e.name
        for e in events
        if "Memcpy DtoH" in e.name
        or (any(sync in e.name for sync in SYNCS) and window.start <= e.time_range.start <= window.end)
    ]


def throughput(device: str, num_envs: int, iterations: int) -> list[Row]:
    """Environment steps per second of whole iterations, with what they cost to set up."""
    anakin = build(device, num_envs, compiled=True)
    began = time.perf_counter()
    replay = Replay(anakin.iterate, anakin.init(0), capture=device == "cuda")
    _wait(device)
    setup_s = time.perf_counter() - began
    replay()
    _wait(device)
    rates = []
    for _ in range(3):
        steps, began = int(replay.state.env_steps), time.perf_counter()
        for _ in range(iterations):
            replay()
        _wait(device)
        seconds = time.perf_counter() - began
        rates.append((int(replay.state.env_steps) - steps) / seconds)
    rates.sort()
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    make = RowMaker()
    return [
        make.alone(f"setup_ppo_cartpole/{num_envs}", setup_s, "s"),
        make.alone(f"memory_ppo_cartpole/{num_envs}", memory, "bytes"),
        make.alone(f"ppo_cartpole/{num_envs}", rates[1], "env_steps/s", rates),
    ]


def host_throughput(device: str, task: str, num_envs: int, unroll_length: int, iterations: int) -> list[Row]:
    """Sebulba with IMPALA on EnvPool: environment steps per second, and their share of what EnvPool does alone."""
    results = {
        mode: measure(
            task,
            num_envs,
            mode,
            actors=num_actors,
            pools=num_pools,
            iterations=iterations,
            repeats=3,
            threads=1,
            seed=0,
            algo="impala",
            unroll_length=unroll_length,
            device=device,
        )
        for mode, num_actors, num_pools in (("env_only", 1, 1), ("update", 2, 2))
    }
    make, where = RowMaker(), f"{task}/{num_envs}x{unroll_length}"
    raw, ours = (results[mode]["env_steps_per_s"]["median"] for mode in ("env_only", "update"))
    return [
        make.alone(f"raw_envpool_{where}", raw, "env_steps/s", harness.rates(results["env_only"])),
        make.alone(f"impala_{where}", ours, "env_steps/s", harness.rates(results["update"])),
        make.alone(f"impala_of_raw_{where}", ours / raw, "share"),
    ]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
