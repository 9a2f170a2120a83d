import contextlib
import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from torchpod.metrics import (
    ConsoleSink,
    CsvSink,
    JsonlSink,
    Logger,
    TensorBoardSink,
    WandbSink,
    is_timing,
    read_metrics,
)

NAN = math.nan


def row(iteration, **more):
    return {"iteration": iteration, "env_steps": 100 * iteration, **more}


def write(run_dir, iterations, **options):
    with Logger(run_dir, **options) as logger:
        for i in iterations:
            logger.write(row(i, loss=1.0 / 3.0 * i))


def lines(run_dir):
    return (run_dir / "metrics.jsonl").read_text().splitlines()


# metrics.jsonl


def test_every_row_is_one_json_object_and_comes_back_to_the_bit(tmp_path):
    run_dir = tmp_path / "runs" / "x"
    values = {"loss": 0.1 + 0.2, "tiny": 5e-324, "count": 2**53 + 1, "episode_return": [1.5, NAN]}
    with Logger(run_dir) as logger:
        logger.write(row(1, **values))
        logger.write(row(2, episode_return=NAN, ratio=math.inf))
        assert len(lines(run_dir)) == 2  # without waiting for close
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines(run_dir))
    assert first == row(1, loss=0.1 + 0.2, tiny=5e-324, count=2**53 + 1, episode_return=[1.5, None])
    assert second == row(2, episode_return=None, ratio=None)
    assert math.isnan(read_metrics(run_dir)[1]["episode_return"])
    assert math.isnan(read_metrics(run_dir)[0]["episode_return"][1])


def test_resume_drops_later_rows_and_a_torn_last_line(tmp_path):
    write(tmp_path, range(1, 6))
    whole = lines(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 6, "env_st')
    write(tmp_path, range(4, 6), resume_at=3)
    assert lines(tmp_path) == whole
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]


def test_resume_never_trusts_a_last_line_without_its_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "env_steps": 100}\n{"iteration": 2}')
    assert [r["iteration"] for r in read_metrics(tmp_path)] == [1]
    write(tmp_path, [2], resume_at=2)
    assert [r["iteration"] for r in read_metrics(tmp_path)] == [1, 2]


def test_resume_starts_a_file_where_there_was_none(tmp_path):
    write(tmp_path, [8], resume_at=7)
    assert [r["iteration"] for r in read_metrics(tmp_path)] == [8]


def test_resume_that_cannot_finish_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, range(1, 6))
    before = lines(tmp_path)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*run_dir=DIR"):
        JsonlSink(tmp_path, resume_at=2)
    assert lines(tmp_path) == before


def test_a_new_run_never_writes_into_an_old_one(tmp_path):
    write(tmp_path, [1])
    before = lines(tmp_path)
    with pytest.raises(FileExistsError, match="belongs to an earlier run; go on with it by resume="):
        Logger(tmp_path)
    assert lines(tmp_path) == before


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n\x00\x00\x00\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match="line 2 of .* is damaged: expected a JSON object"):
        Logger(tmp_path, resume_at=3)


