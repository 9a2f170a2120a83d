import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import CartPole, Catch, CovidEconomy, TagContinuous
from torchpod.envs.transforms import (
    TRANSFORMS,
    ActionRepeat,
    Flatten,
    FrameStack,
    OneHot,
    RewardClip,
    StickyAction,
    action_repeat,
    send,
    time_limit,
)
from torchpod.makers import make_env
from torchpod.run.execute import execute
from torchpod.sebulba import loop as sebulba_loop
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

B = 6


class Diary(TensorEnv):
    """Shows the number of the step, the last action and a mask; rewards 2 * action; ends with probability 0.1."""

    def __init__(self, masked=True):
        self.masked, observation = masked, {"step": Discrete(30), "action": Array((2,))}
        observation |= {"action_mask": Array((5,), torch.bool)} if masked else {}
        self.spec = EnvSpec("diary", observation, Discrete(5), max_episode_steps=20)

    def reset(self, keys):
        return torch.zeros(keys.shape[0], 2, dtype=torch.int64, device=keys.device)

    def transition(self, state, action, keys):
        state = torch.stack([state[:, 0] + 1, action], -1)
        return state, 2 * action.float(), random.uniform(keys, 2)[:, 1] < 0.1

    def observe(self, state):
        seen = {"step": state[:, 0], "action": state.float()}
        mask = torch.ones(state.shape[0], 5, dtype=torch.bool, device=state.device)
        return seen | {"action_mask": mask} if self.masked else seen


class Tired(TensorEnv):
    """Shows the last action; of each of its choices an odd one may not be taken again at once."""

    def __init__(self, action):
        self.nvec = getattr(action, "nvec", (getattr(action, "num_values", 0),))
        observation = {"taken": Array((len(self.nvec),)), "action_mask": Array((sum(self.nvec),), torch.bool)}
        self.spec = EnvSpec("tired", observation, action, max_episode_steps=20)

    def reset(self, keys):
        return torch.zeros(keys.shape[0], len(self.nvec), dtype=torch.int64, device=keys.device)

    def transition(self, state, action, keys):
        none = torch.zeros(len(state), device=keys.device)
        return action.reshape(state.shape), none, none > 0

    def observe(self, state):
        masks = [
            (torch.arange(n) != x[:, None]) | (x[:, None] % 2 == 0) for n, x in zip(self.nvec, state.T, strict=True)
        ]
        return {"taken": state.float(), "action_mask": torch.cat(masks, -1)}


class Keys(TensorEnv):
    """Keeps the keys of all of its steps."""

    def __init__(self):
        self.spec, self.seen = EnvSpec("keys", Array(()), Discrete(2)), []

    def reset(self, keys):
        return torch.zeros(keys.shape[0])

    def transition(self, state, action, keys):
        self.seen.append(keys)
        return action.float(), torch.zeros(len(state)), torch.zeros(len(state)) > 0

    def observe(self, state):
        return state


class Apart(HostEnv):
    """A step may be parted; the keys that it draws from are its own."""

    def init(self, keys):
        self.keys, self.count = random.fold_in(keys, 8), 0
        return super().init(keys)

    def step(self, state, action, keys):
        self.send(action)
        return None, self.recv()

    def send(self, action):
        self.action, self.count = action, self.count + 1

    def recv(self):
        return super().step(None, self.action, random.at(self.keys, self.count))[1]


class InParts:
    """Steps an environment by its `send` and `recv`."""

    def __init__(self, env):
        self.env, self.init = env, env.init

    def step(self, state, action, keys):
        send(self.env, action, keys)
        return None, self.env.recv()


def play(env, num_steps, seed):
    keys = random.split(random.key(seed), B)
    state, timestep = env.init(random.at(keys, 0))
    seen, actions = [timestep], []
    for step in range(1, num_steps + 1):
        actions.append(random.to_integer(random.bits(random.at(random.fold_in(keys, 9), step), 1)[:, 0], 5))
        state, timestep = env.step(state, actions[-1], random.at(keys, step))
        seen.append(timestep)
    return seen, actions


