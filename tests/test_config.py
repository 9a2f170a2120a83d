"""Every file in configs/, and what `load` refuses."""

import dataclasses
import functools
import importlib.util
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torchrl.objectives
import yaml

from tests.marks import with_slow
from torchpod import algos, configs, envs
from torchpod.algos.torchrl import CONTINUOUS, MULTI_AGENT
from torchpod.config import ConfigError, TrainConfig, choices, default_experiment, from_dict, load
from torchpod.learner import LearnerConfig
from torchpod.makers import find, make_agent, make_env, sources, with_defaults
from torchpod.replay import ReplayConfig
from torchpod.run.execute import execute
from torchpod.run.folder import changed_sources

ENV_FILE = Path(__file__).parent / "user_env.py"
AGENT_FILE = Path(__file__).parent / "user_agent.py"
TINY = (
    "compile=false",
    "logger.console=false",
    "num_envs=16",
    "total_env_steps=1",
    "algo.unroll_length=16",
    "evaluation.episodes=1",
)


def test_the_groups_hold_what_there_is():
    assert choices("env") == sorted(envs.MAKERS)
    assert choices("algo") == sorted(algos.MAKERS)
    assert set(choices("experiment")) >= {"cartpole", "catch", "memory_chain", "pendulum"}
    replayed = {name for name, (maker, _) in algos.MAKERS.items() if getattr(maker, "replayed", 0)}
    assert set(algos.REPLAYED) == replayed | {"sac"}  # a function, of classes that do


SLOW = [f"experiment={x}" for x in ("ppo_minatar_freeway", "impala_pong", "ppo_pong_gpu", "r2d2_breakout")]


@pytest.mark.parametrize(
    "override",
    with_slow([f"{group}={name}" for group in ("experiment", "algo", "env", "loss") for name in choices(group)], SLOW),
)
def test_every_config_trains_one_iteration(override: str, tmp_path: Path):
    atari = "pong" in override or override == "experiment=r2d2_breakout"
    if override == "env=envpool" or atari:
        pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    if override == "env=pettingzoo":
        pytest.importorskip("mpe2", reason="the extra `pettingzoo`, or the package mpe2, is not installed")
    if "brax" in override and importlib.util.find_spec("brax") is None:
        pytest.skip("the extra `brax` is not installed")
    many = ("env=covid_economy", "env=tag_continuous", "env=tag_gridworld", "env=pettingzoo")
    host = ["algo=ippo"] if override in many else []
    groups = [f"algo={x}" for x in ("ia2c", "ippo", "mappo")] + [f"loss={x}" for x in MULTI_AGENT]
    host += ["env=tag_gridworld"] if override in groups else []
    on_host = [f"env={x}" for x in ("brax", "envpool", "gymnasium", "pettingzoo")]
    host += ["loop=sebulba"] if override in on_host else []
    host += ["env.task=fast"] if "brax" in override else []  # others take long to compile
    continuous = [f"algo={x}" for x in ("apg", "ddpg", "shac", "td3")] + [f"loss={x}" for x in CONTINUOUS]
    host += ["env=pendulum"] if override in continuous else []
    if not atari and "max_episode_steps" in load([override, *host]).env:  # evaluation plays an episode
        host += ["env.max_episode_steps=20"]
    host += ["algo.replay.min_size=1"] if load([override]).algo.replay else []  # learns in the first iteration
    host += ["+env.max_episode_steps=20"] if atari else []
    iterations = 1
    if "r2d2" in override:  # the first sequence is whole after two unrolls
        iterations = 3
        host += ["algo.unroll_length=16", "algo.agent.length=16", f"total_env_steps={256 * (iterations - 1) + 1}"]
    config = load([override, *TINY, *host, f"run_dir={tmp_path / 'run'}"])
    if override == "loss=TQCLoss" and not hasattr(torchrl.objectives, "TQCLoss"):
        with pytest.raises(ValueError, match=r"torchrl .* has no TQCLoss; install a newer one"):
            execute(config)
        return
    run = execute(config)
    assert 0 < run.summary["env_steps"] <= 256 * iterations
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_priorities_that_are_squares_have_half_of_the_usual_exponent():
    """Those of TorchRL losses that write squared errors; the others write sizes, or their loss."""
    replayed = {name: load([f"loss={name}"]).algo.replay for name in choices("loss")}
    alphas = {name: replay.alpha for name, replay in replayed.items() if replay is not None}
    sizes = ("CrossQLoss", "DiscreteSACLoss", "DistributionalDQNLoss", "SACLoss", "TQCLoss")
    assert len(alphas) == 13 and alphas == {name: 0.6 if name in sizes else 0.3 for name in alphas}


