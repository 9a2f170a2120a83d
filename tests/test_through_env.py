"""Gradients through the environment: against finite differences and autograd; members, ranks, compiled programs."""

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.agent import bind
from torchpod.algos.apg import APG, APGConfig
from torchpod.algos.shac import SHAC, SHACConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.distributed import Ranks
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.mountain_car_continuous import MountainCarContinuous
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.point_mass import PointMass
from torchpod.learner import LearnerConfig
from torchpod.nets import MLP, RunningMoments
from torchpod.rollout import make_step, unroll
from torchpod.sebulba import Sebulba, SebulbaConfig
from torchpod.through_env import Tape

T, B = 6, 4
ENVS = {"pendulum": Pendulum(max_episode_steps=4), "point_mass": PointMass(max_episode_steps=4)}  # T crosses a reset
CONFIG = LearnerConfig(num_epochs=1, num_minibatches=1, learning_rate=1e-2, max_grad_norm=1.0)


def double(tree):
    return pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, tree)


def make(cls=SHAC, env=ENVS["pendulum"], *, hidden=(6,), wide=False, **options):
    """With `wide`, of plain MLPs, which stay in float64; `Encoder` makes every observation float32."""

    def make_agent():
        config = {"hidden": hidden, "initial_log_std": -1.0, "activation": "tanh"}
        agent = APG(env.spec, APGConfig(**config)) if cls is APG else SHAC(env.spec, SHACConfig(**config))
        if wide:
            size = env.spec.observation.shape[0]
            agent.encoder = MLP(size, hidden)
            if cls is SHAC:
                agent.value_encoder = MLP(size, hidden)
        return agent

    settings = {"num_envs": B, "unroll_length": T, "learner": CONFIG, "num_iterations": 8}
    return Anakin(make_agent, env, **(settings | {"compiler": Compiler(enabled=False)} | options))


