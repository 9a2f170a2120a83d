"""What a replay buffer holds, in files that are written once: `RUN/replay/<rank>/<from>-<to>.pt`, in iterations.

A checkpoint adds what was stored since the one before, and lists the files that it needs in its `replay-<rank>.json`.
So a buffer of a million steps is not written again every minute, and a run that is killed while it writes leaves the
checkpoints before it whole. Files that no checkpoint lists any more are removed.
"""

import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from torchpod.checkpoint import CheckpointError, all_of, manifest_of, write_tensors, writing
from torchpod.hints import human_bytes
from torchpod.replay.buffer import ReplayBuffer
from torchpod.replay.memory import free_bytes
from torchpod.types import LAST, Tree

_PIECES = 8
"""A file holds at most this part of the window, so that files which are too old can go one by one."""
_MOST_BYTES = 2**28
"""That a file holds, if an iteration has not more: it is in memory twice while it is written or read."""


class Segments:
    """The files of one rank's buffer.

    Args:
      buffer: whose.
      run_dir: the run folder.
      rank: of this process.
      num_iterations: of the run, if it may end before the ring is full.
    """

    def __init__(self, buffer: ReplayBuffer, run_dir: Path, rank: int, num_iterations: int | None = None) -> None:
        self._buffer, self._run_dir, self._rank, self._num_iterations = buffer, run_dir, rank, num_iterations
        self._has_looked = False
        self._folder = run_dir / "replay" / str(rank)
        self._digests: dict[str, str] = {}
        self._saved = 0

    def save(self, iteration: int) -> bytes:
        """Writes what was stored before an iteration and is in no file yet. Returns what the checkpoint keeps."""
        window, oldest = self._window, self._oldest(iteration)
        per_iteration = self._buffer.nbytes // self._buffer.num_unrolls
        piece = max(1, min(window // _PIECES, _MOST_BYTES // max(1, per_iteration)))
        if not self._has_looked:
            self._has_looked = True
            self._look_for_room(min(window + piece, self._num_iterations or window + piece) * per_iteration)
        begin = max(self._saved, oldest)
        while begin < iteration:
            end = min(begin + piece, iteration)
            path = self._new_path(begin, end)
            with writing(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                try:
                    write_tensors(path, self._slice(begin, end))
                except OSError:
                    path.unlink(missing_ok=True)  # a part of a file is of no use
                    raise
                self._digests[path.name] = _digest(path)
            begin = end
        self._saved = iteration
        self._digests = {name: digest for name, digest in self._digests.items() if _range(name)[1] > oldest}
        return _manifest(self._digests)

    @property
    def _window(self) -> int:
        """Iterations that a buffer needs."""
        return self._buffer.window // self._buffer.unroll_length + self._buffer.history

    def _oldest(self, iteration: int) -> int:
        """The first iteration that a buffer needs before this one."""
        return max(0, iteration - self._window)

    def _look_for_room(self, most: int) -> None:
        """Warns at the first checkpoint if the disk has no room for so many bytes, with the files that there are.

        That is the least: what only older checkpoints list comes on top.
        """
        there = sum(path.stat().st_size for path in self._folder.glob("*.pt"))
        free, _ = free_bytes(torch.device("cpu"), host=False, folder=str(self._run_dir))  # this rank's share
        if most - there > free:
            warnings.warn(
                f"{self._folder} will hold at least {human_bytes(most)} of replay, {human_bytes(there)} are there, "
                f"and the disk has {human_bytes(free)} left for it; free some space, or stop and lower "
                "algo.replay.capacity or choose another folder with run_dir=DIR, for a checkpoint that finds no room "
                "ends the run.",
                stacklevel=2,
            )

    def clean(self) -> None:
        """Removes the files that no checkpoint needs; none if a checkpoint cannot be asked."""
        clean(self._run_dir, self._rank, self._digests)

    def split(self, run_dirs: Mapping[int, Path]) -> dict[int, bytes]:
        """Writes the parts of a population's members as files of runs of their own.

        Args:
          run_dirs: by member.

        Returns:
          By member, what its checkpoint keeps.
        """
        digests: dict[int, dict[str, str]] = {p: {} for p in run_dirs}
        for name in self._digests:
            flat = torch.load(self._folder / name, map_location="cpu", weights_only=True)
            for p, run_dir in run_dirs.items():
                path = run_dir / "replay" / "0" / name
                partial = path.with_suffix(".partial")  # an earlier checkpoint may have a file of that name
                with writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    try:
                        write_tensors(partial, {key: x[p].clone() for key, x in flat.items()})
                        digests[p][name] = _digest(partial)
                        partial.replace(path)
                    finally:
                        partial.unlink(missing_ok=True)
        return {p: _manifest(x) for p, x in digests.items()}

    def restore(self, checkpoint: Path, iteration: int, *, broken: bool) -> None:
        """Fills the buffer, as soon as it has memory, with what a checkpoint lists.

        Args:
          checkpoint: its folder.
          iteration: at which it was written.
          broken: the episodes that were under way then were not resumed: they count as cut off at the last step.

        Raises:
          CheckpointError: if a file is missing or damaged.
        """
        self._digests = json.loads(manifest_of(checkpoint, self._rank))
        self._saved = max(0, iteration - broken)  # what is changed below is written again
        covered = self._oldest(iteration)
        for begin, end in sorted(map(_range, self._digests)):
            covered = max(covered, end) if begin <= covered else covered
        if covered < iteration:
            raise CheckpointError(
                f"the checkpoint {checkpoint} lists no replay from iteration {covered} on, so that it cannot go on; "
                "torchpod eval takes it."
            )
        for name, digest in self._digests.items():
            if not (self._folder / name).is_file() or _digest(self._folder / name) != digest:
                raise CheckpointError(
                    f"{self._folder / name} is missing or damaged; move the checkpoint {checkpoint.name} away to go on "
                    "from the one before it, if it does without."
                )

        def fill(storage: Tree) -> None:
            for name in self._digests:
                begin, end = _range(name)
                flat = torch.load(self._folder / name, map_location="cpu", weights_only=True)
                for path, x in pytree.tree_flatten_with_path(storage)[0]:
                    part, runs = flat.get(pytree.keystr(path)), self._runs(x, begin, end)
                    sizes = [run.shape[self._buffer.axis] for run in runs]
                    shape = (*x.shape[: self._buffer.axis], sum(sizes), *x.shape[self._buffer.axis + 1 :])
                    if part is None or part.dtype != x.dtype or part.shape != shape:
                        raise CheckpointError(f"{self._folder / name} does not fit this run: {pytree.keystr(path)}.")
                    for run, piece in zip(runs, part.split(sizes, self._buffer.axis), strict=True):
                        run.copy_(piece)
            if broken and iteration > 0:
                last = (iteration * self._buffer.unroll_length - 1) % self._buffer.num_slots
                storage["timestep"]["step_type"].narrow(self._buffer.axis, last, 1).fill_(LAST)
                if "goes_on" in storage["timestep"]:
                    storage["timestep"]["goes_on"].narrow(self._buffer.axis, last, 1).fill_(False)

        self._buffer.restore = fill

    def _new_path(self, begin: int, end: int) -> Path:
        """Of a file that there is not yet: what an earlier checkpoint lists stays as it is."""
        path, again = self._folder / f"{begin:010d}-{end:010d}.pt", itertools.count(1)
        while path.exists():
            path = path.with_name(f"{begin:010d}-{end:010d}-{next(again)}.pt")
        return path

    def _slice(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        flat = {pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(self._buffer.storage)[0]}
        return {
            name: torch.cat([part.cpu() for part in self._runs(x, begin, end)], self._buffer.axis)
            for name, x in flat.items()
        }

    def _runs(self, x: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
        """Where the iterations `begin ... end - 1` lie: one piece of memory, or two around the end of the ring."""
        axis, num = self._buffer.axis, self._buffer.num_unrolls
        each, first, count = x.shape[axis] // num, begin % num, end - begin
        before = min(count, num - first)
        runs = [x.narrow(axis, first * each, before * each), x.narrow(axis, 0, (count - before) * each)]
        return [run for run in runs if run.shape[axis]]


def clean(run_dir: Path, rank: int, newest: Iterable[str]) -> None:
    """Removes the files of a rank that no checkpoint of a run needs, nor is in `newest`.

    That is what the newest checkpoint lists, which another host may have written and this one not see yet. None is
    removed if a checkpoint cannot be asked.
    """
    kept = set(newest)
    try:
        for folder in all_of(run_dir):
            kept |= set(json.loads(manifest_of(folder, rank)))
    except CheckpointError:
        return
    for path in (run_dir / "replay" / str(rank)).glob("*.pt"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def _manifest(digests: dict[str, str]) -> bytes:
    return json.dumps(digests, indent=1).encode()


def _range(name: str) -> tuple[int, int]:
    begin, end, *_ = Path(name).stem.split("-")
    return int(begin), int(end)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
