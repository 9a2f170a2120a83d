"""Environments and learners that fail or hang: the run ends, with the error that came first, and nothing is left."""

import ctypes
import multiprocessing
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import pytest
import torch

from tests.sebulba.runs import AGENTS, LEARNER, Apart, T, make, run, threads
from torchpod.anakin import NonFiniteError
from torchpod.compile import Compiler
from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.host import EnvPool, Gymnasium
from torchpod.envs.host.batches import Batches
from torchpod.sebulba import ActorError, Sebulba, SebulbaConfig
from torchpod.sebulba.actor import Actor, Pool
from torchpod.sebulba.exchange import Exchange, Phases


class Broken(HostEnv):
    """Goes wrong at step `at`: raises, hangs for `hang_s`, or gives rewards of another shape, another type, or NaN."""

    def __init__(self, fault, hang_s=0.0, at=20):
        super().__init__(CartPole(max_episode_steps=7))
        self.fault, self.hang_s, self.at, self.count, self.over = fault, hang_s, at, 0, threading.Event()

    def step(self, state, action, keys):
        self.count += 1
        state, timestep = super().step(state, action, keys)
        if self.count < self.at:
            return state, timestep
        if self.fault == "raise":
            raise KeyError("the simulator lost its licence")
        if self.fault == "hang":
            self.over.wait(self.hang_s)
        if self.fault == "shape":
            timestep = timestep._replace(reward=timestep.reward[:-1])
        if self.fault == "type":
            timestep = timestep._replace(reward=timestep.reward.double())
        if self.fault == "nan":
            timestep = timestep._replace(reward=timestep.reward * torch.nan)
        return state, timestep


@pytest.mark.parametrize(("fault", "cause"), [("raise", KeyError), ("shape", RuntimeError)])
def test_a_failing_environment_ends_the_run_with_its_own_error(seed, fault, cause):
    sebulba = make(SebulbaConfig(), env=Broken(fault))
    with pytest.raises(ActorError, match=r"actor thread \d failed: ") as caught:
        run(sebulba, sebulba.init(seed))
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize(
    ("fault", "static", "at", "given"),
    [
        ("type", False, 20, r"torch.float64 \[2\]"),
        ("type", True, 20, r"torch.float64 \[2\]"),
        ("type", True, 1, r"torch.float64 \[2\]"),
        ("shape", True, 20, r"torch.float32 \[1\]"),
        ("shape", True, 1, r"torch.float32 \[1\]"),
    ],
)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_reward_unlike_the_first_is_named(num_threads, fault, static, at, given, seed):
    """`static`: through a port, which would convert it, or broadcast it."""
    config = SebulbaConfig(num_actor_threads=num_threads, pools_per_actor=1 if num_threads else 2)
    sebulba = make(config, env=Broken(fault, at=at))
    sebulba.static = static
    message = rf"cartpole gave reward as {given}, and as torch.float32 \[.\] in its first timestep; give the same in"
    with pytest.raises(ActorError if num_threads else TypeError, match=message):
        run(sebulba, sebulba.init(seed))


class SlowToSend(Apart):
    """Goes to sleep in its 20th `send`."""

    def __init__(self):
        super().__init__([])
        self.count, self.over = 0, threading.Event()

    def send(self, action):
        super().send(action)
        self.count += 1
        if self.count == 20:
            self.over.wait(30)

    step, recv = Apart.step, Apart.recv  # of one class with `send`, or it would not be stepped by these


@pytest.mark.parametrize(
    ("make_env", "line"),
    [
        (lambda: Broken("hang", hang_s=30), "self.over.wait(self.hang_s)"),
        (SlowToSend, "self.over.wait(30)"),
    ],
    ids=["step", "send"],
)
def test_an_environment_that_does_not_come_back_is_named_with_the_line_where_it_is(seed, make_env, line, capsys):
    env = make_env()
    sebulba = make(SebulbaConfig(timeout_s=0.5), env=env)
    state, began = sebulba.init(seed), time.perf_counter()
    message = rf"actor thread \d has waited \d s .* its {env.spec.name} .* loop.timeout_s=0.5"
    with pytest.raises(ActorError, match=message):
        run(sebulba, state)
    assert time.perf_counter() - began < 10
    env.over.set()
    for thread in threads():
        thread.join(10)
    told = [text.strip() for text in capsys.readouterr().err.splitlines()]
    assert told[0] == "Stack of the thread that hangs (most recent call last):"
    assert "test_faults.py" in told[told.index(line) - 1]


def test_the_time_in_which_the_process_stands_still_is_none_in_an_environment(monkeypatch):
    monkeypatch.setattr("torchpod.sebulba.exchange._WATCH_S", 0.1)
    phases = Phases("env")
    exchange, began = Exchange([phases], lag=0, capacity=1, timeout_s=0.5), time.perf_counter()
    phases.enter("environment")
    # With Python's lock: no thread runs, as in a process that is stopped.
    threading.Timer(0.2, ctypes.PyDLL(None).sleep, (2,)).start()
    with pytest.raises(ActorError, match="actor thread 0 has waited . s for a step of its env environments"):
        exchange.collect()
    assert 2.4 < time.perf_counter() - began < 10