def chain(env):
    return RewardClip(FrameStack(Flatten(OneHot(StickyAction(action_repeat(env, 2), 0.5))), 3), -1.0, 1.0)


MAKERS = {
    "sticky_action": lambda env: StickyAction(env, 0.5),
    "frame_stack": lambda env: FrameStack(OneHot(env), 3),
    "reward_clip": lambda env: RewardClip(env, -1.0, 3.0),
    "flatten": Flatten,
    "one_hot": OneHot,
    "action_repeat": lambda env: ActionRepeat(env, 3),
    "time_limit": lambda env: time_limit(env, 7),
    "all": chain,
}


@pytest.mark.parametrize(
    ("name", "compile"),
    [(name, name == "frame_stack") for name in MAKERS]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in MAKERS if name != "frame_stack"],
)
def test_a_transform_keeps_the_contract(name, compile):
    check_env(MAKERS[name](Diary(masked=name not in ("action_repeat", "all"))), compile=compile)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("action_repeat", "time_limit", "all")])
def test_around_a_host_environment_it_does_the_same(name, seed):
    inside, outside = (
        play(env, 60, seed)[0] for env in (HostEnv(MAKERS[name](Diary())), MAKERS[name](HostEnv(Diary())))
    )
    pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), inside, outside)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("action_repeat", "time_limit", "all")])
def test_a_step_in_parts_is_the_same(name, seed):
    whole, parts = (
        play(wrap(RewardClip(MAKERS[name](StickyAction(Apart(Diary()), 0.3)), -5.0, 5.0)), 60, seed)[0]
        for wrap in (lambda env: env, InParts)
    )
    pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), whole, parts)


def test_frames_are_those_of_the_last_steps_and_never_of_another_episode(seed):
    plain, stacked = play(CartPole(), 60, seed)[0], play(FrameStack(CartPole(), 3), 60, seed)[0]
    frames = [[] for _ in range(B)]
    for one, many in zip(plain, stacked, strict=True):
        for i in range(B):
            row = one.observation[i].numpy()
            frames[i] = [row] * 3 if one.step_type[i] == FIRST else [*frames[i][1:], row]
            np.testing.assert_array_equal(many.observation[i].numpy(), np.concatenate(frames[i]))
    assert sum(int((t.step_type == FIRST).sum()) for t in plain) > 2 * B


def test_frames_of_images_are_side_by_side_in_the_channels():
    env = FrameStack(Catch(), 4)
    assert env.spec.observation == Box((10, 5, 4), 0.0, 1.0)
    seen, _ = play(env, 3, 0)
    rows = seen[3].observation.amax((0, 2))[:-1].argmax(0)  # of the ball, oldest frame first
    assert rows.tolist() == [0, 1, 2, 3]


def test_an_action_sticks_as_often_as_it_should_and_never_at_the_start(seed):
    stuck, free = 0, 0
    seen, actions = play(StickyAction(Diary(), 0.3), 1000, seed)
    taken = [t.observation["action"][:, 1].long() for t in seen]
    for t in range(1, len(seen)):
        for i in range(B):
            if seen[t].step_type[i] == FIRST:
                continue
            chosen, got = int(actions[t - 1][i]), int(taken[t][i])
            if seen[t - 1].step_type[i] == FIRST:
                assert got == chosen
            elif chosen != (before := int(taken[t - 1][i])):
                assert got in (chosen, before)
                stuck, free = stuck + (got == before), free + (got == chosen)
    assert abs(stuck / (stuck + free) - 0.3) < 0.05


