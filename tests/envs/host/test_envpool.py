"""EnvPool behind the contract: every family, and above all where episodes end."""

import copy
import os
import re
import signal
import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.marks import with_slow
from torchpod import random
from torchpod.actions import random_action
from torchpod.agent import Agent, variables_of
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.envs.host import EnvPool
from torchpod.envs.host.batches import handed_over
from torchpod.envs.transforms import action_repeat, time_limit
from torchpod.evaluate import evaluate
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, MultiDiscrete
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID, ActorOutput, TimeStep

envpool = pytest.importorskip("envpool", reason="the extra `envpool` is not installed", exc_type=ImportError)
registration = pytest.importorskip("envpool.registration")

FAMILIES = {
    "atari": ("Pong-v5", 60),
    "box2d": ("LunarLander-v3", 300),
    "classic_control": ("CartPole-v1", 502),
    "gfootball": ("gfootball/academy_empty_goal_close-v1", 40),
    "highway": ("Highway-v0", 42),
    "jumanji": ("Tetris-v0", 60),
    "minigrid": ("MiniGrid-Empty-5x5-v0", 102),
    "mujoco.dmc": ("QuadrupedWalk-v1", 10),
    "mujoco.gym": ("Ant-v5", 80),
    "mujoco.metaworld": ("MetaWorld/Reach-v3", 10),
    "mujoco.myosuite": ("MyoHandCubelargePass-v0", 77),
    "mujoco.playground": ("Go1JoystickFlatTerrain-v1", 40),
    "mujoco.robotics": ("FetchReach-v4", 52),
    "pgx": ("Play2048-v1", 60),
    "procgen": ("BigfishEasy-v0", 60),
    "toy_text": ("FrozenLake-v1", 102),
    "vizdoom": ("D1Basic-v1", 20),
}
"""One id per family, and how many steps to play: past the time limit where that is quick."""

