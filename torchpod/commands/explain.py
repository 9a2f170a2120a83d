"""What `torchpod train --help` and `torchpod list` say of settings and choices: what is said where they are defined.

That is the text below a field of a dataclass, the `Args` of an environment's docstring, a comment in configs/, or the
first sentence of a file.
"""

import ast
import dataclasses
import inspect
import json
import math
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from torchpod import algos, configs, envs
from torchpod.agent import Agent
from torchpod.compose import choices
from torchpod.config import TrainConfig, plain, typed
from torchpod.makers import agent_classes, defaults_of_arguments, defaults_of_fields, find

_WIDTH = 120
_NEEDED = "???"
"""In the place of a default that there is not."""


def explained_settings(config: TrainConfig) -> str:
    """The settings as YAML, each with a comment that tells what it is, where something is said of it."""
    agent, agent_config = agent_classes(config.algo.name)
    env = find(config.env["name"], envs.MAKERS, "env")
    told = _comments(config) | _of_fields(TrainConfig, "") | _of_fields(agent_config, "algo.agent.")
    told |= _of_arguments(env) | {"algo.name": _summary(agent), "env.name": _summary(env)}
    settings = config.to_dict()
    typed(agent_config, config.algo.agent, "algo.agent.")  # refuses what training would
    if config.algo.name not in algos.MAKERS:  # whose settings are those that were given
        settings["algo"]["agent"] = _defaults_of_fields(agent_config) | settings["algo"]["agent"]
        if not getattr(agent, "replayed", 0):
            del settings["algo"]["replay"], settings["algo"]["env_steps_per_update"]
    if config.env["name"] not in envs.MAKERS:
        settings["env"] = {"name": config.env["name"]} | _defaults_of_arguments(env) | settings["env"]
    return "\n".join(_lines(settings, told, ""))


def explained_choices(group: str) -> str:
    """A line for each choice of a config group (algo, env, experiment): its name, and what it is in a sentence."""
    names = choices(group)
    makers = {"algo": {name: maker for name, (maker, _) in algos.MAKERS.items()}, "env": envs.MAKERS}.get(group, {})
    told = {name: _summary(makers[name]) if makers else _head(group, name) for name in names}
    width = max(map(len, names))
    return "\n".join(
        f"{name:{width}}  {textwrap.shorten(sentence, _WIDTH, placeholder=' ...')}" for name, sentence in told.items()
    )


def _summary(maker: Any) -> str:
    """The first sentence of the file that defines it, or of its own where the file has several agents."""
    own = inspect.cleandoc(maker.__doc__ or "")  # not that of what it is derived from
    file = inspect.getdoc(inspect.getmodule(maker)) or ""
    is_agent = inspect.isclass(maker) and issubclass(maker, Agent)
    return _sentence(own if is_agent and own and not own.startswith("See the module") else file or own)


def _head(group: str, name: str) -> str:
    """The first sentence of the comment at the head of a file in configs/."""
    lines = Path(configs.__path__[0], group, f"{name}.yaml").read_text().splitlines()
    return _sentence(" ".join(line[2:] for line in lines if line.startswith("# ") and "@package" not in line))


def _sentence(text: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[.!?])(?<!et al\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def _lines(settings: Mapping[str, Any], told: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in settings.items():
        is_group = isinstance(value, Mapping) and value and prefix.count(".") < 2  # deeper ones are values
        shown = indent + (f"{name}:" if is_group else _shown(name, value))
        comment = told.get(prefix + name, "")
        comment = f"To be given. {comment}".rstrip() if str(value) == _NEEDED else comment
        if len(line := f"{shown}  # {comment}") <= _WIDTH:
            yield line if comment else shown
        else:
            yield from textwrap.wrap(comment, _WIDTH, initial_indent=indent + "# ", subsequent_indent=indent + "# ")
            yield shown
        if is_group:
            yield from _lines(value, told, f"{prefix}{name}.")


def _shown(name: str, value: Any) -> str:
    if value == _NEEDED:
        return f"{name}: {_NEEDED}"
    if isinstance(value, str) and "\n" in value:
        return f"{name}: {json.dumps(value)}"
    try:
        return yaml.safe_dump({name: value}, default_flow_style=True, width=math.inf, allow_unicode=True).strip()[1:-1]
    except yaml.YAMLError:  # a default of the user's that no override could give
        return f"{name}: {value!r}"


def _defaults_of_fields(cls: Any) -> dict[str, Any]:
    return plain(dict.fromkeys((f.name for f in dataclasses.fields(cls) if f.init), _NEEDED) | defaults_of_fields(cls))


def _defaults_of_arguments(maker: Any) -> dict[str, Any]:
    parameters = inspect.signature(maker).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return plain(dict.fromkeys(named, _NEEDED) | defaults_of_arguments(maker))


def _of_fields(cls: type, prefix: str) -> dict[str, str]:
    """What stands below the fields of a dataclass, and of the dataclasses in it, by their dotted names."""
    told = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            told |= {prefix + name: text for name, text in _below_fields(base)}
    for name, hint in typing.get_type_hints(cls).items():
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                told |= _of_fields(inner, f"{prefix}{name}.")
    return told


def _below_fields(cls: type) -> Iterator[tuple[str, str]]:
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # made by a program: nothing is written anywhere
        return
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())


def _of_arguments(maker: Any) -> dict[str, str]:
    """The arguments of an environment, as its docstring or that of its constructor explains them below `Args:`."""
    told = {}
    for text in (inspect.getdoc(maker), inspect.getdoc(getattr(maker, "__init__", None))):
        section = re.search(r"^Args:\n((?:(?: .*)?\n?)*)", text or "", re.MULTILINE)
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(section[1])) if section else ():
            names, _, words = entry.partition(":")
            told |= {f"env.{name.strip()}": " ".join(words.split()) for name in names.split(",")}
    return told


def _comments(config: TrainConfig) -> dict[str, str]:
    """The comments behind settings in the files that the run is composed of."""
    chosen = {"algo": config.algo.name, "env": config.env["name"], "loop": config.loop.name, "logger": "default"}
    told = _comments_of("train", "")
    for group, name in chosen.items():
        told |= _comments_of(f"{group}/{name}", f"{group}.")
    return told


def _comments_of(name: str, prefix: str) -> dict[str, str]:
    path = Path(configs.__path__[0], f"{name}.yaml")
    told, keys = {}, []
    for line in path.read_text().splitlines() if path.is_file() else ():
        if found := re.match(r"( *)(\w+):([^#]*)(?:# (.*))?$", line):
            indent, key, _, comment = found.groups()
            keys = [*keys[: len(indent) // 2], key]
            if comment:
                told[prefix + ".".join(keys)] = comment
    return told
