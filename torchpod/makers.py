"""Environments and agents from their configuration: the ones shipped by name, a user's own by file."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchpod import algos, envs
from torchpod.agent import Agent
from torchpod.config import OBJECT, AlgoConfig, ConfigError, TrainConfig, build, check_bounds, plain, typed
from torchpod.env import Env
from torchpod.envs.host import TorchRL
from torchpod.envs.transforms import TRANSFORMS
from torchpod.hints import nearest
from torchpod.specs import EnvSpec
from torchpod.watched import close_all, sentence


def make_env(config: Mapping[str, Any] | str) -> Env:
    """Builds an environment: `make_env("cartpole")`, `make_env({"name": "path/to/my_env.py:MyEnv", ...})`.

    `transforms`, a list, names what is put around it, the innermost first: see envs/transforms.py.
    """
    config = {"name": config} if isinstance(config, str) else dict(config)
    chain = config.pop("transforms", [])
    if not isinstance(chain, list | tuple):
        raise ConfigError(f"env.transforms={chain!r} is no list; use e.g. env.transforms=[frame_stack].")
    env = _make_bare(config)
    try:
        for i, entry in enumerate(chain):
            env = _transformed(env, entry, f"env.transforms[{i}]")
    except BaseException:
        close_all([env])
        raise
    if getattr(env, "advice", None) == "set env.processes=true" and "processes" not in config:
        typing.cast(Any, env).advice = "set +env.processes=true"
    return env


def _transformed(env: Env, entry: Any, where: str) -> Env:
    """The environment in a transform: `frame_stack`, or `{name: frame_stack, num: 4}`."""
    if not isinstance(entry, str | Mapping):
        raise ConfigError(f"{where}={entry!r} is no transform; use a name, or {{name: frame_stack, num: 4}}.")
    entry = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = entry.pop("name", None)
    if name not in TRANSFORMS:
        raise ConfigError(f"{where}={name} is not known; {nearest(str(name), TRANSFORMS)}")
    parameters = dict(inspect.signature(TRANSFORMS[name]).parameters)
    del parameters["env"]
    for argument in entry:
        if argument not in parameters:
            raise ConfigError(f"{where}={name} takes no argument {argument}; {nearest(argument, parameters)}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in entry:
            raise ConfigError(f"{where}={name} needs {argument}, e.g. {{name: {name}, {argument}: 100}}.")
    try:
        return TRANSFORMS[name](env, **entry)
    except ValueError as error:
        raise ConfigError(f"{where}={name}: {error}") from error


def _make_bare(config: dict[str, Any]) -> Env:
    if config["name"].startswith(OBJECT):
        raise ConfigError(
            f"env={config['name']} was a Python object; hand it over again, in Python: train(env=..., resume=RUN), "
            "torchpod.load(RUN, env=...), or torchpod.commands.eval_run.eval_run(RUN, episodes=..., env=...); torchpod "
            "eval RUN also takes env=my_env.py:MyEnv."
        )
    arguments = {k: v for k, v in config.items() if k != "name"}
    maker = find(config["name"], envs.MAKERS, "env")
    parameters = inspect.signature(maker).parameters
    ours = {name for names in _WRAPPING.values() for name in names}
    wrapping = {k: arguments.pop(k) for k in [*arguments] if k in ours and k not in parameters}
    check_arguments(maker, arguments, f"env={config['name']}")
    try:
        env = maker(**arguments)
        host_maker = _HostMaker(str(Path(config["name"]).resolve()), arguments, maker)
        found = adapter_of(env)
        adapter = found[1] if found else ""
        unknown = [name for name in wrapping if name not in _WRAPPING.get(adapter, ())]
        match "" if unknown else adapter:
            case "PettingZoo":
                env.close()
                return envs.PettingZoo(host_maker, **wrapping)
            case "Gymnasium":
                env.close()
                return envs.Gymnasium(host_maker, **wrapping)
            case "Brax":
                env = envs.Brax(env)
            case "TorchRL":
                env.close(raise_if_closed=False)
                env = TorchRL(functools.partial(maker, **arguments))
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, ValueError | ImportError) and str(error) else sentence(error)
        own = {k: v for k, v in arguments.items() if k not in parameters or v != parameters[k].default}
        raise ConfigError(f"env={config['name']} cannot be made with {own}: {told}") from error
    if unknown and hasattr(env, "step"):  # what is no environment at all is told below
        close_all([env])
        kind = "gymnasium.Env" if unknown[0] in _WRAPPING["Gymnasium"] else "pettingzoo.ParallelEnv"
        raise ConfigError(f"env={config['name']} takes no argument {unknown[0]}; it is no {kind}.")
    require_env(env, f"env={config['name']} gives")
    return env


_WRAPPING = {"Gymnasium": ("processes", "info_keywords"), "PettingZoo": ("processes", "groups")}
"""By adapter, its own arguments beside those of a class of the user's."""
_LIBRARIES = (
    ("pettingzoo", "ParallelEnv", "PettingZoo"),
    ("pettingzoo", "AECEnv", "PettingZoo"),  # which refuses it
    ("gymnasium", "Env", "Gymnasium"),
    ("brax.envs", "Env", "Brax"),
    ("torchrl.envs", "EnvBase", "TorchRL"),
)
"""Modules of others, the class of their environments, and who adapts it in `torchpod.envs`."""


