"""How runs of Sebulba end that something ends: faults, hangs, signals, before, in and after training."""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.sebulba.commands import (
    SMALL,
    STEPS,
    alive,
    goes_on_from,
    group_is_empty,
    numbers_of_rows,
    session_of,
    train,
    wait_for_rows,
)
from tests.zygote import wait_until
from torchpod import checkpoint
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.envs.host import Gymnasium
from torchpod.main import main
from torchpod.makers import make_env
from torchpod.run.execute import execute
from torchpod.run.stop import Interrupted
from torchpod.watched import HostError, Watched, close_all

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("settings", "trace", "last"),
    [
        (
            "env=corridor.py:Faulty +env.fault=raise",
            "Traceback.*corridor.py.*OSError: the corridor is closed\n",
            "torchpod: error: actor thread . failed: OSError: the corridor is closed. {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=shape",
            "Traceback.*ValueError: Faulty gave .*\n",
            r"torchpod: error: actor thread . failed: ValueError: .* shape \[2\], and the space says \[1\]; .* {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=hang loop.timeout_s=1",
            "Stack of the thread that hangs .*corridor.py.* in step\n    time.sleep.1e6.\n",
            "torchpod: error: actor thread . has waited . s for a step of its Faulty environments; .* {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=hang_in_c loop.timeout_s=1",
            "Stack of the thread that hangs .*corridor.py.* in step\n    hashlib.pbkdf2_hmac.*\n",
            "torchpod: error: actor thread . has waited . s for a step of its Faulty environments; .* {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=nan",
            "",
            "torchpod: error: a gradient of iteration .* The environment gave numbers that are not finite: reward, "
            "observation, extras.* Iteration {name}, before it, is saved in run.",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Forgetful",
            "Traceback.*agent.py.*ArithmeticError: what was it about.\n",
            "{saved}",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Mistaken",
            "Traceback.*agent.py.*ValueError: what was it about.\n",
            "torchpod: error: iteration .* failed: ValueError: what was it about. {saved}",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Offline",
            "Traceback.*agent.py.*ConnectionRefusedError: what was it about.\n",
            "torchpod: error: iteration .* failed: ConnectionRefusedError: what was it about. {saved}",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Piped",
            "Traceback.*agent.py.*BrokenPipeError: what was it about.\n",
            "torchpod: error: iteration .* failed: BrokenPipeError: what was it about. {saved}",
        ),
    ],
    ids=[
        "raises",
        "shape",
        "hangs",
        "hangs in C",
        "nan",
        "learner",
        "learner's value",
        "learner's connection",
        "learner's pipe",
    ],
)
def test_a_fault_ends_the_process_soon_with_its_traceback_and_a_checkpoint(zygote, folder, settings, trace, last):
    small = [x for x in SMALL if "hidden" not in x]
    job = zygote.start("train", *small, *settings.split(), "total_env_steps=1_000_000", "run_dir=run", cwd=folder)
    assert job.wait() == 1
    assert time.time() - Path("fault").stat().st_mtime < 10
    assert session_of(job) == []
    name = int(checkpoint.latest(Path("run")).name)
    last = last.format(name=name, saved=f"Iteration {name} is saved; go on with resume=run")
    assert re.fullmatch(f"{trace}{last}\n", job.err, re.DOTALL), job.err
    assert 7 < name < 20  # 120 steps of an environment, and the resets between its episodes
    dumped = [path.name for path in Path("run").glob("nan/*")]
    assert dumped == ([f"iteration-{name + 1}-rank-0.pt"] if "nan" in settings else [])
    goes_on_from(name)


@pytest.mark.parametrize("reward", ["nan", "inf"])
def test_a_return_that_is_no_number_is_told_as_the_environments(reward, capsys):
    assert train("env=corridor.py:Unpaid", f"+env.reward={reward}", f"total_env_steps={3 * STEPS}", "run_dir=run") == 1
    told = r"\d+ of \d+ evaluated episodes have a return that is not finite, for the environment gave such a reward; "
    assert re.search(
        f"torchpod: error: {told}.* What was trained is saved; evaluate it with torchpod eval run\n$",
        capsys.readouterr().err,
    )
    assert not Path("run/summary.json").exists() and checkpoint.latest(Path("run")).name == "0000000003"
    assert main(["eval", "run", "--episodes", "2"]) == 1
    out = capsys.readouterr()
    assert out.out == "" and re.search(f"torchpod: error: {told}", out.err)


