"""Agents and environments of the user's, in files of their own."""

import dataclasses
from pathlib import Path

import pytest

from tests.users import AGENT_FILE, ENV_FILE, TINY
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.learner import LearnerConfig
from torchpod.makers import find, make_agent, make_env, sources, with_defaults
from torchpod.run.execute import execute
from torchpod.run.folder import changed_sources


def test_an_environment_in_a_file_takes_arguments():
    config = load([f"env={ENV_FILE}:MyEnv", "+env.limit=3"])
    assert config.env == {"name": f"{ENV_FILE}:MyEnv", "limit": 3}
    assert config.experiment == "ppo_user_env_MyEnv"
    env = make_env(config.env)
    assert env.spec.max_episode_steps == 3
    assert make_agent(config.algo, env.spec)().config.hidden == (64, 64)


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo=c51", "+members.low=[0,50]", "+members.high=[100,10]"], "low=50.0 must be below high=10.0"),
        (["algo=impala", "+members.rho_clip=[0.5,1]"], "rho_clip=0.5 must be at least c_clip=1; raise it."),
    ],
)
def test_the_constructor_of_an_agent_judges_the_settings_of_each_member(overrides: list[str], message: str):
    config = load([*overrides, "population=2"])
    with pytest.raises(ValueError, match=message):
        make_agent(config.algo, make_env("cartpole").spec, config.members)


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
