"""A training run from configuration to summary: run folder, logging, checkpoints, resume, signals, evaluation.

The training itself is `anakin.train` or `sebulba.train`; everything here happens between two calls to the device.
"""

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import algos, checkpoint, envs, sebulba
from torchpod.actions import closed_masks
from torchpod.agent import Agent, Bound, bind
from torchpod.anakin import Anakin, NonFiniteError, Report, RunState, train
from torchpod.checkpoint import CheckpointError
from torchpod.compile import Compiler
from torchpod.config import OBJECT, ConfigError, TrainConfig
from torchpod.distributed import ALONE, Ranks, init, shutdown
from torchpod.env import Env
from torchpod.envs.transforms import Transform
from torchpod.hints import nearest
from torchpod.makers import make_agent, make_env, require_env
from torchpod.metrics import Logger, Sink
from torchpod.replay.segments import Segments
from torchpod.run.folder import (
    changes,
    locked,
    new_run_dir,
    resume_source,
    resumed_config,
    save_state,
    seen_by_all,
    write_text,
)
from torchpod.run.judge import Judge
from torchpod.run.policies import begun
from torchpod.run.progress import ConsoleSink, UnreadError, advise
from torchpod.run.sinks import CsvSink, TensorBoardSink, WandbSink
from torchpod.run.stop import Interrupted, OverdueError, StopFlag
from torchpod.run.summary import Timing, summarise, write_members
from torchpod.sebulba import Sebulba, devices_of
from torchpod.sebulba.actor import splits
from torchpod.testing import ContractError, check_agent, check_env
from torchpod.types import Tree
from torchpod.watched import HostError, close_all, sentence, watched, watching


@dataclass
class Run:
    """A finished run."""

    dir: Path
    summary: dict[str, Any]
    """What summary.json holds."""
    agent: Agent
    variables: dict[str, Tensor]
    """Parameters and buffers; with a leading P axis in a population."""

    @property
    def policy(self) -> Bound:
        """The trained agent, ready to `act`."""
        return bind(self.agent, self.variables)


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
      until: iteration to stop at, as if it were the last; None for the whole run.

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
        if isinstance(env, type):
            raise ConfigError(f"env={env.__name__} is a class; hand over an environment, e.g. env={env.__name__}().")
        if named := [key for key in config.given if key.partition(".")[0] == "env"]:
            raise ConfigError(
                f"{named[0]} is a setting of an environment that a run makes, and env={type(env).__name__} is made "
                "already; make it as it is to be, with what torchpod.envs.transforms has around it."
            )
        for module, base, door in (
            ("gymnasium", "Env", "Gymnasium"),
            ("pettingzoo", "ParallelEnv", "PettingZoo"),
            ("torchrl.envs", "EnvBase", "TorchRL"),
            ("brax.envs", "Env", "Brax"),
        ):
            if module in sys.modules and isinstance(env, getattr(sys.modules[module], base)):
                kind = type(env).__name__
                raise ConfigError(
                    f"env={kind} is one {module}.{base}, and a run needs many: hand over torchpod.envs.{door}({kind}) "
                    'with loop="sebulba".'
                )
        require_env(env, "env is")
        config = replace(config, env={"name": OBJECT + type(env).__name__}, given=(*config.given, "env"))
    source = resume_source(config)
    if source is not None:
        config = resumed_config(config, source)
    # Behind the watchdogs, so that it is they who say which rank waits for what.
    ranks, device = init(_split(config)[1], timeout_s=min(max(300.0, config.loop.timeout_s + 60.0), 1e9))
    # Two OpenMP threads on a core that something else uses are 100 times slower than one (measured, docs/design.md).
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or 1)
    try:
        return _execute(config, source, ranks, device, env, make, until)
    finally:
        torch.set_num_threads(threads)
        shutdown()