@pytest.mark.parametrize("name", choices("env"))
def test_the_keys_of_an_environment_are_the_arguments_of_its_class(name: str):
    values = yaml.safe_load((Path(configs.__path__[0]) / "env" / f"{name}.yaml").read_text())
    parameters = inspect.signature(envs.MAKERS[name]).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind != inspect.Parameter.VAR_KEYWORD]
    defaults = {p.name: values[p.name] if p.default is inspect.Parameter.empty else p.default for p in named}
    assert values == {"name": name} | defaults


@pytest.mark.parametrize("name", choices("experiment"))
def test_a_config_survives_its_own_yaml(name: str):
    config = load([f"experiment={name}", "+members.discount=[0.5]", "algo.learner.chunk_rows=64"])
    again = from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.hash() == config.hash()


def test_the_hash_names_what_is_trained_not_where():
    config = load()
    assert load(["seed=1", "run_dir=x", "resume=auto", "logger.console=false"]).hash() == config.hash()
    assert load(["algo.agent.clip=0.3"]).hash() != config.hash()


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
        ("defaults: [algo: ppo]", ": defaults has {'algo': 'ppo'}; write a choice as - override /algo: ppo."),
        ("defaults: [cartpole]", ": defaults has cartpole; write a choice as - override /algo: ppo."),
        ("defaults: [override /algo: pppo]", ": algo=pppo is not known; did you mean ppo or ippo or mappo?"),
        ("defaults: [override /env: no.py:MyEnv]", "/no.py; give PATH.py:MyEnv with where it is now"),
    ],
)
def test_an_experiment_in_a_file_that_cannot_be_used_is_named(text: str | None, message: str, tmp_path: Path):
    path = tmp_path / "my.yaml"
    if text is not None:
        path.write_text(text)
    told = refused([f"experiment={path}"])
    assert message in told and (told.startswith(f"experiment={path}") or "no.py" in told)


def test_an_environment_in_a_file_takes_arguments():
    config = load([f"env={ENV_FILE}:MyEnv", "+env.limit=3"])
    assert config.env == {"name": f"{ENV_FILE}:MyEnv", "limit": 3}
    assert config.experiment == "ppo_user_env_MyEnv"
    env = make_env(config.env)
    assert env.spec.max_episode_steps == 3
    assert make_agent(config.algo, env.spec)().config.hidden == (64, 64)


@pytest.mark.parametrize(
    ("algo", "env", "name"),
    [
        ("ppo", {"name": "cartpole"}, "ppo_cartpole"),
        ("ppo", {"name": "gymnasium", "task": "ALE/Pong-v5"}, "ppo_ALE-Pong-v5"),
        ("ppo", {"name": "object:Lift"}, "ppo_Lift"),
        ("/a/my.own.py:Mine", {"name": "inv.games:Inventory", "task": "hard"}, "my.own_Mine_games_Inventory"),
    ],
)
def test_a_run_without_an_experiment_is_called_by_its_agent_and_environment(algo: str, env: dict[str, str], name: str):
    assert default_experiment(algo, env) == name


@pytest.mark.parametrize("name", ["MyAgent", "Heir"])
def test_an_agent_in_a_file_takes_the_settings_that_its_constructor_is_annotated_with(name: str):
    config = load([f"algo={AGENT_FILE}:{name}", "+algo.agent.clip=0.1", "algo.unroll_length=16"])
    assert (config.algo.name, config.algo.agent) == (f"{AGENT_FILE}:{name}", {"clip": 0.1})
    assert (config.algo.unroll_length, config.algo.learner) == (16, LearnerConfig())
    assert config.experiment == f"user_agent_{name}_cartpole"
    agent = make_agent(config.algo, make_env("cartpole").spec)()
    assert (type(agent).__name__, agent.config.hidden, agent.config.clip) == (name, (8,), 0.1)