def test_an_actor_hangs_too_if_nobody_has_asked_for_a_while():
    """As in an evaluation between whose steps seconds go by: that is not the process standing still."""
    phases = Phases("env")
    exchange = Exchange([phases], lag=0, capacity=1, timeout_s=0.5)
    phases.enter("environment")
    assert exchange.failure() is None
    time.sleep(3)
    assert "has waited 3 s for a step of its env environments" in str(exchange.failure())


@pytest.mark.parametrize("in_time", [True, False])
def test_worker_processes_are_killed_if_the_thread_does_not_end_in_time(in_time, monkeypatch):
    kills, over = [], threading.Event()
    monkeypatch.setattr(
        "torchpod.sebulba.actor.signal_group", lambda process, number: kills.append((process.pid, number)) or over.set()
    )
    worker = SimpleNamespace(pid=7)
    actor = Actor(0, [], Phases("env"), torch.device("cpu"), length=1, refresh=False, workers=[worker])
    actor._thread = threading.Thread(target=over.wait, args=(0.1 if in_time else 60,))
    actor._thread.start()
    actor.join(time.perf_counter() + (10 if in_time else 0.1))
    assert kills == [(7, signal.SIGKILL)] * (not in_time) and not actor._thread.is_alive()


def test_an_actor_whose_thread_cannot_start_leaves_its_environments_to_be_closed(monkeypatch):
    pool, phases = SimpleNamespace(env="env", carry=None), Phases("env")
    exchange = Exchange([phases], lag=0, capacity=1, timeout_s=60.0)
    actor = Actor(0, [cast(Pool, pool)], phases, torch.device("cpu"), length=1, refresh=False, workers=[])

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", start)
        actor.begin(exchange, 0, 1)
    assert actor.join(time.perf_counter()) == ["env"]


