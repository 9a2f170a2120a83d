"""Suite multiagent: the games in NumPy are ours, rows are held against targets, floors are worked out by hand."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.bench import floor, harness, multiagent, processes
from torchpod.bench import multiagent_worker as worker
from torchpod.bench.floor import Gpu
from torchpod.bench.multiagent import CPU_CASES, CUDA_CASES, GRID, MOST_WITH_FULL, PLANE, Case
from torchpod.bench.processes import Worker
from torchpod.bench.targets import TARGETS, WARPDRIVE
from torchpod.compile import Compiler
from torchpod.envs import CovidEconomy
from torchpod.testing import check_consistency
from torchpod.types import FIRST, LAST

DRIVER = processes.ROOT / "bench" / "peers" / "numpy_games.py"
PRODUCT = {"2048x64x64": 50.0}

FAKE = """
import json, sys
original = sys.argv[1] in ("--per-agent", "--window")
rate = RATE / 2 if original else RATE
options = dict(zip(sys.argv[1 + original::2], sys.argv[2 + original::2]))
repeats, size = int(options["--repeats"]), int(options["--num-envs"])
served = "--rounds" in options
if served:
    print(json.dumps({"ready": True}), flush=True)
for _ in sys.stdin if served else [0]: print(json.dumps({
    "framework": "fake", "mode": options["--mode"], "num_envs": size, "unroll_length": 10, "epochs": 0,
    "minibatches": 0, "batch_rows": 10 * size, "param_count": 0, "dtype": "float32", "device": options["--device"],
    "memory_bytes": 2e9, "iterations": 1, "total_iterations": 1, "compile_s": 1.0, "env_steps": [rate] * repeats,
    "wall_s": [1.0] * repeats, "cpu_s": [1.0] * repeats,
    "episode_return": None, "episodes": 0, "threads": {}, "versions": {},
    "policies": [{"agents": 5, "observation_size": 21, "layers": [[21, 32], [32, 6]], "fused": FUSED}],
    "state_bytes": 49.0, "env_flops": 0.0, "choices": 5, "kernels": 0, "bytes_per_s": 1e10,
}), flush=True)
if served:
    print(json.dumps({"details": {}}))