OTHERS = {
    "Pendulum-v1": 202,  # bounds of -2 and 2
    "CarRacing-v3": 10,  # bounds that differ from entry to entry
    "LqrLqr21-v1": 20,  # no bounds
    "FrankaKitchen-v1": 5,  # nested dicts
    "TSP-v1": 60,  # an observation that is -1 at first; nothing allowed at the end
    "RubiksCube-v0": 20,  # several integers
    "SearchAndRescue-v0": 10,  # a matrix as action
    "Cleaner-v0": 30,  # several integers with a mask of each
    "Connector-v2": 60,  # ten integers
    "JobShop-v0": 30,
    "LevelBasedForaging-v0": 30,
    "MMST-v0": 30,
    "MultiCVRP-v0": 30,
    "RobotWarehouse-v0": 30,
    "Catch-v0": 30,  # no time limit
    "MiniGrid-FourRooms-v0": 202,
    "D3Battle-v1": 10,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """ViZDoom writes files into the working directory."""
    monkeypatch.chdir(tmp_path)


def keys(num, seed=0):
    return random.split(random.key(seed), num)


MANY_PLAYERS = {
    "AnimalShogi-v1": 60,
    "Backgammon-v1": 40,
    "Chess-v1": 20,
    "ChineseGo9x9-v1": 60,
    "ConnectFour-v1": 60,
    "GardnerChess-v1": 20,
    "Go9x9-v1": 60,
    "Hex-v1": 60,
    "IntersectionMultiAgent-v1": 40,
    "KuhnPoker-v1": 20,
    "LeducHoldem-v1": 20,
    "Othello-v1": 60,
    "Shogi-v1": 20,
    "SparrowMahjong-v1": 60,
    "TicTacToe-v1": 30,
}
"""One id of every game, and how many steps to play."""


def draw(num_envs, num_actions, step, seed=0):
    uniform = random.uniform(random.at(keys(num_envs, seed), step), 1)[:, 0]
    return (uniform * num_actions).long()


def play(env, num_envs, num_steps, *, seed=0):
    """Timesteps from `init` on, under random actions."""
    seen = [env.init(keys(num_envs, seed))[1]]
    for i in range(num_steps):
        seen.append(env.step(None, draw(num_envs, env.spec.action.num_values, i, seed), keys(num_envs))[1])
    return seen


def pool_of(env):
    """EnvPool's own object."""
    return env.batches[0]._batches._pool


def column(timesteps, pick):
    return torch.stack([pick(t) for t in timesteps])


def episodes(timesteps, row):
    """Of one environment: (index, discount, game_over) of every LAST."""
    last = [(i, t) for i, t in enumerate(timesteps) if t.step_type[row] == LAST]
    return [(i, t.discount[row].item(), t.extras["game_over"][row].item()) for i, t in last]


def test_every_family_is_listed():
    known = {path.removeprefix("envpool.") for path, *_ in registration.registry.specs.values()}
    assert known == set(FAMILIES), "write one id of each family of this version of EnvPool into FAMILIES"


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"vizdoom"}))
def test_every_family_keeps_the_contract(family):
    name, num_steps = FAMILIES[family]
    try:
        env = EnvPool(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    check_env(env, num_envs=2, num_steps=num_steps)


def test_vizdoom_keeps_the_contract(tmp_path):
    """In a process of its own: EnvPool and the one that ViZDoom starts have waited for each other forever, once."""
    name, num_steps = FAMILIES["vizdoom"]
    code = (
        "from torchpod.envs.host import EnvPool\n"
        "from torchpod.testing import check_env\n"
        f"check_env(EnvPool({name!r}), num_envs=2, num_steps={num_steps})\n"
        "print('kept')"
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            out, error = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            print("it hung as it started; once more")
            continue
        assert out.splitlines()[-1:] == ["kept"], error
        return
    raise AssertionError("it hung three times as it started")


@pytest.mark.parametrize("name", OTHERS)
def test_all_kinds_of_spaces_keep_the_contract(name):
    check_env(EnvPool(name), num_envs=2, num_steps=OTHERS[name])


LIMITED = [
    *(FAMILIES[family][0] for family in sorted(FAMILIES.keys() - {"highway", "jumanji", "pgx", "procgen", "toy_text"})),
    "BabyAI-BossLevel-v0",  # no limit by default
    "NChain-v0",
    "Sokoban-v0",
]
"""One id per family that keeps `max_episode_steps`, and those of families that mostly do not."""


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_ends_an_episode_in_its_very_step(name):
    env = EnvPool(name, max_episode_steps=4)
    assert env.spec.max_episode_steps == time_limit(EnvPool(name), 4).spec.max_episode_steps == 4
    _, timestep = env.init(keys(2))
    seen = [timestep]
    for i in range(5):
        action = random_action(env.spec, seen[-1].observation, random.at(keys(2), i))
        seen.append(env.step(None, action, keys(2))[1])
    env.close()
    assert column(seen, lambda t: t.step_type).T.tolist() == [[FIRST, MID, MID, MID, LAST, FIRST]] * 2
    assert (seen[4].discount == 1).all()


@pytest.mark.parametrize(
    ("name", "repair"),
    [
        ("BigfishEasy-v0", "leave both out"),
        ("Blackjack-v1", "leave both out"),
        ("Catch-v0", "leave both out"),
        ("CliffWalking-v1", "leave both out"),
        ("Highway-v0", "set duration, which is the limit over policy_frequency"),
        ("Jumanji/Snake-v1", "leave both out"),
        ("LaneKeeping-v0", "leave both out"),
        ("TicTacToe-v1", "leave both out"),
    ],
)
def test_a_limit_that_envpool_does_not_look_at_is_refused(name, repair):
    message = f"does not look at max_episode_steps for {name}, so that neither it nor time_limit .* episode; {repair}"
    with pytest.raises(ValueError, match=message):
        EnvPool(name, max_episode_steps=4)
    if name != "BigfishEasy-v0":  # its spec needs a library of the system
        with pytest.raises(ValueError, match=message):
            time_limit(EnvPool(name), 4)


def test_the_limit_of_a_road_is_its_duration():
    env = EnvPool("Parking-v0", duration=2)
    assert env.spec.max_episode_steps == 10
    env.init(keys(2))
    seen = [env.step(None, torch.zeros(2, 2), keys(2))[1] for _ in range(10)]
    assert seen[-2].step_type.tolist() == [MID] * 2
    assert seen[-1].step_type.tolist() == [LAST] * 2 and (seen[-1].discount == 1).all()


def test_a_true_end_after_a_limit_that_is_not_kept_is_a_termination():
    """An action that is not allowed is a step in which nothing moves."""
    env = EnvPool("Game2048-v1")
    assert EnvPool("LaneKeeping-v0").spec.max_episode_steps is env.spec.max_episode_steps is None
    _, timestep = env.init(keys(1))
    steps = 0
    while timestep.step_type[0] != LAST and steps < 5_000:
        mask = timestep.observation["action_mask"].int()
        waits = steps < 1_000 and not mask.all()
        _, timestep = env.step(None, (mask.argmin(-1) if waits else mask.argmax(-1)), keys(1))
        steps += 1
    assert 1_000 < steps < 5_000 and timestep.discount[0] == 0


def test_a_goal_in_the_step_before_the_limit_is_a_termination():
    name = FAMILIES["gfootball"][0]
    length = episodes(play(EnvPool(name), 1, 300), 0)[0][0]
    for limit, end in ((length + 1, (length, 0.0, True)), (length - 1, (length - 1, 1.0, True))):
        assert episodes(play(EnvPool(name, max_episode_steps=limit), 1, length), 0)[:1] == [end]


def test_a_repeated_action_adds_up_the_rewards_of_an_episode(seed):
    env = EnvPool("MsPacman-v5")
    repeated = action_repeat(env, 3)
    env.init(keys(2, seed))
    repeated.init(keys(2, seed))
    total = torch.zeros(2)
    for step in range(400):
        action, reward, ended = draw(2, 9, step, seed), torch.zeros(2), torch.zeros(2, dtype=torch.bool)
        for _ in range(3):
            _, timestep = env.step(None, action, keys(2))
            reward += torch.where(ended, 0, timestep.reward)
            ended |= timestep.step_type == LAST
        _, timestep = repeated.step(None, action, keys(2))
        assert torch.equal(timestep.reward, reward) and torch.equal(timestep.step_type == LAST, ended)
        total += reward
        if ended.any():
            break
    assert ended.any() and (total > 100).all()


@pytest.mark.parametrize("name", ["CartPole-v1", "D1Basic-v1", "FetchReach-v4", "HalfCheetah-v4", "WalkerWalk-v1"])
def test_actions_are_not_repeated_where_envpool_computes_one_reward(name):
    message = (
        f"EnvPool adds up rewards of a repeated action in Atari alone, not in {name}; leave out action_repeat, or use"
    )
    with pytest.raises(ValueError, match=message):
        action_repeat(EnvPool(name), 3)


@pytest.mark.parametrize(("limit", "discount"), [(500, 0.0), (5, 1.0)])
def test_termination_has_discount_0_and_truncation_1(limit, discount):
    seen = play(EnvPool("CartPole-v1", max_episode_steps=limit), 4, 60)
    step_type = column(seen, lambda t: t.step_type)
    is_last, is_first = step_type == LAST, step_type == FIRST
    assert is_last.sum() >= 4
    assert torch.equal(is_first[1:], is_last[:-1])
    assert (column(seen, lambda t: t.discount) == torch.where(is_last, discount, 1.0)).all()
    assert torch.equal(column(seen, lambda t: t.reward), (~is_first).float())
    assert torch.equal(column(seen, lambda t: t.extras["game_over"]), is_last)
    # The observation at LAST is the final one, that at FIRST of the new episode.
    x, _, angle, _ = column(seen, lambda t: t.observation).unbind(-1)
    fallen = (angle.abs() > 0.2094) | (x.abs() > 2.4)
    assert fallen[is_last].all() == (discount == 0)
    assert not fallen[~is_last].any()
    assert (angle[is_first].abs() <= 0.05).all()
    if discount:
        assert column(seen, lambda t: t.step_type)[:7].T.tolist() == [[FIRST, MID, MID, MID, MID, LAST, FIRST]] * 4


def test_cartpole_is_that_of_gymnasium():
    """From the same state and under the same actions, to the end of the episode."""
    reference = gymnasium.make("CartPole-v1").unwrapped
    seen = play(EnvPool("CartPole-v1"), 4, 80)
    for row in range(4):
        reference.reset()
        reference.state = seen[0].observation[row].double().numpy()
        for i, t in enumerate(seen[1:]):
            observation, reward, terminated, _, _ = reference.step(draw(4, 2, i)[row].item())
            np.testing.assert_allclose(t.observation[row], observation, rtol=1e-4, atol=1e-4)
            assert (t.reward[row], t.discount[row]) == (reward, not terminated)
            if terminated:
                break
        assert terminated


def test_keys_decide_the_episodes_and_threads_do_not(seed):
    def observations(key_seed, **options):
        return column(play(EnvPool("CartPole-v1", **options), 3, 60, seed=key_seed), lambda t: t.observation)

    first = observations(seed)
    assert torch.equal(first, observations(seed, num_threads=2))
    assert not torch.equal(first, observations(seed + 1))
    assert len({tuple(row) for row in first[0].tolist()}) == 3


def test_init_begins_again():
    env = EnvPool("CartPole-v1")
    a, b = play(env, 3, 30), play(env, 3, 30)
    assert torch.equal(a[-1].observation, b[-1].observation)
    assert env.init(keys(5))[1].observation.shape == (5, 4)


def test_a_lost_life_ends_an_episode_but_not_the_game():
    seen = play(EnvPool("Breakout-v5", episodic_life=True), 2, 250)
    for row in range(2):
        ends = episodes(seen, row)
        assert [over for *_, over in ends[:5]] == [False] * 4 + [True]
        assert [discount for _, discount, _ in ends] == [0.0] * len(ends)
    whole = [i for i, *_ in episodes(play(EnvPool("Breakout-v5"), 2, 250), 0)]
    assert 1 <= len(whole) < len(episodes(seen, 0))


def test_the_true_end_at_the_time_limit_is_a_termination():
    free = play(EnvPool("Breakout-v5"), 2, 400)
    length = episodes(free, 0)[0][0]
    for limit, discount in ((length, 0.0), (length - 1, 1.0)):
        seen = play(EnvPool("Breakout-v5", max_episode_steps=limit), 2, limit)
        assert episodes(seen, 0) == [(limit, discount, True)]


def test_raw_reward_is_what_it_was_before_clipping():
    seen = play(EnvPool("MsPacman-v5", reward_clip=True), 2, 60)
    raw, reward = (column(seen, pick) for pick in (lambda t: t.extras["raw_reward"], lambda t: t.reward))
    assert raw.max() >= 10
    assert torch.equal(reward, raw.sign())


class ByTheFrame(Agent):
    """Acts by the sum of the frames that it sees."""

    def act(self, timestep, state, keys, explore=True):
        return ActorOutput(timestep.observation.sum((1, 2, 3)) % 9, {}), state


def test_an_evaluation_sums_raw_rewards_of_all_lives(monkeypatch):
    """Beside a plain loop on an equal pool, with EnvPool's own words for both."""
    options, make = [], envpool.make_gymnasium
    monkeypatch.setattr(envpool, "make_gymnasium", lambda *args, **given: options.append(given) or make(*args, **given))
    env = EnvPool("MsPacman-v5", episodic_life=True, reward_clip=True, max_episode_steps=2_000)
    found = evaluate(ByTheFrame(), env, {}, random.key(3), num_episodes=2)
    env.close()
    monkeypatch.undo()
    pool = envpool.make_gymnasium("MsPacman-v5", **options[-1])
    observation, _ = pool.reset()
    returns, lives_lost, over = np.zeros(2), np.zeros(2), np.zeros(2, bool)
    while not over.all():
        observation, reward, terminated, truncated, info = pool.step(observation.sum((1, 2, 3)) % 9)
        returns += np.where(over, 0, info["reward"])
        lives_lost += (terminated | truncated) & ~over
        over |= info["terminated"].astype(bool)
    assert found.finished.all() and found.returns.tolist() == returns.tolist()
    assert (returns > 100).all() and (lives_lost > 1).all()  # clipped, it would be a tenth of it, and of one life


def test_options_reach_envpool():
    env = EnvPool("Pong-v5", stack_num=2, img_height=42, img_width=40, max_episode_steps=9)
    assert env.spec.observation == Array((42, 40, 2), torch.uint8)
    assert env.spec.max_episode_steps == 9
    check_env(env, num_envs=2)


@pytest.mark.parametrize("task", ["CartPole-v1", "Pong-v5"])
def test_observations_are_not_copied_and_stay_valid(task, monkeypatch):
    env = EnvPool(task)
    env.init(keys(2))
    pool = pool_of(env)
    recv, given = pool.recv, []

    def spy():
        output = recv()
        given.append(output[0].ctypes.data)
        return output

    monkeypatch.setattr(pool, "recv", spy)
    held = [env.step(None, draw(2, 2, i), keys(2))[1].observation for i in range(20)]
    copies = [x.clone() for x in held]
    assert [x.data_ptr() for x in held] == given
    assert len(set(given)) == 20
    monkeypatch.undo()
    env.close()
    play(EnvPool("Pong-v5"), 2, 20)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("name", MANY_PLAYERS)
def test_games_of_several_players_keep_the_contract(name):
    env = EnvPool(name)
    assert env.spec.groups == {"player": 3 if "Mahjong" in name else 2}
    check_env(env, num_envs=3, num_steps=MANY_PLAYERS[name])


def test_every_game_of_several_players_is_listed():
    def of(name):
        return re.sub(r"\d+x\d+", "9x9", name)

    found = set()
    for name in envpool.list_all_envs():
        if registration.registry.specs[name][0] in ("envpool.pgx", "envpool.highway"):
            found |= {of(name)} if envpool.make_spec(name).config.max_num_players > 1 else set()
    known = {"IntersectionMultiAgent-v0", "intersection-multi-agent-v0", "intersection-multi-agent-v1", *MANY_PLAYERS}
    assert found == known


def test_players_take_turns_and_see_the_board_from_their_side():
    """Two players of TicTacToe put their stones into the first free cell, until one has a diagonal in the 7th step."""
    env = EnvPool("TicTacToe-v1")
    seen = [env.init(keys(2))[1]]
    for _ in range(8):
        mask = seen[-1].observation["player"]["action_mask"]
        seen.append(env.step(None, {"player": mask.int().argmax(-1)}, keys(2))[1])
    masks = column(seen, lambda t: t.observation["player"]["action_mask"])  # [T, B, N, A]
    board = column(seen, lambda t: t.observation["player"]["observation"]).flatten(3, 4)  # [T, B, N, 9, whose]
    for row in range(2):
        first = masks[0, row].sum(-1).argmax()  # who begins
        for t in range(7):
            mover = (first + t) % 2
            assert masks[t, row, mover].tolist() == [cell >= t for cell in range(9)]
            assert masks[t, row, 1 - mover].tolist() == [True] + [False] * 8
            stones = [[float(cell < t and cell % 2 == who) for who in (0, 1)] for cell in range(9)]
            assert board[t, row, first].tolist() == stones
            assert board[t, row, 1 - first].tolist() == [stone[::-1] for stone in stones]
        reward = column(seen, lambda t, row=row: t.reward["player"][row])
        discount = column(seen, lambda t, row=row: t.discount["player"][row])
        assert not reward[:7].any() and not reward[8].any() and (discount[7] == 0).all()
        assert (reward[7, first], reward[7, 1 - first]) == (1, -1)
        assert [t.step_type[row].item() for t in seen] == [FIRST, *[MID] * 6, LAST, FIRST]


@pytest.mark.parametrize("name", ["IntersectionMultiAgent-v1", "SparrowMahjong-v1"])
def test_players_stay_with_their_environment_whatever_the_threads(name, seed):
    """EnvPool gives environments of several players in the order in which they are done."""

    def run(num_threads):
        env = EnvPool(name, num_threads=num_threads)
        timesteps = [env.init(keys(5, seed))[1]]
        for step in range(60):
            action = random_action(env.spec, timesteps[-1].observation, random.at(keys(5, seed + 1), step))
            timesteps.append(env.step(None, action, keys(5))[1])
        return TimeStep(*(pytree.tree_map(lambda *x: torch.stack(x), *parts) for parts in zip(*timesteps, strict=True)))

    one, two = run(1), run(2)
    assert (one.step_type == LAST).any()
    pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), one, two)


