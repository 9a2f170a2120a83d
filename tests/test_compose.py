"""What `load` makes of experiments, users' experiments in files and overrides."""

import dataclasses
import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from tests.refusals import refused
from tests.users import AGENT_FILE, ENV_FILE
from torchpod import configs
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.replay import ReplayConfig


def test_an_experiment_can_be_overridden():
    config = load(["experiment=pendulum", "num_envs=7", "algo.agent.hidden=[3,3]", "env.max_episode_steps=9"])
    assert (config.num_envs, config.algo.agent["hidden"], config.env["max_episode_steps"]) == (7, [3, 3], 9)
    assert config.algo.agent["discount"] == 0.95
    assert config.given == ("experiment", "num_envs", "algo.agent.hidden", "env.max_episode_steps")


MINE = f"""
# Nothing of Hydra's needs to be said.
defaults:
  - override /algo: {AGENT_FILE}:MyAgent
  - override /env: user_env.py:MyEnv # beside this file
num_envs: 16
env: {{limit: 3}}
algo:
  agent: {{clip: 0.1}}
  learner: {{learning_rate: 1e-3}}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's experiment, beside their environment."""
    (tmp_path / "user_env.py").write_text(ENV_FILE.read_text())
    (tmp_path / "my.exp.yaml").write_text(MINE)
    return tmp_path / "my.exp.yaml"


def test_an_experiment_in_a_file_is_one_like_those_of_ours(mine: Path):
    config = load([f"experiment={mine}"])
    assert (config.env, config.algo.agent) == ({"name": f"{mine.parent}/user_env.py:MyEnv", "limit": 3}, {"clip": 0.1})
    assert (config.algo.name, config.num_envs) == (f"{AGENT_FILE}:MyAgent", 16)
    assert (config.algo.learner.learning_rate, config.experiment, config.given) == (1e-3, "my.exp", ("experiment",))
    mine.write_text(MINE.replace("num_envs: 16", "num_envs: 32\nexperiment_name: lift"))  # nothing of it is cached
    config = load([f"experiment={mine}"])
    assert (config.num_envs, config.experiment) == (32, "lift")


def test_an_experiment_in_a_file_can_be_overridden(mine: Path):
    shown = load(
        ["algo.agent.clip=0.2", f"experiment='{mine}'", "+algo.agent.broken=true", "num_envs=8", "env.limit=9"]
    )
    assert (shown.num_envs, shown.env["limit"], shown.algo.agent) == (8, 9, {"clip": 0.2, "broken": True})
    assert "write '+algo.agent.broken=true'" in refused([f"experiment={mine}", "algo.agent.broken=true"])
    (mine.parent / "small.yaml").write_text("defaults: [{override /env: catch}]\nnum_envs: 4")
    config = load([f"experiment={mine.parent / 'small.yaml'}", "algo=dqn", "env=cartpole"])
    assert (config.algo.name, config.env["name"], config.num_envs) == ("dqn", "cartpole", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, ": there is no such file; give path/to/my.yaml."),
        ("", " holds no settings; write names and values, e.g. num_envs: 64."),
        ("- 1", " holds no settings; "),
        ("3", " cannot be read (Invalid loaded object type: int); write it as docs/experiments.md says."),
        ("num_envs: [1", " cannot be read (while parsing a flow sequence in "),
        ("numenvs: 3", ": numenvs is no setting; did you mean num_envs"),
        ("algo: ppo", ": algo is chosen among defaults; write it below defaults as - override /algo: ppo."),
        ("defaults: ppo", ": defaults is no list; write choices as - override /algo: ppo."),
        ("defaults: [algo: ppo]", ": defaults has {'algo': 'ppo'}; write a choice as - override /algo: ppo, or na"),
        ("defaults: [cartpol]", ": defaults has cartpol; write a choice as - override /algo: ppo, or name an exper"),
        ("defaults: [override /algo: pppo]", ": algo=pppo is not known; did you mean ppo or ippo or mappo?"),
        ("defaults: [override /env: no.py:MyEnv]", "/no.py; give env=path/to/file.py:Class with where it is."),
    ],
)
def test_an_experiment_in_a_file_that_cannot_be_used_is_named(text: str | None, message: str, tmp_path: Path):
    path = tmp_path / "my.yaml"
    if text is not None:
        path.write_text(text)
    told = refused([f"experiment={path}"])
    assert message in told and (told.startswith(f"experiment={path}") or "no.py" in told)


