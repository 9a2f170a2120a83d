"""Suite reuse: both sides are the same work but for one option, and rows are ratios between them."""

import json
import sys

import pytest

from torchpod.bench import compare, harness, reuse, reuse_worker
from torchpod.bench.processes import Worker
from torchpod.bench.reuse_worker import CASES, Case
from torchpod.compile import Compiler
from torchpod.envs.bsuite.catch import Catch

CASES_FOR_TESTS = {"tiny/4": Case("a2c", Catch, 4, 1, {"hidden": (4,), "channels": ()})}


def run_worker(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(reuse_worker, "CASES", CASES_FOR_TESTS)
    monkeypatch.setattr(sys, "argv", ["reuse_worker", "--case", "tiny/4", "--repeats", "2", *arguments])
    monkeypatch.setattr(reuse_worker, "Compiler", lambda enabled: Compiler(enabled=False))
    reuse_worker.main()
    return json.loads(capsys.readouterr().out)


def test_both_sides_do_the_same_work(monkeypatch, capsys):
    recomputed = run_worker(monkeypatch, capsys)
    reused = run_worker(monkeypatch, capsys, "--reuse")
    assert compare.unequal_work(reused, recomputed) == []
    assert (reused["batch_rows"], reused["env_steps"]) == (64, recomputed["env_steps"])


def test_rows_are_ratios_and_failures_are_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 95.1})
    m = run_worker(monkeypatch, capsys)
    workers = []
    for name, rate, compile_s in (("torchpod", 300.0, 2.0), ("recomputed", 200.0, 4.0)):
        path = tmp_path / f"{name}.py"
        faked = m | {
            "env_steps": [rate],
            "wall_s": [1.0],
            "cpu_s": [1.0],
            "compile_s": compile_s,
        }
        path.write_text(f"print({json.dumps(json.dumps(faked))})")
        workers.append(Worker(name, (sys.executable, str(path))))
    out = tmp_path / "out.json"
    assert reuse.main(str(out), cases=["tiny/4"], rounds=2, workers=tuple(workers)) == 0
    rate, compile_row = json.loads(out.read_text())["rows"]
    assert (rate["name"], rate["ratio"], rate["peer"]["name"]) == ("tiny/4", 1.5, "recomputed")
    assert compile_row["ratio"] == pytest.approx(0.5)

    workers[0] = Worker("torchpod", (sys.executable, "-c", "raise SystemExit('no memory')"))
    assert reuse.main(str(out), cases=["tiny/4"], rounds=1, workers=tuple(workers)) == 1
    assert "no memory" in json.loads(out.read_text())["failures"][0][1]


def test_every_case_is_named_by_its_size():
    assert all(name.endswith(f"/{case.num_envs}") for name, case in CASES.items())
