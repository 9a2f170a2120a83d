"""Configuration: Hydra composes YAML and overrides, `load` checks the result and turns it into frozen dataclasses.

Every key, value and choice that does not exist is refused with the nearest names that do.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchpod import algos, configs
from torchpod.algos.torchrl import without_effect
from torchpod.bounds import bounded, bounds_of
from torchpod.hints import nearest
from torchpod.interop.unfit import UNSUPPORTED, unsupported
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.sebulba import SebulbaConfig

GROUPS = ("algo", "env", "loop", "logger", "loss", "experiment")
OBJECT = "object:"
"""Before the class of an environment that was handed over as a Python object, in place of its name."""
_OWN = "_own_"
"""Before the digest of an experiment's file, in the choice that it becomes."""
_MAPPINGS = (
    "algo.agent.policies",
    "algo.learner.schedules",
    "algo.learner.learning_rate",
    "algo.learner.max_grad_norm",
)
_AT_LEAST_1 = (
    "total_env_steps",
    "num_envs",
    "population",
    "algo.unroll_length",
    "algo.learner.num_epochs",
    "algo.learner.num_minibatches",
    "algo.learner.chunk_rows",
    "algo.replay.capacity",
    "algo.replay.batch_size",
    "loop.iterations_per_call",
    "loop.pools_per_actor",
    "loop.queue_size",
    "loop.updates_per_batch",
    "checkpoint.keep",
    "evaluation.episodes",
    "evaluation.every",
)
_SEBULBA = tuple(f.name for f in dataclasses.fields(SebulbaConfig))


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and says how to repair it."""


@dataclass(frozen=True)
class AlgoConfig:
    """Which agent, and how it learns."""

    name: str
    """Of `torchpod list algos`, or path/to/my_agent.py:MyAgent."""
    unroll_length: int
    """Steps of every environment in an iteration, before the learner's updates."""
    agent: dict[str, Any]
    """Settings of the agent itself, fields of its dataclass; of an agent of yours by a plus: +algo.agent.NAME=VALUE."""
    learner: LearnerConfig
    replay: ReplayConfig | None = None
    """Of agents that learn from replay."""
    env_steps_per_update: float | None = None
    """Of agents that learn from replay: how many steps of all environments there are for every update, 0.25 for four
    updates per step. It sets `algo.learner.num_minibatches`, the updates per iteration."""


@dataclass(frozen=True)
class LoopConfig(SebulbaConfig):
    """Which loop; the inherited fields are Sebulba's alone."""

    name: str = "anakin"
    iterations_per_call: int | None = None


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go, beside metrics.jsonl."""

    console: bool = True
    csv: bool = False
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "torchpod"
    phases: bool = False
    """Of Anakin: what part of the time rollouts and updates take."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written."""

    interval_s: float = 60.0
    keep: int = 3


@dataclass(frozen=True)
class EvaluationConfig:
    """How the policy is judged, at the end and, if you like, in training."""

    episodes: int = 100
    seed: int | None = None
    """Of the episodes; null: that of the run."""
    every: int | None = None
    """Environment steps, counted as those of total_env_steps are, from one evaluation to the next; metrics.jsonl has
    what they find, as eval_return. null: none before the end."""


def default_experiment(algo: str, env: Mapping[str, Any]) -> str:
    """What an experiment without a name is called, by the agent and the `env` of config.yaml: ppo_cartpole."""
    shipped = ":" not in env["name"]
    return f"{_short(algo)}_{(shipped and env.get('task')) or _short(env['name'])}".replace("/", "-")


def _short(name: str) -> str:
    """Of `path/to/my_env.py:MyEnv` and `package.my_env:MyEnv` my_env_MyEnv."""
    path, _, own = name.removeprefix(OBJECT).rpartition(":")
    module = Path(path).stem if path.endswith(".py") else path.rpartition(".")[2]
    return f"{module}_{own}" if path else own


