"""Checkpoints: everything a run is, written atomically, checked when loaded.

`RUN/checkpoints/<iteration>/` holds `weights.safetensors` (parameters and buffers of the agent), `state-<rank>.pt`
(everything else, tensors only, loaded with `weights_only=True`) and `meta.json` (format, shapes, sizes and digests).
A checkpoint is written into a hidden folder and renamed: it is there whole, or not at all.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.distributed import Ranks
from torchpod.types import Tree

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message says which file, and why."""


def save(
    run_dir: Path, iteration: int, weights: dict[str, Tensor], state: Tree, meta: dict[str, Any], *, ranks: Ranks, keep: int
) -> Path:
    """Writes a checkpoint and removes old ones.

    Args:
      run_dir: the run's folder.
      iteration: names the checkpoint.
      weights: written once, by rank 0.
      state: any tree of tensors; every rank writes its own.
      meta: JSON, kept beside the state.
      ranks: all of them must call this together.
      keep: how many of the newest checkpoints stay.

    Returns:
      The folder.

    Raises:
      OSError: if the disk is full or not writable; older checkpoints are untouched.
    """
    final = run_dir / "checkpoints" / f"{iteration:010d}"
    partial = final.with_name(f".partial-{final.name}")
    partial.mkdir(parents=True, exist_ok=True)
    _write(partial / f"state-{ranks.rank}.pt", _flatten(state))
    _barrier(ranks)
    if ranks.rank == 0:
        _write_bytes(partial / "weights.safetensors", safetensors.torch.save(_portable(weights)))
        files = {p.name: _digest(p) for p in sorted(partial.iterdir()) if p.name != "meta.json"}
        meta = {"format": FORMAT, "iteration": iteration, "world_size": ranks.world_size, "files": files, **meta}
        _write_bytes(partial / "meta.json", json.dumps(meta, indent=1).encode())
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync_folder(final.parent)
        for old in all_of(run_dir)[:-keep]:
            shutil.rmtree(old)
    _barrier(ranks)
    return final


def load(folder: Path, like: Tree, *, ranks: Ranks) -> tuple[dict[str, Tensor], Tree, dict[str, Any]]:
    """Reads a checkpoint that `save` wrote.

    Args:
      folder: of one checkpoint.
      like: a tree of the same structure, shapes and dtypes as the state; values are ignored, devices kept.
      ranks: whose state to read.

    Returns:
      Weights, state, meta.

    Raises:
      CheckpointError: if a file is missing, truncated or foreign, of another format, or does not fit `like`.
    """
    meta = read_meta(folder)
    if meta["world_size"] != ranks.world_size:
        raise CheckpointError(
            f"{folder} was written by {meta['world_size']} rank(s), this run has {ranks.world_size}; start as many."
        )
    for name, digest in meta["files"].items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is missing or damaged; resume from another folder in {folder.parent}.")
    try:
        weights = safetensors.torch.load_file(folder / "weights.safetensors")
        flat = torch.load(folder / f"state-{ranks.rank}.pt", map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{folder} cannot be read: {str(error).splitlines()[0]}.") from error
    wanted = _flatten(like)
    for name in sorted(set(wanted) | set(flat)):
        got, want = flat.get(name), wanted.get(name)
        if got is None or want is None or got.shape != want.shape or got.dtype != want.dtype:
            raise CheckpointError(
                f"{folder} does not fit this run: {name} is {_describe(got)} there and {_describe(want)} here; "
                "resume with the settings that it was written with."
            )
    leaves = [flat[name].to(want.device) for name, want in wanted.items()]
    return weights, pytree.tree_unflatten(leaves, pytree.tree_structure(like)), meta


def latest(run_dir: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
      CheckpointError: if there is none.
    """
    found = all_of(run_dir)
    if not found:
        raise CheckpointError(f"{run_dir} holds no checkpoint; give a folder that torchpod train has written.")
    return found[-1]


def all_of(run_dir: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    return sorted(p for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def read_meta(folder: Path) -> dict[str, Any]:
    """What is known about a checkpoint without loading it; raises `CheckpointError` if it is none of ours."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: meta.json is missing or damaged.") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise CheckpointError(f"{folder} has checkpoint format {found}, this version reads {FORMAT}.")
    return meta


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers alone, e.g. for evaluation; raises `CheckpointError`."""
    meta, path = read_meta(folder), folder / "weights.safetensors"
    if not path.is_file() or _digest(path) != meta["files"].get(path.name):
        raise CheckpointError(f"{path} is missing or damaged; use another folder in {folder.parent}.")
    return safetensors.torch.load_file(path)


def _flatten(tree: Tree) -> dict[str, Tensor]:
    return {pytree.keystr(path): leaf.detach() for path, leaf in pytree.tree_flatten_with_path(tree)[0]}


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        # clones: a view would be saved with the whole memory behind it
        torch.save({name: value.cpu().clone() for name, value in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _describe(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".replace("torch.", "")


def _barrier(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.barrier()
