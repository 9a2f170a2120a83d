"""A worker that takes no time, for suites."""

import sys
import textwrap
from pathlib import Path

import pytest

from torchpod.bench import compare, harness
from torchpod.bench.processes import Worker

# A worker that takes no time: its rate is on its command line, and it tells in a log when it ran.
FAKE = textwrap.dedent(
    """
    import json, os, sys
    name, rate, params, flops, log, *arguments = sys.argv[1:]
    options = dict(zip(arguments[::2], arguments[1::2]))
    num_envs, iterations = int(options["--num-envs"]), int(options["--iterations"])
    repeats, warmup = int(options["--repeats"]), int(options.get("--warmup", 0))
    wall = iterations * 128 * num_envs / float(rate)
    warm = os.path.exists(os.environ["JAX_COMPILATION_CACHE_DIR"])
    os.makedirs(os.environ["JAX_COMPILATION_CACHE_DIR"], exist_ok=True)
    with open(log, "a") as file:
        file.write(f"{name} {options['--mode']} {num_envs}\\n")
    print("a line that is not JSON")
    print(json.dumps(dict(
        framework=name, mode=options["--mode"], num_envs=num_envs, unroll_length=128, epochs=4, minibatches=4,
        batch_rows=128 * num_envs, param_count=int(params), flops=float(flops), dtype="float32", iterations=iterations,
        total_iterations=iterations * (repeats + max(1, -(-warmup // iterations))), compile_s=0.5 if warm else 5.0,
        env_steps=[iterations * 128 * num_envs] * repeats,
        wall_s=[wall] * repeats, cpu_s=[wall] * repeats,
        episode_return=100.0, episodes=3, threads=dict(cores=len(os.sched_getaffinity(0))), versions={name: "1"})))
    """
)
CALIBRATION = {"2048x64x64": 50.0}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes fake workers, and a calibration that costs nothing."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(harness, "calibrate", lambda core: CALIBRATION)
    monkeypatch.setattr(compare, "commit", lambda: "abc1234")
    monkeypatch.setattr(harness, "commit", lambda: "abc1234")

    def make(name: str, rate: float, *, params: int = 9155, flops: float = 0.0, missing: str | None = None) -> Worker:
        command = (sys.executable, "-S", str(script), name, str(rate), str(params), str(flops), str(tmp_path / "log"))
        return Worker(name, command, missing=missing)

    return make
