"""Exports the greedy policy of a run folder: a program of `torch.export` that needs no torchpod to run."""

import io
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from torchpod import checkpoint, random
from torchpod.commands.eval_run import restored
from torchpod.files import replacing
from torchpod.interop.policy import Greedy
from torchpod.makers import make_env
from torchpod.run.folder import read_config
from torchpod.specs import Box, SpecTree
from torchpod.types import Tree
from torchpod.watched import close_all

EXAMPLE_SIZE = 4  # 0 and 1 are constants to torch.export


def export_run(run_dir: Path, *, out: Path | None = None, member: int | None = None) -> str:
    """Writes the policy of the newest checkpoint; a line that says what it takes and returns.

    The program is `(observation [B, ...]) -> action [B] or [B, A]` for any B, on the CPU; with a recurrent state
    `(observation, first [B] bool, state [B, ...]) -> (action, state)`, which begins at zeros of the shape said. Actions
    of a Box are clipped to its bounds.

    Args:
      run_dir: the run folder.
      out: the file, .pt2; by default `policy.pt2` in the run folder.
      member: which one, of a population.

    Raises:
      CheckpointError: if the folder is no run, or its checkpoint is damaged or does not fit.
      ValueError: if the file has another suffix, the member is none, or the policy cannot be exported, or depends on
        more than these.
      OSError: if the file cannot be written.
    """
    out = run_dir / "policy.pt2" if out is None else out
    if out.suffix != ".pt2":
        raise ValueError(f"--out {out} must end in .pt2, which is what torch.export.load reads.")
    config = read_config(run_dir)
    if (config.population > 1) != (member is not None) or not 0 <= (member or 0) < config.population:
        raise ValueError(
            f"--member {member} is for a population, and {run_dir} is none; leave it out."
            if config.population == 1
            else f"{run_dir} is a population; choose one with --member, from 0 to {config.population - 1}."
        )
    folder = checkpoint.latest(run_dir)
    weights = checkpoint.load_weights(folder)
    env = make_env(config.env)
    try:
        agent, weights = restored(run_dir, config, env.spec, weights, folder)
        if member is not None:
            weights = {name: x[member] for name, x in weights.items()}
        _, timestep = env.init(random.split(random.key(0), EXAMPLE_SIZE))
    finally:
        close_all([env])
    policy = Greedy(agent, weights, env.spec.groups, env.spec.action).eval()
    observation = pytree.tree_map(torch.clone, timestep.observation)
    policy.check(observation)
    program, arguments = _exported(policy, observation)
    try:
        written = io.BytesIO()  # to a file that cannot be written, torch's writer ends the process
        torch.export.save(program, written)
        with replacing(out) as part:
            part.write_bytes(written.getvalue())
    except OSError as error:
        raise OSError(
            f"{out} cannot be written ({error.strerror or error}); name another file with --out FILE.pt2."
        ) from error
    takes = ", ".join(f"{name} {_described(value)}" for name, value in arguments.items())
    action = "action" + _bounds(env.spec.action)
    gives = f"({action}, state)" if policy.has_state else action
    return f"wrote {out}: ({takes}) -> {gives}, of checkpoint {folder.name}"


def _exported(policy: Greedy, observation: Tree) -> tuple[Any, dict[str, Tree]]:
    """The program, with a batch axis of any size, and examples of its arguments by name."""
    arguments: dict[str, Tree] = {"observation": observation}
    if policy.has_state:
        state = pytree.tree_map(torch.clone, policy.initial_state(EXAMPLE_SIZE))
        arguments |= {"first": torch.ones(EXAMPLE_SIZE, dtype=torch.bool), "state": state}
    batch = Dim("batch", min=1)
    shapes = tuple(pytree.tree_map(lambda x: {0: batch}, value) for value in arguments.values())
    try:
        with torch.no_grad():
            return torch.export.export(policy, tuple(arguments.values()), dynamic_shapes=shapes), arguments
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(
            f"the policy cannot be exported: {first}. An agent's act may not depend on the values of its tensors."
        ) from error


def _bounds(spec: SpecTree) -> str:
    """Of the floats that an action is, if they have some."""
    if isinstance(spec, dict):
        told = [name + bounds for name, inner in spec.items() if (bounds := _bounds(inner))]
        return f" with {', '.join(told)}" if told else ""
    bounded = isinstance(spec, Box) and (spec.low, spec.high) != (-float("inf"), float("inf"))
    return f" in [{spec.low:g}, {spec.high:g}]" if bounded else ""


def _described(value: Tree) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_described(x)}" for name, x in value.items()) + "}"
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(['B', *map(str, value.shape[1:])])}]"
