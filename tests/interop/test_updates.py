"""Updates of agents of TorchRL losses are TorchRL's own, and so are the programs that compute them."""

import copy
import functools

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils import _pytree as pytree
from torchrl.modules import ActorValueOperator, QValueActor, ValueOperator
from torchrl.objectives import A2CLoss, DQNLoss, SoftUpdate

from tests.interop.actors import SPEC, categorical, critic
from tests.interop.rows import (
    SAC_V1,
    THERE,
    B,
    T,
    batch_of,
    collect,
    config,
    ended,
    env_for,
    in_torchrls_words,
    of_both,
    single,
)
from tests.marks import with_slow
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.torchrl import CONTINUOUS, MULTI_AGENT, ON_POLICY, parts, torchrl_agent
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.interop.keyed import Keyed
from torchpod.interop.torchrl import LossAgent
from torchpod.kernels.cpu_calls import Calls
from torchpod.kernels.inductor import Compiled, trace
from torchpod.learner import Learner, LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.replay.learning import ReplayLearner, iterations_before

QUICK_TO_COMPILE = {"A2CLoss", "DDPGLoss"}
UPDATES = 3
CASES = [
    *((name, CartPole, {}) for name in THERE if name not in CONTINUOUS),
    *((name, Pendulum, {}) for name in THERE if name in CONTINUOUS or name in ON_POLICY),
    (SAC_V1, Pendulum, {}),
    *((name, CartPole, {}) for name in sorted(MULTI_AGENT)),
    ("ClipPPOLoss", CartPole, {"clip_value": 1e-3}),
    ("A2CLoss", CartPole, {"clip_value": 1e-3}),
    ("ClipPPOLoss", CartPole, {"normalize_advantage": True}),
]
BOUNDED = [
    (name, env, {"min_alpha": 0.995, "max_alpha": 1.005})
    for name, env in (("DiscreteSACLoss", CartPole), ("SACLoss", Pendulum))
]
"""They write to a parameter, which runs uncompiled."""
NOISY = ("CQLLoss", "CrossQLoss", "REDQLoss", "SACLoss", "TQCLoss", SAC_V1)
"""Whose actions are drawn from normal numbers in float32: logarithms and cosines, which compilers round otherwise."""
QUICK = [("A2CLoss", CartPole, {})]
"""To compile."""


@pytest.fixture(autouse=True)
def default_dtype():
    """Is what it was, after a test that sets it."""
    yield
    torch.set_default_dtype(torch.float32)


