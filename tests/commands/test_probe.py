"""Probes in processes of their own: what fits, what does not, and that nothing is left of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchpod import host_memory
from torchpod.commands.probe import Answer, ProbeError, answer, measure
from torchpod.host_memory import available_bytes, private_bytes, status_bytes

SMALL = ["env=cartpole", "compile=false", "num_envs=8", "algo.unroll_length=8", "algo.agent.hidden=[8]"]


def test_a_run_that_fits_is_measured():
    found = measure(SMALL, seconds=0.05, limit=8 * 10**9, on_cpu=True)
    assert (found.verdict, found.limit_bytes, found.minibatch_rows, found.why) == ("fits", 8 * 10**9, 16, "")
    assert found.env_steps_per_s > 0 and found.compile_s > 0 and 0 < found.cpu_share <= 1
    assert 10**8 < found.memory_bytes < 2 * 10**9


def test_one_that_takes_more_than_it_may_is_stopped():
    found = measure(SMALL, seconds=1000.0, limit=10**8, on_cpu=True)
    assert (found.verdict, found.why) == ("out of memory", "stopped at the limit")
    assert 10**8 < found.memory_bytes < 10**9
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host_memory.children(os.getpid())]
    assert not any(b"torchpod.commands.probe" in command for command in commands)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["algo=ippo", "env=tag_gridworld"], 4 * 16),  # four taggers have the largest policy
        (["algo=ippo", "env=tag_gridworld", "+algo.agent.policies.everybody=[tagger,runner]"], 5 * 16),
        (["algo=ippo", "env=tag_gridworld", "+algo.agent.policies.tagger.train=false"], 16),
        (["algo=impala", "loop=sebulba", "loop.updates_per_batch=2", "algo.learner.num_minibatches=4"], 8),
        (["algo=a2c", "algo.learner.num_minibatches=1", "algo.agent.reuse_forward=true"], 0),
        (["algo=apg", "env=pendulum"], 0),
        (["algo=dqn", "algo.replay.min_size=1", "algo.replay.batch_size=4"], 0),
    ],
)
def test_the_rows_of_a_minibatch_are_those_that_the_learner_cuts(overrides: list[str], rows: int):
    fields = answer([*SMALL, *overrides], 0.01, None)
    assert fields.get("minibatch_rows") == rows, fields


def test_what_no_machine_has_is_out_of_memory():
    fields = answer([*SMALL, f"num_envs={2**45}"], 0.05, None)
    assert fields["verdict"] == "out of memory"
    assert "memory" in fields["why"]


def test_settings_that_cannot_work_are_refused_with_their_sentence():
    fields = answer(["algo=ppo", "env=gymnasium", "env.task=CartPole-v1"], 0.05, None)
    assert fields["verdict"] == "refused"
    assert fields["why"].endswith("run it with loop=sebulba.")


def test_an_error_of_the_environment_is_told():
    env = [f"env={Path(__file__).parents[1]}/user_env.py:MyEnv", "+env.fault=raise"]
    fields = answer([*SMALL[1:], *env], 0.05, None)
    assert fields == {"error": "RuntimeError: the simulator lost its licence. TORCHPOD_TRACEBACK=1 shows where."}


class TestEnds:
    """With a program in place of Python that ends as it is told."""

    @pytest.fixture
    def python(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "python"
        monkeypatch.setattr(sys, "executable", str(path))
        return path

    def end(self, python: Path, script: str) -> Answer:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return measure(SMALL, seconds=0.05, limit=None, on_cpu=True)

    def test_whom_the_system_kills_wanted_memory(self, python: Path):
        assert self.end(python, "kill -KILL $$") == Answer("out of memory", why="killed by the system")

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("echo wrong >&2; kill -SEGV $$", "a probe ended by SIGSEGV: wrong"),
            ("exit 3", r"a probe ended \(3\): it said nothing"),
            ("""echo '{"error": "no licence"}'""", "no licence"),
        ],
    )
    def test_any_other_end_is_an_error(self, script: str, message: str, python: Path):
        with pytest.raises(ProbeError, match=f"^{message}$"):
            self.end(python, script)

    def test_the_last_line_of_json_is_the_answer(self, python: Path):
        assert self.end(python, """echo '{}'; echo '{"verdict": "fits"}'; echo done""") == Answer("fits")


def test_a_probe_ends_with_its_parent():
    command = [sys.executable, "-m", "torchpod.commands.probe", json.dumps([SMALL, 1000.0, None])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin
    process.stdin.close()  # as the end of the parent would
    assert process.wait(timeout=60) == 1


def test_memory_is_counted_with_that_of_children():
    before = private_bytes(os.getpid())
    held = bytearray(b"x") * 100_000_000  # a tensor may get memory that the process has kept
    assert 90e6 < private_bytes(os.getpid()) - before < 130e6
    del held
    code = "x = bytearray(200_000_000); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        assert private_bytes(os.getpid()) - private_bytes(child.pid) < private_bytes(os.getpid()) - 190e6
        child.kill()
    assert private_bytes(child.pid) == 0


@pytest.mark.slow
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    code = "import os; from torchpod.host_memory import status_bytes; print(status_bytes(os.getpid(), 'VmHWM'))"
    held = bytearray(2 << 30)
    command = [sys.executable, "-c", code]
    found = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0 < found < len(held) < status_bytes(os.getpid(), "VmHWM")


@pytest.mark.parametrize(
    ("limit", "usage", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_leaves_what_its_cgroups_leave(
    limit: str, usage: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free = available_bytes()
    assert free > 10**8
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setattr(host_memory, "_cgroups", lambda: [inner, tmp_path])
    for folder, most in ((tmp_path, "5000000"), (inner, "max")):
        (folder / limit).write_text(most)
        (folder / usage).write_text("3000000")
        (folder / "memory.stat").write_text(f"anon 7\n{cache} 1000000\nactive_file 3\n")
    assert available_bytes() == 3_000_000
    (tmp_path / limit).write_text("max")
    assert available_bytes() > 10**8


def test_the_cgroups_of_this_process_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    paths = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    wanted = {tmp_path / "memory" / path.lstrip("/") for _, names, path in paths if names == "memory"}
    wanted |= {tmp_path / path.lstrip("/") for _, names, path in paths if not names}
    found = list(host_memory._cgroups())
    assert wanted <= set(found)
    assert all(folder.is_relative_to(tmp_path) for folder in found)
