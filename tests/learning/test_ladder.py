"""Agents on the smallest tasks there are: the first that one fails says what is wrong with it (testing/probes.py)."""

import pytest
import torch
from torch import Tensor

from tests.marks import with_slow
from torchpod import random
from torchpod.agent import Agent, bind
from torchpod.algos.ddpg import DDPG, DDPGConfig
from torchpod.algos.dqn import C51, DQN, QRDQN, C51Config, DQNConfig, QRDQNConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.sac import SACConfig, sac_agent
from torchpod.algos.td3 import TD3, TD3Config
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.rollout import start
from torchpod.specs import Box, EnvSpec
from torchpod.testing.probes import LADDER

OF_VALUES = {"hidden": (32,), "discount": 0.9, "target_rate": 0.05}
OF_DQN = {**OF_VALUES, "target_interval": 1, "epsilon": 0.2, "exploration_fraction": 0.2, "reward_clip": 10.0}
VALUES = {
    "dqn": lambda spec: DQN(spec, DQNConfig(**OF_DQN)),
    "c51": lambda spec: C51(spec, C51Config(**OF_DQN, low=-3.0, high=3.0, num_atoms=25)),
    "qr_dqn": lambda spec: QRDQN(spec, QRDQNConfig(**OF_DQN, num_quantiles=8)),
}
DISCRETE = {
    **VALUES,
    "discrete_sac": lambda spec: sac_agent(spec, SACConfig(**OF_VALUES)),
    "dqn_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("DQNLoss", hidden=(32,), epsilon=0.2)),
    "discrete_sac_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("DiscreteSACLoss", hidden=(32,))),
}
CONTINUOUS = {
    "ddpg": lambda spec: DDPG(spec, DDPGConfig(**OF_VALUES)),
    "ddpg_ou": lambda spec: DDPG(spec, DDPGConfig(**OF_VALUES, noise="ou")),
    "td3": lambda spec: TD3(spec, TD3Config(**OF_VALUES)),
    "sac": lambda spec: sac_agent(spec, SACConfig(**OF_VALUES)),
    "sac_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("SACLoss", hidden=(32,))),
    "ddpg_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("DDPGLoss", hidden=(32,), noise=0.3)),
}


class Mirror(TensorEnv):
    """One step, reward -(action - observation)^2: the probe of continuous actions."""

    spec = EnvSpec("mirror", Box((1,), -1.0, 1.0), Box((1,), -1.0, 1.0))

    def reset(self, keys: Tensor) -> Tensor:
        return 2 * random.uniform(keys, 1) - 1

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return state, -(action - state).square().squeeze(-1), torch.ones_like(state[:, 0], dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        return state


def trained(make, env, **settings) -> tuple[Agent, dict[str, Tensor]]:
    """An agent, and what it has learned."""
    anakin = Anakin(lambda: make(env.spec), env, compiler=Compiler(False), **settings)
    *_, (_, program) = train(anakin, anakin.init(0))
    return anakin.agent, program.state.learner.params | program.state.learner.buffers


def trained_from_replay(make, env) -> tuple[Agent, dict[str, Tensor]]:
    """400 updates of 64 rows."""
    return trained(
        make,
        env,
        num_envs=16,
        unroll_length=8,
        learner=LearnerConfig(learning_rate=1e-2, num_epochs=1, num_minibatches=8, anneal_learning_rate=False),
        num_iterations=52,
        replay=ReplayConfig(capacity=4096, batch_size=64, min_size=256),
    )


def decided(env, agent, variables, observations: Tensor):
    """What it does there, greedily."""
    carry = start(agent, env, random.split(random.key(5), len(observations)))
    timestep = carry.timestep._replace(observation=observations)
    return bind(agent, variables).act(
        timestep, carry.actor_state, random.split(random.key(6), len(observations)), False
    )[0]


@pytest.mark.parametrize("probe", LADDER)
def test_ppo_climbs_the_ladder(probe):
    env = LADDER[probe]()
    config = PPOConfig(hidden=(32,), entropy_coefficient=0.0, discount=0.9)
    learner = LearnerConfig(learning_rate=1e-2, num_epochs=4, num_minibatches=2)
    settings = {"num_envs": 32, "unroll_length": 16, "learner": learner, "num_iterations": 60}
    agent, variables = trained(lambda spec: PPO(spec, config), env, **settings)
    output = decided(env, agent, variables, torch.tensor(env.observations)[:, None])
    values = output.extras["state_value"]
    assert torch.allclose(values, torch.tensor(env.values(0.9)), atol=0.1), values
    if env.best_actions is not None:
        assert output.action.tolist() == list(env.best_actions)


@pytest.mark.parametrize(
    ("name", "probe"),
    with_slow(
        [*(("dqn", probe) for probe in LADDER), *((x, "observation_action_reward") for x in DISCRETE if x != "dqn")],
        [("discrete_sac_loss", "observation_action_reward")],
    ),
)
def test_agents_of_discrete_actions_climb_it_from_replay(name, probe):
    env = LADDER[probe]()
    agent, variables = trained_from_replay(DISCRETE[name], env)
    observations = torch.tensor(env.observations)[:, None]
    if name in VALUES:
        policy = bind(agent, variables)
        best = policy("values", policy("outputs_of", observations)).amax(-1)
        assert torch.allclose(best, torch.tensor(env.values(0.9)), atol=0.1), best
    if env.best_actions is not None:
        assert decided(env, agent, variables, observations).action.tolist() == list(env.best_actions)


@pytest.mark.parametrize("name", with_slow(CONTINUOUS, ["sac_loss"]))
def test_agents_of_continuous_actions_do_what_they_observe(name):
    env = Mirror()
    agent, variables = trained_from_replay(CONTINUOUS[name], env)
    observations = torch.linspace(-0.8, 0.8, 9)[:, None]
    action = decided(env, agent, variables, observations).action
    assert (action - observations).abs().max() < 0.3, action  # 0.8 for one that does the same everywhere
