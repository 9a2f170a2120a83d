"""What actor threads do, in which order, with which parameters, and what metrics and profilers say of it."""

import collections
import contextlib
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree

from tests.sebulba.runs import AGENTS, LEARNER, Apart, B, T, make, run
from tests.zygote import wait_until
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA
from torchpod.algos.ppo import PPO
from torchpod.compile import span
from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.transforms import RewardClip, StickyAction
from torchpod.sebulba import SebulbaConfig
from torchpod.sebulba.actor import splits
from torchpod.sebulba.exchange import Exchange, Phases
from torchpod.sebulba.program import Program
from torchpod.sebulba.transfer import Handed, Port, hand_over


def three_iterations(seed, monkeypatch, happened, wrap=lambda env: env, **settings):
    """Of pools that are `Apart`, in `wrap`; writes down for which of them it decides, too."""
    act = PPO.act

    def decides(agent, timestep, *args):
        happened.append(("act", int(timestep.observation[0, 0])))
        return act(agent, timestep, *args)

    sebulba = make(SebulbaConfig(lag=0, **settings), env=wrap(Apart(happened)), iterations=3)
    state = sebulba.init(seed)
    monkeypatch.setattr(PPO, "act", decides)
    program = Program(sebulba, state)
    happened.clear()  # what was done to compile
    program.begin(sebulba.num_iterations)
    try:
        for _ in range(3):
            program()
    finally:
        program.close()


@pytest.mark.parametrize(
    ("num_pools", "wrap"),
    [*((num, lambda env: env) for num in (1, 2, 4)), (2, lambda env: StickyAction(RewardClip(env)))],
    ids=["1", "2", "4", "2 in transforms"],
)
def test_other_pools_are_stepped_while_the_actor_decides_for_one(seed, monkeypatch, num_pools, wrap):
    happened, under_way, others = [], set(), []
    three_iterations(seed, monkeypatch, happened, wrap, num_actor_threads=1, pools_per_actor=num_pools)
    assert len(happened) == 3 * 3 * num_pools * T  # of three unrolls, and no more is begun
    for what, pool in happened:
        if what == "act":
            others.append(len(under_way))
            assert pool not in under_way
        elif what == "send":
            under_way.add(pool)
        else:
            under_way.remove(pool)
    first = list(range(num_pools))  # of an unroll
    assert others == 3 * (first + (T - 1) * num_pools * [num_pools - 1])


def test_what_is_inside_of_a_transform_decides_whether_its_step_has_parts():
    class Longer(RewardClip):
        def step(self, state, action, keys):
            return super().step(state, action, keys)

    assert splits(RewardClip(RewardClip(Apart([]))))
    for env in (
        RewardClip(CartPole()),
        RewardClip(HostEnv(CartPole())),
        Longer(Apart([])),
        RewardClip(Longer(Apart([]))),
    ):
        assert not splits(env)


def views(tree):
    """The same numbers, otherwise in memory."""
    return pytree.tree_map_only(torch.Tensor, lambda x: torch.stack([x, x], -1)[..., 0], tree)


class ActsInViews(A2C):
    def act(self, timestep, state, keys, explore=True):
        return views(super().act(timestep, state, keys, explore))


class StepsInViews(HostEnv):
    def step(self, state, action, keys):
        return views(super().step(state, action, keys))


def test_what_agents_and_environments_give_as_views_lies_in_memory_as_at_the_start(seed, monkeypatch):
    """Programs are compiled for that."""
    env = StepsInViews(CartPole())
    agent = ActsInViews(env.spec, A2CConfig(hidden=(8,), recurrent=6))
    monkeypatch.setitem(AGENTS, "a2c", lambda spec: agent)
    sebulba = make(agent="a2c", env=env)
    state = sebulba.init(seed)
    (pool,) = sebulba.actors(state)[0].pools
    for _ in range(2):
        pool.send(sebulba.learner.acting(state.learner, state.iteration))
        carry, output = pool.recv()
        assert all(x.is_contiguous() for x in pytree.tree_leaves((carry, output)))