def adapter_of(env: Any) -> tuple[str, str] | None:
    """Of an environment of another library `("gymnasium.Env", "Gymnasium")`: what it is, and who adapts it."""
    for module, base, adapter in _LIBRARIES:
        if isinstance(env, getattr(sys.modules.get(module), base, ())):  # of what nobody has imported it cannot be
            return f"{module}.{base}", adapter
    return None


def require_env(env: Any, told: str) -> None:
    """Raises `ConfigError`, with a sentence that begins with `told`, for what is no environment."""
    if not (hasattr(env, "init") and hasattr(env, "step")):
        raise ConfigError(
            f"{told} {'None' if env is None else f'one {type(env).__name__}'}, which is no environment; it must be a "
            "TensorEnv (docs/write-an-environment.md) or another Env of torchpod's, a gymnasium.Env, a "
            "pettingzoo.ParallelEnv, a torchrl.envs.EnvBase or a brax Env."
        )


@dataclasses.dataclass(frozen=True)
class _HostMaker:
    """Makes an environment. A worker process, which has not imported the user's file, does so when it unpickles."""

    name: str
    arguments: dict[str, Any]
    maker: Callable[..., Any]

    def __call__(self) -> Any:
        return self.maker(**self.arguments)

    def __reduce__(self) -> Any:
        return _host_maker, (self.name, self.arguments)


def _host_maker(name: str, arguments: dict[str, Any]) -> _HostMaker:
    return _HostMaker(name, arguments, find(name, envs.MAKERS, "env"))


def make_agent(config: AlgoConfig, spec: EnvSpec, members: Mapping[str, Any] | None = None) -> Callable[[], Agent]:
    """A function that builds the agent of an algorithm for an environment; `members` is what a population varies."""
    agent_class, config_class = agent_classes(config.name)
    for field in dataclasses.fields(config_class):
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if not has_default and field.name not in config.agent:
            raise ConfigError(f"algo={config.name} needs a setting; add +algo.agent.{field.name}=VALUE.")
    check_bounds(config, members or {}, config_class)
    agent_config = build(config_class, config.agent, "algo.agent.")
    if getattr(agent_config, "policies", None):
        agent_config = dataclasses.replace(agent_config, policies=_checked(agent_config))

    def make(settings: Any = agent_config) -> Agent:
        try:
            return agent_class(spec, settings)
        except ValueError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"algo={config.name} cannot be made for {spec.name}: {sentence(error)} "
                "TORCHPOD_TRACEBACK=1 shows where."
            ) from error

    if members:
        _check_members(make, agent_config, members)
    return make


def _check_members(make: Callable[[Any], Agent], config: Any, members: Mapping[str, Any]) -> None:
    """Lets the constructor judge the numbers of each member, for it knows which do not go together; not of policies."""
    own = {name for name, _ in make(config).named_buffers()}
    vary = [name for name in members if name in own and isinstance(getattr(config, name, None), float)]
    for values in dict.fromkeys(zip(*(members[name] for name in vary), strict=True)):
        make(dataclasses.replace(config, **dict(zip(vary, values, strict=True))))


def _checked(config: Any) -> dict[str, Any]:
    """The policies of an agent's settings, each of their own settings as that of all must be."""
    found = dict(config.policies)
    for policy, given in found.items():
        if isinstance(given, Mapping):
            where, known = f"algo.agent.policies.{policy}.", {f.name for f in dataclasses.fields(config)} - {"policies"}
            if not isinstance(given.get("train", True), bool):
                raise ConfigError(f"{where}train={given['train']!r}: expected true or false.")
            own = typed(type(config), {name: value for name, value in given.items() if name in known}, where)
            found[policy] = {**given, **own}
    return found


def agent_classes(name: str) -> tuple[Callable[..., Agent], type]:
    """The class of an agent, and that of its settings: the dataclass which its second argument is annotated with."""
    found = find(name, algos.MAKERS, "algo")
    return found if isinstance(found, tuple) else (found, _config_class(found, name))


def _config_class(agent_class: Any, name: str) -> type:
    if not (inspect.isclass(agent_class) and issubclass(agent_class, Agent)):
        raise ConfigError(f"algo={name} is no subclass of torchpod.agent.Agent.")
    arguments = list(inspect.signature(agent_class).parameters)
    try:
        config_class = typing.get_type_hints(agent_class.__init__)[arguments[1]]
    except (IndexError, KeyError, NameError):
        config_class = None
    if not (inspect.isclass(config_class) and dataclasses.is_dataclass(config_class)):
        raise ConfigError(
            f"algo={name} takes {', '.join(arguments)}; its constructor must take the spec of the environment and "
            "settings, annotated with their dataclass: def __init__(self, spec: EnvSpec, config: MyConfig)."
        )
    return config_class


