"""The configuration of a command: Hydra composes configs/train.yaml, experiments and overrides; config.py checks it.

What Hydra would refuse in many lines, or take for something else, is told in a sentence before it is asked.
"""

import dataclasses
import functools
import hashlib
import json
import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
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
from torchpod.config import ConfigError, TrainConfig, from_dict, leaves, plain, typed
from torchpod.hints import nearest
from torchpod.interop.unfit import UNSUPPORTED, unsupported
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.sebulba import SebulbaConfig

GROUPS = ("algo", "env", "loop", "logger", "loss", "experiment")
_OWN = "_own_"
"""Before the digest of an experiment's file, in the choice that it becomes."""
MAPPINGS = (
    "algo.agent.policies",
    "algo.learner.schedules",
    "algo.learner.learning_rate",
    "algo.learner.max_grad_norm",
)
"""Settings that are names and values of one's own, and given as a whole."""
_SEBULBA = tuple(f.name for f in dataclasses.fields(SebulbaConfig))


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
    settings = _composed(_with_experiment(_with_groups(overrides)))
    given = tuple(map(_key, overrides))
    if "algo.agent.loss" in given and settings["algo"]["name"] == "torchrl":
        name = settings["algo"]["agent"]["loss"]
        raise ConfigError(f"algo.agent.loss={name} is one of the settings of a loss; write loss={name}, which has all.")
    if {"algo.env_steps_per_update", "algo.learner.num_minibatches"} <= set(given):
        raise ConfigError("algo.env_steps_per_update sets algo.learner.num_minibatches; give one of them, not both.")
    try:
        config = dataclasses.replace(from_dict(settings), given=given)
        if config.algo.name in algos.MAKERS:
            typed(algos.MAKERS[config.algo.name][1], config.algo.agent, "algo.agent.")
        _check_effects(config)
    except ConfigError as error:
        file = next((_file(item) for item in overrides if _names_experiment(item)), None)
        setting = re.split(r"[ =\[]", str(error), maxsplit=1)[0]
        if file is not None and setting in _keys(_read_experiment(file)) and not any(x in str(error) for x in given):
            raise ConfigError(f"experiment={file}: {error}") from error
        raise
    return config


def changed_env(env: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of an environment with others: `env.NAME=VALUE`, or all of another environment, `env=NAME`.

    Raises:
      ConfigError: for what is no setting of an environment, or cannot be read. Whether there is such a setting, the
        environment says when it is made.
    """
    values = {}
    for item in (given.lstrip("+") for given in overrides):
        key, equals, value = item.partition("=")
        if key == "env.name" and equals:
            raise ConfigError(f"env.name is set by env, with all settings that belong to it; write env={value}.")
        if not equals or not re.fullmatch(r"env(\.\w+)*", key):
            raise ConfigError(f"{item} is no setting of the environment alone; write env.NAME=VALUE, or env=ANOTHER.")
        try:
            parsed = OverridesParser.create().parse_override(item)
        except HydraException as error:
            raise ConfigError(_misread(item)) from error
        if parsed.is_sweep_override():
            told = "an evaluation is in one environment"
            raise ConfigError(f"{item} is several values, and {told}; write {key}=[{value}] for a list.")
        values[key] = item, parsed.value()
    if "env" in values:
        return load([item if key == "env" else f"++{item}" for key, (item, _) in values.items()]).env
    try:
        settings = OmegaConf.create({"env": dict(env)})
        for key, (_, value) in values.items():
            OmegaConf.update(settings, key, value, force_add=True)
        return typing.cast(dict[str, Any], OmegaConf.to_container(settings, resolve=True))["env"]
    except OmegaConfBaseException as error:
        told = " ".join(item for item, _ in values.values())
        raise ConfigError(f"the environment cannot be changed by {told}: {_one_line(error)}") from error


def _composed(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings, nested, as Hydra composes them."""
    named = {_key(item): item for item in overrides}
    if "loss" in named and named.get("algo", "algo=torchrl") != "algo=torchrl":
        raise ConfigError(f"{named['loss']} is of algo=torchrl; leave {named['algo']} out, or the loss.")
    choosing = [f"{_key(item)}=custom" if _names_file(item) else item for item in overrides]
    others = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        values = _values(choosing)
    finally:
        GlobalHydra.instance().hydra = others
    settings = typing.cast(dict[str, Any], values)
    for group, item in named.items():
        if _names_file(item):  # in full, so that the run can be resumed and evaluated from any folder
            path, colon, attribute = item.partition("=")[2].partition(".py")
            if not Path(path + colon).is_file():
                told = f"there is no file {path}{colon}; give {group}=path/to/file.py:Class with where it is"
                raise ConfigError(f"{item}: {told}.")
            settings[group] = {**settings[group], "name": f"{Path(path).resolve()}{colon}{attribute}"}
    if settings.get("init_from"):  # the same run, however it is named
        settings["init_from"] = str(Path(str(settings["init_from"])).resolve())
    return settings


def _values(choosing: Sequence[str]) -> Any:
    """What Hydra makes of the overrides, or a sentence of why it cannot."""
    with initialize_config_module("torchpod.configs", version_base="1.3"):
        groups = tuple(item for item in choosing if _key(item) in GROUPS and _known(item))
        for override in choosing:
            _check_override(override, groups)
        try:
            composed = compose("train", list(_in_place(choosing)))
            return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException) as error:
            if there := re.search(r"An item is already at '([^']*)'", str(error)):
                raise ConfigError(f"{there[1]} is there already; leave the plus sign out.") from error
            if told := next(filter(None, map(_misread, choosing)), None):
                raise ConfigError(told) from error
            raise ConfigError(f"the configuration cannot be composed: {_one_line(error)}") from error


