import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from torchpod.commands import plot as module
from torchpod.commands.plot import plot
from torchpod.compose import load
from torchpod.metrics import Logger
from torchpod.stats import bootstrap_ci, iqm

NAN = math.nan
ENV_FILE = Path(__file__).parents[1] / "user_env.py"


def make_run(folder, values, stride=100, metric="episode_return"):
    with Logger(folder) as logger:
        for i, value in enumerate(values, 1):
            logger.write({"iteration": i, "env_steps": stride * i, metric: value})
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """What `plot` would draw: name -> (steps, values)."""
    pytest.importorskip("matplotlib")
    seen = {}
    draw = module._draw

    def spy(groups, out, metric):
        seen.update(groups)
        return draw(groups, out, metric)

    monkeypatch.setattr(module, "_draw", spy)
    return seen


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_seeds_of_one_experiment_and_members_of_a_population_are_one_line_each(tmp_path, drawn):
    a = [make_run(tmp_path / "a" / f"t-seed{k}", [k, k + 10.0]) for k in range(3)]
    b = make_run(tmp_path / "b" / "t-seed0", [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]])
    out = plot([*a, str(b)], tmp_path / "new" / "curve.png")
    assert out == tmp_path / "new" / "curve.png" and is_png(out)
    assert list(drawn) == ["a", "b"]
    assert len(drawn["a"][1]) == 3 and len(drawn["b"][1]) == 4
    steps, values = drawn["a"]
    assert steps[0] == 100 and steps[-1] == 200
    np.testing.assert_allclose(values[:, 0], [0.0, 1.0, 2.0])
    np.testing.assert_allclose(values[:, -1], [10.0, 11.0, 12.0])


def test_one_seed_is_a_line_without_an_interval(tmp_path, drawn):
    assert is_png(plot([make_run(tmp_path / "x" / "run", [1.0, 2.0, 3.0])], tmp_path / "curve.png"))
    assert drawn["x"][1].shape == (1, module.NUM_POINTS)


def test_the_same_run_given_twice_counts_once(tmp_path, drawn):
    run = make_run(tmp_path / "x" / "run", [1.0, 2.0])
    plot([run, run / ".", str(run)], tmp_path / "curve.png")
    assert len(drawn["x"][1]) == 1


def test_experiments_of_one_name_in_two_places_stay_apart(tmp_path, drawn):
    runs = [make_run(tmp_path / where / "cartpole" / "run", [1.0, 2.0]) for where in ("old", "new")]
    plot(runs, tmp_path / "curve.png")
    assert list(drawn) == ["old/cartpole", "new/cartpole"]


def test_experiments_side_by_side_in_one_folder_stay_apart(tmp_path, drawn):
    runs = []
    for name in ("a2c_catch", "ppo_catch", "ppo_catch"):
        runs.append(make_run(tmp_path / "mine" / f"run{len(runs)}", [1.0, 2.0]))
        (runs[-1] / "config.yaml").write_text(f"experiment_name: {name}\n")
    plot(runs, tmp_path / "curve.png")
    assert {name: len(values) for name, (_, values) in drawn.items()} == {"a2c_catch": 1, "ppo_catch": 2}


def test_runs_without_an_experiment_are_told_apart_by_agent_and_environment(tmp_path, drawn):
    runs = []
    for algo, env in (("a2c", "catch"), ("ppo", "catch"), ("ppo", "catch")):
        runs.append(make_run(tmp_path / "runs" / f"run{len(runs)}", [1.0, 2.0]))
        (runs[-1] / "config.yaml").write_text(f"experiment_name: null\nalgo: {{name: {algo}}}\nenv: {{name: {env}}}\n")
    plot(runs, tmp_path / "curve.png")
    assert {name: len(values) for name, (_, values) in drawn.items()} == {"a2c_catch": 1, "ppo_catch": 2}


def trained(folder, *overrides, values=(1.0, 2.0)):
    (make_run(folder, values) / "config.yaml").write_text(yaml.safe_dump(load(overrides).to_dict(), sort_keys=False))
    return folder


def test_runs_that_differ_in_a_setting_are_lines_of_their_own_and_seeds_are_not(tmp_path, drawn):
    seeds = ("seed=1", "run_dir=x", "device=cuda", "threads=2", "compile=false", "logger.csv=true", "checkpoint.keep=9")
    settings = [(), seeds, ("algo.learner.learning_rate=0.01",), ("algo.learner.learning_rate=0.01", "num_envs=8")]
    runs = [trained(tmp_path / "ppo_cartpole" / f"run{i}", *given) for i, given in enumerate(settings)]
    plot([*runs, trained(tmp_path / "a2c_cartpole" / "run", "algo=a2c")], tmp_path / "curve.png")
    assert {name: len(values) for name, (_, values) in drawn.items()} == {
        "ppo_cartpole learning_rate=0.00025 num_envs=64": 2,
        "ppo_cartpole learning_rate=0.01 num_envs=64": 1,
        "ppo_cartpole learning_rate=0.01 num_envs=8": 1,
        "a2c_cartpole": 1,
    }


