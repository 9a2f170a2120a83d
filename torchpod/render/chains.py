"""Drawings of the tasks without a picture of their own: DelayedChain, MemoryChain, BernoulliBandit."""

from torchpod.envs.bernoulli_bandit import BernoulliBandit, BernoulliBanditState
from torchpod.envs.bsuite.memory_chain import MemoryChain, MemoryChainState
from torchpod.envs.delayed_chain import DelayedChain, DelayedChainState
from torchpod.render.canvas import AMBER, BLUE, DARK, FLOOR, GREEN, GREY, LIGHT, PAPER, RED, Canvas
from torchpod.types import Tree


def draw_delayed_chain(canvas: Canvas, env: DelayedChain, state: DelayedChainState, observation: Tree) -> None:
    """Two roads from one start; the colours of their ends say which is rewarded."""
    length, steps, good = int(state.chain.length), int(state.num_steps), int(state.chain.good)
    left, right = 40.0, canvas.width - 50.0
    middle = canvas.height / 2 - (24 if env.num_distractors else 0)

    def at(step: int, choice: int) -> tuple[float, float]:
        x = left + (right - left) * step / length
        return (x, middle) if step == 0 else (x, middle + (48 if choice else -48))

    for choice in range(2):
        canvas.line([at(step, choice) for step in range(length + 1)], LIGHT, 4)
        for step in range(1, length):
            canvas.circle(at(step, choice), 4, GREY)
        x, y = at(length, choice)
        canvas.circle((x, y), 14, GREEN if choice == good else RED)
        canvas.text((x, y), "+1" if choice == good else "-1", PAPER, 13, "mm")
        x, y = at(1, choice)
        canvas.text((x, y + (20 if choice else -20)), f"action {choice}", DARK, 13)
    canvas.circle(at(0, 0), 6, GREY)
    canvas.circle(at(steps, int(state.choice)), 10, BLUE, PAPER if steps >= length else None, 4)
    for i, bit in enumerate(state.distractors.tolist()):
        x, y = 40 + 18 * (i % 22), middle + 84 + 18 * (i // 22)
        canvas.rectangle((x, y), (x + 14, y + 14), AMBER if bit else LIGHT, 2)


def draw_memory_chain(canvas: Canvas, env: MemoryChain, state: MemoryChainState, observation: Tree) -> None:
    """A corridor: at its start the bits, bright while they are shown; at its end the question."""
    cells, steps = env.memory_length + 1, int(state.num_steps)
    width = (canvas.width - 60.0) / (cells + 1)
    y = canvas.height / 2 + 20
    shown, asked = steps <= 1, steps == env.memory_length
    canvas.text((30, 26), "shown:", DARK)
    size = min(26.0, (canvas.width - 120) / env.num_bits)
    for i, bit in enumerate(state.context.tolist()):
        x, colour = 90 + size * i, GREEN if bit else RED
        canvas.rectangle((x, 14), (x + size - 3, 38), colour if shown else LIGHT, 4)
        if size > 20:
            canvas.text((x + size / 2 - 1.5, 26), "+1" if bit else "-1", PAPER, 13, "mm")
    canvas.rectangle((30, y - 22), (canvas.width - 30, y + 22), FLOOR, 22)
    for step in range(cells + 1):
        canvas.circle((30 + width * (step + 0.5), y), 3, GREY)
    end = 30 + width * (env.memory_length + 0.5)
    question = f"bit {int(state.query)}?" if asked else "?"
    canvas.text((end, y - 40), question, AMBER if asked else GREY, 18, "mm")
    canvas.circle((30 + width * (min(steps, cells) + 0.5), y), 12, BLUE)


def draw_bernoulli_bandit(canvas: Canvas, env: BernoulliBandit, state: BernoulliBanditState, observation: Tree) -> None:
    """The chance of each arm, which the agent does not see; the last one pulled is green if it paid, else red."""
    top, bottom, pulled = 30.0, canvas.height - 44.0, int(state.last_action)
    step = (canvas.width - 40.0) / env.num_arms
    for i, chance in enumerate(state.chances.tolist()):
        x, half = 20 + step * (i + 0.5), min(40.0, 0.35 * step)
        height = top + (bottom - top) * (1 - chance)
        canvas.rectangle((x - half, top), (x + half, bottom), FLOOR, 4)
        colour = (GREEN if state.last_reward > 0 else RED) if i == pulled else GREY
        canvas.rectangle((x - half, height), (x + half, bottom), colour, 4)
        if env.num_arms <= 10:
            canvas.text((x, top - 14), f"{chance:.2f}", DARK, 13, "mm")
            canvas.text((x, bottom + 14), f"arm {i}", DARK, 13, "mm")
    end = 20 + (canvas.width - 40) * int(state.num_steps) / env.max_episode_steps
    canvas.rectangle((20, canvas.height - 12), (canvas.width - 20, canvas.height - 6), FLOOR, 3)
    canvas.rectangle((20, canvas.height - 12), (max(end, 26.0), canvas.height - 6), BLUE, 3)
