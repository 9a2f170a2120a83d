"""Suite `lowered`: what iterations become on an NVIDIA H100, found out on a machine without one.

    torchpod bench lowered [--json FILE] [--quick] [--only NAME]
    python -m torchpod.bench.lowered experiment=cartpole [any override] [--compile | --check]

For each case: how many kernels, copies and fills an iteration launches, with the physical floor (floor.py) beside it;
whether machine code can be made of every kernel, and none would be chosen by timing; whether no program returns to the
host; and, with few environments, whether the programs compute what the functions do, their kernels run in Triton's
interpreter. The steps of an unroll are counted one by one, as a GPU runs them with more than 4096 environments or
TORCHPOD_UNROLL_KERNEL=0; with up to 4096 they can be one kernel (kernels/gpu_unroll.py), which is not looked at here.
The second form looks at any run of Anakin but those that reuse the forward pass. How fast all that is only a GPU can
tell (gpu.py). Needs Triton, which `make bench` puts beside the other packages, and g++.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpod.bench import floor, harness, processes
from torchpod.bench.compare import Row, RowMaker
from torchpod.bench.harness import Record
from torchpod.kernels import gxx

START = (
    "import ctypes, runpy, sys\n"
    "sys.path.append(sys.argv.pop(1))\n"
    "ctypes.CDLL(sys.argv.pop(1))\n"  # before torch asks whether there is a GPU
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"
)
GPU = floor.GPUS["H100"]
TIMEOUT_S = 900.0


class Case(NamedTuple):
    """A run."""

    name: str
    """Of its row, without the number of environments."""
    overrides: tuple[str, ...]
    num_envs: int
    few: int
    """Environments, where kernels are interpreted."""


PPO = ("algo=ppo", "algo.unroll_length=128")
TAG = "experiment=ia2c_tag_gridworld"
CASES = (
    Case("ppo_cartpole", (*PPO, "env=cartpole"), 1024, 32),
    Case("ppo_pendulum", (*PPO, "env=pendulum"), 1024, 32),
    Case("ppo_minatar_breakout", ("experiment=ppo_minatar_breakout",), 1024, 32),
    Case("a2c_grid_world", ("algo=a2c", "env=grid_world", "algo.unroll_length=32"), 4096, 32),
    Case("dqn_cartpole", ("experiment=dqn_cartpole", "algo.replay.capacity=8192"), 256, 8),
    Case("sac_pendulum", ("experiment=sac_pendulum", "algo.replay.capacity=8192"), 64, 8),
    Case("r2d2_memory_chain", ("experiment=r2d2_memory_chain", "algo.replay.capacity=8192"), 64, 8),
    Case("impala_catch", ("experiment=impala_catch",), 64, 8),
    Case("ia2c_tag_gridworld", (TAG,), 2000, 16),
    Case("ia2c_tag_gridworld_1000", (TAG, "env.num_taggers=999", "env.use_full_observation=false"), 64, 2),
)


def main(
    json_path: str | None = None, *, quick: bool = False, only: str | None = None, cases: Sequence[Case] = CASES
) -> int:
    """Looks, writes the result file, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: the first case, with few environments.
      only: the rows whose names begin with this.
      cases: what to look at.

    Returns:
      0, or 1 if something is wrong.
    """
    make = RowMaker()
    if quick:
        cases = [cases[0]._replace(num_envs=cases[0].few)]
    with Record("lowered", json_path, quick=quick, only=only, device="NVIDIA H100, not there") as record:
        for case in harness.chosen(cases, only, "lowered"):
            try:
                found = look((*case.overrides, f"num_envs={case.num_envs}"), "--compile")
                checked = look((*case.overrides, f"num_envs={case.few}"), "--check")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                record.failures.append((f"launches_{case.name}/{case.num_envs}", str(error)))
                continue
            of_case = case_rows(make, case, found, checked)
            record.rows += of_case
            print(f"{of_case[0].name}: {of_case[0].value:,.0f} launches; {of_case[0].note}", flush=True)
    return record.status


def case_rows(make: RowMaker, case: Case, found: dict[str, Any], checked: dict[str, Any]) -> list[Row]:
    """Launches, with their floor beside them; kernels; what differs."""
    rows, epochs, size = found["rows"], found["epochs"], found["observation_size"]
    num_bytes = floor.moved_bytes(rows, epochs, size, found["state_bytes"])
    num_flops = floor.flops(rows, epochs, found["layers"], size)
    least = floor.floor(found["launches"], num_bytes, num_flops, gpu=GPU, tf32=True)
    launches, moving, computing = (f"{1e3 * seconds:.2f}" for seconds in least)
    calls = ", ".join(f"{name.rpartition('.')[2]} {n} x {k}" for name, (n, k) in found["programs"].items())
    note = f"floor in ms: launches {launches}, bytes {moving}, flops {computing}; {calls}"
    name = f"{case.name}/{case.num_envs}"
    return [
        dataclasses.replace(make.alone(f"launches_{name}", found["launches"], "per iteration"), note=note),
        make.alone(f"kernels_{name}", found["kernels"], "of Triton"),
        make.alone(f"interpreted_{case.name}/{case.few}", checked["largest_difference"], "largest difference"),
    ]


def look(overrides: Sequence[str], *options: str) -> dict[str, Any]:
    """What lowered_worker.py finds.

    Raises:
      RuntimeError: with its last line if it fails.
    """
    ended = run("torchpod.bench.lowered_worker", *overrides, *options)
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        told = next(iter(ended.stderr.strip().splitlines()[::-1]), "nothing")
        raise RuntimeError(f"the worker ended with status {ended.returncode} and said: {told}")
    return json.loads(lines[-1])


def run(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A module as `python -m` would, in a process in which torch can trace for CUDA."""
    apart = Path(sys.prefix) / "triton"
    if importlib.util.find_spec("triton") is None and not apart.exists():
        raise RuntimeError(f"there is no Triton; pip install --no-deps --target {apart} triton")
    libraries = Path(torch.__file__).parent / "lib"
    stub = gxx.built(Path(__file__).with_name("no_gpu.cpp"), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}")
    interpret = {"TRITON_INTERPRET": "1"} if "--check" in arguments else {}
    return subprocess.run(
        [sys.executable, "-c", START, str(apart), str(stub), module, *arguments],
        env={**os.environ, **processes.ONE_THREAD, **interpret},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(look([w for w in words if w[:2] != "--"], *(w for w in words if w[:2] == "--")), indent=1))
