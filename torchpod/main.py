"""The command line over the modules: `torchpod train | eval | export | plot | warmup | check | autoscale | ...`."""

import contextlib
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from torchpod import envs
from torchpod.arguments import Parser
from torchpod.checkpoint import CheckpointError
from torchpod.compile import CompileError, RecompilationError
from torchpod.compose import GROUPS, MAPPINGS, listed, load
from torchpod.config import ConfigError
from torchpod.distributed import RankError, SplitError
from torchpod.makers import check_arguments, find
from torchpod.run.execute import Run, execute
from torchpod.run.folder import resume_source, resumed_config
from torchpod.run.stop import Interrupted
from torchpod.run.summary import result_of
from torchpod.run.training import LearnerError, NonFiniteErrorInRun
from torchpod.sebulba import ActorError
from torchpod.watched import HostError, sentence

USAGE = """torchpod train [KEY=VALUE ...]    train a run, e.g. torchpod train env=pendulum seed=1 device=cuda;
                                  --help shows all settings of that run; --multirun KEY=a,b trains a run with each
torchpod eval RUN [--episodes N]  evaluate the newest checkpoint of a run folder; --video FILE draws an episode,
                                  --episode FILE.npz records it, --sample draws actions instead of the greedy ones,
                                  --instead random, or NAME=ACTION, plays that instead of what was trained,
                                  env.NAME=VALUE changes the environment
torchpod export RUN [--out FILE]  write the greedy policy as a program of torch.export, which needs no torchpod
torchpod plot RUN... [--out PNG]  draw learning curves; --metric NAME, of another metric than episode_return
torchpod warmup [KEY=VALUE ...]   compile all that a run with these settings needs, for the runs that follow
torchpod check ENV REFERENCE      compare an environment with one in plain Python: each a file.py:Class or module:Class
torchpod autoscale [KEY=VALUE ...]  the num_envs and minibatches that fit memory, and the fastest of them
torchpod list envs|algos|experiments|losses
torchpod doctor                   what works on this machine, and why not
torchpod bench SUITE [--json FILE] [--only NAME[,NAME]] [--quick]"""

