import contextlib
import csv
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.test_metrics import NAN, row, write
from torchpod.metrics import Logger
from torchpod.run.sinks import CsvSink, TensorBoardSink, WandbSink

# metrics.csv


def table(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.reader(file))


def test_csv_has_a_line_per_row_at_once_and_numbers_to_the_bit(tmp_path):
    with Logger(tmp_path, sinks=[CsvSink(tmp_path)]) as logger:
        logger.write(row(1, loss=0.1 + 0.2, episode_return=NAN))
        logger.write(row(2, loss=math.inf, episode_return=1.5))
        shown = table(tmp_path)  # without waiting for close
    assert shown == [
        ["iteration", "env_steps", "loss", "episode_return"],
        ["1", "100", "0.30000000000000004", ""],
        ["2", "200", "", "1.5"],
    ]
    assert table(tmp_path) == shown


def test_csv_of_a_population_has_the_mean_and_every_member(tmp_path):
    with contextlib.closing(CsvSink(tmp_path)) as sink:
        sink.write(row(1, loss=[1.0, 2.0], episode_return=[NAN, 3.0]))
    header, line = table(tmp_path)
    assert dict(zip(header, line, strict=True)) == {
        "iteration": "1",
        "env_steps": "100",
        "loss": "1.5",
        "members/loss/0": "1.0",
        "members/loss/1": "2.0",
        "episode_return": "3.0",
        "members/episode_return/0": "",
        "members/episode_return/1": "3.0",
    }


def test_csv_columns_that_appear_later_come_last_and_those_that_stay_away_are_empty(tmp_path):
    with contextlib.closing(CsvSink(tmp_path)) as sink:
        for more in ({"loss": 1.0}, {"loss": 2.0, "speed": 3.0}, {"speed": 4.0}):
            sink.write({"iteration": 1, "env_steps": 5} | more)
    assert table(tmp_path) == [
        ["iteration", "env_steps", "loss", "speed"],
        ["1", "5", "1.0", ""],
        ["1", "5", "2.0", "3.0"],
        ["1", "5", "", "4.0"],
    ]
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv"]


def test_csv_of_a_resumed_run_repeats_and_loses_nothing(tmp_path):
    write(tmp_path / "whole", range(1, 6), sinks=[CsvSink(tmp_path / "whole")])
    run_dir = tmp_path / "resumed"
    write(run_dir, range(1, 5), sinks=[CsvSink(run_dir)])
    with open(run_dir / "metrics.csv", "a") as file:
        file.write("5,50")  # torn
    write(run_dir, range(4, 6), sinks=[CsvSink(run_dir, resume_at=3)], resume_at=3)
    assert (run_dir / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_csv_asked_for_on_resume_has_the_rows_before_too(tmp_path):
    write(tmp_path, range(1, 4))
    write(tmp_path, range(4, 6), sinks=[CsvSink(tmp_path, resume_at=3)], resume_at=3)
    assert [line[0] for line in table(tmp_path)[1:]] == ["1", "2", "3", "4", "5"]


def test_csv_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "metrics.csv.tmp").mkdir()
    with pytest.raises(OSError, match="metrics.csv cannot be written.*run_dir=DIR"):
        CsvSink(tmp_path)


# W&B


class FakeWandb:
    """Records what would be sent."""

    Error = type("Error", (Exception,), {})
    Settings = SimpleNamespace

    def __init__(self, error=None):
        self.error, self.options, self.logged, self.x_axis, self.finished = error, {}, [], {}, False

    def init(self, **options):
        if self.error:
            raise self.Error(self.error)
        self.options = options
        return self

    def define_metric(self, name, *, step_metric):
        self.x_axis[name] = step_metric

    def log(self, values, *, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_gets_the_rows_over_env_steps_and_a_resumed_run_goes_on_in_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    first, second = FakeWandb(), FakeWandb()
    for fake in (first, second):
        monkeypatch.setitem(sys.modules, "wandb", fake)
        with contextlib.closing(WandbSink(tmp_path, project="hunt", config={"seed": 3})) as sink:
            sink.write(row(7, loss=0.5, episode_return=[1.0, NAN]))
        assert fake.finished
    values = {"iteration": 7, "env_steps": 700, "loss": 0.5, "episode_return": 1.0, "members/episode_return/0": 1.0}
    assert first.logged == [(7, values)]
    assert first.x_axis == {"*": "env_steps"}
    assert first.options["project"] == "hunt" and first.options["config"] == {"seed": 3}
    assert first.options["name"] == tmp_path.name and first.options["dir"] == str(tmp_path)
    assert first.options["id"] == second.options["id"] and second.options["resume"] == "allow"


def test_wandb_that_does_not_start_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("No API key.\nSee there."))
    with pytest.raises(
        ValueError, match=r"cannot start W&B \(No API key. See there\); call wandb login, set WANDB_MODE"
    ):
        WandbSink(tmp_path, project="hunt", config={})


def test_without_wandb_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'torchpod-rl\[wandb\]'"):
        WandbSink(tmp_path, project="hunt", config={})
    assert os.listdir(tmp_path) == []


OFFLINE = """
import sys
from pathlib import Path
from torchpod.metrics import Logger
from torchpod.run.sinks import WandbSink
run_dir = Path(sys.argv[1])
for resume_at in (None, 2):
    with Logger(run_dir, sinks=[WandbSink(run_dir, project="x", config={"seed": 3})], resume_at=resume_at) as logger:
        for i in range(1 if resume_at is None else 3, 5):
            logger.write({"iteration": i, "env_steps": 100 * i, "loss": 1 / i})
"""


def test_wandb_itself_keeps_an_offline_run_in_the_run_folder(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", OFFLINE, str(tmp_path)], env=environment, check=True)
    name = (tmp_path / "wandb" / "id").read_text()
    assert list(tmp_path.glob(f"wandb/offline-run-*/run-{name}.wandb"))


# TensorBoard


def events(run_dir):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_gets_means_and_members_over_env_steps(tmp_path):
    pytest.importorskip("tensorboard")
    with Logger(tmp_path, sinks=[TensorBoardSink(tmp_path)]) as logger:
        logger.write(row(1, loss=0.5, episode_return=[1.0, NAN]))
        logger.write(row(2, loss=0.25, episode_return=[NAN, NAN]))
    assert events(tmp_path) == {
        "iteration": [(100, 1.0), (200, 2.0)],
        "loss": [(100, 0.5), (200, 0.25)],
        "episode_return": [(100, 1.0)],
        "members/episode_return/0": [(100, 1.0)],
    }


@pytest.mark.parametrize("resume_at", [0, 2])
def test_tensorboard_hides_what_was_logged_after_the_checkpoint(tmp_path, resume_at):
    pytest.importorskip("tensorboard")
    write(tmp_path, range(1, 5), sinks=[TensorBoardSink(tmp_path)])
    with Logger(tmp_path, sinks=[TensorBoardSink(tmp_path, resume_at=resume_at)], resume_at=resume_at) as logger:
        for i in range(resume_at + 1, 5):
            logger.write(row(i, loss=9.0))
    expected = [(100 * i, round(i / 3, 4) if i <= resume_at else 9.0) for i in range(1, 5)]
    assert events(tmp_path)["loss"] == expected


def test_without_tensorboard_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'torchpod-rl\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
