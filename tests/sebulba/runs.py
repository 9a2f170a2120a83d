"""Small runs of Sebulba that tests share."""

import copy
import itertools
import random as python_random
import threading
import time

import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent
from torchpod.compile import Compiler
from torchpod.env import HostEnv, make_timestep
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import LearnerConfig
from torchpod.sebulba import Sebulba, SebulbaConfig, train
from torchpod.specs import HOST, Array, Discrete, EnvSpec

T, B = 8, 4
LEARNER = LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=1e-2)
LOCKSTEP = SebulbaConfig(num_actor_threads=1, lag=0)
AGENTS = {
    "ppo": lambda spec: PPO(spec, PPOConfig(hidden=(8,))),
    "a2c": lambda spec: A2C(spec, A2CConfig(hidden=(8,))),
    "a2c_gru": lambda spec: A2C(spec, A2CConfig(hidden=(8,), recurrent=6)),
    "impala": lambda spec: IMPALA(spec, IMPALAConfig(hidden=(8,))),
    "lstm": lambda spec: IMPALA(spec, IMPALAConfig(hidden=(8,), recurrent=6, cell="lstm")),
    "gru": lambda spec: PPO(
        spec, PPOConfig(hidden=(8,), recurrent=6, normalize_reward=True, normalize_observation=True)
    ),
    "torchrl": lambda spec: torchrl_agent(spec, TorchRLConfig("KLPENPPOLoss", hidden=(8,))),
}


def make(config=LOCKSTEP, agent="ppo", env=None, iterations=50, compiled=False, num_envs=B, **settings):
    env = env or CartPole(max_episode_steps=7)
    return Sebulba(
        lambda: AGENTS[agent](env.spec),
        lambda: copy.copy(env),
        num_envs=num_envs,
        unroll_length=T,
        num_iterations=iterations,
        compiler=Compiler(enabled=compiled),
        config=config,
        **({"learner": LEARNER} | settings),
    )


def run(sebulba, state, until=None, sleep_s=0.0):
    """The last state, and the metrics of all iterations. The learner sleeps up to `sleep_s` between two of them."""
    history = []
    for report, program in train(sebulba, state, until=until):
        history.append(report.metrics)
        state = program.state
        time.sleep(python_random.random() * sleep_s)
    return state, history


def assert_equal(a, b, **tolerance):
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, equal_nan=True, **tolerance), a, b)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchpod-actor")]


class InParts(HostEnv):
    """Stepped between `send` and `recv`, so that an unroll may begin early, with keys of its own."""

    def init(self, keys):
        self.keys, self.count = keys, 0
        return super().init(keys)

    def step(self, state, action, keys):
        self.send(action)
        return None, self.recv()

    def send(self, action):
        self.action, self.count = action.clone(), self.count + 1

    def recv(self):
        time.sleep(1e-4)
        return super().step(None, self.action, random.at(self.keys, torch.tensor(self.count)))[1]


class Apart:
    """Of one endless episode, stepped between `send` and `recv`; every observation is the number of the pool."""

    spec, traits = EnvSpec("apart", observation=Array((1,)), action=Discrete(2)), HOST

    def __init__(self, happened):
        self.happened, self.number = happened, itertools.count()

    def init(self, keys):
        self.number, self.size = next(self.number), keys.shape[0]  # the counter is of all copies
        return None, self.timestep(torch.ones(self.size, dtype=torch.bool))

    def step(self, state, action, keys):
        self.send(action)
        return None, self.recv()

    def send(self, action):
        self.happened.append(("send", self.number))

    def recv(self):
        self.happened.append(("recv", self.number))
        return self.timestep(torch.zeros(self.size, dtype=torch.bool))

    def timestep(self, reset):
        no = torch.zeros_like(reset)
        observation = torch.full((self.size, 1), float(self.number))
        return make_timestep(observation, torch.ones(self.size), reset=reset, terminated=no, truncated=no)
