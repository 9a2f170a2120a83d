"""Sebulba against Anakin, and against itself."""

import copy
import random as python_random
import time
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
from tests.marks import with_slow
from tests.sebulba.runs import AGENTS, LEARNER, LOCKSTEP, B, InParts, T, assert_equal, make, run
from torchpod import random
from torchpod.algos.a2c import A2C
from torchpod.anakin import Anakin
from torchpod.anakin import train as train_anakin
from torchpod.compile import Compiler
from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.host import EnvPool, Gymnasium
from torchpod.sebulba import Sebulba, SebulbaConfig, train
from torchpod.sebulba.exchange import Exchange
from torchpod.sebulba.program import Program
from torchpod.types import FIRST


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


@pytest.mark.parametrize("agent", with_slow(AGENTS, ("a2c", "a2c_gru", "lstm", "torchrl")))
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


@pytest.mark.parametrize("kind", [lambda env: env, HostEnv, InParts], ids=["tensor", "host", "host in parts"])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    ("num_actors", "num_pools", "lag", "static"),
    [(0, 1, 0, False), (1, 1, 0, False), (1, 2, 1, False), (2, 2, 1, False), (2, 2, 1, True)],
)
def test_what_a_step_was_and_what_was_kept_of_it_line_up(
    seed, num_actors, num_pools, lag, static, recurrent, kind, monkeypatch
):
    env, agent, begun, known = kind(Names()), Checker(recurrent), [], Exchange.known
    monkeypatch.setattr(Exchange, "known", lambda *args: begun.append(known(*args)) or begun[-1])
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
    sebulba.static = static  # programs with memory of their own, without which there is no CUDA graph
    state, trajectories = sebulba.init(seed), learned_from(sebulba.learner)
    carries = [state.carry]
    for _, program in train(sebulba, state):
        carries.append(program.state.carry)
    learned = 6 * LEARNER.num_epochs * LEARNER.num_minibatches
    # Those before are of the warm-up, from one step repeated.
    assert_iterations_line_up(trajectories[-6:], carries)
    assert_rows_line_up(agent.batches[-learned:])
    assert any(begun) == (kind is InParts and lag > 0)  # unrolls that began before the last was handed over


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


@pytest.mark.parametrize("host", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tensor", "host"])
@pytest.mark.parametrize("agent", with_slow(["ppo", "impala", "gru", "torchrl"], ("torchrl",)))
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
        ends.append(run(resumed, resumed.resume(state, resumed.init(seed, 5))))
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
        assert_equal(run(second, second.resume(state, second.init(seed, stop)))[0], want)


def test_a_host_environment_begins_new_episodes_and_keeps_what_was_learned(seed):
    env = HostEnv(CartPole(max_episode_steps=7))
    first, second = make(env=env), make(env=env)
    begin = first.init(seed)
    state, _ = run(first, begin, until=3)
    resumed = second.resume(state, second.init(seed, 3))
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
    program.begin(sebulba.num_iterations)
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


@pytest.mark.parametrize("agent", with_slow(["ppo", "impala", "gru"], ("impala", "gru")))
def test_compiled_it_equals_compiled_anakin_to_the_bit(seed, agent):
    env = CartPole(max_episode_steps=7)
    anakin = Anakin(
        lambda: AGENTS[agent](env.spec),
        env,
        num_envs=B,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=50,
        compiler=Compiler(enabled=True),
    )
    *_, (_, replay) = train_anakin(anakin, anakin.init(seed))
    sebulba = make(agent=agent, compiled=True)
    assert_equal(run(sebulba, sebulba.init(seed))[0].learner, replay.state.learner)


def test_compiled_actors_of_gymnasiums_environments_run(seed):
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


def test_more_pools_than_a_gpu_has_streams_for_are_refused_before_it_is_used():
    told = "loop.num_actor_threads=16 with loop.pools_per_actor=2 are 32 pools, and 30 per GPU can act"
    with pytest.raises(ValueError, match=told):
        make(SebulbaConfig(num_actor_threads=16, pools_per_actor=2), num_envs=64, device="cuda")


def test_parts_of_a_batch_that_cannot_be_dealt_are_refused_at_the_start():
    learner = replace(LEARNER, num_minibatches=3)  # T is no multiple of it, so that whole environments are dealt
    told = "num_envs=4 per rank are 2 in each of loop.updates_per_batch=2 updates, .* use a multiple of 6"
    with pytest.raises(ValueError, match=told):
        make(SebulbaConfig(updates_per_batch=2), learner=learner)
    make(SebulbaConfig(updates_per_batch=2), learner=learner, num_envs=12)


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
    later = {"config": SebulbaConfig(lag=0, updates_per_batch=2), "compiler": Compiler(False)}
    with pytest.raises(ValueError, match="A2C .* updates have newer ones; use loop.updates_per_batch=1"):
        Sebulba(lambda: A2C(env.spec), CartPole, **later, **settings)