def test_copies_of_a_game_in_turns_do_not_move_for_each_other(seed):
    """Sebulba has a copy for every pool."""

    def played(envs):
        """In turns; who acts for environment `i` is drawn from seeds of its own."""
        seen = {i: [env.init(keys(4, seed + i))[1]] for i, env in envs.items()}
        for step in range(30):
            for i, env in envs.items():
                action = random_action(env.spec, seen[i][-1].observation, random.at(keys(4, seed + 9 + i), step))
                seen[i].append(env.step(None, action, keys(4))[1])
        return seen

    env = EnvPool("TicTacToe-v1")
    together = played({i: copy.copy(env) for i in range(2)})
    for i in range(2):
        alone = played({i: EnvPool("TicTacToe-v1")})[i]
        pytree.tree_map(partial(torch.testing.assert_close, rtol=0, atol=0), together[i], alone)


def test_many_agents_learn_a_game():
    """Kuhn poker, self-play of one policy: the expectation of both is finite, and who waits moves nothing."""
    env = EnvPool("KuhnPoker-v1")
    agent = IPPO(env.spec, IPPOConfig(hidden=(8,)))
    params, buffers = variables_of(agent)
    carry = start(agent, env, keys(4))
    carry, trajectory = unroll(make_step(agent, env), params | buffers, carry, keys(4), keys(4, 1), length=20)
    mask = trajectory.timestep.observation["player"]["action_mask"][:-1]
    log_prob = trajectory.output.extras["player"]["action_log_prob"]
    assert torch.equal(log_prob == 0, mask.sum(-1) == 1)
    assert torch.isfinite(agent.prepare(trajectory, keys(4)).steps["player/advantage"]).all()


