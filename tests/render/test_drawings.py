"""Every tensor environment gives frames of the declared size that change with its state; users' own get the default."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.render.boat import Boat
from tests.test_evaluate import Lives
from torchpod import random
from torchpod.actions import random_action
from torchpod.env import TensorEnv
from torchpod.envs import MAKERS, BernoulliBandit, CartPole, Catch, DelayedChain, FourRooms, GridWorld, MemoryChain
from torchpod.envs.transforms import FrameStack, RewardClip
from torchpod.render import DRAWINGS, Canvas, Drawing, describe, drawing_of, frame_size, render
from torchpod.render.canvas import BLUE, GREEN, RED, mix
from torchpod.render.cells import _numbers, _unit
from torchpod.render.drawings import DEFAULT
from torchpod.specs import Array, Box, Discrete, EnvSpec

pytest.importorskip("PIL")

TENSOR = [name for name, maker in MAKERS.items() if isinstance(maker, type) and issubclass(maker, TensorEnv)]


class Own(TensorEnv):
    """Shows the same observation, whatever happens."""

    def __init__(self, spec, observation):
        self.spec, self.observation = EnvSpec("own", spec, Discrete(2)), observation

    def reset(self, keys):
        return torch.zeros(keys.shape[0])

    def observe(self, state):
        if isinstance(self.observation, dict):
            return {name: leaf.expand(len(state), *leaf.shape) for name, leaf in self.observation.items()}
        return self.observation.expand(len(state), *self.observation.shape)


def frames(env, num_steps, seed=0):
    """Frames of random play, without captions."""
    keys = random.key(seed)[None]
    state, timestep = env.init(keys)
    made = [render(env, state, timestep)]
    for i in range(1, num_steps + 1):
        words = random.at(random.fold_in(keys, 1), torch.tensor(i))
        spec = env.spec.action
        if isinstance(spec, Discrete):
            action = random.to_integer(random.bits(words, 1)[..., 0], spec.num_values)
        elif isinstance(spec, Box):
            action = random.uniform(words, spec.shape[0], spec.low, spec.high)
        else:
            action = random_action(env.spec, timestep.observation, words)
        state, timestep = env.step(state, action, random.at(keys, torch.tensor(i)))
        made.append(render(env, state, timestep))
    return made


def first_frame(env):
    return render(env, *env.init(random.key(0)[None]))


def colours(frame):
    return {"#" + "".join(f"{c:02X}" for c in colour) for colour in np.unique(frame.reshape(-1, 3), axis=0).tolist()}


@pytest.mark.parametrize("name", TENSOR)
def test_a_frame_has_the_declared_size_and_changes_with_the_state(name):
    env = MAKERS[name]()
    assert type(env) in DRAWINGS
    made = frames(env, 12)
    height, width = frame_size(env)
    assert height % 2 == width % 2 == 0
    assert all(frame.shape == (height, width, 3) and frame.dtype == np.uint8 for frame in made)
    assert len({frame.tobytes() for frame in made}) >= 6
    assert (8 <= drawing_of(env).fps <= 30) or name == "memory_chain"


@pytest.mark.parametrize(
    "env",
    [
        GridWorld("longer"),
        GridWorld("random_small"),
        GridWorld(objects=[{"reward": [-2, 2], "termination": 0, "respawn": 0.1, "count": 9}]),
        FourRooms(image=True),
        Catch(3, 12),
        DelayedChain(high=50, num_distractors=30),
        MemoryChain(20, 30),
        BernoulliBandit(30, "independent"),
    ],
)
def test_other_arguments_are_drawn_too(env):
    made = frames(env, 8)
    assert all(frame.shape[:2] == frame_size(env) for frame in made)
    assert len({frame.tobytes() for frame in made}) > 1


def test_each_row_of_a_batch_has_its_frame():
    env = Catch()
    state, timestep = env.init(random.split(random.key(0), 8))
    made = [render(env, state, timestep, row=i) for i in range(8)]
    for i in range(8):
        for j in range(i):
            same = bool(state[0].ball_column[i] == state[0].ball_column[j])
            assert np.array_equal(made[i], made[j]) == same


def test_the_caption_says_where_in_the_episode_it_is():
    assert describe(3, 1.0, 2.5) == ("step 3", "reward 1", "return 2.50")
    assert describe(0, 0.0, -0.001) == ("step 0", "reward 0", "return -0.001")
    assert describe(1, math.nan, -math.inf) == ("step 1", "reward nan", "return -inf")
    env = Catch()
    state, timestep = env.init(random.key(0)[None])
    without, with_ = (render(env, state, timestep, caption=c) for c in ((), describe(1, 2, 3)))
    height = drawing_of(env).size[1]
    assert np.array_equal(without[:height], with_[:height]) and not np.array_equal(without, with_)


def test_good_objects_are_green_and_bad_ones_red():
    for reward, colour in ((1, GREEN), (-1, RED)):
        objects = [{"reward": reward, "termination": 0, "respawn": 0}]
        assert ({GREEN, RED} & colours(first_frame(GridWorld(objects=objects)))) == {colour}


def test_images_become_cells_of_one_colour_per_channel():
    image = torch.zeros(5, 7, 3)
    image[0, 0, 0] = image[4, 6, 1] = 1.0
    seen = colours(first_frame(Own(Box((5, 7, 3), 0.0, 1.0), image)))
    assert {BLUE, RED, GREEN} <= seen  # the third is in the legend
    pixels = torch.randint(0, 256, (84, 84, 4), dtype=torch.uint8)
    assert first_frame(Own(Array((84, 84, 4), torch.uint8), pixels)).std() > 10


def test_bytes_with_three_channels_are_colours():
    image = torch.zeros(8, 8, 3, dtype=torch.uint8)
    image[2, 2] = torch.tensor([12, 200, 99])
    assert "#0CC863" in colours(first_frame(Own(Array((8, 8, 3), torch.uint8), image)))


@pytest.mark.parametrize(
    ("spec", "observation"),
    [
        (Array((3,)), torch.tensor([0.0, -1e6, 3.0])),
        (Box((3,), -1.0, 1.0), torch.tensor([0.0, -1.0, 1.0])),
        (
            {"pos": Box((2,)), "action_mask": Array((2,), torch.bool)},
            {"pos": torch.ones(2), "action_mask": torch.ones(2) > 0},
        ),
        (Array((300,)), torch.linspace(-1, 1, 300)),
        (Array(()), torch.tensor(0.5)),
        (Array((4, 5)), torch.ones(4, 5)),
    ],
)
def test_other_observations_become_bars_or_cells(spec, observation):
    env = Own(spec, observation)
    assert drawing_of(env) is DEFAULT
    frame = first_frame(env)
    assert frame.shape[:2] == frame_size(env) and BLUE in colours(frame)


BROKEN = torch.tensor([math.nan, math.inf, -math.inf, 1.0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("spec", "observation"),
    [
        (Box((3,), 0.0, 0.0), torch.zeros(3)),
        (Box((300,), 0.0, 0.0), torch.zeros(300)),
        (Box((4, 4, 1), 2.0, 2.0), torch.full((4, 4, 1), 2.0)),
        (Box((4, 4, 1), -math.inf, 0.0), torch.zeros(4, 4, 1)),
        (Box((3,), -1.0, 1.0), torch.full((3,), math.nan)),
        (Array((3, 3, 1)), torch.full((3, 3, 1), math.inf)),
        (Array((3, 3, 1)), torch.full((3, 3, 1), math.nan)),
        (Array((300,)), BROKEN.repeat(75)),
    ],
)
def test_constants_and_numbers_that_are_none_are_drawn(spec, observation):
    assert first_frame(Own(spec, observation)).shape[:2] == frame_size(Own(spec, observation))


def test_infinity_is_as_long_as_can_be_and_nan_is_nothing():
    assert [row[2] for row in _numbers("", Array((4,)), BROKEN)] == [0.0, 1.0, -1.0, 0.5]
    assert [row[2] for row in _numbers("", Box((4,), -2.0, 2.0), BROKEN)] == [0.0, 1.0, -1.0, 0.5]
    image = BROKEN[:, None, None]
    assert _unit(image, Array((4, 1, 1))).flatten().tolist() == [0.0, 1.0, 0.0, 1.0]
    assert _unit(2 * image, Box((4, 1, 1), -1.0, 3.0)).flatten().tolist() == [0.0, 1.0, 0.0, 0.75]


def test_a_drawing_of_ones_own_is_used_for_subclasses_too(monkeypatch):
    class Derived(Own):
        pass

    def draw(canvas, env, state, observation):
        assert state.shape == () and observation.shape == (3,)
        canvas.rectangle((0, 0), (canvas.width, canvas.height), "#123456")

    monkeypatch.setitem(DRAWINGS, Own, Drawing(draw, (60, 40), 5))
    frame = first_frame(Derived(Array((3,)), torch.zeros(3)))
    assert frame.shape == (72, 60, 3) and (frame[:40] == [0x12, 0x34, 0x56]).all()


@pytest.mark.parametrize("make", [Catch, CartPole, FourRooms])
def test_transforms_are_looked_through(make):
    env, inside = make(), FrameStack(RewardClip(make()), 4)
    (state, timestep), (wrapped, shown) = (e.init(random.key(0)[None]) for e in (env, inside))
    assert frame_size(inside) == frame_size(env)
    for i in range(4):
        assert np.array_equal(render(inside, wrapped, shown), render(env, state, timestep))
        action, keys = torch.tensor([i % 2]), random.key(i)[None]
        (state, timestep), (wrapped, shown) = env.step(state, action, keys), inside.step(wrapped, action, keys)


class Detour(GridWorld):
    """Overrides both, `init` by way of `GridWorld`."""

    def step(self, state, action, keys):
        return super().step(state, action, keys)


@pytest.mark.parametrize("make", [Boat, Detour])
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: FrameStack(RewardClip(env), 3)])
@pytest.mark.parametrize("looks_back", [False, True])
def test_an_environment_that_overrides_step_is_drawn_by_the_state_of_its_reset(make, wrap, looks_back, monkeypatch):
    plain, env, drawn, keys = make(), wrap(make()), [], random.key(0)[None]

    def draw(canvas, env, state, observation):
        drawn.append((state, observation))

    monkeypatch.setitem(DRAWINGS, make, Drawing(draw, history=looks_back))
    (state, _), (wrapped, shown) = plain.init(keys), env.init(keys)
    for i in range(1, 4):
        action = random_action(plain.spec, None, random.at(keys, i))
        (state, _), (wrapped, shown) = plain.step(state, action, keys), env.step(wrapped, action, keys)
    render(env, wrapped, shown)
    expected = pytree.tree_map(lambda x: x if looks_back else x[0], state[0]), plain.observe(state[0])
    found = drawn[0][0], pytree.tree_map(lambda x: x[None], drawn[0][1])
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    assert all(map(torch.equal, pytree.tree_leaves(found), pytree.tree_leaves(expected)))


def test_an_environment_that_adds_to_its_state_in_init_is_drawn_by_all_of_it(monkeypatch):
    drawn = []
    monkeypatch.setitem(DRAWINGS, Lives, Drawing(lambda canvas, env, state, observation: drawn.append(state)))
    first_frame(Lives())
    ((inner, count, was_last), life), *_ = drawn
    assert set(inner) == {"left", "prize"} and count.shape == was_last.shape == life.shape == ()


def test_a_drawing_that_takes_other_arguments_is_named(monkeypatch):
    def draw_board(canvas, state):
        raise AssertionError("never called")

    monkeypatch.setitem(DRAWINGS, Catch, Drawing(draw_board))
    with pytest.raises(
        ValueError, match=r"^draw_board cannot draw catch: TypeError: .* called as draw\(canvas, env, st"
    ):
        first_frame(Catch())


def test_colours_are_mixed():
    assert mix("#000000", "#FF8040", 0.5) == "#804020"
    assert (mix(BLUE, RED, 0.0), mix(BLUE, RED, 1.0)) == (BLUE, RED)


def test_without_pillow_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'torchpod-rl\[video\]'"):
        Canvas(10, 10)
