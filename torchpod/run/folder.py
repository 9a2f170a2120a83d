"""A run folder: which one a run resumes or creates, and that no other process writes to it."""

import contextlib
import datetime
import fcntl
import functools
import os
import platform
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from torchpod import checkpoint
from torchpod.checkpoint import CheckpointError
from torchpod.compose import choices
from torchpod.config import ConfigError, TrainConfig, from_dict
from torchpod.distributed import RankError, Ranks
from torchpod.machine import versions
from torchpod.makers import sources
from torchpod.metrics import METRICS_FILE

JOB = "TORCHELASTIC_RUN_ID"
MAY_CHANGE = (
    *("total_env_steps", "device", "threads", "compile", "logger", "checkpoint", "evaluation"),
    *("algo.replay.host", "algo.replay.folder"),
    *(
        "loop.iterations_per_call",
        "loop.num_actor_threads",
        "loop.pools_per_actor",
        "loop.pools_share_threads",
        "loop.queue_size",
        "loop.split",
        "loop.timeout_s",
    ),
)
"""What a resumed run takes from the new settings, where they were given: it stays the same run."""


def resume_source(config: TrainConfig) -> Path | None:
    """The folder to resume from, if any."""
    if not _goes_on(config):
        return None
    if config.resume not in (None, "auto"):
        path = Path(config.resume)
        if not path.is_dir():
            problem = " is a file" if path.exists() else ": there is no such folder"
            raise CheckpointError(f"resume={config.resume}{problem}; give a run folder, or auto.")
        checkpoint.latest(path)
        if config.run_dir is not None and Path(config.run_dir).resolve() != path.resolve():
            raise ConfigError(
                f"resume={config.resume} goes on in that folder, and run_dir={config.run_dir} is another; leave "
                "run_dir out."
            )
        return path
    if config.run_dir is not None:
        folders = [Path(config.run_dir)]
    else:
        folders = sorted(Path("runs", config.experiment).glob(f"*-seed{config.seed}"), reverse=True)
    folders = [folder for folder in folders if checkpoint.all_of(folder)]
    if config.init_from is not None and config.run_dir is None:  # what it begins as may have its name and seed
        folders = [folder for folder in folders if read_config(folder).init_from == config.init_from]
    if config.resume is None and config.run_dir is None:  # restarted: only what this job has written
        job = os.environ.get(JOB)
        if job in (None, "none"):  # torchrun's default for static rendezvous, which every other job has too
            if os.environ.get("RANK", "0") == "0":
                print(
                    "The job was restarted and begins anew: torchrun gave it no id, with --rdzv-id=ID it would go on."
                )
            return None
        folders = [folder for folder in folders if checkpoint.read_meta(checkpoint.latest(folder)).get("job") == job]
    return folders[0] if folders else None


def resumed_config(config: TrainConfig, source: Path) -> TrainConfig:
    """The settings of the run that goes on, with those given by hand that do not make it another run.

    Raises:
      ConfigError: for any other setting that was given and differs.
    """
    settings, given = read_config(source).to_dict(), config.to_dict()
    names = {"experiment": "experiment_name", "loss": "algo.agent.loss"}
    names |= {group: f"{group}.name" for group in ("algo", "env", "loop")}
    for key in config.given:
        *path, name = names.get(key, key).split(".")
        if path[:1] == ["members"]:  # whose names may have dots
            path, name = ["members"], key.removeprefix("members.")
        old, new = (functools.reduce(lambda d, k: d.get(k) or {}, path, tree) for tree in (settings, given))
        moved = key in ("algo", "env") and _moved(str(old.get(name)), str(new.get(name)))
        if moved and Path(str(old[name])).name != Path(str(new[name])).name and os.environ.get("RANK", "0") == "0":
            print(f"{key}={new[name]} is taken for {old[name]}, which is not there any more.")
        if (
            key == "experiment"
            and config.experiment not in choices("experiment")
            and os.environ.get("RANK", "0") == "0"
        ):
            print(
                f"{source} goes on with its own settings; what is to change of experiment={config.experiment}, say it."
            )
        if moved or ".".join([*path, name]) in MAY_CHANGE or [*path, name][0] in MAY_CHANGE:
            old[name] = new[name]
        elif key not in ("resume", "run_dir") and old.get(name) != new.get(name):
            raise ConfigError(
                f"{'.'.join([*path, name])}={new.get(name)} cannot change: {source} has {old.get(name)}; leave it out, "
                "or start a new run."
            )
    return replace(from_dict(settings), run_dir=str(source), resume=None, given=config.given)


def _moved(old: str, new: str) -> bool:
    """Whether a class of the user's, `path.py:Class`, is the same one in another place."""
    (before, _, kind), (now, _, other) = old.rpartition(":"), new.rpartition(":")
    same_file = Path(before).name == Path(now).name or (before.endswith(".py") and not Path(before).is_file())
    return kind == other and same_file


