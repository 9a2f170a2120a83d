"""A run folder, loaded or evaluated: the weights of its newest checkpoint, on fresh episodes."""

import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from torchpod import checkpoint, random
from torchpod.agent import Agent, Variables, variables_of
from torchpod.anakin import EVAL_STREAM
from torchpod.arguments import require_writable
from torchpod.checkpoint import CheckpointError
from torchpod.commands.scripted import scripted
from torchpod.compile import Compiler
from torchpod.compose import changed_env
from torchpod.config import ConfigError, TrainConfig
from torchpod.env import Env
from torchpod.evaluate import evaluate
from torchpod.learner import Learner, LearnerState
from torchpod.makers import make_agent, make_env
from torchpod.metrics import finite
from torchpod.recording import check_recording, record_episode, save_recording
from torchpod.replay.learning import iterations_before
from torchpod.run.execute import Run
from torchpod.run.folder import changed_sources, read_config
from torchpod.run.summary import each, eval_returns, unfinished
from torchpod.specs import EnvSpec
from torchpod.video import check_video, record
from torchpod.watched import close_all, watched


def load(run_dir: Path | str, *, env: Env | None = None) -> Run:
    """A run as `train` returned it, on the CPU, at its newest checkpoint; its summary is empty before it is finished.

    The member p of a finished population is `load("RUN/members/p")`.

    Args:
      run_dir: the run folder.
      env: of a run that was trained with an object, once more.

    Raises:
      CheckpointError: if the folder is no run, or its checkpoint is damaged or does not fit.
      ConfigError: if its agent or environment cannot be made.
    """
    run_dir = Path(run_dir)
    config, folder = read_config(run_dir), checkpoint.latest(run_dir)
    weights = checkpoint.load_weights(folder)
    if changed := changed_sources(checkpoint.read_meta(folder), config):
        told = f"{run_dir} was trained with other {', '.join(changed)}, and is loaded with what is there now."
        warnings.warn(told, stacklevel=2)
    made = make_env(config.env) if env is None else env
    try:
        agent, weights = restored(run_dir, config, made.spec, weights, folder)
    finally:
        if env is None:
            close_all([made])
    summary = run_dir / "summary.json"
    return Run(run_dir, json.loads(summary.read_text()) if summary.is_file() else {}, agent, weights)


def eval_run(
    run_dir: Path | str,
    *,
    episodes: int,
    seed: int | None = None,
    video: Path | None = None,
    episode: Path | None = None,
    member: int | None = None,
    sample: bool = False,
    instead: Sequence[str] = (),
    overrides: Sequence[str] = (),
    device: str = "cpu",
    env: Env | None = None,
) -> str:
    """A line of JSON; one line per member of a population. It acts with what training acts with after the checkpoint.

    `{mean, iqm, ci95, episodes, unfinished_episodes, unfinished_steps, checkpoint}`, in a population after `member`:
    `ci95` is the 95 % bootstrap interval of the IQM; episodes that did not end were cut at `unfinished_steps`. In an
    environment with groups the return is the sum of those of their mean agents, and `groups` has the first four for
    each, `policies` for each policy that is no group. `episode` has means of what the environment says of episodes
    that ended. With `episode` and `video` last lines say what was written.

    Args:
      run_dir: the run folder.
      episodes: how many to play.
      seed: of the episodes; by default those of the final evaluation.
      video: a file for a drawing of the first episode, .gif or .mp4.
      episode: a file for all that was in the first episode, .npz: see recording.py.
      member: whose episode, in a population; by default that of the best.
      sample: draw actions as in training, instead of the greedy ones.
      instead: who plays how instead of what was trained: `random`, an action, or `NAME=` one of these, of a group or
        a policy (scripted.py).
      overrides: what is other in the environment than in training, `["env.max_episode_steps=100"]`, or another
        environment, `["env=my_env.py:MyEnv"]`; with the same observations and actions.
      device: on which agent and tensor environments are; those on the host have the CPU.
      env: an environment object instead; it is closed in the end.

    Raises:
      CheckpointError: if the folder is no run, or its checkpoint is damaged or does not fit the environment.
      ConfigError: if there is no such environment or setting of it.
      HostError: if an environment on the host failed or does not come back.
      ValueError: if the video or the episode cannot be made, nobody can play so, or memory does not suffice.
      ImportError: if the extra for videos is not installed.
    """
    run_dir = Path(run_dir)
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be at least 1.")
    config = read_config(run_dir)
    if member is not None and video is None and episode is None:
        raise ValueError(f"--member {member} chooses whose episode is written; add --video or --episode.")
    if member is not None and not 0 <= member < config.population:
        raise ValueError(f"--member {member} must be from 0 to {config.population - 1}.")
    if env is not None and overrides:
        raise ValueError(f"{' '.join(overrides)} would change nothing of an environment that is given; leave one out.")
    if episode is not None:
        check_recording(episode)
    folder = checkpoint.latest(run_dir)
    weights = checkpoint.load_weights(folder)
    if changed := changed_sources(checkpoint.read_meta(folder), config):
        told = f"{run_dir} was trained with other {', '.join(changed)}, and is evaluated with what is there now."
        print(f"torchpod eval: {told}", file=sys.stderr)
    env = make_env(changed_env(config.env, overrides)) if env is None else env
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if video is not None:
            check_video(video, env)
            require_writable("--video", video)
        if episode is not None:
            require_writable("--episode", episode)
        agent, weights = restored(run_dir, config, env.spec, weights, folder, overrides)
        if instead:
            agent, weights = scripted(agent, env.spec, instead), {f"agent.{name}": x for name, x in weights.items()}
        where = torch.device(device if env.traits.pure else "cpu")
        agent, weights = agent.to(where), {name: x.to(where) for name, x in weights.items()}
        key = random.fold_in(random.key(config.evaluation_seed if seed is None else seed, where), EVAL_STREAM)
        compiler = Compiler(False, config.population)
        env = watched(env, "the evaluation", config.loop.timeout_s)
        try:
            score = evaluate(
                agent,
                env,
                weights,
                key,
                num_episodes=episodes,
                compiler=compiler,
                num_envs=config.num_envs,
                explore=sample,
            )
        except (RuntimeError, OverflowError) as error:
            # On a CPU it is no error of its own.
            on_cpu = re.search("can't allocate memory|size calculation overflowed", str(error))
            if on_cpu or isinstance(error, torch.OutOfMemoryError | OverflowError):
                raise ValueError(f"--episodes {episodes} are too many for the memory of {where}; use fewer.") from error
            raise
        told = [eval_returns(own) | unfinished(own) | {"checkpoint": folder.name} for own in each(score)]
        if config.population > 1:
            told = [{"member": i} | own for i, own in enumerate(told)]
        lines = [json.dumps(finite(line)) for line in told]
        if video is not None or episode is not None:
            if config.population > 1:
                member = int(score.returns.mean(-1).argmax()) if member is None else member
                weights = {name: x[member] for name, x in weights.items()}
            recording = record_episode(agent, env, weights, key, num_episodes=episodes, explore=sample)
            made = [] if episode is None else [save_recording(episode, env, recording)]
            made += [] if video is None else [record(video, env, recording)]
            lines += [line + (f", member {member}" if config.population > 1 else "") for line in made]
        return "\n".join(lines)
    finally:
        torch.set_num_threads(threads)
        close_all([env])


