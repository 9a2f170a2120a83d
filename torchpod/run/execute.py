"""A training run from configuration to summary: run folder, logging, checkpoints, resume, signals, evaluation.

The training itself is `anakin.train` or `sebulba.train`; everything here happens before it and after it, and what
happens between two calls to the device is in training.py.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import yaml
from torch import Tensor

from torchpod import algos, checkpoint, envs
from torchpod.agent import Agent, Bound, bind
from torchpod.anakin import Anakin, RunState
from torchpod.checkpoint import CheckpointError
from torchpod.config import OBJECT, ConfigError, TrainConfig
from torchpod.distributed import ALONE, Ranks, init, shutdown
from torchpod.env import Env
from torchpod.makers import make_agent, make_env, sources, with_defaults
from torchpod.metrics import finite
from torchpod.replay.segments import Segments
from torchpod.run.checks import check_object, check_users_agent, check_users_env
from torchpod.run.folder import changes, locked, new_run_dir, resume_source, resumed_config, seen_by_all, write_text
from torchpod.run.init_from import with_loaded_weights
from torchpod.run.judge import Judge
from torchpod.run.keeper import Keeper
from torchpod.run.logs import make_logger
from torchpod.run.loops import compiler_of, make_loop, split_of
from torchpod.run.members import apply_members, write_members
from torchpod.run.stop import Interrupted, StopFlag
from torchpod.run.summary import summarise
from torchpod.run.training import Training
from torchpod.sebulba import Sebulba
from torchpod.watched import HostError, close_all, watching


@dataclass
class Run:
    """A finished run."""

    dir: Path
    summary: dict[str, Any]
    """What summary.json holds."""
    agent: Agent = field(repr=False)
    variables: dict[str, Tensor] = field(repr=False)
    """Parameters and buffers; with a leading P axis in a population."""

    @property
    def policy(self) -> Bound:
        """The trained agent, ready to `act`."""
        return bind(self.agent, self.variables)


@dataclass(frozen=True)
class _Job:
    """What is to be done, and where."""

    config: TrainConfig
    source: Path | None
    """The run folder to go on from, if any."""
    ranks: Ranks
    device: torch.device


class _Beginning(NamedTuple):
    """Where the training begins."""

    state: RunState
    iteration: int
    wall_s: float
    """Seconds trained so far."""


def execute(
    config: TrainConfig,
    *,
    env: Env | None = None,
    make: Callable[[], Agent] | None = None,
    until: int | None = None,
) -> Run:
    """Trains, evaluates and summarises one run.

    Args:
      config: what to do.
      env: an environment object instead of `config.env`.
      make: builds the agent, instead of `config.algo`.
      until: iteration to stop at, as if it were the last, without an evaluation on the host; None for the whole run.

    Raises:
      ConfigError, ValueError: if the settings cannot work.
      CheckpointError: if `resume` names something that cannot be resumed.
      OSError: if the run folder cannot be written.
      NonFiniteErrorInRun: if a gradient was not finite; the trajectory is then in RUN/nan/.
      ActorError, HostError: if an environment on the host failed or does not come back.
      LearnerError: if the agent raised a `ValueError`, an `ImportError` or an `OSError` after the first iteration.
      Interrupted: on SIGTERM or SIGINT, after a checkpoint.
    """
    if env is not None:
        check_object(env, config)
        config = replace(config, env={"name": OBJECT + type(env).__name__}, given=(*config.given, "env"))
    source = resume_source(config)
    if source is not None:
        config = resumed_config(config, source)
    # Behind the watchdogs, so that it is they who say which rank waits for what.
    ranks, device = init(split_of(config)[1], timeout_s=min(max(300.0, config.loop.timeout_s + 60.0), 1e9))
    # Two OpenMP threads on a core that something else uses are 16 to 1000 times slower than one (docs/design.md).
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or 1)
    try:
        return _execute(_Job(config, source, ranks, device), env, make, until)
    finally:
        torch.set_num_threads(threads)
        shutdown()


def _execute(job: _Job, env: Env | None, make: Callable[[], Agent] | None, until: int | None) -> Run:
    config, source, ranks = job.config, job.source, job.ranks
    if config.population > 1 and ranks.world_size > 1:
        raise ConfigError(f"population={config.population} runs on one rank; start it without torchrun.")
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as beginning:
        if ranks.world_size == 1:
            # Before there is anything to save a signal stops a run at once; torchrun ends all ranks.
            beginning.enter_context(StopFlag(ALONE, job.device, lambda: "stopped before it began", in_c=True))
        with watching(f"{config.env['name']} has not come back from being imported", config.loop.timeout_s):
            files, config = sources(config), with_defaults(config)
        job = replace(job, config=config)
        env, loop, start = _begin(job, env, make)
        if isinstance(start, Run):
            _close(loop)
            return start
        closing.callback(close_all, [env])
        closing.callback(_close, loop)
        run_dir = new_run_dir(config, ranks) if source is None else seen_by_all(source, ranks)
        closing.enter_context(locked(run_dir) if ranks.rank == 0 else contextlib.nullcontext())
        segments = _segments(loop, run_dir, source, start.iteration)
        keeper = Keeper(config.checkpoint, run_dir, loop.agent, ranks, segments, start.iteration or None, files)
        return _go_on(job, env, loop, start, keeper, until, beginning.close)


def _begin(
    job: _Job, env: Env | None, make: Callable[[], Agent] | None
) -> tuple[Env, Anakin | Sebulba, _Beginning | Run]:
    """The environment of a run, its program, and where it starts; or a run that is finished already."""
    config, device = job.config, job.device
    if env is None:
        with watching(f"env={config.env['name']} has not come back from being made", config.loop.timeout_s):
            env = make_env(config.env)
    with contextlib.ExitStack() as closing:
        closing.callback(close_all, [env])
        if config.env["name"] not in envs.MAKERS:
            check_users_env(env, config, device)
        own = make is not None or config.algo.name not in algos.MAKERS
        make = make or make_agent(config.algo, env.spec, config.members)
        if own:
            check_users_agent(make(), env, config, device)
        if job.source is None:
            make = with_loaded_weights(make, config.init_from, job.ranks)
    loop = make_loop(config, env, make, job.ranks, device)
    try:
        return env, loop, _start(job, loop)
    except BaseException as error:
        _close(loop)
        if isinstance(error, HostError) and error.__cause__ is not None:
            raise ConfigError(f"{error} TORCHPOD_TRACEBACK=1 shows where.") from error
        raise


def _start(job: _Job, loop: Anakin | Sebulba) -> _Beginning | Run:
    """The first state, or that of the newest checkpoint; or a run that is finished already."""
    config, source, ranks = job.config, job.source, job.ranks
    if source is None:
        return _Beginning(apply_members(loop.init(config.seed), config), 0, 0.0)
    folder = checkpoint.latest(source)
    if isinstance(loop, Sebulba):
        first = loop.init(config.seed, checkpoint.read_meta(folder)["iteration"])
    else:
        first = loop.init(config.seed)
    _, loaded, meta = checkpoint.load(folder, apply_members(first, config), ranks=ranks)
    state, iteration = cast(RunState, loaded), meta["iteration"]
    if ranks.rank == 0 and (changed := changes(meta, source, config)):
        print(f"{source} goes on with other {changed} than it was written with: the bits may differ.")
    if not state.learner.healthy.any():
        raise CheckpointError(f"{source} cannot go on: a gradient was not finite, and it stopped learning there.")
    steps = config.num_envs * config.algo.unroll_length
    if iteration >= loop.num_iterations and (summary := _summary(source)) is not None:
        if ranks.rank == 0:
            unused = [key for key in config.given if key.split(".")[0] in ("evaluation", "logger", "checkpoint")]
            told = f" {', '.join(unused)} had no effect; torchpod eval {source} evaluates it anew." if unused else ""
            print(f"{source} is finished; to go on, give more than total_env_steps={iteration * steps:_}.{told}")
        return Run(
            source, summary if ranks.rank == 0 else {}, loop.agent, loop.learner.acting(state.learner, state.iteration)
        )
    if isinstance(loop, Sebulba):
        state = loop.resume(state, first)
        if not loop.restartable and ranks.rank == 0:
            print(f"{config.env['name']} is in no checkpoint: its environments begin new episodes.")
    return _Beginning(state, iteration, meta["wall_s"])


def _summary(run_dir: Path) -> dict[str, Any] | None:
    """What summary.json holds; None if it is missing or damaged: then the run is evaluated again."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def _segments(loop: Anakin | Sebulba, run_dir: Path, source: Path | None, iteration: int) -> Segments | None:
    """The files of the replay buffer, if there is one; it is filled from them if the run goes on."""
    if loop.replay is None:
        return None
    segments = Segments(loop.replay.buffer, run_dir, loop.ranks.rank, loop.num_iterations)
    if source is not None:
        broken = isinstance(loop, Sebulba) and not loop.restartable
        segments.restore(checkpoint.latest(source), iteration, broken=broken)
    return segments


