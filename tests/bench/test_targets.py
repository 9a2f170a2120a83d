"""Targets are of rows that there are, and read as sentences."""

import fnmatch

import pytest

from torchpod.bench import (
    agents,
    anakin,
    envs,
    gpu,
    losses,
    multiagent,
    population,
    replay,
    sebulba,
    targets,
)
from torchpod.bench.targets import Target
from torchpod.compose import load

KINDS = ("cold", "warm", "first")


@pytest.mark.parametrize(
    ("target", "row", "told"),
    [
        (Target(ratio=2.0), {"ratio": 2.0, "interval": (2.0, 2.1), "unit": "env_steps/s"}, (">= 2 x", "met")),
        (
            Target(ratio=2.0),
            {"ratio": 2.0, "interval": (1.9, 2.1), "unit": "1/s"},
            (">= 2 x", "met, not in every round"),
        ),
        (Target(ratio=2.0), {"ratio": 1.9, "interval": (1.9, 2.1), "unit": "env_steps/s"}, (">= 2 x", "missed")),
        (Target(ratio=3.0), {"ratio": 2.9, "interval": (2.0, 3.1), "unit": "s"}, ("<= 3 x", "met, not in every round")),
        (Target(ratio=3.0), {"ratio": 3.1, "interval": (3.0, 3.2), "unit": "s"}, ("<= 3 x", "missed")),
        (Target(ratio=3.0), {"ratio": None, "value": 9.0, "unit": "s"}, ("<= 3 x", "not measured")),
        (Target(most=5.0), {"ratio": None, "value": 4.0, "unit": "s"}, ("<= 5 s", "met")),
        (Target(most=5.0), {"ratio": None, "value": 5.1, "unit": "s"}, ("<= 5 s", "missed")),
        (Target(least=0.9), {"ratio": None, "value": 0.8, "unit": "share"}, (">= 0.9 share", "missed")),
        (Target(stated=5.0), {"ratio": 1.0, "value": 4.0, "unit": "x/s"}, ("", "")),
        (Target(most=7.0), {"ratio": None, "value": 8.0, "unit": "MB"}, ("<= 7 MB", "missed")),
        (Target(ratio=2.0), {"ratio": 2.0, "interval": None, "unit": "1/s"}, (">= 2 x", "met")),
        (
            Target(ratio=2.0, best_of="layout"),
            {"ratio": 2.0, "interval": None, "unit": "1/s"},
            (">= 2 x with the best layout", "met"),
        ),
        (Target(least=5), {"interval": (0, 1), "value": 5, "unit": "env_steps/s"}, (">= 5 env_steps/s", "met")),
        (Target(least=5e7), {"ratio": 1.0, "value": None, "unit": "x/s"}, (">= 50,000,000 x/s", "not measured")),
    ],
)
def test_targets_in_words(target, row, told):
    assert targets.outcome(target, row) == told


def test_targets_are_those_of_rows_that_there_are():
    rates = {"anakin": [case.name for case in anakin.CASES]}
    rates["population"] = [population.name_of(case) for case in population.CASES]
    compiled = [f"compile_{kind}_{name}" for name in (*rates["anakin"], *rates["population"]) for kind in KINDS]
    replayed = [f"{case.name}/{load(case.overrides).num_envs}" for case in agents.CASES]
    shares = [case.name.replace("impala_", "impala_of_raw_", 1) for case in gpu.HOST_CASES]
    layouts = [
        row
        for name, case in sebulba.CASES.items()
        for side in (*sebulba.LAYOUTS, "sync", "plain")
        for row in (
            *(sebulba.row_of(name, case, mode, side) for mode in sebulba.WORK),
            *(f"{work}_{name}_{side}_vs_plain/{case.num_envs}" for work in sebulba.WORK.values()),
            f"cpu_{name}_{side}/{case.num_envs}",
        )
    ]
    rows = {
        "anakin": [*rates["anakin"], *compiled, "train_warm_cartpole/1024"],
        "agents": [*replayed, *(f"compile_{kind}_{name}" for name in replayed for kind in KINDS)],
        "envs": [f"{case.name}/{envs.NUM_ENVS}" for case in (*envs.CASES, *envs.ALONE)],
        "gpu": [*shares, *(case.name for case in gpu.CASES), "whole_suite"],
        "losses": [case.name for case in losses.CASES],
        "multiagent on cpu": [
            name for case in multiagent.CPU_CASES for name in (case.name, case.name.replace("env_only", "original"))
        ],
        "multiagent on cuda": [case.name for case in multiagent.CUDA_CASES],
        "population": [*rates["population"], *compiled],
        "replay": [f"{case.name} memory" for case in replay.CASES],
        "sebulba": layouts,
    }
    assert rows.keys() == targets.TARGETS.keys()
    for suite, known in targets.TARGETS.items():
        assert [pattern for pattern in known if not fnmatch.filter(rows[suite], pattern)] == []
        for target in known.values():
            limits = [target.ratio, target.most, target.least].count(None)
            assert limits == 2 or (limits == 3 and target.stated)
    assert targets.TARGETS["gpu"].keys() >= {*shares}
    told = targets.targets_of({"suite": "anakin", "rows": [{"name": name} for name in rows["anakin"]]})
    assert told["compile_warm_ppo_pendulum/1024"].most == 5.0 and told["compile_cold_ppo_pendulum/1024"].ratio == 3.0


def test_the_best_row_is_judged_where_that_is_a_setting(monkeypatch):
    known = {"a_*/2": Target(ratio=2.0, best_of="size"), "b_*": Target(ratio=1.0)}
    monkeypatch.setitem(targets.TARGETS, "x on cpu", known)
    names = ("a_1/2", "a_2/2", "a_3/2", "a_4/4", "b_1", "b_2")
    rows = [
        {"name": name, "ratio": ratio, "unit": "1/s", "interval": None}
        for name, ratio in zip(names, (1.0, 1.5, None, 9.0, 0.5, 0.6), strict=True)
    ]
    missed = targets.missed({"suite": "x", "device": "cpu", "rows": rows})
    assert [name for name, _ in missed] == ["a_2/2", "b_1", "b_2"]
    assert targets.missed({"suite": "x", "device": "cuda", "rows": rows}) == []