@pytest.mark.parametrize("name", ["c51_minatar_breakout", "mappo_tag_continuous", "ppo_pendulum_sebulba"])
def test_a_copy_of_an_experiment_of_ours_is_the_same_experiment(name: str, tmp_path: Path):
    path = tmp_path / "copied.yaml"
    path.write_text((Path(configs.__path__[0]) / "experiment" / f"{name}.yaml").read_text())
    ours, copied = load([f"experiment={name}"]), load([f"experiment={path}"])
    assert copied.to_dict() | {"experiment_name": None} == ours.to_dict() | {"experiment_name": None}


def test_an_experiment_in_a_file_may_begin_with_one_of_ours(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults: [override /loop: sebulba, cartpole, _self_]\nnum_envs: 4")
    config = load([f"experiment={tmp_path}/mine.yaml"])
    unroll_length = load(["experiment=cartpole"]).algo.unroll_length
    assert (config.loop.name, config.num_envs, config.algo.unroll_length) == ("sebulba", 4, unroll_length)
    assert config.experiment == "mine"


@pytest.mark.parametrize("group", ["algo", "env"])
def test_a_class_of_a_module_is_refused_with_the_name_of_its_file(group: str):
    told = f"{group}=my.games:Mine is not known; name the file of a class of your own: {group}=my/games.py:Mine."
    assert refused([f"{group}=my.games:Mine"]) == told


def test_a_program_that_uses_hydra_itself_keeps_it(tmp_path: Path):
    (tmp_path / "theirs.yaml").write_text("x: 1")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        load(["algo=ppo"])
        with pytest.raises(ConfigError):
            load(["algo=pppo"])
        assert compose("theirs") == {"x": 1}


@pytest.mark.parametrize("group", ["loss", "experiment"])
def test_a_group_that_may_be_null_is_as_if_left_out(group: str):
    assert load(["algo=ppo", f"{group}=null"]).to_dict() == load().to_dict()


@pytest.mark.parametrize(("value", "shown"), [(None, "None"), ([1, 2], r"\[1, 2\]"), (3, "3")])
def test_overrides_that_are_no_texts_are_refused(value: Any, shown: str):
    with pytest.raises(ConfigError, match=f"overrides={shown} is no list of texts; write e.g. .*, or leave it out."):
        load(value)


def test_a_text_is_read_as_the_error_says_it_is_to_be_quoted():
    for text in ("a=b", "a(b)", "it's", 'a"b', "1234"):
        told = refused([f"run_dir={text}"])
        (shown,) = shlex.split(re.sub(r".*?(run_dir='.*')( for a text)?\.$", r"\1", told))
        assert load([shown]).run_dir == text


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algo.agent.policies", {"tagger": {}, "runner": {}}),
        ("algo.agent.policies", {"all": [0, 1, 2, 3, "runner"]}),
        ("algo.learner.schedules", {"learning_rate": [[0.0, 0.001], [10.0, 0.0]]}),
        ("algo.learner.learning_rate", {"tagger": 0.001}),
        ("algo.learner.max_grad_norm", {"tagger": 3.0}),
    ],
)
def test_a_mapping_takes_the_place_of_the_one_that_an_experiment_has(setting: str, value: Any):
    text = json.dumps(value).replace('"', "")
    config = load(["experiment=ia2c_tag_continuous", f"{setting}={text}"])
    assert functools.reduce(dict.__getitem__, setting.split("."), config.to_dict()) == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo=dqn", "algo.replay.alpha=0.2"], "algo.replay.alpha is of prioritised replay; add algo.replay.priorit"),
        (["algo=dqn", "algo.replay.min_size=-5"], "algo.replay.min_size=-5 must lie from 0 to inf."),
        (["algo=a2c", "algo.agent.clip=0.1"], "algo.agent.clip is no setting; "),
        (["algo=dqn", "loss=ClipPPOLoss"], "loss=ClipPPOLoss is of algo=torchrl; leave algo=dqn out, or the loss."),
        (["algo=ppo", "loop=sebulba", "logger.phases=true"], "logger.phases=true is for loop=anakin; leave it out."),
        (["algo=torchrl", "algo.agent.loss=SACLoss"], "write loss=SACLoss, which has all."),
        (["loss=SACLoss", "algo.agent.loss=TD3Loss"], "write loss=TD3Loss, which has all."),
        (["loss=DQNLoss", "algo.agent.noise=0.3"], "noise=0.3 has no effect on DQNLoss; leave it out. It is of DDPGLo"),
        (["loss=DQNLoss", "algo.agent.noise=0.1"], "noise=0.1 has no effect on DQNLoss; leave it out. It is of DDPGLo"),
        (["loss=ClipPPOLoss", "algo.agent.low=-5"], "low=-5 has no effect on ClipPPOLoss; leave it out. It is of Dis"),
        (["loss=CrossQLoss", "algo.agent.target_rate=0.1"], "target_rate=0.1 has no effect on CrossQLoss; leave it ou"),
        (["loss=SACLoss", "algo.agent.gae_lambda=0.5"], "algo.agent.gae_lambda=0.5 has no effect on SACLoss; leave"),
        (
            ["loss=IPPOLoss", "algo.agent.policies={runner:{epsilon:0.3}}"],
            "algo.agent.policies.runner.epsilon=0.3 has no effect on IPPOLoss; leave it out. It is of DQNLoss",
        ),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], message: str):
    assert message in refused(overrides)
    load([*overrides, "algo.replay.prioritised=true"] if "alpha" in message else [overrides[0]])


