"""Replay in both loops: lockstep, lag, exact resume from files, and what a host's broken episodes leave behind."""

import copy
import json
import random as python_random
import re
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.marks import with_slow
from tests.replay.agents import AGENTS, CONTINUOUS, WITHOUT_PRIORITIES
from torchpod import checkpoint, random
from torchpod.algos.dqn import DQN, DQNConfig
from torchpod.anakin import Anakin
from torchpod.anakin import train as train_anakin
from torchpod.checkpoint import CheckpointError
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.kernels.inductor import Compiled
from torchpod.learner import LearnerConfig
from torchpod.main import main
from torchpod.replay import ReplayBuffer, ReplayConfig, memory, segments
from torchpod.replay.segments import Segments
from torchpod.run.execute import execute
from torchpod.sebulba import Sebulba, SebulbaConfig, train
from torchpod.specs import Array, Discrete, EnvSpec, Traits
from torchpod.types import FIRST, LAST

T, B = 4, 4
LEARNER = LearnerConfig(num_epochs=1, num_minibatches=2, learning_rate=1e-2)
PRIORITISED = ReplayConfig(capacity=40 * B, batch_size=16, min_size=32, prioritised=True)
SMALL = (
    "algo=dqn",
    "env=cartpole",
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "algo.agent.hidden=[8]",
    "algo.agent.n_step=2",
    "algo.env_steps_per_update=8",
    "algo.replay.capacity=160",
    "algo.replay.min_size=32",
    "algo.replay.batch_size=16",
    "algo.replay.prioritised=true",
    "evaluation.episodes=2",
)
STEPS = 4 * T


def settings(env):
    return {
        "num_envs": B,
        "unroll_length": T,
        "learner": LEARNER,
        "num_iterations": 30,
        "compiler": Compiler(enabled=False),
        "replay": PRIORITISED,
    }


def agent(env):
    return lambda: DQN(env.spec, DQNConfig(hidden=(8,), n_step=2, target_interval=3))


def last_of(reports):
    """The last state, and all metrics."""
    history, states = [], []
    for report, program in reports:
        history.append(report.metrics)
        states = [pytree.tree_map(torch.clone, program.state)]
    return states[0], history


def assert_equal(a, b):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, equal_nan=True, rtol=0, atol=0), a, b)


@pytest.mark.parametrize(("name", "host"), [("dqn", True), *((name, False) for name in AGENTS)], ids=str)
def test_in_lockstep_sebulba_equals_anakin_to_the_bit(seed, name, host):
    env = Pendulum(max_episode_steps=7) if name in CONTINUOUS else CartPole(max_episode_steps=7)
    replay = replace(PRIORITISED, prioritised=name not in WITHOUT_PRIORITIES)
    own = settings(env) | {"replay": replay, "num_iterations": 30 if host else 8}  # 18 are once around the ring

    def make():
        return AGENTS[name](env.spec)

    anakin = Anakin(make, env, **own)
    begin = anakin.init(seed)
    want, expected = last_of(train_anakin(anakin, begin))
    other = HostEnv(env) if host else env
    lockstep = SebulbaConfig(num_actor_threads=1, lag=0)
    sebulba = Sebulba(make, lambda: copy.copy(other), config=lockstep, **own)
    got, history = last_of(train(sebulba, sebulba.init(seed)))
    for part in ("learner", "priorities", "env_keys", "episode_return", "episode_length", "iteration", "env_steps"):
        assert_equal(getattr(got, part), getattr(want, part))
    assert_equal(got.carry[1:], want.carry[1:])
    assert sebulba.replay and anakin.replay
    assert_equal(sebulba.replay.buffer.storage, anakin.replay.buffer.storage)
    learned = own["num_iterations"] - anakin.replay.buffer.fill_iterations
    assert len(history) == len(expected) == learned > 5 and want.learner.num_steps == 2 * learned
    assert any((want.learner.params[key] != x).any() for key, x in begin.learner.params.items())
    for a, b in zip(history, expected, strict=True):
        for key, value in b.items():
            assert torch.equal(a[key], value) or (a[key].isnan() and value.isnan())


class Diary(TensorEnv):
    """Observes how many steps were made, and the name of its environment; a reward says after what it was given."""

    spec = EnvSpec("diary", Array((2,)), Discrete(3))
    traits = Traits()

    def reset(self, keys):
        return torch.stack([torch.zeros(len(keys)), random.uniform(keys, 1)[:, 0]], -1)

    def transition(self, state, action, keys):
        reward = 10.0 * state[:, 0] + action
        return state + torch.tensor([1.0, 0.0]), reward, torch.zeros(len(keys), dtype=torch.bool)

    def observe(self, state):
        return state