def test_settings_of_the_same_last_name_are_told_in_full(tmp_path, drawn):
    given = [("algo.agent.hidden=[4]",), ("+env.hidden=3", "+env.limit=2")]
    runs = [trained(tmp_path / "x" / str(i), f"env={ENV_FILE}:MyEnv", *more) for i, more in enumerate(given)]
    plot(runs, tmp_path / "curve.png")
    name = "ppo_user_env_MyEnv algo.agent.hidden"
    assert list(drawn) == [f"{name}=[4]", f"{name}=[64, 64] env.hidden=3 limit=2"]


def test_members_with_values_of_their_own_are_lines_by_these(tmp_path, drawn):
    members = ("population=3", "+members.discount=[0.9,0.99,0.9]")
    run = trained(
        tmp_path / "cartpole" / "run", *members, "experiment_name=cartpole", values=[[1.0, NAN, 3.0], [4.0, 5.0, 6.0]]
    )
    seeds = trained(tmp_path / "x" / "run", "population=2", "env=catch", values=[[1.0, 2.0], [3.0, 4.0]])
    plot([run, seeds], tmp_path / "curve.png")
    assert {name: values[:, -1].tolist() for name, (_, values) in drawn.items()} == {
        "cartpole discount=0.9": [4.0, 6.0],
        "cartpole discount=0.99": [5.0],
        "ppo_catch": [3.0, 4.0],
    }


def test_a_value_of_a_member_takes_the_place_of_the_setting_beside_another_run(tmp_path, drawn):
    members = ("population=2", "+members.clip=[0.1,0.3]", "+members.learning_rate=[0.01,0.02]")
    population = trained(tmp_path / "ppo_cartpole" / "a", *members, values=[[1.0, 3.0], [4.0, 6.0]])
    plot([population, trained(tmp_path / "ppo_cartpole" / "b")], tmp_path / "curve.png")
    assert list(drawn) == [
        "ppo_cartpole clip=0.1 learning_rate=0.01",
        "ppo_cartpole clip=0.3 learning_rate=0.02",
        "ppo_cartpole clip=0.2 learning_rate=0.00025",
    ]


def test_evaluations_that_there_were_not_are_refused_with_the_setting(tmp_path):
    run = make_run(tmp_path / "x" / "run", [1.0])
    with pytest.raises(
        ValueError, match=r"has no metric eval_return; it has episode_return\. Train with evaluation\.ev"
    ):
        plot([run], tmp_path / "curve.png", metric="eval_return")


def test_a_member_that_was_trained_on_is_a_line_of_its_own(tmp_path, drawn):
    population = make_run(tmp_path / "x" / "run", [[1.0, 2.0], [2.0, 3.0]])
    members = [make_run(population / "members" / str(p), [5.0, 6.0]) for p in range(2)]
    plot([population, *members], tmp_path / "curve.png")
    assert [len(values) for _, values in drawn.values()] == [2, 1, 1]


def test_points_without_a_value_are_bridged(tmp_path, drawn):
    plot([make_run(tmp_path / "x" / "run", [NAN, 1.0, NAN, 3.0, NAN])], tmp_path / "curve.png")
    steps, values = drawn["x"]
    assert steps[0] == 200 and steps[-1] == 400
    np.testing.assert_allclose(values[0], (steps - 100) / 100)


def test_a_line_ends_where_the_first_of_its_seeds_ends(tmp_path, drawn):
    runs = [make_run(tmp_path / "x" / f"run{n}", np.arange(n, dtype=float).tolist()) for n in (4, 8)]
    plot(runs, tmp_path / "curve.png")
    assert drawn["x"][0][-1] == 400


def test_every_row_of_a_long_run_counts(tmp_path, drawn):
    noise = np.random.default_rng(0).normal(size=20_000)
    steps, values = module._common([(np.arange(20_000.0), noise)])
    assert values.shape == (1, module.NUM_POINTS) and steps[0] == pytest.approx(49.5)
    np.testing.assert_allclose(values[0], noise.reshape(module.NUM_POINTS, -1).mean(1), atol=0.02)


