"""Tensor environments behind Gymnasium's contract: their own steps, in NumPy."""

import pickle
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from torchpod import random
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import MAKERS, CartPole, Catch, Pendulum
from torchpod.interop.gym_vector import VectorEnv, space_of
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import FIRST, LAST

IDS = {
    f"torchpod/{maker.__name__}-v1": maker
    for maker in MAKERS.values()
    if isinstance(maker, type) and issubclass(maker, TensorEnv)
}
GROUPS = [id_ for id_, maker in IDS.items() if maker().spec.groups is not None]


class Counter(TensorEnv):
    """Ends by itself where the action says so, else after three steps; observes its state, and everything else."""

    spec = EnvSpec(
        "counter",
        {"count": Array((1,)), "mask": Array((2,), torch.bool), "image": Array((2, 2), torch.uint8), "id": Discrete(9)},
        Discrete(2),
        3,
    )

    def reset(self, keys):
        return torch.zeros(keys.shape[0], 1, device=keys.device)

    def transition(self, state, action, keys):
        return state + 1, action * 1.0, action == 1

    def observe(self, state):
        image = state.to(torch.uint8)[..., None].expand(-1, 2, 2)
        return {"count": state, "mask": state.expand(-1, 2) > 0, "image": image, "id": state[:, 0].long()}


@pytest.mark.parametrize("id_", [id_ for id_ in IDS if id_ not in GROUPS])
def test_every_registered_environment_steps_as_its_own_rollout_does(id_, seed):
    venv, env = gymnasium.make_vec(id_, num_envs=3), IDS[id_]()
    keys = random.split(random.key(seed), 3)
    observation, _ = venv.reset(seed=seed)
    state, timestep = env.init(random.at(keys, 0))
    venv.action_space.seed(seed)
    for i in range(1, 40):
        assert venv.observation_space.contains(observation)
        np.testing.assert_array_equal(observation, timestep.observation)
        action = venv.action_space.sample()
        observation, reward, terminated, truncated, infos = venv.step(action)
        state, timestep = env.step(state, torch.from_numpy(action), random.at(keys, i))
        last = timestep.step_type == LAST
        np.testing.assert_array_equal(reward, timestep.reward)
        np.testing.assert_array_equal(terminated, last & (timestep.discount == 0))
        np.testing.assert_array_equal(truncated, last & (timestep.discount == 1))
        assert reward.dtype == np.float32 and terminated.dtype == truncated.dtype == bool and infos == {}


@pytest.mark.parametrize("id_", GROUPS)
def test_a_game_of_several_agents_is_refused_in_one_sentence_and_not_registered(id_):
    with pytest.raises(ValueError, match="has groups of agents, which Gymnasium knows nothing of; use one agent"):
        VectorEnv(IDS[id_](), 3)
    assert id_ not in gymnasium.registry and "torchpod/CartPole-v1" in gymnasium.registry


def test_a_dict_of_actions_is_refused_in_one_sentence():
    class Parts(Counter):
        spec = EnvSpec("parts", Counter.spec.observation, {"a": Discrete(2), "b": Discrete(3)}, 3)

    with pytest.raises(ValueError, match=r"parts has a dict of actions, \['a', 'b'\], and VectorEnv takes one Box"):
        VectorEnv(Parts())