def _goes_on(config: TrainConfig) -> bool:
    """Whether the run is to be resumed if there is one: because it was asked for, or because torchrun restarted us."""
    return config.resume is not None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration of a run folder.

    Raises:
      CheckpointError: if it is none.
    """
    path = run_dir / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text())
        config = from_dict(settings) if isinstance(settings, dict) else None
        if config is None or "name" not in config.env:
            raise TypeError("it holds no settings of a run")
        return config
    except FileNotFoundError as error:
        raise CheckpointError(f"{run_dir} is no run folder: there is no {path.name} in it.") from error
    except (OSError, UnicodeError, yaml.YAMLError, ConfigError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{run_dir} is no run folder: {path.name} is not ours ({str(error).splitlines()[0]})."
        ) from error


def new_run_dir(config: TrainConfig, ranks: Ranks) -> Path:
    """Creates the run folder; the same on every rank.

    Raises:
      ConfigError: if it cannot be created.
      RankError: see `seen_by_all`.
    """
    return seen_by_all(_create_run_dir(config) if ranks.rank == 0 else None, ranks)


def seen_by_all(path: Path | None, ranks: Ranks) -> Path:
    """Rank 0's `path`, as this rank reaches it.

    Raises:
      RankError: if this rank, on another host, does not see it: a folder there may have the same name.
    """
    if path is not None and ranks.world_size == 1:
        return path
    mark = None if path is None else path.absolute() / f".rank-0-{uuid.uuid4().hex}"
    if mark is not None and ranks.rank == 0:
        with checkpoint.writing(mark.parent):
            mark.touch()
    relative, mark = ranks.same((path, mark))
    try:
        if not mark.exists():
            raise RankError(
                f"rank {ranks.rank} on {platform.node()} does not see the run folder of rank 0, {mark.parent}: start "
                "on all hosts in a folder that they share, or name one with run_dir"
            )
        ranks.barrier()
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)
    return relative if relative.absolute() == mark.parent else mark.parent


def _create_run_dir(config: TrainConfig) -> Path:
    if config.run_dir is None:
        now = datetime.datetime.now()
        while True:  # runs that start in the same second get different folders
            path = Path("runs", config.experiment, f"{now:%Y%m%d-%H%M%S}-seed{config.seed}")
            with checkpoint.writing(path), contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
            now += datetime.timedelta(seconds=1)
    path = Path(config.run_dir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir={path} is a file; name a folder, or leave it out.")
    metrics = path / METRICS_FILE
    # What has no checkpoint cannot be resumed: then `resume=auto` begins again in the same folder.
    if checkpoint.all_of(path) or (metrics.is_file() and metrics.stat().st_size and not _goes_on(config)):
        raise ConfigError(f"run_dir={path} already holds a run; use another, or resume={path} to go on with it.")
    with checkpoint.writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps other processes out of a run folder while this one writes to it.

    Raises:
      ConfigError: if another process is in it.
    """
    with checkpoint.writing(run_dir):
        file = (run_dir / ".lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{run_dir} is in use by another process; wait until it ends, or choose another run_dir."
            ) from error
        except OSError:
            pass  # a file system without locks
        yield


def changes(meta: dict[str, Any], run_dir: Path, config: TrainConfig) -> str:
    """What bits depend on and is not as it was when a checkpoint was written; empty if nothing."""
    now = {**versions(), "threads": torch.get_num_threads()}
    then = {**meta.get("versions", {}), "threads": meta.get("threads")}
    if config.loop.name == "sebulba":
        before = read_config(run_dir).loop
        for name in ("num_actor_threads", "pools_per_actor", "split"):
            then[f"loop.{name}"], now[f"loop.{name}"] = getattr(before, name), getattr(config.loop, name)
    told = [f"{name} ({then.get(name)} -> {now.get(name)})" for name in now if now[name] != then.get(name)]
    return ", ".join([*told, *changed_sources(meta, config)])


def changed_sources(meta: dict[str, Any], config: TrainConfig) -> list[str]:
    """The files of the user's agent and environment that are not as they were when a checkpoint was written."""
    told, then = {}, meta.get("sources", {})
    for group, (path, digest) in sources(config).items():
        _, before = then.get(group, (path, digest))
        if before != digest:
            told[f"{Path(path).name} (sha256 {before[:8]} -> {digest[:8]})"] = None  # once, if both are in it
    return list(told)


def write_text(path: Path, text: str) -> None:
    """Writes a small file atomically."""
    partial = path.with_name(f".partial-{path.name}")
    with checkpoint.writing(path):
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or the name may be on the disk before what it names
        os.replace(partial, path)