@pytest.mark.parametrize("action", [Discrete(4), MultiDiscrete((4, 3))])
@pytest.mark.parametrize("wrap", [lambda env: env, HostEnv])
def test_an_action_sticks_only_where_the_mask_allows_it(action, wrap, seed):
    env, keys = StickyAction(wrap(Tired(action)), 0.5), random.split(random.key(seed), 200)
    state, timestep = env.init(random.at(keys, 0))
    stuck, free, forbidden = 0, 0, 0
    for t in range(1, 60):
        before = timestep
        chosen = random_action(env.spec, before.observation, random.at(random.fold_in(keys, 9), t))
        state, timestep = env.step(state, chosen, random.at(keys, t))
        chosen, old = chosen.reshape(200, -1), before.observation["taken"].long()
        taken, moved = timestep.observation["taken"].long(), (before.step_type == MID) & (timestep.step_type == MID)
        may_stick = moved & (old % 2 == 0).all(-1)
        assert torch.equal(taken[moved & ~may_stick], chosen[moved & ~may_stick])
        differ = may_stick & (chosen != old).any(-1)
        assert torch.where((taken == old).all(-1)[:, None], old, chosen)[differ].equal(taken[differ])
        stuck, free = stuck + int((taken == old).all(-1)[differ].sum()), free + int(differ.sum())
        forbidden += int((moved & ~may_stick).sum())
    assert abs(stuck / free - 0.5) < 0.05 and free > 1000 and forbidden > 1000


def test_each_agent_of_a_group_sticks_only_where_its_mask_allows_it(seed):
    """Governors that set a level must wait, and only 0 is allowed; who waits may do 0 again."""
    env, keys = StickyAction(CovidEconomy(cooldown=3, subsidy_interval=2), 0.5), random.split(random.key(seed), 16)
    state, timestep = env.init(random.at(keys, 0))
    stuck = {g: [] for g in env.spec.action}
    for t in range(1, 40):
        seen, (_, (last, _)) = timestep.observation, state
        chosen = random_action(env.spec, seen, random.at(random.fold_in(keys, 9), t))
        state, timestep = env.step(state, chosen, random.at(keys, t))
        for g, taken in state[1][0].items():
            allows = seen[g]["action_mask"].gather
            assert allows(-1, taken[..., None]).all()
            kept, differ = allows(-1, last[g][..., None])[..., 0], last[g] != chosen[g]
            assert torch.equal(taken[~kept], chosen[g][~kept])
            stuck[g].append((taken == last[g])[kept & differ & (t > 1)])
    shares = {g: torch.cat(x).float().mean() for g, x in stuck.items()}
    # All agents of an environment share a draw: there are some 300 that count, with a standard error of 0.03.
    assert abs(shares["governor"] - 0.5) < 0.2 and abs(shares["planner"] - 0.5) < 0.2


def test_actions_stick_by_words_of_their_own_in_each_of_two_transforms(seed):
    keys, word = random.split(random.key(seed), 20_000), 0x57C1

    def stuck(env):
        state, _ = env.init(random.at(keys, 0))
        for t, action in enumerate((torch.zeros, torch.ones), 1):
            state, timestep = env.step(state, action(len(keys), dtype=torch.int64), random.at(keys, t))
        return timestep.observation == 0

    def drawn(word):
        return random.uniform(random.fold_in(random.at(keys, 2), word), 1)[:, 0] < 0.25

    once, twice = StickyAction(Keys()), StickyAction(RewardClip(StickyAction(Keys())))
    assert torch.equal(stuck(once), drawn(word))
    assert torch.equal(stuck(twice), drawn(word) | drawn(word + 1))
    assert abs(stuck(twice).float().mean() - (1 - 0.75**2)) < 0.02


def test_each_of_the_steps_of_repeats_of_repeats_has_keys_of_its_own(seed):
    inside, keys = Keys(), random.at(random.split(random.key(seed), 1), 1)
    env = ActionRepeat(RewardClip(ActionRepeat(ActionRepeat(inside, 2), 3)), 4)
    state, _ = env.init(keys)
    inside.seen.clear()
    env.step(state, torch.zeros(1, dtype=torch.int64), keys)
    assert len(inside.seen) == len({tuple(x[0].tolist()) for x in inside.seen}) == 24


