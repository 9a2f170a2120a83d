from typing import ClassVar

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.compile import Compiler
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import TagGridWorld
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.transforms import RewardClip
from torchpod.evaluate import Evaluation, evaluate
from torchpod.recording import record_episode
from torchpod.rollout import make_step, start
from torchpod.run.summary import eval_returns
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import FIRST, LAST


def play(agent, env, variables, key, episode, num_episodes, max_steps):
    """One episode in a Python loop: the sum of raw rewards up to game over, and the number of transitions."""
    keys = random.split(key, 2)
    own = [random.split(k, num_episodes)[episode : episode + 1] for k in keys]
    carry, step = start(agent, env, own[0]), make_step(agent, env, explore=False)
    total, length = 0.0, 0
    with torch.no_grad():
        while length < max_steps:
            carry, _ = step(variables, carry, *own)
            raw = carry.timestep.extras["raw_reward"]
            total += sum(float(leaf.mean()) for leaf in pytree.tree_leaves(raw))
            length += int(carry.timestep.step_type) != FIRST
            if carry.timestep.extras["game_over"]:
                return total, length, True
    return total, length, False


def make(env, seed, **config):
    torch.manual_seed(seed)
    agent = PPO(env.spec, PPOConfig(hidden=(8,), **config))
    with torch.no_grad():
        agent.policy.weight.normal_()
    params, buffers = variables_of(agent)
    return agent, params | buffers


class Lives(TensorEnv):
    """Lasts 3 to 8 steps, twice: only each second end is the end of the game. Rewards are clipped for the agent."""

    spec = EnvSpec("lives", observation=Array((2,)), action=Discrete(2))

    def reset(self, keys):
        words = random.bits(keys, 2)
        return {"left": 3 + words[..., 0] % 6, "prize": words[..., 1] % 100}

    def transition(self, state, action, keys):
        left = state["left"] - 1
        return {"left": left, "prize": state["prize"]}, (state["prize"] + action).float(), left <= 0

    def observe(self, state):
        return torch.stack([state["left"], state["prize"]], -1).float()

    def init(self, keys):
        state, timestep = super().init(keys)
        life = torch.zeros_like(timestep.step_type)
        return (state, life), timestep

    def step(self, state, action, keys):
        inner, life = state
        inner, timestep = super().step(inner, action, keys)
        life = life + (timestep.step_type == LAST)
        over = (timestep.step_type == LAST) & (life % 2 == 0)
        extras = {"raw_reward": timestep.reward, "game_over": over}
        return (inner, life), timestep._replace(reward=timestep.reward.clamp(-1, 1), extras=extras)


@pytest.mark.parametrize("recurrent", [0, 4])
def test_cartpole_episodes_equal_a_loop_over_single_ones(seed, recurrent):
    env, num = CartPole(max_episode_steps=40), 5
    agent, variables = make(env, seed, recurrent=recurrent)
    result = evaluate(agent, env, variables, random.key(seed), num_episodes=num)
    for i in range(num):
        total, length, finished = play(agent, env, variables, random.key(seed), i, num, 40)
        assert (result.returns[i], result.lengths[i], result.finished[i]) == (total, length, finished)
    assert result.finished.all() and result.lengths.max() <= 40


def test_raw_rewards_count_up_to_game_over_and_not_to_the_end_of_a_life(seed):
    env, num = Lives(), 12
    agent, variables = make(env, seed)
    result = evaluate(agent, env, variables, random.key(seed), num_episodes=num)
    for i in range(num):
        total, length, finished = play(agent, env, variables, random.key(seed), i, num, 100)
        assert (result.returns[i], result.lengths[i], result.finished[i]) == (total, length, finished)
    assert (result.lengths >= 2 * 3).all() and result.returns.max() > 20  # two lives


def test_episodes_that_do_not_end_in_time_are_marked(seed):
    env, num = Lives(), 16
    agent, variables = make(env, seed)
    result = evaluate(agent, env, variables, random.key(seed), num_episodes=num, max_steps=9)
    for i in range(num):
        total, length, finished = play(agent, env, variables, random.key(seed), i, num, 9)
        assert (result.returns[i], result.lengths[i], result.finished[i]) == (total, length, finished)
    lengths = result.lengths[~result.finished]
    assert len(lengths) and (lengths == 9).all()  # the reset between two lives is none of them


def test_a_game_that_ends_at_its_limit_ends_however_many_lives_it_took(seed):
    class Limited(Lives):
        """Over after 14 steps too, in whatever life."""

        spec = EnvSpec("limited", Array((2,)), Discrete(2), max_episode_steps=14)

        def init(self, keys):
            state, timestep = super().init(keys)
            return (state, torch.zeros_like(timestep.step_type)), timestep

        def step(self, state, action, keys):
            inner, steps = state
            inner, timestep = super().step(inner, action, keys)
            steps = steps + (timestep.step_type != FIRST)
            over = steps == 14
            step_type = torch.where(over, LAST, timestep.step_type)
            return (inner, steps), timestep._replace(
                step_type=step_type, extras=timestep.extras | {"game_over": over & (step_type == LAST)}
            )

    env = Limited()
    agent, variables = make(env, seed)
    for each in (env, HostEnv(env)):
        result = evaluate(agent, each, variables, random.key(seed), num_episodes=8)
        assert result.finished.all() and (result.lengths == 14).all()
    recording = record_episode(agent, env, variables, random.key(seed), num_episodes=8)
    step_type = recording.timestep.step_type.flatten()
    assert (step_type[1:] != FIRST).sum() == 14 and recording.timestep.extras["game_over"][-1] and len(step_type) > 15
    assert float(recording.rewards.sum()) == pytest.approx(float(result.returns[0]))