def test_the_band_at_a_point_is_the_bootstrap_interval_of_its_seeds():
    values = np.random.default_rng(1).normal(size=(8, 5))
    low, high = module._interval(values)
    for t in range(5):
        expected = bootstrap_ci(values[:, t], iqm)
        assert (low[t], high[t]) == pytest.approx(expected, abs=1e-12)


def test_a_run_with_one_row_is_a_point(tmp_path):
    pytest.importorskip("matplotlib")
    assert is_png(plot([make_run(tmp_path / "x" / "run", [3.0])], tmp_path / "curve.png"))


def test_seeds_that_do_not_overlap_are_still_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / "x" / "a", [1.0]), make_run(tmp_path / "x" / "b", [NAN, NAN, 2.0])]
    assert is_png(plot(runs, tmp_path / "curve.png"))


def test_other_metrics_and_formats(tmp_path):
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "x" / "run", [1.0, 0.5], metric="policy_loss")
    text = plot([run], tmp_path / "curve.svg", metric="policy_loss").read_text()
    assert "policy loss" in text and "environment steps" in text and "x (1 seed)" in text


def test_many_experiments_have_lines_that_differ(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / f"x{k}" / "run", [float(k), k + 1.0]) for k in range(9)]
    assert is_png(plot(runs, tmp_path / "curve.png"))


@pytest.mark.parametrize("settings", [2, 20])
def test_a_legend_of_many_settings_leaves_the_curves_their_room(settings, tmp_path, drawn):
    more = [f"+env.a_long_name_{i}=1" for i in range(settings)]
    runs = [trained(tmp_path / str(k), f"env={ENV_FILE}:MyEnv", f"+env.size={k}", *more) for k in range(12)]
    runs.append(trained(tmp_path / "x", f"env={ENV_FILE}:MyEnv"))
    assert is_png(plot(runs, tmp_path / "curve.png"))  # a warning of matplotlib's would be an error
    assert len(drawn) == 13


def test_a_folder_that_is_no_run_says_what_was_expected_and_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run folder: expected metrics.jsonl in it; give a folder that"):
        plot([tmp_path], tmp_path / "curve.png")
    make_run(tmp_path / "x" / "run", [1.0])
    with pytest.raises(FileNotFoundError, match=r"expected metrics.jsonl in it; plot the runs in it: .*/x/\*\."):
        plot([tmp_path / "x"], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (b"", "it holds no settings"),
        (b"- 1\n", "it holds no settings"),
        (b"a: [1", "while parsing a flow sequence"),
        (b"\xff\x00", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"algo: {}\nenv: {}\n", "'name'"),
        (b"algo: {name: ppo}\nenv: 3\n", "'int' object is not subscriptable"),
        (b"algo: ppo\nenv: {}\n", "string indices must be integers, not 'str'"),
    ],
    ids=str,
)
def test_a_damaged_configuration_is_an_error_of_one_sentence(damage, reason, tmp_path):
    path = make_run(tmp_path / "x" / "run", [1.0]) / "config.yaml"
    path.write_bytes(damage)
    told = f"{path} is not ours ({reason}); leave this run out, or remove the file, and the run is called as the folder"
    with pytest.raises(ValueError, match=re.escape(told)):
        plot([path.parent], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
    path.unlink()
    assert module._place(path.parent) == (tmp_path / "x", {})


def test_no_runs_no_metric_and_no_values_are_errors(tmp_path):
    with pytest.raises(ValueError, match="there is no run to plot"):
        plot([], tmp_path / "curve.png")
    run = make_run(tmp_path / "x" / "run", [NAN])
    with pytest.raises(ValueError, match="has no metric reward; it has episode_return"):
        plot([run], tmp_path / "curve.png", metric="reward")
    with pytest.raises(ValueError, match="has no value of episode_return yet"):
        plot([run], tmp_path / "curve.png")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="it has no rows yet"):
        plot([run], tmp_path / "curve.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'torchpod-rl\[plot\]'"):
        plot([make_run(tmp_path / "x" / "run", [1.0])], tmp_path / "curve.png")


def test_a_plot_that_fails_leaves_the_one_before_and_nothing_else(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def full(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    run, out = make_run(tmp_path / "x" / "run", [1.0, 2.0]), tmp_path / "out" / "curve.png"
    assert is_png(plot([run], out))
    before = out.read_bytes()
    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left") as raised:
        plot([run], out)
    assert raised.value.filename == str(out) and out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["curve.png"]


def test_the_callers_settings_of_matplotlib_are_left_alone(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    plot([make_run(tmp_path / "x" / "run", [1.0, 2.0])], tmp_path / "curve.png")
    assert dict(matplotlib.rcParams) == before
