"""A loss that is no pure function of its parameters is refused; one that is has TorchRL's own terms and gradient."""

import random as pythons
import re

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import A2CLoss, DQNLoss, ValueEstimators
from torchrl.objectives.value import GAE

from tests.interop.actors import SPEC, Sums, categorical, critic, gaussian, q_actor
from tests.interop.rows import B, T, batch_of, collect, ended, in_torchrls_words
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.interop.torchrl import LossAgent
from torchpod.learner import Learner, LearnerConfig


class Own(A2CLoss):
    """What it costs is written by a function; it has a coefficient `c`, a parameter `p`, and a number in Python."""

    def __init__(self, actor, values, write):
        super().__init__(actor, values)
        self.write, self.calls = write, 0
        self.c, self.p = nn.Buffer(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, data):
        out = super().forward(data)
        out["loss_p"] = self.p * out["loss_objective"]
        self.write(self, data, out)
        return out


def own(write, module=None, **told):
    actor = categorical(module=module)
    return LossAgent(actor, Own(actor, critic(), write), spec=SPEC, **told)


def runs_its_network(loss, data, out):
    values = loss.critic_network(data.select("observation"))["state_value"]
    out["loss_critic"] = out["loss_critic"] + 1e-4 * values.pow(2).mean()


def asks_for_parameters(loss, data, out):
    out["loss_l2"] = torch.stack([x.pow(2).sum() for x in loss.parameters()]).sum().expand(data.shape)


def counts(loss, data, out):
    loss.calls += 1
    out["loss_critic"] = out["loss_critic"] * (loss.calls % 2)


def draws_in_python(loss, data, out):
    out["loss_critic"] = out["loss_critic"] * pythons.random()


def halves_a_parameter(loss, data, out):
    loss.p.data.copy_(0.5 * loss.p)
    out["loss_p"] = loss.p * out["loss_objective"]


def assigns_and_reads(loss, data, out):
    loss.c.data = loss.c * 0.5
    out["c"] = loss.c.data


def needs_gradients_of_rows(loss, data, out):
    out["loss_p"] = out["loss_p"] * data["observation"].requires_grad_().sum()


class Norm(nn.Module):
    """With a running mean, which it replaces in every call."""

    def __init__(self):
        super().__init__()
        self.mean, self.layer = nn.Buffer(torch.zeros(4)), nn.Linear(4, 2)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


class Wide(Sums):
    """In float64, among networks of float32."""

    def __init__(self):
        super().__init__(2)
        self.double()

    def forward(self, x):
        return super().forward(x.double()).float()


def hooked():
    layer = Sums(2)
    layer.layer.weight.register_hook(lambda gradient: gradient * 0.5)
    return layer


