"""`torchpod list losses`: what the installed TorchRL's losses do in a compiled update, found out by tracing each.

For a CPU: tracing for CUDA needs one.
"""

import itertools
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.torchrl import CONTINUOUS, LOSSES, MULTI_AGENT, TorchRLConfig, torchrl_agent
from torchpod.env import Env
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld
from torchpod.interop.unfit import UNSUPPORTED
from torchpod.kernels.inductor import trace, where
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start, unroll


class Verdict(NamedTuple):
    """On one loss."""

    loss: str
    verdict: str
    """compiles whole, falls back, by hand, or unsupported."""
    why: str = ""


def env_for(name: str) -> Env:
    """A small task for a loss: CartPole; Pendulum for continuous actions, a game of tag for groups of agents."""
    if name in MULTI_AGENT:
        return TagGridWorld(num_taggers=2, grid_length=4)
    return Pendulum() if name in CONTINUOUS else CartPole()


def others() -> Iterator[Verdict]:
    """On the losses of the installed TorchRL that have no name here."""
    from torchrl import objectives

    by_hand = "there are no networks for it by name; build it for LossAgent, which tells whether it fits"
    found = {name for name, x in vars(objectives).items() if name.endswith("Loss") and isinstance(x, type)}
    for name in sorted(found - LOSSES.keys()):
        yield Verdict(name, "unsupported" if name in UNSUPPORTED else "by hand", UNSUPPORTED.get(name, by_hand))


def verdicts() -> Iterator[Verdict]:
    """One per loss that has a name here, with small networks."""
    for name in sorted(LOSSES):
        env = env_for(name)
        try:
            agent = torchrl_agent(env.spec, TorchRLConfig(name, hidden=(16,)))
        except Exception as error:
            yield Verdict(name, "unsupported", str(error))
            continue
        learner = Learner(agent, LearnerConfig(), num_iterations=1)
        state = learner.init(*variables_of(agent))
        keys = random.split(random.key(0), 4)
        with torch.no_grad():
            steps = unroll(
                make_step(agent, env), state.params | state.buffers, start(agent, env, keys), keys, keys, length=4
            )
            batch = agent.prepare(steps[1], keys)
        batch = batch._replace(steps=pytree.tree_map(lambda x: x.flatten(0, 1), batch.steps))
        number = torch.zeros((), dtype=torch.int64)
        arguments = state.params, state.buffers, state.targets, batch, keys[0], number, ()
        try:
            learner._gradient_one(*arguments)
        except Exception as error:
            yield Verdict(name, "unsupported", where(error))
            continue
        try:
            trace(learner._gradient_one, arguments)
            yield Verdict(name, "compiles whole")
        except Exception as error:
            yield Verdict(name, "falls back", where(error))


def main() -> int:
    """Prints the table."""
    import torchrl

    print(f"torchrl {torchrl.__version__}, traced for a CPU (CUDA may differ: docs/torchrl-losses.md): an update with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loss, verdict, why in itertools.chain(verdicts(), others()):
            reason = re.sub(r".*site-packages/", "", why)
            told = [f"loss={loss}"] * (verdict in ("compiles whole", "falls back")) + [reason] * bool(reason)
            print(f"{loss:24s}{verdict:16s}{'; '.join(told)}")
    return 0
