"""What the tests of ddpg, td3 and sac share: agents that are not almost linear, rows, and networks in NumPy."""

import numpy as np
import torch

from torchpod.agent import variables_of
from torchpod.specs import Array, Box, EnvSpec
from torchpod.types import Batch

CONTINUOUS = EnvSpec("continuous", Array((5,)), Box((2,), -3.0, 5.0))
ROWS = 40


def perturbed(make, seed):
    """An agent whose heads are not almost zero, as they are at the start; and targets that are not its parameters."""
    torch.manual_seed(seed)
    agent = make()
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    params, buffers = variables_of(agent)
    return agent, params, buffers, {k: v + 0.3 * torch.randn_like(v) for k, v in params.items()}


def rows_of(seed, rows=ROWS, **own):
    """Rows with weights that sum to 1, some of them 0, as `prepare` makes them.

    Args:
      seed: of all that is drawn.
      rows: how many.
      own: what the agent's rows have besides, by a function of a generator.
    """
    rng = np.random.default_rng(seed)
    weight = rng.random(rows) * (rng.random(rows) > 0.2)
    return {name: draw(rng) for name, draw in own.items()} | {
        "observation": rng.normal(size=(rows, 5)),
        "reward": rng.normal(size=rows),
        "discount": 0.9 * (rng.random(rows) > 0.2),
        "next_observation": rng.normal(size=(rows, 5)),
        "weight": weight / weight.sum(),
    }


def network(params, prefix, head, x):
    """A tanh network, in float64 NumPy."""
    p = {k: v.double().numpy() for k, v in params.items()}
    for i in (0, 2):
        x = np.tanh(x @ p[f"{prefix}.net.{i}.weight"].T + p[f"{prefix}.net.{i}.bias"])
    return x @ p[f"{head}.weight"].T + p[f"{head}.bias"]


def policy(params, observation):
    """The action of a deterministic policy, in [-1, 1]."""
    return np.tanh(network(params, "encoder", "policy", observation))


def critic(params, i, observation, action):
    """What critic i says."""
    x = np.concatenate([action, observation])  # in the order of their names: "action taken", "observation"
    return network(params, f"critics.{i}.encoder", f"critics.{i}.value", x)[0]


def to_batch(b):
    """Rows as a minibatch: floats of 32 bits, and integers as they are."""
    return Batch({k: torch.tensor(v).float() if v.dtype == np.float64 else torch.tensor(v) for k, v in b.items()})