EVERYDAY = (ValueError, OSError, ImportError)
"""Errors of Python's own whose message says what to do, an extra that is not installed among them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status.

    An error that a user can repair is printed as one sentence; TORCHPOD_TRACEBACK=1 shows where it came from.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:  # `torchpod train ... | tee FILE`: who reads was interrupted as well
            _drop_stdout()
        print(f"torchpod: {error if isinstance(error, Interrupted) else 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError as error:  # `torchpod list envs | head`
        _drop_stdout()
        if os.environ.get("TORCHPOD_TRACEBACK") == "1":
            raise
        if notes := getattr(error, "__notes__", ()):
            print(f"torchpod: stopped, for nobody reads what it prints. {' '.join(notes)}", file=sys.stderr)
        return 1
    except (CheckpointError, CompileError, RecompilationError, NonFiniteErrorInRun, RankError, *EVERYDAY) as error:
        if os.environ.get("TORCHPOD_TRACEBACK") == "1":
            raise
        _report(error)
        return 1
    except (ActorError, HostError, LearnerError) as error:
        if error.__cause__ is not None:  # of an environment or an agent, so that its author sees where
            traceback.print_exception(error.__cause__)
        _report(error)
        return 1


def _drop_stdout() -> None:
    """Or Python writes the rest at its end, and fails again."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception) -> None:
    """One sentence; where every rank has the same to say, rank 0 says it."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and isinstance(error, ConfigError | CheckpointError | SplitError | NonFiniteErrorInRun):
        time.sleep(10.0)  # torchrun ends all ranks when the first is gone: let rank 0 speak, if it has something to say
    if isinstance(error, RankError):
        print(f"torchpod: rank {rank} stops: {error}", file=sys.stderr)
    else:
        where = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        told = str(error) or sentence(error)
        if isinstance(error, OSError) and error.strerror is not None:  # Python's own
            repair = "use a folder that exists, that you may write to, and that has space"
            told = f"{error.filename or 'a file'}: {error.strerror}; {repair}."
        print(f"torchpod: error: {where}{told}{notes}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command == "train":
        return _train(rest)
    if command in COMMANDS:
        return COMMANDS[command](rest)
    raise ConfigError(f"torchpod {command} is no command; use train, {', '.join(COMMANDS)}.")


def _train(overrides: list[str]) -> int:
    settings = [x for x in overrides if x not in ("-h", "--help", "-m", "--multirun")]
    if {"-m", "--multirun"} & set(overrides):
        from torchpod.commands.multirun import combinations, multirun

        if {"-h", "--help"}.isdisjoint(overrides):
            return multirun(settings)
        settings = combinations(settings)[0]
    if {"-h", "--help"} & set(overrides):
        from torchpod.commands.explain import explained_settings

        config = load(settings)
        source = resume_source(config)
        shown = explained_settings(config if source is None else resumed_config(config, source))
        print("torchpod train [KEY=VALUE ...], where KEY is any of these, with dots: algo.learner.learning_rate=1e-3\n")
        print(shown)
        return 0
    config = load(overrides)
    run = execute(config)
    if run.summary:
        print(result_of(run.summary))
        if "best_member" in run.summary:
            if run.summary["unhealthy_members"]:
                why = "a gradient was not finite, or a mask allowed nothing"
                print(f"members {run.summary['unhealthy_members']} stopped learning: {why}")
            best = run.summary["best_member"]
            print(f"best member {best}: {run.dir / 'members' / str(best)}")
        least = config.num_envs * config.algo.unroll_length
        every = config.evaluation.every
        if every is not None and every > config.num_iterations * least:
            print(f"evaluation.every={every} is more than the run has steps: there was no evaluation before the last")
        if config.total_env_steps < least and config.resume is None:
            iteration = f"one iteration, num_envs x algo.unroll_length = {least:,} steps and resets"
            print(f"total_env_steps={config.total_env_steps} is less than {iteration}")
        print(f"run folder {run.dir}")
    return 0


def _eval(rest: list[str]) -> int:
    from torchpod.commands.eval_run import eval_run

    parser = Parser("torchpod eval")
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="env.NAME=VALUE",
        help="what is other in the environment, or env=ANOTHER",
    )
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the episodes; default: those of the final evaluation"
    )
    parser.add_argument("--video", type=Path, default=None, help="write the first episode to this .gif or .mp4")
    parser.add_argument("--episode", type=Path, default=None, help="write all that was in it to this .npz")
    parser.add_argument("--member", type=int, default=None, help="of a population, in both files; default: the best")
    parser.add_argument("--sample", action="store_true", help="draw actions as in training; default: the greedy ones")
    parser.add_argument(
        "--instead",
        action="append",
        default=[],
        metavar="[NAME=]random|ACTION",
        help="who plays how instead of what was trained, e.g. runner=random, 0 or =-0.5,1; once per group or policy",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:INDEX; of tensor environments and agent")
    options = parser.parse_intermixed_args(rest)
    _require_device("torchpod eval", options.device)
    line = eval_run(
        options.run,
        episodes=options.episodes,
        seed=options.seed,
        video=options.video,
        episode=options.episode,
        member=options.member,
        sample=options.sample,
        instead=options.instead,
        overrides=options.overrides,
        device=options.device,
    )
    print(line)
    return 0


def _require_device(command: str, device: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"{command}: --device {device} is not known; use cpu, cuda or cuda:INDEX.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{command}: --device {device} is not there ({reason}); use cpu.") from None


def _export(rest: list[str]) -> int:
    from torchpod.commands.export_run import export_run

    parser = Parser("torchpod export")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="a .pt2 file; default: policy.pt2 in the run folder")
    parser.add_argument("--member", type=int, default=None, help="of a population")
    options = parser.parse_args(rest)
    print(export_run(options.run, out=options.out, member=options.member))
    return 0


def _plot(rest: list[str]) -> int:
    from torchpod.commands.plot import plot

    parser = Parser("torchpod plot")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    parser.add_argument("--metric", default="episode_return", help="a key of metrics.jsonl")
    options = parser.parse_args(rest)
    print(plot(options.runs, options.out, options.metric))
    return 0


def _warmup(rest: list[str]) -> int:
    parser = Parser("torchpod warmup", description="Compiles all that a run needs, for the runs that follow.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the run, as for torchpod train")
    overrides = parser.parse_intermixed_args(rest).overrides
    with tempfile.TemporaryDirectory(prefix="torchpod-warmup-") as folder:
        silent = [f"logger.{sink}=false" for sink in ("console", "csv", "tensorboard", "wandb")]
        config = load([*overrides, f"run_dir={folder}/run", "evaluation.every=null", *silent])
        if config.resume is not None:
            raise ConfigError(f"torchpod warmup is for runs that begin; leave out resume={config.resume}.")
        began = time.perf_counter()
        execute(config, until=1)
    print(f"ready in {time.perf_counter() - began:.1f} s; runs with these settings begin from the compile cache")
    return 0


def _check(rest: list[str]) -> int:
    from torchpod.testing.consistency import FailedError, check_consistency

    parser = Parser("torchpod check")
    parser.add_argument("env", help="a name of `torchpod list envs`, my_env.py:MyEnv or my_module:MyEnv")
    parser.add_argument("reference", help="my_reference.py:MyReference or my_module:MyReference")
    parser.add_argument("arguments", nargs="*", default=[], metavar="NAME=VALUE", help="of both constructors")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=None, help="default: past the time limit twice, at most 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rtol", type=float, default=1e-5)
    parser.add_argument("--atol", type=float, default=1e-6)
    parser.add_argument("--compile", action="store_true", help="compare the compiled step")
    parser.add_argument("--capture", action="store_true", help="step in static buffers; on a GPU a CUDA graph")
    parser.add_argument("--device", default="cpu", help="of the tensor environment: cpu, cuda or cuda:INDEX")
    options = parser.parse_intermixed_args(rest)
    _require_device("torchpod check", options.device)
    for each in options.arguments:
        if "=" not in each:
            raise ConfigError(f"torchpod check: {each} is no NAME=VALUE; use e.g. {each}=5.")
    arguments: Any = OmegaConf.to_container(OmegaConf.from_dotlist(options.arguments))
    made = []
    for what, name, makers in (("env", options.env, envs.MAKERS), ("reference", options.reference, {})):
        if what == "reference" and not (":" in name or name.endswith(".py")):
            raise ConfigError(f"reference={name} names no class; give one as file.py:Class or module:Class.")
        maker = find(name, makers, what)
        check_arguments(maker, arguments, f"{what}={name}")
        try:
            made.append(maker(**arguments))
        except Exception as error:
            given = f" with {arguments}" if arguments else ""
            raise ConfigError(
                f"{what}={name} cannot be made{given}: {sentence(error)} TORCHPOD_TRACEBACK=1 shows where."
            ) from error
    try:
        report = check_consistency(
            *made,
            num_envs=options.num_envs,
            num_steps=options.steps,
            seed=options.seed,
            rtol=options.rtol,
            atol=options.atol,
            compile=options.compile,
            capture=options.capture,
            device=options.device,
        )
    except FailedError as error:
        who = f"{error.who}={options.env if error.who == 'env' else options.reference}"
        raise ConfigError(f"{who} {error.what} TORCHPOD_TRACEBACK=1 shows where.") from error
    print(
        f"{options.env} does what {options.reference} does: {report.num_steps:,} steps, {report.num_episodes:,} "
        f"episodes, largest difference {report.largest:.2g}"
    )
    return 0


def _autoscale(rest: list[str]) -> int:
    from torchpod.commands import autoscale

    return autoscale.main(rest)


def _list(rest: list[str]) -> int:
    groups = {"envs": "env", "algos": "algo", "experiments": "experiment", "losses": "loss"}
    parser = Parser("torchpod list", description="Prints one choice a line, with what it is.")
    parser.add_argument("what", nargs="*", metavar="|".join(groups))
    rest = parser.parse_args(rest).what
    if len(rest) != 1 or rest[0] not in groups:
        raise ConfigError(f"torchpod list takes one of {', '.join(groups)}.")
    if rest[0] == "losses":
        from torchpod.commands import losses

        return losses.main()
    from torchpod.commands.explain import explained_choices

    print(explained_choices(groups[rest[0]]))
    return 0


def _doctor(rest: list[str]) -> int:
    from torchpod.commands.doctor import doctor

    Parser("torchpod doctor", description="Says what works on this machine, and why not.").parse_args(rest)
    return doctor()


def _bench(rest: list[str]) -> int:
    from torchpod import bench

    return bench.main(rest)


COMMANDS: dict[str, Any] = {
    "eval": _eval,
    "export": _export,
    "plot": _plot,
    "warmup": _warmup,
    "check": _check,
    "autoscale": _autoscale,
    "list": _list,
    "doctor": _doctor,
    "bench": _bench,
}


def train(**settings: Any) -> Run:
    """Trains a run from Python: `train(algo="ppo", env="cartpole", seed=0, num_envs=64)`.

    Args:
      **settings: the keys of configs/train.yaml; nested ones as dicts: `checkpoint={"keep": 1}`. `env` may be an
        environment object, or a dict with `name` and arguments; `init_from` may be a run; `algo` and `env` may name a
        class in a file, as in "my_agent.py:MyAgent". `overrides` is a list in the grammar of the command line, e.g.
        `["algo.learner.learning_rate=1e-3"]`.

    Returns:
      The finished run.
    """
    overrides = listed(settings.pop("overrides", ()))
    env = settings.pop("env", None)
    if isinstance(env, str | Mapping):
        named = {"name": env} if isinstance(env, str) else dict(env)
        overrides.append(f"env={named.pop('name', None)}")
        overrides += [f"++env.{name}={_written(value)}" for name, value in named.items()]
        env = None
    return execute(load(overrides + [line for key, value in settings.items() for line in _lines(key, value)]), env=env)


def _lines(key: str, value: Any) -> list[str]:
    """A setting from Python as overrides of the command line; a run is its folder."""
    value = value.dir if isinstance(value, Run) else value
    if isinstance(value, Mapping) and key not in MAPPINGS:
        return [line for name, inner in value.items() for line in _lines(f"{key}.{name}", inner)]
    added = "+" if key.startswith("members.") else ""
    return [f"{added}{key}={value if key in GROUPS and isinstance(value, str | Path) else _written(value)}"]


def _written(value: Any) -> str:
    """A Python value, an array or a tensor in the grammar of the command line."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str | Path):
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # else OmegaConf looks for another setting's value
        return "'" + re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", "\\'") + "'"  # as Hydra unquotes
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
