"""docs/replay.md: its Python blocks run, its commands are settings that exist, and its table is true."""

import re
from pathlib import Path

import pytest
import torch

from torchpod import random
from torchpod.algos.dqn import DQN, DQNConfig
from torchpod.compose import load
from torchpod.env import TensorEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.minatar.breakout import Breakout
from torchpod.replay import ReplayBuffer, ReplayConfig
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Discrete, EnvSpec

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_blocks_run_and_the_agent_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_dqn.py").write_text(BLOCKS[0])
    exec(compile(BLOCKS[1], str(PAGE), "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.splitlines()[-1]) > 100  # 22 at random


def test_the_commands_are_settings_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_dqn.py").write_text(BLOCKS[0])
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        assert load(command.partition("  #")[0].split()).algo.replay is not None


class Images(TensorEnv):
    """Observes bytes, as Atari does."""

    spec = EnvSpec("images", Array((84, 84, 4), torch.uint8), Discrete(3))

    def reset(self, keys):
        return random.bits(keys, 1)

    def transition(self, state, action, keys):
        return state + 1, state[:, 0].float(), state[:, 0] < 0

    def observe(self, state):
        return (state[:, :, None, None] % 256).to(torch.uint8).expand(-1, 84, 84, 4).contiguous()


@pytest.mark.parametrize(
    ("env", "told", "frame_stack"),
    [(CartPole(), "36", 1), (Breakout(), "1,620", 1), (Images(), "28,244", 1), (Images(), "7,077", 4)],
    ids=["cartpole", "breakout", "atari", "frames"],
)
def test_a_step_takes_what_the_table_says(env, told, frame_stack):
    config = ReplayConfig(capacity=64, min_size=1, frame_stack=frame_stack)
    buffer = ReplayBuffer(config, num_envs=4, unroll_length=4, length=1, sequences=False)
    agent, keys = DQN(env.spec, DQNConfig(hidden=(8,))), random.split(random.key(0), 4)
    carry = start(agent, env, keys)
    variables = {**dict(agent.named_parameters()), **dict(agent.named_buffers())}
    _, trajectory = unroll(make_step(agent, env), variables, carry, keys, keys, length=4)
    buffer.insert(trajectory, torch.zeros((), dtype=torch.int64), ())
    kept, seen = buffer.storage["timestep"]["observation"], trajectory.timestep.observation
    each = seen.shape[-1] // frame_stack
    assert kept.dtype == env.spec.observation.dtype and kept.shape == (buffer.num_slots, *seen.shape[1:-1], each)
    assert torch.equal(kept[:4], seen[:4, ..., -each:])  # each step once
    sample = buffer.sample(buffer.storage, (), torch.tensor(0), torch.tensor(1.0), 8, keys[0])
    time, row = sample.leaf // 4, sample.leaf % 4
    assert sample.trajectory.timestep.observation.dtype == kept.dtype
    assert torch.equal(sample.trajectory.timestep.observation, torch.stack([seen[time, row], seen[time + 1, row]]))
    assert f"| {buffer.nbytes // (buffer.num_slots * 4):,} |" == f"| {told} |" and f"| {told} |" in TEXT
