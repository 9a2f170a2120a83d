"""Python blocks and commands of the README and the pages on environments and agents run; links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import with_slow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ENV_PAGE = (ROOT / "docs" / "write-an-environment.md").read_text()
AGENT_PAGE = (ROOT / "docs" / "write-an-agent.md").read_text()
EXPERIMENTS_PAGE = (ROOT / "docs" / "experiments.md").read_text()
SMALL = ["compile=false", "logger.console=false", "num_envs=8", "total_env_steps=512", "algo.unroll_length=16"]
SMALL += ["evaluation.episodes=2"]
# What `make` runs is run by whoever types it; the suite behind `bench` takes half an hour, and has tests of its own.
ELSEWHERE = ("git ", "make ", "torchpod bench")


def commands(text):
    """The lines of a page's shell blocks, without comments; several commands may stand side by side."""
    blocks = [
        body
        for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if kind not in ("python", "text")
    ]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [command for line in lines for command in re.split(r"\s{3,}", line) if command]


def test_python_blocks_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "'episodes': 100" in printed
    assert "torch.Size([4, 4]) tensor([1., 1., 1., 1.])" in printed


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str):
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    places = [(ROOT / page).parent / link for link in links if not link.startswith("http")]
    assert places or page != "README.md"
    assert [place for place in places if not place.exists()] == []


def test_the_reading_path_has_fewer_than_800_lines():
    names = ["torchpod/types.py", "torchpod/agent.py", "torchpod/rollout.py", "torchpod/anakin.py", "algos/ppo.py"]
    assert sum(len((ROOT / name).read_text().splitlines()) for name in names) < 800


def test_make_targets_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


COMMANDS = [c for text in (README, ENV_PAGE, AGENT_PAGE) for c in commands(text) if not c.startswith(ELSEWHERE)]


def test_the_pages_have_commands():
    words = {" ".join(c.split()[:2]) for c in COMMANDS}
    assert words >= {"torchpod train", "torchpod eval", "torchpod plot", "torchpod list", "torchpod doctor"}
    assert any(c.startswith("torchrun") for c in COMMANDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, zygote_of_all):
    """A folder with a run in it, and with a reader's own environment and agent."""
    path = tmp_path_factory.mktemp("reader")
    (path / "path" / "to").mkdir(parents=True)
    for name, page in {"my_env.py": ENV_PAGE, "my_agent.py": AGENT_PAGE}.items():
        source = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
        (path / name).write_text(source)
        (path / "path" / "to" / name).write_text(source)
    (experiment,) = re.findall(r"^```yaml\n(.*?)^```$", EXPERIMENTS_PAGE, re.MULTILINE | re.DOTALL)
    (path / "my_experiment.yaml").write_text(experiment)
    run(zygote_of_all, path, ["torchpod", "train", "experiment=cartpole", *SMALL])
    return path


def run(zygote, path, words):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if words[0] == "torchpod":
        status, out, err = zygote.run(*words[1:], cwd=path, env=environment)
    else:
        assert words[0] == "torchrun", words
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
        result = subprocess.run(command, cwd=path, env=os.environ | environment, capture_output=True, text=True)
        status, out, err = result.returncode, result.stdout, result.stderr
    assert status == 0, err
    return out


@pytest.mark.parametrize("command", with_slow(COMMANDS, ("torchpod warmup experiment=cartpole", "torchpod doctor")))
def test_commands_of_the_pages_run(command, folder, zygote):
    """As they stand; training is cut short by further settings, and RUN and <run> are the run of the fixture."""
    done = min((folder / "runs" / "cartpole").iterdir())  # the first: later commands add theirs
    words = shlex.split(command.replace("<run>", done.name).replace("RUN...", str(done)).replace("RUN", str(done)))
    trains = "train" in words and not any(word.startswith("resume=") for word in words)
    replays = ["algo.replay.min_size=1"] if "experiment=sac_pendulum" in words else []
    once = ["algo.learner.num_minibatches=1", "--max-envs", "8", "--seconds", "0.05"]
    measures = once if "autoscale" in words else []
    assert run(zygote, folder, [*words, *([*SMALL, *replays] if trains or measures else []), *measures])