def test_two_pools_in_turns_are_the_same_as_each_alone():
    alone = [play(EnvPool("CartPole-v1"), 3, 40, seed=i) for i in range(2)]
    pools = [EnvPool("CartPole-v1") for _ in range(2)]
    for i, pool in enumerate(pools):
        pool.init(keys(3, i))
        pool.send(draw(3, 2, 0, i))
    for step in range(1, 41):
        for i, pool in enumerate(pools):
            timestep = pool.recv()
            assert torch.equal(timestep.observation, alone[i][step].observation)
            assert torch.equal(timestep.step_type, alone[i][step].step_type)
            pool.send(draw(3, 2, step, i))


@pytest.mark.parametrize("task", with_slow(["CartPole-v1", "Pong-v5", "Pendulum-v1", "Tetris-v0"], ("Pong-v5",)))
@pytest.mark.parametrize(("num", "size"), [(2, 12), (3, 3)])  # three, or one, handed over at once
def test_batches_of_one_pool_are_the_same_as_pools_of_their_own(task, num, size, seed):
    """Whatever order they are sent in, and whichever environments EnvPool has done first."""
    alone, whole, order = EnvPool(task), EnvPool(task, num_threads=2).in_batches(num), np.random.default_rng(seed)
    assert whole.in_batches(1).batches == []
    _, expected = alone.init(keys(size * num, seed))
    _, first = whole.init(keys(size * num, seed))
    pytree.tree_map(partial(torch.testing.assert_close, rtol=0, atol=0), first, expected)
    batches = whole.batches
    for step in range(60):
        action = random_action(alone.spec, expected.observation, random.at(keys(size * num, seed), step))
        _, expected = alone.step(None, action, keys(size * num))
        for i in order.permutation(num):
            batches[i].send(action[size * i : size * i + size])
        for i in order.permutation(num):
            wanted = pytree.tree_map(lambda x, i=i: x[size * i : size * i + size], expected)
            pytree.tree_map(partial(torch.testing.assert_close, rtol=0, atol=0), batches[i].recv(), wanted)
    for env in (alone, whole):
        env.close()
    with pytest.raises(RuntimeError, match="init"):
        whole.send(action)


