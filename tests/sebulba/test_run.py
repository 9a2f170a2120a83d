"""Runs with loop=sebulba from the command line: what users of host environments do."""

import json
import runpy
import signal
import time
from pathlib import Path

import gymnasium
import pytest
import torch

from tests.sebulba.commands import SMALL, STEPS, train, wait_for_rows
from tests.testing.test_check_env import SharesSimulator
from torchpod import checkpoint, random
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.transforms import RewardClip
from torchpod.main import main
from torchpod.makers import make_env
from torchpod.run.execute import execute
from torchpod.run.progress import ConsoleSink
from torchpod.sebulba import Sebulba
from torchpod.sebulba import loop as sebulba_loop
from torchpod.watched import close_all

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_train_eval_and_resume_on_gymnasium(capsys, algo):
    learner = [] if algo == "ppo" else ["algo.learner.num_minibatches=1"]
    assert train("env=gymnasium", f"algo={algo}", *learner, f"total_env_steps={5 * STEPS}", "run_dir=run") == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    told = {"env_steps_per_s", "learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference"}
    told |= {"actor_in_transfer", "policy_age", "policy_age_max", "queue_occupancy", "inference_batches_per_s"}
    assert all(told <= row.keys() for row in rows)
    assert main(["eval", "run", "--episodes", "2"]) == 0
    capsys.readouterr()
    assert main(["train", "resume=run", f"total_env_steps={8 * STEPS}"]) == 0
    assert capsys.readouterr().out.count("its environments begin new episodes") == 1
    assert int(checkpoint.latest(Path("run")).name) == 8


def test_pools_may_share_threads_from_one_start_of_a_run_to_the_next():
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    env = ("env=envpool", "env.task=CartPole-v1", "env.num_threads=2", "loop.pools_per_actor=2")
    for run, first in (("a", "false"), ("b", "true")):
        assert train(*env, f"loop.pools_share_threads={first}", f"total_env_steps={3 * STEPS}", f"run_dir={run}") == 0
        other = {"false": "true", "true": "false"}[first]
        shares = f"loop.pools_share_threads={other}"
        assert main(["train", f"resume={run}", shares, f"total_env_steps={6 * STEPS}"]) == 0
    runs = [[json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in "ab"]
    for name in ("iteration", "env_steps", "loss", "grad_norm"):
        assert [row[name] for row in runs[0]] == [row[name] for row in runs[1]]
    assert [row["iteration"] for row in runs[0]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("algo", ["td3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ddpg", "sac"))])
def test_an_action_may_be_a_number(algo):
    small = [x for x in SMALL if "minibatches" not in x]
    replay = ("algo.env_steps_per_update=8", "algo.replay.min_size=32", "algo.replay.batch_size=8", "run_dir=run")
    env = ("env=corridor.py:Scalar", f"algo={algo}", f"total_env_steps={5 * STEPS}")
    assert main(["train", *small, *env, *replay]) == 0
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert any(name.startswith("grad_norm/") and last[name] > 0 for name in last), last


