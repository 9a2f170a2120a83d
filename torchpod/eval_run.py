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
from torchpod.watched import watched


def eval_run(run_dir: Path, *, episodes: int, seed: int | None = None) -> str:
    """A line of JSON; one line per member of a population.

    `{mean, iqm, ci95, episodes, unfinished_episodes, unfinished_steps, checkpoint}`: `ci95` is the 95 % bootstrap
    interval of the IQM; episodes that did not end were cut at `unfinished_steps`.

    Raises:
      CheckpointError: if the folder is no run, or its checkpoint is damaged.
      HostError: if an environment on the host failed or does not come back.
    """
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be at least 1.")
    config = read_config(run_dir)
    folder = checkpoint.latest(run_dir)
    weights = checkpoint.load_weights(folder)
    env = make_env(config.env)
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
        member = unfinished(Evaluation(returns, lengths, finished))
        result = eval_return(returns) | member | {"checkpoint": folder.name}
        lines.append(json.dumps(result))
    return "\n".join(lines)