class Dawdling(HostEnv):
    """Now and then another pool overtakes it."""

    def step(self, state, action, keys):
        time.sleep(0.004 * python_random.random() ** 4)
        return super().step(state, action, keys)


@pytest.mark.parametrize(("lag", "pools"), [("free", 1), ("free", 2), (2, 2)])
def test_whatever_the_lag_the_ring_holds_each_step_in_its_place(seed, lag, pools):
    env = Dawdling(Diary())
    config = SebulbaConfig(num_actor_threads=2, pools_per_actor=pools, lag=lag, queue_size=2)
    sebulba = Sebulba(agent(env), lambda: copy.copy(env), config=config, **settings(env))
    state, _ = last_of(train(sebulba, sebulba.init(seed)))
    assert sebulba.replay and int(state.iteration) == 30
    ring = sebulba.replay.buffer
    end, names = 30 * T, random.uniform(random.at(state.env_keys, 0), 1)[:, 0]
    assert end > ring.num_slots + T  # twice around, in part
    times = torch.arange(end - ring.num_slots, end)
    held = pytree.tree_map(lambda x: x[times % ring.num_slots], ring.storage)
    observation, action = held["timestep"]["observation"], held["output"]["action"]
    assert torch.equal(observation[..., 0], times[:, None].expand(-1, B).float())
    assert torch.equal(observation[..., 1], names.expand(len(times), B))
    assert torch.equal(held["timestep"]["reward"][1:], 10.0 * times[:-1, None] + action[:-1])


@pytest.mark.parametrize("lag", [0, 1])
def test_actors_follow_schedules_while_it_fills(seed, lag):
    """Unroll n acts with what was to be acted with after n - lag."""

    class Acting(DQN):
        def act(self, timestep, state, keys, explore=True):
            output, state = super().act(timestep, state, keys, explore)
            return output._replace(extras={"epsilon": self.epsilon.expand_as(output.action)}), state

    env = CartPole(max_episode_steps=7)
    schedules = {"epsilon": ((0.0, 1.0), (10.0 * STEPS, 0.0))}
    sebulba = Sebulba(
        lambda: Acting(env.spec, DQNConfig(hidden=(8,), n_step=2)),
        lambda: copy.copy(env),
        config=SebulbaConfig(num_actor_threads=0, lag=lag),
        **settings(env) | {"learner": replace(LEARNER, schedules=schedules)},
    )
    last_of(train(sebulba, sebulba.init(seed), until=6))
    assert sebulba.replay and sebulba.replay.buffer.fill_iterations >= 1
    told = sebulba.replay.buffer.storage["output"]["extras"]["epsilon"][: 6 * T].reshape(6, -1)
    want = torch.tensor([1 - max(0, i - lag) / 10 for i in range(6)])
    torch.testing.assert_close(told, want[:, None].expand_as(told))


def by_two_actors(name, seed, lag):
    """The last state, and all metrics."""
    env = Pendulum(max_episode_steps=7) if name in CONTINUOUS else CartPole(max_episode_steps=7)
    own = settings(env) | {"replay": replace(PRIORITISED, prioritised=name not in WITHOUT_PRIORITIES)}
    sebulba = Sebulba(
        lambda: AGENTS[name](env.spec),
        lambda: copy.copy(env),
        config=SebulbaConfig(num_actor_threads=2, lag=lag),
        **own | {"num_iterations": 30 if name == "dqn" else 10},
    )
    return last_of(train(sebulba, sebulba.init(seed)))


@pytest.mark.parametrize(
    ("name", "lag"),
    with_slow(
        [("dqn", 0), ("dqn", 2), *((name, 1) for name in AGENTS)],
        [(x, 1) for x in AGENTS if x not in ("dqn", "r2d2", "sac")],
    ),
)
def test_with_a_fixed_lag_two_runs_are_equal_to_the_bit(seed, name, lag):
    assert_equal(*(by_two_actors(name, seed, lag)[0] for _ in range(2)))


@pytest.mark.parametrize("name", AGENTS)
def test_with_a_free_lag_actors_fill_what_is_learned_from(seed, name):
    state, history = by_two_actors(name, seed, "free")
    assert state.iteration == (30 if name == "dqn" else 10) and state.learner.num_steps == 2 * len(history) > 0
    assert all(x.isfinite().all() for x in state.learner.params.values())


