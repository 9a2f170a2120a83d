"""Checkpoints: everything a run is, written atomically, checked when loaded.

`RUN/checkpoints/<iteration>/` holds `weights.safetensors` (parameters and buffers of the agent), `state-<rank>.pt`
(everything else, tensors only, loaded with `weights_only=True`) and `meta.json` (format, shapes, sizes and digests).
If the agent has policies, each also lies in a `policy-<name>.safetensors`, to be handed on and loaded by itself.
A checkpoint is written into a hidden folder and renamed: it is there whole, or not at all.

What a killed process left in hidden folders is ignored, and removed with the next checkpoint.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.distributed import Ranks
from torchpod.types import Tree

FORMAT = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message says which file, and why."""


def save(
    run_dir: Path,
    iteration: int,
    weights: dict[str, Tensor],
    state: Tree,
    meta: dict[str, Any],
    *,
    ranks: Ranks,
    keep: int,
    manifest: bytes | None = None,
    layers: dict[str, dict[str, str]] | None = None,
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
      manifest: of what every rank keeps elsewhere (replay/segments.py).
      layers: of the agent, under "", and of each policy, the kinds of its layers by name, which stay with it.

    Returns:
      The folder.

    Raises:
      OSError: if the disk is full or not writable; older checkpoints are untouched.
    """
    final = run_dir / "checkpoints" / f"{iteration:010d}"
    partial = final.with_name(f".partial-{final.name}")
    try:
        with writing(final):
            partial.mkdir(parents=True, exist_ok=True)
            _write(partial / f"state-{ranks.rank}.pt", _flatten(state))
            if manifest is not None:
                _write_bytes(partial / f"replay-{ranks.rank}.json", manifest)
        ranks.barrier()
        if ranks.rank == 0:
            with writing(final):
                kinds = layers or {}
                whole = safetensors.torch.save(_portable(weights), metadata=kinds.get(""))
                _write_bytes(partial / "weights.safetensors", whole)
                of_ranks = ["state-{}.pt"] if manifest is None else ["state-{}.pt", "replay-{}.json"]
                names = [name.format(rank) for name in of_ranks for rank in range(ranks.world_size)]
                names.append("weights.safetensors")
                for name, policy in _by_policy(weights).items():
                    names.append(f"policy-{name}.safetensors")
                    part = safetensors.torch.save(_portable(policy), metadata=kinds.get(name))
                    _write_bytes(partial / names[-1], part)
                files = {name: _digest((partial / name).read_bytes()) for name in names}
                meta = {
                    "format": FORMAT,
                    "iteration": iteration,
                    "world_size": ranks.world_size,
                    "files": files,
                    **meta,
                }
                _write_bytes(partial / "meta.json", json.dumps({**meta, "sha256": _digest_of(meta)}, indent=1).encode())
                if final.exists():  # moved aside: removing it here would take long enough to be killed in
                    os.replace(final, final.with_name(f".partial-old-{final.name}"))
                os.replace(partial, final)
                _sync_folder(final.parent)
                for old in [*all_of(run_dir)[:-keep], *final.parent.glob(".partial-*")]:
                    shutil.rmtree(old)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk: leave room for what the user does next
        raise
    ranks.barrier()
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
      CheckpointError: if a file is missing, truncated or foreign, of another format, or does not fit `like`. Files of
        single policies are not read: `load_file` does that.
    """
    meta = read_meta(folder)
    if meta["world_size"] != ranks.world_size:
        raise CheckpointError(
            f"{folder} was written by {meta['world_size']} rank(s), this run has {ranks.world_size}; start as many."
        )
    needed = [name for name in meta["files"] if not name.startswith("policy-")]  # of what the weights hold as well
    data = {name: _read(folder, name, meta["files"][name]) for name in needed}
    weights = safetensors.torch.load(data["weights.safetensors"])
    flat = torch.load(io.BytesIO(data[f"state-{ranks.rank}.pt"]), map_location="cpu", weights_only=True)
    wanted = _flatten(like)
    for name in sorted(set(wanted) | set(flat)):
        got, want = flat.get(name), wanted.get(name)
        if got is None or want is None or got.shape != want.shape or got.dtype != want.dtype:
            raise CheckpointError(
                f"{folder} does not fit this run: {name} is {describe(got)} there and {describe(want)} here; "
                "resume with the settings that it was written with."
            )
    leaves = [flat[name].to(want.device) for name, want in wanted.items()]
    return weights, pytree.tree_unflatten(leaves, pytree.tree_structure(like)), meta


def latest(run_dir: str | Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
      CheckpointError: if there is none.
    """
    run_dir = Path(run_dir)
    found = all_of(run_dir)
    if not found and (run_dir / "config.yaml").is_file():
        raise CheckpointError(
            f"{run_dir} is a run that has no checkpoint yet; wait for its first one if it is running, or start it "
            f"again with run_dir={run_dir} resume=auto."
        )
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
        raise CheckpointError(_damaged(folder / "meta.json")) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise CheckpointError(f"{folder} has checkpoint format {found}, this version reads {FORMAT}.")
    if meta.pop("sha256", None) != _digest_of(meta):
        raise CheckpointError(_damaged(folder / "meta.json"))
    return meta


def manifest_of(folder: Path, rank: int) -> bytes:
    """What `save` was given beside the state, or that of a run without; raises `CheckpointError`."""
    name = f"replay-{rank}.json"
    files = read_meta(folder)["files"]
    return _read(folder, name, files[name]) if name in files else b"{}"


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers alone, e.g. for evaluation; raises `CheckpointError`."""
    name = "weights.safetensors"
    return safetensors.torch.load(_read(folder, name, read_meta(folder)["files"][name]))


def policies_of(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint's policies, by name; raises `CheckpointError` if it is none of ours."""
    names = [name for name in read_meta(folder)["files"] if name.startswith("policy-")]
    return {name.removeprefix("policy-").removesuffix(".safetensors"): folder / name for name in names}


def load_file(file: Path) -> dict[str, Tensor]:
    """Parameters and buffers in a file of a checkpoint, or copied out of it; raises `CheckpointError`."""
    if (file.parent / "meta.json").is_file() and file.name in (files := read_meta(file.parent)["files"]):
        return safetensors.torch.load(_read(file.parent, file.name, files[file.name]))
    try:
        return safetensors.torch.load(file.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} holds no weights of a checkpoint ({str(error).splitlines()[0]}).") from error


def layers_of(file: Path) -> dict[str, str]:
    """The kinds of the layers of what `load_file` has read, by name; none of an older version's."""
    with safetensors.safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in one sentence what could not be written, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}); free some space, or choose another folder with "
            "run_dir=DIR."
        ) from error