def test_policies_that_are_no_group_and_what_the_environment_says(seed):
    env, num, steps = TagGridWorld(num_taggers=3, grid_length=3, start="uniform", max_episode_steps=6), 16, 4
    config = IPPOConfig(hidden=(8,), policies={"runner": ["runner"], "one": [2], "two": [1, 0]})
    agent = IPPO(env.spec, config)
    params, buffers = variables_of(agent)
    key = random.key(seed)
    result = evaluate(agent, env, params | buffers, key, num_episodes=num, max_steps=steps, explore=True)
    assert [*result.teams] == ["one", "two"] and [*result.episode] == ["tag_rate"]
    torch.testing.assert_close((result.teams["one"] + 2 * result.teams["two"]) / 3, result.groups["tagger"])
    keys = [random.split(k, num) for k in random.split(key, 2)]
    carry, step = start(agent, env, keys[0]), make_step(agent, env)
    of_one, tagged, over = torch.zeros(num), torch.zeros(num), torch.zeros(num, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(steps):
            carry, _ = step(params | buffers, carry, *keys)
            reward, ended = carry.timestep.reward["tagger"][:, 2], carry.timestep.step_type == LAST
            of_one += torch.where(over, 0, reward)
            tagged += (~over & ended & (reward > 5)).float()
            over |= ended
    assert over.any() and not over.all() and torch.equal(result.finished, over)
    assert torch.equal(result.teams["one"], of_one) and torch.equal(result.episode["tag_rate"], tagged)
    assert eval_returns(result)["episode"]["tag_rate"] == pytest.approx(float(tagged.sum() / over.sum()))


class Crowd(HostEnv):
    """Notes how many environments there are at once."""

    sizes: ClassVar = []

    def init(self, keys):
        self.sizes.append(len(keys))
        return super().init(keys)


def same(one: Evaluation, other: Evaluation) -> bool:
    return all(torch.equal(*pair) for pair in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True))


def test_episodes_on_the_host_are_played_in_rounds_of_at_most_num_envs(seed):
    agent, variables = make(Lives(), seed)
    whole = evaluate(agent, Lives(), variables, random.key(seed), num_episodes=7)
    parts = evaluate(agent, Crowd(Lives()), variables, random.key(seed), num_episodes=7, num_envs=3)
    assert Crowd.sizes == [3, 3, 1]
    assert same(whole, parts)


class Fours(HostEnv):
    """Four rows each."""

    rows_each = 4

    def init(self, keys):
        assert len(keys) % 4 == 0
        return super().init(keys)


@pytest.mark.parametrize(
    ("num_episodes", "num_envs", "sizes"),
    [(10, 8, [8, 4]), (10, 7, [4, 4, 4]), (3, 2, [4]), (8, 8, [8]), (10, None, [12])],
)
def test_environments_of_several_rows_are_played_whole_and_what_is_too_much_does_not_count(
    num_episodes, num_envs, sizes, seed
):
    class Noted(Fours, Crowd):
        sizes: ClassVar = []

    agent, variables = make(Lives(), seed)
    env, key = RewardClip(Noted(Lives())), random.key(seed)
    whole = evaluate(agent, Lives(), variables, key, num_episodes=num_episodes)
    parts = evaluate(agent, env, variables, key, num_episodes=num_episodes, num_envs=num_envs)
    assert Noted.sizes == sizes
    assert same(whole, parts)


def test_evaluation_repeats_with_its_key_and_ignores_the_global_generator(seed):
    env = CartPole(max_episode_steps=60)
    agent, variables = make(env, seed)
    before = torch.get_rng_state()
    one, two, other = (evaluate(agent, env, variables, random.key(k), num_episodes=8) for k in (seed, seed, seed + 1))
    assert same(one, two)
    assert not torch.equal(one.lengths, other.lengths) or one.lengths.unique().numel() == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_member_of_a_population_plays_as_it_does_alone(seed):
    env = CartPole(max_episode_steps=30)
    agent, _ = make(env, seed)
    members = [make(env, seed + i)[1] for i in range(3)]
    stacked = {k: torch.stack([m[k] for m in members]) for k in members[0]}
    compiler = Compiler(enabled=False, population=3)
    together = evaluate(agent, env, stacked, random.key(seed), num_episodes=6, compiler=compiler)
    for i, variables in enumerate(members):
        alone = evaluate(agent, env, variables, random.key(seed), num_episodes=6)
        assert same(pytree.tree_map(lambda x, i=i: x[i], together), alone)