def test_a_folder_without_metrics_is_an_error_that_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no metrics.jsonl; expected a run folder"):
        read_metrics(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink.__new__(JsonlSink)
    sink.path = tmp_path / "metrics.jsonl"
    sink._file = open(sink.path, "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\); free some space"):
        sink.write(row(1))
    sink.close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/run/metrics.jsonl cannot be written \(Not a directory\)"):
        Logger(tmp_path / "file" / "run")


def test_a_row_without_its_axes_is_our_bug(tmp_path):
    with Logger(tmp_path) as logger, pytest.raises(AssertionError, match="needs iteration and env_steps"):
        logger.write({"loss": 1.0})


def test_a_killed_process_leaves_only_whole_rows_and_perhaps_a_torn_last_one(tmp_path):
    script = (
        "import itertools, pathlib, sys\n"
        "from torchpod.metrics import Logger\n"
        "logger = Logger(pathlib.Path(sys.argv[1]))\n"
        "for i in itertools.count(1):\n"
        "    logger.write({'iteration': i, 'env_steps': i, 'x': [0.1] * 100})\n"
        "    if i == 200: print('ready', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    iterations = [r["iteration"] for r in read_metrics(tmp_path)]
    assert iterations == list(range(1, len(iterations) + 1)) and len(iterations) >= 200


def test_every_sink_is_closed_when_one_fails(tmp_path):
    closed = []

    class Good:
        def write(self, row):
            pass

        def close(self):
            closed.append(self)

    class Bad(Good):
        def close(self):
            raise RuntimeError("no")

    logger = Logger(tmp_path, sinks=[Good(), Bad(), Good()])
    with pytest.raises(RuntimeError, match="no"):
        logger.close()
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("wall_s", True),
        ("env_steps_per_s", True),
        ("updates_per_s_per_device", True),
        ("learner_wait", True),
        ("actor_in_environment", True),
        ("policy_age", False),
        ("env_steps", False),
        ("episode_returns", False),
        ("loss_per_seed", False),
    ],
)
def test_timings_are_known_by_their_names(key, expected):
    assert is_timing(key) is expected


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
    with pytest.raises(ImportError, match=r"pip install torchpod-rl\[wandb\]"):
        WandbSink(tmp_path, project="hunt", config={})
    assert os.listdir(tmp_path) == []


