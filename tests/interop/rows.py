"""Rows of CartPole and Pendulum as our agents of TorchRL losses get them, and as a TorchRL user has them."""

import torch
import torchrl
import torchrl.objectives
from tensordict import TensorDict
from torch.utils import _pytree as pytree
from torchrl.data import Bounded
from torchrl.modules import PopArtValueNorm, RunningValueNorm
from torchrl.objectives import MAPPOLoss, SACLoss

from tests.interop.actors import SPEC, categorical, critic, gaussian, q_critic
from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.torchrl import CONTINUOUS, LOSSES, MULTI_AGENT, OFF_POLICY, TorchRLConfig, parts, torchrl_agent
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.interop.torchrl import LossAgent
from torchpod.learner import LearnerConfig
from torchpod.rollout import make_step, start, unroll
from torchpod.types import LAST, Batch

T, B = 8, 8
SAC_V1 = "SACLoss, first version"
NORMS = {
    "PopArtValueNorm": lambda: PopArtValueNorm(shape=1, beta=0.9),
    "RunningValueNorm": lambda: RunningValueNorm(shape=1),
}
THERE = sorted(name for name in LOSSES.keys() - MULTI_AGENT if hasattr(torchrl.objectives, name))


def env_for(name, **own):  # losses for groups of agents have tests of their own, in tests/algos
    return Pendulum(**own) if name in {*CONTINUOUS, SAC_V1} else CartPole(**own)


def config(name, **arguments):
    return TorchRLConfig(name, arguments, hidden=(16,), normalize_advantage=False, discount=0.97, target_rate=0.1)


def mappo(norm="PopArtValueNorm"):
    """Actor, and a loss with running statistics of value targets."""
    actor = categorical()
    return actor, MAPPOLoss(actor, critic(), value_norm=NORMS[norm](), normalize_advantage=False)


def mappo_agent(norm="PopArtValueNorm"):
    return LossAgent(*mappo(norm), spec=SPEC)


def sac_v1():
    """Actor and loss of SAC's first version, with a network of values of states, for the pendulum."""
    actor = gaussian(1, 3, distribution_kwargs={"low": -2.0, "high": 2.0})
    action = Bounded(-2.0, 2.0, (1,))
    return actor, SACLoss(actor, q_critic(4), critic(inputs=3), action_spec=action, delay_value=True)


OWN = {
    "MAPPOLoss": (mappo, mappo_agent),
    SAC_V1: (sac_v1, lambda: LossAgent(*sac_v1(), spec=Pendulum().spec, target_rate=0.1)),
}
"""What is not made by name."""


@torch.no_grad()
def collect(agent, env, seed, length=T):
    env_keys, actor_keys = (random.split(random.key(seed + i), B) for i in range(2))
    params, buffers = variables_of(agent)
    carry = start(agent, env, env_keys)
    return unroll(make_step(agent, env), params | buffers, carry, env_keys, actor_keys, length=length)[1]


def ended(trajectory):
    """In float64, with episodes that end in the last step, which follows no reset: every other one by itself."""
    timestep = trajectory.timestep
    assert (timestep.step_type[:-1] != LAST).all() and (timestep.step_type[-1] == LAST).all()
    discount = timestep.discount.clone()
    discount[-1] = torch.arange(B) % 2
    trajectory = trajectory._replace(timestep=timestep._replace(discount=discount))
    return pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, trajectory)


def single(trajectory):
    return pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, trajectory)


@torch.no_grad()
def batch_of(agent, trajectory, seed):
    """What the learner makes of a trajectory: rows, with weights that sum to 1."""
    keys = random.split(random.key(seed), B)
    steps = pytree.tree_map(lambda x: x.flatten(0, 1), agent.prepare(trajectory, keys).steps)
    steps["weight"] = steps["weight"] / steps["weight"].sum()
    return Batch(steps)


def in_torchrls_words(trajectory, batch):
    """The same rows as a TorchRL user has them, written anew."""
    t, steps = trajectory.timestep, batch.steps
    last = t.step_type[1:] == LAST
    rows = {
        "observation": t.observation[:-1],
        "action": trajectory.output.action,
        **trajectory.output.extras,
        "next": {
            "observation": t.observation[1:],
            "reward": t.reward[1:, :, None],
            "done": last[..., None],
            "terminated": (last & (t.discount[1:] == 0))[..., None],
        },
    }
    data = TensorDict(pytree.tree_map(lambda x: x.flatten(0, 1), rows), batch_size=[T * B])
    for name in ("advantage", "value_target", "state_value"):
        if name in steps:
            data[name] = steps[name][:, None]
    return data


def of_both(name, env, seed, **arguments):
    """Our agent, and a loss of TorchRL's with the same numbers."""
    torch.manual_seed(seed)
    with torch.random.fork_rng():
        agent = OWN[name][1]() if name in OWN else torchrl_agent(env.spec, config(name, **arguments))
    torch.manual_seed(seed)  # and again, for a loss of its own
    actor, loss = OWN[name][0]() if name in OWN else parts(env.spec, config(name, **arguments))
    if name in OFF_POLICY and name != "DistributionalDQNLoss":
        loss.make_value_estimator(gamma=0.97)
    if name == "IPPOLoss":  # TorchRL's default is per agent
        loss.normalize_advantage = False
    return agent, loss


def anakin(make, env, compiled=False, population=1, iterations=100, num_envs=32, **learner):
    return Anakin(
        make,
        env,
        num_envs=num_envs,
        unroll_length=32,
        num_iterations=iterations,
        learner=LearnerConfig(**learner),
        compiler=Compiler(compiled, population),
    )