def test_what_is_handed_over_at_once_divides_a_batch():
    """Of 1 to 99 environments: a quarter, or the next larger divisor."""
    for size in range(1, 100):
        part = handed_over(size)
        assert size % part == 0 and 4 * part >= size
        assert not any(size % smaller == 0 and 4 * smaller >= size for smaller in range(1, part))
    assert [handed_over(size) for size in (1, 3, 6, 13, 12, 64)] == [1, 1, 2, 13, 3, 16]


def test_batches_keep_the_contract():
    env = EnvPool("CartPole-v1", num_threads=2).in_batches(2)
    check_env(env, num_envs=4)
    with pytest.raises(ValueError, match="CartPole-v1: 3 environments are not 2 batches; use a multiple"):
        env.init(keys(3))
    env.init(keys(4))
    batch = env.batches[1]
    with pytest.raises(RuntimeError, match="recv\\(\\) comes after send"):
        batch.recv()
    with pytest.raises(ValueError, match=r"CartPole-v1 takes actions of shape \[2\]; these are \[4\]"):
        batch.send(torch.zeros(4, dtype=torch.int64))
    batch.send(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="recv\\(\\) comes before the next send"):
        batch.send(torch.zeros(2, dtype=torch.int64))
    assert batch.recv().step_type.tolist() == [MID, MID]
    with pytest.raises(ValueError, match="is a game of several players, and .* leave out loop.pools_share_threads"):
        EnvPool(next(iter(MANY_PLAYERS))).in_batches(2)


