"""`python -m torchpod.render [FOLDER]` draws the pictures of docs/environments.md: one of each tensor environment."""

import sys
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.env import TensorEnv
from torchpod.envs import MAKERS
from torchpod.render import describe, render
from torchpod.specs import Box, Discrete

MOMENTS = {
    "acrobot": 90,
    "bernoulli_bandit": 40,
    "cartpole": 12,
    "catch": 5,
    "covid_economy": 330,
    "deep_sea": 5,
    "delayed_chain": 4,
    "four_rooms": 30,
    "grid_world": 30,
    "memory_chain": 1,
    "minatar_asterix": 391,
    "minatar_breakout": 12,
    "minatar_freeway": 25,
    "minatar_seaquest": 327,
    "minatar_space_invaders": 30,
    "mountain_car": 60,
    "mountain_car_continuous": 60,
    "pendulum": 20,
    "point_mass": 12,
    "tag_continuous": 60,
    "tag_gridworld": 30,
}
"""After how many steps the picture is taken."""


def draw_pictures(folder: Path) -> list[Path]:
    """Writes NAME.png for every tensor environment; the actions are random and the same each time."""
    from PIL import Image

    files = []
    for name, maker in MAKERS.items():
        if not (isinstance(maker, type) and issubclass(maker, TensorEnv)):
            continue
        env = maker()
        keys = random.key(0)[None]
        state, timestep = env.init(keys)
        count, reward, total, states = 0, 0.0, 0.0, [state]
        for i in range(1, MOMENTS.get(name, 10) + 1):
            words = random.at(random.fold_in(keys, 1), torch.tensor(i))
            spec = env.spec.action
            if isinstance(spec, Box):
                action = random.uniform(words, spec.shape[0], spec.low, spec.high)
            elif isinstance(spec, Discrete):
                action = random.to_integer(random.bits(words, 1)[..., 0], spec.num_values)
            else:
                action = random_action(env.spec, timestep.observation, words)
            state, timestep = env.step(state, action, random.at(keys, torch.tensor(i)))
            if timestep.step_type == 0:
                count, total, states = 0, 0.0, [state]
            else:
                count, states = count + 1, [*states, state]
            reward = sum(float(leaf.mean()) for leaf in pytree.tree_leaves(timestep.reward))
            total += reward
        history = pytree.tree_map(lambda *x: torch.stack(x), *states)
        caption = describe(count, reward, total)
        frame = Image.fromarray(render(env, state, timestep, caption=caption, history=history))
        files.append(folder / f"{name}.png")
        folder.mkdir(parents=True, exist_ok=True)
        frame.quantize(256, dither=Image.Dither.NONE).save(files[-1], optimize=True)
    return files


if __name__ == "__main__":
    print("\n".join(map(str, draw_pictures(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")))))