def _close(loop: Anakin | Sebulba) -> None:
    if isinstance(loop, Sebulba):
        with contextlib.suppress(Exception):
            loop.close()


def _go_on(
    job: _Job,
    env: Env,
    loop: Anakin | Sebulba,
    start: _Beginning,
    keeper: Keeper,
    until: int | None,
    ready: Callable[[], None],
) -> Run:
    """Trains, evaluates, summarises; `ready` is called when all is there for it."""
    config, ranks, run_dir = job.config, job.ranks, keeper.run_dir
    opened = make_logger(config, run_dir, start.iteration, loop, env) if ranks.rank == 0 else contextlib.nullcontext()
    with opened as logger:
        if ranks.rank == 0:
            write_text(run_dir / "config.yaml", yaml.safe_dump(replace(config, resume=None).to_dict(), sort_keys=False))
            (run_dir / "summary.json").unlink(missing_ok=True)  # of a run that was finished, and goes on
            if config.logger.console:
                print(f"run folder {run_dir}", flush=True)
        judge = Judge(
            config,
            run_dir,
            loop.agent,
            env,
            num_envs=ranks.share(config.num_envs, "num_envs"),
            device=job.device,
            compiler=compiler_of(config),
        )
        training = Training(config, loop, start.state, start.wall_s, keeper=keeper, judge=judge, logger=logger)
        ready()
        training.run(until)
    variables = loop.learner.acting(training.state.learner, training.state.iteration)
    concludes = ranks.rank == 0 and (until is None or env.traits.pure)
    summary = _conclude(job, loop.agent, variables, training, judge, keeper) if concludes else {}
    return Run(run_dir, summary, loop.agent, variables)


def _conclude(
    job: _Job, agent: Agent, variables: dict[str, Tensor], training: Training, judge: Judge, keeper: Keeper
) -> dict[str, Any]:
    """Evaluates what was trained, and writes the summary, which it returns."""
    config, run_dir, state, timing = job.config, keeper.run_dir, training.state, training.timing
    said = f"stopped in the final evaluation; what was trained is saved: torchpod eval {run_dir}"
    try:
        with StopFlag(ALONE, job.device, lambda: said, in_c=True):  # a signal stops it at once
            evaluation = judge.evaluate(variables, "the final evaluation")
        summary = summarise(config, evaluation, state, timing, job.device, job.ranks)
    except Interrupted:
        raise Interrupted(said) from None
    except HostError as error:
        error.add_note(f"What was trained is saved; evaluate it with torchpod eval {run_dir}")
        raise
    if config.population > 1:
        write_members(run_dir, config, agent, keeper.segments, state, summary, keeper.meta(timing.wall_s))
    write_text(run_dir / "summary.json", json.dumps(finite(summary), indent=1))  # last: the run is finished
    return summary
