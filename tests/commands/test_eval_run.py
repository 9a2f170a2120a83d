"""What is evaluated is what the run acts with: weights of the checkpoint, hyperparameters of its iteration."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import torchpod as tp
from torchpod import checkpoint, random
from torchpod.anakin import EVAL_STREAM
from torchpod.checkpoint import CheckpointError
from torchpod.commands.eval_run import acting_weights, eval_run
from torchpod.commands.export_run import export_run
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.host import Gymnasium
from torchpod.evaluate import evaluate
from torchpod.main import main
from torchpod.run.execute import execute
from torchpod.run.folder import read_config

STEPS = 4 * 8
"""Of an iteration."""
SMALL = (
    "env=cartpole",
    "env.max_episode_steps=30",
    "num_envs=4",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "algo.learner.num_minibatches=2",
    "compile=false",
    "logger.console=false",
    "evaluation.episodes=2",
    "checkpoint.interval_s=0",
)
DQN = ("algo=dqn", "algo.replay.capacity=400", f"algo.replay.min_size={4 * STEPS}", "algo.replay.batch_size=8")
PPO = ("algo=ppo", "algo.learner.anneal=[clip]")


@pytest.mark.parametrize("until", [2, 7, 12], ids=["while replay fills", "on the way", "at the end"])
@pytest.mark.parametrize(
    ("settings", "scheduled"),
    [
        (DQN, "epsilon"),
        ((*DQN, "population=2"), "discount"),
        (PPO, "entropy_coefficient"),
        ((*PPO, "loop=sebulba", "loop.num_actor_threads=0", "loop.updates_per_batch=2"), "entropy_coefficient"),
    ],
)
def test_hyperparameters_are_those_that_the_run_acts_with(tmp_path: Path, settings, scheduled, until):
    schedule = f"algo.learner.schedules={{{scheduled}:[[0,0.9],[{16 * STEPS},0.1]]}}"
    config = load([*SMALL, *settings, schedule, f"total_env_steps={12 * STEPS}", f"run_dir={tmp_path}/run"])
    run = execute(config, until=until)
    folder = checkpoint.latest(run.dir)
    weights = checkpoint.load_weights(folder)
    found = acting_weights(read_config(run.dir), run.agent, weights, int(folder.name))
    assert int(folder.name) == until and found.keys() == run.variables.keys()
    for name, x in run.variables.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=0)
    torch.testing.assert_close(found[scheduled], torch.full_like(found[scheduled], 0.9 - 0.8 * until / 16))


def test_a_finished_dqn_is_sampled_with_its_last_share_of_random_actions(tmp_path: Path):
    run = execute(load([*SMALL, *DQN, f"total_env_steps={12 * STEPS}", f"run_dir={tmp_path}/run"]))
    key, env = random.fold_in(random.key(0), EVAL_STREAM), CartPole(max_episode_steps=30)
    weights = checkpoint.load_weights(checkpoint.latest(run.dir))
    assert weights["remaining"] == 1 and run.variables["remaining"] == 0
    means = [
        evaluate(run.agent, env, variables, key, num_episodes=20, explore=True).returns.mean().item()
        for variables in (run.variables, weights)
    ]
    said = json.loads(eval_run(run.dir, episodes=20, sample=True))["mean"]
    assert said == pytest.approx(means[0]) and means[0] != pytest.approx(means[1])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    execute(load([*SMALL, f"total_env_steps={STEPS}", f"run_dir={folder}"]))
    return folder


@pytest.mark.parametrize("settings", [PPO, (*DQN, "population=2")], ids=["one", "population"])
def test_a_run_is_loaded_as_it_was_returned(tmp_path: Path, settings):
    run = execute(load([*SMALL, *settings, f"total_env_steps={8 * STEPS}", f"run_dir={tmp_path}/run"]))
    found = tp.load(str(run.dir))
    assert (found.dir, found.summary, found.variables.keys()) == (run.dir, run.summary, run.variables.keys())
    if "population=2" in settings:
        member = tp.load(run.dir / "members" / "1")
        run.variables = {name: x[1] for name, x in run.variables.items()}
        assert member.summary["eval_return"] == run.summary["members"][1]
        found = member
    for name, x in run.variables.items():
        torch.testing.assert_close(found.variables[name], x, rtol=0, atol=0)
    keys = random.split(random.key(0), 3)
    timestep = tp.make_env("cartpole").init(keys)[1]
    (a, _), (b, _) = (each.policy.act(timestep, (), keys, explore=False) for each in (run, found))
    assert torch.equal(a.action, b.action)


def test_a_run_of_an_object_is_loaded_with_it(tmp_path: Path):
    settings = [*SMALL[2:], f"total_env_steps={STEPS}", f"run_dir={tmp_path}/run"]
    run = tp.train(env=CartPole(max_episode_steps=30), overrides=settings)
    with pytest.raises(ConfigError, match=r"was a Python object.*torchpod\.load\(RUN, env=\.\.\.\)"):
        tp.load(run.dir)
    assert tp.load(run.dir, env=CartPole()).variables.keys() == run.variables.keys()


@pytest.mark.parametrize(("option", "name"), [("episode", "x.npz"), ("video", "x.gif")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_played(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
):
    pytest.importorskip("PIL")
    monkeypatch.setattr("torchpod.commands.eval_run.evaluate", lambda *_, **__: pytest.fail("it plays"))
    (tmp_path / "file").touch()
    files: dict[str, Any] = {option: tmp_path / "file" / name}
    with pytest.raises(ConfigError, match=rf"^--{option} .*/file/{name} cannot be written \(.*; name a file in a fold"):
        eval_run(run_dir, episodes=1, **files)


@pytest.mark.parametrize("episodes", [10**12, 10**30])
def test_more_episodes_than_memory_holds_are_refused(run_dir: Path, episodes: int):
    with pytest.raises(ValueError, match=rf"^--episodes {episodes} are too many for the memory of cpu; use fewer\.$"):
        eval_run(run_dir, episodes=episodes)


def test_an_export_that_fails_leaves_the_program_before_and_nothing_else(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:9])
        raise OSError(28, "No space left on device")

    out = tmp_path / "policy.pt2"
    export_run(run_dir, out=out)
    before = out.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"policy\.pt2 cannot be written \(No space left on device\); name another file"):
        export_run(run_dir, out=out)
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


LIFT = """
from dataclasses import dataclass, field
from typing import Any

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.envs.classic.cartpole import CartPole