def perturbed(learner, seed):
    """With parameters that are not almost zero, and targets that are not the parameters."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tree):
        return {k: v + 0.3 * torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in tree.items()}

    return learner._replace(params=noise(learner.params), targets=noise(learner.targets))


def setting(cls, env, seed, iterations=1):
    """In float64, from the middle of an episode: how to take the gradient, and the loss as one graph."""
    anakin = make(cls, env, wide=True)
    state = anakin.init(seed)
    for _ in range(iterations):
        state, _ = anakin.iterate(state)
    anakin.agent.double()
    carry, learner = double(state.carry), perturbed(double(state.learner), seed)
    env_keys, actor_keys, keys = state.env_keys, state.actor_keys, state.learner_keys
    step = make_step(anakin.agent, env)

    def loss(params, grad=False):
        _, made = unroll(step, params | learner.buffers, carry, env_keys, actor_keys, length=T, grad=grad)
        bound = bind(anakin.agent, params | learner.buffers)
        target = bind(anakin.agent, learner.targets | learner.buffers) if learner.targets else None
        out = bound.loss(bound.prepare(made, keys), keys[0], target).loss
        return torch.stack([*out.values()]).sum() if isinstance(out, dict) else out

    def gradient():
        tape = Tape(step)
        variables = learner.params | learner.buffers
        _, made = unroll(tape, variables, carry, env_keys, actor_keys, length=T)
        assert (made.timestep.step_type[1:-1] == 2).any() and (made.timestep.step_type[2:] == 0).any()
        assert anakin._through is not None
        return anakin._through.gradient(learner, tape.carries, made, env_keys, actor_keys, keys)

    return anakin.learner, learner.params, loss, gradient


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
@pytest.mark.parametrize("cls", [APG, SHAC])
def test_the_gradient_equals_autograds_through_the_whole_unroll(seed, cls, env):
    learner, params, loss, gradient = setting(cls, env, seed)
    expected = torch.func.grad(lambda p: loss(p, grad=True))(params)
    flat, sums = gradient()
    torch.testing.assert_close(flat, learner.groups.flat(expected), rtol=1e-10, atol=1e-12)
    assert 0 < sums["weight"] < T * B  # resets have no weight


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_the_gradient_with_respect_to_the_policy_equals_finite_differences_over_a_reset(seed, env):
    learner, params, loss, gradient = setting(APG, env, seed)
    flat, _ = gradient()
    for name, own in learner.groups.by_parameter({"loss": flat}).items():
        value, slopes = params[name], []
        for i in range(value.numel()):
            nudge = torch.zeros(value.numel(), dtype=torch.float64)
            nudge[i] = 1e-6
            up, down = (loss(params | {name: value + sign * nudge.view_as(value)}) for sign in (1, -1))
            slopes.append((up - down) / 2e-6)
        torch.testing.assert_close(own.flatten(), torch.stack(slopes), rtol=1e-5, atol=1e-6)
        assert own.any()


def iterate(anakin, seed, count=3):
    return iterate_from(anakin, anakin.init(seed), count)


def iterate_from(anakin, state, count=1):
    metrics = {}
    for _ in range(count):
        state, metrics = anakin.iterate(state)
    return state, metrics


def assert_close(a, b, **tolerance):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, **tolerance), a, b)


def test_members_of_a_population_equal_runs_of_their_own(seed):
    together, _ = iterate(make(compiler=Compiler(False, 2)), seed % 2**31)
    for i in range(2):
        alone, _ = iterate(make(), seed % 2**31 + i)
        assert_close(pytree.tree_map(lambda x, i=i: x[i], together), alone, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "env", "population"),
    [(APG, "point_mass", 1), (SHAC, "pendulum", 2)],
)
@pytest.mark.slow
def test_the_compiled_iteration_equals_the_eager_one(seed, cls, env, population):
    eager, metrics = iterate(make(cls, ENVS[env], compiler=Compiler(False, population)), seed % 2**31, 2)
    compiled, others = iterate(make(cls, ENVS[env], compiler=Compiler(True, population)), seed % 2**31, 2)
    assert_close(compiled.carry, eager.carry, rtol=1e-3, atol=1e-4)
    assert_close(compiled.learner.params, eager.learner.params, rtol=1e-2, atol=1e-4)
    assert_close(others, metrics, rtol=1e-3, atol=1e-4, equal_nan=True)


class Halves(Ranks):
    """Two ranks in one process: the sum of rank 0 is made up of what rank 1 handed in before."""

    handed = []  # by rank 1
    taken = []

    def first(self, x):
        return x  # both have the same

    def sum(self, x):
        if self.rank == 1:
            self.handed.append(x.clone())
            return x
        x += self.handed[len(self.taken)]
        self.taken.append(1)
        return x


def test_two_ranks_take_the_step_of_one(seed):
    Halves.handed.clear()
    Halves.taken.clear()
    whole, _ = iterate(make(), seed, 1)
    for rank in (1, 0):
        half, _ = iterate(make(num_envs=B // 2, ranks=Halves(rank, 2)), seed, 1)
    assert_close(half.learner.params, whole.learner.params, rtol=1e-4, atol=1e-6)


def test_a_run_that_is_resumed_equals_one_that_is_not(seed):
    anakin = make()
    *_, (_, replay) = train(anakin, anakin.init(seed))
    whole = pytree.tree_map(torch.clone, replay.state)
    *_, (_, replay) = train(anakin, anakin.init(seed), until=3)
    *_, (_, replay) = train(anakin, pytree.tree_map(torch.clone, replay.state))
    assert_close(replay.state, whole, rtol=0, atol=0)


@pytest.mark.parametrize("cls", [APG, SHAC])
def test_an_unroll_of_nothing_but_resets_teaches_nothing(seed, cls):
    anakin = make(cls, unroll_length=1)
    state, _ = iterate(anakin, seed, count=4)
    after, _ = iterate_from(anakin, state)
    assert after.learner.healthy
    assert_close(after.learner.params, state.learner.params, rtol=0, atol=0.05)  # Adam goes on by what it remembers
    again, _ = iterate_from(anakin, after)
    assert (
        again.learner.healthy and (again.learner.params["policy.weight"] != after.learner.params["policy.weight"]).any()
    )


class Sees(SHAC):
    """SHAC with running moments of what it observes, and a buffer that counts its updates."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.moments = RunningMoments(spec.observation.shape)
        self.register_buffer("count", torch.zeros(()))

    def statistics(self, trajectory):
        return {"moments": trajectory.timestep.observation[1:]}

    def loss(self, batch, keys, target):
        return super().loss(batch, keys, target)._replace(buffers={"count": self.count + 1})


@pytest.mark.parametrize("population", [1, 2])
def test_statistics_and_buffers_of_an_agent_are_kept(seed, population):
    env = ENVS["pendulum"]
    settings = {"num_envs": B, "unroll_length": T, "learner": CONFIG, "num_iterations": 8}
    make_agent = functools.partial(Sees, env.spec, SHACConfig(hidden=(6,)))
    anakin = Anakin(make_agent, env, compiler=Compiler(False, population), **settings)
    state, _ = iterate(anakin, seed % 2**31, count=3)
    buffers = state.learner.buffers
    assert (buffers["count"] == 3).all() and (buffers["moments.total"] == 3 * T * B).all()
    assert (buffers["moments.variance"] > 0).all() and buffers["moments.mean"].any()


def test_what_cannot_work_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="learns through the environment, and mountain_car_continuous is not diff"):
        make(env=MountainCarContinuous())
    with pytest.raises(ValueError, match="cartpole has"):
        make(env=CartPole())
    with pytest.raises(ValueError, match="num_epochs=1 and algo.learner.num_minibatches=1, not 4 and 4"):
        make(learner=LearnerConfig())
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="it must be recurrent"):
        patch.setattr(SHAC, "recurrent", False)
        make()
    env = Pendulum()
    with pytest.raises(ValueError, match="SHAC learns through the environment.*loop=anakin"):
        Sebulba(
            lambda: SHAC(env.spec),
            lambda: env,
            config=SebulbaConfig(lag=0),
            num_envs=B,
            unroll_length=T,
            learner=CONFIG,
            num_iterations=1,
            compiler=Compiler(False),
        )