@dataclass(frozen=True)
class TrainConfig:
    """One run; see configs/train.yaml."""

    algo: AlgoConfig
    env: dict[str, Any]
    """Of `torchpod list envs` or path/to/my_env.py:MyEnv, and arguments; of an environment of yours with a plus."""
    loop: LoopConfig
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    seed: int = 0
    total_env_steps: int = 500_000
    num_envs: int = 64
    device: str = "cpu"
    compile: bool = True
    population: int = 1
    members: dict[str, tuple[float, ...]] = field(default_factory=dict)
    threads: int | None = bounded(None, least=1, most=1024)
    run_dir: str | None = None
    resume: str | None = None
    experiment_name: str | None = None
    given: tuple[str, ...] = ()
    """Which keys were set by hand: only those can ask a resumed run for a change. Not in config.yaml."""

    @property
    def experiment(self) -> str:
        """The folder below runs/ that this run belongs to."""
        return self.experiment_name or default_experiment(self.algo.name, self.env)

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run: `total_env_steps`, rounded up to whole iterations."""
        return -(-self.total_env_steps // (self.num_envs * self.algo.unroll_length))

    @property
    def evaluation_seed(self) -> int:
        """Of the episodes of evaluations."""
        return self.seed if self.evaluation.seed is None else self.evaluation.seed

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, as in config.yaml."""
        values = {k: v for k, v in plain(dataclasses.asdict(self)).items() if k != "given"}
        if self.algo.replay is None:
            del values["algo"]["replay"], values["algo"]["env_steps_per_update"]
        if self.loop.name == "anakin":
            values["loop"] = {k: values["loop"][k] for k in ("name", "iterations_per_call")}
        return values

    def hash(self) -> str:
        """Twelve hex digits that name what was trained: every setting but the folder and the seed."""
        settings = {k: v for k, v in self.to_dict().items() if k not in ("run_dir", "resume", "seed", "logger")}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def listed(overrides: Sequence[str]) -> list[str]:
    """The overrides as a list; a `ConfigError` for one text, whose letters would be taken for them, or no texts."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} is one text; write a list, [{overrides!r}].")
    if not isinstance(overrides, Sequence) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError(
            f"overrides={overrides!r} is no list of texts; write e.g. ['num_envs=1024'], or leave it out."
        )
    return list(overrides)


def load(overrides: Sequence[str] = ()) -> TrainConfig:
    """Composes configs/train.yaml with overrides in Hydra's grammar.

    Raises:
      ConfigError: for anything that does not exist or does not fit.
    """
    overrides = [item for each in listed(overrides) for item in _expanded(each)]
    overrides = [item for item in overrides if item not in ("loss=null", "experiment=null")]  # as if left out
    grouped = _with_experiment(_with_groups(overrides))
    named = {_key(item): item for item in grouped}
    if "loss" in named and named.get("algo", "algo=torchrl") != "algo=torchrl":
        raise ConfigError(f"{named['loss']} is of algo=torchrl; leave {named['algo']} out, or the loss.")
    custom = {_key(item): item for item in grouped if _names_file(item)}
    plain = [f"{_key(item)}=custom" if _names_file(item) else item for item in grouped]
    GlobalHydra.instance().clear()
    with initialize_config_module("torchpod.configs", version_base="1.3"):
        groups = tuple(o for o in plain if _key(o) in GROUPS and _known(o))
        for override in plain:
            _check_override(override, groups)
        try:
            composed = compose("train", list(_in_place(plain)))
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException) as error:
            if there := re.search(r"An item is already at '([^']*)'", str(error)):
                raise ConfigError(f"{there[1]} is there already; leave the plus sign out.") from error
            if told := next(filter(None, map(_misread, plain)), None):
                raise ConfigError(told) from error
            raise ConfigError(f"the configuration cannot be composed: {_one_line(error)}") from error
    assert isinstance(values, dict)
    settings = typing.cast(dict[str, Any], values)
    for group, item in custom.items():
        # In full, so that the run can be resumed and evaluated from any folder.
        path, colon, attribute = item.partition("=")[2].partition(".py")
        settings[group] = {**settings[group], "name": f"{Path(path).resolve()}{colon}{attribute}"}
    given = tuple(map(_key, overrides))
    if "algo.agent.loss" in given and settings["algo"]["name"] == "torchrl":
        name = settings["algo"]["agent"]["loss"]
        raise ConfigError(f"algo.agent.loss={name} is one of the settings of a loss; write loss={name}, which has all.")
    if {"algo.env_steps_per_update", "algo.learner.num_minibatches"} <= set(given):
        raise ConfigError("algo.env_steps_per_update sets algo.learner.num_minibatches; give one of them, not both.")
    config = dataclasses.replace(from_dict(settings), given=given)
    for name in ("algo.replay.alpha", "algo.replay.beta"):
        replay, field = config.algo.replay, name.rpartition(".")[2]
        is_other = name in given and getattr(replay, field) != getattr(ReplayConfig(), field)
        if replay is not None and not replay.prioritised and is_other and config.resume is None:
            raise ConfigError(f"{name} is of prioritised replay; add algo.replay.prioritised=true, or leave it out.")
    if config.algo.name == "torchrl" and (told := without_effect(config.algo.agent, given)):
        raise ConfigError(told)
    return config


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """A checked config from nested dicts, e.g. of a config.yaml.

    Raises:
      ConfigError: for a value of the wrong type or out of range.
    """
    if isinstance(members := values.get("members"), Mapping):  # policies.tagger.clip may come as three levels
        values = {**values, "members": dict(_leaves(members))}
    config = build(TrainConfig, values, "")
    for name in _AT_LEAST_1:
        value = functools.reduce(lambda part, key: getattr(part, key, None), name.split("."), config)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    for name, seed in (("seed", config.seed), ("evaluation.seed", config.evaluation_seed)):
        if not 0 <= seed < 2**63:
            raise ConfigError(f"{name}={seed} must be an integer from 0 to 2^63 - 1.")
    if config.seed + config.population > 2**63:  # a member's seed is that of its run folder
        raise ConfigError(
            f"seed={config.seed} must be at most 2^63 - {config.population}: each of population={config.population} "
            "members has a seed that is one more than the last."
        )
    if config.total_env_steps > 2**53:
        raise ConfigError(f"total_env_steps={config.total_env_steps} must be at most 2^53.")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"device={config.device} is not known; use cpu, cuda or cuda:INDEX.")
    if config.run_dir == "":
        raise ConfigError("run_dir is empty; name a folder, or leave it out.")
    if not config.checkpoint.interval_s >= 0:
        raise ConfigError(f"checkpoint.interval_s={config.checkpoint.interval_s} must be at least 0.")
    if config.loop.name not in ("anakin", "sebulba"):
        raise ConfigError(f"loop={config.loop.name} is not known; use loop=anakin or loop=sebulba.")
    if config.logger.phases and config.loop.name == "sebulba":
        raise ConfigError("logger.phases=true is for loop=anakin; leave it out.")
    if config.loop.num_actor_threads < 0 or (config.loop.lag != "free" and config.loop.lag < 0):
        raise ConfigError("loop.num_actor_threads and loop.lag must be at least 0 (or loop.lag=free).")
    if not config.loop.timeout_s > 0:
        raise ConfigError(f"loop.timeout_s={config.loop.timeout_s} must be more than 0.")
    for name, column in config.members.items():
        if len(column) != config.population:
            raise ConfigError(
                f"members.{name}={list(column)} must be a list of population={config.population} numbers."
            )
    check_bounds(config.algo, config.members, algos.MAKERS.get(config.algo.name, (None, None))[1])
    config = _paced(config)
    _check_minibatches(config)
    return config


def _paced(config: TrainConfig) -> TrainConfig:
    """With as many updates per iteration as `algo.env_steps_per_update` asks for."""
    wanted, steps = config.algo.env_steps_per_update, config.num_envs * config.algo.unroll_length
    if wanted is None:
        return config
    if config.algo.replay is None:
        raise ConfigError(
            f"algo.env_steps_per_update={wanted:g} is for agents with replay, and {config.algo.name} learns from each "
            "unroll once; leave it out."
        )
    if not wanted > 0:
        raise ConfigError(f"algo.env_steps_per_update={wanted:g} must be above 0.")
    updates = max(1, round(steps / wanted))
    if not math.isclose(wanted * updates, steps, rel_tol=1e-5):
        example = f"algo.env_steps_per_update={steps / updates:g}"
        raise ConfigError(
            f"algo.env_steps_per_update={wanted:g} makes no whole number of updates of num_envs={config.num_envs} x "
            f"algo.unroll_length={config.algo.unroll_length} steps per iteration; use e.g. {example}."
        )
    learner = dataclasses.replace(config.algo.learner, num_minibatches=updates)
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, learner=learner))


def _check_minibatches(config: TrainConfig) -> None:
    """What can be known before the agent is: a recurrent one, or ranks, ask the learner for more."""
    wanted, num_envs, length = config.algo.learner.num_minibatches, config.num_envs, config.algo.unroll_length
    if config.algo.replay is not None:  # rows are drawn, so many for each
        return
    if num_envs % wanted and length % wanted:
        example = next(n for n in range(min(wanted, num_envs), 0, -1) if num_envs % n == 0)
        raise ConfigError(
            f"algo.learner.num_minibatches={wanted} divides neither num_envs={num_envs} nor "
            f"algo.unroll_length={length}; use a number that divides one of them, e.g. "
            f"algo.learner.num_minibatches={example}."
        )


def check_bounds(algo: AlgoConfig, members: Mapping[str, Any], agent: type | None) -> None:
    """Refuses hyperparameters outside the bounds that the settings of their agent declare, if it is known yet."""
    bounds = {} if agent is None else bounds_of(agent)
    check_ranges(algo.agent, bounds, "algo.agent.")
    bounds = {"learning_rate": bounds_of(LearnerConfig)["learning_rate"]} | bounds
    check_ranges(members, bounds, "members.")
    _check_schedules(algo.learner.schedules or {}, bounds)


def check_ranges(values: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]], prefix: str) -> None:
    """Refuses numbers that settings of their names, those of policies too, cannot have."""
    for name in [name for name in values if name.rpartition(".")[2] in bounds]:
        value, (low, high) = values[name], bounds[name.rpartition(".")[2]]
        given = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else [value]
        numbers = [x for x in given if isinstance(x, int | float)]  # others are refused for what they are
        if not all(low <= number <= high for number in numbers):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{prefix}{name}={shown} must lie from {low:g} to {high:g}.")


def _check_schedules(
    schedules: Mapping[str, Sequence[Sequence[float]]], bounds: Mapping[str, tuple[float, float]]
) -> None:
    for name, points in schedules.items():
        where = f"algo.learner.schedules.{name}={[list(point) for point in points]}"
        if not points or any(len(point) != 2 for point in points):
            raise ConfigError(f"{where} must be points [environment steps, value], e.g. [[0,0.5],[5e7,0.05]].")
        steps = [step for step, _ in points]
        if not all(map(math.isfinite, itertools.chain(*points))) or sorted(set(steps)) != steps:
            raise ConfigError(f"{where} must be finite numbers, with steps that grow from point to point.")
        kind = "learning_rate" if name.startswith("learning_rate") else name.rpartition(".")[2]
        low, high = bounds.get(kind, (-math.inf, math.inf))
        if not all(low <= value <= high for _, value in points):
            raise ConfigError(f"{where} must have values from {low:g} to {high:g}.")


def choices(group: str) -> list[str]:
    """Names in a config group: what `GROUP=NAME` accepts."""
    folder = Path(configs.__path__[0]) / group
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "custom" and path.stem[0] != "_")


@functools.cache
def _tree_of(groups: tuple[str, ...]) -> Any:
    """The settings of these choices, nested."""
    return OmegaConf.to_container(compose("train", list(groups)))


@functools.cache
def _keys_of(groups: tuple[str, ...]) -> Sequence[str]:
    """All settings of these choices."""
    return _keys(_tree_of(groups))


@functools.cache
def _register() -> None:
    store = ConfigStore.instance()
    agents = {f"{name}_defaults": (name, config()) for name, (_, config) in algos.MAKERS.items()}
    for choice, (name, agent) in (agents | {"custom": ("custom", None)}).items():
        node = {
            "name": name,
            "unroll_length": 128,
            "agent": dataclasses.asdict(agent) if agent is not None else {},
            "learner": dataclasses.asdict(LearnerConfig()),
        }
        if agent is None or name in algos.REPLAYED:
            node |= {"replay": dataclasses.asdict(ReplayConfig()), "env_steps_per_update": None}
        store.store(group="algo", name=choice, node=plain(node))
    store.store(group="env", name="custom", node={"name": "custom"})


def _with_groups(overrides: Sequence[str]) -> list[str]:
    """With loop, agent and environment of the run that is resumed, so that their settings are known."""
    given = {_key(item): item.partition("=")[2] for item in overrides}
    path = Path(given.get("resume", "").strip("'\""), "config.yaml")
    if "resume" not in given or "experiment" in given or not path.is_file():
        return list(overrides)
    try:
        settings = yaml.safe_load(path.read_text())
        names = {group: settings[group]["name"] for group in ("loop", "algo", "env")}
        if names["algo"] == "torchrl" and "algo" not in given:
            names["loss"] = settings["algo"]["agent"]["loss"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return list(overrides)  # it is refused later, with the reason
    mine = [f"{group}={name}" for group, name in names.items() if group not in given]
    return [item for item in mine if _names_file(item) or _known(item)] + list(overrides)


def _with_experiment(overrides: Sequence[str]) -> list[str]:
    """With `experiment=path/to/my.yaml` as a choice that Hydra knows, and classes of the user's that it names."""
    _register()
    given, found = {_key(item) for item in overrides}, []
    for item in overrides:
        key, _, value = item.partition("=")
        path = Path(value.strip("'\""))
        if key == "experiment" and path.suffix in (".yaml", ".yml"):
            name, classes = _register_experiment(path)
            found += [f"experiment={name}", *(own for own in classes if _key(own) not in given)]
        else:
            found.append(item)
    return found


