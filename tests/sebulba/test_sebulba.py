"""Sebulba against Anakin, against itself, and against environments that misbehave."""

import collections
import contextlib
import copy
import itertools
import random as python_random
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.contracts.test_alignment import (
    Checker,
    Names,
    assert_iterations_line_up,
    assert_rows_line_up,
    learned_from,
)
from tests.zygote import wait_until
from torchpod import random
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent
from torchpod.anakin import Anakin
from torchpod.anakin import train as train_anakin
from torchpod.compile import Compiler
from torchpod.env import HostEnv, make_timestep
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.host import EnvPool, Gymnasium
from torchpod.learner import LearnerConfig
from torchpod.sebulba import Sebulba, SebulbaConfig, train
from torchpod.sebulba.exchange import Exchange
from torchpod.sebulba.program import Program
from torchpod.sebulba.transfer import Port, hand_over
from torchpod.specs import HOST, Array, Discrete, EnvSpec
from torchpod.types import FIRST

T, B = 8, 4
LEARNER = LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=1e-2)
LOCKSTEP = SebulbaConfig(num_actor_threads=1, lag=0)
AGENTS = {
    "ppo": lambda spec: PPO(spec, PPOConfig(hidden=(8,))),
    "a2c": lambda spec: A2C(spec, A2CConfig(hidden=(8,))),
    "impala": lambda spec: IMPALA(spec, IMPALAConfig(hidden=(8,))),
    "lstm": lambda spec: IMPALA(spec, IMPALAConfig(hidden=(8,), recurrent=6, cell="lstm")),
    "gru": lambda spec: PPO(
        spec, PPOConfig(hidden=(8,), recurrent=6, normalize_reward=True, normalize_observation=True)
    ),
    "torchrl": lambda spec: torchrl_agent(spec, TorchRLConfig("KLPENPPOLoss", hidden=(8,))),
}


def make(config=LOCKSTEP, agent="ppo", env=None, iterations=50, compiled=False, num_envs=B, **settings):
    env = env or CartPole(max_episode_steps=7)
    return Sebulba(
        lambda: AGENTS[agent](env.spec),
        lambda: copy.copy(env),
        num_envs=num_envs,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=iterations,
        compiler=Compiler(enabled=compiled),
        config=config,
        **settings,
    )


def run(sebulba, state, until=None, sleep_s=0.0):
    """The last state, and the metrics of all iterations. The learner sleeps up to `sleep_s` between two of them."""
    history = []
    for report, program in train(sebulba, state, until=until):
        history.append(report.metrics)
        state = program.state
        time.sleep(python_random.random() * sleep_s)
    return state, history


def assert_equal(a, b, **tolerance):
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, equal_nan=True, **tolerance), a, b)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchpod-actor")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


class Jittery(CartPole):
    """Takes its time, another one at every step and in every run."""

    def step(self, state, action, keys):
        time.sleep(python_random.random() * 1e-3)
        return super().step(state, action, keys)


class JitteryPool(EnvPool):
    """So does this one, between `send` and `recv`."""

    send, step = EnvPool.send, EnvPool.step  # of one class with `recv`, or a pool would not be stepped by these

    def recv(self):
        time.sleep(python_random.random() * 1e-3)
        return super().recv()


@pytest.mark.parametrize("agent", AGENTS)
def test_in_lockstep_it_equals_anakin_to_the_bit(seed, agent):
    """With a tensor environment, and with the same behind the host contract."""
    env = CartPole(max_episode_steps=7)
    anakin = Anakin(
        lambda: AGENTS[agent](env.spec),
        env,
        num_envs=B,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=50,
        compiler=Compiler(enabled=False),
    )
    begin = anakin.init(seed)
    reports = []
    for report, replay in train_anakin(anakin, begin):
        reports.append(report.metrics)
        want = replay.state
    for own in (env, HostEnv(env)):
        sebulba = make(agent=agent, env=own)
        first = sebulba.init(seed)
        assert_equal(first.learner, begin.learner)
        got, history = run(sebulba, first)
        for name in ("learner", "env_keys", "episode_return", "episode_length", "iteration", "env_steps"):
            assert_equal(getattr(got, name), getattr(want, name))
        assert_equal(got.carry[1:], want.carry[1:])
        for mine, theirs in zip(history, reports, strict=True):
            assert_equal({name: mine[name] for name in theirs}, theirs)
    assert any((got.learner.params[name] != x).any() for name, x in begin.learner.params.items())