BOLD = ["env=cartpole", f"algo={AGENT_FILE}:Bold", "population=2"]


def test_a_setting_of_an_agent_in_a_file_may_be_named_like_one_of_ours_with_bounds(tmp_path: Path):
    beta = ["+members.beta=[6,7]", "algo.learner.schedules={trust:[[0,0.5],[5e7,1]]}", f"run_dir={tmp_path}"]
    run = execute(load([*BOLD, "+algo.agent.beta=5.5", *beta, *TINY]))
    assert run.variables["beta"].tolist() == [6.0, 7.0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+algo.agent.trust=2", "algo.agent.trust=2 must lie from 0 to 1."),
        ("+algo.agent.clip=-1", "algo.agent.clip=-1 must lie from 0 to inf."),  # whose bounds are those of PPO
        ("+members.trust=[0,2]", "members.trust=[0.0, 2.0] must lie from 0 to 1."),
        ("algo.learner.schedules={trust:[[0,2]]}", "schedules.trust=[[0.0, 2.0]] must have values from 0 to 1."),
    ],
)
def test_bounds_that_an_agent_in_a_file_declares_are_kept(override: str, message: str):
    with pytest.raises(ConfigError) as error:
        execute(load([*BOLD, override, *TINY]))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("act", "act(self, timestep, state, keys, explore=True)"),
        ("prepare", "prepare(self, trajectory, keys)"),
        ("loss", "loss(self, batch, keys, target)"),
    ],
)
def test_an_agent_in_a_file_without_a_method_is_told_which_to_define(name: str, signature: str, tmp_path: Path):
    (tmp_path / "bare.py").write_text(
        "from torchpod.agent import Agent\nfrom torchpod.algos.ppo import PPO, PPOConfig\n\n\n"
        f"class Bare(PPO):\n    {name} = Agent.{name}\n"
    )
    with pytest.raises(ConfigError) as error:
        execute(load([f"algo={tmp_path}/bare.py:Bare", *TINY, f"run_dir={tmp_path}/run"]))
    assert f"Bare must define {signature}." in str(error.value)


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path):
    (tmp_path / "beside_it.py").write_text("LIMIT = 6\n")
    text = "from beside_it import LIMIT\nfrom torchpod.envs import CartPole\n\n\n"
    text += "class Short(CartPole):\n    def __init__(self):\n        super().__init__(max_episode_steps=LIMIT)\n"
    (tmp_path / "short.py").write_text(text)
    assert make_env(f"{tmp_path}/short.py:Short").spec.max_episode_steps == 6


def test_a_file_beside_another_of_the_same_name_is_not_mistaken_for_it(tmp_path: Path):
    for folder, limit in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        text = ENV_FILE.read_text().replace("limit: int = 20", f"limit: int = {limit}")
        (tmp_path / folder / "random.py").write_text(text)  # a name of the standard library, too
    made = [make_env(f"{tmp_path / folder / 'random.py'}:MyEnv") for folder in ("a", "b")]
    assert [env.spec.max_episode_steps for env in made] == [3, 4]


def test_the_files_of_a_user_are_known_by_their_contents(tmp_path: Path):
    (tmp_path / "a.py").write_text("1")
    config = load([f"env={tmp_path}/a.py:A"])
    digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    assert sources(config) == {"env": [f"{tmp_path}/a.py", digest]} and sources(load()) == {}
    for name, found in (("gone.a:A", 0), (f"{tmp_path}/gone.py:A", 0), ("object:A", 0), ("tests.user_env:MyEnv", 1)):
        assert len(sources(dataclasses.replace(config, env={"name": name}))) == found