"""


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.syspath_prepend(DRIVER.parent)
    return importlib.import_module(DRIVER.stem)


class Reference:
    """A game of the peer, as `check_consistency` wants it."""

    def __init__(self, game, groups):
        self.game, self.groups = game, groups

    def reset(self, state):
        start = tuple(np.array(f) for f in (state.x, state.y, state.heading)) if hasattr(state, "heading") else None
        return self.split(self.game.reset(start))

    def step(self, action):
        observation, reward, *over = self.game.step(np.concatenate([action[g] for g in self.groups]))
        told = {"alive": self.split(self.game.alive)} if hasattr(self.game, "alive") else {}
        return self.split(observation), self.split(reward), *over, told

    def split(self, rows):
        first = next(iter(self.groups.values()))
        return dict(zip(self.groups, (rows[:first], rows[first:]), strict=True))


@pytest.mark.parametrize("game", ["tag_gridworld", "tag_continuous"])
@pytest.mark.parametrize(("num_agents", "full"), [(5, True), (30, False), (45, True)])
def test_the_peer_plays_the_same_game(peer, game, num_agents, full):
    """With one seed: where two are equally near but for the last bit, the peer may see them in another order."""
    env = worker.GAMES[game](num_agents, full).env
    reference = Reference(peer.make(game, num_agents, full), env.spec.groups)
    check_consistency(env, reference, num_envs=2, num_steps=120, seed=0, rtol=0, atol=2e-6)


def test_the_peer_has_the_same_economy(peer, seed):
    """Masked actions too, over an episode and the first days of the next."""
    env, game, rng = CovidEconomy(), peer.make("covid_economy", 52, False), np.random.default_rng(seed)
    keys = random.key(0)[None]

    def require_equal(observation, timestep):
        for group, (numbers, mask) in zip(("governor", "planner"), observation, strict=True):
            seen = timestep.observation[group]
            np.testing.assert_allclose(seen["numbers"][0].numpy(), numbers, rtol=0, atol=2e-6)
            assert np.array_equal(seen["action_mask"][0].numpy(), mask)

    state, timestep = env.init(keys)
    require_equal(game.reset(), timestep)
    for action in game.actions(rng, 600):
        chosen = torch.from_numpy(action)[None]
        state, timestep = env.step(state, {"governor": chosen[:, :-1], "planner": chosen[:, -1:]}, keys)
        if (timestep.step_type == FIRST).all():
            require_equal(game.reset(), timestep)
            continue
        observation, reward, terminated, truncated = game.step(action)
        require_equal(observation, timestep)
        found = torch.cat([timestep.reward["governor"], timestep.reward["planner"]], 1)[0]
        np.testing.assert_allclose(found.numpy(), reward, rtol=0, atol=1e-5)
        assert (terminated, truncated) == (False, (timestep.step_type == LAST).item())


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("num_taggers", "length"), [(4, 3), (29, 40)])
def test_tag_agent_by_agent_is_the_same_game(peer, seed, num_taggers, length, full):
    rng = np.random.default_rng(seed)
    kinds = peer.TagGridWorld, peer.TagGridWorldPerAgent
    arrays, single = (kind(num_taggers, length, full, max_episode_steps=100) for kind in kinds)
    observation, own, tags = arrays.reset(), single.reset(), 0
    for action in arrays.actions(rng, 300):
        assert [*own] == [*range(num_taggers + 1)]
        np.testing.assert_array_equal(observation, np.stack([*own.values()]))
        observation, reward, *over = arrays.step(action)
        own, rewards, *ends = single.step(action)
        np.testing.assert_array_equal(reward, [*rewards.values()])
        assert over == ends
        tags += over[0]
        if any(over):
            observation, own = arrays.reset(), single.reset()
    assert tags > 0 or length > 3


def test_an_economy_that_adds_up_600_days_anew_is_the_same(peer, seed):
    """Over an episode and the first days of the next: what was before the start is forgotten from day 520 on."""
    short, long = (peer.make("covid_economy", 52, False, window=window) for window in (False, True))
    for game in (short, long):
        game.reset()
    for action in short.actions(np.random.default_rng(seed), 600):
        ((seen, _), _), reward, *over = short.step(action)
        ((same, _), _), again, *ends = long.step(action)
        np.testing.assert_allclose(long.jobless, short.jobless, rtol=1e-9)
        np.testing.assert_allclose(long.output, short.output, rtol=1e-9)
        np.testing.assert_allclose(same, seen, rtol=1e-6)
        np.testing.assert_allclose(again, reward, rtol=1e-6, atol=1e-6)
        assert over == ends
        if any(over):
            short.reset()
            long.reset()


@pytest.mark.parametrize(
    ("game", "variant", "label"),
    [("tag_gridworld", "--per-agent", "numpy per agent"), ("covid_economy", "--window", "numpy window")],
)
def test_variants_of_the_peer_say_what_they_are(game, variant, label):
    def run(game):
        command = [sys.executable, str(DRIVER), "--game", game, variant, "--seconds", "0.01", "--repeats", "2"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    measured = json.loads(run(game).stdout)
    assert measured["framework"] == label and len(measured["env_steps"]) == len(measured["wall_s"]) == 2
    assert "--per-agent is of tag_gridworld, --window of covid_economy." in run("tag_continuous").stderr


@pytest.mark.parametrize("case", [Case("tag_gridworld", 5, 60), Case("covid_economy", 52, 60)])
def test_the_peer_is_a_worker_of_the_harness(case, tmp_path):
    arguments = multiagent.case_arguments(case, "cpu", 0.01, 2, seed=3)
    ours = Worker("numpy", (sys.executable, str(DRIVER)))
    measured = processes.run_worker(ours, arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    assert measured["num_envs"] == 1 and len(measured["env_steps"]) == 2 and min(measured["env_steps"]) >= 10


def run(tmp_path, monkeypatch, cases, ours, theirs, *, fused=True, **settings):
    monkeypatch.setattr(harness, "calibrate", lambda core: PRODUCT)
    workers = []
    for name, rate in (("torchpod", ours), ("numpy", theirs)):
        path = tmp_path / f"{name}.py"
        path.write_text(FAKE.replace("RATE", str(rate)).replace("FUSED", str(fused)))
        workers.append(Worker(name, (sys.executable, "-S", str(path))))
    out = tmp_path / "out.json"
    status = multiagent.main(str(out), cases=cases, workers=tuple(workers), repeats=1, **settings)
    return status, json.loads(out.read_text())


def test_a_row_says_agent_steps_floor_memory_and_the_figure_of_warpdrive(tmp_path, monkeypatch):
    cases = [Case("tag_gridworld", 5, 2000), Case("tag_gridworld", 5, 2000, "sampler")]
    status, document = run(tmp_path, monkeypatch, cases, 980_000.0, 9800.0, device="cpu")
    row, original, sampler = document["rows"]
    assert (status, document["failures"], row["name"]) == (0, [], "env_only_tag_gridworld_5/2000")
    assert row["ratio"] == 100.0 and row["peer"]["name"] == "numpy"
    # 2000 x (2 x 49 bytes of state + 5 agents x 4 x (21 + 3) bytes) at 10 GB/s
    assert row["note"] == (
        "4,900,000 agent steps/s; step 2,041 us, floor 116: bytes 116 (1.16 MB), flops 0 (0.0 M), 1,765 x NumPy "
        "if it were reached; memory 2.00 GB; 0.10 x WarpDrive's 9,800,000 on an A100"
    )
    assert (original["name"], original["peer"]["name"]) == ("original_tag_gridworld_5/2000", "numpy as there")
    assert (original["value"], original["ratio"]) == (row["value"], 200.0)
    assert sampler["peer"] is None and sampler["note"].startswith("4,900,000 samples/s; step 2,041 us, floor 28:")


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_unrolls_on_a_cpu_are_as_long_as_fits(case):
    arguments = multiagent.case_arguments(case, "cpu", 0.7, 3, 0)
    assert "--unroll" not in multiagent.case_arguments(case, "cuda", 0.7, 3, 0)
    rows = case.num_agents * case.num_envs
    if case.mode in multiagent.LEARNING and case.game in multiagent.MOST_ROWS:
        steps = int(arguments[arguments.index("--unroll") + 1]) if "--unroll" in arguments else 100
        most = multiagent.MOST_ROWS[case.game]
        assert rows * steps <= most and (steps == 100 or most < rows * 2.5 * steps)
    else:
        assert "--unroll" not in arguments


def test_a_suite_that_is_stopped_on_a_gpu_keeps_what_was_measured(tmp_path, monkeypatch):
    cases = [Case("tag_gridworld", 5, 2000), Case("tag_gridworld", 5, 500)]

    def interrupted(found, cases, ours, peer, seconds, repeats, rounds, core, deadline):
        arguments = [multiagent.case_arguments(cases[0], "cpu", seconds, repeats, 0)]
        found[cases[0]] = processes.interleave([ours], arguments, core=None, cache_dir=tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(multiagent, "on_gpu", interrupted)
    status, document = run(tmp_path, monkeypatch, cases, 980_000.0, 9800.0, device="cuda")
    assert status == 1 and document["only"] == "env_only_tag_gridworld_5/2000"
    (row,) = document["rows"]
    assert (row["value"], row["peer"]) == (980_000.0, None)
    assert "the suite was stopped after this row: interrupted." in document["failures"][-1][1]


def test_the_worker_takes_the_unroll_that_it_is_told():
    anakin = worker.build(
        PLANE, 12, 3, mode="update", full=False, compiler=Compiler(False), device="cpu", unroll_length=25
    )
    assert anakin.unroll_length == 25


def test_a_floor_that_was_undercut_is_none(tmp_path, monkeypatch):
    status, document = run(tmp_path, monkeypatch, [Case("tag_gridworld", 5, 2000)], 1e8, 9800.0, device="cpu")
    told = "an iteration took 0.2 ms, and its floor is 1.2."
    assert (status, document["failures"]) == (1, [["env_only_tag_gridworld_5/2000", told]])


def test_targets_that_are_missed_fail(tmp_path, monkeypatch, capsys):
    cases = [Case("tag_gridworld", 5, 60), Case("tag_gridworld", 5, 500)]
    status, document = run(tmp_path, monkeypatch, cases, 150.0, 10.0, device="cpu")
    assert (status, document["failures"]) == (1, [])
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "target" in line)
    best = "15.00 x, the target is >= 20 x with the best number of environments."
    assert told == f"torchpod bench: env_only_tag_gridworld_5/500: {best}"
    _, document = run(tmp_path, monkeypatch, [Case("tag_continuous", 45, 2000, "update")], 3e5, 1, device="cuda")
    told = "a2c_tag_continuous_45/2000: 300,000 env_steps/s, the target is >= 750,000 env_steps/s."
    assert told in capsys.readouterr().err  # five times WarpDrive's 150,000
    note = document["rows"][0]["note"]
    assert "no floor is known for this device" in note and "networks fused, float32;" in note


def test_on_a_cpu_nothing_is_held_against_an_a100(tmp_path, monkeypatch, capsys):
    case = Case("tag_continuous", 45, 2000, "update")
    assert run(tmp_path, monkeypatch, [case], 3.0, 1, device="cpu")[0] == 0


def test_the_economy_is_compared_with_sixteen_cores(tmp_path, monkeypatch):
    _, document = run(tmp_path, monkeypatch, [Case("covid_economy", 52, 60)], 3200.0, 100.0, device="cpu")
    assert (
        "; 2.00 of 16 NumPy cores, if they are 16 times as fast as one (WarpDrive on an A100, with 60 "
        in (document["rows"][0]["note"])
    )


def test_on_a_gpu_the_headline_comes_first_and_a_budget_ends_it(tmp_path, monkeypatch):
    cases = [Case("tag_gridworld", 5, 60), Case("covid_economy", 52, 60), Case("tag_gridworld", 5, 2000)]
    status, document = run(tmp_path, monkeypatch, cases, 5e7, 10.0, device="cuda", seconds=0.01)
    assert [row["name"].partition("_only_")[2] for row in document["rows"]] == [
        "tag_gridworld_5/2000",
        "covid_economy_52/60",
        "tag_gridworld_5/60",
    ]
    assert status == 0 and all(row["ratio"] == 5e6 for row in document["rows"])
    settings = {"device": "cuda", "only": "headline", "budget_s": 0.0}
    status, document = run(tmp_path, monkeypatch, cases, 5e7, 10.0, **settings)
    assert len(document["rows"]) == 2 and status == 1
    assert "when the time was over" in document["failures"][0][1]


def test_what_is_there_at_once_fits_in_the_memory_of_a_gpu():
    limit = 0.7 * 80e9
    found = multiagent.waves(multiagent.HEADLINE, limit)
    assert [case for wave in found for case in wave] == [*multiagent.HEADLINE] and len(found) <= 4
    assert all(sum(case.memory_bytes for case in wave) <= limit for wave in found)
    largest = Case("tag_gridworld", 1000, 2000, "update")
    assert largest in multiagent.HEADLINE and largest.memory_bytes > 280 * 100 * 2_000_000 * 0.9  # docs/multi-agent.md


def test_the_floor_of_an_update_is_that_of_its_policies():
    policies = [{"agents": 3, "observation_size": 4, "layers": [(4, 2), (2, 2)]}]
    details = {"batch_rows": 10, "epochs": 1, "state_bytes": 7.0, "env_flops": 5.0, "kernels": 3, "policies": policies}
    peak = Gpu(1e3, 1e6, 1e5)
    found, num_bytes, num_flops = multiagent.least(Case("tag_gridworld", 3, 1, "update"), details, peak)
    # 10 steps: 2 x 7 bytes of state, 3 rows of 4 x (4 + 6) bytes, written once and read once
    assert num_bytes == 10 * (14 + 3 * 2 * 40)
    # F = 2 x 12, of which the first layer 2 x 8: acting F, learning 3 F - 16
    assert num_flops == 10 * (5 + 3 * (24 + 3 * 24 - 16))
    assert found == floor.Floor(3e-6, num_bytes / 1e3, num_flops / 1e5)
    alone = multiagent.least(Case("tag_gridworld", 3, 1), details | {"epochs": 0}, peak)
    assert alone[1:] == (10 * (14 + 3 * 4 * (4 + 2 + 1)), 10 * 5)  # an action of 8 bytes, a reward


@pytest.mark.parametrize("mode", worker.PROGRAMS)
@pytest.mark.parametrize(("game", "num_agents"), [("tag_gridworld", 5), ("tag_continuous", 12), ("covid_economy", 52)])
def test_the_worker_counts_environment_steps(game, num_agents, mode):
    compiler = Compiler(False)
    options = {"mode": mode, "full": num_agents <= 5, "compiler": compiler, "device": "cpu"}
    anakin = worker.build(game, num_agents, 3, **options)
    anakin.unroll_length = 4
    measured = worker.Prepared(anakin, mode, compiler=compiler, seconds=0.0, seed=0).measure(2)
    assert measured["env_steps"] == [12.0, 12.0]  # no episode is so short
    assert sum(policy["agents"] for policy in measured["policies"]) == num_agents
    for policy in measured["policies"]:
        assert sum(inputs == policy["observation_size"] for inputs, _ in policy["layers"]) == 1


@pytest.mark.parametrize("num_agents", [5, 40])
def test_a_gradient_is_of_about_as_many_agents_as_is_said(monkeypatch, num_agents):
    options = {"mode": "update", "full": False, "compiler": Compiler(False), "device": "cpu"}
    anakin, agents = worker.build("tag_gridworld", num_agents, 60, **options), []
    cut = anakin.learner.dealer.cut

    def cutting(minibatches, num_chunks):
        chunks = cut(minibatches, num_chunks)
        agents.extend(max(x.numel() for k, x in c.steps.items() if k.endswith("weight")) for c in chunks)
        return chunks

    monkeypatch.setattr(anakin.learner.dealer, "cut", cutting)
    anakin.iterate(anakin.init(0))
    assert agents and all(2 / 3 < n / worker.CHUNK_ROWS["cpu"] < 3 / 2 for n in agents)


def test_a_game_with_another_number_of_agents_is_refused():
    options = {"mode": "env_only", "full": False, "compiler": Compiler(False), "device": "cpu"}
    with pytest.raises(ValueError, match=r"covid_economy has 52 agents, and not 5\."):
        worker.build("covid_economy", 5, 1, **options)


def test_every_figure_of_warpdrive_has_a_row_on_cuda_and_every_target_a_peer():
    names = [case.name for case in CUDA_CASES]
    assert len(set(names)) == len(names) and set(WARPDRIVE) <= {case.name for case in multiagent.HEADLINE}
    assert set(multiagent.HEADLINE) <= set(CUDA_CASES)
    assert {case.name for case in CPU_CASES} <= set(names)
    for pattern in TARGETS["multiagent on cpu"]:
        game = pattern.removeprefix("original_").removeprefix("env_only_").removesuffix("*")
        assert any(case.has_peer and case.name.startswith(f"env_only_{game}") for case in CPU_CASES)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_the_worker_knows_every_case(case):
    made = worker.GAMES[case.game](case.num_agents, case.num_agents <= MOST_WITH_FULL)
    assert made.env.spec.groups and sum(made.env.spec.groups.values()) == case.num_agents
    assert torch.get_num_threads() == 1


def test_the_peers_say_what_they_need():
    done = subprocess.run([sys.executable, str(DRIVER), "--game", "chess"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "tag_gridworld" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("game", "sizes", "most"), [(GRID, (15, 60), 280), (PLANE, (2, 6), 800)])
def test_a_thousand_agents_take_the_memory_that_is_promised(game, sizes, most):
    """Of each agent and step of the unroll, from the difference of two sizes: docs/multi-agent.md."""

    def memory(num_envs):
        command = [sys.executable, "-m", "torchpod.bench.multiagent_worker", "--num-agents", "1000"]
        command += ["--game", game, "--mode", "update", "--seconds", "0.01", "--repeats", "1"]
        done = subprocess.run([*command, "--num-envs", str(num_envs)], capture_output=True, text=True, check=True)
        measured = json.loads(done.stdout)
        return measured["memory_bytes"], measured["unroll_length"]

    (few, length), (many, _) = map(memory, sizes)
    assert 50 < (many - few) / ((sizes[1] - sizes[0]) * 1000 * length) <= most
