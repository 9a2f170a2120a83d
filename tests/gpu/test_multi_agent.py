"""Games with groups of agents in CUDA graphs: by the rules written out, and learned from as without a graph.

Without a GPU the same code runs uncaptured, on games that are short.
"""

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.envs.multi_agent import test_covid_economy, test_tag_continuous, test_tag_gridworld
from torchpod.bench import gpu_checks
from torchpod.bench import multiagent_worker as worker
from torchpod.compile import Compiler
from torchpod.envs import CovidEconomy, TagGridWorld
from torchpod.graph import Replay
from torchpod.testing import check_consistency


class PlainCovid:
    """The oracle of the economy, as `check_consistency` wants it."""

    def __init__(self, days):
        self.days = days

    def reset(self, state):
        self.oracle = test_covid_economy.Oracle(self.days)
        return self.seen()

    def step(self, action):
        reward = self.oracle.step(action)
        return self.seen(), reward, False, self.oracle.t == self.days

    def seen(self):
        masks = self.oracle.masks()
        return {g: {"numbers": x, "action_mask": masks[g]} for g, x in self.oracle.observe().items()}


def tag_gridworld(full, long):
    env = TagGridWorld(grid_length=5, start="uniform", use_full_observation=full, max_episode_steps=40)
    return env, test_tag_gridworld.Oracle(env), 90


def tag_continuous(case, long):
    oracle = test_tag_continuous.Oracle(**test_tag_continuous.CASES[case], max_episode_steps=60 if long else 10)
    return oracle.tensors(), oracle, 125 if long else 12


def covid_economy(long):
    days = 540 if long else 30
    return CovidEconomy(days), PlainCovid(days), days + 2


GAMES = {
    "gridworld_full": functools.partial(tag_gridworld, True),
    "gridworld_partial": functools.partial(tag_gridworld, False),
    **{f"continuous_{case}": functools.partial(tag_continuous, case) for case in test_tag_continuous.CASES},
    "covid": covid_economy,
}


def play(game, seed, *, long, **how):
    env, oracle, num_steps = GAMES[game](long)
    how |= {"num_envs": 4, "num_steps": num_steps, "seed": seed}
    assert check_consistency(env, oracle, rtol=1e-7, atol=1e-6, reward_atol=1e-5, **how).num_episodes >= 4


@pytest.mark.parametrize("game", GAMES)
def test_the_rules_are_those_written_out(game, seed):
    play(game, seed, long=False, compile=False, capture=True)


@pytest.mark.gpu
@pytest.mark.parametrize("game", GAMES)
def test_the_rules_in_a_graph_are_those_written_out(game, seed):
    play(game, seed, long=True, compile=True, capture=True, device="cuda")


def learn(game, num_agents, num_envs, unroll_length, *, compiled, device):
    """An iteration of A2C compiled alone, beside the replayed program; and two of that twice, from one state."""
    compiler = Compiler(compiled)
    anakin = worker.build(
        game, num_agents, num_envs, mode="update", full=num_agents <= 5, compiler=compiler, device=device
    )
    anakin.unroll_length = unroll_length
    begun = anakin.init(0)
    alone, _ = anakin.iterate(pytree.tree_map(torch.clone, begun))
    first, second = (Replay(anakin.iterate, begun, capture=device == "cuda") for _ in range(2))
    first()
    assert gpu_checks.largest_difference(begun, alone) > 0
    assert gpu_checks.different(alone, first.state, floats=device == "cpu") == []
    assert gpu_checks.largest_difference(alone, first.state) <= gpu_checks.TOLERANCE
    for replay in (first, second, second):
        replay()
    assert gpu_checks.different(first.state, second.state) == []


SIZES = [("tag_gridworld", 5), ("tag_continuous", 30), ("covid_economy", 52)]


@pytest.mark.parametrize(("game", "num_agents"), SIZES)
def test_replayed_iterations_are_those_of_the_loop(game, num_agents):
    learn(game, num_agents, 3, 3, compiled=False, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("game", "num_agents"), SIZES)
def test_captured_iterations_are_the_compiled_ones_and_twice_the_same_bits(game, num_agents):
    learn(game, num_agents, 60, 20, compiled=True, device="cuda")