def double(name, *modules):
    """In float64; DistributionalDQNLoss makes tensors of the default type."""
    if name == "DistributionalDQNLoss":
        torch.set_default_dtype(torch.float64)
    for x in modules:
        x.double()


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for
@pytest.mark.filterwarnings("ignore:.*Monte", "ignore:.*analytic")
@pytest.mark.parametrize(
    ("compiled", "name", "make_env", "arguments"),
    [
        *((False, *case) for case in (*CASES, *BOUNDED)),
        *(pytest.param(True, *x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES),
    ],
)
def test_updates_are_those_of_torchrl_and_torch_optim(compiled, name, make_env, arguments, seed):
    """Some in a row: then the policy is not the one that acted, and targets are not what they follow.

    Compiled they are so in float64 as well: gradients, clipping, Adam and targets are the programs of a run.
    """
    env = make_env(max_episode_steps=T)
    agent, loss = of_both(name, env, seed, **arguments)
    trajectory = ended(collect(agent, env, seed))
    first, later = 1e-9, 1e-7  # Adam's factors are float32, and what one update has moved the next one begins with
    if arguments.get("normalize_advantage"):
        first = 1e-7  # 1e-8 is added to the standard deviation
    epsilon = 1e-5
    if compiled and name in NOISY:
        first, epsilon = 1e-7, 2**-7  # with 1e-5 Adam divides a small gradient, rounding and all, by its own size
    double(name, agent, loss)

    keys = random.split(random.key(seed + 5), B)
    rates = {"learning_rate": 2**-7, "anneal_learning_rate": False, "epsilon": epsilon, "max_grad_norm": 0.3}

    def ours(updates):
        settings = LearnerConfig(num_epochs=updates, num_minibatches=1, chunk_rows=T * B, **rates)
        learner = Learner(agent, settings, num_iterations=1, compiler=Compiler(compiled, max_compilations=20))
        return learner.update(learner.init(*variables_of(agent)), trajectory, keys)

    data = in_torchrls_words(trajectory, batch_of(agent, trajectory, seed))
    assert data["next", "done"].sum() == B and data["next", "terminated"].sum() == B / 2
    data["shifted_valid"] = torch.ones(T * B, dtype=torch.bool)  # without, TorchRL divides the variance by N - 1
    if name == "DistributionalDQNLoss":
        data["action"] = torch.nn.functional.one_hot(data["action"], env.spec.action.num_values)
    updater = None
    if any(k.startswith("target_") for k in dict(loss.named_children())):
        updater = SoftUpdate(loss, eps=0.9)
    coefficients = copy.deepcopy(loss._buffers)
    with torch.no_grad(), Keyed(random.key(0)):
        loss(data.clone())  # makes what it makes lazily
    loss._buffers |= coefficients
    own = dict(loss.named_parameters())
    before = {key: x.detach().clone() for key, x in own.items()}
    for key, x in agent.named_parameters():
        assert any(torch.equal(x, y) for k, y in before.items() if k.replace("_params.", ".") == key), key
    optimizer = torch.optim.Adam(own.values(), lr=rates["learning_rate"], eps=epsilon)
    loss_keys = random.advance_each(keys[0], 2 + 2 * UPDATES)
    for i in range(UPDATES):
        beta = loss.beta.clone() if name == "KLPENPPOLoss" else None
        with Keyed(random.fold_in(loss_keys[2 + 2 * i], 0)):
            out = loss(data.clone())
        terms = {key: x for key, x in out.items() if key.startswith("loss")}
        total = sum(x.mean() for x in terms.values())
        if beta is not None:  # it has written to it, which its backward pass would read
            adapted = loss.beta.clone()
            loss.beta.data.copy_(beta)
        optimizer.zero_grad()
        total.backward()
        if beta is not None:
            loss.beta.data.copy_(adapted)
        gradients = [x.grad for x in own.values() if x.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient *= (0.3 / norm).clamp(max=1)  # torch's clip_grad_norm_ adds 1e-6 to the norm
        optimizer.step()
        if updater is not None:
            updater.step()
        if i not in (0, UPDATES - 1):
            continue
        after, metrics = ours(i + 1)
        exact = first if i == 0 else later
        if i == 0:
            torch.testing.assert_close(metrics["loss"], total.detach(), rtol=exact, atol=exact)
            for key, x in terms.items():
                torch.testing.assert_close(metrics[key], x.detach().mean(), rtol=exact, atol=exact)
        for key, x in own.items():
            mine = after.params[key.replace("_params.", ".")]
            torch.testing.assert_close(mine, x.detach(), rtol=exact, atol=exact, msg=key)
        for net, child in loss.named_children():
            if net.startswith("target_"):
                for key, x in child.items(True, True):
                    where = f"{net.removeprefix('target_').removesuffix('_params')}.{'.'.join(key)}"
                    if where in after.targets:
                        torch.testing.assert_close(after.targets[where], x, rtol=exact, atol=exact, msg=where)
        if beta is not None:
            assert i > 0 or adapted == 0.5
            torch.testing.assert_close(after.buffers["beta"], adapted, rtol=exact, atol=0)
    assert max(float((x.detach() - before[key]).abs().max()) for key, x in own.items()) > 1e-3


SLOW_TO_TRACE = {"CQLLoss", "CrossQLoss", "REDQLoss", "SACLoss", "TQCLoss", SAC_V1}


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for
@pytest.mark.parametrize("name", with_slow([*THERE, SAC_V1, *sorted(MULTI_AGENT)], SLOW_TO_TRACE))
def test_the_program_of_an_update_is_exact(name, seed):
    """What inductor compiles, here not compiled: in float64, where the policy is not the one that acted."""
    torch.manual_seed(seed)
    env = env_for(name, max_episode_steps=T)
    agent, _ = of_both(name, env, seed)
    trajectory, exact = ended(collect(agent, env, seed)), 1e-9
    double(name, agent)
    batch, learner = batch_of(agent, trajectory, seed), Learner(agent, LearnerConfig(), num_iterations=1)
    state = learner.init(*variables_of(agent))
    params = {key: x + 0.05 * torch.randn_like(x) for key, x in state.params.items()}
    args = params, state.buffers, state.targets, batch, random.key(seed), torch.tensor(0), ()
    graph, *_ = trace(learner._gradient_one, args)
    found = graph(*(x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)))[0]
    eager, _ = learner._gradient_one(*args)
    torch.testing.assert_close(found, eager, rtol=exact, atol=exact)


def gradients_of_terms(agent, params, buffers, targets, batch, key):
    """Of each term of a loss apart, by term and parameter."""

    def terms(params):
        target = bind(agent, targets | buffers) if targets else None
        sums, *_ = bind(agent, params | buffers)("sums", batch, key, target)
        return {name: x for name, x in sums.items() if name.startswith("loss")}

    values, pull_back = torch.func.vjp(terms, params)  # pyright: ignore[reportAssignmentType]
    only = {term: {name: torch.full_like(x, name == term) for name, x in values.items()} for term in values}
    return {term: pull_back(cotangents)[0] for term, cotangents in only.items()}


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for
@pytest.mark.filterwarnings("ignore:No target network updater", "ignore:.*Monte", "ignore:.*analytic")
@pytest.mark.parametrize("name", with_slow([*THERE, *MULTI_AGENT], {*THERE, *MULTI_AGENT} - QUICK_TO_COMPILE))
def test_the_compiled_gradient_of_each_term_is_that_of_torchrl(name, seed):
    """In float32, where the policy is not the one that acted.

    Beyond rtol they may differ by 1e-6 of the largest number of a term's gradient, and by 1e-4 where actions are drawn:
    the log-probability of one at 1 - 6e-8 hangs on the last bit of tanh, which moved a gradient by 9e-6. CQL's is made
    of sums of 1 that cancel (the last bias has gradient 0), which round to 1e-5.
    """
    env = env_for(name, max_episode_steps=T)
    agent, loss = of_both(name, env, seed)
    trajectory = single(ended(collect(agent, env, seed)))
    batch, key = batch_of(agent, trajectory, seed), random.key(seed)
    data = in_torchrls_words(trajectory, batch)
    if name == "DistributionalDQNLoss":
        data["action"] = torch.nn.functional.one_hot(data["action"], env.spec.action.num_values)
    own = {key.replace("_params.", "."): x for key, x in loss.named_parameters()}
    for x in own.values():
        x.data += 0.05 * torch.randn_like(x)
    params = {name: x.detach().clone() for name, x in own.items()}
    with Keyed(key):
        out = loss(data)
    if name == "KLPENPPOLoss":
        loss.beta.data.fill_(1)  # it has written to it, which its backward pass would read
    terms = {term: x.mean() for term, x in out.items() if term.startswith("loss")}

    state = Learner(agent, LearnerConfig(), num_iterations=1).init(*variables_of(agent))
    compiled = Compiled(functools.partial(gradients_of_terms, agent), "terms", 1)
    ours = compiled(params, state.buffers, state.targets, batch, key)
    assert ours.keys() == terms.keys()
    for term, x in terms.items():
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        theirs = dict(zip(own, torch.autograd.grad(x, list(own.values()), **options), strict=True))
        largest = max(float(x.abs().max()) for x in theirs.values())
        assert largest > 0, term
        atol = 1e-5 if term == "loss_cql" else (1e-4 if name in NOISY else 1e-6) * largest
        torch.testing.assert_close(ours[term], theirs, rtol=1e-4, atol=atol)


class Updates:
    """Of an agent that learns from what it is given, or from replay of it."""

    def __init__(self, agent, compiler):
        kept = ReplayConfig(capacity=8 * T * B, batch_size=T * B // 2, min_size=T * B)
        sizes = {"num_envs": B, "unroll_length": T}
        self.learner = Learner(
            agent,
            LearnerConfig(num_epochs=1, num_minibatches=2),
            num_iterations=200,
            iterations_before=iterations_before(agent, kept, **sizes),
            compiler=compiler,
        )
        self.replay = None
        if agent.replayed:
            self.replay = ReplayLearner(agent, self.learner, kept, compiler=compiler, **sizes)

    def __call__(self, state, trajectory, i, keys):
        if self.replay is None:
            return self.learner.update(state, trajectory, keys)[0]
        if i < self.replay.buffer.fill_iterations:
            return self.replay.store(state, trajectory, (), torch.tensor(i))
        return self.replay.update(state, trajectory, (), torch.tensor(i), keys)[0]


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for
@pytest.mark.slow
@pytest.mark.parametrize("name", THERE)
def test_a_hundred_updates_compile_nothing_after_the_first(name, seed, monkeypatch):
    """Though they might. Each is one call of what was recorded; every tenth has the gradient of an uncompiled one."""
    calls, run = [], Calls.run
    monkeypatch.setattr(Calls, "run", lambda *args: calls.append(None) or run(*args))
    env, compiler = env_for(name, max_episode_steps=5), Compiler(True, max_compilations=100)
    agent = torchrl_agent(env.spec, config(name))
    ours, eager = Updates(agent, compiler), Updates(agent, Compiler(False))
    state, keys = ours.learner.init(*variables_of(agent)), random.split(random.key(seed), B)
    if ours.replay and eager.replay:
        eager.replay.buffer = ours.replay.buffer
    compiled = []
    for i in range(102):
        trajectory, own = collect(agent, env, seed + i), random.advance(keys, 10 * i)
        calls.clear()
        before, state = state, ours(state, trajectory, i, own)
        assert i < 3 or len(calls) == (2 if name == "KLPENPPOLoss" else 1), len(calls)  # its beta is between
        compiled.append(sum(len(fn._programs) for fn in compiler._made))
        if i % 10 == 0:
            mine, other = state.mu["loss"], eager(before, trajectory, i, own).mu["loss"]
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert state.num_steps >= 200 and compiled[0] <= compiled[1] == compiled[-1] > 0
    assert not compiler.fell_back


def gradient_of(learner, state, batch):
    """By parameter."""
    given = state.params, state.buffers, state.targets, batch, random.key(0), torch.tensor(0), ()
    flat, *_ = learner._gradient_one(*given)
    return learner.groups.by_parameter({"loss": flat[: len(learner.groups.flat(state.params))]})


def with_trunk(seed, separate):
    torch.manual_seed(seed)
    trunk = TensorDictModule(nn.Linear(4, 8), in_keys=["observation"], out_keys=["hidden"])
    head = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"])
    both = ActorValueOperator(trunk, categorical(module=head), ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))
    actor, value = both.get_policy_operator(), both.get_value_operator()
    return actor, A2CLoss(actor, value, separate_losses=separate)


def test_a_shared_trunk_learns_from_both_losses(seed):
    """TorchRL gives the critic the trunk's parameters: with separate_losses without their gradient."""
    for separate in (False, True):
        actor, loss = with_trunk(seed, separate)
        _, own = with_trunk(seed, separate)
        agent = LossAgent(actor, loss, spec=SPEC)
        trajectory = collect(agent, CartPole(), seed)
        batch = batch_of(agent, trajectory, seed)
        learner = Learner(agent, LearnerConfig(), num_iterations=1)
        state = learner.init(*variables_of(agent))
        ours = gradient_of(learner, state, batch)
        out = own(in_torchrls_words(trajectory, batch))
        sum(x for key, x in out.items() if key.startswith("loss")).backward()
        theirs = {key.replace("_params.", "."): x.grad for key, x in own.named_parameters()}
        assert theirs.keys() == ours.keys() and len(ours) == 6
        for key, x in theirs.items():
            torch.testing.assert_close(ours[key], x, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("name", ["A2CLoss", "DQNLoss"])
def test_frozen_parameters_stay_and_the_others_learn_as_in_torchrl(name, seed):
    def both():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        net[0].requires_grad_(False)
        if name == "DQNLoss":
            actor = QValueActor(net, in_keys=["observation"], action_space="categorical")
            return actor, DQNLoss(actor, action_space="categorical", delay_value=True)
        actor = categorical(module=TensorDictModule(net, ["observation"], ["logits"]))
        return actor, A2CLoss(actor, critic())

    actor, loss = both()
    _, own = both()
    agent = LossAgent(actor, loss, spec=SPEC)
    trajectory = collect(agent, CartPole(), seed)
    batch = batch_of(agent, trajectory, seed)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1), num_iterations=1)
    params, buffers = variables_of(agent)
    state = learner.init(params, buffers)
    trained = {key.replace("_params.", "."): x for key, x in own.named_parameters() if x.requires_grad}
    kept = {key.replace("_params.", "."): x for key, x in own.named_parameters() if not x.requires_grad}
    assert params.keys() == trained.keys() and len(kept) == 2 and kept.keys() <= buffers.keys()
    ours = gradient_of(learner, state, batch)
    out = own(in_torchrls_words(trajectory, batch))
    sum(x.mean() for key, x in out.items() if key.startswith("loss")).backward()
    for key, x in trained.items():
        torch.testing.assert_close(ours[key], x.grad, rtol=1e-4, atol=1e-6, msg=key)
    keys = random.split(random.key(seed), trajectory.timestep.reward.shape[1])
    after, _ = learner.update(state, trajectory, keys)
    assert all((after.params[key] != params[key]).any() for key in params)
    assert all(torch.equal(after.buffers[key], x.detach()) for key, x in kept.items())