def test_actions_out_of_bounds_are_clipped():
    env = EnvPool("Pendulum-v1")
    assert env.spec.action == Box((1,), -2.0, 2.0)
    assert env._translated._to_native(np.array([[-50.0], [-2.0], [0.5], [50.0]], np.float32)).tolist() == [
        [-2],
        [-2],
        [0.5],
        [2],
    ]


def test_bounds_that_differ_are_scaled():
    """The wheel of CarRacing is in [-1, 1], gas and brake in [0, 1]."""
    env = EnvPool("CarRacing-v3")
    assert env.spec.action == Box((3,), -1.0, 1.0)
    actions = np.array([[-1, -1, -1], [0, 0, 0], [1, 0.5, 1], [-7, 7, 7]], np.float32)
    expected = [[-1, 0, 0], [0, 0.5, 0.5], [1, 0.75, 1], [-1, 1, 1]]
    assert env._translated._to_native(actions).tolist() == expected


def test_several_integers_become_one_number():
    env = EnvPool("Tetris-v0")  # 4 rotations, 10 columns
    assert env.spec.action == Discrete(40)
    assert env.spec.observation["action_mask"] == Array((40,), torch.bool)
    assert env._translated._to_native(np.array([0, 9, 10, 39])).tolist() == [[0, 0], [0, 9], [1, 0], [3, 9]]