def restored(
    run_dir: Path, config: TrainConfig, spec: EnvSpec, weights: Variables, folder: Path, overrides: Sequence[str] = ()
) -> tuple[Agent, Variables]:
    """The agent of a run, and what it acts with, of the weights in `folder`.

    Raises:
      CheckpointError: if they are not those of the agent, in this environment, which is changed by `overrides`.
      ConfigError: if the settings are not the agent's.
    """
    try:
        agent = make_agent(config.algo, spec)()
    except ConfigError as error:
        error.add_note(f"The settings are those of {run_dir / 'config.yaml'}.")
        raise
    lead = () if config.population == 1 else (config.population,)
    here = {name: (*lead, *x.shape) for table in variables_of(agent) for name, x in table.items()}
    there = {name: tuple(x.shape) for name, x in weights.items()}
    if differ := [name for name in here | there if here.get(name) != there.get(name)]:
        had, has = (list(shapes[differ[0]]) if differ[0] in shapes else "missing" for shapes in (there, here))
        where = f"the agent and the environment of {run_dir / 'config.yaml'}"
        repair = "that file or a class of yours may have changed since: use the old one"
        if overrides:
            where = f"the environment with {' '.join(overrides)}"
            repair = "it must have the observations and actions of the run's"
        raise CheckpointError(f"{folder} does not fit {where}: {differ[0]} is {had} there and {has} here; {repair}.")
    return agent, acting_weights(config, agent, weights, int(folder.name))


def acting_weights(config: TrainConfig, agent: Agent, weights: Variables, iteration: int) -> Variables:
    """What a run acts with in an iteration: its weights, with hyperparameters as annealing and schedules have them.

    Args:
      config: of the run.
      agent: that of the run.
      weights: of the checkpoint before that iteration; with a leading P axis in a population.
      iteration: the number of the checkpoint.
    """
    parts, length = config.loop.updates_per_batch, config.algo.unroll_length
    before = iterations_before(agent, config.algo.replay, num_envs=config.num_envs, unroll_length=length)
    learner = Learner(
        agent,
        config.algo.learner,
        num_iterations=config.num_iterations * parts,
        iterations_before=before,
        steps_per_iteration=config.num_envs * length // parts,
    )
    updates = max(0, iteration - before) * parts
    lead = () if config.population == 1 else (config.population,)
    number, num_steps = (
        torch.full(lead, n)
        for n in (iteration, updates * config.algo.learner.num_epochs * config.algo.learner.num_minibatches)
    )
    params, buffers = ({name: weights[name] for name in table} for table in variables_of(agent))
    healthy = torch.ones(lead, dtype=torch.bool)
    state = LearnerState(params, buffers, {}, {}, {}, {}, num_steps, {}, healthy)
    return learner.acting(state, number)