def with_defaults(config: TrainConfig) -> TrainConfig:
    """With the defaults of a user's agent and environment, so that their file may have others later on."""
    agent, env = config.algo.agent, config.env
    if config.algo.name not in algos.MAKERS:
        _, cls = agent_classes(config.algo.name)
        agent = {name: plain(x) for name, x in defaults_of_fields(cls).items() if _is_read_back(cls, name, x)} | agent
    if ":" in env["name"] and not env["name"].startswith(OBJECT):
        defaults = defaults_of_arguments(find(env["name"], envs.MAKERS, "env"))
        own = {name: x for name, x in defaults.items() if name != "transforms" and _is_plain(x)}  # those are ours
        env = {"name": env["name"]} | own | env
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, agent=agent), env=env)


def defaults_of_fields(cls: Any) -> dict[str, Any]:
    """Those that there are, of what a dataclass is made with."""
    found = {}
    for field in dataclasses.fields(cls):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and value is not dataclasses.MISSING:
            found[field.name] = value
    return found


def defaults_of_arguments(maker: Callable[..., Any]) -> dict[str, Any]:
    """Those that there are, of what may be given by name."""
    if inspect.isclass(maker) and type(maker) is not type:  # such as TorchRL's, whose metaclass takes anything
        maker = maker.__init__
    parameters = inspect.signature(maker).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY}


def _is_read_back(cls: type, name: str, value: Any) -> bool:
    """Whether the default of a field, as YAML holds it, becomes the same value again."""
    try:
        return _is_plain(plain(value)) and typed(cls, {name: plain(value)}, "")[name] == value
    except ConfigError:
        return False


def _is_plain(value: Any) -> bool:
    """Whether it is the same when it comes back from YAML."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(inner) for key, inner in value.items())
    return all(map(_is_plain, value)) if type(value) is list else type(value) in (type(None), bool, int, float, str)


def sources(config: TrainConfig) -> dict[str, list[str]]:
    """Paths and SHA-256 of the files that a user's agent and environment are in, as far as they are there, by group."""
    found = {}
    for group, name, makers in (("algo", config.algo.name, algos.MAKERS), ("env", config.env["name"], envs.MAKERS)):
        path = name.rpartition(":")[0]
        if name in makers or name.startswith(OBJECT) or not path:
            continue
        if not path.endswith(".py"):
            with contextlib.suppress(ImportError):  # of a package that is not there any more
                path = getattr(importlib.util.find_spec(path), "origin", None) or path
        if Path(path).is_file():
            found[group] = [path, _digest_of(path)]
    return found


def _digest_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


_modules: dict[tuple[str, str, str], ModuleType] = {}
"""What was imported of users' files, by group, path and digest."""


def find(name: str, makers: Mapping[str, Any], group: str) -> Any:
    """A maker by name, or a class of the user's by `path.py:Class`, or `module:Class` of what is installed."""
    if name in makers:
        return makers[name]
    if name.endswith(".py"):
        raise ConfigError(f"{group}={name}: name the class too, e.g. {name}:MyClass.")
    path, _, attribute = name.rpartition(":")
    if path and not path.endswith(".py") and importlib.util.find_spec(path.partition(".")[0]):
        try:
            return getattr(importlib.import_module(path), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{group}={name} cannot be imported: {error}") from error
    if not path.endswith(".py"):
        own = f"A class of your own is {group}=path/to/file.py:Class."
        raise ConfigError(f"{group}={name} is not known; {nearest(name, makers)} {own}")
    if not Path(path).is_file():
        raise ConfigError(
            f"{group}={name}: there is no file {path}; give PATH.py:{attribute} with where it is now; a command "
            "that takes a run reads it from the config.yaml there."
        )
    spec = importlib.util.spec_from_file_location(f"_torchpod_{group}_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    key = group, str(Path(path).resolve()), _digest_of(path)
    module = _modules.get(key) or importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dynamo and pickle look modules up by name
    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(folder)  # it may import what lies beside it
    try:
        if key not in _modules:
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{group}={name}: {path} cannot be imported: {sentence(error)} TORCHPOD_TRACEBACK=1 shows where."
        ) from error
    _modules[key] = module
    if not callable(getattr(module, attribute, None)):
        kinds = inspect.isclass if group == "algo" else callable
        public = [n for n, v in vars(module).items() if kinds(v) and v.__module__ == module.__name__ and n[0] != "_"]
        raise ConfigError(f"{group}={name}: {path} has no class {attribute}; {nearest(attribute, public)}")
    return getattr(module, attribute)


def check_arguments(maker: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> None:
    """Raises `ConfigError` if a maker does not take these, or needs others."""
    parameters = inspect.signature(maker).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in arguments:
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{what} takes no argument {name}; {nearest(name, parameters) if parameters else 'it takes none.'}"
            )
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if required and name not in arguments:
            raise ConfigError(f"{what} needs the argument {name}; add +env.{name}=VALUE.")