def test_integers_that_have_a_mask_each_stay_apart():
    env = EnvPool("Cleaner-v0")  # 3 cleaners, 4 directions
    assert env.spec.action == MultiDiscrete((4, 4, 4))
    assert env.spec.observation["action_mask"] == Array((12,), torch.bool)
    assert env._translated._to_native(np.array([[0, 3, 1]])).tolist() == [[0, 3, 1]]


@pytest.mark.parametrize("name", ["BinPack-v2", "Cleaner-v0", "FlatPack-v0", "Minesweeper-v0", "Tetris-v0"])
def test_masks_are_those_of_envpool_in_the_order_of_the_actions(name, seed, monkeypatch):
    env = EnvPool(name)
    _, timestep = env.init(keys(3, seed))
    pool = pool_of(env)
    recv, given, unequal = pool.recv, [], 0

    def spy():
        output = recv()
        given.append(output[0]["action_mask"].astype(bool))
        return output

    monkeypatch.setattr(pool, "recv", spy)
    for step in range(20):
        action = random_action(env.spec, timestep.observation, random.at(keys(3, seed), step))
        _, timestep = env.step(None, action, keys(3))
        raw, mask = given[-1], timestep.observation["action_mask"].numpy()
        rows = raw if name == "Cleaner-v0" else raw.reshape(3, -1)
        allowed = np.broadcast_to(rows.any(-1, keepdims=True), rows.shape).reshape(3, -1)
        np.testing.assert_array_equal(mask, np.where(allowed, raw.reshape(3, -1), True))
        unequal += (raw.reshape(3, -1) != np.moveaxis(raw, 1, -1).reshape(3, -1)).any()
    assert unequal, "these masks would show no order"
    if name != "Cleaner-v0":  # entry i of the mask is of action i
        native = env._translated._to_native(np.arange(env.spec.action.num_values))
        np.testing.assert_array_equal(native, np.argwhere(np.ones(given[-1].shape[1:])))