class Pole(CartPole):
    def __init__(self, max_episode_steps: int = 30, size=(1, 2), day: object = object(), **more: Any) -> None:
        super().__init__(max_episode_steps=max_episode_steps)


@dataclass(frozen=True)
class MyConfig(PPOConfig):
    hidden: tuple[int, ...] = (8,)
    discount: float = 0.5
    sizes: list[int] = field(default_factory=lambda: [1])
    told: Any = object()
    needed: int = 3


class Mine(PPO):
    def __init__(self, spec, config: MyConfig) -> None:
        assert isinstance(config.sizes, list)
        super().__init__(spec, config)
"""


@pytest.fixture
def own_run(tmp_path: Path) -> Path:
    """A run of a user's agent and environment, in own.py beside it."""
    (tmp_path / "own.py").write_text(LIFT)
    files = (f"env={tmp_path}/own.py:Pole", f"algo={tmp_path}/own.py:Mine", "+env.other=1")
    settings = [x for x in SMALL if not x.startswith(("env", "algo.agent"))]
    return execute(load([*settings, *files, f"total_env_steps={STEPS}", f"run_dir={tmp_path}/run"])).dir


def test_a_run_keeps_the_defaults_that_its_files_had(own_run: Path, capsys: pytest.CaptureFixture[str]):
    config = read_config(own_run)
    assert config.env == {"name": f"{own_run.parent}/own.py:Pole", "max_episode_steps": 30, "other": 1}
    assert (config.algo.agent["hidden"], config.algo.agent["discount"], config.algo.agent["needed"]) == ([8], 0.5, 3)
    assert {"sizes", "told"}.isdisjoint(config.algo.agent)  # which YAML, or its check, cannot give back
    before = eval_run(own_run, episodes=4)
    assert capsys.readouterr().err == ""
    changed = (
        LIFT.replace("(8,)", "(16,)").replace("= 30", "= 3").replace("needed: int", "added: int = 1\n    needed: int")
    )
    (own_run.parent / "own.py").write_text(changed)
    assert eval_run(own_run, episodes=4) == before
    told = capsys.readouterr().err
    assert told.startswith(f"torchpod eval: {own_run} was trained with other own.py (sha256 ") and told.count("\n") == 1
    execute(load([f"resume={own_run}", f"total_env_steps={2 * STEPS}"]))
    assert f"{own_run} goes on with other own.py (sha256 " in capsys.readouterr().out
    assert read_config(own_run).algo.agent == {**config.algo.agent, "added": 1}
    eval_run(own_run, episodes=2)
    assert capsys.readouterr().err == ""  # the checkpoint is of the file as it is
    with pytest.raises(ConfigError, match=r"algo\.agent\.discount=0\.6 cannot change: .* has 0\.5"):
        execute(load([f"resume={own_run}", "+algo.agent.discount=0.6"]))


def test_weights_that_do_not_fit_are_named_with_both_shapes(own_run: Path):
    path = own_run / "config.yaml"
    path.write_text(path.read_text().replace("    - 8\n", "    - 16\n"))
    told = r"config\.yaml: \S+ is \[8, 4\] there and \[16, 4\] here; that file or a class of yours may have"
    with pytest.raises(CheckpointError, match=told):
        eval_run(own_run, episodes=2)