@pytest.mark.parametrize("host", [False, True], ids=["tensor", "host"])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("num_actors", "num_pools", "lag"), [(0, 1, 0), (1, 1, 0), (1, 2, 1), (2, 2, 1)])
def test_what_a_step_was_and_what_was_kept_of_it_line_up(seed, num_actors, num_pools, lag, recurrent, host):
    env, agent = HostEnv(Names()) if host else Names(), Checker(recurrent)
    sebulba = Sebulba(
        lambda: agent,
        lambda: copy.copy(env),
        num_envs=B,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=6,
        compiler=Compiler(enabled=False),
        config=SebulbaConfig(num_actor_threads=num_actors, pools_per_actor=num_pools, lag=lag),
    )
    state, trajectories = sebulba.init(seed), learned_from(sebulba.learner)
    carries = [state.carry]
    for _, program in train(sebulba, state):
        carries.append(program.state.carry)
    learned = 6 * LEARNER.num_epochs * LEARNER.num_minibatches
    # Those before are of the warm-up, from one step repeated.
    assert_iterations_line_up(trajectories[-6:], carries)
    assert_rows_line_up(agent.batches[-learned:])


@pytest.mark.parametrize(
    ("kind", "agent", "lag", "num_pools", "compiled"),
    [
        ("tensor", "impala", 0, 1, False),
        ("tensor", "impala", 2, 1, False),
        ("tensor", "gru", 1, 2, False),
        ("host", "impala", 1, 2, False),
        ("host", "gru", 1, 1, False),
        ("envpool", "lstm", 2, 2, False),
        pytest.param("host", "lstm", 2, 2, True, marks=pytest.mark.slow),
    ],
)
def test_with_a_fixed_lag_two_runs_are_equal_whatever_the_threads_do(seed, kind, agent, lag, num_pools, compiled):
    """Once the actors sleep now and then, and once the learner does as well."""
    if kind == "envpool":
        pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
        env = JitteryPool("CartPole-v1", max_episode_steps=7)
    else:
        env = Jittery(max_episode_steps=7) if kind == "tensor" else HostEnv(Jittery(max_episode_steps=7))
    config = SebulbaConfig(num_actor_threads=2, pools_per_actor=num_pools, lag=lag)
    ends = []
    for sleep_s in (0.0, 0.02):
        sebulba = make(config, agent, env, iterations=10, compiled=compiled)
        ends.append(run(sebulba, sebulba.init(seed), sleep_s=sleep_s))
    assert_equal(*(end[0] for end in ends))
    for metrics, others in zip(*(end[1] for end in ends), strict=True):
        assert_equal(*({name: m[name] for name in ("loss", "episode_return")} for m in (metrics, others)))
    ages = [(float(m["policy_age"]), int(m["policy_age_max"])) for m in ends[1][1]]
    assert ages == [(min(i, lag), min(i, lag)) for i in range(10)]


@pytest.mark.parametrize("lag", [0, 1])
def test_without_threads_it_does_the_same(seed, lag):
    ends = []
    for num in (0, 1):
        sebulba = make(SebulbaConfig(num_actor_threads=num, lag=lag), iterations=10)
        ends.append(run(sebulba, sebulba.init(seed))[0])
    assert_equal(*ends)


