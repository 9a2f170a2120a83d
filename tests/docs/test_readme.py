"""Every Python block of the README runs, and every path it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_python_blocks_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "'episodes': 100" in printed
    assert "torch.Size([4, 4]) tensor([1., 1., 1., 1.])" in printed


def test_links_of_the_readme_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_reading_path_is_under_700_lines():
    names = ["torchpod/types.py", "torchpod/agent.py", "torchpod/rollout.py", "torchpod/anakin.py", "algos/ppo.py"]
    assert sum(len((ROOT / name).read_text().splitlines()) for name in names) < 700


def test_make_targets_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
