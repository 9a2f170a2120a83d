"""Evaluates a run folder: the weights of its newest checkpoint, on fresh episodes."""

import json
from pathlib import Path

import torch

from torchpod import checkpoint, random
from torchpod.agent import variables_of
from torchpod.anakin import EVAL_STREAM
from torchpod.checkpoint import CheckpointError
from torchpod.compile import Compiler
from torchpod.evaluate import Evaluation, evaluate
from torchpod.makers import make_agent, make_env
from torchpod.run_folder import read_config
from torchpod.summary import eval_return, unfinished
from torchpod.video import check_video, record
from torchpod.watched import watched


def eval_run(
    run_dir: Path, *, episodes: int, seed: int | None = None, video: Path | None = None, member: int | None = None
) -> str:
    """A line of JSON; one line per member of a population.

    `{mean, iqm, ci95, episodes, unfinished_episodes, unfinished_steps, checkpoint}`: `ci95` is the 95 % bootstrap
    interval of the IQM; episodes that did not end were cut at `unfinished_steps`. With `video` a last line says what
    was written.

    Args:
      run_dir: the run folder.
      episodes: how many to play.
      seed: of the episodes; by default those of the final evaluation.
      video: a file for the first episode, .gif or .mp4.
      member: whose episode, in a population; by default that of the best.

    Raises:
      CheckpointError: if the folder is no run, or its checkpoint is damaged.
      HostError: if an environment on the host failed or does not come back.
      ValueError: if the video cannot be made.
      ImportError: if the extra for videos is not installed.
    """
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be at least 1.")
    config = read_config(run_dir)
    if member is not None and (video is None or not 0 <= member < config.population):
        range_ = f"must be from 0 to {config.population - 1}"
        raise ValueError(
            f"--member {member} {'chooses whose video is made; add --video' if video is None else range_}."
        )
    folder = checkpoint.latest(run_dir)
    weights = checkpoint.load_weights(folder)
    env = make_env(config.env)
    if video is not None:
        check_video(video, env)
    agent = make_agent(config.algo, env.spec)()
    lead = () if config.population == 1 else (config.population,)
    here = {name: (*lead, *x.shape) for table in variables_of(agent) for name, x in table.items()}
    if here != {name: tuple(x.shape) for name, x in weights.items()}:
        raise CheckpointError(f"{folder} does not fit the agent and the environment of {run_dir / 'config.yaml'}.")
    key = random.fold_in(random.key(config.seed if seed is None else seed), EVAL_STREAM)
    torch.set_num_threads(1)
    compiler = Compiler(False, config.population)
    env = watched(env, "the evaluation", config.loop.timeout_s)
    score = evaluate(agent, env, weights, key, num_episodes=episodes, compiler=compiler, num_envs=config.num_envs)
    lines = []
    for returns, lengths, finished in zip(*(x.reshape(-1, episodes) for x in score), strict=True):
        cut = unfinished(Evaluation(returns, lengths, finished))
        lines.append(json.dumps(eval_return(returns) | cut | {"checkpoint": folder.name}))
    if video is not None:
        if config.population > 1:
            member = int(score.returns.mean(-1).argmax()) if member is None else member
            weights = {name: x[member] for name, x in weights.items()}
        made = record(video, agent, env, weights, key, num_episodes=episodes)
        lines.append(made + (f", member {member}" if config.population > 1 else ""))
    return "\n".join(lines)
