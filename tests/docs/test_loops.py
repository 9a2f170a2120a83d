"""docs/loops.md: its Python block runs, and what it says about lags is what the agents say."""

import re
from pathlib import Path

from torchpod.algos import A2C, IMPALA, PPO

PAGE = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()


def test_the_block_trains_on_an_environment_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/loops.md", "exec"), {"__name__": "loops"})
    assert float(capsys.readouterr().out) > 12  # 10 by chance


def test_the_lags_named_are_those_of_the_agents():
    assert "A2C takes lag 0, PPO 1, IMPALA any" in PAGE
    assert (A2C.max_lag, PPO.max_lag, IMPALA.max_lag) == (0, 1, None)