def test_files_of_one_name_are_told_apart(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(folder)
    config = load([f"env={tmp_path}/b/mine.py:A"])
    config = dataclasses.replace(config, algo=dataclasses.replace(config.algo, name=f"{tmp_path}/a/mine.py:A"))
    meta = {"sources": sources(config)}
    assert changed_sources(meta, config) == []
    (tmp_path / "a" / "mine.py").write_text("another")
    assert [x.partition(" ")[0] for x in changed_sources(meta, config)] == ["mine.py"]


def test_defaults_are_those_of_the_constructor_but_for_what_is_put_around(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from torchrl.envs import EnvBase\nfrom torchpod.envs import CartPole\n\n\nclass Theirs(EnvBase):\n"
        "    def __init__(self, size=3, *, seed=None):\n        super().__init__()\n\n"
        "    _reset = _step = _set_seed = None\n\n\nclass Wraps(CartPole):\n"
        "    def __init__(self, transforms=None, slope=0.5):\n        super().__init__()\n"
    )
    recorded = [with_defaults(load([f"env={tmp_path}/own.py:{name}"])).env for name in ("Theirs", "Wraps")]
    assert [{k: v for k, v in env.items() if k != "name"} for env in recorded] == [
        {"size": 3, "seed": None},
        {"slope": 0.5},
    ]


def test_a_file_is_imported_once_and_again_when_it_is_another(tmp_path: Path):
    (tmp_path / "once.py").write_text("class A:\n    x = []\n")
    first, again = (find(f"{tmp_path}/once.py:A", {}, "env") for _ in range(2))
    assert first is again
    (tmp_path / "once.py").write_text("class A:\n    x = 1\n")
    assert find(f"{tmp_path}/once.py:A", {}, "env").x == 1


def test_an_environment_that_is_not_known_may_be_one_of_ones_own():
    with pytest.raises(
        ConfigError, match=r"env=inv:Inv is not known; .* A class of your own is env=path/to/file\.py:C"
    ):
        make_env("inv:Inv")


@pytest.mark.parametrize("group", ["loss", "experiment"])
def test_a_group_that_may_be_null_is_as_if_left_out(group: str):
    assert load(["algo=ppo", f"{group}=null"]).to_dict() == load().to_dict()


def test_every_member_has_a_seed_that_a_command_can_name():
    assert load([f"seed={2**63 - 2}", "population=2"]).seed == 2**63 - 2
    assert refused([f"seed={2**63 - 1}", "population=2"]) == (
        "seed=9223372036854775807 must be at most 2^63 - 2: each of population=2 members has a seed that is one more "
        "than the last."
    )


@pytest.mark.parametrize(("value", "shown"), [(None, "None"), ([1, 2], r"\[1, 2\]"), (3, "3")])
def test_overrides_that_are_no_texts_are_refused(value: Any, shown: str):
    with pytest.raises(ConfigError, match=f"overrides={shown} is no list of texts; write e.g. .*, or leave it out."):
        load(value)


def test_a_text_is_read_as_the_error_says_it_is_to_be_quoted():
    for text in ("a=b", "a(b)", "it's", 'a"b', "1234"):
        told = refused([f"run_dir={text}"])
        (shown,) = shlex.split(re.sub(r".*?(run_dir='.*')( for a text)?\.$", r"\1", told))
        assert load([shown]).run_dir == text


def refused(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        config = load(overrides)
        make_agent(config.algo, make_env(config.env).spec)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("numenvs=3", "numenvs is no setting; did you mean num_envs"),
        ("algo.learner.learning_rat=1", "algo.learner.learning_rat is no setting; did you mean algo.learner.learning"),
        ("+algo.agent.clipp=1", "algo.agent.clipp is no setting; did you mean clip"),
        ("algo.learner.lr=1", "algo.learner.lr is no setting; did you mean algo.learner.learning_rate?"),
        ("lr=1", "lr is no setting; did you mean algo.learner.learning_rate?"),
        ("+foo=1", "foo is no setting; "),
        ("algo=pppo", "algo=pppo is not known; did you mean ppo or ippo or mappo?"),
        ("env=cartpol", "env=cartpol is not known; did you mean cartpole"),
        (
            "experiment=carpole",
            "experiment=carpole is not known; did you mean cartpole or dqn_cartpole? A file of your own is "
            "experiment=path/to/my.yaml.",
        ),
        ("loss=RNDLoss", "loss=RNDLoss cannot be used here: it is of a bonus, not of a policy."),
        ("loop=anakim", "loop=anakim is not known; did you mean anakin?"),
        ("logger=wandb", "logger=wandb is not known; known: default."),
        ("env.max_steps=3", "env.max_steps is no setting; did you mean env.max_episode_steps"),
        ("+env.max_steps=3", "env=cartpole takes no argument max_steps; did you mean max_episode_steps?"),
        ("algo.agent.reward_clip=0", "algo.agent.reward_clip=0 must lie from 1e-09 to inf"),
        ("+num_envs=4", "num_envs is there already; leave the plus sign out."),
        ("num_envs=many", "num_envs='many': expected an integer."),
        ("num_envs=1.5", "num_envs=1.5: expected an integer."),
        ("num_envs=true", "num_envs=True: expected an integer."),
        ("num_envs=", "num_envs='': expected an integer."),
        ("compile=maybe", "compile='maybe': expected true or false."),
        ("algo.agent.hidden=64", "algo.agent.hidden=64: expected a list, each an integer."),
        ("algo.agent.hidden=[a]", "algo.agent.hidden[0]='a': expected an integer."),
        ("algo.learner.beta1=x", "algo.learner.beta1='x': expected a number."),
        (
            "algo.learner.learning_rate=fast",
            "algo.learner.learning_rate='fast': expected a number or names, each with a number.",
        ),
        ("num_envs=0", "num_envs=0 must be at least 1."),
        ("total_env_steps=-1", "total_env_steps=-1 must be at least 1."),
        ("population=0", "population=0 must be at least 1."),
        ("threads=0", "threads=0 must lie from 1 to 1024."),
        ("threads=100000", "threads=100000 must lie from 1 to 1024."),
        ("algo.unroll_length=0", "algo.unroll_length=0 must be at least 1."),
        ("algo.learner.num_minibatches=0", "algo.learner.num_minibatches=0 must be at least 1."),
        (
            "algo.learner.num_minibatches=100000",
            "algo.learner.num_minibatches=100000 divides neither num_envs=64 nor algo.unroll_length=128; use a number "
            "that divides one of them, e.g. algo.learner.num_minibatches=64.",
        ),
        ("device=banana", "device=banana is not known; use cpu, cuda or cuda:INDEX."),
        ("device=cuda:x", "device=cuda:x is not known; use cpu, cuda or cuda:INDEX."),
        ("device=cuda:-1", "device=cuda:-1 is not known; use cpu, cuda or cuda:INDEX."),
        ("algo.learner.chunk_rows=-1", "algo.learner.chunk_rows=-1 must be at least 1."),
        ("loop.iterations_per_call=0", "loop.iterations_per_call=0 must be at least 1."),
        ("checkpoint.keep=0", "checkpoint.keep=0 must be at least 1."),
        ("checkpoint.interval_s=-1", "checkpoint.interval_s=-1.0 must be at least 0."),
        ("evaluation.episodes=0", "evaluation.episodes=0 must be at least 1."),
        ("+members.discount=0.9", "members.discount=0.9: expected a list, each a number."),
        ("+members.discount=[1,2]", "members.discount=[1.0, 2.0] must be a list of population=1 numbers."),
        ("members.discount=[0.9]", "members.discount is added by a plus sign; write '+members.discount=[0.9]'."),
        ("+members.discount=[1.5]", "members.discount=[1.5] must lie from 0 to 1."),
        ("algo.agent.discount=1.5", "algo.agent.discount=1.5 must lie from 0 to 1."),
        ("algo.learner.learning_rate=-1", "algo.learner.learning_rate=-1.0 must lie from 0 to inf."),
        ("algo.learner.beta1=nan", "algo.learner.beta1=nan must lie from 0 to 0.999999."),
        (
            "algo.learner.schedules={clip:[[0]]}",
            "algo.learner.schedules.clip=[[0.0]] must be points [environment steps, value], e.g. [[0,0.5],[5e7,0.05]].",
        ),
        ("algo.learner.schedules={clip:[]}", "algo.learner.schedules.clip=[] must be points [environment steps, "),
        (
            "algo.learner.schedules={clip:[[5e7,0.1],[0,0.2]]}",
            "algo.learner.schedules.clip=[[50000000.0, 0.1], [0.0, 0.2]] must be finite numbers, with steps that grow "
            "from point to point.",
        ),
        ("algo.learner.schedules={clip:[[0,0.1],[0,0.2]]}", "with steps that grow from point to point."),
        ("algo.learner.schedules={clip:[[0,nan]]}", "must be finite numbers"),
        ("algo.learner.schedules={clip:[[0,-1]]}", "schedules.clip=[[0.0, -1.0]] must have values from 0 to inf."),
        ("algo.learner.schedules={policies.a.discount:[[0,2]]}", "must have values from 0 to 1."),
        ("algo.learner.schedules={learning_rate.a:[[0,-1]]}", "must have values from 0 to inf."),
        ("algo.learner.schedules={clip:1}", "algo.learner.schedules={'clip': 1}: expected names, each with a list, "),
        ("total_env_steps=99999999999999999", "total_env_steps=99999999999999999 must be at most 2^53."),
        ("num_envs", "num_envs is no override; write KEY=VALUE, e.g. num_envs=1024."),
        (
            "num_envs=[1",
            "num_envs=[1 cannot be read; write a list as num_envs=[1,2], names and values as num_envs={a:1",
        ),
        (
            "run_dir=a=b",
            """run_dir=a=b cannot be read; quote a text twice, for the shell and for torchpod: run_dir='"a=b"'.""",
        ),
        ("run_dir=a(b)", """: run_dir='"a(b)"'."""),
        (
            "seed=1,2",
            "seed=1,2 is several values, and a command trains one run; write seed=[1,2] for a list, seed=",
        ),
        ("algo.agent.hidden=32,32", "; write algo.agent.hidden=[32,32] for a list, "),
        (
            "seed=choice(1,2)",
            "seed=choice(1,2) is several values, and a command trains one run; train a run with each by torchpod train "
            "--multirun, or a population, whose members differ",
        ),
        ("env=cartpole,catch", "env=cartpole,catch is several values, and a command trains one run; train a run "),
        (
            "run_dir=a,b",
            """run_dir='"a,b"' for a text, or train a run with each by torchpod train --multirun, or a pop""",
        ),
        ("run_dir=1234", """run_dir=1234: expected a text or null; write run_dir='"1234"' for a text."""),
        ("experiment_name=true", """=True: expected a text or null; write experiment_name='"true"' for a text."""),
        ("logger.wandb_project=1", """=1: expected a text; write logger.wandb_project='"1"' for a text."""),
        ("env=null", "env=null: only loss and experiment may be null; leave it out, or name one: env=acrobot."),
        ("algo=null", "algo=null: only loss and experiment may be null; leave it out, or name one: algo=a2c."),
        ("algo.name=dqn", "algo.name is set by algo, with all settings that belong to it; write algo=dqn."),
        ("env.name='pendulum'", "env.name is set by env, with all settings that belong to it; write env=pendulum."),
        ("loop.name=sebulba", "loop.name is set by loop, with all settings that belong to it; write loop=sebulba."),
        (
            "members={discount:[0.9]}",
            "members is added by a plus sign; write '+members={discount:[0.9]}'.",
        ),
        ("num_envs=${nothing}", "the configuration cannot be composed: Interpolation key 'nothing' not found"),
        ("env=nowhere.py:MyEnv", "nowhere.py; give PATH.py:MyEnv with where it is now"),
        ("env=nowhere:MyEnv", "A class of your own is env=path/to/file.py:Class."),
        (f"env={ENV_FILE}", f"name the class too, e.g. {ENV_FILE}:MyClass."),
        (f"env={ENV_FILE}:MyEnw", "has no class MyEnw; did you mean MyEnv?"),
        ("algo=nowhere:MyAgent", "A class of your own is algo=path/to/file.py:Class."),
        (f"algo={AGENT_FILE}", f"name the class too, e.g. {AGENT_FILE}:MyClass."),
        (f"algo={AGENT_FILE}:NoAgent", "NoAgent is no subclass of torchpod.agent.Agent."),
        (f"algo={AGENT_FILE}:Picky", "Picky needs a setting; add +algo.agent.size=VALUE."),
        (f"algo={AGENT_FILE}:Shapeless", "Shapeless takes spec, config; its constructor must take the spec of the"),
        (f"env={ENV_FILE}:Picky", "needs the argument size; add +env.size=VALUE."),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(override: str, message: str):
    assert message in refused([override])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train:no", "runner.train='no': expected true or false."),
        ("clip:-1", "runner.clip=-1.0 must lie from 0 to inf."),
        ("discount:2.0", "runner.discount=2.0 must lie from 0 to 1."),
        ('normalize_observation:"false"', "runner.normalize_observation='false': expected true or false."),
        ("entropy_coefficient:abc", "runner.entropy_coefficient='abc': expected a number."),
        ("hidden:64", "runner.hidden=64: expected a list, each an integer."),
        ("recurrent:yes", "runner.recurrent='yes': expected an integer."),
    ],
)
def test_settings_of_a_policy_are_checked_as_those_of_all_are(setting: str, message: str):
    settings = ["algo=ippo", "env=tag_gridworld", f"algo.agent.policies={{runner:{{{setting}}}}}"]
    assert refused(settings) == f"algo.agent.policies.{message}"


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