def test_a_full_disk_does_not_hide_what_failed(monkeypatch):
    def save(*_):
        raise OSError("run/checkpoints/0000000009 cannot be written (No space left on device).")

    monkeypatch.setattr("torchpod.run.keeper.save_state", save)
    small = [x for x in SMALL if "hidden" not in x]
    with pytest.raises(ArithmeticError, match="what was it about") as error:
        main(["train", *small, "env=corridor.py:Corridor", "algo=agent.py:Forgetful", "run_dir=run"])
    assert error.value.__notes__ == ["run/checkpoints/0000000009 cannot be written (No space left on device)."]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reset", "has not come back in the check of its first 100 steps"),
        ("check", "has not come back in the check of its first 100 steps"),
        ("training", "has not come back in training"),
        ("evaluation", "has not come back in the final evaluation"),
    ],
)
def test_an_environment_that_hangs_in_the_main_thread_ends_the_run(capsys, where, message):
    env = ("env=corridor.py:Stuck", f"+env.where={where}")
    settings = ("loop.timeout_s=1", "loop.num_actor_threads=0", f"total_env_steps={40 * STEPS}")
    began = time.monotonic()
    assert train(*env, *settings, "run_dir=run") == 1
    assert time.monotonic() - began < 10
    *stack, line, error = capsys.readouterr().err.splitlines()
    sentence = f"torchpod: error: Stuck {message} for 1 s; if it may take so long, raise loop.timeout_s=1."
    if where == "training":
        sentence += f" Iteration {int(checkpoint.latest(Path('run')).name)} is saved; go on with resume=run"
    if where == "evaluation":
        sentence += " What was trained is saved; evaluate it with torchpod eval run"
    assert error == sentence
    assert stack[0] == "Stack of the thread that hangs (most recent call last):"
    assert "corridor.py" in stack[-1] and line.strip() == "time.sleep(60)"


@pytest.mark.parametrize(("where", "timeout_s"), [("check", 1.0), pytest.param("reset", 15.0, marks=pytest.mark.slow)])
def test_a_worker_process_that_hangs_is_ended_and_not_waited_for(where, timeout_s):
    env, keys = make_env({"name": "corridor.py:Stuck", "where": where, "processes": True}), torch.zeros(1, 3).long()
    with pytest.raises(HostError, match="Stuck has not come back in a test"):
        if where == "check":
            env.init(keys)
            Watched(env, "a test", timeout_s).step(None, torch.zeros(1).long(), keys)
        Watched(env, "a test", timeout_s).init(keys)
    began = time.monotonic()
    close_all([env])
    assert time.monotonic() - began < 5 and multiprocessing.active_children() == []


