"""Weights of other runs, with which a new run may begin: those of a whole agent, or of single policies.

A policy is what the weights of a checkpoint name `policies.NAME.*`, and lies in a file of its own beside them. A run
that goes on reads none: its own checkpoint has all. Read checkpoint.py first.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from torchpod import checkpoint
from torchpod.agent import Agent
from torchpod.checkpoint import CheckpointError
from torchpod.distributed import Ranks
from torchpod.nets import RunningMoments
from torchpod.run.folder import read_config


def with_loaded_weights(make: Callable[[], Agent], init_from: str | None, ranks: Ranks) -> Callable[[], Agent]:
    """Makes agents that begin as `init_from`, and then as their `begins_as` says.

    They begin with parameters and running statistics, and with buffers that were drawn at random. Hyperparameters and
    other numbers, such as coefficients that a loss adapts, are as made; what else follows from settings, such as the
    values of a categorical return, must be the same.

    Args:
      make: makes the agents.
      init_from: a run folder, for its newest checkpoint; a checkpoint of it; or its file of weights. None: as made.
      ranks: all of them must call this together; they begin as the same, also if the other run goes on meanwhile.

    Raises:
      CheckpointError: if there is no such run or policy, or it does not fit.
    """
    like = make()
    if init_from is None and not like.begins_as:
        return make
    files: dict[str, Path] = {}
    if ranks.rank == 0:
        files |= {} if init_from is None else {"": find_weights(init_from)}
        files |= {name: find(source, name) for name, source in like.begins_as.items()}
    files = ranks.same(files if ranks.rank == 0 else None)
    found = {name: (checkpoint.load_file(file), checkpoint.layers_of(file)) for name, file in files.items()}

    def begin() -> Agent:
        agent = make()
        for name, (weights, layers) in found.items():
            _put(agent, like, name, weights, layers, files[name])
        return agent

    begin()  # so that what does not fit is said here
    return begin


def find_weights(source: str) -> Path:
    """The file of all weights; see `with_loaded_weights`. Raises `CheckpointError` if there is none."""
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return path
    if not path.is_dir():
        problem = "holds no weights" if path.is_file() else "is no folder"
        raise CheckpointError(
            f"init_from={source} {problem}; give the folder of a run, a checkpoint of it, or its weights.safetensors."
        )
    if runs := sorted(file.parent for file in path.glob("*/config.yaml")):
        raise CheckpointError(f"init_from={source} is a folder of runs; name one of them, e.g. {runs[-1]}.")
    return (path if (path / "meta.json").is_file() else checkpoint.latest(path)) / "weights.safetensors"


def find(source: str, name: str) -> Path:
    """The file of a policy.

    Args:
      source: `RUN`, a folder, for its newest checkpoint; a checkpoint of it; or the file itself. A policy of another
        name is `RUN:NAME`.
      name: of the part of the agent that asks, which ends with the name of its policy.

    Raises:
      CheckpointError: if there is none.
    """
    path, _, other = source.rpartition(":")
    path, policy = (path, other) if path and other.isidentifier() else (source, name.rpartition(".")[2])
    folder = Path(path)
    if folder.suffix == ".safetensors" and folder.is_file():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{name}.from={source}: {folder} is no folder; give that of a run, or RUN:POLICY.")
    folder = folder if (folder / "meta.json").is_file() else checkpoint.latest(folder)
    known = checkpoint.policies_of(folder)
    if policy not in known:
        raise CheckpointError(
            f"{name}.from={source}: {folder} has no policy {policy}, but {', '.join(known) or 'none at all'}; give "
            "RUN:POLICY."
        )
    return known[policy]


def layers_of(agent: Agent) -> dict[str, dict[str, str]]:
    """The kinds of an agent's layers by name: what shapes of parameters do not say; under "", and for each policy."""
    policies = getattr(agent, "policies", None)
    own = {name: _layers(part) for name, part in policies.named_children()} if isinstance(policies, nn.Module) else {}
    return {"": _layers(agent), **own}


def _layers(part: nn.Module) -> dict[str, str]:
    found, of_torchrl = {}, ()
    for path, module in part.named_modules():
        prefix = f"{path}.".lstrip(".")
        if nets := getattr(module, "torchrl_networks", None):  # these are no modules of their agent
            of_torchrl = (*of_torchrl, prefix)
            layers = [
                (start + name, layer) for start, net in nets.items() for name, layer in net.named_modules() if name
            ]
            found |= {prefix + name: type(layer).__name__ for name, layer in layers}
        elif path and not isinstance(module, Agent) and not path.startswith(of_torchrl):
            found[path] = type(module).__name__
    return found


def _is_statistic(part: nn.Module, key: str) -> bool:
    return isinstance(part.get_submodule(key.rpartition(".")[0]), RunningMoments)


def _learned_in(file: Path) -> str:
    """By which algorithm and in which environment, if the run's folder says so."""
    if file.parent.parent.name != "checkpoints":
        return ""
    try:
        config = read_config(file.parents[2])
    except CheckpointError:
        return ""
    return f" (that run has algo={config.algo.name} env={config.env['name']})"


def _put(agent: Agent, like: Agent, name: str, theirs: dict[str, Tensor], layers: dict[str, str], file: Path) -> None:
    """Puts weights into a part of an agent; what it shares with `like`, made as it was, follows from settings."""
    part, told = agent.get_submodule(name), f"{name or 'the agent'} cannot begin as {file}"
    shared = dict(like.get_submodule(name).named_buffers())
    agents = {f"{path}.".lstrip(".") for path, own in part.named_modules() if isinstance(own, Agent)}
    numbers = {key for key, x in part.named_buffers() if x.ndim == 0 and not _is_statistic(part, key)}
    mine = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    mine = {key: x for key, x in mine.items() if key not in numbers}

    def is_number(key: str, x: Tensor) -> bool:
        """Not loaded: as `numbers`, also if it is one of another algorithm, of an agent itself."""
        return key in numbers or (key not in mine and x.ndim == 0 and key[: key.rfind(".") + 1] in agents)

    theirs = {key: x for key, x in theirs.items() if not is_number(key, x)}
    for key in sorted(mine.keys() | theirs.keys()):
        there, here = theirs.get(key), mine.get(key)
        if there is None or here is None or (there.shape, there.dtype) != (here.shape, here.dtype):
            alike = "the same agents" if name else "an environment of the same shapes"
            alike = f"the same networks and {alike}"
            if there is not None and here is not None and there.shape[1:] == here.shape:
                alike = "one member of that population, RUN/members/0"
            raise CheckpointError(
                f"{told}: {key} is {checkpoint.describe(there)} there and {checkpoint.describe(here)} here; give it "
                f"{alike}{_learned_in(file)}."
            )
        settled = key in shared and torch.equal(here, shared[key]) and not _is_statistic(part, key)
        if settled and not torch.equal(here, there):
            raise CheckpointError(f"{told}: {key} follows from settings, and is another one there; give it the same.")
        with torch.no_grad():
            here.copy_(there)
    for key, kind in _layers(part).items() if layers else ():
        if layers.get(key) != kind:
            raise CheckpointError(
                f"{told}: {key} is {layers.get(key, 'missing')} there and {kind} here; give it the same networks, "
                "algo.agent.activation among their settings."
            )