@pytest.mark.parametrize("task", ["TicTacToe-v1", "IntersectionMultiAgent-v1"])
def test_a_game_of_several_players_is_trained_resumed_and_evaluated(capsys, task):
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    env = ("algo=ippo", "env=envpool", f"env.task={task}", "loop.pools_per_actor=2")
    assert train(*env, f"total_env_steps={3 * STEPS}", "run_dir=run") == 0
    assert main(["train", "resume=run", f"total_env_steps={5 * STEPS}"]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    capsys.readouterr()
    assert main(["eval", "run", "--episodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.parametrize("env", ["corridor.py:Corridor", "corridor.py:corridor"])
def test_a_gymnasium_environment_of_ones_own_needs_no_registration(env):
    assert train(f"env={env}", "+env.length=4", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    assert json.loads(Path("run/summary.json").read_text())["eval_return"]["episodes"] == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sleeps", "has not come back in its first reset for 1 s; if it may take so long, raise loop.timeout_s=1."),
        ("fails", "failed in its first reset: LookupError: no way on. TORCHPOD_TRACEBACK=1 shows where."),
    ],
)
def test_an_environment_by_name_whose_first_reset_is_not_to_be_had_is_one_sentence(capsys, monkeypatch, how, message):
    names = runpy.run_path("corridor.py", run_name="corridor")
    entry = {"Stuck-v0": gymnasium.envs.registration.EnvSpec("Stuck-v0", entry_point=names["Stuck"])}
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry | entry)
    env = ("env=gymnasium", "env.task=Stuck-v0", "+env.where=reset", f"+env.how={how}")
    assert train(*env, "loop.timeout_s=1", "run_dir=run") == 1
    *stack, error = capsys.readouterr().err.splitlines()
    assert error == f"torchpod: error: Stuck-v0 {message}"
    assert any("in stop" in line for line in stack) == (how == "sleeps")
    assert not Path("run").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium says it too
def test_exceptions_of_a_file_of_ones_own_come_back_from_its_worker_process():
    env = make_env({"name": "corridor.py:Guarded", "processes": True})
    try:
        env.init(random.split(random.key(0), 1))
        with pytest.raises(Exception, match="the guard went home") as error:
            for _ in range(200):
                env.step(None, torch.ones(1, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64))
        assert error.type.__name__ == "ClosedError"
    finally:
        close_all([env])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=gymnasium", "loop=anakin"], "is not a pure tensor program; run it with loop=sebulba"),
        (["env=gymnasium", "env.task=CartPole-v7"], "env=gymnasium cannot be made"),
        (["env=gymnasium", "loop.lag=soon"], "loop.lag='soon': expected an integer or free."),
        (["env=gymnasium", "loop.refresh=never"], "loop.refresh='never': expected unroll or step."),
        (["env=gymnasium", "loop.num_actor_threads=-1"], "must be at least 0"),
        (["env=gymnasium", "loop.num_actor_threads=3"], "cannot be split by loop.num_actor_threads=3"),
        (["env=gymnasium", "loop.split=1:30"], "loop.split=1:30 shares out GPUs; add device=cuda."),
        (["env=gymnasium", "algo=a2c"], "cannot correct for loop.lag=1; use loop.lag=0"),
        (["env=gymnasium", "population=2"], "population=2 needs loop=anakin"),
        (["env=cartpole", "loop=anakin", "loop.lag=1"], "loop.lag is a setting of the other loop; add loop=sebulba"),
        (["env=gymnasium", "env.task=corridor.py:Corridor"], "in a file is env=corridor.py:Corridor, in place of env="),
        (
            ["env=corridor.py:Spaceless"],
            "Spaceless has no observation_space; set self.observation_space in its __init__",
        ),
        (["env=corridor.py:Missing"], "cannot be made with {}: FileNotFoundError: no assets"),
        (["env=corridor.py:Corridor", "env.length=3"], "env.length is added by a plus sign; write '+env.length=3'"),
        (["env=cartpole", "algo.agent.hidden=[]"], "hidden=[], width=1 and depth=1 must be at least 1 each"),
        (
            ["env=corridor.py:Small", "algo.agent.torso=nature"],
            "images [12, 12, 3] are too small for these convolutions",
        ),
        (["env=corridor.py:Corridor", "algo.agent.torso=nature"], "those of Corridor are (1,); leave torso out"),
        (["env=cartpole", "algo.agent.clip=-1"], "algo.agent.clip=-1 must lie from 0 to inf"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(capsys, overrides, message):
    assert train(*overrides) == 1
    error = capsys.readouterr().err
    assert error.startswith("torchpod: error: ") and error.count("\n") == 1
    assert message in error


def test_what_a_resumed_run_cannot_change_is_said(capsys):
    assert train("env=corridor.py:Corridor", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    before = Path("run/config.yaml").read_bytes()
    for given, message in {
        "loop.lag=0": "loop.lag=0 cannot change: run has 1",
        "loop=anakin": "loop.name=anakin cannot change: run has sebulba",
        "loop.refresh=step": "loop.refresh=step cannot change: run has unroll",
        "total_env_steps=1": f"run is finished; to go on, give more than total_env_steps={2 * STEPS}.\n",
        "evaluation.episodes=3": ". evaluation.episodes had no effect; torchpod eval run evaluates it anew.\n",
    }.items():
        capsys.readouterr()
        main(["train", "resume=run", given])
        assert message in "".join(capsys.readouterr())
    assert Path("run/config.yaml").read_bytes() == before
    assert main(["train", "resume=run", "loop.num_actor_threads=1", f"total_env_steps={3 * STEPS}"]) == 0
    assert int(checkpoint.latest(Path("run")).name) == 3


def test_episodes_that_do_not_end_are_named_beside_their_return(capsys, monkeypatch):
    monkeypatch.setattr("torchpod.evaluate.MAX_STEPS", 30)
    assert train("env=corridor.py:Corridor", "+env.length=1000", f"total_env_steps={STEPS}", "run_dir=run") == 0
    assert ", 2 episodes, 2 of them cut at 30 steps) after " in capsys.readouterr().out
    assert main(["eval", "run", "--episodes", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["unfinished_episodes"], told["unfinished_steps"]) == (3, 30)


def test_the_first_row_counts_no_compilation_as_time_of_the_actors(monkeypatch):
    def example(self, state, actors, example=Sebulba.example):
        time.sleep(1.0)
        return example(self, state, actors)

    monkeypatch.setattr(Sebulba, "example", example)
    assert train("env=corridor.py:Corridor", f"total_env_steps={STEPS}", "run_dir=run") == 0
    row = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    shares = ("actor_in_environment", "actor_in_inference", "actor_in_transfer", "actor_wait")
    assert sum(row[name] for name in shares) > 0.5


@pytest.mark.parametrize(
    ("env", "advice"),
    [
        (["env=corridor.py:Corridor"], "set +env.processes=true"),
        (["env=corridor.py:Corridor", "+env.transforms=[reward_clip]"], "set +env.processes=true"),
        (["env=gymnasium"], "set env.processes=true"),
        (["env=envpool", "env.task=CartPole-v1"], "raise env.num_threads"),
        (["env=envpool", "env.task=CartPole-v1", "env.num_threads=2"], "they have a thread for every core"),
        (["env=envpool", "env.task=CartPole-v1", "+env.transforms=[reward_clip]"], "raise env.num_threads"),
        (["env=cartpole"], "raise loop.num_actor_threads"),
    ],
)
def test_the_progress_line_advises_what_the_run_can_do(env, advice, monkeypatch):
    given = []

    class Sink(ConsoleSink):
        def __init__(self, *args, advice, **options):
            given.append(advice)
            super().__init__(*args, **options)

    if env[0] == "env=envpool":
        pytest.importorskip("envpool")
    monkeypatch.setattr("torchpod.run.progress.cores", lambda: 3)
    monkeypatch.setattr("torchpod.run.logs.ConsoleSink", Sink)
    assert train(*env, "logger.console=true", f"total_env_steps={STEPS}", "run_dir=run") == 0
    # PPO takes no lag of 2; SMALL has minibatches, and the default epochs.
    assert given == [(advice, "raise algo.unroll_length or num_envs", "lower algo.learner.num_epochs")]


def test_a_resumed_run_starts_its_environments_once(monkeypatch):
    train("env=corridor.py:Corridor", f"total_env_steps={2 * STEPS}", "run_dir=run")
    started, start = [], sebulba_loop.start
    monkeypatch.setattr(sebulba_loop, "start", lambda *args: started.append(args) or start(*args))
    assert main(["train", "resume=run", f"total_env_steps={4 * STEPS}"]) == 0
    assert len(started) == 2  # one per actor


def test_a_resumed_run_with_other_actors_says_that_bits_may_differ(capsys):
    assert train("env=cartpole", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    assert main(["train", "resume=run", f"total_env_steps={3 * STEPS}"]) == 0
    assert "bits may differ" not in capsys.readouterr().out
    assert main(["train", "resume=run", "loop.num_actor_threads=1", f"total_env_steps={4 * STEPS}"]) == 0
    message = "run goes on with other loop.num_actor_threads (2 -> 1) than it was written with: the bits may differ."
    assert message in capsys.readouterr().out


def test_two_processes_do_not_share_a_run_folder(start, capsys):
    process = start("env=corridor.py:Corridor", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(1, process)
    capsys.readouterr()
    train("env=corridor.py:Corridor", f"total_env_steps={STEPS}", "run_dir=run", "resume=auto")
    assert "run is in use by another process; wait until it ends" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_an_environment_whose_copies_share_what_they_step_is_for_one_pool():
    env, settings = SharesSimulator(CartPole(max_episode_steps=7)), [*SMALL, f"total_env_steps={4 * STEPS}"]
    for shared in (env, RewardClip(env)):
        with pytest.raises(
            ConfigError, match=r"breaks the contract: Copies of an environment on the host \(copy.copy,"
        ):
            execute(load(settings), env=shared)
    assert execute(load([*settings, "loop.num_actor_threads=1"]), env=env).summary["env_steps"] > 0
