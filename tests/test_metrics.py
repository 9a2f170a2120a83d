import json
import math
import os
import signal
import subprocess
import sys

import pytest

from torchpod.metrics import JsonlSink, Logger, is_timing, read_metrics

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
        ("phase_rollout", True),
        ("policy_age", False),
        ("env_steps", False),
        ("episode_returns", False),
        ("loss_per_seed", False),
    ],
)
def test_timings_are_known_by_their_names(key, expected):
    assert is_timing(key) is expected