def _check_effects(config: TrainConfig) -> None:
    """Refuses what was given and would have no effect."""
    for name in ("algo.replay.alpha", "algo.replay.beta"):
        replay, field = config.algo.replay, name.rpartition(".")[2]
        is_other = name in config.given and getattr(replay, field) != getattr(ReplayConfig(), field)
        if replay is not None and not replay.prioritised and is_other and config.resume is None:
            raise ConfigError(f"{name} is of prioritised replay; add algo.replay.prioritised=true, or leave it out.")
    if config.algo.name == "torchrl" and (told := without_effect(config.algo.agent, config.given)):
        raise ConfigError(told)


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
    mine = [item for item in mine if _names_file(item) or _known(item)]
    if "population" not in given and isinstance(settings.get("population"), int):  # which columns of members have
        mine.append(f"population={settings['population']}")
    return mine + list(overrides)


def _with_experiment(overrides: Sequence[str]) -> list[str]:
    """With `experiment=path/to/my.yaml` as a choice that Hydra knows, and classes of the user's that it names."""
    _register()
    given, found = {_key(item) for item in overrides}, []
    for item in overrides:
        if _names_experiment(item):
            name, classes = _register_experiment(_file(item))
            found += [f"experiment={name}", *(own for own in classes if _key(own) not in given)]
        else:
            found.append(item)
    return found


def _register_experiment(path: Path) -> tuple[str, list[str]]:
    """The choice that an experiment's file becomes, and overrides for the files that it names, beside it."""
    tree = _read_experiment(path)
    experiments, defaults, classes = [], [], []
    for entry in tree.pop("defaults", None) or []:
        key, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
        group = str(key).removeprefix("override /")
        if entry == "_self_" or entry in choices("experiment"):
            (defaults if entry == "_self_" else experiments).append(entry)
            continue
        if key != f"override /{group}" or group not in GROUPS or group == "experiment":
            told = "write a choice as - override /algo: ppo, or name an experiment of `torchpod list experiments`."
            raise ConfigError(f"experiment={path}: defaults has {entry}; {told}")
        if _names_file(f"{group}={value}"):
            classes.append(f"{group}={path.resolve().parent / str(value)}")
        elif _known(f"{group}={value}"):
            defaults.append(entry)
        else:
            raise ConfigError(f"experiment={path}: {_unknown(group, str(value))}")
    # Hydra wants overrides behind what they override.
    node = {"defaults": experiments + defaults, "experiment_name": path.stem, **tree}
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
        if name in MAPPINGS and value.startswith("{"):
            yield f"{name}=null"
        yield item


def _expanded(override: str) -> list[str]:
    """The overrides that the file of `+autoscale=FILE` stands for; any other is itself."""
    if _key(override) != "autoscale":
        return [override]
    path = _file(override)
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{override} cannot be read ({_one_line(error)}); torchpod autoscale writes it.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{override}: the file holds no settings; torchpod autoscale writes it.")
    return [f"{name}={json.dumps(value)}" for name, value in leaves(tree)]


def _names_file(override: str) -> bool:
    """`env=path/to/my_env.py:MyEnv` is no choice of a group but names a file of the user's; so does `algo=`."""
    key, _, value = override.partition("=")
    return key in ("algo", "env") and (".py:" in value or value.endswith(".py"))


def _names_experiment(override: str) -> bool:
    """`experiment=path/to/my.yaml` is no choice either."""
    return _key(override) == "experiment" and _file(override).suffix in (".yaml", ".yml")


def _file(override: str) -> Path:
    return Path(override.partition("=")[2].strip("'\""))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _known(override: str) -> bool:
    value = override.partition("=")[2]
    return value in [*choices(_key(override)), "custom"] or value.startswith(_OWN)


def _unknown(group: str, value: str) -> str:
    """That there is no such choice, and which there are, in a sentence or two."""
    module, colon, attribute = value.partition(":")
    if colon and group in ("algo", "env"):
        example = f"{group}={module.replace('.', '/')}.py:{attribute}"
        return f"{group}={value} is not known; name the file of a class of your own: {example}."
    file = next((file for file in (f"{value}.yaml", f"{value}.yml") if Path(file).is_file()), None)
    if file is not None and group == "experiment":
        return f"{group}={value} is not known; there is a file here: experiment={file}."
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