def test_two_actors_act_as_one_does(seed):
    one, two = (make(SebulbaConfig(num_actor_threads=num, lag=0), iterations=3) for num in (1, 2))
    first, second = run(one, one.init(seed)), run(two, two.init(seed))
    assert_equal(second[0], first[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("host", [False, True], ids=["tensor", "host"])
@pytest.mark.parametrize("agent", ["ppo", "impala", "gru", "torchrl"])
def test_programs_with_memory_of_their_own_do_the_same(seed, agent, host):
    """What CUDA graphs need, without the graphs."""
    env, ends = CartPole(max_episode_steps=7), []
    for static in (False, True):
        config = SebulbaConfig(num_actor_threads=2, pools_per_actor=2, lag=1, updates_per_batch=2)
        sebulba = make(config, agent, HostEnv(env) if host else env, iterations=8, num_envs=8)
        sebulba.static = static
        state = run(sebulba, sebulba.init(seed), until=5)[0]
        resumed = make(config, agent, HostEnv(env) if host else env, iterations=8, num_envs=8)
        resumed.static = static
        ends.append(run(resumed, resumed.resume(state)))
    assert_equal(ends[1][0], ends[0][0])
    for mine, theirs in zip(ends[1][1], ends[0][1], strict=True):
        assert_equal(mine["loss"], theirs["loss"])


@pytest.mark.parametrize("make_env", [CartPole, lambda: HostEnv(CartPole()), lambda: Gymnasium("CartPole-v1")])
@pytest.mark.parametrize("lag", [0, 1])
def test_two_pools_of_one_actor_act_as_two_actors_do(seed, lag, make_env):
    ends = []
    for num_actors, num_pools in ((2, 1), (1, 2), (0, 2)):
        config = SebulbaConfig(num_actor_threads=num_actors, pools_per_actor=num_pools, lag=lag)
        sebulba = make(config, env=make_env(), iterations=6)
        ends.append(run(sebulba, sebulba.init(seed))[0])
    assert_equal(ends[1], ends[0])
    assert_equal(ends[2], ends[0])


@pytest.mark.parametrize(("num_actors", "static", "lag"), [(0, False, 0), (1, False, 1), (2, False, 2), (2, True, 1)])
def test_pools_that_share_their_threads_act_as_pools_of_their_own(seed, num_actors, static, lag):
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    ends, env = [], EnvPool("CartPole-v1", num_threads=2, max_episode_steps=9)
    for share in (False, True):
        config = SebulbaConfig(num_actors, pools_per_actor=2, pools_share_threads=share, lag=lag)
        sebulba = make(config, "impala", env, iterations=6, num_envs=12)
        sebulba.static = static
        assert len(sebulba.envs) == max(1, num_actors) * (1 if share else 2)
        ends.append(run(sebulba, sebulba.init(seed)))
    assert_equal(ends[1][0], ends[0][0])
    for mine, theirs in zip(ends[1][1], ends[0][1], strict=True):
        assert_equal(mine["loss"], theirs["loss"])


@pytest.mark.parametrize("kind", ["one pool", "tensor", "subclass"])
def test_pools_that_cannot_share_their_threads_are_refused(kind):
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")

    class Logged(EnvPool):
        def step(self, state, action, keys):
            return super().step(state, action, keys)

    env = CartPole() if kind == "tensor" else (Logged if kind == "subclass" else EnvPool)("CartPole-v1")
    message = "several pools; raise loop.pools_per_actor=1" if kind == "one pool" else ".* is none, or has"
    with pytest.raises(ValueError, match=f"loop.pools_share_threads=true is for .*{message}"):
        make(SebulbaConfig(2, pools_per_actor=1 if kind == "one pool" else 2, pools_share_threads=True), env=env)


class Apart:
    """Of one endless episode, stepped between `send` and `recv`; every observation is the number of the pool."""

    spec, traits = EnvSpec("apart", observation=Array((1,)), action=Discrete(2)), HOST

    def __init__(self, happened):
        self.happened, self.number = happened, itertools.count()

    def init(self, keys):
        self.number, self.size = next(self.number), keys.shape[0]  # the counter is of all copies
        return None, self.timestep(torch.ones(self.size, dtype=torch.bool))

    def step(self, state, action, keys):
        self.send(action)
        return None, self.recv()

    def send(self, action):
        self.happened.append(("send", self.number))

    def recv(self):
        self.happened.append(("recv", self.number))
        return self.timestep(torch.zeros(self.size, dtype=torch.bool))

    def timestep(self, reset):
        no = torch.zeros_like(reset)
        observation = torch.full((self.size, 1), float(self.number))
        return make_timestep(observation, torch.ones(self.size), reset=reset, terminated=no, truncated=no)


def three_iterations(seed, monkeypatch, happened, **settings):
    """Of pools that are `Apart`; writes down for which of them it decides, too."""
    act = PPO.act

    def decides(agent, timestep, *args):
        happened.append(("act", int(timestep.observation[0, 0])))
        return act(agent, timestep, *args)

    sebulba = make(SebulbaConfig(lag=0, **settings), env=Apart(happened), iterations=3)
    state = sebulba.init(seed)
    monkeypatch.setattr(PPO, "act", decides)
    program = Program(sebulba, state)
    happened.clear()  # what was done to compile
    program.begin()
    try:
        for _ in range(3):
            program()
    finally:
        program.close()


@pytest.mark.parametrize("num_pools", [1, 2, 4])
def test_other_pools_are_stepped_while_the_actor_decides_for_one(seed, monkeypatch, num_pools):
    happened, under_way, others = [], set(), []
    three_iterations(seed, monkeypatch, happened, num_actor_threads=1, pools_per_actor=num_pools)
    for what, pool in happened[: 3 * 3 * num_pools * T]:  # of three unrolls
        if what == "act":
            others.append(len(under_way))
            assert pool not in under_way
        elif what == "send":
            under_way.add(pool)
        else:
            under_way.remove(pool)
    first = list(range(num_pools))  # of an unroll
    assert others == 3 * (first + (T - 1) * num_pools * [num_pools - 1])


def test_the_next_unroll_is_begun_before_the_last_is_handed_over_if_its_parameters_are_there(seed):
    happened = []
    sebulba = make(SebulbaConfig(num_actor_threads=1, lag=1), "impala", Apart(happened), iterations=4)
    state = sebulba.init(seed)
    (actor,) = sebulba.actors(state)
    exchange = Exchange([actor.phases], lag=1, capacity=4, timeout_s=60.0)
    variables = hand_over(sebulba.learner.acting(state.learner, state.iteration), sebulba.device)
    unrolls, begun = {0: [], 1: [], 2: [], 3: []}, []
    exchange.publish(0, variables)
    actor._thread = threading.current_thread()
    for number in unrolls:
        happened.clear()
        if number == 2:
            exchange.publish(1, variables)
        (item,) = actor.produce(exchange, number)
        unrolls[number] = [what for what, _ in happened]
        begun.append(item.version)
        if number == 2:
            exchange.publish(2, variables)
    whole = T * ["send", "recv"]
    # Unroll 1 needs version 0, which is there when unroll 0 ends; unrolls 2 and 3 need versions that come later.
    assert unrolls == {0: [*whole, "send"], 1: whole[1:], 2: whole, 3: whole}
    assert begun == [0, 0, 1, 2]


class ByThread(collections.defaultdict):
    """Lists by the name of the thread."""

    def append(self, x):
        self[threading.current_thread().name].append(x)


@pytest.fixture
def happened(monkeypatch) -> ByThread:
    """The ranges of every thread: a name, and "end"."""
    happened = ByThread(list)

    @contextlib.contextmanager
    def record(name):
        happened.append(name)
        yield
        happened.append("end")

    monkeypatch.setattr("torchpod.compile._PROFILE", True)
    monkeypatch.setattr(torch.profiler, "record_function", record)
    return happened


def test_a_step_of_a_tensor_environment_is_one_range_for_profilers(seed, happened):
    program = Program(sebulba := make(SebulbaConfig(num_actor_threads=1, lag=0), iterations=1), sebulba.init(seed))
    program.begin()
    try:
        program()
    finally:
        program.close()
    step = ["torchpod/step", "torchpod/act", "end", "torchpod/env_step", "end", "end"]
    assert happened["torchpod-actor-0"][: T * len(step)] == T * step


def test_profilers_see_what_every_thread_does(seed, happened, monkeypatch):
    three_iterations(seed, monkeypatch, happened, num_actor_threads=2, pools_per_actor=2)
    for k in range(2):
        pools, unroll = (2 * k, 2 * k + 1), []
        sent = {i: ["torchpod/act", ("act", i), "end", ("send", i)] for i in pools}
        received = {i: ["torchpod/env_step", ("recv", i), "end"] for i in pools}
        for t in range(T):
            for i in pools:
                unroll += (received[i] if t else []) + sent[i]
        unroll += [*received[pools[0]], *received[pools[1]], "torchpod/put", "end"]
        assert happened[f"torchpod-actor-{k}"][: 3 * len(unroll)] == 3 * unroll
    names = [x.removeprefix("torchpod/") for x in happened["MainThread"] if x != "end"]
    update = ["update", *["gradient", "apply"] * LEARNER.num_epochs * LEARNER.num_minibatches]
    assert names == 3 * ["get", *update]


@pytest.mark.parametrize("lag", [0, 1, 3, "free"])
def test_parameters_that_nobody_can_ask_for_any_more_are_freed(seed, lag, monkeypatch):
    published, publish = [], Exchange.publish

    def spy(exchange, version, variables):
        published.append(weakref.ref(next(iter(variables.tree.values()))))
        publish(exchange, version, variables)

    monkeypatch.setattr(Exchange, "publish", spy)
    program = Program(sebulba := make(SebulbaConfig(lag=lag), "impala"), sebulba.init(seed))
    program.begin()
    try:
        for _ in range(20):
            program()
            alive = [version for version, x in enumerate(published) if x() is not None]
            kept = 1 + (0 if lag == "free" else lag)
            assert alive[-1] == len(published) - 1 and len(alive) <= kept + sebulba.num_actors  # each has one in hand
    finally:
        program.close()
    assert len(published) >= 20


@pytest.mark.parametrize("refresh", ["unroll", "step"])
def test_a_free_lag_is_bounded_by_the_queue(seed, refresh):
    config = SebulbaConfig(num_actor_threads=2, lag="free", refresh=refresh, queue_size=2)
    sebulba = make(config, "impala", iterations=30)
    _, history = run(sebulba, sebulba.init(seed))
    assert all(0 <= m["policy_age"] <= m["policy_age_max"] <= 3 for m in history)
    shares = ("learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference", "queue_occupancy")
    assert all(0 <= m[name] <= 1 for m in history for name in shares)


@pytest.mark.parametrize(
    ("refresh", "versions"), [("unroll", [0] * T + [1] * T), ("step", [0] * 3 + [1] * (2 * T - 3))]
)
def test_newer_parameters_act_from_the_next_step_or_the_next_unroll_on(seed, refresh, versions):
    """Version 1 comes while the third step is decided."""
    sebulba = make(SebulbaConfig(num_actor_threads=0, lag="free", refresh=refresh), "impala", iterations=2)
    state = sebulba.init(seed)
    (actor,) = sebulba.actors(state)
    (pool,) = actor.pools
    exchange = Exchange([actor.phases], lag=None, capacity=2, timeout_s=60.0)
    old = sebulba.learner.acting(state.learner, state.iteration)
    new = {name: x.clone() for name, x in old.items()}
    acted, advance = [], pool.advance

    def spy(variables, *args):
        acted.append(0 if variables is old else 1)
        assert variables is (old, new)[acted[-1]]
        if len(acted) == 3:
            exchange.publish(1, hand_over(new, sebulba.device))
        return advance(variables, *args)

    pool.advance = spy
    exchange.publish(0, hand_over(old, sebulba.device))
    items = [item for number in range(2) for item in actor.produce(exchange, number)]
    assert acted == versions
    assert [item.version for item in items] == [0, 1]  # with which the unrolls began


class Clock:
    """Goes on only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def after(self, seconds, fn):
        """The function, which takes so long."""

        def timed(*args, **kwargs):
            self.now += seconds
            return fn(*args, **kwargs)

        return timed


@pytest.mark.parametrize("update_s", [4.0, 1000.0])
def test_metrics_say_where_the_time_went(seed, monkeypatch, update_s):
    """In one thread, where the actor waits while the learner updates, and the other way round."""
    clock, num_pools, lag = Clock(), 2, 2
    for module in ("program", "exchange"):
        monkeypatch.setattr(f"torchpod.sebulba.{module}.time", clock)
    for owner, name, seconds in (
        (IMPALA, "act", 0.5),
        (HostEnv, "step", 1.0),
        (Port, "download", 0.25),
        (Port, "upload", 0.125),
    ):
        monkeypatch.setattr(owner, name, clock.after(seconds, getattr(owner, name)))
    config = SebulbaConfig(num_actor_threads=0, pools_per_actor=num_pools, lag=lag)
    sebulba = make(config, "impala", HostEnv(CartPole()), iterations=4)
    sebulba.static = True  # for a port
    sebulba.update = clock.after(update_s, sebulba.update)
    _, history = run(sebulba, sebulba.init(seed))
    steps = num_pools * T
    unroll_s = steps * (0.5 + 1.0 + 0.25 + 0.125)
    for i, metrics in enumerate(history):
        waited_s = update_s if i else 0.0
        expected = {
            "learner_wait": unroll_s / (unroll_s + update_s),
            "actor_wait": waited_s / (unroll_s + waited_s),
            "actor_in_environment": steps * 1.0 / (unroll_s + waited_s),
            "actor_in_inference": steps * 0.5 / (unroll_s + waited_s),
            "actor_in_transfer": steps * 0.375 / (unroll_s + waited_s),
            "inference_batches_per_s": steps / (unroll_s + update_s),
            "policy_age": min(i, lag),
            "policy_age_max": min(i, lag),
            "queue_occupancy": 0.0,
        }
        assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)


def test_the_time_of_send_is_that_of_the_environment(seed, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("torchpod.sebulba.exchange.time", clock)
    for owner, name, seconds in ((IMPALA, "act", 0.5), (Apart, "send", 1.0), (Apart, "recv", 0.25)):
        monkeypatch.setattr(owner, name, clock.after(seconds, getattr(owner, name)))
    sebulba = make(SebulbaConfig(num_actor_threads=1, lag=0), "impala", Apart([]), iterations=3)
    _, history = run(sebulba, sebulba.init(seed))
    for metrics in history:
        assert float(metrics["actor_in_environment"]) == pytest.approx(1.25 / 1.75)
        assert float(metrics["actor_in_inference"]) == pytest.approx(0.5 / 1.75)


@pytest.mark.parametrize(("slow", "queue_size"), [("environment", 2), ("update", 1), ("update", 2)])
def test_threads_wait_for_what_is_slow(seed, slow, queue_size):
    class Slow(CartPole):
        def step(self, state, action, keys):
            time.sleep(0.04 if slow == "environment" else 0.0)
            return super().step(state, action, keys)

    config = SebulbaConfig(num_actor_threads=2, lag="free", queue_size=queue_size)
    sebulba = make(config, "impala", HostEnv(Slow()))
    program = Program(sebulba, sebulba.init(seed))
    update = program._update

    def slowed(*args):
        if slow == "update":
            blocked = [actor.phases for actor in program._actors]
            wait_until(lambda: program._exchange.occupancy() == 1 and {x.now[0] for x in blocked} == {"queue"})
            time.sleep(0.3)
        return update(*args)

    program._update = slowed
    program.begin()
    try:
        history = [program() for _ in range(6)]
    finally:
        program.close()
    names = ("learner_wait", "actor_wait", "actor_in_environment", "queue_occupancy")
    # The fifth unroll is the first that comes after a wait: for the place in the queue of the fourth.
    told = {name: (history[4][name] + history[5][name]) / 2 for name in names}
    high, low = ("learner_wait", "actor_wait") if slow == "environment" else ("actor_wait", "learner_wait")
    assert told[high] > 0.5 > told[low]
    assert (told["actor_in_environment"] > 0.5) == (slow == "environment")
    assert told["queue_occupancy"] == 1 if slow == "update" else told["queue_occupancy"] < 0.5


@pytest.mark.parametrize(
    ("agent", "lag"), [("impala", 0), ("impala", 1), ("impala", 3), ("gru", 0), ("gru", 1), ("lstm", 2)]
)
def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(seed, agent, lag):
    config = SebulbaConfig(num_actor_threads=2, lag=lag)
    whole = make(config, agent, iterations=9)
    want, _ = run(whole, whole.init(seed))
    for stop in (1, 5):
        first, second = (make(config, agent, iterations=9) for _ in range(2))
        state, _ = run(first, first.init(seed), until=stop)
        assert_equal(run(second, second.resume(state))[0], want)


def test_a_host_environment_begins_new_episodes_and_keeps_what_was_learned(seed):
    env = HostEnv(CartPole(max_episode_steps=7))
    first, second = make(env=env), make(env=env)
    begin = first.init(seed)
    state, _ = run(first, begin, until=3)
    resumed = second.resume(state)
    assert not second.restartable
    assert_equal(resumed.learner, state.learner)
    assert resumed.carry.step == state.carry.step == 3 * T
    assert not torch.equal(resumed.carry.timestep.observation, begin.carry.timestep.observation)
    assert resumed.episode_length.sum() == 0
    assert int(run(second, resumed, until=4)[0].iteration) == 4


def test_a_batch_may_be_cut_into_several_updates(seed):
    sebulba = make(replace(LOCKSTEP, updates_per_batch=2), iterations=3)
    state, history = run(sebulba, sebulba.init(seed))
    assert int(state.learner.num_steps) == 3 * 2 * LEARNER.num_epochs * LEARNER.num_minibatches
    assert set(history[0]) >= {"loss", "grad_norm", "healthy"}
    assert state.learner.healthy


def test_the_updates_of_a_batch_see_its_environments_in_order_each_once(seed, monkeypatch):
    sebulba = make(replace(LOCKSTEP, updates_per_batch=2), iterations=2)
    seen, update = [], sebulba.learner.update

    def spy(state, trajectory, keys):
        seen.append((trajectory, keys))
        return update(state, trajectory, keys)

    state = sebulba.init(seed)
    program = Program(sebulba, state)
    program.begin()
    try:
        monkeypatch.setattr(sebulba.learner, "update", spy)
        program()
    finally:
        program.close()
    whole, counters = program.trajectory, sebulba.learner.counters_per_update
    for i, (part, keys) in enumerate(seen):
        envs = slice(i * B // 2, (i + 1) * B // 2)
        assert_equal(part.timestep, pytree.tree_map(lambda x, envs=envs: x[:, envs], whole.timestep))
        assert_equal(part.output, pytree.tree_map(lambda x, envs=envs: x[:, envs], whole.output))
        assert torch.equal(keys, random.at(state.learner_keys[envs], torch.tensor(i * counters)))
    assert len(seen) == 2


def test_compiled_it_equals_compiled_anakin_to_the_bit(seed):
    env = CartPole(max_episode_steps=7)
    anakin = Anakin(
        lambda: AGENTS["ppo"](env.spec),
        env,
        num_envs=B,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=5,
        compiler=Compiler(enabled=True),
    )
    *_, (_, replay) = train_anakin(anakin, anakin.init(seed))
    sebulba = make(compiled=True, iterations=5)
    assert_equal(run(sebulba, sebulba.init(seed))[0].learner, replay.state.learner)


def test_compiled_actors_of_a_host_environment_learn(seed):
    sebulba = make(SebulbaConfig(), env=Gymnasium("CartPole-v1"), compiled=True, iterations=4)
    state, _ = run(sebulba, sebulba.init(seed))
    assert int(state.iteration) == 4 and state.learner.healthy


def test_a_subclass_with_a_step_of_its_own_is_stepped_by_it(seed):
    class Tripled(Gymnasium):
        def step(self, state, action, keys):
            state, timestep = super().step(state, action, keys)
            return state, timestep._replace(reward=3 * timestep.reward)

    for env, reward in ((Gymnasium("CartPole-v1"), 1.0), (Tripled("CartPole-v1"), 3.0)):
        sebulba = make(SebulbaConfig(pools_per_actor=2), env=env, iterations=2)
        *_, (_, program) = train(sebulba, sebulba.init(seed))
        timestep = program.trajectory.timestep
        assert (timestep.reward[timestep.step_type != FIRST] == reward).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SebulbaConfig(num_actor_threads=3), "num_envs=4 per rank cannot be split by loop.num_actor_threads=3"),
        (SebulbaConfig(pools_per_actor=4), "loop.num_actor_threads=2 with loop.pools_per_actor=4; use a multiple of 8"),
        (SebulbaConfig(updates_per_batch=3), "loop.updates_per_batch=3; use a multiple of 3"),
        (SebulbaConfig(refresh="step"), "loop.refresh=step takes the newest"),
        (SebulbaConfig(lag=2), "cannot correct for loop.lag=2; use loop.lag=1"),
        (SebulbaConfig(lag="free"), "cannot correct for loop.lag=free; use loop.lag=1"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(config, message):
    with pytest.raises(ValueError, match=message):
        make(config)


def test_every_device_that_acts_has_as_many_actor_threads(seed):
    """As rank 0 of `loop.split=6:2` has three such devices."""
    devices = [torch.device("cpu", i) for i in range(3)]
    split = make(SebulbaConfig(), num_envs=12, iterations=3, actor_devices=devices)
    together = make(SebulbaConfig(num_actor_threads=6), num_envs=12, iterations=3)
    assert split.actor_devices == devices * 2 and len(split.envs) == len(together.envs) == 6
    assert_equal(*(run(sebulba, sebulba.init(seed))[0] for sebulba in (split, together)))
    with pytest.raises(ValueError, match="loop.num_actor_threads=2 on each of 3 devices; use a multiple of 6"):
        make(SebulbaConfig(), num_envs=8, actor_devices=devices)


def test_devices_are_of_one_kind():
    with pytest.raises(ValueError, match="must be all CPU or all CUDA"):
        make(SebulbaConfig(num_actor_threads=2), actor_devices=["cuda:0"])


def test_an_agent_without_a_correction_takes_no_lag():
    env = CartPole()
    settings = {"num_envs": B, "unroll_length": T, "learner": LEARNER, "num_iterations": 1}
    for compiler, message in ((Compiler(False), "A2C .* use loop.lag=0"), (Compiler(False, 2), "population=2")):
        with pytest.raises(ValueError, match=message):
            Sebulba(lambda: A2C(env.spec), CartPole, compiler=compiler, **settings)