GROUPS = {
    "A2CLoss": {"actor": ("actor_network.",), "critic": ("critic_network.",)},
    "SACLoss": {"actor": ("actor_network.",), "qvalue": ("qvalue_network.",), "alpha": ("log_alpha",)},
}


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_have_optimizers_of_their_own(name, compiled, seed):
    """As so many of torch.optim, each with its rate and its clipping."""
    env, prefixes = env_for(name, max_episode_steps=T), GROUPS[name]
    rates = {group: 2.0 ** -(5 + i) for i, group in enumerate(prefixes)}
    torch.manual_seed(seed)
    agent = LossAgent(*parts(env.spec, config(name)), spec=env.spec, groups=prefixes, discount=0.97)
    _, loss = of_both(name, env, seed)
    trajectory = ended(collect(agent, env, seed))
    torch.manual_seed(seed)
    agent.double()
    loss.double()
    keys = random.split(random.key(seed + 5), B)
    settings = LearnerConfig(
        num_epochs=1, num_minibatches=1, learning_rate=rates, anneal_learning_rate=False, max_grad_norm=0.05
    )
    learner = Learner(agent, settings, num_iterations=1, compiler=Compiler(compiled))
    after, metrics = learner.update(learner.init(*variables_of(agent)), trajectory, keys)

    own, data = dict(loss.named_parameters()), in_torchrls_words(trajectory, batch_of(agent, trajectory, seed))
    if name == "SACLoss":
        SoftUpdate(loss, eps=0.9)
    with Keyed(random.fold_in(random.advance_each(keys[0], 4)[2], 0)):
        out = loss(data)
    sum(x.mean() for key, x in out.items() if key.startswith("loss")).backward()
    exact = 1e-6 if name in NOISY else 1e-9  # a small gradient, divided by itself, shows how its noise was rounded
    for group, (prefix,) in prefixes.items():
        mine = [x for key, x in own.items() if key.replace("_params.", ".").startswith(prefix)]
        gradients = [x.grad for x in mine if x.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        assert float(metrics[f"grad_norm/{group}"]) == pytest.approx(float(norm)) and norm > 0.05
        for gradient in gradients:
            gradient *= 0.05 / norm
        torch.optim.Adam(mine, lr=rates[group], eps=1e-5).step()
    for key, x in own.items():
        torch.testing.assert_close(after.params[key.replace("_params.", ".")], x.detach(), rtol=exact, atol=exact)