def logits(net):
    return TensorDictModule(net, ["observation"], ["logits"])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: own(runs_its_network),
            "Own is no function of the parameters that it is given: the gradient of critic_network.module.layer.weight",
        ),
        (lambda: own(asks_for_parameters), "it asks for parameters(); take those of a network, self.critic_network_"),
        (lambda: own(counts), "called twice with the same rows and noise it gives loss_critic="),
        (lambda: own(draws_in_python), "called twice with the same rows and noise it gives loss_critic="),
        (lambda: own(halves_a_parameter), "called twice with the same rows and noise it gives loss_p="),
        (
            lambda: own(lambda loss, *_: None, logits(Norm())),
            "called twice with the same rows and noise it gives loss_",
        ),
        (lambda: own(assigns_and_reads), "Own changes {'c'} while it runs; name them in adaptive=..."),
        (
            lambda: own(lambda loss, *_: loss.c.mul_(0.5)),
            "coefficients that the loss writes are to be named in adaptive",
        ),
        (lambda: own(needs_gradients_of_rows), "it calls requires_grad_() while it runs; "),
        (
            lambda: own(lambda *_: None, logits(hooked())),
            "actor_network.module.0.module.layer.weight of Own has a hook for its gradient, and updates here take ",
        ),
        (
            lambda: own(lambda *_: None, logits(Wide())),
            "torch.float64 (actor_network.module.0.module.layer.bias), and all must be float32, or all float64",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:No target network updater")
def test_what_is_no_pure_function_is_refused(make, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        make()


def multiplies(loss, data, out):
    with torch.no_grad():
        loss.c.mul_(0.5)
    out["loss_critic"] = out["loss_critic"] * loss.c


def keeps_the_old_one(loss, data, out):
    old = loss.c
    loss.c = old * 0.5
    out["loss_critic"] = out["loss_critic"] * (loss.c + old.data)


def assigns_what_has_a_gradient(loss, data, out):
    loss.c.data = out["loss_p"].mean()
    out["loss_critic"] = out["loss_critic"] * loss.c


def branches(loss, data, out):
    loss.c = loss.c - 0.5
    out["loss_critic"] = out["loss_critic"] * (2.0 if loss.c else 3.0)


@pytest.mark.parametrize("write", [multiplies, keeps_the_old_one, assigns_what_has_a_gradient, branches])
@pytest.mark.filterwarnings("ignore:No target network updater")
def test_a_coefficient_that_is_named_may_be_written_in_any_way(write, seed):
    def loss():
        torch.manual_seed(seed)
        actor = categorical()
        return actor, Own(actor, critic(), write)

    (actor, given), (_, other) = loss(), loss()
    agent = LossAgent(actor, given, spec=SPEC, adaptive=("c",))
    env = CartPole(max_episode_steps=T)
    trajectory = ended(collect(agent, env, seed))
    agent.double()
    other.double()
    batch = batch_of(agent, trajectory, seed)
    params, buffers = variables_of(agent)
    learner = Learner(agent, LearnerConfig(), num_iterations=1)
    flat, _ = learner._gradient_one(params, buffers, {}, batch, random.key(seed), torch.tensor(0), ())
    ours = learner.groups.by_parameter({"loss": flat[: len(learner.groups.flat(params))]})
    changed = bind(agent, params | buffers).loss(batch, random.key(seed), None).buffers["c"]
    out = other(in_torchrls_words(trajectory, batch))
    torch.stack([x.mean() for name, x in out.items() if name.startswith("loss")]).sum().backward()
    theirs = {name.replace("_params.", "."): x.grad for name, x in other.named_parameters()}
    assert theirs.keys() == ours.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(changed, other.c, rtol=1e-9, atol=1e-9)


class Later(DQNLoss):
    default_value_estimator = ValueEstimators.TDLambda


class Next(A2CLoss):
    default_value_estimator = ValueEstimators.TD0


class Clipped(GAE):
    """An estimator of a user's own."""


def masked():
    actor = categorical()
    loss = A2CLoss(actor, critic())
    loss.loss_mask_key = ("observation", "valid")
    return LossAgent(actor, loss, spec=SPEC)


def estimated():
    actor, values = categorical(), critic()
    loss = A2CLoss(actor, values)
    loss._value_estimator = Clipped(gamma=0.9, lmbda=0.9, value_network=values)
    return LossAgent(actor, loss, spec=SPEC)


def dqn(kind, **told):
    actor = q_actor()
    return LossAgent(actor, kind(actor, action_space="categorical", delay_value=True, **told), spec=SPEC)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (masked, "A2CLoss has loss_mask_key=('observation', 'valid'), and LossAgent leaves out the rows between "),
        (estimated, "A2CLoss has a Clipped, and advantages here are torchpod's own, as those of GAE, "),
        (lambda: dqn(Later), "Later gets rows in any order, and its TDLambdaEstimator reads them as time"),
        (lambda: dqn(DQNLoss, use_prioritized_weights=False), "DQNLoss has use_prioritized_weights=False, and rows "),
    ],
)
@pytest.mark.filterwarnings("ignore:No target network updater")
def test_options_that_would_have_no_effect_are_refused(make, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        make()


def test_the_default_estimator_is_that_of_the_class():
    actor = categorical()
    agent = LossAgent(actor, Next(actor, critic()), spec=SPEC)
    assert agent.gae_lambda == 0


@pytest.mark.parametrize("name", ["BCLoss", "DiscreteHeadsLoss"])
def test_a_loss_is_known_by_its_class_and_not_by_its_name(name):
    actor = gaussian(1, 3, distribution_kwargs={"low": -2.0, "high": 2.0})
    kind = type(name, (A2CLoss,), {"__module__": "my_loss"})
    agent = LossAgent(actor, kind(actor, critic(inputs=3)), spec=Pendulum().spec)
    assert any(name.startswith("critic_network.") for name, _ in agent.named_parameters())


class Noisy(Sums):
    def forward(self, x):
        y = super().forward(x)
        return y + torch.randn(y.shape)


def test_advantages_of_a_critic_that_draws_are_those_of_their_keys(seed):
    actor = categorical()
    values = TensorDictModule(Noisy(1), ["observation"], ["state_value"])
    agent = LossAgent(actor, A2CLoss(actor, values), spec=SPEC)
    trajectory = collect(agent, CartPole(max_episode_steps=T), seed)
    found = []
    for own_seed in (seed, seed, seed + 1):
        keys = random.split(random.key(own_seed), B)
        found.append(agent.prepare(trajectory, keys).steps["advantage"])
    assert found[0].equal(found[1]) and not found[0].equal(found[2])


@pytest.mark.filterwarnings("ignore:No target network updater")
def test_making_an_agent_leaves_what_the_loss_has(seed):
    torch.manual_seed(seed)
    actor = categorical()
    loss = Own(actor, critic(), lambda loss, *_: loss.c.data.mul_(0.5))
    before = {name: x.clone() for name, x in loss.state_dict().items() if not name.startswith("target_")}
    agent = LossAgent(actor, loss, spec=SPEC, adaptive=("c",))
    state = torch.get_rng_state()
    LossAgent(actor, loss, spec=SPEC, adaptive=("c",))
    assert torch.get_rng_state().equal(state) and agent.c == 1 and loss.reduction == "none"
    data = TensorDict(loss.state_dict())
    for name, x in before.items():
        assert data[name].equal(x), name