@pytest.fixture
def written_once(monkeypatch):
    """Checkpoints write what is new, and neither write nor read again what is in files already."""
    digest, read, save = segments._digest, [], Segments.save

    def saves(self, iteration):
        files = {path: (path.read_bytes(), path.stat()) for path in self._folder.glob("*.pt")}
        before = self._saved
        read.clear()
        kept = save(self, iteration)
        for path, (content, stat) in files.items():
            assert path.read_bytes() == content
            assert (path.stat().st_mtime_ns, path.stat().st_ino) == (stat.st_mtime_ns, stat.st_ino)
        new = {path for path in self._folder.glob("*.pt") if path not in files}
        assert set(read) == new and len(new) == min(iteration - before, 10 + self._buffer.history)  # one by one
        return kept

    monkeypatch.setattr(Segments, "save", saves)
    monkeypatch.setattr(segments, "_digest", lambda path: read.append(path) or digest(path))


OTHERS = (
    ("population=2", "algo=dqn", "env=cartpole"),
    ("algo=r2d2", "env=cartpole", "algo.agent.recurrent=4", "algo.agent.burn_in=1", "algo.agent.length=4"),
    ("algo=ddpg", "env=pendulum", "algo.agent.noise=ou"),
    ("loss=SACLoss", "env=pendulum"),
    (
        "algo=dqn",
        "env=minatar_breakout",
        "+env.transforms=[{name: frame_stack, num: 2}]",
        "algo.replay.frame_stack=2",
    ),
)
"""What else is resumed: populations, recurrent states, noise that goes on, TorchRL's losses, and stacks of frames."""


@pytest.mark.parametrize(
    ("loop", "stop", "other"),
    [
        *(("anakin", stop, ()) for stop in (3, 14, 25)),  # the ring is full after 10
        *(pytest.param("anakin", 14, x, marks=pytest.mark.slow if "loss=SACLoss" in x else ()) for x in OTHERS),
        ("sebulba", 14, ()),
        *(pytest.param("sebulba", stop, (), marks=pytest.mark.slow) for stop in (3, 25)),
        *(pytest.param("sebulba", 14, x, marks=pytest.mark.slow) for x in OTHERS if "population=2" not in x),
    ],
)
def test_a_run_that_is_resumed_equals_one_that_is_not(tmp_path: Path, written_once, loop, stop, other):
    lag, small = ["loop.lag=1"] if loop == "sebulba" else [], SMALL
    if other:
        small = [*other, *(x for x in SMALL[2:] if "n_step" not in x), "algo.unroll_length=4"]
    require_equal_runs(tmp_path, [*small, f"loop={loop}", *lag], stop)


def test_sebulba_looks_at_the_first_frames_before_an_update_that_may_be_captured(tmp_path, monkeypatch):
    seen, inserted, insert = [], [], ReplayBuffer.insert
    monkeypatch.setattr(
        ReplayBuffer, "check_frames", lambda self, x: seen.append((len(inserted), len(x.timestep.reward)))
    )
    monkeypatch.setattr(ReplayBuffer, "insert", lambda self, x, *args: [inserted.append(x), insert(self, x, *args)])
    steps = f"total_env_steps={3 * STEPS}"
    execute(load([*OTHERS[-1], *SMALL[2:], "algo.unroll_length=4", steps, "loop=sebulba", f"run_dir={tmp_path}/run"]))
    assert seen == [(1, 5)] and len(inserted) == 4  # the first is to compile with


def require_equal_runs(folder: Path, config: list[str], stop: int) -> None:
    """One that goes on after iteration `stop` in a new program, and one that is not interrupted."""
    config = [*config, f"total_env_steps={30 * STEPS}"]
    whole = execute(load([*config, f"run_dir={folder}/whole"]))
    # Three checkpoints, at different iterations, so that several files are put together.
    config += ["checkpoint.interval_s=0"]
    execute(load([*config, f"run_dir={folder}/parts"]), until=stop)
    last = checkpoint.latest(folder / "parts")
    assert int(last.name) == stop
    assert bool(json.loads(checkpoint.manifest_of(last, 0)))
    again = execute(load([f"resume={folder}/parts"]))
    states = [torch.load(checkpoint.latest(run.dir) / "state-0.pt") for run in (whole, again)]
    assert_equal(*states)
    assert_equal(again.variables, whole.variables)
    # One for every 8 steps, but those of the first iterations, which only collect: one, or what a sequence needs.
    assert int(states[0][".learner.num_steps"].unique()) * 8 == (27 if "algo=r2d2" in config else 29) * STEPS
    assert 0.8 * 30 * STEPS < whole.summary["env_steps"] <= 30 * STEPS
    assert len(list((folder / "parts/replay/0").glob("*.pt"))) <= 30


