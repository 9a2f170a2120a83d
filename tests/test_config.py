"""Every file in configs/, and settings that `from_dict` and bounds refuse."""

import dataclasses
import importlib.util
import inspect
from pathlib import Path

import pytest
import torchrl.objectives
import yaml

from tests.marks import with_slow
from tests.refusals import refused
from tests.users import AGENT_FILE, ENV_FILE, TINY
from torchpod import algos, configs, envs
from torchpod.algos.torchrl import CONTINUOUS, MULTI_AGENT
from torchpod.compose import choices, load
from torchpod.config import ConfigError, TrainConfig, default_experiment, from_dict, plain
from torchpod.run.execute import execute


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
    assert values == {"name": name} | plain(defaults)


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


def test_every_member_has_a_seed_that_a_command_can_name():
    assert load([f"seed={2**63 - 2}", "population=2"]).seed == 2**63 - 2
    assert refused([f"seed={2**63 - 1}", "population=2"]) == (
        "seed=9223372036854775807 must be at most 2^63 - 2: each of population=2 members has a seed that is one more "
        "than the last."
    )


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
        ("env=nowhere.py:MyEnv", "no file nowhere.py; give env=path/to/file.py:Class with where it is."),
        ("env=nowhere:MyEnv", "name the file of a class of your own: env=nowhere.py:MyEnv."),
        (f"env={ENV_FILE}", f"name the class too, e.g. {ENV_FILE}:MyClass."),
        (f"env={ENV_FILE}:MyEnw", "has no class MyEnw; did you mean MyEnv?"),
        ("algo=nowhere:MyAgent", "name the file of a class of your own: algo=nowhere.py:MyAgent."),
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


def test_members_of_a_policy_are_checked_too():
    settings = ["algo=ippo", "env=tag_gridworld", "population=2", "+members={policies.runner.clip:[-1,0.2]}"]
    assert refused(settings) == "members.policies.runner.clip=[-1.0, 0.2] must lie from 0 to inf."
    apart = [*settings[:-1], "+members.policies.runner.clip=[0.1,0.2]", "+members.policies.tagger.clip=[0.3,0.4]"]
    assert load(apart).members == {"policies.runner.clip": (0.1, 0.2), "policies.tagger.clip": (0.3, 0.4)}


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


def test_agents_without_replay_have_no_pace():
    config = load(["algo=ppo"])
    algo = dataclasses.replace(config.algo, env_steps_per_update=2.0)
    with pytest.raises(ConfigError, match="is for agents with replay, and ppo learns from each unroll once"):
        from_dict(dataclasses.asdict(dataclasses.replace(config, algo=algo)))


def test_of_a_config_yaml_unknown_and_mistyped_keys_are_refused():
    values = load().to_dict()
    with pytest.raises(ConfigError, match="num_env is no setting; did you mean num_envs?"):
        from_dict(values | {"num_env": 1})
    with pytest.raises(ConfigError, match="seed='x': expected an integer"):
        from_dict(values | {"seed": "x"})
    assert isinstance(from_dict(values), TrainConfig)