def test_worker_processes_that_hang_are_ended_with_the_thread_that_waits_for_them(seed):
    class Hanging(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
        action_space = gymnasium.spaces.Discrete(2)
        count = 0

        def reset(self, *, seed=None, options=None):
            return self.observation_space.low, {}

        def step(self, action):
            self.count += 1
            if self.count > 20:
                time.sleep(1e6)
            return self.observation_space.low, 0.0, False, False, {}

    config = SebulbaConfig(num_actor_threads=1, pools_per_actor=2)
    sebulba = make(config, env=Gymnasium(Hanging, processes=True), num_envs=2)
    state, began = sebulba.init(seed), time.perf_counter()
    sebulba.config = replace(config, timeout_s=1.0)  # not before: to start processes takes longer
    assert len(multiprocessing.active_children()) == 2
    with pytest.raises(ActorError, match="has waited . s for a step of its Hanging environments"):
        run(sebulba, state)
    assert threads() == [] and multiprocessing.active_children() == []
    assert time.perf_counter() - began < 10


def test_a_reward_that_is_no_number_stops_the_run_with_the_trajectory(seed):
    sebulba = make(SebulbaConfig(), env=Broken("nan"))
    with pytest.raises(NonFiniteError) as caught:
        run(sebulba, sebulba.init(seed))
    assert caught.value.iteration == 3 and caught.value.trajectory.timestep.reward.isnan().any()


def test_environments_that_come_back_late_are_closed_once_by_whoever_is_second():
    """Threads that end about when they are no longer waited for, some before and some after."""
    closed, late = [], []
    for i in range(200):
        over = threading.Event()
        env = SimpleNamespace(close=lambda i=i: closed.append(i), spec=SimpleNamespace(name="env"))
        pool = SimpleNamespace(env=env, carry=None)
        phases = Phases("env")
        actor = Actor(0, [cast(Pool, pool)], phases, torch.device("cpu"), length=1, refresh=False, workers=[])
        actor.produce = lambda exchange, number, over=over: over.wait(10) and exchange.newest()
        exchange = Exchange([actor.phases], lag=0, capacity=1, timeout_s=60.0)
        exchange.close()
        actor.begin(exchange, 0, 1)
        threading.Timer(5e-4, over.set).start()
        for left in actor.join(time.perf_counter() + 5e-6 * i):
            cast(Any, left).close()
        late.append(actor._abandoned)
        for thread in threads():
            thread.join(10)
    assert closed == sorted(closed) == list(range(200)) and True in late and False in late


class Unclosable(HostEnv):
    """Raises as it is closed."""

    def __init__(self):
        super().__init__(CartPole(max_episode_steps=7))

    def close(self):
        raise OSError("the socket is gone")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_environment_that_cannot_be_closed_costs_a_run_nothing(num_threads, seed):
    sebulba = make(SebulbaConfig(num_actor_threads=num_threads), env=Unclosable())
    with pytest.warns(UserWarning, match="cartpole could not be closed, and may leave .* OSError: the socket is gone"):
        _, history = run(sebulba, sebulba.init(seed))
    assert len(history) == sebulba.num_iterations and threads() == []


@pytest.mark.parametrize("fails", ["actor", "learner"])
def test_pools_that_share_threads_are_closed_while_steps_are_under_way(seed, monkeypatch, fails):
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    closed, sent, close, send, calls = [], [], Batches.close, Batches.send, []

    def closing(batches):
        closed.append(batches)
        close(batches)

    def sending(batches, batch, action):
        sent.append(batch)
        send(batches, batch, action)
        if fails == "actor" and len(sent) >= 40:  # both threads count
            raise OSError("no way on")

    def update(*args):
        calls.append(args)
        if fails == "learner" and len(calls) == 4:
            raise OSError("no way on")
        return Sebulba.update(sebulba, *args)

    config = SebulbaConfig(pools_per_actor=2, pools_share_threads=True)
    sebulba = make(config, env=EnvPool("CartPole-v1", num_threads=2))
    state = sebulba.init(seed)
    for name, own in (("close", closing), ("send", sending)):
        monkeypatch.setattr(Batches, name, own)
    monkeypatch.setattr(sebulba, "update", update)
    with pytest.raises(ActorError if fails == "actor" else OSError, match="no way on"):
        run(sebulba, state)
    assert len({id(batches) for batches in closed}) == 2 and set(sent) == {0, 1}


@pytest.mark.parametrize(
    ("fault", "message"), [("raise", r"actor thread \d failed: KeyError"), ("hang", r"actor thread \d has waited \d s")]
)
def test_an_actor_that_fails_while_an_update_goes_on_ends_the_run_within_seconds(seed, fault, message, monkeypatch):
    monkeypatch.setattr("torchpod.watched.GRACE_S", 1.0)
    env = Broken(fault, hang_s=30, at=12)  # in the second unroll; the third waits for the update
    # Of two actors one might fail before the other has handed over its first unroll.
    sebulba = make(SebulbaConfig(num_actor_threads=1, timeout_s=0.5), env=env)
    state, updates, before = sebulba.init(seed), [], sebulba.update

    def update(*args):
        updates.append(args)
        if len(updates) == 2:  # of the first unroll; the other was to compile
            time.sleep(60)
        return before(*args)

    monkeypatch.setattr(sebulba, "update", update)
    began = time.perf_counter()
    with pytest.raises(ActorError, match=message):
        run(sebulba, state)
    assert time.perf_counter() - began < 10 and len(updates) == 2
    env.over.set()
    for thread in threads():
        thread.join(10)


def test_a_learner_that_fails_takes_its_actors_along(seed, monkeypatch):
    sebulba = make(SebulbaConfig())
    state = sebulba.init(seed)
    calls = []

    def update(*args):
        calls.append(args)
        if len(calls) == 4:
            raise MemoryError("no more")
        return Sebulba.update(sebulba, *args)

    monkeypatch.setattr(sebulba, "update", update)
    with pytest.raises(MemoryError):
        run(sebulba, state)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium prints the error of a worker as one
@pytest.mark.parametrize("hang_s", [0.0, 60.0], ids=["both raise", "one hangs"])
def test_the_first_error_is_told_although_the_other_pool_is_under_way(seed, hang_s, tmp_path):
    """Worker processes: the second pool's step is pending, for ever or with an error of its own."""

    class Bad(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, number):
            self.number, self.count = number, 0

        def reset(self, *, seed=None, options=None):
            return self.observation_space.low, {}

        def step(self, action):
            self.count += 1
            if self.count > 4:
                time.sleep(0.0 if self.number == 0 else hang_s)
                raise OSError(f"environment {self.number} is broken")
            return self.observation_space.low, 0.0, False, False, {}

    numbers = iter(range(2))

    def make_env():
        number = next(numbers)
        return Gymnasium(lambda: Bad(number), processes=True)

    probe = Gymnasium(lambda: Bad(0))
    sebulba = Sebulba(
        lambda: AGENTS["ppo"](probe.spec),
        make_env,
        num_envs=2,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=2,
        compiler=Compiler(enabled=False),
        config=SebulbaConfig(num_actor_threads=1, pools_per_actor=2),
    )
    state, began = sebulba.init(seed), time.perf_counter()
    with pytest.raises(ActorError, match="environment 0 is broken"):
        run(sebulba, state)
    assert time.perf_counter() - began < 10
    assert multiprocessing.active_children() == []


def test_what_cannot_be_compiled_leaves_no_environment_open(seed, monkeypatch):
    sebulba = make(SebulbaConfig(), env=Gymnasium("CartPole-v1"))
    state, closed = sebulba.init(seed), []
    monkeypatch.setattr(Gymnasium, "close", lambda self: closed.append(self))

    def update(*args):
        raise MemoryError("no more")

    monkeypatch.setattr(sebulba, "update", update)
    with pytest.raises(MemoryError):
        run(sebulba, state)
    assert len(closed) == len(sebulba.envs) == 2