@pytest.mark.parametrize("env", [Diary(), FrameStack(OneHot(Diary())), HostEnv(Diary()), CovidEconomy()])
def test_actions_that_a_mask_may_forbid_are_not_repeated(env):
    with pytest.raises(ValueError, match=rf"action_mask of {env.spec.name} may forbid meanwhile; leave it out, or let"):
        action_repeat(env, 2)


def test_a_copy_has_an_environment_of_its_own():
    one = FrameStack(RewardClip(HostEnv(CartPole())), 3)
    other = copy.copy(one)
    assert type(other) is FrameStack and other.num == 3 and other.spec == one.spec
    assert other.env is not one.env and other.env.env is not one.env.env


@pytest.mark.parametrize(
    "env", [["env=envpool", "env.task=CartPole-v1"], ["env=gymnasium", "env.task=CartPole-v1"]], ids=lambda env: env[0]
)
def test_actor_threads_do_not_share_what_is_in_a_transform(env, tmp_path, monkeypatch):
    built = []
    build = sebulba_loop.Sebulba.__init__

    def spy(self, *args, **kwargs):
        build(self, *args, **kwargs)
        built.append(self)

    monkeypatch.setattr(sebulba_loop.Sebulba, "__init__", spy)
    overrides = [*env, "loop=sebulba", "loop.lag=0", "num_envs=8", "algo.unroll_length=8", "total_env_steps=640"]
    overrides += ["+env.transforms=[reward_clip,{name: frame_stack, num: 2}]", "compile=false", "evaluation.episodes=2"]
    execute(load([*overrides, f"run_dir={tmp_path / 'run'}", "logger.console=false"]))
    (program,) = built
    inner = [each.env.env for each in program.envs]
    assert len(inner) == 2 and inner[0] is not inner[1]


def test_the_action_of_a_reset_is_not_kept():
    check_env(StickyAction(Catch(), 0.5), compile=False)


def test_clipped_rewards_leave_the_raw_ones(seed):
    seen, _ = play(RewardClip(Diary(), -1.0, 3.0), 40, seed)
    raw = torch.stack([t.extras["raw_reward"] for t in seen])
    assert raw.max() == 8
    assert torch.equal(torch.stack([t.reward for t in seen]), raw.clamp(max=3.0))
    seen, _ = play(RewardClip(Diary(), 2.0, 3.0), 40, seed)
    first = torch.stack([t.step_type == FIRST for t in seen])
    clipped = torch.stack([t.extras["raw_reward"] for t in seen]).clamp(2.0, 3.0)
    assert torch.equal(torch.stack([t.reward for t in seen]), torch.where(first, 0.0, clipped)) and first[1:].any()


def test_a_flat_observation_holds_everything_but_the_mask(seed):
    env = Flatten(OneHot(Diary()))
    assert env.spec.observation == {"observation": Array((32,)), "action_mask": Array((5,), torch.bool)}
    for plain, flat in zip(play(Diary(), 30, seed)[0], play(env, 30, seed)[0], strict=True):
        row = flat.observation["observation"]
        assert torch.equal(row[:, :2], plain.observation["action"])
        assert torch.equal(row[:, 2:].argmax(-1), plain.observation["step"]) and (row[:, 2:].sum(-1) == 1).all()


def test_a_mask_in_a_dict_of_an_observation_is_not_left_out_of_a_flat_one_without_a_word():
    class Inside(Diary):
        def __init__(self, groups):
            super().__init__()
            own = {"fuel": Array((1,)), "board": {"deep": self.spec.observation}}
            if groups is not None:
                own = {"cat": Array((1,)), "sheep": own | {"action_mask": Array((5,), torch.bool)}}
            self.spec = dataclasses.replace(self.spec, observation=own, groups=groups)

    for groups in (None, {"cat": 1, "sheep": 2}):
        with pytest.raises(
            ValueError, match="an action_mask in the part 'board' of what diary observes, where it forb"
        ):
            Flatten(Inside(groups))