def test_members_of_a_policy_are_checked_too():
    settings = ["algo=ippo", "env=tag_gridworld", "population=2", "+members={policies.runner.clip:[-1,0.2]}"]
    assert refused(settings) == "members.policies.runner.clip=[-1.0, 0.2] must lie from 0 to inf."
    apart = [*settings[:-1], "+members.policies.runner.clip=[0.1,0.2]", "+members.policies.tagger.clip=[0.3,0.4]"]
    assert load(apart).members == {"policies.runner.clip": (0.1, 0.2), "policies.tagger.clip": (0.3, 0.4)}


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


@pytest.mark.parametrize(
    ("override", "expected"),
    [("capacity=abc", "'abc': expected an integer."), ("host=maybe", "'maybe': expected true or false.")],
)
def test_a_setting_of_replay_is_named_like_any_other(override: str, expected: str):
    assert refused(["algo=dqn", f"algo.replay.{override}"]) == f"algo.replay.{override.partition('=')[0]}={expected}"


@pytest.mark.parametrize(("steps", "updates"), [("32", 8), ("0.25", 1024), ("256", 1), ("51.2", 5)])
def test_updates_are_paced_by_the_steps_of_all_environments(steps: str, updates: int):
    config = load(["algo=dqn", "num_envs=64", "algo.unroll_length=4", f"algo.env_steps_per_update={steps}"])
    assert config.algo.learner.num_minibatches == updates
    assert from_dict(config.to_dict()).algo.learner.num_minibatches == updates


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo=dqn", "30"], "=30 makes no whole number of updates of num_envs=64 x algo.unroll_length=4 steps per"),
        (["algo=dqn", "30"], "use e.g. algo.env_steps_per_update=28.4444."),
        (["algo=dqn", "1000"], "use e.g. algo.env_steps_per_update=256."),
        (["algo=dqn", "0"], "algo.env_steps_per_update=0 must be above 0."),
        (["algo=dqn", "-1"], "algo.env_steps_per_update=-1 must be above 0."),
        (["algo=ppo", "1"], "is a setting of agents with replay, and algo=ppo has none; leave it out."),
        (["algo=dqn", "algo.learner.num_minibatches=8", "32"], "give one of them, not both."),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(overrides: list[str], message: str):
    assert message in refused([*overrides[:-1], f"algo.env_steps_per_update={overrides[-1]}"])


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