@pytest.mark.parametrize("sign", ["", "+"])
@pytest.mark.parametrize("override", ["algo=ppo", "loss=ClipPPOLoss"])
def test_settings_of_replay_are_refused_by_agents_without(override: str, sign: str):
    told = f"algo.replay.capacity is a setting of agents with replay, and {override} has none; leave it out."
    assert refused([override, f"{sign}algo.replay.capacity=10"]) == told


@pytest.mark.parametrize("override", ["algo=dqn", "algo=r2d2", "algo=sac", "loss=DQNLoss", "loss=SACLoss"])
def test_every_setting_of_replay_has_its_place(override):
    for field in dataclasses.fields(ReplayConfig):
        value = "null" if field.default is None else str(field.default).lower()
        config = load([override, f"algo.replay.{field.name}={value}"])
        assert getattr(config.algo.replay, field.name) == field.default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_envs: x", "num_envs='x': expected an integer."),
        ("algo: {agent: {hiddens: [8]}}", "algo.agent.hiddens is no setting; did you mean hidden?"),
        ("algo: {agent: {hidden: [x]}}", "algo.agent.hidden[0]='x': expected an integer."),
        ("algo: {agent: {clip: -1}}", "algo.agent.clip=-1 must lie from 0 to inf."),
        ("algo: {learner: {learningrate: 1}}", "algo.learner.learningrate is no setting; did you mean learning_rate"),
        ("total_env_steps: 0", "total_env_steps=0 must be at least 1."),
    ],
)
def test_a_setting_that_an_experiments_file_has_wrong_is_told_with_the_file(text: str, message: str, tmp_path: Path):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert refused([f"experiment={path}", "seed=3"]).startswith(f"experiment={path}: {message}")


def test_a_setting_that_is_wrong_beside_an_experiments_file_is_told_by_itself(tmp_path: Path):
    path = tmp_path / "my.yaml"
    path.write_text("num_envs: 32")
    assert refused([f"experiment={path}", "num_envs=x"]) == "num_envs='x': expected an integer."
    assert refused([f"experiment={path}", "seed=x"]) == "seed='x': expected an integer."
    path.write_text("algo: {learner: {num_minibatches: 4}}")
    assert refused([f"experiment={path}", "num_envs=6", "algo.unroll_length=5"]).startswith("algo.learner.num_mini")


def test_an_experiment_named_without_its_suffix_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("num_envs: 32")
    assert refused(["experiment=mine"]) == ("experiment=mine is not known; there is a file here: experiment=mine.yaml.")
