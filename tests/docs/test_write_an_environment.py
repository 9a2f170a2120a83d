"""docs/write-an-environment.md: its Python blocks run, one after the other, as a reader would run them."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import run_blocks
from torchpod import random
from torchpod.main import main
from torchpod.makers import make_env
from torchpod.testing import check_env
from torchpod.types import LAST, TimeStep

PAGE = Path(__file__).parents[2] / "docs" / "write-an-environment.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def _check_mower_and_boat():
    """What the page says of them."""
    for name in ("my_mower.py:Mower", "my_boat.py:Boat"):
        check_env(make_env(name), compile=False)
    small = ["num_envs=8", "total_env_steps=2_000", "compile=false", "logger.console=false", "evaluation.episodes=2"]
    assert main(["train", "env=my_mower.py:Mower", "algo=ppo", "run_dir=mower", *small]) == 0
    rows = [json.loads(line) for line in Path("mower/metrics.jsonl").read_text().splitlines()]
    assert any(0 < (row["episode_mown"] or 0) <= 1 for row in rows)
    assert 0 < json.loads(Path("mower/summary.json").read_text())["eval_return"]["episode"]["mown"] <= 1
    boat, keys = make_env("my_boat.py:Boat"), random.split(random.key(0), 4)
    state, timestep = boat.init(keys)
    lasts: list[TimeStep] = []
    for i in range(1, 40):
        state, timestep = boat.step(state, torch.ones(4, 2), random.at(keys, i))
        lasts += [timestep] if (timestep.step_type == LAST).any() else []
    cut = torch.stack([(x.observation["place"] > 2).any(-1) & (x.step_type == LAST) for x in lasts])
    assert cut.any(0).all()
    for x, rows in zip(lasts, cut, strict=True):
        assert (x.discount[rows] == 1).all() and x.extras["game_over"][rows].all()


def test_the_page_has_its_blocks():
    assert len(BLOCKS) == 9
    assert "class MyEnv" in BLOCKS[0]
    assert len(BLOCKS[0].splitlines()) <= 35


def test_the_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert "run" in run_blocks(BLOCKS, PAGE, tmp_path, monkeypatch)
    assert main(["check", "my_env.py:MyEnv", "my_plain.py:PlainLift"]) == 0
    check_env(make_env("my_teams.py:Tug"), compile=False)
    _check_mower_and_boat()
    small = ("num_envs=8", "total_env_steps=2_000", "compile=false", "logger.console=false", "run_dir=tug")
    assert main(["train", "env=my_teams.py:Tug", "algo=ippo", "evaluation.episodes=2", *small]) == 0
    assert re.search(r"episodes: left -?[\d.]+, right -?[\d.]+\) after", capsys.readouterr().out)