def test_actions_of_several_integers():
    class Two(Counter):
        spec = EnvSpec("two", Counter.spec.observation, MultiDiscrete((2, 3)), 3)

        def transition(self, state, action, keys):
            return super().transition(state, action[:, 1] // 2, keys)

    venv = VectorEnv(Two(), 2)
    venv.reset()
    assert venv.single_action_space == gymnasium.spaces.MultiDiscrete([2, 3])
    assert venv.step(np.array([[1, 2], [1, 1]]))[2].tolist() == [True, False]
    with pytest.raises(ValueError, match=r"two takes integers from 0 to \[1 2\] as actions"):
        venv.step(np.array([[2, 0], [0, 0]]))


def test_the_step_after_the_last_ignores_the_action_and_begins_an_episode():
    venv = VectorEnv(Counter(), 2)
    assert venv.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    observation, _ = venv.reset()
    assert observation["count"].tolist() == [[0], [0]] and venv.observation_space.contains(observation)
    rows = [[1, 0], [1, 0], [0, 0], [0, 1]]  # terminates at once; is cut after three, and then ignores a 1
    found = [venv.step(np.array(row)) for row in rows]
    assert [o["count"][:, 0].tolist() for o, *_ in found] == [[1, 1], [0, 2], [1, 3], [2, 0]]
    assert [r.tolist() for _, r, *_ in found] == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert [t.tolist() for *_, t, _, _ in found] == [[True, False]] + [[False, False]] * 3
    assert [t.tolist() for *_, t, _ in found] == [[False, False]] * 2 + [[False, True], [False, False]]
    assert venv.observation_space.contains(found[0][0]) and found[0][0]["mask"].dtype == np.int8


def test_what_was_returned_stays_and_may_be_written_to():
    venv = VectorEnv(Counter(), 2)
    first, _ = venv.reset()
    second, *_ = venv.step([0, 0])
    second["count"][:] = 100.0
    third, *_ = venv.step([0, 0])
    assert first["count"].tolist() == [[0], [0]] and third["count"].tolist() == [[2], [2]]


def test_memory_is_shared_where_the_state_does_not_have_it():
    venv = VectorEnv(Pendulum(), 2)
    venv.reset()
    assert not venv.step(np.zeros((2, 1), np.float32))[0].flags.owndata


def test_floats_outside_the_bounds_are_clipped_by_the_environment():
    rewards = []
    for actions in ([[2.0], [-2.0]], [[100.0], [-3.0]]):
        venv = VectorEnv(Pendulum(), 2)
        venv.reset()
        rewards.append(venv.step(actions)[1])
    np.testing.assert_array_equal(*rewards)


def test_seeds_repeat_and_differ_and_may_be_given_for_each_environment():
    venv, other = VectorEnv(CartPole(), 4, seed=3), VectorEnv(CartPole(), 4, seed=4)
    first, _ = venv.reset()
    again, _ = venv.reset()
    assert not np.array_equal(first, again) and not np.array_equal(first, other.reset()[0])
    np.testing.assert_array_equal(venv.reset(seed=3)[0], first)
    np.testing.assert_array_equal(other.reset(seed=np.int64(3))[0], first)
    rows, _ = venv.reset(seed=[7, 8, 7, 9])
    assert np.array_equal(rows[0], rows[2]) and not np.array_equal(rows[0], rows[1])


def test_episodes_are_what_gymnasiums_own_wrapper_counts():
    venv = RecordEpisodeStatistics(gymnasium.make_vec("torchpod/Catch-v1", num_envs=8))
    venv.reset(seed=0)
    for _ in range(40):
        *_, infos = venv.step(np.ones(8, int))
    assert venv.episode_count == 8 * 4  # nine steps and a reset each
    assert set(venv.return_queue) == {-1.0, 1.0} and set(venv.length_queue) == {9}


def test_one_that_goes_to_another_process_goes_on_there():
    venv = VectorEnv(CartPole(), 4)
    venv.reset(seed=3)
    there = pickle.loads(pickle.dumps(venv))
    actions = np.zeros(4, np.int64)
    for _ in range(5):
        np.testing.assert_equal(there.step(actions)[:4], venv.step(actions)[:4])


def test_compiled_is_eager():
    eager, compiled = VectorEnv(Catch(), 4), VectorEnv(Catch(), 4, compile=True)
    seen = [[venv.reset(seed=1)[0]] for venv in (eager, compiled)]
    for i in range(12):
        for venv, kept in zip((eager, compiled), seen, strict=True):
            kept.append(venv.step(np.arange(i, i + 4) % 3)[0])
    np.testing.assert_array_equal(*map(np.stack, seen))


def test_arguments_of_the_environment_go_through_make_vec():
    venv = gymnasium.make_vec("torchpod/Catch-v1", num_envs=2, rows=5, seed=1)
    assert venv.reset()[0].shape == (2, 5, 5, 1)
    assert venv.spec is not None and venv.spec.id == "torchpod/Catch-v1"
    with pytest.raises(ValueError, match="catch takes no argument row; it takes .*rows"):
        gymnasium.make_vec("torchpod/Catch-v1", row=5)


def test_gymnasium_finds_the_module_by_itself_and_torchpod_alone_does_not_load_it():
    text = (
        "import sys, torchpod; assert 'gymnasium' not in sys.modules; import gymnasium, contextlib\n"
        "with contextlib.suppress(gymnasium.error.NamespaceNotFound):\n"
        "    gymnasium.make_vec('torchpod/CartPole-v1'); raise AssertionError('known already')\n"
        "venv = gymnasium.make_vec('torchpod.interop.gym_vector:torchpod/CartPole-v1', num_envs=4); "
        "print(venv.reset()[0].shape)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout == "(4, 4)\n", done.stderr


def test_wrong_things_are_named():
    venv = VectorEnv(CartPole(), 3)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        venv.step([0, 0, 0])
    venv.reset()
    with pytest.raises(ValueError, match=r"actions of shape \[3\], and these are \[2\]; give one for each of the 3"):
        venv.step([0, 0])
    with pytest.raises(ValueError, match="integers from 0 to 1 as actions, and these are int64 from 0 to 2"):
        venv.step([0, 1, 2])
    with pytest.raises(ValueError, match="these are float64"):
        venv.step([0.0, 1.0, 0.0])
    pendulum = VectorEnv(Pendulum(), 2)
    pendulum.reset()
    for value in (np.nan, np.inf):
        told = rf"pendulum takes finite numbers as actions, and that of environment 1 is \[{value}\]"
        with pytest.raises(ValueError, match=told):
            pendulum.step([[0.0], [value]])
    with pytest.raises(ValueError, match="2 seeds came for 3 environments"):
        venv.reset(seed=[1, 2])
    with pytest.raises(ValueError, match=r"seeds must be integers, and \[1, None, 3\] came; give one for each"):
        venv.reset(seed=[1, None, 3])  # pyright: ignore[reportArgumentType]  # that is the point
    for wrong, told in ((CartPole, "the class CartPole"), ("cartpole", "'cartpole'")):
        with pytest.raises(ValueError, match=rf"such as torchpod.envs.CartPole\(\), and got {told}"):
            VectorEnv(wrong, 3)  # pyright: ignore[reportArgumentType]  # that is the point
    with pytest.raises(ValueError, match="no options of reset; .*low"):
        venv.reset(options={"low": 1})
    with pytest.raises(ValueError, match="num_envs=0 must be at least 1"):
        VectorEnv(CartPole(), 0)
    with pytest.raises(ValueError, match="cartpole is stepped on the host"):
        VectorEnv(HostEnv(CartPole()), 2)
    with pytest.raises(ValueError, match="no space of torch.float16"):
        space_of(Array((2,), torch.float16))


def test_a_step_type_is_first_after_every_end():
    """That what the semantics above rest on holds: the contract's step after LAST is FIRST."""
    env, keys = Counter(), random.split(random.key(0), 1)
    state, timestep = env.init(keys)
    for _ in range(4):
        state, timestep = env.step(state, torch.zeros(1, dtype=torch.int64), keys)
    assert timestep.step_type.tolist() == [FIRST] and space_of(Box((1,), -1, 1)).low == -1
