"""What a worker reports of a function that is called again and again: calls, or rows, per second."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch


def report(
    call: Callable[[], object],
    *,
    framework: str,
    work: Mapping[str, Any],
    rows_per_call: int = 1,
    seconds: float = 1.0,
    repeats: int = 3,
    packages: Sequence[str] = ("torch", "torchrl", "tensordict"),
) -> dict[str, Any]:
    """Warms up, calls, and counts.

    Args:
      call: waits for what it does.
      framework: the side.
      work: what must be equal on both sides: `mode`, `num_envs`, `batch_rows`, ... (compare.py).
      rows_per_call: what is counted.
      seconds: of a timed stretch of calls, about.
      repeats: stretches.
      packages: whose versions are told.
    """
    began = time.perf_counter()
    for _ in range(3):  # the second is recorded (kernels/recorded.py)
        call()
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(5):
        call()
    each_s = (time.perf_counter() - began) / 5
    count = max(2, round(seconds / each_s))
    wall_s, cpu_s = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    return {
        "framework": framework,
        "num_envs": 1,
        "unroll_length": 1,
        "epochs": 1,
        "minibatches": 1,
        "param_count": 0,
        "dtype": "float32",
        "iterations": 1,
        "total_iterations": 0,
        **work,
        "compile_s": max(0.0, first_s - 3 * each_s),
        "env_steps": [count * rows_per_call] * repeats,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": None,
        "episodes": 0,
        "threads": {"torch": torch.get_num_threads(), "affinity": len(os.sched_getaffinity(0))},
        "versions": {name: metadata.version(name) for name in packages} | {"python": platform.python_version()},
    }