def _flatten(tree: Tree) -> dict[str, Tensor]:
    return {pytree.keystr(path): leaf.detach() for path, leaf in pytree.tree_flatten_with_path(tree)[0]}


def _by_policy(weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What is named `policies.NAME.REST`, by name and rest."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, x in weights.items():
        match name.split(".", 2):
            case ["policies", policy, rest]:
                found.setdefault(policy, {})[rest] = x
    return found


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    # clones: a view would be saved with the whole memory behind it
    write_tensors(path, {name: value.cpu().clone() for name, value in tensors.items()})


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file of tensors, on the disk when this returns; an `OSError` if it cannot be written."""
    with path.open("wb") as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # torch's writer closes what it could not write, and fails at that
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
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


def _read(folder: Path, name: str, digest: str) -> bytes:
    """A file of a checkpoint, if it is what was written."""
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(_damaged(folder / name)) from error
    if _digest(data) != digest:
        raise CheckpointError(_damaged(folder / name))
    return data


def _damaged(path: Path) -> str:
    return (
        f"{path} is missing or damaged; move the folder {path.parent.name} away to go on from the checkpoint before it."
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(meta: dict[str, Any]) -> str:
    return _digest(json.dumps(meta, sort_keys=True).encode())


def describe(tensor: Tensor | None) -> str:
    """Its dtype and shape in words."""
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".replace("torch.", "")