def test_a_run_that_was_interrupted_within_a_call_goes_on_as_if_it_had_not_been(seed, monkeypatch):
    """The call is given up after it has written to the buffer and to the priorities."""
    env = CartPole(max_episode_steps=7)
    whole = Anakin(agent(env), env, **settings(env))
    want, _ = last_of(train_anakin(whole, whole.init(seed), iterations_per_call=6))
    cut = Anakin(agent(env), env, **settings(env))
    calls, iterate = 0, cut.iterate

    def fails(state):
        nonlocal calls
        calls += 1
        if calls == 23:  # the first one compiles
            raise KeyboardInterrupt
        return iterate(state)

    monkeypatch.setattr(cut, "iterate", fails)
    state = None
    with pytest.raises(KeyboardInterrupt):
        for _, program in train_anakin(cut, cut.init(seed), iterations_per_call=6):
            state = program
    assert state is not None and state.state.iteration % 6 == 0
    monkeypatch.setattr(cut, "iterate", iterate)
    got, _ = last_of(train_anakin(cut, state.state, iterations_per_call=6))
    assert_equal(got, want)


def test_more_iterations_per_call_than_there_is_room_for_are_refused(seed):
    env = CartPole()
    anakin = Anakin(agent(env), env, **settings(env))
    with pytest.raises(ValueError, match="replay has room for 8"):
        next(train_anakin(anakin, anakin.init(seed), iterations_per_call=9))
    sebulba = Sebulba(agent(env), lambda: copy.copy(env), **settings(env))
    with pytest.raises(ValueError, match="replay has room for 8"):
        next(train(sebulba, sebulba.init(seed), iterations_per_call=9))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"config": SebulbaConfig(updates_per_batch=2)}, "cuts up trajectories, and DQN learns from replay"),
        ({"learner": replace(LEARNER, num_epochs=2)}, "algo.learner.num_epochs=2: DQN draws new rows"),
    ],
)
def test_settings_are_refused_before_environments_are_made(own, message):
    env = CartPole()

    def make_env():
        raise AssertionError("made an environment")

    with pytest.raises(ValueError, match=message):
        Sebulba(agent(env), make_env, **settings(env) | own)


def test_what_sebulba_has_reported_is_not_written_to_by_the_next_iteration(seed):
    env = CartPole(max_episode_steps=7)
    sebulba = Sebulba(agent(env), lambda: copy.copy(env), config=SebulbaConfig(lag=0), **settings(env))
    reports = train(sebulba, sebulba.init(seed))
    states, copies = [], []
    for _, program in reports:
        states.append(program.state.priorities)
        copies.append(pytree.tree_map(torch.clone, states[-1]))
    assert_equal(states, copies)
    assert not torch.equal(copies[0].tree[0], copies[-1].tree[0])


def test_nan_in_replay_is_looked_for_there(tmp_path: Path, monkeypatch):
    """The rows of the update are not those of the newest trajectory."""
    insert, count = ReplayBuffer.insert, 0

    def broken(self, trajectory, iteration, priorities):
        nonlocal count
        insert(self, trajectory, iteration, priorities)
        count += 1
        if count == 12:
            self.storage["timestep"]["reward"][: 4 * T] = torch.nan

    monkeypatch.setattr(ReplayBuffer, "insert", broken)
    with pytest.raises(FloatingPointError, match=r"rows came from replay.*gave numbers that are not finite: .*reward"):
        execute(load([*SMALL, f"total_env_steps={30 * STEPS}", f"run_dir={tmp_path}/run"]))


def test_the_policy_of_a_run_explores_as_it_did_at_its_end(tmp_path: Path):
    run = execute(load([*SMALL, f"total_env_steps={30 * STEPS}", f"run_dir={tmp_path}/run"]))
    assert run.variables["remaining"] == 0


