"""TorchRL environments behind the contract: their own steps, their resets where ours are, and training in them."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.data import Binary, Bounded, Composite, MultiOneHot, Unbounded
from torchrl.envs import Compose, GymEnv, SerialEnv, StepCounter, TransformedEnv, VecGymEnvTransform

from torchpod import random, train
from torchpod.actions import random_action
from torchpod.commands.eval_run import eval_run
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.env import TensorEnv
from torchpod.envs import Catch
from torchpod.envs.host.torchrl import TorchRL
from torchpod.envs.transforms import FrameStack
from torchpod.interop.env_base import to_torchrl
from torchpod.makers import make_env
from torchpod.run.execute import execute
from torchpod.specs import Array, Box, Discrete, EnvSpec
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

COUNT = """
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase

class Count(EnvBase):
    '''Where it is, and whether the last action was 1, the last coin of three; the third step is cut, action 2 ends.'''

    def __init__(self, num_envs=None, limit=3):
        size = torch.Size([] if num_envs is None else [num_envs])
        super().__init__(batch_size=size)
        self.limit, self.where, self.start = limit, torch.zeros(*size, 1), 0.0
        self.observation_spec = Composite(observation=Unbounded(torch.Size([*size, 1])), shape=size)
        self.action_spec = OneHot(3, shape=torch.Size([*size, 3]))
        self.reward_spec = Unbounded(torch.Size([*size, 1]))
        flag = Categorical(2, shape=torch.Size([*size, 1]), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=size)

    def _set_seed(self, seed):
        self.start = seed % 7 / 8  # below 1: a count is a whole number on top

    def _reset(self, tensordict, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        fresh = torch.full_like(self.where, self.start)
        self.where = fresh if mask is None else torch.where(mask, fresh, self.where)
        return TensorDict({"observation": self.where.clone()}, self.batch_size)

    def _step(self, tensordict):
        self.where = self.where + 1
        choice = tensordict["action"].to(torch.int64).argmax(-1, keepdim=True)
        ended, cut = choice == 2, self.where.floor() >= self.limit
        return TensorDict(
            {
                "observation": self.where.clone(),
                "reward": choice.float(),
                "terminated": ended,
                "truncated": cut,
                "done": ended | cut,
            },
            self.batch_size,
        )
"""
NAMES: dict = {}
exec(COUNT, NAMES)
Count = NAMES["Count"]


def keys(num, seed=0):
    return random.split(random.key(seed), num)


def serial(num_envs=1):
    return SerialEnv(num_envs, Count)


@pytest.mark.parametrize("make", [Count, lambda: Count(4), lambda num_envs=1: Count(num_envs), serial])
def test_the_contract_holds_one_by_one_in_parts_and_in_one_batch(make):
    check_env(TorchRL(make))


@pytest.mark.parametrize("make", [Count, lambda: Count(1), lambda num_envs=1: Count(num_envs), serial])
def test_episodes_end_as_ours_do_while_other_rows_go_on(make):
    env = TorchRL(make)
    assert env.spec.action == Discrete(3) and env.spec.observation == Array((1,))
    _, timestep = env.init(keys(2))
    assert timestep.step_type.tolist() == [FIRST, FIRST] and timestep.observation.dtype == torch.float32
    found = [env.step(None, torch.tensor(row), keys(2))[1] for row in ([2, 0], [2, 1], [1, 0], [0, 2])]
    assert [t.step_type.tolist() for t in found] == [[LAST, MID], [FIRST, MID], [MID, LAST], [MID, FIRST]]
    assert [t.reward.tolist() for t in found] == [[2, 0], [0, 1], [1, 0], [0, 0]]
    assert [t.discount.tolist() for t in found] == [[0, 1]] + [[1, 1]] * 3
    assert [t.observation[:, 0].floor().tolist() for t in found] == [[1, 1], [0, 2], [1, 3], [2, 0]]
    env.close()


def test_what_can_wait_is_not_stepped_past_its_end():
    class Strict(Count):
        def _step(self, tensordict):
            assert not self.over
            after = super()._step(tensordict)
            self.over = bool(after["done"])
            return after

        def _reset(self, tensordict, **kwargs):
            self.over = False
            return super()._reset(tensordict, **kwargs)

    env = TorchRL(lambda: SerialEnv(2, Strict))
    env.init(keys(2))
    found = [env.step(None, torch.tensor([2, 0]), keys(2))[1].step_type.tolist() for _ in range(4)]
    assert found == [[LAST, MID], [FIRST, MID], [LAST, LAST], [FIRST, FIRST]]


def test_seeds_are_of_the_keys_and_observations_are_not_written_to_later():
    env = TorchRL(Count)
    starts = env.init(keys(32))[1].observation
    assert len(set(starts.flatten().tolist())) > 3
    kept = starts.clone()
    env.step(None, torch.zeros(32, dtype=torch.int64), keys(32))
    assert torch.equal(starts, kept) and torch.equal(env.init(keys(32))[1].observation, starts)


def test_there_and_back_is_the_environment_itself():
    ours, wrapped = Catch(), TorchRL(lambda num_envs=1: to_torchrl(Catch(), num_envs))
    assert wrapped.spec.action == ours.spec.action and wrapped.spec.observation.shape == (10, 5, 1)
    state, timestep = wrapped.init(keys(4))
    for t in range(1, 31):
        state, timestep = wrapped.step(state, torch.tensor([0, 1, 2, 1]), keys(4))
        assert timestep.step_type.tolist() == [(FIRST if t % 10 == 0 else LAST if t % 10 == 9 else MID)] * 4
        assert (timestep.observation.sum((1, 2, 3)) <= 2).all()  # the ball and the paddle


class Pixels(Count):
    """Shows its count in an image `[3, 4, 5]`, and another in whatever form it is told."""

    def __init__(self, num_envs=None, shape=(3, 4, 5), dtype=torch.uint8):
        super().__init__(num_envs)
        seen = {"image": Unbounded((*self.batch_size, *shape), dtype=dtype)}
        self.observation_spec = Composite(seen, shape=self.batch_size)

    def seen(self, tensordict):
        leaf = self.observation_spec["image"]
        ramp = torch.arange(leaf.shape[len(self.batch_size) :].numel()).reshape(leaf.shape[len(self.batch_size) :])
        image = ramp + self.where.floor().reshape(*self.batch_size, *[1] * ramp.ndim)
        return tensordict.exclude("observation").set("image", image.to(leaf.dtype))

    def _reset(self, tensordict=None, **kwargs):
        return self.seen(super()._reset(tensordict, **kwargs))

    def _step(self, tensordict):
        return self.seen(super()._step(tensordict))


@pytest.mark.parametrize(
    "make", [Pixels, lambda: Pixels(2), lambda: TransformedEnv(Pixels(), StepCounter())], ids=["one", "two", "dict"]
)
def test_images_of_bytes_have_their_channels_last_as_everywhere(make):
    def image(x):
        return x["image"] if isinstance(x, dict) else x

    env = TorchRL(make)
    assert image(env.spec.observation) == Array((4, 5, 3), torch.uint8)
    check_env(env)
    _, timestep = env.init(keys(2))
    for i in range(3):
        expected = (torch.arange(60).reshape(3, 4, 5) + i).movedim(0, -1).to(torch.uint8)
        assert all(torch.equal(row, expected) for row in image(timestep.observation))
        _, timestep = env.step(None, torch.ones(2, dtype=torch.int64), keys(2))
    stacked = FrameStack(env, 2)
    assert image(stacked.spec.observation).shape == image(stacked.init(keys(2))[1].observation).shape[1:] == (4, 5, 6)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 5, 3), torch.uint8), ((3, 4, 5), torch.float32), ((3, 4), torch.uint8)]
)
def test_other_tensors_keep_their_axes(shape, dtype):
    env = TorchRL(functools.partial(Pixels, shape=shape, dtype=dtype))
    assert env.spec.observation == Array(shape, dtype)
    _, timestep = env.init(keys(2))
    assert torch.equal(timestep.observation[1], torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype))


def test_images_of_ours_come_back_as_they_were():
    """There and back, bytes `[H, W, C]` are not turned."""

    class Lawn(TensorEnv):
        spec = EnvSpec("lawn", Array((6, 5, 2), torch.uint8), Discrete(2), 5)

        def reset(self, keys):
            return random.bits(keys, 60).reshape(-1, 6, 5, 2) % 256

        def observe(self, state):
            return state.to(torch.uint8)

    there = to_torchrl(Lawn(), 3)
    back = TorchRL(lambda num_envs=1: there)
    assert back.spec.observation == Lawn.spec.observation
    _, timestep = back.init(keys(3))
    assert torch.equal(timestep.observation, there._seen["observation"])


def test_several_entries_are_a_dict_and_bounds_are_scaled():
    class Two(Count):
        def __init__(self):
            super().__init__()
            self.action_spec = Bounded(low=torch.tensor([0.0, -4.0]), high=torch.tensor([1.0, 4.0]))

        def _step(self, tensordict):
            self.seen = tensordict["action"]
            return super()._step(tensordict.clone().set("action", torch.tensor([1, 0, 0])))

    env = TorchRL(lambda: TransformedEnv(Two(), StepCounter()))
    assert env.spec.action == Box((2,), -1.0, 1.0)
    assert env.spec.observation == {"observation": Array((1,)), "step_count": Array((1,))}
    env.init(keys(2))
    _, timestep = env.step(None, torch.tensor([[0.0, 0.5], [-3.0, 1.0]]), keys(2))
    assert timestep.observation["step_count"].tolist() == [[1.0], [1.0]]
    assert [part.env.base_env.seen.tolist() for part in env._parts] == [[0.5, 2.0], [0.0, 4.0]]


def test_bounds_on_one_side_alone_are_none_and_actions_are_clipped_to_them():
    class Half(Count):
        def __init__(self):
            super().__init__()
            self.action_spec = Bounded(low=torch.tensor([-1.0, -torch.inf]), high=torch.tensor([1.0, 1.0]))

        def _step(self, tensordict):
            self.seen = tensordict["action"]
            return super()._step(tensordict.clone().set("action", torch.tensor([1, 0, 0])))

    env = TorchRL(Half)
    assert env.spec.action == Box((2,))
    env.init(keys(1))
    env.step(None, torch.tensor([[2.0, -7.0]]), keys(1))
    assert env._parts[0].env.seen.tolist() == [1.0, -7.0]


def test_a_file_trains_in_sebulba(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(COUNT)
    settings = ["algo=ppo", "loop=sebulba", "env=my_env.py:Count", "+env.limit=5", "num_envs=8"]
    settings += ["algo.unroll_length=16", "total_env_steps=3072", "algo.learner.learning_rate=3e-3"]
    run = execute(load([*settings, "compile=false", "logger.console=false", "evaluation.episodes=8"]))
    # Action 2 pays most at once, and ends; 1 pays 1 five times, 2 in the last step one more.
    assert run.summary["eval_return"]["mean"] >= 5.0


def test_one_of_several_rows_is_checked_trained_evaluated_and_recorded(tmp_path):
    (tmp_path / "my_env.py").write_text(COUNT + "\ndef make():\n    return Count(8)\n")
    agent = Path(__file__).parents[2] / "user_agent.py"
    settings = [f"algo={agent}:MyAgent", "loop=sebulba", f"env={tmp_path / 'my_env.py'}:make", "num_envs=16"]
    settings += ["+env.transforms=[flatten]", f"run_dir={tmp_path / 'run'}"]
    settings += ["algo.unroll_length=16", "total_env_steps=512", "compile=false", "logger.console=false"]
    run = execute(load([*settings, "evaluation.episodes=10"]))
    told, *_ = eval_run(tmp_path / "run", episodes=10, episode=tmp_path / "first.npz").splitlines()
    assert json.loads(told)["mean"] == run.summary["eval_return"]["mean"]
    assert np.load(tmp_path / "first.npz")["step_type"][[0, -1]].tolist() == [FIRST, LAST]


class Board(Count):
    """Says what is allowed: where it ends, nothing."""

    def __init__(self, num_envs=None, stuck=99, width=3):
        super().__init__(num_envs)
        self.stuck, mask = stuck, Binary(width, shape=(*self.batch_size, width), dtype=torch.bool)
        self.observation_spec = Composite(
            observation=self.observation_spec["observation"], action_mask=mask, shape=self.batch_size
        )

    def seen(self, tensordict):
        count = self.where.floor()
        mask = torch.tensor([True, True, False]) & (count != self.limit) & (count != self.stuck)
        return tensordict.set("action_mask", mask)

    def _reset(self, tensordict=None, **kwargs):
        return self.seen(super()._reset(tensordict, **kwargs))

    def _step(self, tensordict):
        return self.seen(super()._step(tensordict))


@pytest.mark.parametrize("make", [Board, lambda: Board(4), lambda num_envs=1: Board(num_envs)])
def test_a_mask_is_open_where_an_episode_is_over(make):
    env = TorchRL(make)
    check_env(env)
    _, timestep = env.init(keys(4))
    for t in range(1, 12):
        action = random_action(env.spec, timestep.observation, keys(4))
        _, timestep = env.step(None, action, keys(4))
        assert timestep.observation["action_mask"].tolist() == [[True, True, t % 4 == 3]] * 4


def test_masks_that_allow_nothing_or_do_not_fit_are_refused():
    env = TorchRL(functools.partial(Board, stuck=1))
    env.init(keys(2))
    with pytest.raises(ValueError, match="gave an action_mask that allows nothing, in row 0; allow something, or end"):
        env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))
    with pytest.raises(ValueError, match=r"action_mask is \[4\], and the action .*; give one entry per value"):
        TorchRL(functools.partial(Board, width=4))


class Nested(TensorEnv):
    """Has a mask in a dict of observations, which allows one action, another one in each row."""

    spec = EnvSpec("nested", {"x": Array((2,)), "action_mask": Array((3,), torch.bool)}, Discrete(3), 5)

    def reset(self, keys):
        return random.uniform(keys, 2, 0.0, 3.0)

    def transition(self, state, action, keys):
        allowed = self.observe(state)["action_mask"].gather(-1, action[:, None])[:, 0]
        return random.uniform(keys, 2, 0.0, 3.0), (~allowed).float(), action == 3

    def observe(self, state):
        return {"x": state, "action_mask": torch.arange(3) == state[:, :1].floor()}


def test_a_nested_mask_is_one_if_there_is_no_other():
    env = TorchRL(lambda num_envs=1: to_torchrl(Nested(), num_envs))
    assert env.spec.observation == {"observation.x": Array((2,)), "action_mask": Array((3,), torch.bool)}
    check_env(env)
    _, timestep = env.init(keys(4))
    for _ in range(12):
        _, timestep = env.step(None, random_action(env.spec, timestep.observation, keys(4)), keys(4))
        assert (timestep.reward == 0).all()

    class Two(Count):
        def __init__(self):
            super().__init__()
            mask = Binary(3, shape=(3,), dtype=torch.bool)
            self.observation_spec = Composite(action_mask=mask, other=Composite(action_mask=mask.clone()))

    assert set(TorchRL(Two).spec.observation) == {"action_mask", "other.action_mask"}


def writes_other(change):
    """An environment whose `_step`, or whose `_reset`, writes something else than its specs say."""

    class Other(Count):
        def _reset(self, tensordict=None, **kwargs):
            return change("_reset", super()._reset(tensordict, **kwargs))

        def _step(self, tensordict):
            return change("_step", super()._step(tensordict))

    return Other


@pytest.mark.parametrize(
    ("where", "change", "told"),
    [
        (
            "_reset",
            lambda x: x.rename_key_("observation", "obs"),
            r"must write 'observation' with shape \[1\], .*'obs'",
        ),
        ("_step", lambda x: x.rename_key_("observation", "obs"), r"must write 'observation' with shape \[1\], .*'obs'"),
        (
            "_step",
            lambda x: x.set("observation", torch.zeros(2)),
            r"must write 'observation' .* with shape \[2\]; write",
        ),
        (
            "_step",
            lambda x: x.set("reward", torch.zeros(2)),
            r"must write 'reward' with shape \[1\], .* with shape \[2\]",
        ),
        ("_step", lambda x: x.exclude("reward"), r"must write 'reward' with shape \[1\], "),
    ],
)
def test_what_an_environment_writes_is_what_its_specs_say(where, change, told):
    """Without the check an observation of another name would be the last one for ever."""

    def maybe(at, written):
        return change(written) if at == where else written

    env = TorchRL(writes_other(maybe))
    with pytest.raises(ValueError, match=rf"Other\.{where}\(\) {told}"):
        env.init(keys(2))
        env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))


def test_wrong_things_are_named(tmp_path):
    class Wrong(Count):
        def __init__(self, **specs):
            super().__init__()
            for name, spec in specs.items():
                setattr(self, name, spec)

    with pytest.raises(ValueError, match="its action is MultiOneHot .*use OneHot, Categorical or Bounded"):
        TorchRL(functools.partial(Wrong, action_spec=MultiOneHot([2, 2])))
    with pytest.raises(ValueError, match=r"its reward has the shape \[2\]; use one number"):
        TorchRL(functools.partial(Wrong, reward_spec=Unbounded(2)))
    two = Composite(one=Unbounded(1), two=Unbounded(1))
    with pytest.raises(ValueError, match=r"has the rewards \['one', 'two'\] and the ends .*not in groups"):
        TorchRL(functools.partial(Wrong, reward_spec=two))
    with pytest.raises(ValueError, match=r"batch size \[2, 2\]; use one axis"):
        TorchRL(lambda: SerialEnv(2, lambda: Count(2)))
    with pytest.raises(ValueError, match="has 4 rows each, and num_envs=6 is no multiple"):
        TorchRL(lambda: Count(4)).init(keys(6))
    with pytest.raises(RuntimeError, match=r"init\(\) comes before step"):
        TorchRL(Count).step(None, torch.zeros(2), keys(2))
    (tmp_path / "bad.py").write_text(COUNT.replace("OneHot(3, shape=torch.Size([*size, 3]))", "Unbounded(1)"))
    with pytest.raises(ConfigError, match="cannot be made with .*use OneHot, Categorical or Bounded"):
        make_env(f"{tmp_path / 'bad.py'}:Count")


def test_what_is_no_environment_of_torchrl_is_refused():
    with pytest.raises(ValueError, match=r"three returned a int, and must return a torchrl.envs.EnvBase"):
        TorchRL(three)
    with pytest.raises(
        ValueError, match="TorchRL makes as many as it steps, and got one TorchRLEnv; hand over its cla"
    ):
        TorchRL(to_torchrl(Catch(), num_envs=1))
    with pytest.raises(
        ConfigError, match="env=TorchRLEnv is one torchrl.envs.EnvBase, and a run needs many: hand over"
    ):
        train(env=to_torchrl(Catch(), num_envs=1), loop="sebulba")


def test_an_observation_of_several_shapes_is_refused():
    with pytest.raises(
        ValueError, match=r"the observation observation is of parts of several .*, \[3, -1\]; make it one"
    ):
        TorchRL(lambda: GymEnv("Blackjack-v1"))


def test_a_batch_that_gymnasium_resets_is_refused():
    """It resets a row in the step that ends it, and all or none of the others later."""
    for make in (
        lambda: TransformedEnv(Count(2), VecGymEnvTransform()),
        lambda num_envs=1: TransformedEnv(Count(num_envs), Compose(VecGymEnvTransform(), StepCounter())),
    ):
        with pytest.raises(ValueError, match=r"Gymnasium resets by itself, such as GymEnv\(.*; use one GymEnv per row"):
            TorchRL(make)


def three():
    return 3
