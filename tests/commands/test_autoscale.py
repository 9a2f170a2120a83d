"""The command: what it writes and prints is what trains, and what it refuses."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from torchpod.algos import PPO
from torchpod.commands import autoscale
from torchpod.commands.probe import Answer
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.dealer import DEFAULT_CHUNK_ROWS
from torchpod.envs import CartPole
from torchpod.learner import Learner, LearnerConfig
from torchpod.main import main


def test_chunks_begin_where_those_of_the_learner_do():
    learner = Learner(PPO(CartPole().spec), LearnerConfig(), num_iterations=1)
    rows = torch.ones(learner.config.num_minibatches, 8 * DEFAULT_CHUNK_ROWS["cpu"])
    assert learner.dealer.num_chunks({"weight": rows}, dealt=True) == 8


def test_a_gpu_takes_a_minibatch_of_most_runs_whole_and_none_of_any_size():
    learner = Learner(PPO(CartPole().spec), LearnerConfig(num_minibatches=1), num_iterations=1)
    for rows, chunks in ((65_536 * 32, 1), (2000 * 1000 * 100, 48)):
        weights = SimpleNamespace(shape=torch.Size([1, rows]), device=torch.device("cuda"))
        assert abs(learner.dealer.num_chunks({"weight": weights}, dealt=True) - chunks) <= 2


class TestFile:
    def test_its_settings_are_overrides_of_which_the_last_counts(self, tmp_path: Path):
        path = tmp_path / "found.yaml"
        path.write_text("num_envs: 128\nalgo:\n  learner:\n    num_minibatches: 2\n    chunk_rows: null\n")
        file = f"+autoscale={path}"
        config = load(["experiment=cartpole", "algo.learner.chunk_rows=64", file])
        assert (config.num_envs, config.algo.learner.num_minibatches, config.algo.learner.chunk_rows) == (128, 2, None)
        assert {"num_envs", "algo.learner.num_minibatches"} <= set(config.given)
        assert load([file, "num_envs=16"]).num_envs == 16
        assert load(["num_envs=16", file]).num_envs == 128

    def test_what_is_wrong_with_it_is_said(self, tmp_path: Path):
        path = tmp_path / "found.yaml"
        with pytest.raises(ConfigError, match=r"found.yaml cannot be read .* torchpod autoscale writes it"):
            load([f"+autoscale={path}"])
        path.write_text("- num_envs")
        with pytest.raises(ConfigError, match="holds no settings"):
            load([f"+autoscale={path}"])
        path.write_text("num_enws: 3")
        with pytest.raises(ConfigError, match="num_enws is no setting; did you mean num_envs"):
            load([f"+autoscale={path}"])


SMALL = ("compile=false", "num_envs=4", "algo.unroll_length=8", "algo.agent.hidden=[8]")
BRIEF = ("logger.console=false", "total_env_steps=64", "evaluation.episodes=2")


class TestCommand:
    @pytest.mark.slow
    def test_what_it_writes_and_prints_trains(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.chdir(tmp_path)
        given = ["env=cartpole", *SMALL, "algo.learner.num_minibatches=1"]
        assert main(["autoscale", *given, "--seconds", "0.05", "--max-envs", "8", "--json", "rows.json"]) == 0
        printed = capsys.readouterr().out.splitlines()
        written = yaml.safe_load(Path("runs/ppo_cartpole/autoscale.yaml").read_text())
        document = json.loads(Path("rows.json").read_text())
        rows = document["rows"]
        assert [row["num_envs"] for row in rows] == [4, 8]
        assert all(row["verdict"] == "fits" and row["env_steps_per_s"] > 0 for row in rows)
        assert all(1e8 < row["memory_bytes"] < document["limit_bytes"] for row in rows)
        assert [row["num_envs"] for row in rows if row["chosen"]] == [written["num_envs"]]
        for line in printed[-2:]:
            program, *words = shlex.split(line)
            assert (program, words[0]) == ("torchpod", "train")
            assert main([*words, *BRIEF]) == 0
        folders = [path for path in Path("runs/ppo_cartpole").iterdir() if path.is_dir()]
        assert len(folders) == 2
        for folder in folders:
            assert yaml.safe_load((folder / "config.yaml").read_text())["num_envs"] == written["num_envs"]
        assert shlex.split(printed[-2])[2:] == [
            *(x for x in given if x != "num_envs=4"),
            f"num_envs={written['num_envs']}",
        ]

    @pytest.mark.slow
    def test_games_of_many_agents_are_measured_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.chdir(tmp_path)
        given = ["experiment=ia2c_tag_gridworld", *SMALL, "algo.learner.num_minibatches=1"]
        assert main(["autoscale", *given, "--seconds", "0.05", "--max-envs", "8", "--json", "rows.json"]) == 0
        rows = json.loads(Path("rows.json").read_text())["rows"]
        assert [row["num_envs"] for row in rows] == [4, 8]
        assert all(row["verdict"] == "fits" and row["env_steps_per_s"] > 0 for row in rows)
        printed = capsys.readouterr().out.splitlines()
        assert printed[1].split("minibatches")[1].split()[:3] == ["of", "rows", "memory"]
        # 8 steps of five agents that share a policy
        assert [line.split()[:3] for line in printed[2:4]] == [["4", "1", "160"], ["8", "1", "320"]]
        assert main([*shlex.split(printed[-1])[1:], *BRIEF]) == 0

    @pytest.mark.slow
    def test_sebulba_looks_for_the_number_of_actors_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.chdir(tmp_path)
        task = ("algo=impala", "loop=sebulba", "env=gymnasium", "env.task=CartPole-v1")
        assert main(["autoscale", *task, *SMALL, "--seconds", "0.05", "--max-envs", "4", "--json", "rows.json"]) == 0
        rows = json.loads(Path("rows.json").read_text())["rows"]
        assert len({row["num_actor_threads"] for row in rows}) > 1
        assert all(row["verdict"] == "fits" for row in rows)
        assert main([*shlex.split(capsys.readouterr().out.splitlines()[-1])[1:], *BRIEF]) == 0

    def test_more_environments_do_not_mean_fewer_updates_from_replay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        asked = []

        def measure(overrides: list[str], **_: object) -> Answer:
            config = load(overrides)
            asked.append((config.num_envs, config.algo.learner.num_minibatches))
            return Answer("fits", config.num_envs, 1.0, 10**6 * config.num_envs, 10**12)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("torchpod.commands.autoscale.measure", measure)
        given = ["algo=dqn", "env=cartpole", "num_envs=8", "algo.unroll_length=4", "algo.learner.num_minibatches=2"]
        assert autoscale.main([*given, "--max-envs", "32"]) == 0
        assert asked == [(8, 2), (16, 4), (32, 8)]
        config = load(["algo=dqn", "algo.unroll_length=4", "+autoscale=runs/dqn_cartpole/autoscale.yaml"])
        assert (config.num_envs, config.algo.learner.num_minibatches) == (32, 8)

    @pytest.mark.parametrize("largest", [True, False])
    def test_the_largest_is_told_with_the_fastest_on_the_way(
        self, largest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def measure(overrides: list[str], **_: object) -> Answer:
            num_envs = load(overrides).num_envs
            rate = {8: 10.0, 16: 30.0}.get(num_envs, 20.0)  # a cache ends
            return Answer("fits" if num_envs <= 64 else "out of memory", rate, 1.0, 10**6, 10**9)

        monkeypatch.setattr("torchpod.commands.autoscale.measure", measure)
        given = ["algo=dqn", "env=cartpole", "num_envs=8", f"--out={tmp_path}/a.yaml"]
        assert autoscale.main([*given, "--largest"] if largest else given) == 0
        printed, found = capsys.readouterr().out, yaml.safe_load((tmp_path / "a.yaml").read_text())
        assert found["num_envs"] == (64 if largest else 16)
        told = "\nfastest of these: num_envs=16, 1.50 times as fast as the largest\n"
        assert (told in printed) == largest and ("fastest of these" in printed) == largest

    @pytest.mark.slow
    def test_memory_ends_a_search_and_nothing_else_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        """Of real probes: the limit is twice what the first takes."""
        monkeypatch.chdir(tmp_path)
        given = ["env=cartpole", *SMALL, "num_envs=16384", "algo.learner.num_minibatches=1"]
        search = ["autoscale", *given, "--largest", "--seconds", "0.05", "--json", "rows.json"]
        assert main([*search, "--max-envs", "16384"]) == 0
        least = max(row["memory_bytes"] for row in json.loads(Path("rows.json").read_text())["rows"])
        capsys.readouterr()
        assert main([*search, "--memory", f"{2 * least / 1e9}"]) == 0
        document = json.loads(Path("rows.json").read_text())
        rows = document["rows"]
        assert [row["num_envs"] for row in rows[:2]] == [16384, 32768] and rows[0]["verdict"] == "fits"
        assert any(row["verdict"] == "out of memory" for row in rows)
        assert all(row["memory_bytes"] <= document["limit_bytes"] for row in rows if row["verdict"] == "fits")
        chosen = yaml.safe_load(Path("runs/ppo_cartpole/autoscale.yaml").read_text())["num_envs"]
        assert 16384 <= chosen < 2**20

    @pytest.mark.parametrize("share", [0.5, 1.0])
    def test_a_machine_that_does_other_work_is_said(
        self, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(
            "torchpod.commands.autoscale.measure", lambda *_, **__: Answer("fits", 1.0, cpu_share=share)
        )
        assert autoscale.main(["--max-envs", "64", "algo.learner.num_minibatches=1", f"--out={tmp_path}/a.yaml"]) == 0
        assert ("other work had the core too in 1 of 1 probes" in capsys.readouterr().out) == (share < 1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["resume=auto"], "torchpod autoscale measures runs that begin; leave out resume=auto."),
            (
                ["loop=sebulba", "loop.split=1:1"],
                "torchpod autoscale measures one GPU, and loop.split=1:1 uses several",
            ),
            (["--seconds", "0"], "torchpod autoscale: --seconds 0 must be a finite number more than 0."),
            (["--seconds", "nan"], "torchpod autoscale: --seconds nan must be a finite number more than 0."),
            (["--seconds", "inf"], "torchpod autoscale: --seconds inf must be a finite number more than 0."),
            (["--memory", "nan"], "torchpod autoscale: --memory nan must be a finite number more than 0."),
            (["--memory", "1e9"], "--memory 1e+09: only "),
            (["num_enws=3"], "num_enws is no setting; did you mean num_envs"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(self, arguments: list[str], message: str):
        with pytest.raises(ConfigError) as raised:
            autoscale.main(arguments)
        assert str(raised.value).startswith(message)

    @pytest.mark.parametrize("option", ["--out", "--json"])
    def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
        self, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("torchpod.commands.autoscale.measure", lambda *_, **__: pytest.fail("it measures"))
        Path("file").touch()
        with pytest.raises(ConfigError, match=rf"^torchpod autoscale: {option} file/x cannot be written \("):
            autoscale.main([option, "file/x"])
        with pytest.raises(ConfigError, match=rf"^torchpod autoscale: {option} \. is a folder; name a file in it\.$"):
            autoscale.main([option, "."])

    def test_what_was_found_is_printed_even_if_it_cannot_be_written_in_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def full(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("torchpod.commands.autoscale.measure", lambda *_, **__: Answer("fits", 1.0))
        monkeypatch.setattr("torchpod.commands.autoscale.write_text", full)
        with pytest.raises(OSError, match="No space left"):
            autoscale.main(["--max-envs", "64", "algo.learner.num_minibatches=1", f"--out={tmp_path}/a.yaml"])
        assert "\nfastest: num_envs=64" in (out := capsys.readouterr().out) and "\ntorchpod train " in out

    def test_ranks_are_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="measures one process; start it without torchrun"):
            autoscale.main([])


@pytest.mark.parametrize(("algo", "paced"), [("algo=tests/user_agent.py:MyAgent", False), ("algo=dqn", True)])
def test_only_agents_with_replay_keep_their_updates_per_step(algo, paced):
    start, more = autoscale._begin(load([algo, "env=cartpole"]))
    assert bool(more) == paced and (start.num_minibatches is None) == paced
