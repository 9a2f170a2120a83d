"""docs/loops.md: its Python blocks run, and what it says about lags is what the agents say."""

import re
from pathlib import Path
from typing import Any

import torch

from tests.interop.test_tensordicts import B, T, collect
from torchpod.algos import A2C, IMPALA, PPO
from torchpod.envs.classic.cartpole import CartPole
from torchpod.interop import to_tensordict

PAGE = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_block_trains_on_an_environment_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "loops"}
    exec(compile(BLOCKS[1], "docs/loops.md", "exec"), names)
    assert float(capsys.readouterr().out) > 12  # 10 by chance
    (names["run"].dir / "nan").mkdir()
    torch.save({".timestep.reward": torch.tensor([0.0, torch.nan])}, names["run"].dir / "nan" / "iteration-1-rank-0.pt")
    exec(compile(BLOCKS[3], "docs/loops.md", "exec"), names)
    assert capsys.readouterr().out == ".timestep.reward (2,) not finite\n"


def test_the_block_turns_trajectories_into_tensordicts_and_back():
    trajectory = collect(PPO(CartPole().spec), CartPole(), 0)
    names = {"trajectory": trajectory, "more_steps": to_tensordict(trajectory)}
    exec(compile(BLOCKS[0], "docs/loops.md", "exec"), names)
    assert names["steps"].batch_size == (B, T)
    assert names["again"].output.action.shape == (T, 2 * B)
    assert len(BLOCKS) == 4


def test_the_block_steps_a_tensor_environment_on_the_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "loops"}
    exec(compile(BLOCKS[2], "docs/loops.md", "exec"), names)
    assert names["run"].summary["env_steps"] > 0 and not names["env"].traits.pure


def test_the_lags_named_are_those_of_the_agents():
    assert "A2C takes lag 0, PPO 1, IMPALA any" in PAGE
    assert (A2C.max_lag, PPO.max_lag, IMPALA.max_lag) == (0, 1, None)