def test_agents_without_replay_have_no_pace():
    config = load(["algo=ppo"])
    algo = dataclasses.replace(config.algo, env_steps_per_update=2.0)
    with pytest.raises(ConfigError, match="is for agents with replay, and ppo learns from each unroll once"):
        from_dict(dataclasses.asdict(dataclasses.replace(config, algo=algo)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algo.agent.clip=0.1", "algo.agent.clip is added by a plus sign; write '+algo.agent.clip=0.1'."),
        ("+algo.agent.clipp=0.1", "algo.agent.clipp is no setting; did you mean clip"),
        (
            "+algo.agent.broken=true",
            "cannot be made for cartpole: TypeError: the agent is broken. TORCHPOD_TRACEBACK=1",
        ),
    ],
)
def test_settings_that_an_agent_in_a_file_cannot_take_are_refused(setting: str, message: str):
    with pytest.raises(ConfigError) as error:
        make_agent(load([f"algo={AGENT_FILE}:MyAgent", setting]).algo, make_env("cartpole").spec)()
    assert message in str(error.value)


def test_of_a_config_yaml_unknown_and_mistyped_keys_are_refused():
    values = load().to_dict()
    with pytest.raises(ConfigError, match="num_env is no setting; did you mean num_envs?"):
        from_dict(values | {"num_env": 1})
    with pytest.raises(ConfigError, match="seed='x': expected an integer"):
        from_dict(values | {"seed": "x"})
    assert isinstance(from_dict(values), TrainConfig)