def test_repeating_an_action_is_taking_it_several_times(seed):
    """Step by step in single environments, until the episode ends."""
    env, keys = Diary(masked=False), random.split(random.key(seed), B)
    seen, actions = play(ActionRepeat(env, 3), 40, seed)
    for i in range(B):
        state, timestep = env.init(random.at(keys[i : i + 1], 0))
        for t, action in enumerate(actions, 1):
            key, total = random.at(keys[i : i + 1], t), 0.0
            for repeat in range(3):
                inner = key if repeat == 0 else random.fold_in(key, repeat)
                state, timestep = env.step(state, action[i : i + 1], inner)
                total += float(timestep.reward)
                if timestep.step_type != MID:
                    break
            assert seen[t].step_type[i] == timestep.step_type
            assert seen[t].reward[i] == seen[t].extras["raw_reward"][i] == total
            assert seen[t].discount[i] == timestep.discount
            assert torch.equal(seen[t].observation["action"][i], timestep.observation["action"][0])
    assert ActionRepeat(env, 3).spec.max_episode_steps == 7


@pytest.mark.parametrize("wrap", [lambda env: time_limit(env, 4), lambda env: time_limit(chain(env), 2)])
def test_a_time_limit_truncates_and_does_not_terminate(wrap, seed):
    env = wrap(Diary(masked=False))
    seen, _ = play(env, 40, seed)
    count = torch.zeros(B)
    for timestep in seen[1:]:
        count = torch.where(timestep.step_type == FIRST, 0, count + 1)
        at_limit = count == env.spec.max_episode_steps
        assert (timestep.step_type[at_limit] == LAST).all()
        assert (count <= env.spec.max_episode_steps).all()
    truncated = [(t.step_type == LAST) & (t.discount == 1) for t in seen]
    assert torch.stack(truncated).any()
    assert time_limit(Diary(), 100).spec.max_episode_steps == 20


def test_an_environment_that_knows_its_limit_knows_the_shorter_one(seed):
    """Of Tag what is observed of time, and what runners get who are left at the end."""
    rewards, times = [], []
    options = {"num_taggers": 1, "num_runners": 3, "num_other_agents_observed": 2}
    for env in (TagContinuous(max_episode_steps=9, **options), time_limit(TagContinuous(**options), 9)):
        own = random.split(random.key(seed), B)
        state, timestep = env.init(random.at(own, 0))
        seen = [timestep]
        for step in range(1, 10):
            action = random_action(env.spec, timestep.observation, random.at(random.fold_in(own, 9), step))
            state, timestep = env.step(state, action, random.at(own, step))
            seen.append(timestep)
        assert (timestep.step_type == LAST).all()
        rewards.append(torch.stack([t.reward["runner"] for t in seen]))
        times.append(torch.cat([t.observation["runner"].flatten() for t in seen]))
    assert torch.equal(*rewards) and torch.equal(*times) and rewards[0][9].max() > 0


def test_a_limit_that_is_no_attribute_stays_what_it_is():
    class Computed(Diary):
        @property
        def max_episode_steps(self):
            return self.spec.max_episode_steps

    assert time_limit(Computed(), 4).max_episode_steps == 4  # pyright: ignore[reportAttributeAccessIssue]


def test_frames_of_several_choices_are_one_behind_the_other(seed):
    class Choices(Diary):
        def __init__(self):
            super().__init__()
            self.spec = dataclasses.replace(self.spec, observation=MultiDiscrete((4, 2)))

        def observe(self, state) -> Any:
            return torch.stack([state[:, 0] % 4, state[:, 0] % 2], -1)

    env = FrameStack(Choices(), 3)
    assert env.spec.observation == MultiDiscrete((4, 2, 4, 2, 4, 2))
    seen, _ = play(env, 12, seed)
    for old, new in itertools.pairwise(seen):
        goes_on = new.step_type != FIRST
        assert torch.equal(old.observation[goes_on, 2:], new.observation[goes_on, :4])


