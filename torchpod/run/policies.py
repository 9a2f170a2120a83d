"""Policies of other runs, as which those of a new run may begin. Read checkpoint.py first.

A policy is what the weights of a checkpoint name `policies.NAME.*`, and lies in a file of its own beside them. A run
that goes on reads none: its own checkpoint has all.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from torchpod import checkpoint
from torchpod.agent import Agent
from torchpod.checkpoint import CheckpointError
from torchpod.distributed import Ranks


def with_loaded_policies(make: Callable[[], Agent], ranks: Ranks) -> Callable[[], Agent]:
    """Makes agents that begin as their `begins_as` says: with parameters and statistics, not with hyperparameters.

    Args:
      make: makes the agents.
      ranks: all of them must call this together; they begin as the same, also if the other run goes on meanwhile.

    Raises:
      CheckpointError: if there is no such policy, or it does not fit.
    """
    sources = make().begins_as
    if not sources:
        return make
    files = ranks.same({name: find(source, name) for name, source in sources.items()} if ranks.rank == 0 else None)
    found = {name: (checkpoint.load_policy(file), checkpoint.layers_of(file)) for name, file in files.items()}

    def begin() -> Agent:
        agent = make()
        for name, (policy, layers) in found.items():
            _put(agent, name, policy, layers, files[name])
        return agent

    begin()  # so that what does not fit is said here
    return begin


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
    """Of each policy of an agent, the kinds of its layers by name: what shapes of parameters do not say."""
    policies = getattr(agent, "policies", None)
    return {name: _layers(part) for name, part in policies.named_children()} if isinstance(policies, nn.Module) else {}


def _layers(part: nn.Module) -> dict[str, str]:
    nets: dict[str, nn.Module] = getattr(part, "torchrl_networks", {"": part})  # these are no modules of their agent
    layers = [(start + name, layer) for start, net in nets.items() for name, layer in net.named_modules() if name]
    return {name: type(layer).__name__ for name, layer in layers}


def _put(agent: Agent, name: str, policy: dict[str, Tensor], layers: dict[str, str], file: Path) -> None:
    part = agent.get_submodule(name)
    settings = part.hyperparameters if isinstance(part, Agent) else ()
    mine = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    mine = {key: x for key, x in mine.items() if key not in settings}
    # What else is one number of the policy itself is a hyperparameter of another algorithm.
    theirs = {k: x for k, x in policy.items() if k in mine or (k not in settings and (x.ndim > 0 or "." in k))}
    for key in sorted(mine.keys() | theirs.keys()):
        there, here = theirs.get(key), mine.get(key)
        if there is None or here is None or (there.shape, there.dtype) != (here.shape, here.dtype):
            raise CheckpointError(
                f"{name} cannot begin as {file}: {key} is {checkpoint.describe(there)} there and "
                f"{checkpoint.describe(here)} here; give it the same agents and networks, of a population "
                "RUN/members/0."
            )
        with torch.no_grad():
            here.copy_(there)
    for key, kind in _layers(part).items() if layers else ():
        if layers.get(key) != kind:
            raise CheckpointError(
                f"{name} cannot begin as {file}: {key} is {layers.get(key, 'missing')} there and {kind} here; give it "
                "the same networks, algo.agent.activation among their settings."
            )