def test_an_environment_that_fails_in_the_main_thread_is_reported_like_an_actors(capsys):
    env = ("env=corridor.py:Stuck", "+env.where=evaluation", "+env.how=fails")
    assert train(*env, f"total_env_steps={STEPS}", "run_dir=run") == 1
    *trace, message = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback") and any("corridor.py" in line for line in trace)
    assert message == (
        "torchpod: error: Stuck failed in the final evaluation: LookupError: no way on. "
        "What was trained is saved; evaluate it with torchpod eval run"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_run_whose_environment_is_slow_stops_within_seconds(start, number):
    process = start("env=corridor.py:Slow", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(36, process)
    time.sleep(2.0)  # now every thread sleeps
    began = time.monotonic()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    saved = int(checkpoint.latest(Path("run")).name)
    assert error == f"torchpod: stopped at iteration {saved}, in the middle of the next; go on with resume=run\n"
    assert process.returncode == 130 and saved >= 36
    goes_on_from(saved)


@pytest.mark.slow
def test_what_a_slow_worker_has_started_ends_with_the_run(start):
    process = start("env=corridor.py:Simulated", "+env.processes=true", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(36, process)
    time.sleep(2.0)  # now every worker sleeps
    assert len(session_of(process)) > 2 * 4
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    wait_until(lambda: not any(map(alive, session_of(process))), 5)
    goes_on_from(int(checkpoint.latest(Path("run")).name))


LONG = (  # an update of 12 to 40 seconds, one call of C++
    "compile=true",
    "num_envs=1024",
    "algo.unroll_length=128",
    "algo.agent.hidden=[64,64]",
    "algo.learner.num_epochs=300",
    "algo.learner.num_minibatches=4",
    "checkpoint.interval_s=0",
    "total_env_steps=1_000_000_000",
    "run_dir=run",
)


def seconds_of_an_update():
    """About; of the first iteration."""
    return json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["wall_s"]


@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
@pytest.mark.slow
def test_a_signal_in_a_long_compiled_update_stops_the_run_within_seconds(start, loop):
    process = start("env=cartpole", *LONG, f"loop={loop}")
    wait_for_rows(1, process)
    time.sleep(2.0)  # now it updates
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < min(10.0, seconds_of_an_update() - 2.5)
    saved = int(checkpoint.latest(Path("run")).name)
    assert error == f"torchpod: stopped at iteration {saved}, in the middle of the next; go on with resume=run\n"
    assert process.returncode == 130 and saved == len(numbers_of_rows())
    assert group_is_empty(process)


@pytest.mark.slow
def test_an_environment_that_fails_in_a_long_compiled_update_ends_the_run_within_seconds(start):
    settings = ("env=corridor.py:Stuck", "+env.where=training", "+env.how=fails")
    # Its 150th step is in the third unroll, which is done while the second update goes on.
    process = start(*settings, *LONG, "algo.unroll_length=64", "num_envs=2048")
    wait_for_rows(1, process)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < min(10.0, 0.9 * seconds_of_an_update())
    assert error.startswith("Traceback") and process.returncode == 1
    message = error.splitlines()[-1]
    assert re.search("torchpod: error: actor thread . failed: .*LookupError: no way on", message)
    assert message.endswith("go on with resume=run")


def test_a_run_that_cannot_begin_to_log_leaves_no_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    env = Gymnasium("CartPole-v1", processes=True)
    with pytest.raises(ConfigError, match="tensorboard") as caught:  # whose traceback keeps what is open
        execute(load([*SMALL, "logger.tensorboard=true", "run_dir=run"]), env=env)
    assert multiprocessing.active_children() == [] and caught.tb is not None


def test_a_signal_between_the_first_reset_and_the_first_iteration_stops_a_run_and_closes_its_environments(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    env, closed = Gymnasium("CartPole-v1", processes=True), []
    monkeypatch.setattr(Gymnasium, "close", lambda self, close=Gymnasium.close: closed.append(self) or close(self))

    def logger(*_):
        signal.raise_signal(signal.SIGTERM)
        return pytest.fail("the run went on")

    monkeypatch.setattr("torchpod.run.execute.make_logger", logger)
    with pytest.raises(Interrupted, match="stopped by SIGTERM without a new checkpoint"):
        execute(load([*SMALL, "run_dir=run"]), env=env)
    assert env in closed and multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["reset", "check"])
@pytest.mark.slow
def test_a_signal_before_the_first_iteration_stops_a_run_and_closes_its_environments(start, where, number):
    process = start("env=corridor.py:Stuck", f"+env.where={where}", "run_dir=run")
    wait_until(Path("sleeps").exists, 60)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert error == f"torchpod: stopped by {number.name} without a new checkpoint\n"
    assert process.returncode == 130 and Path("closed").exists()


@pytest.mark.slow
def test_a_signal_that_an_environment_in_c_code_does_not_hear_ends_its_process(start):
    process = start("env=corridor.py:Stuck", "+env.where=reset", "+env.how=hears_nothing", "run_dir=run")
    wait_until(Path("sleeps").exists, 60)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=15)
    assert error == "torchpod: stopped before it began\n" and process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_in_the_final_evaluation_says_where_is_what_was_trained(start, number):
    settings = ("env=corridor.py:Stuck", "+env.where=evaluation", f"total_env_steps={2 * STEPS}", "run_dir=run")
    process = start(*settings)
    wait_for_rows(2, process)
    time.sleep(3.0)  # now it sleeps in a step
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert error == ("torchpod: stopped in the final evaluation; what was trained is saved: torchpod eval run\n")
    assert process.returncode == 130 and int(checkpoint.latest(Path("run")).name) == 2


JUDGED = (f"evaluation.every={2 * STEPS}", "total_env_steps=1_000_000", "run_dir=run")


@pytest.mark.parametrize("threads", [0, 2])
def test_an_environment_that_fails_in_an_evaluation_in_training_ends_the_run(capsys, threads):
    env = ("env=corridor.py:Stuck", "+env.where=judging", "+env.how=fails", f"loop.num_actor_threads={threads}")
    assert train(*env, *JUDGED) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    told = "torchpod: error: Stuck failed in an evaluation in training: LookupError: no way on."
    assert error == f"{told} Iteration 2 is saved; go on with resume=run"
    assert numbers_of_rows() == [1, 2]


def test_an_actor_that_fails_during_an_evaluation_in_training_ends_the_run(capsys):
    began, env = time.monotonic(), ("env=corridor.py:Stuck", "+env.where=acting", "+env.how=fails")
    assert train(*env, *JUDGED, f"evaluation.every={STEPS}") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    told = r"torchpod: error: actor thread \d failed: LookupError: no way on\."
    assert re.fullmatch(f"{told} Iteration 1 is saved; go on with resume=run", error)
    assert numbers_of_rows() == [1] and time.monotonic() - began < 30


@pytest.mark.slow
def test_a_signal_in_an_evaluation_in_training_stops_the_run_within_seconds(start):
    process = start("env=corridor.py:Stuck", "+env.where=judging", *JUDGED)
    wait_until(Path("sleeps").exists, 60)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=10)
    assert error == "torchpod: stopped at iteration 2, in the middle of the next; go on with resume=run\n"
    assert process.returncode == 130 and numbers_of_rows() == [1, 2]
    assert int(checkpoint.latest(Path("run")).name) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_all_processes_of_a_run_stops_it_like_any(start, number):
    process = start("env=gymnasium", "env.processes=true", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(3, process)
    began = time.monotonic()
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    saved = int(checkpoint.latest(Path("run")).name)
    assert (process.returncode, error) == (130, f"torchpod: stopped at iteration {saved}; go on with resume=run\n")
    assert group_is_empty(process)
    goes_on_from(saved)


@pytest.mark.parametrize(
    ("which", "env", "name"),
    [
        pytest.param(0, ("env=gymnasium", "env.processes=true"), "CartPole-v1", marks=pytest.mark.slow),
        (-1, ("env=gymnasium", "env.processes=true"), "CartPole-v1"),
        pytest.param(-1, ("env=corridor.py:Corridor", "+env.processes=true"), "Corridor", marks=pytest.mark.slow),
    ],
    ids=["first of a pool", "last of a pool", "of a file of one's own"],
)
def test_a_worker_process_that_is_killed_ends_the_run(start, which, env, name):
    process = start(*env, "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(3, process)
    workers = [pid for pid in session_of(process) if os.getpgid(pid) == pid and pid != process.pid]
    began = time.monotonic()
    os.kill(sorted(workers)[which], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    message = error.splitlines()[-1]
    assert error.startswith("Traceback") and process.returncode == 1
    assert f"RuntimeError: a worker process of {name} is gone" in message
    assert message.startswith("torchpod: error: actor thread ") and message.endswith("go on with resume=run")
    assert group_is_empty(process)
    assert not any(alive(pid) for pid in workers)
    goes_on_from(int(checkpoint.latest(Path("run")).name))
