"""What a run is made of: frozen dataclasses, checked by `from_dict` against types, bounds and each other.

Every key, value and choice that does not exist is refused with the nearest names that do. compose.py makes them from
YAML and overrides.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchpod import algos
from torchpod.bounds import bounded, bounds_of
from torchpod.hints import nearest
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.sebulba import SebulbaConfig

OBJECT = "object:"
"""Before the class of an environment that was handed over as a Python object, in place of its name."""
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
    init_from: str | None = None
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


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """A checked config from nested dicts, e.g. of a config.yaml.

    Raises:
      ConfigError: for a value of the wrong type or out of range.
    """
    if isinstance(members := values.get("members"), Mapping):  # policies.tagger.clip may come as three levels
        values = {**values, "members": dict(leaves(members))}
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
    if config.init_from == "":
        raise ConfigError("init_from is empty; name a run folder, or leave it out.")
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


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values that are no mappings, by their dotted names."""
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]


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
