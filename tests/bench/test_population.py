"""Suite population: both sides run the same members, and rows hold what all members do together."""

import json
from pathlib import Path

import pytest

from torchpod.bench import compare, population, processes, targets
from torchpod.bench.targets import Target


@pytest.fixture(autouse=True)
def no_target(monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "population", {})


def run_suite(tmp_path, *workers, **knobs):
    path = tmp_path / "out.json"
    options = {"cases": ((16, 4),), "rounds": 2, "repeats": 2, **knobs}
    return population.main(str(path), workers=workers, **options), json.loads(path.read_text())


def test_rows_are_ratios_on_one_core_and_on_two(tmp_path, fake):
    status, result = run_suite(tmp_path, fake("torchpod", 3000.0), fake("jax", 2000.0))
    assert status == 0
    rate, cold, warm, two = result["rows"]
    assert (rate["name"], rate["ratio"]) == ("population_ppo_cartpole/16x4", pytest.approx(1.5))
    assert [row["name"] for row in (cold, warm)] == [
        f"compile_{x}_population_ppo_cartpole/16x4" for x in ("cold", "warm")
    ]
    assert (two["name"], two["ratio"]) == ("population_ppo_cartpole/16x4 on 2 cores", pytest.approx(1.5))


def test_one_row_alone(tmp_path, fake):
    workers, cases = (fake("torchpod", 3000.0), fake("jax", 2000.0)), ((16, 4), (64, 4))
    _, result = run_suite(tmp_path, *workers, cases=cases, only="population_ppo_cartpole/64")
    assert result["only"] and all("/64x4" in row["name"] for row in result["rows"]) and len(result["rows"]) == 4
    with pytest.raises(ValueError, match="--only 'population_ppo_cartpole/8' is nothing of population"):
        run_suite(tmp_path, *workers, cases=cases, only="population_ppo_cartpole/8")


def test_every_round_has_seeds_of_its_own(tmp_path, fake, monkeypatch):
    run_worker, seeds = processes.run_worker, {False: [], True: []}

    def told(worker, arguments, **knobs):
        seeds["--threads" in arguments].append(arguments[arguments.index("--seed") + 1])
        return run_worker(worker, arguments, **knobs)

    monkeypatch.setattr(processes, "run_worker", told)
    run_suite(tmp_path, fake("torchpod", 3000.0), fake("jax", 2000.0))
    assert seeds[True] == ["0", "0", "100", "100"] == seeds[False][:4]  # both sides, in turn


def test_a_peer_that_hangs_on_two_cores_is_told(tmp_path, fake, monkeypatch):
    script = next(Path(x) for x in fake("jax", 1.0).command if x.endswith(".py"))
    hang = "import sys, time\nif 'jax' in sys.argv and '--threads' in sys.argv: time.sleep(60)\n"
    script.write_text(hang + script.read_text())
    monkeypatch.setattr(population, "TWO_CORES_S", 2.0)
    status, result = run_suite(tmp_path, fake("torchpod", 3000.0), fake("jax", 2000.0))
    two = result["rows"][-1]
    assert (status, two["ratio"], two["peer"]) == (0, None, None)
    assert two["value"] == pytest.approx(3000.0) and "jax was still running after 2 s" in two["note"]


def test_a_slow_peer_and_a_side_that_fails_are_told(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.setattr(targets, "GFLOPS", 100.0)  # of which the machine has half
    for slowest, told in ((8000.0, "below 3,600"), (4000.0, "")):
        figure = Target(stated=9000.0, slowest=slowest)
        monkeypatch.setitem(targets.TARGETS, "population", {"population_ppo_cartpole/16x4": figure})
        status, _ = run_suite(tmp_path, fake("torchpod", 3000.0), fake("jax", 2000.0))
        assert status == bool(told) and told in capsys.readouterr().err
    status, result = run_suite(tmp_path, fake("torchpod", 1.0, missing="gone"), fake("jax", 2000.0))
    assert status == 1 and result["failures"][0] == ["population_ppo_cartpole/16x4", "torchpod: gone"]


def test_members_that_learn_nothing_fail_the_bench(tmp_path, fake, monkeypatch):
    monkeypatch.setitem(compare.LEARNED, "cartpole", 101.0)  # both fakes have 100
    status, result = run_suite(tmp_path, fake("torchpod", 3000.0), fake("jax", 2000.0))
    assert status == 1 and len(result["failures"]) == 2
    name, told = result["failures"][0]
    assert name == "population_ppo_cartpole/16x4" and told.startswith("torchpod learned to a mean return of 100.0")
    assert run_suite(tmp_path, fake("torchpod", 3000.0), fake("jax", 2000.0), quick=True)[0] == 0


def test_both_sides_get_the_same_arguments():
    arguments = population.case_arguments(16, 4, 3, learn=True, seed=2)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert (options["--num-envs"], options["--population"], options["--iterations"]) == ("4", "16", "61")
    assert (options["--warmup"], options["--seed"]) == ("300", "200")  # seeds of the members do not overlap


def test_members_are_part_of_the_work():
    m = {key: 1 for key in compare.EQUAL_WORK} | {"framework": "a", "mode": "update", "num_envs": 4}
    assert compare.unequal_work(m | {"population": 16}, m | {"population": 16, "framework": "b"}) == []  # pyright: ignore
    told = compare.unequal_work(m | {"population": 16}, m | {"framework": "b"})  # pyright: ignore
    assert told == ["unequal work: population is 16 in a and 1 in b."]
