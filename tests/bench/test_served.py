"""Workers that wait for their turn."""

import sys
import textwrap
import time

from torchpod.bench.processes import Measurement, Worker, WorkerError
from torchpod.bench.served import Job, Wave

# Tells in a log when it did what. Its first argument says what goes wrong.
FAKE = textwrap.dedent(
    f"""
    import json, sys, time
    fault, log = sys.argv[1:3]
    def note(what):
        with open(log, "a") as file:
            file.write(what + " " + sys.argv[3] + chr(10))
    note("start")
    if fault == "broken":
        sys.exit("no such device")
    time.sleep(100 if fault == "slow" else 0.2)
    print("some noise")
    print(json.dumps({{"ready": True}}), flush=True)
    for i, _ in enumerate(sys.stdin):
        if fault == "dies" and i == 1:
            sys.exit("out of memory")
        note("measure")
        keys = {sorted(Measurement.__required_keys__)!r}
        print(json.dumps(dict.fromkeys(keys, i) if fault != "empty" else {{"wall_s": []}}), flush=True)
    note("end")
    if fault == "ends":
        sys.exit("no profiler")
    print(json.dumps({{"details": {{"kernels": 7}}}}))
    """
)


def run(tmp_path, *cases: tuple[str, str], rounds=2, seconds=30.0, ready_s=20.0):
    """Results and the log, for pairs of a case and a fault."""
    script, log = tmp_path / "fake.py", tmp_path / "log"
    script.write_text(FAKE)
    jobs = [
        Job(case, Worker("ours", (sys.executable, "-S", str(script))), [fault, str(log), f"{case}{i}"])
        for i, (case, fault) in enumerate(cases)
    ]
    with Wave(jobs, time.monotonic() + seconds, ready_s) as wave:
        results = wave.measure(rounds)
    return results, log.read_text().splitlines() if log.exists() else []


def test_all_start_at_once_and_the_sides_of_a_case_take_turns(tmp_path):
    results, log = run(tmp_path, ("a", ""), ("a", ""), ("b", ""))
    assert sorted(log[:3]) == ["start a0", "start a1", "start b2"]
    assert log[3:7] == ["measure a0", "measure a1", "measure a0", "measure a1"]
    assert log[7:] == ["end a0", "end a1", "measure b2", "measure b2", "end b2"]
    for result in results:
        assert isinstance(result.measurements, list) and [m["wall_s"] for m in result.measurements] == [0, 1]
        assert result.details == {"kernels": 7}


def test_what_fails_is_told_and_the_others_go_on(tmp_path):
    results, _ = run(tmp_path, ("a", "broken"), ("a", "dies"), ("a", "empty"), ("a", ""))
    errors = [str(result.measurements) for result in results[:3]]
    assert errors[0] == "ours failed (exit status 1): no such device"
    assert errors[1] == "ours failed (exit status 1): out of memory"
    assert errors[2].startswith("ours printed a measurement without batch_rows, ")
    assert isinstance(results[3].measurements, list)


def test_a_worker_that_fails_after_its_last_round_has_been_measured(tmp_path):
    ((measurements, details), _), _ = run(tmp_path, ("a", "ends"), ("a", ""))
    assert isinstance(measurements, list) and len(measurements) == 2 and details == {}


def test_nobody_waits_longer_than_the_time_there_is(tmp_path):
    began = time.monotonic()
    results, log = run(tmp_path, ("a", "slow"), ("b", ""), ready_s=2.0)
    assert "it was not ready when the time was over" in str(results[0].measurements) and isinstance(
        results[1].measurements, list
    )
    results, log = run(tmp_path, ("c", ""), ("d", ""), seconds=0.0)
    assert all(isinstance(result.measurements, WorkerError) for result in results)
    assert "measure c0" not in log and time.monotonic() - began < 15


def test_a_worker_that_cannot_run_says_why(tmp_path):
    jobs = [Job("a", Worker("jax", (), missing="not installed"), []), Job("b", Worker("x", ("/no/such/file",)), [])]
    with Wave(jobs, time.monotonic() + 10) as wave:
        missing, gone = wave.measure(1)
    assert str(missing.measurements) == "jax: not installed"
    assert str(gone.measurements).startswith("x could not be started: ")
