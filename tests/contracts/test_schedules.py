"""Schedules give the same bits in both loops, in a population, compiled or not, and in a run that was resumed."""

import shutil
from pathlib import Path

import pytest
import torch

from torchpod import checkpoint
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.run.execute import Run, execute

STEPS = 4 * 8
"""Of an iteration."""
POINTS = "entropy_coefficient:[[32,0.3],[80,0.1]],learning_rate:[[0,0.01],[48,0.02],[96,0.005]]"
SETTINGS = (
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "algo.learner.num_minibatches=2",
    "algo.learner.epsilon=0.001",
    "evaluation.episodes=1",
    "env.max_episode_steps=9",
)
SCHEDULED = (*SETTINGS, f"algo.learner.schedules={{{POINTS}}}")


def train(folder: Path, *overrides: str, iterations: int = 4, settings: tuple[str, ...] = SCHEDULED) -> Run:
    return execute(load([*settings, *overrides, f"total_env_steps={iterations * STEPS}", f"run_dir={folder}"]))


def learned(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_weights(checkpoint.latest(folder))


def assert_equal(one: Path, other: Path) -> None:
    a, b = learned(one), learned(other)
    assert a.keys() == b.keys() and [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("schedules") / "straight")


def test_a_schedule_is_learned_with_and_said_by_what_acts(straight: Run, tmp_path: Path):
    assert straight.variables["entropy_coefficient"].item() == pytest.approx(0.1)
    assert learned(straight.dir)["entropy_coefficient"].item() == pytest.approx(0.01)
    train(tmp_path / "without", settings=SETTINGS)
    assert not torch.equal(learned(tmp_path / "without")["policy.weight"], learned(straight.dir)["policy.weight"])


@pytest.mark.parametrize("half", [1, 2, 3])
def test_a_resumed_run_goes_on_where_its_schedules_were(half: int, straight: Run, tmp_path: Path):
    train(tmp_path / "halves", iterations=half)
    execute(load([f"resume={tmp_path / 'halves'}", f"total_env_steps={4 * STEPS}"]))
    assert_equal(tmp_path / "halves", straight.dir)


def test_both_loops_follow_them_to_the_bit(straight: Run, tmp_path: Path):
    train(tmp_path / "sebulba", "loop=sebulba", "loop.num_actor_threads=1", "loop.lag=0")
    assert_equal(tmp_path / "sebulba", straight.dir)


def test_an_update_on_a_part_of_a_batch_counts_its_own_steps(tmp_path: Path):
    """Two updates per unroll of 32 steps: the second, 16 steps on, is the last that learns."""
    shared = (*SETTINGS, "loop=sebulba", "loop.num_actor_threads=0", "loop.updates_per_batch=2")
    for name, points, iterations in (("one", "[[0,0.01]]", 1), ("many", "[[16,0.01],[17,0]]", 3)):
        schedule = f"algo.learner.schedules={{learning_rate:{points}}}"
        train(tmp_path / name, schedule, settings=shared, iterations=iterations)
    assert_equal(tmp_path / "one", tmp_path / "many")


def test_every_member_of_a_population_follows_them_as_it_would_alone(straight: Run, tmp_path: Path):
    train(tmp_path / "population", "population=2")
    assert_equal(tmp_path / "population" / "members" / "0", straight.dir)
    train(tmp_path / "second", "seed=1")
    assert_equal(tmp_path / "population" / "members" / "1", tmp_path / "second")


def test_members_cannot_differ_in_a_learning_rate_that_has_a_schedule_by_its_group(tmp_path: Path):
    schedule = "algo.learner.schedules={learning_rate.loss:[[0,1e-3],[100,0]]}"
    with pytest.raises(ConfigError, match="members.learning_rate has a schedule, which is that of all members"):
        train(tmp_path / "run", "population=2", "+members.learning_rate=[0.1,0.2]", schedule)


@pytest.mark.parametrize("members", ["entropy_coefficient", "learning_rate"])
def test_members_cannot_differ_in_what_has_a_schedule(members: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"members.{members} has a schedule, which is that of all members; leave one"):
        train(tmp_path / "run", "population=2", f"+members.{members}=[0.1,0.2]")


@pytest.mark.slow
def test_a_compiled_update_follows_them(straight: Run, tmp_path: Path):
    compiled = train(tmp_path / "compiled", "compile=true")
    for name, x in learned(straight.dir).items():
        torch.testing.assert_close(learned(compiled.dir)[name], x, rtol=1e-3, atol=1e-4)


def test_steps_that_fill_replay_count_too(tmp_path: Path):
    """The first three of five iterations only fill it, and the fourth begins after 96 steps."""
    size = ("algo.replay.capacity=400", f"algo.replay.min_size={4 * STEPS}", "algo.replay.batch_size=8")
    settings = (*SETTINGS, "algo=dqn", *size)
    weights = {}
    for name, points in (("never", "[[0,0]]"), ("before", "[[95,0.01],[96,0]]"), ("then", "[[96,0.01],[97,0]]")):
        run = train(
            tmp_path / name, f"algo.learner.schedules={{learning_rate:{points}}}", settings=settings, iterations=5
        )
        weights[name] = torch.cat([run.variables[key].flatten() for key, _ in run.agent.named_parameters()])
    assert torch.equal(weights["never"], weights["before"])
    assert not torch.equal(weights["never"], weights["then"])


def test_a_folder_of_a_run_says_its_schedules_again(straight: Run, tmp_path: Path):
    copy = shutil.copytree(straight.dir, tmp_path / "copy")
    execute(load([f"resume={copy}", f"total_env_steps={5 * STEPS}"]))
    assert "entropy_coefficient:" in (copy / "config.yaml").read_text()
    train(tmp_path / "straight", iterations=5)
    assert_equal(copy, tmp_path / "straight")