def test_gymnasium_repeats_and_stops_by_itself():
    env = make_env(
        {
            "name": "gymnasium",
            "task": "Pendulum-v1",
            "transforms": [{"name": "action_repeat", "num": 4}, {"name": "time_limit", "max_episode_steps": 9}],
        }
    )
    assert env.spec.max_episode_steps == 9
    check_env(env, num_envs=2, num_steps=30)
    env.close()


def test_envpool_repeats_and_stops_by_itself():
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    env = make_env({"name": "envpool", "task": "Pong-v5", "transforms": [{"name": "action_repeat", "num": 2}]})
    assert env._options["frame_skip"] == 8 and env.spec.max_episode_steps == 27_000 / 2
    limited = time_limit(env, 5)
    check_env(limited, num_envs=2, num_steps=12)
    assert limited._options == {"num_threads": 1, "frame_skip": 8, "max_episode_steps": 5}
    with pytest.raises(ValueError, match="in Atari alone, not in CartPole-v1; leave out action_repeat"):
        action_repeat(make_env({"name": "envpool", "task": "CartPole-v1"}), 2)


def test_envpool_has_episodes_as_long_when_it_repeats():
    """It counts decisions: of 10 steps, 4 for each of them, there are 3."""
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    env = make_env({"name": "envpool", "task": "Pong-v5", "max_episode_steps": 10})
    both = action_repeat(time_limit(env, 9), 4), time_limit(action_repeat(env, 4), 2)
    assert [x.spec.max_episode_steps for x in both] == [3, 2]
    repeated = action_repeat(env, 4)
    keys = random.split(random.key(0), 2)
    repeated.init(keys)
    steps = [repeated.step(None, torch.zeros(2, dtype=torch.int64), keys)[1].step_type.tolist() for _ in range(3)]
    assert steps == [[MID] * 2, [MID] * 2, [LAST] * 2] and repeated.spec.max_episode_steps == 3
    repeated.close()


def test_a_configuration_names_transforms_from_the_inside_out():
    env = make_env({"name": "catch", "transforms": [{"name": "frame_stack", "num": 2}, "flatten"]})
    assert isinstance(env, Flatten) and isinstance(env.env, FrameStack)
    assert env.spec.observation == Array((100,))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("frame_stak", r"env.transforms\[0\]=frame_stak is not known; did you mean frame_stack"),
        ({"num": 3}, r"env.transforms\[0\]=None is not known"),
        (3, r"env.transforms\[0\]=3 is no transform; use a name, or \{name: frame_stack, num: 4\}\."),
        ({"name": "frame_stack", "number": 3}, "frame_stack takes no argument number; did you mean num"),
        ({"name": "frame_stack", "num": 0}, "num=0 is wrong; use an integer of at least 1"),
        ({"name": "sticky_action", "probability": 2}, "probability=2 is wrong; use a number from 0 to 1"),
        ({"name": "reward_clip", "low": 1, "high": 0}, "high=0 is wrong"),
        ("time_limit", "time_limit needs max_episode_steps, e.g. {name: time_limit, max_episode_steps: 100}"),
        ("one_hot", "one_hot needs a Discrete observation, and cartpole has"),
    ],
)
def test_a_wrong_transform_is_refused_in_one_sentence(transform, message):
    with pytest.raises(ConfigError, match=message):
        make_env({"name": "cartpole", "transforms": [transform]})


def test_transforms_that_are_no_list_are_refused():
    with pytest.raises(
        ConfigError, match=r"env.transforms='flatten' is no list; use e.g. env.transforms=\[frame_stack"
    ):
        make_env({"name": "catch", "transforms": "flatten"})


def test_what_a_host_environment_cannot_do_is_said():
    with pytest.raises(ValueError, match="action_repeat cannot hold single environments of diary back"):
        action_repeat(HostEnv(Diary(masked=False)), 2)
    with pytest.raises(ValueError, match="time_limit cannot shorten diary; give it a limit of its own"):
        time_limit(HostEnv(Diary()), 2)


def test_every_transform_has_a_name():
    assert list(TRANSFORMS) == sorted(TRANSFORMS) and len(TRANSFORMS) == 7
