"""docs/torchrl-envs.md: its Python blocks run, one after the other, as a reader would run them."""

import re
from pathlib import Path

import pytest

from torchpod.compose import load
from torchpod.makers import make_agent, make_env

PAGE = Path(__file__).parents[2] / "docs" / "torchrl-envs.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchRL's collectors, about themselves
@pytest.mark.filterwarnings("ignore:TensorDict.to_module:FutureWarning")  # of MultiAgentMLP in the oldest TorchRL
def test_the_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    names: dict = {"__name__": "__main__"}
    for block in BLOCKS[1:]:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = [line for line in capsys.readouterr().out.splitlines() if "[torchrl][INFO]" not in line]
    assert printed == [
        "(4,) Discrete(num_values=2, dtype=torch.int64)",
        "4096 torch.Size([256, 1])",
        "torch.Size([8, 20, 3, 1])",
        "torch.Size([256, 4])",
        "True",
    ]
    assert names["run"].summary["eval_return"]["episodes"] == 4


def test_the_commands_are_settings_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(BLOCKS[0])
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        config = load(command.split())
        spec = make_env(config.env).spec
        assert list(spec.observation) == ["observation", "step_count"]
        make_agent(config.algo, spec)()  # which reads them side by side