@pytest.mark.parametrize("fails", [False, True])
def test_the_environment_is_closed_and_threads_are_as_before_whatever_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails
):
    env = ("env=gymnasium", "env.task=CartPole-v1", "loop=sebulba", f"total_env_steps={STEPS}")
    run = execute(load([*SMALL[2:], *env, f"run_dir={tmp_path}/run"]))
    open_before, close = [], Gymnasium.close

    def closing(env: Gymnasium) -> None:
        open_before.append(env._envs is not None)
        close(env)

    monkeypatch.setattr(Gymnasium, "close", closing)
    if fails:
        monkeypatch.setattr("torchpod.commands.eval_run.eval_returns", lambda score: 1 / 0)
    threads = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        eval_run(run.dir, episodes=2)
    assert threads == [1, 3]
    assert open_before == [False, True]  # the first is that of `init`


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["eval", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_evaluated_in_a_changed_environment(run_dir: Path, tmp_path: Path, capsys):
    own = evaluated(capsys, run_dir, "--episodes", 3)
    longer = evaluated(capsys, run_dir, "env.max_episode_steps=7", "--episodes", 3)
    assert longer["mean"] == 7.0 < own["mean"]
    repeated = "env.transforms=[{name: action_repeat, num: 3}]"
    assert evaluated(capsys, run_dir, "--episodes", 3, f"+{repeated}", "env.max_episode_steps=9")["mean"] <= 9.0
    another = tmp_path / "another.py"
    another.write_text(
        "from torchpod.envs.classic.cartpole import CartPole\n\n\n"
        "class Short(CartPole):\n    def __init__(self, steps: int = 5) -> None:\n"
        "        super().__init__(max_episode_steps=steps)\n"
    )
    assert evaluated(capsys, run_dir, f"env={another}:Short", "--episodes", 3)["mean"] == 5.0
    assert evaluated(capsys, run_dir, f"env={another}:Short", "env.steps=4", "--episodes", 3)["mean"] == 4.0
    assert evaluated(capsys, run_dir, "--episodes", 3) == own  # nothing of it stays


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("env.name=pendulum", "env.name is set by env, with all settings that belong to it; write env=pendulum."),
        ("env.max_episode_steps@x=5", "env.max_episode_steps@x=5 is no setting of the environment alone"),
        ("env.max_episode_steps=1,2", "is several values, and an evaluation is in one environment; write env.max_ep"),
        ("env.max_episode_steps=${foo}", "the environment cannot be changed by env.max_episode_steps=${foo}: Interp"),
        ("num_envs=3", "num_envs=3 is no setting of the environment alone; write env.NAME=VALUE, or env=ANOTHER."),
        ("env.max_episode_steps", "env.max_episode_steps is no setting of the environment alone"),
        ("~env.max_episode_steps", "~env.max_episode_steps is no setting of"),
        ("env.max_steps=3", "env=cartpole takes no argument max_steps; did you mean max_episode_steps"),
        ("env=cartpol", "env=cartpol is not known; did you mean cartpole"),
        ("env.max_episode_steps=[3", "env.max_episode_steps=[3 cannot be read"),
        (
            "env=pendulum",
            "/checkpoints/0000000001 does not fit the environment with env=pendulum: ",
        ),
    ],
)
def test_what_is_no_environment_for_the_agent_is_refused(run_dir: Path, capsys, given: str, message: str):
    assert main(["eval", str(run_dir), given]) == 1
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_settings_beside_an_environment_that_is_given_are_refused(run_dir: Path):
    with pytest.raises(ValueError, match="env.max_episode_steps=7 would change nothing of an environment that is giv"):
        eval_run(run_dir, episodes=1, env=CartPole(), overrides=["env.max_episode_steps=7"])


def test_a_setting_in_a_runs_file_that_is_none_is_told_with_the_file(run_dir: Path, tmp_path: Path, capsys):
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    file = copy / "config.yaml"
    file.write_text(file.read_text().replace("hidden:", "hidd:"))
    assert main(["eval", str(copy)]) == 1
    told = capsys.readouterr().err
    assert (
        "algo.agent.hidd is no setting; did you mean hidden? The settings are those of " in told and str(file) in told
    )


def test_a_run_is_short_in_print_and_a_beginning_for_another(run_dir: Path, tmp_path: Path):
    run = tp.load(run_dir)
    assert len(repr(run)) < 2000 and str(run_dir) in repr(run)
    again = tp.train(
        env={"name": "cartpole", "max_episode_steps": 7},
        init_from=run,
        run_dir=tmp_path / "again",
        total_env_steps=STEPS,
        overrides=[x for x in SMALL if not x.startswith("env")] + ["algo.learner.learning_rate=0"],
    )
    assert json.loads(eval_run(str(again.dir), episodes=2))["mean"] == 7.0
    assert all(torch.equal(x, run.variables[name]) for name, x in again.variables.items())
