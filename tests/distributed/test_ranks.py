"""Two ranks, by torchrun and gloo on this CPU, against one."""

import hashlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils import _pytree as pytree

from tests.distributed import probe
from tests.zygote import wait_until
from torchpod import checkpoint, metrics
from torchpod.checkpoint import CheckpointError
from torchpod.compose import load
from torchpod.distributed import RankError, Ranks, SplitError, init, shutdown
from torchpod.run.execute import execute
from torchpod.run.folder import seen_by_all
from torchpod.run.stop import OverdueError, StopFlag

ENV_FILE = Path(__file__).parents[1] / "user_env.py"
SMALL = (
    "compile=false",
    "logger.console=false",
    "num_envs=16",
    "algo.unroll_length=16",
    "algo.agent.hidden=[8]",
    "algo.learner.num_minibatches=4",
    "evaluation.episodes=2",
)
ITERATION = 16 * 16
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def torchrun(folder: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *options, *command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )


def train(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return torchrun(folder, "-m", "torchpod", "train", *SMALL, *overrides, options=options)


def as_hosts(*folders: Path, command: tuple[str, ...]) -> list[subprocess.CompletedProcess[str]]:
    """One torchrun in each of the folders, as on so many hosts, of a rank each; they meet as `docs/loops.md` says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = (f"--nnodes={len(folders)}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test")
    launcher = [sys.executable, "-m", "torch.distributed.run", *meet, f"--rdzv-endpoint=127.0.0.1:{port}"]
    options: dict[str, Any] = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*launcher, *command], cwd=folder, **options) for folder in folders]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *text) for p, text in zip(running, said, strict=True)]


def our_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("torchpod:")]


NORMALISED = ("algo.agent.normalize_observation=true", "algo.agent.normalize_reward=true")
SCHEDULES = "algo.learner.schedules={entropy_coefficient:[[0,0.05],[3000,0]],learning_rate:[[1000,3e-3],[4000,1e-4]]}"
MLP = ("experiment=cartpole", "env.max_episode_steps=30", *NORMALISED, SCHEDULES)
GRU = ("experiment=memory_chain", "env.memory_length=5", "algo.agent.recurrent=8")


GROUPS = (
    "experiment=ippo_tag_continuous",
    "env.num_taggers=2",
    "env.num_runners=3",
    "env.num_other_agents_observed=2",
    "env.tagging_distance=0.2",
    "env.max_episode_steps=12",
    "algo.learner.learning_rate=1e-2",
)
SEBULBA = ("loop=sebulba", "loop.num_actor_threads=1", "algo.learner.learning_rate=1e-2")
SHORT = f"total_env_steps={5 * ITERATION}"
CASES = {
    "mlp": MLP,
    "groups": (*GROUPS, SHORT),
    "sebulba": (*GRU, *SEBULBA, "algo=impala", SHORT),
}
ENVPOOL = ("env=envpool", "+env.max_episode_steps=30", *SEBULBA, SHORT)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="eager"),
        pytest.param({"gru": GRU, "compiled": (*MLP, "compile=true")}, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_draw_the_same_words_and_learn_the_same_as_one(cases: dict[str, tuple[str, ...]], tmp_path: Path):
    if cases is CASES and importlib.util.find_spec("envpool"):
        cases = cases | {"envpool": ENVPOOL}
    runs = {name: [*SMALL, f"total_env_steps={20 * ITERATION}", *own] for name, own in cases.items()}
    out = tmp_path / "two"
    out.mkdir()
    result = torchrun(tmp_path, probe.__file__, str(out), json.dumps(runs))
    assert result.returncode == 0, result.stderr
    probe.main(tmp_path, runs)  # this process is rank 0 of 1
    for name in runs:
        one = torch.load(tmp_path / f"{name}-0.pt", weights_only=True)
        two = [torch.load(out / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]
        assert_learned_the_same(name, one, two)
        assert name != "groups" or one["metrics"][-1]["episode_tag_rate"] > 0  # some have left the game


def assert_learned_the_same(case: str, one: dict[str, Any], two: list[dict[str, Any]]):
    for name in ("env_keys", "actor_keys", "learner_keys", "action"):
        whole = pytree.tree_map(lambda *x: torch.cat(x), *(x[name] for x in two))
        pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), whole, one[name])
    seen = pytree.tree_map(lambda *x: torch.cat(x), *(x["observation"] for x in two))
    pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-6), seen, one["observation"])
    differences = []
    for params, zero, first in zip(one["params"], two[0]["params"], two[1]["params"], strict=True):
        assert all(torch.equal(zero[name], first[name]) for name in params)  # ranks never drift apart
        differences.append(max((params[name] - zero[name]).abs().max().item() for name in params))
    updates = len(one["params"]) - 1
    moved = max((one["params"][-1][name] - x).abs().max().item() for name, x in one["params"][0].items())
    print(f"{case}: after {updates} iterations parameters moved by {moved:.2g}, ranks differ by {differences[-1]:.2g}")
    assert updates >= 5 and moved > 1e-2
    assert differences[-1] < 1e-5
    losses = [name for name in one["metrics"][0] if name.endswith("loss")]
    for a, b in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("episodes", "env_steps"))
        for name in losses:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    assert losses


@pytest.mark.slow
@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(1, 2), (1, 4), (2, 1)], ids=["1x2", "1x4", "2x1"])
def test_actor_threads_of_several_ranks_learn_the_same_as_those_of_one(num_hosts: int, num_ranks: int, tmp_path: Path):
    """In Sebulba, with lag 1; every rank has its share of the environments, and two actors if there are two ranks."""
    actors = 2 if num_ranks == 2 else 1
    sebulba = ("loop=sebulba", f"loop.num_actor_threads={actors}", "algo.learner.num_minibatches=2", "run_dir=run")
    overrides = (*SMALL, *MLP, *sebulba, f"total_env_steps={20 * ITERATION}")
    command = ("-m", "torchpod", "train", *overrides)
    if num_hosts == 1:
        started = [torchrun(tmp_path, *command, options=(f"--nproc-per-node={num_ranks}",))]
    else:
        started = as_hosts(*[tmp_path] * num_hosts, command=command)
    assert all(result.returncode == 0 for result in started), [result.stderr for result in started]
    assert len([*checkpoint.latest(tmp_path / "run").glob("state-*.pt")]) == num_hosts * num_ranks
    assert not [*(tmp_path / "run").glob(".rank*")]
    every = ("checkpoint.interval_s=0", "checkpoint.keep=20")
    execute(load([*overrides, *every, f"run_dir={tmp_path / 'one'}"]))
    one, many = (checkpoint.load_weights(checkpoint.latest(tmp_path / name)) for name in ("one", "run"))
    first = checkpoint.load_weights(min((tmp_path / "one").glob("checkpoints/0*")))
    unlike = {name: (x - many[name]).abs().max().item() for name, x in one.items() if x.isfinite().all()}
    assert one.keys() - unlike.keys() == {"reward_clip"}  # infinite
    difference = max(unlike.values())
    print(f"{num_hosts} x {num_ranks} ranks differ by {difference:.2g} after 20 iterations")
    assert difference < 1e-5
    assert max((x - first[name]).abs().max().item() for name, x in one.items() if name in unlike) > 1e-2
    rows = [metrics.read_metrics(tmp_path / name) for name in ("one", "run")]
    assert [row["env_steps"] for row in rows[0]] == [row["env_steps"] for row in rows[1]]


@pytest.mark.slow
def test_the_first_rank_evaluates_while_the_others_wait(tmp_path: Path):
    own = (f"total_env_steps={6 * ITERATION}", f"evaluation.every={2 * ITERATION}")
    result = train(tmp_path, *own, "run_dir=run")
    assert result.returncode == 0, result.stderr
    execute(load([*SMALL, *own, f"run_dir={tmp_path / 'one'}"]))
    found = [
        {row["iteration"]: row["eval_return"] for row in metrics.read_metrics(tmp_path / name) if "eval_return" in row}
        for name in ("run", "one")
    ]
    assert [*found[0]] == [2, 4, 6] and found[0] == found[1]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_not_called_one_that_failed(tmp_path: Path):
    program = tmp_path / "late.py"
    program.write_text(
        "import time\nfrom torchpod.distributed import init\nranks, _ = init('cpu', timeout_s=2.0)\n"
        "ranks.barrier()\ntime.sleep(20.0 * ranks.rank)\nranks.barrier()\n"
    )
    result = torchrun(tmp_path, str(program))
    assert f"RankError: {LATE}" in result.stderr
    assert "another rank failed" not in result.stderr


GLOO, PAIR = RuntimeError, "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
FAILED, LATE = "another rank failed; its own message says why", "another rank has not come; if one may take so long"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (GLOO(f"{PAIR} Connection closed by peer [127.0.0.1]:36046."), FAILED),
        (GLOO(f"{PAIR} Read error [127.0.0.1]:47014: Connection reset by peer."), FAILED),
        (GLOO("Timed out waiting 3000ms for recv operation to complete"), LATE),
        (dist.DistNetworkError("The client socket has failed to connect to any network address"), FAILED),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a remote process exiting"), FAILED),
        (dist.DistBackendError("store->get('0') got error: got 0 bytes. Connection was likely closed."), FAILED),
        (dist.DistBackendError("Watchdog caught collective operation timeout"), LATE),
        (GLOO("[enforce fail at gloo/transport/tcp/pair.cc:446] 4000 <= 12"), None),
        (GLOO("Tensors must be contiguous"), None),
        (dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected"), None),
        (torch.AcceleratorError("CUDA error: the launch timed out and was terminated"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
    ],
    ids=str,
)
def test_what_another_rank_is_to_blame_for_is_told_from_what_it_is_not(error, told, monkeypatch):
    def fail(x):
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(RankError if told else type(error), match=re.escape(told or str(error))) as raised:
        Ranks(0, 2).sum(torch.ones(3))
    assert raised.value.__cause__ is error if told else raised.value is error


def test_what_the_sentence_about_a_late_rank_advises_can_be_done(monkeypatch):
    def fail(x):
        raise GLOO("Timed out waiting 3000ms for recv operation to complete")

    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(RankError) as raised:
        Ranks(0, 2).sum(torch.ones(3))
    of_both, of_sebulba = str(raised.value).split(" in loop=sebulba ")
    named = [re.findall(r"\w+\.\w+", part) for part in (of_both, of_sebulba)]
    assert named == [["evaluation.episodes"], ["loop.timeout_s"]]
    for loop in ("anakin", "sebulba"):
        load([f"loop={loop}", f"{named[0][0]}=5"])
    load(["loop=sebulba", f"{named[1][0]}=600"])


@pytest.mark.parametrize("shared", [True, False])
def test_hosts_must_share_the_run_folder(shared: bool, tmp_path: Path):
    """Rank 1 has a folder of that name in any case; without a common disk it is another."""

    class Other(Ranks):
        def same(self, value: Any) -> Any:
            mark = tmp_path / ".rank-0-abc"
            if shared:
                mark.touch()
            return Path("runs/x"), mark

        def barrier(self) -> None: ...

    if shared:
        assert seen_by_all(None, Other(1, 2)) == tmp_path
        return
    with pytest.raises(RankError, match=re.escape(f"does not see the run folder of rank 0, {tmp_path}: start on all")):
        seen_by_all(None, Other(1, 2))


def test_one_rank_leaves_nothing_in_its_run_folder(tmp_path: Path):
    assert seen_by_all(tmp_path, Ranks()) == tmp_path and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_two_ranks_learn_the_same_from_replay_of_their_own_and_are_resumed(tmp_path: Path):
    small = [x for x in SMALL if not x.startswith("algo.unroll_length")]
    dqn = ("algo=dqn", "env=cartpole", "algo.replay.prioritised=true", "algo.replay.batch_size=32")
    # Nothing that falls until the end of the run, which is another for the one that is resumed.
    dqn += ("algo.replay.beta=1", "algo.agent.exploration_fraction=0", "algo.learner.anneal_learning_rate=false")
    for more in (f"total_env_steps={40 * 64}", f"total_env_steps={50 * 64}"):
        begun = (tmp_path / "run").exists()
        options = [f"resume={tmp_path / 'run'}"] if begun else [*small, *dqn, f"run_dir={tmp_path / 'run'}"]
        result = torchrun(tmp_path, "-m", "torchpod", "train", *options, more)
        assert result.returncode == 0, result.stderr
    whole = (*small, *dqn, f"run_dir={tmp_path / 'whole'}", f"total_env_steps={50 * 64}")
    assert torchrun(tmp_path, "-m", "torchpod", "train", *whole).returncode == 0
    last = checkpoint.latest(tmp_path / "run")
    assert {"replay-0.json", "replay-1.json"} < {path.name for path in last.iterdir()}
    states = [torch.load(last / f"state-{rank}.pt", weights_only=True) for rank in range(2)]
    learned = [name for name in states[0] if name.startswith(".learner.params")]
    assert int(states[0][".iteration"]) == 50 and int(states[0][".learner.num_steps"]) > 0
    assert all(torch.equal(states[0][name], states[1][name]) for name in learned) and learned
    trees = [torch.cat([x for name, x in state.items() if name.startswith(".priorities.tree")]) for state in states]
    assert not torch.equal(*trees)  # each has seen its own environments
    for rank, state in enumerate(states):  # and goes on with them as if it had not been stopped
        left = torch.load(checkpoint.latest(tmp_path / "whole") / f"state-{rank}.pt", weights_only=True)
        assert left.keys() == state.keys()
        assert all(torch.allclose(left[x], state[x], rtol=0, atol=0, equal_nan=True) for x in left)


@pytest.mark.slow
def test_a_run_of_two_ranks_is_stopped_resumed_and_ends_like_one_left_alone(tmp_path: Path):
    overrides = (*MLP, *SMALL, f"total_env_steps={40 * ITERATION}")
    whole = torchrun(tmp_path, "-m", "torchpod", "train", *overrides, "run_dir=whole", "checkpoint.interval_s=0")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("eval return") == 1
    last = checkpoint.latest(tmp_path / "whole")
    assert {path.name for path in last.iterdir()} == {"state-0.pt", "state-1.pt", "weights.safetensors", "meta.json"}

    launcher = subprocess.Popen(
        [*TORCHRUN, "-m", "torchpod", "train", *overrides, "run_dir=stopped"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    written = tmp_path / "stopped" / "metrics.jsonl"
    wait_until(lambda: written.exists() and written.read_bytes().count(b"\n") >= 3)
    began = time.perf_counter()
    os.killpg(launcher.pid, signal.SIGINT)  # Ctrl-C reaches torchrun and both ranks, and torchrun passes it on
    _, error = launcher.communicate(timeout=60)
    seconds = time.perf_counter() - began
    print(f"saved and gone after {seconds:.1f} s")
    assert seconds < 10
    assert launcher.returncode != 0
    assert all("go on with resume=stopped" in line for line in our_lines(error)) and our_lines(error)
    assert len(checkpoint.all_of(tmp_path / "stopped")) == 2  # the first iteration's, and this
    with pytest.raises(CheckpointError, match=r"was written by 2 rank\(s\), this run has 1; start as many"):
        execute(load([f"resume={tmp_path / 'stopped'}"]))
    resumed = torchrun(tmp_path, "-m", "torchpod", "train", "resume=stopped")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("state-0.pt", "state-1.pt"):
        a, b = (torch.load(checkpoint.latest(tmp_path / run) / name, weights_only=True) for run in ("whole", "stopped"))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param(
            ("Hosted", "loop=sebulba", "loop.num_actor_threads=1"), "Iteration 1 is saved; go on", id="sebulba"
        ),
        pytest.param(("MyEnv",), "RuntimeError", id="anakin", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_all_with_its_own_error_and_a_checkpoint(
    env: tuple[str, ...], message: str, tmp_path: Path
):
    marker = tmp_path / "raised"
    fault = ("+env.fault=raise", "+env.at=100", "+env.rank=1", f"+env.marker={marker}")
    result = train(tmp_path, f"env={ENV_FILE}:{env[0]}", *env[1:], *fault, "run_dir=run", "total_env_steps=100_000_000")
    seconds = time.time() - marker.stat().st_mtime
    print(f"over {seconds:.1f} s after the failure")
    assert result.returncode != 0
    assert result.stderr.count("RuntimeError: the simulator lost its licence\n") == 1
    assert "Connection closed" not in result.stderr and message in result.stderr
    assert seconds < 10
    # The next one would have been due after a minute.
    assert [folder.name for folder in checkpoint.all_of(tmp_path / "run")] == [f"{1:010d}"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [3, 100], ids=["before the first report", "later"])
def test_ranks_stop_within_seconds_although_an_environment_of_one_does_not_come_back(number, at: int, tmp_path: Path):
    """Rank 1 waits for its environment, rank 0 for rank 1."""
    hangs = (
        f"env={ENV_FILE}:Hosted",
        "+env.fault=hang",
        f"+env.at={at}",
        "+env.rank=1",
        f"+env.marker={tmp_path}/hangs",
    )
    settings = (*SMALL, *hangs, "loop=sebulba", "loop.num_actor_threads=1", "run_dir=run")
    command = [*TORCHRUN, "-m", "torchpod", "train", *settings]
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options, start_new_session=True) as launcher:
        wait_until((tmp_path / "hangs").exists)
        time.sleep(1.0)
        began = time.perf_counter()
        launcher.send_signal(number)
        _, error = launcher.communicate(timeout=60)
        seconds = time.perf_counter() - began
    print(f"gone after {seconds:.1f} s")
    assert seconds < 10
    if at == 100:
        sentence = "torchpod: stopped at iteration 1, the last that all ranks have saved; go on with resume=run"
        assert our_lines(error) == [sentence] * 2 and int(checkpoint.latest(tmp_path / "run").name) == 1
    else:
        assert {line.partition(" without")[2] for line in our_lines(error)} <= {" a checkpoint", " a new checkpoint"}
    with pytest.raises(ProcessLookupError):
        os.killpg(launcher.pid, 0)


def test_a_rank_that_hears_of_no_signal_is_ended_by_a_thread(monkeypatch: pytest.MonkeyPatch, capfd):
    ended, limits = threading.Event(), {"GRACE_S": 0.1, "LEAVE_S": 0.2}
    for name, seconds in limits.items():
        monkeypatch.setattr(StopFlag, name, seconds)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    with StopFlag(Ranks(0, 2), torch.device("cpu"), lambda: "given up") as stop:
        stop.pause()
        stop.watch()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(OverdueError):
            while not ended.is_set():
                hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # C code of more than a second
            time.sleep(1.0)  # where it hears
    assert ended.is_set() and capfd.readouterr().err == "torchpod: given up\n"


@pytest.mark.slow
def test_after_a_restart_by_torchrun_the_run_goes_on_from_its_last_checkpoint(tmp_path: Path):
    marker = tmp_path / "raised"
    fault = ("+env.fault=raise", "+env.at=100", "+env.rank=1", f"+env.marker={marker}")
    loop = ("loop=sebulba", "loop.num_actor_threads=1")
    settings = (f"env={ENV_FILE}:MyEnv", *fault, *loop, f"total_env_steps={12 * ITERATION}")
    result = train(tmp_path, *settings, options=("--max-restarts=1",))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("RuntimeError: the simulator lost its licence\n") == 1
    assert marker.exists()
    (run_dir,) = (tmp_path / "runs" / "ppo_user_env_MyEnv").iterdir()
    assert len(checkpoint.all_of(run_dir)) == 2  # after its first iteration and its last
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [f'"iteration": {i},' in line for i, line in enumerate(lines, 1)] == [True] * 12
    assert '"compile_s"' in lines[-1]
    again = train(tmp_path, *settings, "run_dir=whole")  # the marker is there: nothing is raised
    assert again.returncode == 0, again.stderr
    a, b = (
        torch.load(checkpoint.latest(run) / "state-1.pt", weights_only=True) for run in (run_dir, tmp_path / "whole")
    )
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_what_all_ranks_refuse_is_said_once(tmp_path: Path):
    result = train(tmp_path, "num_envs=7")
    assert result.returncode != 0
    assert our_lines(result.stderr) == [
        "torchpod: error: rank 0: num_envs=7 cannot be split over 2 ranks; use a multiple of 2, e.g. num_envs=6."
    ]
    assert "Traceback (most recent call last)" not in result.stderr.split("elastic")[0]
    assert not (tmp_path / "runs").exists()


def test_a_share_is_equal_or_refused():
    assert Ranks(1, 4).share(8, "num_envs") == 2
    with pytest.raises(
        SplitError, match="num_envs=3 cannot be split over 4 ranks; use a multiple of 4, e.g. num_envs=4"
    ):
        Ranks(0, 4).share(3, "num_envs")


THRICE = """
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torchpod.distributed import init, shutdown

SENT = (
    torch.tensor([[1.5, torch.nan, 2.0]], dtype=torch.float64).T,
    torch.tensor([True, False]),
    torch.tensor(7, dtype=torch.int16),
    torch.zeros(0, 3),
    torch.nn.Parameter(torch.arange(6.0).view(2, 3).T),
)
for _ in range(3):
    ranks, _ = init("cpu", timeout_s=20.0)
    assert ranks.sum(torch.tensor([1.0 + ranks.rank])) == 3.0
    for x in SENT:
        own = x if ranks.rank == 0 else torch.zeros_like(x)
        assert ranks.first(own) is own
        assert_close(own, x, rtol=0, atol=0, equal_nan=True)
    shutdown()
    assert not dist.is_initialized()
"""


def test_ranks_may_meet_and_part_several_times_in_one_process(tmp_path: Path):
    program = tmp_path / "thrice.py"
    program.write_text(THRICE)
    result = torchrun(tmp_path, str(program))
    assert result.returncode == 0, result.stderr


def test_a_process_group_that_somebody_else_made_stays(monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert init("cpu")[0] == Ranks(0, 2)
        shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_one_rank_needs_no_process_group():
    ranks, x = Ranks(), torch.tensor([1.0, 2.0])
    ranks.barrier()
    assert ranks.sum(x) is x and x.tolist() == [1.0, 2.0]
    assert ranks.first(x) is x and x.tolist() == [1.0, 2.0]
    assert ranks.same("value") == "value"