OFFLINE = """
import sys
from pathlib import Path
from torchpod.metrics import Logger, WandbSink
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
    with pytest.raises(ImportError, match=r"pip install torchpod-rl\[tensorboard\]"):
        TensorBoardSink(tmp_path)


# The console


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def console(total, terminal=False, width=120, num_iterations=None):
    out, clock = io.StringIO(), Clock()
    screen = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    return ConsoleSink(total, num_iterations or total // 100, console=screen, clock=clock), out, clock


def test_plain_lines_show_steps_rate_return_losses_and_time_left():
    sink, out, clock = console(1000)
    sink.write(row(1, episode_return=NAN, loss=0.5))
    clock.now = 10.0
    sink.write(row(3, episode_return=21.5, loss=0.25, policy_loss=-0.01, entropy=0.6))
    sink.close()
    assert out.getvalue().splitlines() == [
        " 10%  100/1k env steps  -/s  return -  loss 0.5  ETA -",
        " 30%  300/1k env steps  20/s  return 21.5  loss 0.25  policy loss -0.01  ETA 0:35",
    ]


def test_progress_and_time_left_go_by_iterations_as_resets_are_no_env_steps():
    for terminal in (False, True):
        sink, out, clock = console(1000, terminal=terminal, num_iterations=4)
        for i, env_steps in enumerate((249, 490, 700, 930), 1):
            clock.now = 10.0 * i
            sink.write({"iteration": i, "env_steps": env_steps})
        sink.close()
        shown = [line for line in out.getvalue().splitlines() if "env steps" in line]
        assert " 75%" in shown[2] and "700/1k env steps" in shown[2] and shown[2].endswith("ETA 0:10")
        assert "100%" in shown[-1] and "930/1k env steps" in shown[-1] and shown[-1].endswith("ETA 0:00")


def test_plain_lines_come_at_most_every_few_seconds_and_the_last_always():
    sink, out, clock = console(10_000)
    for i in range(1, 101):
        clock.now = 0.2 * i
        sink.write(row(i))
    sink.close()
    shown = [line.split()[0] for line in out.getvalue().splitlines()]
    assert shown == ["1%", "26%", "51%", "76%", "100%"]


def test_the_rate_of_the_row_is_shown_and_the_time_left_is_measured_without_compilation():
    sink, out, clock = console(1_000_000, num_iterations=10)
    clock.now = 60.0  # compilation
    sink.write({"iteration": 1, "env_steps": 100_000, "env_steps_per_s": NAN})
    clock.now = 70.0
    sink.write({"iteration": 2, "env_steps": 200_000, "env_steps_per_s": 80_000.0})  # a population of 8
    assert out.getvalue().splitlines()[1].endswith("200k/1M env steps  80k/s  return -  ETA 1:20")


def test_a_population_shows_mean_and_best_of_those_that_have_one():
    sink, out, _ = console(1000)
    sink.write(row(1, episode_return=[10.0, NAN, 20.0], loss=[1.0, 3.0, 2.0]))
    sink.close()
    assert "return 15 (best 20)  loss 2  " in out.getvalue()


def test_a_population_without_a_return_shows_a_dash():
    sink, out, _ = console(1000)
    sink.write(row(1, episode_return=[NAN, NAN]))
    assert "return -  ETA" in out.getvalue()


def test_plain_lines_are_not_wrapped_or_taken_for_markup():
    sink, out, _ = console(1000, width=20)
    sink.write(row(1, loss=0.5, value_loss=0.25))
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_bar_that_ends_with_the_last_row():
    sink, out, clock = console(1000, terminal=True)
    for i in range(1, 11):
        clock.now = 0.01 * i
        sink.write(row(i, episode_return=float(i)))
    sink.close()
    text = out.getvalue()
    assert "compiling" in text and "━" in text
    last = text.splitlines()[-2]
    assert "100%" in last and "return 10" in last
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_narrow_terminal_leaves_out_losses_but_never_the_time_left():
    shown = {}
    for width in (80, 140):
        sink, out, clock = console(500_000, terminal=True, width=width, num_iterations=500)
        losses = {"policy_loss": -0.01234, "value_loss": 1.25, "loss": 0.51234}
        sink.write({"iteration": 100, "env_steps": 100_000, "episode_return": 212.4, **losses})
        clock.now = 10.0
        sink.write({"iteration": 131, "env_steps": 131_072, "episode_return": 212.4, **losses})
        sink.close()
        shown[width] = out.getvalue().splitlines()[-2]
    assert shown[80].endswith("131k/500k env steps  3.11k/s  return 212.4  loss 0.5123  ETA 1:59")
    assert "loss 0.5123  policy loss -0.01234  value loss 1.25  ETA 1:59" in shown[140]
    assert "━" in shown[80] and " 26%" in shown[80]


def test_closing_without_a_row_is_fine():
    for terminal in (False, True):
        sink, out, _ = console(1000, terminal=terminal)
        sink.close()
        assert "return" not in out.getvalue()


def test_a_rate_forgets_what_is_long_ago():
    sink, out, clock = console(10**9)
    for second in range(200):
        clock.now = float(second)
        sink.write({"iteration": second, "env_steps": 1000 * second if second < 100 else 100_000 + 10 * second})
    sink.close()
    assert " 10/s" in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ((0.9, 0.1, 0.7, 0.2), "learner waits 90% for environments: raise env.num_threads  "),
        ((0.9, 0.1, 0.2, 0.7), "learner waits 90% for inference: raise num_envs"),
        ((0.9, 0.1, 0.2, 0.2, 0.5), "learner waits 90% for transfers: raise loop.pools_per_actor"),
        ((0.1, 0.8, 0.1, 0.1), "actors wait 80% for the update: lower algo.learner.num_epochs"),
        ((0.6, 0.6, 0.2, 0.2), "actors and learner take turns: raise loop.lag"),
        ((0.2, 0.2, 0.4, 0.4), "actors and learner keep pace"),
    ],
)
def test_the_line_says_which_side_of_sebulba_starves(waits, said):
    names = ("learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference", "actor_in_transfer")
    out = io.StringIO()
    with contextlib.closing(ConsoleSink(100, 10, advice="raise env.num_threads", console=Console(file=out))) as sink:
        sink.write({"iteration": 1, "env_steps": 10} | dict(zip(names, waits, strict=False)))
    assert said in out.getvalue()