def test_a_mask_that_does_not_fit_the_actions_is_refused(monkeypatch):
    from torchpod.envs.host import envpool as module

    monkeypatch.setattr(module, "action_of", lambda *_, **__: (Discrete(39), None))
    message = "Tetris-v0: action_mask is [4, 10], which does not fit Discrete(num_values=39, dtype=torch.int64); choose"
    with pytest.raises(ValueError, match=re.escape(message)):
        EnvPool("Tetris-v0")


def test_unroll_steps_it_like_any_environment():
    env = EnvPool("CartPole-v1")
    agent = PPO(env.spec, PPOConfig(hidden=(8,)))
    params, buffers = variables_of(agent)
    carry = start(agent, env, keys(4))
    carry, trajectory = unroll(make_step(agent, env), params | buffers, carry, keys(4), keys(4, 1), length=60)
    assert trajectory.timestep.observation.shape == (61, 4, 4)
    assert (trajectory.timestep.step_type == LAST).sum() >= 4
    assert torch.isfinite(agent.prepare(trajectory, keys(4)).steps["advantage"]).all()


def test_envpool_is_imported_only_when_used(pytestconfig):
    program = "import sys, torchpod.envs.host; sys.exit('envpool' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=pytestconfig.rootpath).returncode == 0


def test_a_missing_envpool_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r"needs the package envpool: pip install 'torchpod-rl\[envpool\]'"):
        EnvPool("CartPole-v1")


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("ALE/Pong-v5", {}, "EnvPool has no environment 'ALE/Pong-v5'; the nearest names are Pong-v5, "),
        ("Pong-v5", {"episodic_lives": True}, "EnvPool('Pong-v5') has no option 'episodic_lives'; the nearest options"),
        ("Cig-v1", {}, "EnvPool ends the process where it makes Cig-v1; choose another environment."),
        ("Pong-v5", {"num_envs": 8}, "EnvPool('Pong-v5') takes no num_envs: init makes one environment per key."),
        ("Pong-v5", {"seed": 8}, "EnvPool('Pong-v5') takes no seed: the keys of init are the seeds."),
        ("Pong-v5", {"num_threads": 0}, "num_threads=0 is wrong; use an integer of at least 1."),
        ("VizdoomCustom-v1", {}, "EnvPool cannot make VizdoomCustom-v1; check its options and its files. It says: "),
    ],
)
def test_what_cannot_be_made_is_refused(name, options, sentence):
    with pytest.raises(ValueError) as error:
        EnvPool(name, **options)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_missing_files_are_named_when_the_environments_are_made():
    try:
        EnvPool("Sudoku-v0").init(keys(2))
    except ValueError as error:
        assert str(error).startswith("EnvPool cannot make Sudoku-v0; check its options and its files. It says: failed")
    else:
        pytest.skip("this version of EnvPool has the puzzles of Sudoku-v0")


def test_steps_in_the_wrong_order_or_shape_are_refused():
    env = EnvPool("CartPole-v1")
    action = torch.zeros(2, dtype=torch.int64)
    for call in (lambda: env.send(action), env.recv):
        with pytest.raises(RuntimeError, match="CartPole-v1: .* comes? "):
            call()
    with pytest.raises(ValueError, match="num_envs=0 is wrong"):
        env.init(keys(2)[:0])
    env.init(keys(2))
    with pytest.raises(ValueError, match=r"CartPole-v1 takes actions of shape \[2\]; these are \[3\]"):
        env.send(torch.zeros(3, dtype=torch.int64))
    env.send(action)
    with pytest.raises(RuntimeError, match="recv\\(\\) comes before the next send"):
        env.send(action)
    assert env.recv().step_type.tolist() == [MID, MID]


@pytest.mark.parametrize("option", ["noop_max", "max_episode_steps"])
def test_options_that_envpool_does_not_look_at_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=0 is wrong; use an integer of at least 1"):
        EnvPool("Pong-v5", **{option: 0})
