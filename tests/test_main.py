"""The command line: what it prints, its exit status, and one sentence for everything that a user can repair."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.sebulba.commands import session_of
from tests.users import AGENT_FILE, ENV_FILE
from torchpod import checkpoint
from torchpod.compose import load
from torchpod.hints import nearest
from torchpod.main import COMMANDS, _lines, main, train
from torchpod.metrics import short
from torchpod.run.folder import JOB, resume_source
from torchpod.run.judge import Judge

SMALL = (
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "total_env_steps=64",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "evaluation.episodes=2",
)

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command in an empty folder; returns exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        status = main(argv)
        return status, *capsys.readouterr()

    return run


def error_of(result: tuple[int, str, str]) -> str:
    """The one sentence on standard error."""
    status, out, error = result
    assert status == 1, error
    assert out == ""
    assert error.startswith("torchpod: error: ") and error.endswith("\n") and error.count("\n") == 1
    return error.removeprefix("torchpod: error: ").rstrip("\n")


def test_without_a_command_or_with_help_it_says_what_there_is(call: Call):
    status, out, _ = call()
    assert status == 2 and "torchpod train" in out
    for command in (["--help"], ["help"]):
        assert call(*command)[:2] == (0, out)


@pytest.mark.parametrize("given", [[], ["algo=sac", "env=pendulum", "algo.learner.learning_rate=0.25"]])
def test_train_with_help_shows_all_settings_and_trains_nothing(given: list[str], call: Call, tmp_path: Path):
    status, out, _ = call("train", *given, "--help")
    head, _, shown = out.partition("\n\n")
    assert status == 0 and "KEY=VALUE" in head
    assert yaml.safe_load(shown) == load(given).to_dict()
    assert not given or yaml.safe_load(shown)["algo"]["learner"]["learning_rate"] == 0.25
    assert not (tmp_path / "runs").exists()


def test_train_with_help_shows_the_settings_of_a_run_that_goes_on(call: Call):
    assert call("train", *SMALL, "evaluation.every=1e3", "run_dir=run")[0] == 0
    assert "evaluation.every=1000 is more than the run has steps" in call("train", *SMALL, "evaluation.every=1e3")[1]
    status, out, _ = call("train", "resume=run", "total_env_steps=1e5", "--help")
    shown = yaml.safe_load(out.partition("\n\n")[2])
    assert status == 0 and (shown["num_envs"], shown["total_env_steps"]) == (4, 100_000)
    assert shown["evaluation"] == {"episodes": 2, "seed": None, "every": 1000}
    assert "resume=nope: there is no such folder" in error_of(call("train", "--help", "resume=nope"))


def test_train_with_help_shows_the_first_of_several_runs(call: Call):
    status, out, _ = call("train", "--multirun", "seed=5,6", "--help")
    assert status == 0 and yaml.safe_load(out.partition("\n\n")[2]) == load(["seed=5"]).to_dict()


def test_an_experiment_of_ones_own_is_trained_shown_warmed_up_and_gone_on_with(call: Call, tmp_path: Path):
    text = f"defaults: [{{override /env: {ENV_FILE}:MyEnv}}]\nenv: {{limit: 7}}\nnum_envs: 4\n"
    (tmp_path / "mine.yaml").write_text(text)
    settings = ("experiment=mine.yaml", *(x for x in SMALL if "num_envs" not in x))
    shown = yaml.safe_load(call("train", *settings, "--help")[1].partition("\n\n")[2])
    assert (shown["num_envs"], shown["env"]["limit"], shown["env"]["at"]) == (4, 7, 0)
    assert call("warmup", *settings)[0] == 0 and not Path("runs").exists()
    assert train(experiment=Path("mine.yaml"), overrides=list(settings[1:])).dir.parent == Path("runs/mine")
    Path("mine.yaml").unlink()
    (run,) = Path("runs/mine").iterdir()
    status, out, _ = call("train", f"resume={run}", "total_env_steps=96")
    assert status == 0 and " env steps (and " in out  # episodes of 7 steps, each with a reset
    summary = json.loads((run / "summary.json").read_text())
    assert summary["env_steps"] + summary["resets"] == 96


def test_a_run_without_resets_speaks_of_none(call: Call):
    assert " env steps; " in call("train", *SMALL, "run_dir=run", "total_env_steps=32")[1]


def test_train_with_help_refuses_what_train_refuses(call: Call):
    assert "learning_rat " in error_of(call("train", "--help", "algo.learner.learning_rat=1"))


def test_an_unknown_command_is_refused(call: Call):
    assert (
        error_of(call("coach"))
        == "torchpod coach is no command; use train, eval, export, plot, warmup, check, autoscale, list, "
        "doctor, bench."
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("eval",),
            "torchpod eval: the following arguments are required: run; torchpod eval --help shows what it takes.",
        ),
        (("check", "cartpole"), "torchpod check: the following arguments are required: reference; torchpod check --he"),
        (("doctor", "foo"), "torchpod doctor: unrecognized arguments: foo; torchpod doctor --help shows what it takes"),
        (("plot", "run", "--outt", "x"), "torchpod plot: unrecognized arguments: --outt x; torchpod plot --help shows"),
        (("autoscale", "--seconds", "soon"), "torchpod autoscale: argument --seconds: invalid float value: 'soon'; to"),
    ],
)
def test_options_that_are_wrong_are_refused_in_one_sentence(words: tuple[str, ...], message: str, call: Call):
    assert error_of(call(*words)).startswith(message)


@pytest.mark.parametrize(("what", "name"), [("envs", "cartpole"), ("algos", "ppo"), ("experiments", "cartpole")])
def test_list_names_one_choice_a_line(what: str, name: str, call: Call):
    status, out, _ = call("list", what)
    assert status == 0 and name in [line.split()[0] for line in out.splitlines()]


def test_list_of_anything_else_is_refused(call: Call):
    assert error_of(call("list", "env")) == "torchpod list takes one of envs, algos, experiments, losses."


@pytest.mark.parametrize(("command", "takes"), [("warmup", "KEY=VALUE"), ("list", "envs|algos|experiments|losses")])
def test_warmup_and_list_have_help(command: str, takes: str, call: Call, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        call(command, "--help")
    assert left.value.code == 0 and takes in capsys.readouterr().out


def test_warmup_is_not_for_a_run_that_goes_on(call: Call):
    told = "torchpod warmup is for runs that begin; leave out resume=run."
    assert error_of(call("warmup", *SMALL, "resume=run")) == told


def test_eval_is_on_a_cpu_or_cuda(call: Call):
    for device in ("meta", "foo", "cuda:x"):
        told = f"torchpod eval: --device {device} is not known; use cpu, cuda or cuda:INDEX."
        assert error_of(call("eval", "run", "--device", device)) == told


def test_an_error_without_a_text_is_named(call: Call, monkeypatch: pytest.MonkeyPatch):
    def fail(rest: list[str]) -> int:
        raise ValueError

    monkeypatch.setitem(COMMANDS, "doctor", fail)
    assert error_of(call("doctor")) == "ValueError."


def test_a_hint_of_no_names_says_so():
    assert nearest("x", []) == "there is none."


@pytest.mark.parametrize(
    "text",
    [
        "dollar${seed}",
        r"\${seed}",
        r"\\${seed}\\",
        "${",
        "back\\",
        "back\\\\",
        r"a\b",
        r"a\'b",
        "it's",
        "a\\\n",
        "a,[b]={c} ",
    ],
)
def test_a_text_from_python_arrives_as_it_is(text: str):
    assert load(_lines("run_dir", text)).run_dir == text


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_columns_from_python_are_lists_tuples_arrays_or_tensors(kind: Callable[..., object]):
    settings = {"population": 2, "members": {"discount": kind([0.5, 0.75])}, "algo.agent.hidden": kind([8, 16])}
    config = load([line for key, value in settings.items() for line in _lines(key, value)])
    assert list(config.members["discount"]) == [0.5, 0.75] and list(config.algo.agent["hidden"]) == [8, 16]
    entry = {"name": "it's", "sizes": (1, None, True)}
    assert _lines("x", kind([1, 2])) == ["x=[1, 2]"]
    assert _lines("x", [entry]) == ["x=[{name: 'it\\'s', sizes: [1, null, True]}]"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algo.learner.schedules", {"entropy_coefficient": [[0, 0.5], [5e7, 0.05]]}),
        ("algo.learner.learning_rate", {"runner": 1e-3, "tagger": 1e-4}),
        ("algo.agent.policies", {"tagger": {"clip": 0.1}, "runner": {"train": False}}),
    ],
)
def test_names_and_values_of_ones_own_are_one_setting_from_python_too(name: str, value: dict[str, Any]):
    *path, last = name.split(".")
    settings = {"algo": "ippo", "env": "tag_gridworld", ".".join(path): {last: value}}
    config = load([line for key, x in settings.items() for line in _lines(key, x)])
    assert functools.reduce(dict.__getitem__, name.split("."), config.to_dict()) == value


def test_what_autoscale_has_found_may_be_given_from_python(tmp_path: Path):
    (tmp_path / "found it.yaml").write_text("num_envs: 32")
    assert load(_lines("autoscale", tmp_path / "found it.yaml")).num_envs == 32


def test_warming_up_writes_no_logs_and_plays_no_evaluation_on_the_host(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Judge, "evaluate", lambda *_: pytest.fail("evaluated"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = [x for x in SMALL if "hidden" not in x]
    host = "env=gymnasium", "env.task=CartPole-v1", "loop=sebulba", "logger.wandb=true", "logger.csv=true"
    assert call("warmup", *settings, *host)[0] == 0


def test_a_restart_of_a_job_without_an_id_does_not_go_on_with_anothers_run(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for job in ("none", "7f3a"):
        monkeypatch.setenv(JOB, job)
        assert call("train", *SMALL)[0] == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (found,) = (path for path in Path("runs/ppo_cartpole").iterdir() if resume_source(load(SMALL)) == path)
    assert checkpoint.read_meta(checkpoint.latest(found))["job"] == "7f3a"
    monkeypatch.setenv(JOB, "none")
    assert resume_source(load(SMALL)) is None
    assert "begins anew: torchrun gave it no id, with --rdzv-id=ID it would go on." in capsys.readouterr().out


def test_train_then_eval_then_resume(call: Call):
    status, out, error = call("train", *SMALL, "run_dir=run")
    assert (status, error) == (0, "")
    assert out.startswith("eval return ") and out.endswith("run folder run\n")
    summary = json.loads(Path("run/summary.json").read_text())
    assert set(summary) >= {"eval_return", "env_steps", "env_steps_per_s", "wall_s", "compile_s", "hardware"}
    assert set(summary) >= {"versions", "commit", "config_hash"}
    status, out, _ = call("eval", "run", "--episodes", "2")
    assert (status, json.loads(out)["mean"]) == (0, summary["eval_return"]["mean"])
    assert call("eval", "run", "--episodes", "3", "--seed", "1")[0] == 0
    assert call("train", "resume=run", "total_env_steps=96")[0] == 0
    assert checkpoint.latest(Path("run")).name == f"{3:010d}"


def test_fewer_env_steps_than_one_iteration_train_one_iteration(call: Call):
    status, out, _ = call("train", *SMALL, "run_dir=run", "total_env_steps=1", "logger.console=true")
    assert status == 0 and out.startswith("run folder run\n100%  ")
    assert (
        "\ntotal_env_steps=1 is less than one iteration, num_envs x algo.unroll_length = 32 steps and resets\n" in out
    )
    assert checkpoint.latest(Path("run")).name == f"{1:010d}"


def test_a_run_with_resets_ends_at_100_percent(call: Call):
    settings = ("total_env_steps=320", "env.max_episode_steps=4", "logger.console=true")
    _, out, _ = call("train", *SMALL, "run_dir=run", *settings)
    last = out.splitlines()[-3]
    assert json.loads(Path("run/summary.json").read_text())["env_steps"] < 320
    assert last.startswith("100%  ") and "/320 env steps" in last


def test_a_population_names_its_best_member(call: Call):
    status, out, _ = call("train", *SMALL, "run_dir=run", "population=2")
    best = json.loads(Path("run/summary.json").read_text())["best_member"]
    assert status == 0 and f"best member {best}: run/members/{best}\n" in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_enws=3"], "num_enws is no setting; did you mean num_envs"),
        (["env=pendulun"], "env=pendulun is not known; did you mean pendulum?"),
        (["num_envs=lots"], "num_envs='lots': expected an integer."),
        (["num_envs=0"], "num_envs=0 must be at least 1."),
        (
            ["algo.learner.num_minibatches=100000"],
            "algo.learner.num_minibatches=100000 divides neither num_envs=4 nor algo.unroll_length=8; use a number "
            "that divides one of them, e.g. algo.learner.num_minibatches=4.",
        ),
        (["algo.agent.recurrent=4", "num_envs=6"], "num_envs=6 per rank cannot be dealt to num_minibatches=4; use a"),
        (["algo=dqn", "algo.agent.target_interval=0"], "algo.agent.target_interval=0 must lie from 1 to inf."),
        (["algo=qr_dqn", "algo.agent.num_quantiles=0"], "algo.agent.num_quantiles=0 must lie from 1 to inf."),
        (["algo=r2d2", "algo.agent.rescale=-0.1"], "algo.agent.rescale=-0.1 must lie from 0 to inf."),
        (["algo=r2d2", "algo.agent.largest_share=9"], "algo.agent.largest_share=9 must lie from 0 to 1."),
        (["algo=dqn", "algo.agent.epsilon_spread=-2"], "algo.agent.epsilon_spread=-2 must lie from 0 to inf."),
        (["algo=dqn", "algo.agent.huber_delta=-1"], "algo.agent.huber_delta=-1 must lie from 1e-09 to inf."),
        (["algo=td3", "algo.agent.target_noise_clip=-1"], "algo.agent.target_noise_clip=-1 must lie from 0 to inf."),
        (
            ["algo=torchrl", "loss=SACLoss"],
            "SACLoss is for actions of shape [A], and cartpole has Discrete(num_values=2, ",
        ),
        (["algo=torchrl", "loss=DQNLoss", "algo.replay.capacity=1"], "algo.replay."),
        (["device=tpu"], "device=tpu is not known; use cpu, cuda or cuda:INDEX."),
        (["device=cuda:x"], "device=cuda:x is not known; use cpu, cuda or cuda:INDEX."),
        (["device=cuda:99"], "device=cuda:99: "),
        (["resume=file"], "resume=file is a file; give a run folder, or auto."),
        (["resume=nonsense"], "resume=nonsense: there is no such folder; give a run folder, or auto."),
        (["resume=."], ". holds no checkpoint; give a folder that torchpod train has written."),
        (["seed=-1"], "seed=-1 must be an integer from 0 to 2^63 - 1."),
        (["run_dir="], "run_dir is empty; name a folder, or leave it out."),
        (["env=file.py:Env"], "env="),
        (
            ["env.max_episode_steps=0"],
            "env=cartpole cannot be made with {'max_episode_steps': 0}: max_episode_steps=0 is wrong; use an",
        ),
        (
            ["env=tag_continuous", "env.num_other_agents_observed=300", "algo=ippo"],
            "env=tag_continuous cannot be made with {'num_other_agents_observed': 300}: num_other_a",
        ),
        (
            ["env=tag_gridworld", "algo=ippo", "algo.agent.policies={a: [tagger], b: [tagger, runner]}"],
            "agent 0 of tag_gridworld has policies a and b; give it one of them.",
        ),
        (
            ["env=tag_gridworld", "algo=ippo", "algo.agent.policies={a: [tagger]}"],
            "agents [4] have no policy in ['a']; tag_gridworld has agents 0 to 4 in groups tagger (4), runner (1).",
        ),
        (
            ["env=tag_gridworld", "algo=ippo", "algo.agent.policies={a: [tagger, runner], b: []}"],
            "policy b has agents [], and tag_gridworld has agents 0 to 4 in groups tagger (4), runner (1); name some",
        ),
        (["run_dir=/proc/run"], "/proc/run cannot be written (No such file or directory); free some space, or choose"),
        (["run_dir=file"], "run_dir=file is a file; name a folder, or leave it out."),
        (["run_dir=file", "resume=auto"], "run_dir=file is a file; name a folder, or leave it out."),
        (["run_dir=file/run"], "file/run cannot be written (Not a directory); free some space, or choose another"),
    ],
)
def test_a_setting_that_cannot_work_is_named_in_one_sentence(overrides: list[str], message: str, call: Call):
    Path("file").touch()
    assert error_of(call("train", *SMALL, *overrides)).startswith(message)
    assert not list(Path.cwd().rglob("checkpoints"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_device_cuda_is_refused(call: Call):
    assert error_of(call("train", *SMALL, "device=cuda")) == (
        "device=cuda: PyTorch sees no CUDA device here; use device=cpu."
    )


def test_a_resumed_run_knows_the_settings_of_its_agent_and_loss(call: Call, tmp_path: Path):
    small = [item for item in SMALL if not item.startswith("algo.agent")]
    assert call("train", *small, "loss=DistributionalDQNLoss", "algo.replay.min_size=16", "run_dir=run")[0] == 0
    for setting, told in (
        ("algo.replay.capacity=50", "algo.replay.capacity=50 cannot change: run has 100000;"),
        ("algo.agent.num_atoms=3", "algo.agent.num_atoms=3 cannot change: run has 51;"),
        ("loss=DiscreteSACLoss", "algo.agent.loss=DiscreteSACLoss cannot change: run has DistributionalDQNLoss;"),
        ("algo=dqn", "algo.name=dqn cannot change: run has torchrl;"),
    ):
        assert error_of(call("train", "resume=run", setting)).startswith(told)
    assert error_of(call("train", "resume='run'", "algo.replay.capacity=50")).startswith("algo.replay.capacity=50 can")
    more = "algo.replay.host=true", f"total_env_steps={2 * 64}", "logger.console=false"
    assert call("train", "resume=run", "loss=DistributionalDQNLoss", *more)[0] == 0


def test_so_does_one_of_the_user_s_agent_and_environment(call: Call):
    small = [item for item in SMALL if not item.startswith("algo.agent")]
    files = f"algo={AGENT_FILE}:MyAgent", f"env={ENV_FILE}:MyEnv"
    assert call("train", *small, *files, "run_dir=run")[0] == 0
    told = error_of(call("train", "resume=run", "algo.unroll_length=3"))
    assert told.startswith("algo.unroll_length=3 cannot change: run has 8;")
    assert call("train", "resume=run", "total_env_steps=128", "logger.console=false")[0] == 0


def test_settings_that_failed_can_be_repaired_in_the_same_folder(call: Call):
    error_of(call("train", *SMALL, "run_dir=run", "num_envs=6", "algo.agent.recurrent=4"))
    assert Path("run").is_dir()
    assert call("train", *SMALL, "run_dir=run")[0] == 0


def test_a_run_folder_is_never_overwritten(call: Call):
    assert call("train", *SMALL, "run_dir=run")[0] == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    message = "run_dir=run already holds a run; use another, or resume=run to go on with it."
    assert error_of(call("train", *SMALL, "run_dir=run")) == message
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


class TestUserEnvironment:
    def test_one_that_breaks_the_contract_is_refused_with_the_rule(self, call: Call):
        assert error_of(call("train", *SMALL, f"env={ENV_FILE}:Impolite", "run_dir=run")) == (
            f"env={ENV_FILE}:Impolite breaks the contract: reward must be a torch.float32 tensor of shape [4]; it is "
            "torch.float64 of shape [4]."
        )
        assert not Path("run").exists()

    def test_one_that_lacks_an_argument_is_refused(self, call: Call):
        message = f"env={ENV_FILE}:Picky needs the argument size; add +env.size=VALUE."
        assert error_of(call("train", *SMALL, f"env={ENV_FILE}:Picky")) == message

    def test_one_that_keeps_the_contract_is_trained(self, call: Call):
        assert call("train", *SMALL, f"env={ENV_FILE}:MyEnv", "+env.limit=3")[0] == 0

    def test_rewards_that_are_not_numbers_stop_the_run_with_the_trajectory(self, call: Call):
        fault = ("+env.limit=150", "+env.fault=bad_reward", "+env.at=120")
        settings = (*SMALL, f"env={ENV_FILE}:MyEnv", *fault, "total_env_steps=10_000", "run_dir=run")
        error = error_of(call("train", *settings))
        assert error.startswith("a gradient of iteration 15 is not finite; the trajectory it came from is in run/nan/")
        assert error.endswith(" Iteration 14, before it, is saved in run.")
        assert error_of(call("train", "resume=run")).startswith("a gradient of iteration 15 is not finite")
        assert [path.name for path in Path("run/nan").iterdir()] == ["iteration-15-rank-0.pt"]
        assert checkpoint.latest(Path("run")).name == f"{14:010d}"


def test_an_agent_in_a_file_is_trained_evaluated_and_resumed_also_from_where_it_moved_to(call: Call):
    settings = [item for item in SMALL if not item.startswith("algo.agent.")]
    shutil.copy(AGENT_FILE, "mine.py")
    assert call("train", *settings, "algo=mine.py:MyAgent", "+algo.agent.clip=0.1", "run_dir=run")[0] == 0
    assert call("eval", "run", "--episodes", "2")[0] == 0
    assert call("train", "resume=run", "total_env_steps=96")[0] == 0
    Path("mine.py").rename("moved.py")
    assert "there is no file" in error_of(call("train", "resume=run", "total_env_steps=128"))
    Path("new").mkdir()
    Path("moved.py").rename("new/mine.py")
    assert call("train", "resume=run", "algo=new/mine.py:MyAgent", "total_env_steps=128")[0] == 0
    assert checkpoint.latest(Path("run")).name == f"{4:010d}"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Mean", "breaks the contract: loss() must be a sum over rows weighted by steps['weight'], and so must its"),
        ("Shouts", "breaks the contract: action must be a torch.int64 tensor of shape [4]; it is torch.int64 of shape"),
        ("Forgets", "breaks the contract: Batch.steps must be a dict that holds `weight`"),
        ("Clumsy", "breaks the contract: act() must not raise, and of its first batch it raised KeyError: 'shape' ("),
    ],
)
def test_an_agent_that_breaks_the_contract_is_not_trained(call: Call, name: str, error: str):
    settings = [item for item in SMALL if not item.startswith("algo.agent.")]
    algo = f"algo={AGENT_FILE}:{name}"
    assert error_of(call("train", *settings, algo, "run_dir=run")).startswith(f"{algo} {error}")
    assert not Path("run").exists()


@pytest.mark.parametrize("loop", ["anakin", pytest.param("sebulba", marks=pytest.mark.slow)])
def test_an_agent_that_branches_on_a_tensor_is_not_compiled_and_its_line_named(call: Call, loop: str):
    agent, settings = f"algo={AGENT_FILE}:Branches", [item for item in SMALL if not item.startswith("algo.agent.")]
    more = ["compile=true", f"loop={loop}"] + (["loop.lag=0"] if loop == "sebulba" else [])
    error = error_of(call("train", *settings, agent, *more, "run_dir=run"))
    line = next(i for i, text in enumerate(AGENT_FILE.read_text().splitlines(), 1) if "if trajectory" in text)
    assert f"{AGENT_FILE}:{line}, `if trajectory.timestep.reward.sum() < -1e9:`, does not compile (" in error
    assert error.endswith("Python cannot branch on what a tensor holds: use torch.where, or run with compile=false.")
    assert call("train", *settings, agent, "run_dir=run")[0] == 0


@pytest.mark.slow
def test_training_after_warming_up_compiles_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(command: str, *more: str) -> str:  # in a process of its own, which has compiled nothing before
        settings = [item for item in SMALL if item != "compile=false"]
        argv = [sys.executable, "-m", "torchpod", command, *settings, *more]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def programs() -> set[Path]:
        return set((tmp_path / "cache").rglob("*.so"))

    out = run("warmup")
    assert re.match(r"ready in [\d.]+ s; runs with these settings begin from the compile cache\n", out)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    compiled = programs()
    run("train", "run_dir=run")
    assert compiled and programs() == compiled


class TestPlot:
    def test_any_metric_is_drawn(self, call: Call):
        pytest.importorskip("matplotlib")
        assert call("train", *SMALL, "run_dir=run")[0] == 0
        assert call("plot", "run", "--metric", "policy_loss", "--out", "x.svg")[:2] == (0, "x.svg\n")
        assert "policy loss" in Path("x.svg").read_text()
        assert "run has no metric los; it has approx_kl, " in error_of(call("plot", "run", "--metric", "los"))
        error = error_of(call("plot", "run", "--metric", "policy_loss", "--out", "x.xyz"))
        assert error.startswith("x.xyz has the suffix '.xyz'; use one of .") and ".svg" in error

    def test_without_matplotlib_it_names_the_extra(self, call: Call, monkeypatch: pytest.MonkeyPatch):
        assert call("train", *SMALL, "run_dir=run", "total_env_steps=1024")[0] == 0
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        error = error_of(call("plot", "run", "--metric", "policy_loss"))
        assert error == "torchpod plot needs matplotlib: pip install 'torchpod-rl[plot]'."


class TestEval:
    def test_what_is_no_run_is_refused(self, call: Call):
        Path("empty").mkdir()
        assert error_of(call("eval", "empty")).startswith("empty is no run folder: there is no config.yaml in it.")
        assert error_of(call("eval", "nowhere")).startswith("nowhere is no run folder")

    def test_no_episodes_are_refused(self, call: Call):
        assert call("train", *SMALL, "run_dir=run")[0] == 0
        assert error_of(call("eval", "run", "--episodes", "0")) == "--episodes 0 must be at least 1."

    def test_weights_of_another_network_are_refused(self, call: Call):
        assert call("train", *SMALL, "run_dir=run")[0] == 0
        path = Path("run/config.yaml")
        path.write_text(path.read_text().replace("- 8", "- 9"))
        assert error_of(call("eval", "run")) == (
            "run/checkpoints/0000000002 does not fit the agent and the environment of run/config.yaml: "
            "encoder.net.0.weight is [8, 4] there and [9, 4] here; that file or a class of yours may have changed "
            "since: use the old one."
        )

    def test_a_video_of_the_first_episode_is_written(self, call: Call):
        pytest.importorskip("PIL")
        assert call("train", *SMALL, "run_dir=run")[0] == 0
        alone = call("eval", "run", "--episodes", "1")[1]
        status, out, error = call("eval", "run", "--episodes", "1", "--video", "new/episode.gif")
        assert (status, error) == (0, "") and out.startswith(alone)
        score = json.loads(alone)["mean"]
        assert out.removeprefix(alone) == f"new/episode.gif: {int(score) + 1} frames, return {short(score)}\n"
        assert Path("new/episode.gif").read_bytes().startswith(b"GIF89a")

    def test_a_member_of_a_population_plays_the_episodes_of_its_summary_again(self, call: Call):
        assert call("train", *SMALL, "run_dir=run", "population=2", "seed=3")[0] == 0
        for member in "01":
            folder = Path("run/members", member)
            wanted = json.loads((folder / "summary.json").read_text())["eval_return"]["mean"]
            assert json.loads(call("eval", str(folder), "--episodes", "2")[1])["mean"] == wanted

    def test_of_a_population_the_best_member_is_shown_or_the_one_named(self, call: Call):
        pytest.importorskip("PIL")
        assert call("train", *SMALL, "run_dir=run", "population=3")[0] == 0
        *scores, last = call("eval", "run", "--episodes", "1", "--video", "x.gif")[1].splitlines()
        means = [json.loads(score)["mean"] for score in scores]
        assert last.endswith(f"return {short(max(means))}, member {means.index(max(means))}")
        out = call("eval", "run", "--episodes", "1", "--video", "x.gif", "--member", "1")[1]
        assert out.endswith(f"return {short(means[1])}, member 1\n")
        assert error_of(call("eval", "run", "--video", "x.gif", "--member", "3")) == "--member 3 must be from 0 to 2."
        assert error_of(call("eval", "run", "--member", "1")) == (
            "--member 1 chooses whose episode is written; add --video or --episode."
        )

    def test_an_episode_is_recorded_and_drawn_in_one_call_and_its_actions_may_be_drawn(self, call: Call):
        pytest.importorskip("PIL")
        assert call("train", *SMALL, "run_dir=run")[0] == 0
        greedy = call("eval", "run", "--episodes", "3")[1]
        status, out, error = call(
            "eval", "run", "--episodes", "3", "--episode", "a/b.npz", "--video", "c.gif", "--sample"
        )
        assert (status, error) == (0, "")
        sampled, recorded, drawn = out.splitlines()
        assert json.loads(sampled) != json.loads(greedy)
        arrays = np.load("a/b.npz")
        length = len(arrays["action"])
        assert arrays["observation"].shape == (length + 1, 4) and arrays["reward"].sum() == length
        assert recorded == f"a/b.npz: {length} steps in {len(arrays)} arrays, return {length}"
        assert drawn == f"c.gif: {length + 1} frames, return {length}"
        error = error_of(call("eval", "run", "--episode", "x.npy"))
        assert error == "x.npy has the suffix '.npy'; use .npz, which numpy.load reads."

    def test_a_video_that_cannot_be_made_is_refused_before_the_episodes(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ):
        pytest.importorskip("PIL")
        assert call("train", *SMALL, "run_dir=run")[0] == 0
        error = error_of(call("eval", "run", "--video", "x.avi"))
        assert error == "x.avi has the suffix '.avi'; use one of .gif, .mp4."
        monkeypatch.setitem(sys.modules, "av", None)
        error = error_of(call("eval", "run", "--video", "x.mp4"))
        assert error == "x.mp4 needs av: pip install 'torchpod-rl[video]'."
        assert not list(Path.cwd().glob("x.*"))


@pytest.mark.parametrize("gpu", [False, True])
def test_without_a_compiler_compile_true_says_so_and_compile_false_works(
    call: Call, monkeypatch: pytest.MonkeyPatch, gpu: bool
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    # On a GPU any compiler of C will do.
    for variable, value in (("PATH", "/nowhere"), *([] if gpu else [("CXX", "/nowhere/g++")])):
        with monkeypatch.context() as patch:
            for name in ("CC", "CXX"):
                patch.delenv(name, raising=False)
            patch.setenv(variable, value)
            error = error_of(call("train", *SMALL, "compile=true", f"run_dir={variable}"))
            assert error.startswith("compile=true needs a C++ compiler, and")
            assert error.endswith("or run with compile=false.")
            assert not Path(variable).exists()
            assert call("train", *SMALL, f"run_dir={variable}")[0] == 0


def test_the_traceback_is_there_for_who_wants_it(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHPOD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="numenvs is no setting"):
        call("train", "numenvs=3")


def test_python_m_torchpod_is_the_same_command(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, "-m", "torchpod", "train", "nun_envs=3"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("torchpod: error: nun_envs is no setting; did you mean num_envs")
    assert result.stderr.count("\n") == 1


class TestUnread:
    """Where who reads the output ends first, e.g. `| head -1`."""

    def left(self, folder: Path, num_lines: int, *argv: str) -> tuple[int, str]:
        """Exit status and errors of a command of which so many lines are read."""
        process = subprocess.Popen(
            [sys.executable, "-m", "torchpod", *argv],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
        assert process.stdout is not None and process.stderr is not None
        for _ in range(num_lines):
            assert process.stdout.readline()
        process.stdout.close()
        with process.stderr as errors:
            told = errors.read()
        return process.wait(60), told

    def test_a_list_ends_without_a_word(self, tmp_path: Path):
        assert self.left(tmp_path, 0, "list", "envs") == (1, "")

    def test_an_interruption_is_told_where_nobody_reads_either(self, tmp_path: Path):
        """As of `train | tee FILE`, where Ctrl-C ends both."""
        settings = [x for x in SMALL if not x.startswith(("logger", "total"))]
        process = subprocess.Popen(
            [sys.executable, "-m", "torchpod", "train", *settings, "total_env_steps=100000000", "run_dir=run"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "run folder run\n" and process.stdout.readline()  # of an iteration
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        with process.stderr as errors:
            told = errors.read()
        saved = int(checkpoint.latest(tmp_path / "run").name)
        assert (process.wait(60), told) == (130, f"torchpod: stopped at iteration {saved}; go on with resume=run\n")

    def test_training_saves_what_there_is(self, tmp_path: Path):
        settings = [x for x in SMALL if not x.startswith(("logger", "total"))]
        status, told = self.left(tmp_path, 2, "train", *settings, "total_env_steps=100000000", "run_dir=run")
        saved = int(checkpoint.latest(tmp_path / "run").name)
        message = f"stopped, for nobody reads what it prints. Iteration {saved} is saved; go on with resume=run\n"
        assert (status, told) == (1, f"torchpod: {message}") and saved > 1


class TestDisk:
    """On a file system of our own, in a user namespace: root may write anywhere, but not where there is no room."""

    def mounted(self, options: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
        unshare = shutil.which("unshare")
        probe = [unshare or "false", "-rm", "mount", "-t", "tmpfs", "none", str(folder)]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            pytest.skip("needs unshare(1) and user namespaces")
        command = f"mount -t tmpfs -o {options} none {folder} && cd {folder} && {script}"
        python = f"'{sys.executable}' -m torchpod"
        settings = " ".join(f"'{item}'" for item in SMALL)
        command = command.replace("TORCHPOD", python).replace("SMALL", settings)
        environment = {**os.environ, "TMPDIR": "/tmp"}
        process = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        out, error = process.communicate(timeout=300)  # until nobody can write any more
        assert session_of(process) == []
        return subprocess.CompletedProcess(command, process.returncode, out, error)

    @pytest.mark.parametrize("loop", ["anakin", pytest.param("sebulba", marks=pytest.mark.slow)])
    def test_a_full_disk_ends_the_run_with_one_sentence_and_its_last_checkpoint(self, tmp_path: Path, loop: str):
        result = self.mounted(
            "size=128k" if loop == "anakin" else "size=256k",
            f"TORCHPOD train SMALL loop={loop} run_dir=run total_env_steps=1000000 checkpoint.interval_s=0 "
            "checkpoint.keep=1000;"
            "echo $?; expr $(date +%s) - $(stat -c %Y $(ls -d run/checkpoints/* | tail -1));"
            "ls -A run/checkpoints; rm -r run/checkpoints/0000000001; TORCHPOD eval run; echo $?",
            tmp_path,
        )
        sentence, *rest = result.stderr.splitlines()
        assert rest == [], result.stderr
        assert sentence.startswith("torchpod: error: run/")
        assert "cannot be written (No space left on device); free some space, or choose another folder" in sentence
        status, ended_s, *names, score, eval_status = result.stdout.splitlines()
        assert (status, eval_status) == ("1", "0") and int(ended_s) < 10
        assert len(names) > 1 and all(name.isdigit() for name in names)
        assert json.loads(score)["checkpoint"] == names[-1]

    @pytest.mark.slow
    def test_a_disk_that_replay_fills_ends_the_run_with_one_sentence_and_its_last_checkpoint(self, tmp_path: Path):
        result = self.mounted(
            "size=1m",
            "TORCHPOD train SMALL algo=dqn env=minatar_breakout algo.replay.capacity=10000 algo.replay.min_size=32 "
            "algo.replay.batch_size=16 algo.replay.prioritised=false run_dir=run total_env_steps=1000000 "
            "checkpoint.interval_s=0; echo $?; ls -A run/checkpoints; TORCHPOD eval run > /dev/null; echo $?",
            tmp_path,
        )
        warned, _, sentence = result.stderr.splitlines()
        assert "UserWarning: run/replay/0 will hold at least" in warned and "free some space" in warned
        assert sentence.startswith("torchpod: error: run/")
        assert "cannot be written (No space left on device); free some space, or choose another folder" in sentence
        status, *names, eval_status = result.stdout.splitlines()
        assert (status, eval_status) == ("1", "0") and names and all(name.isdigit() for name in names)

    def test_a_read_only_folder_is_named(self, tmp_path: Path):
        result = self.mounted("ro", "TORCHPOD train SMALL run_dir=run; echo $?", tmp_path)
        assert result.stderr == (
            "torchpod: error: run cannot be written (Read-only file system); free some space, or choose another folder "
            "with run_dir=DIR.\n"
        )
        assert result.stdout == "1\n"

    @pytest.mark.slow
    def test_a_run_in_a_folder_that_became_read_only_stays_as_it_is(self, tmp_path: Path):
        result = self.mounted(
            "size=4m",
            f"TORCHPOD train SMALL run_dir=run > /dev/null && mount -o remount,ro {tmp_path};"
            "TORCHPOD train resume=run total_env_steps=128; echo $?; TORCHPOD eval run > /dev/null; echo $?",
            tmp_path,
        )
        assert result.stderr.startswith("torchpod: error: run cannot be written (Read-only file system)")
        assert result.stderr.count("\n") == 1
        assert result.stdout == "1\n0\n"


def test_the_command_leaves_what_is_imported_to_itself_and_the_others_alone():
    """Processes that import the main module, as multiprocessing's do, import no torch."""
    code = (
        "import gc, sys, torchpod.__main__ as command; assert 'torch' not in sys.modules\n"
        "sys.argv = ['torchpod', 'list', 'algos']\n"
        "print(command.main(), gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 True True", done.stderr
