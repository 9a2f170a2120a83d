"""What a run writes to be resumed, checkpoints with replay, and to be looked at: the trajectory of a bad gradient."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchpod import checkpoint
from torchpod.agent import Agent
from torchpod.anakin import NonFiniteError, RunState
from torchpod.config import CheckpointConfig
from torchpod.distributed import Ranks
from torchpod.machine import versions
from torchpod.replay.segments import Segments
from torchpod.run.folder import JOB
from torchpod.run.init_from import layers_of


class Keeper:
    """Writes checkpoints and crash dumps of one run.

    Args:
      config: how often, and how many are kept.
      run_dir: where.
      agent: whose policies have files of their own.
      ranks: of the run.
      segments: the files of the replay buffer, if there is one.
      saved_at: the iteration of the checkpoint that the run goes on from.
      sources: digests of the user's files that the run has read, by path.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        agent: Agent,
        ranks: Ranks,
        segments: Segments | None,
        saved_at: int | None,
        sources: dict[str, list[str]],
    ) -> None:
        self._config, self.run_dir, self._ranks, self.segments = config, run_dir, ranks, segments
        self._agent, self.saved_at, self._sources = agent, saved_at, sources
        self._last_saved = time.perf_counter()

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        # With ranks one at once: when one of them fails, the others cannot be asked to save any more.
        if self.saved_at is None and self._ranks.world_size > 1:
            return True
        return time.perf_counter() - self._last_saved >= self._config.interval_s

    def meta(self, wall_s: float) -> dict[str, Any]:
        """What a checkpoint says of the run."""
        return {"wall_s": wall_s, "sources": self._sources}

    def save(self, state: RunState, wall_s: float) -> None:
        """Writes a checkpoint."""
        iteration, segments = int(state.iteration.flatten()[0]), self.segments
        manifest = None if segments is None else segments.save(iteration)
        save_state(self.run_dir, self._agent, state, self.meta(wall_s), self._ranks, self._config.keep, manifest)
        if segments is not None:
            segments.clean()
        self.saved_at = iteration
        self._last_saved = time.perf_counter()

    def rescue(self, state: RunState, wall_s: float) -> str:
        """Saves what is not saved after a failure; why it could not be, in words to add to those of the failure."""
        # Not with ranks: saving would wait for the others, which wait for this one.
        if self._ranks.world_size > 1 or self.saved_at == int(state.iteration.flatten()[0]):
            return ""
        try:
            self.save(state, wall_s)
        except OSError as error:
            return str(error)
        return ""

    def dump(self, error: NonFiniteError) -> Path:
        """Writes the trajectory of an error; the file."""
        path = self.run_dir / "nan" / f"iteration-{error.iteration}-rank-{self._ranks.rank}.pt"
        flat = {pytree.keystr(k): v.cpu() for k, v in pytree.tree_flatten_with_path(error.trajectory)[0]}
        with checkpoint.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_tensors(path, flat)
        return path


def save_state(
    run_dir: Path,
    agent: Agent,
    state: RunState,
    meta: dict[str, Any],
    ranks: Ranks,
    keep: int,
    manifest: bytes | None = None,
) -> None:
    """Writes a checkpoint of a whole run; `manifest` lists what its replay buffer holds."""
    weights = state.learner.params | state.learner.buffers
    iteration = int(state.iteration.flatten()[0])
    meta = {"versions": versions(), "threads": torch.get_num_threads(), "job": os.environ.get(JOB), **meta}
    layers = layers_of(agent)
    checkpoint.save(run_dir, iteration, weights, state, meta, ranks=ranks, keep=keep, manifest=manifest, layers=layers)