def test_the_next_unroll_is_begun_before_the_last_is_handed_over_if_its_parameters_are_there(seed):
    happened = []
    sebulba = make(SebulbaConfig(num_actor_threads=1, lag=1), "impala", Apart(happened), iterations=4)
    state = sebulba.init(seed)
    (actor,) = sebulba.actors(state)
    exchange = Exchange([actor.phases], lag=1, capacity=4, timeout_s=60.0)
    variables = hand_over(sebulba.learner.acting(state.learner, state.iteration), sebulba.device)
    unrolls, begun = {0: [], 1: [], 2: [], 3: []}, []
    exchange.publish(0, variables)
    actor._until = len(unrolls)
    for number in unrolls:
        happened.clear()
        if number == 2:
            exchange.publish(1, variables)
        (item,) = actor.produce(exchange, number)
        unrolls[number] = [what for what, _ in happened]
        assert isinstance(item.steps, TensorDict) and item.steps.batch_size == (B, T)
        assert {"observation", "action", ("next", "observation"), ("next", "reward")} <= {*item.steps.keys(True)}
        begun.append(item.version)
        if number == 2:
            exchange.publish(2, variables)
            exchange.publish(3, variables)
    whole = T * ["send", "recv"]
    # Unroll 1 needs version 0, which is there when unroll 0 ends; those of unrolls 2 and 3 come later. Version 3 is
    # there when unroll 3 ends, and yet no step of an unroll 4 is sent: there is none.
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
    program.begin(sebulba.num_iterations)
    try:
        program()
    finally:
        program.close()
    step = ["torchpod/step", "torchpod/act", "end", "torchpod/env_step", "end", "end"]
    assert happened["torchpod-actor-0"] == [*T * step, "torchpod/put", "end"]


def test_ranges_are_nvtx_ranges_where_there_is_cuda(monkeypatch):
    happened = []
    monkeypatch.setattr("torchpod.compile._PROFILE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", happened.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: happened.append("end"))
    with pytest.raises(LookupError), span("act"):
        raise LookupError
    assert happened == ["torchpod/act", "end"]


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
        assert happened[f"torchpod-actor-{k}"] == 3 * unroll
    names = [x.removeprefix("torchpod/") for x in happened["MainThread"] if x != "end"]
    update = ["update", *["gradient", "apply"] * LEARNER.num_epochs * LEARNER.num_minibatches]
    assert names == 3 * ["get", *update]


def test_a_free_lag_takes_the_newest_parameters_that_are_ready():
    """On a GPU they are published while their update still runs; who took these would wait for it."""
    exchange, ready = Exchange([Phases("env")], lag=None, capacity=1, timeout_s=60.0), {}
    for version in range(4):
        event = SimpleNamespace(query=lambda version=version: version in ready)
        exchange.publish(version, Handed({"version": version}, event))
        assert exchange.newest().tree == exchange.variables(version)[1].tree == {"version": max(ready, default=version)}
        ready[version] = True
        assert exchange.newest().tree == {"version": version} == exchange.versions()[-1].tree
        assert len(exchange.versions()) == 1 and len(exchange._versions) <= 2


def test_an_unroll_begins_early_with_parameters_that_are_ready_alone():
    """Who took others would wait for their update, before it has handed over what it holds."""
    exchange, ready = Exchange([Phases("env")], lag=1, capacity=1, timeout_s=60.0), set()
    for version in range(3):
        event = SimpleNamespace(query=lambda version=version: version in ready)
        exchange.publish(version, handed := Handed({"version": version}, event))
        assert exchange.known(version + 1) is None and exchange.known(version + 2) is None
        ready.add(version)
        assert exchange.known(version + 1) == (version, handed) == exchange.variables(version + 1)


@pytest.mark.parametrize("lag", [0, 1, 3, "free"])
def test_parameters_that_nobody_can_ask_for_any_more_are_freed(seed, lag, monkeypatch):
    published, publish = [], Exchange.publish

    def spy(exchange, version, variables):
        published.append(weakref.ref(next(iter(variables.tree.values()))))
        publish(exchange, version, variables)

    monkeypatch.setattr(Exchange, "publish", spy)
    program = Program(sebulba := make(SebulbaConfig(lag=lag), "impala"), sebulba.init(seed))
    program.begin(sebulba.num_iterations)
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
    config = SebulbaConfig(num_actor_threads=1, lag=0, timeout_s=float("inf"))  # the watchdog has the real clock
    sebulba = make(config, "impala", Apart([]), iterations=3)
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
    program.begin(sebulba.num_iterations)
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