def test_files_that_no_checkpoint_needs_are_removed_and_a_damaged_one_is_named(tmp_path: Path):
    config = [*SMALL, f"total_env_steps={40 * STEPS}", f"run_dir={tmp_path}/run"]
    execute(load([*config, "checkpoint.interval_s=0", "checkpoint.keep=2"]))
    files = {path.name for path in (tmp_path / "run/replay/0").iterdir()}
    manifests = [json.loads(checkpoint.manifest_of(x, 0)) for x in checkpoint.all_of(tmp_path / "run")]
    assert len(manifests) == 2 and files == set(manifests[0]) | set(manifests[1])
    assert len(files) == 11  # the window is 10 iterations
    shutil.copytree(tmp_path / "run", tmp_path / "torn")
    path = tmp_path / "torn/replay/0" / max(files)
    path.write_bytes(path.read_bytes()[:-1])
    more = [f"resume={tmp_path}/torn", f"total_env_steps={41 * STEPS}"]
    with pytest.raises(CheckpointError, match=f"{path.name} is missing or damaged"):
        execute(load(more))


def whole_checkpoints(run: Path) -> set[str]:
    """The checkpoints of a run, all of whose files are as they were listed."""
    for folder in checkpoint.all_of(run):
        listed = json.loads(checkpoint.manifest_of(folder, 0))
        assert listed == {name: segments._digest(run / "replay/0" / name) for name in listed}
    return {folder.name for folder in checkpoint.all_of(run)}


def test_a_file_of_replay_has_no_more_bytes_than_its_bound(tmp_path: Path, monkeypatch):
    """Which is what a checkpoint takes beside the buffer, however large that is."""
    config = [*SMALL, "algo.replay.capacity=1600", f"total_env_steps={25 * STEPS}"]
    states = []
    for iterations in (None, 3):
        if iterations is not None:
            monkeypatch.setattr(segments, "_MOST_BYTES", iterations * STEPS * 36 + 1)
        run = execute(load([*config, f"run_dir={tmp_path}/{iterations}"]))
        states.append(torch.load(checkpoint.latest(run.dir) / "state-0.pt"))
        counts = [end - begin for begin, end in map(segments._range, whole_files(run.dir))]
        assert sum(counts) == 25 and max(counts) == (12 if iterations is None else iterations)
        execute(load([f"resume={run.dir}", f"total_env_steps={26 * STEPS}"]))
    assert_equal(*states)


def whole_files(run: Path) -> list[str]:
    return [path.name for path in (run / "replay/0").glob("*.pt")]


def test_a_host_environment_that_begins_anew_leaves_no_transition_between_two_episodes(tmp_path: Path):
    """The step before the break is cut off: it counts as the end of its episode, and not as a terminal one.

    Also after a second resume, of what the first one has written.
    """
    gym = ("loop=sebulba", "env=gymnasium", "env.task=CartPole-v1")
    small = [x for x in SMALL if not x.startswith("env=")]
    assert main(["train", *small, *gym, f"total_env_steps={6 * STEPS}", f"run_dir={tmp_path}/run"]) == 0
    kept, seen = whole_checkpoints(tmp_path / "run"), {}
    original = Sebulba.resume

    def resume(self, state, begun):
        seen["loop"] = self
        return original(self, state, begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sebulba, "resume", resume)
        for until in (8, 9):
            assert main(["train", f"resume={tmp_path}/run", f"total_env_steps={until * STEPS}"]) == 0
            before, kept = kept, whole_checkpoints(tmp_path / "run")
            assert before & kept  # what a resume changes is in files of its own
    steps = seen["loop"].replay.buffer.storage["timestep"]
    for at in (6 * T, 8 * T):  # where it went on
        assert (steps["step_type"][at] == FIRST).all() and (steps["step_type"][at - 1] == LAST).all()
    first = steps["step_type"][1 : 9 * T] == FIRST
    assert (steps["step_type"][: 9 * T - 1][first] == LAST).all()


def test_agents_in_the_user_s_files_may_learn_from_replay(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(
        "from torchpod.algos.dqn import DQN, DQNConfig\n\n\n"
        "class Mine(DQN):\n"
        "    def __init__(self, spec, config: DQNConfig):\n"
        "        super().__init__(spec, config)\n"
    )
    own = [x for x in SMALL if not x.startswith(("algo=", "algo.agent"))]
    line = ["train", *own, f"algo={tmp_path}/mine.py:Mine", "algo.unroll_length=4", "algo.learner.num_epochs=1"]
    assert main([*line, f"total_env_steps={20 * STEPS}", f"run_dir={tmp_path}/run"]) == 0, capsys.readouterr().err
    assert "eval return" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "takes"),
    [
        ("loop=anakin", "36,000.00 GB, 36 bytes per step"),
        ("loop=sebulba", "36,000.00 GB, 36 bytes per step"),
        ("population=2", "72,000.00 GB, 72 bytes per step"),
    ],
)
def test_a_ring_that_does_not_fit_is_refused_before_anything_is_compiled(tmp_path: Path, monkeypatch, more, takes):
    monkeypatch.setattr(memory, "free_bytes", lambda *_: (1e12, "cpu"))
    require_refusal(tmp_path, monkeypatch, [more], f"{takes}, and cpu has 1,000.00 GB left; use at most ")