def _split(config: TrainConfig) -> tuple[list[torch.device], str]:
    """The GPUs on which this rank acts, if they are others than its own, and the device on which it learns."""
    if config.loop.split is None:
        return [], config.device
    if config.device != "cuda":
        raise ConfigError(f"loop.split={config.loop.split} shares out GPUs; add device=cuda.")
    local_rank, local_size = (int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    actor_devices, learner_device = devices_of(config.loop.split, local_rank, local_size)
    return actor_devices, str(learner_device)


def _execute(
    config: TrainConfig,
    source: Path | None,
    ranks: Ranks,
    device: torch.device,
    env: Env | None,
    make: Callable[[], Agent] | None,
    until: int | None,
) -> Run:
    if config.population > 1 and ranks.world_size > 1:
        raise ConfigError(f"population={config.population} runs on one rank; start it without torchrun.")
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as beginning:
        if ranks.world_size == 1:
            # Before there is anything to save a signal stops a run at once; torchrun ends all ranks.
            beginning.enter_context(StopFlag(ALONE, device, lambda: "stopped before it began", in_c=True))
        loop, env, started = _begin(config, source, ranks, device, env, make)
        if isinstance(started, Run):
            _close(loop)
            return started
        state, resumed_at, wall_s = started
        closing.callback(close_all, [env])
        closing.callback(_close, loop)
        run_dir = new_run_dir(config, ranks) if source is None else seen_by_all(source, ranks)
        closing.enter_context(locked(run_dir) if ranks.rank == 0 else contextlib.nullcontext())
        segments = _segments(loop, run_dir, source, resumed_at)
        keeper = _Keeper(config, run_dir, loop.agent, ranks, segments, resumed_at or None)
        return _go_on(config, loop, env, state, keeper, ranks, device, resumed_at, wall_s, until, beginning.close)


def _begin(
    config: TrainConfig,
    source: Path | None,
    ranks: Ranks,
    device: torch.device,
    env: Env | None,
    make: Callable[[], Agent] | None,
) -> tuple[Anakin | Sebulba, Env, tuple[RunState, int, float] | Run]:
    """The program of a run, its environment, and what `_start` says."""
    if env is None:
        with watching(f"env={config.env['name']} has not come back from being made", config.loop.timeout_s):
            env = make_env(config.env)
    with contextlib.ExitStack() as closing:
        closing.callback(close_all, [env])
        if config.env["name"] not in envs.MAKERS:
            _check_env(env, config, device)
        own = make is not None or config.algo.name not in algos.MAKERS
        make = make or make_agent(config.algo, env.spec, config.members)
        if own:
            _check_agent(make(), env, config, device)
        if source is None:
            make = begun(make, ranks)
    loop = make_loop(config, env, make, ranks, device)
    try:
        return loop, env, _start(config, loop, source, ranks)
    except BaseException as error:
        _close(loop)
        if isinstance(error, HostError) and error.__cause__ is not None:
            raise ConfigError(f"{error} TORCHPOD_TRACEBACK=1 shows where.") from error
        raise


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


def _start(
    config: TrainConfig, loop: Anakin | Sebulba, source: Path | None, ranks: Ranks
) -> tuple[RunState, int, float] | Run:
    """The state to go on from, its iteration, and the seconds trained so far; or a run that is finished already."""
    resumed_at, wall_s, folder = 0, 0.0, checkpoint.latest(source) if source is not None else None
    if isinstance(loop, Sebulba) and folder is not None:
        begun = loop.init(config.seed, checkpoint.read_meta(folder)["iteration"])
    else:
        begun = loop.init(config.seed)
    state = _apply_members(begun, config)
    if folder is not None and source is not None:
        _, loaded, meta = checkpoint.load(folder, state, ranks=ranks)
        state = cast(RunState, loaded)
        resumed_at, wall_s = meta["iteration"], meta["wall_s"]
        if ranks.rank == 0 and (changed := changes(meta, source, config)):
            print(f"{source} goes on with other {changed} than it was written with: the bits may differ.")
        if not state.learner.healthy.any():
            raise CheckpointError(f"{source} cannot go on: a gradient was not finite, and it stopped learning there.")
        steps = config.num_envs * config.algo.unroll_length
        if resumed_at >= loop.num_iterations and (source / "summary.json").is_file():
            if ranks.rank == 0:
                print(f"{source} is finished; to go on, give more than total_env_steps={resumed_at * steps:_}.")
            summary = json.loads((source / "summary.json").read_text())
            variables = loop.learner.acting(state.learner, state.iteration)
            return Run(source, summary, loop.agent, variables)
        if isinstance(loop, Sebulba):
            state = loop.resume(state, begun)
            if not loop.restartable and ranks.rank == 0:
                print(f"{config.env['name']} is in no checkpoint: its environments begin new episodes.")
    return state, resumed_at, wall_s


def _go_on(
    config: TrainConfig,
    loop: Anakin | Sebulba,
    env: Env,
    state: RunState,
    keeper: "_Keeper",
    ranks: Ranks,
    device: torch.device,
    resumed_at: int,
    wall_s: float,
    until: int | None,
    begun: Callable[[], None],
) -> Run:
    """Trains from a state on, evaluates, summarises; `begun` is called when all is there for it."""
    run_dir = keeper.run_dir
    with _logger(config, run_dir, resumed_at, loop, env) if ranks.rank == 0 else contextlib.nullcontext() as logger:
        if ranks.rank == 0:
            write_text(run_dir / "config.yaml", yaml.safe_dump(replace(config, resume=None).to_dict(), sort_keys=False))
        judge = Judge(
            config,
            run_dir,
            loop.agent,
            env,
            num_envs=ranks.share(config.num_envs, "num_envs"),
            device=device,
            compiler=_compiler(config),
        )
        begun()
        state, timing = _train(loop, state, config, keeper, logger, judge, ranks, wall_s, until)
    variables = loop.learner.acting(state.learner, state.iteration)
    if ranks.rank == 0:
        told = f"stopped in the final evaluation; what was trained is saved: torchpod eval {run_dir}"
        try:
            with StopFlag(ALONE, device, lambda: told, in_c=True):  # a signal stops it at once
                evaluation = judge.evaluate(variables, "the final evaluation")
            summary = summarise(config, evaluation, state, timing, device, ranks)
        except Interrupted:
            raise Interrupted(told) from None
        except HostError as error:
            error.add_note(f"What was trained is saved; evaluate it with torchpod eval {run_dir}")
            raise
        write_text(run_dir / "summary.json", json.dumps(summary, indent=1))
        if config.population > 1:
            write_members(run_dir, config, loop.agent, state, summary, timing)
    else:
        summary = {}
    return Run(run_dir, summary, loop.agent, variables)


def make_loop(
    config: TrainConfig, env: Env, make: Callable[[], Agent], ranks: Ranks, device: torch.device
) -> Anakin | Sebulba:
    """The program of a run."""
    settings: dict[str, Any] = {
        "num_envs": ranks.share(config.num_envs, "num_envs"),
        "unroll_length": config.algo.unroll_length,
        "learner": config.algo.learner,
        "num_iterations": config.num_iterations,
        "compiler": _compiler(config),
        "ranks": ranks,
        "device": device,
        "replay": config.algo.replay,
    }
    if config.loop.name == "anakin":
        return Anakin(make, env, phases=config.logger.phases, **settings)
    return Sebulba(make, lambda: copy.copy(env), config=config.loop, actor_devices=_split(config)[0], **settings)


def reports(config: TrainConfig, loop: Anakin | Sebulba, state: RunState, *, until: int | None = None) -> Any:
    """What `anakin.train` or `sebulba.train` yields, with as many iterations per call as the run has."""
    run_loop: Callable[..., Any] = sebulba.train if isinstance(loop, Sebulba) else train
    calls = config.loop.iterations_per_call or (8 if loop.device.type == "cuda" and run_loop is train else 1)
    return run_loop(loop, state, until=until, iterations_per_call=calls)


def _train(
    loop: Anakin | Sebulba,
    state: RunState,
    config: TrainConfig,
    keeper: "_Keeper",
    logger: Logger | None,
    judge: Judge,
    ranks: Ranks,
    wall_s: float,
    until: int | None,
) -> tuple[RunState, Timing]:
    timing = Timing(wall_s, 0.0, 0, 0.0)
    previous, stopping, evaluating = int(state.env_steps.sum()), False, False

    def given_up() -> str:
        if keeper.saved_at is None:
            return "stopped without a checkpoint"
        which = "in the middle of the next" if ranks.world_size == 1 else "the last that all ranks have saved"
        return f"stopped at iteration {keeper.saved_at}, {which}; go on with resume={keeper.run_dir}"

    def failed(error: Exception) -> LearnerError:
        number = int(state.iteration.flatten()[0])
        what = f"the evaluation after iteration {number}" if evaluating else f"iteration {number + 1}"
        return LearnerError(f"{what} failed: {sentence(error)}")

    def evaluated(failure: Callable[[], Exception | None] = lambda: None) -> None:
        """Evaluates, and writes a row, if it is time; raises what fails in the loop meanwhile."""
        nonlocal evaluating
        iteration = int(state.iteration.flatten()[0])
        if logger is not None and judge.is_due(iteration):
            evaluating = True
            found = judge.row(loop.learner.acting(state.learner, state.iteration), iteration, failure)
            logger.write({"iteration": iteration, "env_steps": state.env_steps.tolist(), **found})
            evaluating = False

    def learned() -> Iterator[Any]:
        """What the loop yields. An OSError of learning is none of the run's files, for which there may be no room."""
        try:
            yield from calls
        except OSError as error:
            if not timing.steps:  # of a setting, or of a compiler
                raise
            raise failed(error) from error

    with (
        StopFlag(ranks, loop.device, given_up) as stop,
        contextlib.closing(reports(config, loop, state, until=until)) as calls,
    ):
        try:
            if isinstance(loop, Sebulba):
                judge.prepare(loop.learner.acting(state.learner, state.iteration))  # no thread acts yet
            evaluated()  # of a resumed run, that was stopped before it was
            for report, program in learned():
                stop.pause()
                state, now = program.state, int(np.sum(report.env_steps))
                steps, previous = now - previous, now
                timing.compile_s += report.compile_s
                timing.wall_s += report.wall_s
                timing.steps += steps
                timing.seconds += report.wall_s
                if report.failure is not None:
                    keeper.dump(report.failure)
                if logger is not None:
                    logger.write(_row(report, steps, timing))
                is_last = report.iteration >= loop.num_iterations
                stopping, saving = stop.agree(is_last or keeper.due())
                if stopping or saving:
                    keeper.save(state, timing)
                if stopping:
                    break
                stop.watch()
                evaluated(program.failure) if isinstance(loop, Sebulba) else evaluated()
            # Asked again: a signal may have come while the last checkpoint was written.
            if stopping or stop.agree(False)[0]:
                raise Interrupted(f"stopped at iteration {keeper.saved_at}; go on with resume={keeper.run_dir}")
        except OverdueError:
            lost = keeper.rescue(state, timing)
            raise Interrupted(given_up() + (lost and f"; {lost}")) from None
        except NonFiniteError as error:
            lost, wrong = keeper.rescue(state, timing), _not_finite(error.trajectory.timestep)
            what = f"a gradient of iteration {error.iteration} is not finite"
            try:
                path = keeper.dump(error)
            except OSError as full:
                path, lost = "no file", lost or str(full)
            came_from = f"the trajectory it came from is in {path}."
            advice = "Lower algo.learner.learning_rate or algo.learner.max_grad_norm, or check what is learned from."
            env = loop.envs[0] if isinstance(loop, Sebulba) else loop.env
            if closed := closed_masks(env.spec, error.trajectory.timestep.observation):
                what = f"nothing can be learned from iteration {error.iteration}"
                advice = f"The cause is the environment's: {' '.join(closed)}"
            elif loop.replay:
                came_from = f"its rows came from replay; the newest trajectory is in {path}."
                wrong = wrong or _not_finite(loop.replay.buffer.storage)
            if wrong:
                advice = f"The environment gave numbers that are not finite: {', '.join(wrong)}."
            if keeper.saved_at is not None:
                advice += f" Iteration {keeper.saved_at}, before it, is saved in {keeper.run_dir}."
            raise NonFiniteErrorInRun(f"{what}; {came_from} {advice} {lost}".rstrip()) from error
        except Exception as error:
            failure = error
            if timing.steps and isinstance(error, ValueError | ImportError):  # the agent's, not that of a setting
                failure = failed(error)
            unread = isinstance(error, UnreadError)  # `torchpod train ... | tee FILE`, where tee has ended
            if unread or evaluating or (isinstance(loop, Sebulba) and not isinstance(error, OSError)):
                stop.pause()
                if lost := keeper.rescue(state, timing):
                    failure.add_note(lost)
            if keeper.saved_at is not None:
                failure.add_note(f"Iteration {keeper.saved_at} is saved; go on with resume={keeper.run_dir}")
            if failure is error:
                raise
            raise failure from error
    return pytree.tree_map(torch.clone, state), timing


def _not_finite(tree: Tree) -> list[str]:
    """Names of the leaves that hold NaN or infinity."""
    leaves = pytree.tree_flatten_with_path(tree)[0]
    return [pytree.keystr(path).lstrip(".") for path, x in leaves if x.is_floating_point() and not x.isfinite().all()]


class LearnerError(RuntimeError):
    """Learning failed in the middle of a run; the cause is the exception."""


class NonFiniteErrorInRun(FloatingPointError):
    """A gradient was not finite; the message names the folder with the trajectory."""


class _Keeper:
    """Writes checkpoints and crash dumps of one run."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        agent: Agent,
        ranks: Ranks,
        segments: Segments | None,
        saved_at: int | None,
    ) -> None:
        self._config, self.run_dir, self._ranks, self._segments = config.checkpoint, run_dir, ranks, segments
        self._agent, self.saved_at = agent, saved_at
        self._last_saved = time.perf_counter()

    def due(self) -> bool:
        # With ranks one at once: when one of them fails, the others cannot be asked to save any more.
        if self.saved_at is None and self._ranks.world_size > 1:
            return True
        return time.perf_counter() - self._last_saved >= self._config.interval_s

    def save(self, state: RunState, timing: Timing) -> None:
        meta, keep = {"wall_s": timing.wall_s}, self._config.keep
        folder = save_state(self.run_dir, self._agent, state, meta, self._ranks, keep, self._segments)
        self.saved_at = int(folder.name)
        self._last_saved = time.perf_counter()

    def rescue(self, state: RunState, timing: Timing) -> str:
        """Saves what is not saved after a failure; why it could not be, in words to add to those of the failure."""
        # Not with ranks: saving would wait for the others, which wait for this one.
        if not timing.steps or self._ranks.world_size > 1 or self.saved_at == int(state.iteration.flatten()[0]):
            return ""
        try:
            self.save(state, timing)
        except OSError as error:
            return str(error)
        return ""

    def dump(self, error: NonFiniteError) -> Path:
        path = self.run_dir / "nan" / f"iteration-{error.iteration}-rank-{self._ranks.rank}.pt"
        flat = {pytree.keystr(k): v.cpu() for k, v in pytree.tree_flatten_with_path(error.trajectory)[0]}
        with checkpoint.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_tensors(path, flat)
        return path


def _compiler(config: TrainConfig) -> Compiler:
    try:
        return Compiler(config.compile, config.population)
    except RuntimeError as error:  # there is no C++ compiler
        raise ConfigError(str(error)) from error


def _check_env(env: Env, config: TrainConfig, device: torch.device) -> None:
    """A short `check_env`: a third of a second, against hours of training on rewards that belong to other actions."""
    with _contract(f"env={config.env['name']}", "within 100 steps"):
        seen = watched(env, "the check of its first 100 steps", config.loop.timeout_s)
        where = device if env.traits.pure else "cpu"
        pools, inner = max(1, config.loop.num_actor_threads) * config.loop.pools_per_actor, env
        while isinstance(inner, Transform):
            inner = inner.env
        # Ours make all they need in `init`.
        several = pools > 1 or config.loop.split is not None or config.evaluation.every is not None
        copies = several and not type(inner).__module__.startswith("torchpod.")
        check_env(seen, num_envs=4, num_steps=100, device=where, compile=False, copies=copies)


def _check_agent(agent: Agent, env: Env, config: TrainConfig, device: torch.device) -> None:
    """A short `check_agent`."""
    name = type(agent).__name__ if config.algo.name in algos.MAKERS else config.algo.name
    length = max(min(config.algo.unroll_length, 64), agent.replayed)
    with _contract(f"algo={name}", "on its first trajectory"):
        seen = watched(env, "the check of the agent", config.loop.timeout_s)
        where = device if env.traits.pure else "cpu"
        check_agent(agent, seen, num_envs=4, unroll_length=length, device=where, quick=True)


@contextlib.contextmanager
def _contract(what: str, when: str) -> Iterator[None]:
    """Says in one sentence what a check has found."""
    try:
        yield
    except ContractError as error:
        raise ConfigError(f"{what} breaks the contract: {error}") from error
    except Exception as error:
        if isinstance(error, HostError) and error.__cause__ is None:  # it hangs
            raise
        cause = error.__cause__ if isinstance(error, HostError) and error.__cause__ else error
        raise ConfigError(f"{what} fails {when}: {sentence(cause)} TORCHPOD_TRACEBACK=1 shows where.") from cause


def _logger(config: TrainConfig, run_dir: Path, resumed_at: int, loop: Anakin | Sebulba, env: Env) -> Logger:
    sinks: list[Sink] = []
    try:
        if config.logger.csv:
            sinks.append(CsvSink(run_dir, resume_at=resumed_at))
        if config.logger.tensorboard:
            sinks.append(TensorBoardSink(run_dir, resume_at=resumed_at))
        if config.logger.wandb:
            sinks.append(WandbSink(run_dir, project=config.logger.wandb_project, config=config.to_dict()))
    except (ImportError, ValueError) as error:
        for sink in sinks:
            sink.close()
        raise ConfigError(str(error)) from error
    if config.logger.console:
        advice = None
        if isinstance(loop, Sebulba):
            learner = config.algo.learner
            advice = advise(
                env,
                lag=config.loop.lag,
                max_lag=loop.agent.max_lag,
                queue_size=config.loop.queue_size,
                actors=loop.num_actors,
                pools=loop.num_actors * config.loop.pools_per_actor,
                one_stands_still=loop.device.type == "cuda"
                and config.loop.pools_per_actor == 1
                and config.loop.num_actor_threads > 0
                and splits(env),
                num_epochs=learner.num_epochs,
                num_minibatches=learner.num_minibatches,
            )
        sinks.append(ConsoleSink(config.total_env_steps, config.num_iterations, advice=advice))
    return Logger(run_dir, sinks=sinks, resume_at=resumed_at)


def _row(report: Report, steps: int, timing: Timing) -> dict[str, Any]:
    metrics = {name: value.tolist() for name, value in report.metrics.items()}
    times = {"env_steps_per_s": steps / report.wall_s, "wall_s": timing.wall_s, "compile_s": timing.compile_s}
    return {"iteration": report.iteration, "env_steps": report.env_steps, **metrics, **times}


def _apply_members(state: RunState, config: TrainConfig) -> RunState:
    """Puts the per-member values of `members` into hyperparameters and learning rates."""
    learner = state.learner
    rates = {name if len(learner.learning_rate) > 1 else "learning_rate": name for name in learner.learning_rate}
    schedules = config.algo.learner.schedules or {}
    for name, values in config.members.items():
        scheduled = {"learning_rate", f"learning_rate.{rates[name]}"} if name in rates else {name}
        if scheduled & schedules.keys():
            raise ConfigError(f"members.{name} has a schedule, which is that of all members; leave one of them out.")
        if name in learner.buffers:
            table, key = learner.buffers, name
        elif name in rates:
            table, key = learner.learning_rate, rates[name]
        elif name in config.algo.agent:
            raise ConfigError(
                f"members.{name} is a setting of the agent, and cannot differ from member to member before its "
                f"constructor says self.hyperparameter({name!r}, config.{name})."
            )
        else:
            raise ConfigError(f"members.{name} is no setting; {nearest(name, [*learner.buffers, *rates])}")
        table[key] = torch.as_tensor(values, dtype=torch.float32, device=table[key].device)
        if config.population == 1:
            table[key] = table[key][0]
    return state