def _register_experiment(path: Path) -> tuple[str, list[str]]:
    """The choice that an experiment's file becomes, and overrides for the files that it names, beside it."""
    tree = _read_experiment(path)
    defaults, classes = [], []
    for entry in tree.pop("defaults", None) or []:
        key, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
        group = str(key).removeprefix("override /")
        if key != f"override /{group}" or group not in GROUPS or group == "experiment":
            raise ConfigError(f"experiment={path}: defaults has {entry}; write a choice as - override /algo: ppo.")
        if _names_file(f"{group}={value}"):
            classes.append(f"{group}={path.resolve().parent / str(value)}")
        elif _known(f"{group}={value}"):
            defaults.append(entry)
        else:
            raise ConfigError(f"experiment={path}: {_unknown(group, str(value))}")
    node = {"defaults": defaults, "experiment_name": path.stem, **tree}
    # A name for each content, so that what is cached of a choice stays true.
    name = _OWN + hashlib.sha256(json.dumps(node, default=str).encode()).hexdigest()[:12]
    ConfigStore.instance().store(group="experiment", name=name, node=node, package="_global_")
    return name, classes


def _read_experiment(path: Path) -> dict[str, Any]:
    """The settings in an experiment's file, of names that there are."""
    where = f"experiment={path}"
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: there is no such file; give path/to/my.yaml.") from error
    except (OSError, UnicodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        repair = "write it as docs/experiments.md says"
        raise ConfigError(f"{where} cannot be read ({_one_line(error)}); {repair}.") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{where} holds no settings; write names and values, e.g. num_envs: 64.")
    if not isinstance(tree.get("defaults", []), list | None):
        raise ConfigError(f"{where}: defaults is no list; write choices as - override /algo: ppo.")
    names = {field.name for field in dataclasses.fields(TrainConfig)} - {"given"}
    for name, value in tree.items():
        if name not in names | {"defaults"}:
            raise ConfigError(f"{where}: {name} is no setting; {nearest(str(name), names)}")
        if name in GROUPS and not isinstance(value, dict):
            told = f"write it below defaults as - override /{name}: {value}."
            raise ConfigError(f"{where}: {name} is chosen among defaults; {told}")
    return typing.cast(dict[str, Any], tree)


def _in_place(overrides: Sequence[str]) -> Iterator[str]:
    """A mapping that is given takes the place of an experiment's, with which Hydra would merge it."""
    for item in overrides:
        name, _, value = item.partition("=")
        if name in _MAPPINGS and value.startswith("{"):
            yield f"{name}=null"
        yield item


def _expanded(override: str) -> list[str]:
    """The overrides that the file of `+autoscale=FILE` stands for; any other is itself."""
    if _key(override) != "autoscale":
        return [override]
    path = Path(override.partition("=")[2])
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{override} cannot be read ({_one_line(error)}); torchpod autoscale writes it.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{override}: the file holds no settings; torchpod autoscale writes it.")
    return [f"{name}={json.dumps(value)}" for name, value in _leaves(tree)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values that are no mappings, by their dotted names."""
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]


def _names_file(override: str) -> bool:
    """`env=path/to/my_env.py:MyEnv` is no choice of a group but names a file of the user's; so does `algo=`."""
    key, _, value = override.partition("=")
    return key in ("algo", "env") and (".py:" in value or value.endswith(".py"))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _known(override: str) -> bool:
    value = override.partition("=")[2]
    return value in [*choices(_key(override)), "custom"] or value.startswith(_OWN)


def _unknown(group: str, value: str) -> str:
    """That there is no such choice, and which there are, in a sentence or two."""
    more = {
        "algo": " A class of your own is algo=path/to/file.py:Class.",
        "env": " A class of your own is env=path/to/file.py:Class.",
        "experiment": " A file of your own is experiment=path/to/my.yaml.",
        "loss": " `torchpod list losses` says which losses there are, and why not others.",
    }
    return f"{group}={value} is not known; {nearest(value, choices(group))}{more.get(group, '')}"


def _check_override(override: str, groups: tuple[str, ...]) -> None:
    key, base = _key(override), _keys_of(groups)
    if "=" not in override and not override.startswith("~"):
        raise ConfigError(f"{override} is no override; write KEY=VALUE, e.g. num_envs=1024.")
    if key in GROUPS:
        if not _known(override):
            value = override.partition("=")[2]
            if value == "null":
                example = f"{key}={choices(key)[0]}"
                raise ConfigError(
                    f"{override}: only loss and experiment may be null; leave it out, or name one: {example}."
                )
            if "," in value and (told := _misread(override)):
                raise ConfigError(told)
            if key == "loss" and value in UNSUPPORTED:
                raise ConfigError(unsupported(value))
            raise ConfigError(_unknown(key, value))
    elif key in ("algo.name", "env.name", "loop.name"):
        group, name = key.partition(".")[0], override.partition("=")[2].strip("'\"")
        raise ConfigError(f"{key} is set by {group}, with all settings that belong to it; write {group}={name}.")
    elif "algo.replay" not in base and (told := without_replay(_learner(groups), [key])):
        raise ConfigError(told)
    elif not override.startswith("+") and (key.startswith("members.") or re.match(r"members=\{.*:", override)):
        raise ConfigError(f"{key} is added by a plus sign; write '+{override}'.")
    elif key.removeprefix("loop.") in _SEBULBA and key not in base:
        raise ConfigError(f"{key} is a setting of the other loop; add loop=sebulba.")
    elif not override.startswith("+") and key not in base and _takes_more(key, base, groups):
        raise ConfigError(f"{key} is added by a plus sign; write '+{override}'.")
    elif not override.startswith("+") and key not in base:
        raise ConfigError(f"{key} is no setting; {nearest(key, base)}")


def without_replay(agent: str, given: Sequence[str]) -> str | None:
    """Which of the settings that were given are of replay, which this agent has not, in a sentence."""
    found = [key for key in given if f"{key}.".startswith(("algo.replay.", "algo.env_steps_per_update."))]
    return f"{found[0]} is a setting of agents with replay, and {agent} has none; leave it out." if found else None


def _learner(groups: tuple[str, ...]) -> str:
    """What learns, as it is written: algo=ppo, or loss=ClipPPOLoss."""
    algo = _tree_of(groups)["algo"]
    return f"loss={algo['agent']['loss']}" if algo["name"] == "torchrl" else f"algo={algo['name']}"


def _misread(override: str) -> str | None:
    """Why Hydra cannot take an override, in a sentence: it is several, or none."""
    key, _, value = override.partition("=")
    text = '"' + value.strip("'\"").replace('"', '\\"') + '"'
    quoted = f"{key}={shlex.quote(text)}"
    try:
        if not OverridesParser.create().parse_override(override).is_sweep_override():
            return None
    except HydraException:
        if value[:1] in ("[", "{"):
            return f"{override} cannot be read; write a list as {key}=[1,2], names and values as {key}={{a:1,b:2}}."
        return f"{override} cannot be read; quote a text twice, for the shell and for torchpod: {quoted}."
    one = "" if "(" in value or key in GROUPS else f"write {key}=[{value}] for a list, {quoted} for a text, or "
    return (
        f"{override} is several values, and a command trains one run; {one}train a run with each by torchpod train "
        "--multirun, or a population, whose members differ in their seeds and in '+members.NAME=[VALUE,VALUE]'."
    )


def _takes_more(key: str, base: Sequence[str], groups: tuple[str, ...]) -> bool:
    """Whether the environment or agent that it belongs to is of the user's, or has options that are the library's."""
    if key.startswith("algo.agent.arguments."):
        return "algo.agent.arguments" in base
    if key.startswith("algo.agent."):
        return _tree_of(groups)["algo"]["name"] == "custom"
    more = "env.task" in base or _tree_of(groups)["env"]["name"] == "custom"
    return key == "env.transforms" or (key.startswith("env.") and more)


def _keys(tree: Any, prefix: str = "") -> list[str]:
    """Dotted names of all keys, inner ones too."""
    keys = []
    for name, value in tree.items():
        keys.append(prefix + str(name))
        if isinstance(value, dict):
            keys += _keys(value, f"{prefix}{name}.")
    return keys


def build(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass from a mapping, each value checked against the type of its field."""
    return cls(**typed(cls, values, prefix))


def typed(cls: Any, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Values as the fields of a dataclass want them, within their bounds."""
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in names:
            raise ConfigError(f"{prefix}{name} is no setting; {nearest(name, names)}")
    found = {name: _cast(hints[name], value, prefix + name) for name, value in values.items()}
    check_ranges(found, bounds_of(cls), prefix)
    return found


def _cast(hint: Any, value: Any, name: str) -> Any:
    """The value as a field of type `hint` wants it; raises if it cannot be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, name + ".")
    if origin in (types.UnionType, typing.Union):
        for option in arguments:
            if dataclasses.is_dataclass(option) and isinstance(value, Mapping):  # whose own error says which setting
                return _cast(option, value, name)
            try:
                return _cast(option, value, name)
            except ConfigError:
                continue
    elif origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_cast(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {str(k): _cast(arguments[1], v, f"{name}.{k}") for k, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is int and isinstance(value, float) and value.is_integer():  # 1e6
        return int(value)
    elif (hint in (int, bool, str) and type(value) is hint) or (origin is typing.Literal and value in arguments):
        return value
    elif hint is type(None) and value is None:
        return None
    repair = ""
    is_text = hint is str or (origin in (types.UnionType, typing.Union) and str in arguments)
    if is_text and isinstance(value, int | float) and "[" not in name:  # YAML's idea of a text
        text = json.dumps(value) if isinstance(value, bool) else value
        repair = f"; write {name}='\"{text}\"' for a text"
    raise ConfigError(f"{name}={value!r}: expected {_expected(hint)}{repair}.")


def _expected(hint: Any) -> str:
    """What a value of this type looks like, in words."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_expected, arguments))
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {_expected(arguments[0])}"
    if origin is dict:
        return f"names, each with {_expected(arguments[1])}"
    return names.get(hint, "names and values")


def plain(value: Any) -> Any:
    """Tuples to lists, all the way down: what YAML and JSON can hold."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