def require_refusal(folder: Path, monkeypatch, more: list[str], told: str) -> None:
    """Of a ring of 1e12 steps, with a sentence that goes on as `told` does."""
    calls = []
    monkeypatch.setattr(Compiled, "__call__", lambda *_: calls.append(1))
    config = [x for x in SMALL if not x.startswith(("compile", "algo.replay.capacity"))]
    config += [*more, "algo.replay.capacity=1000000000000", f"run_dir={folder}/run", f"total_env_steps={30 * STEPS}"]
    with pytest.raises(ValueError, match=f"takes {told}"):
        execute(load(config))
    assert not calls and not (folder / "run").exists()


def test_a_ring_in_files_is_as_one_in_memory_and_leaves_none(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    config = [*SMALL, f"total_env_steps={30 * STEPS}"]
    memory = execute(load([*config, f"run_dir={tmp_path}/memory"]))
    files = execute(load([*config, f"run_dir={tmp_path}/files", f"algo.replay.folder={tmp_path}/disk"]))
    states = [torch.load(checkpoint.latest(run.dir) / "state-0.pt") for run in (memory, files)]
    assert_equal(*states)
    assert not list((tmp_path / "disk").iterdir())
    (tmp_path / "disk").rmdir()
    with pytest.raises(ValueError, match="algo.replay.folder=.*/disk is no folder"):
        execute(load([*config, f"run_dir={tmp_path}/none", f"algo.replay.folder={tmp_path}/disk"]))
    with pytest.raises(ValueError, match="algo.replay.host=true keeps rows in memory, and algo.replay.folder=.* in"):
        execute(load([*config, f"run_dir={tmp_path}/none", f"algo.replay.folder={tmp_path}", "algo.replay.host=true"]))
    more = [f"resume={tmp_path}/files", "algo=dqn", "algo.replay.folder=null", f"total_env_steps={31 * STEPS}"]
    assert execute(load(more)).summary["env_steps"] > files.summary["env_steps"]


@pytest.mark.parametrize(("iterations", "room", "warned"), [(30, 5000, 1), (30, 10**6, 0), (4, 5000, 0)])
def test_a_disk_without_room_for_the_ring_is_told_at_the_first_checkpoint(
    iterations, room, warned, tmp_path: Path, monkeypatch
):
    """Of more than 5000 bytes if the run is long enough to fill it."""
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=room))
    config = [*SMALL, f"total_env_steps={iterations * STEPS}", f"run_dir={tmp_path}/run", "checkpoint.interval_s=0.01"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        execute(load(config))
    told = [
        str(x.message)
        for x in caught
        if re.search(r"\d kB of replay, 0 kB are there, and the disk has \d kB left for it", str(x.message))
    ]
    assert len(told) == warned


@pytest.mark.slow
def test_a_million_steps_are_written_once(tmp_path: Path):
    """Resumed, and five iterations later: what is written anew is theirs, and the priorities."""
    more = ("num_envs=256", "algo.unroll_length=16", "algo.replay.capacity=1000000", "algo.replay.min_size=1000000")
    config = [*SMALL, *more, "algo.env_steps_per_update=1024", f"run_dir={tmp_path}/run"]
    execute(load([*config, f"total_env_steps={260 * 4096}"]))
    before = {path: path.stat() for path in (tmp_path / "run/replay/0").glob("*.pt")}
    assert sum(x.st_size for x in before.values()) > 30e6
    execute(load([f"resume={tmp_path}/run", "algo=dqn", f"total_env_steps={265 * 4096}"]))
    after = {path: path.stat() for path in (tmp_path / "run/replay/0").glob("*.pt")}
    assert all(
        after[path].st_mtime_ns == x.st_mtime_ns and after[path].st_ino == x.st_ino for path, x in before.items()
    )
    assert sum(x.st_size for path, x in after.items() if path not in before) < 1e6
