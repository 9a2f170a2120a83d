"""Actors, networks and losses of TorchRL that do not fit an environment are refused in one sentence."""

import re
from dataclasses import replace

import pytest
import torch
import torchrl.objectives
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Normal, OneHotCategorical
from torchrl.data import Bounded, Categorical
from torchrl.modules import (
    EGreedyModule,
    GRUModule,
    NoisyLinear,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    CQLLoss,
    CrossQLoss,
    DDPGLoss,
    DiscreteCQLLoss,
    DiscreteIQLLoss,
    DiscreteSACLoss,
    DQNLoss,
    IQLLoss,
    KLPENPPOLoss,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    TD3Loss,
    ValueEstimators,
)

from tests.interop.actors import (
    OBSERVATION_LOGITS,
    SPEC,
    Joined,
    Sums,
    categorical,
    critic,
    discrete_sac,
    gaussian,
    q_actor,
    q_critic,
)
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.torchrl import (
    TorchRLConfig,
    torchrl_agent,
)
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.interop.torchrl import LossAgent
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, EnvSpec
from torchpod.testing import check_agent
from torchpod.types import MID, TimeStep

ONE = Bounded(-1.0, 1.0, (1,))

TQC = [x for name, x in vars(torchrl.objectives).items() if name == "TQCLoss"]  # of newer versions
UNFIT = {
    "reads 'pixels'": lambda: (
        categorical(module=TensorDictModule(Sums(2), in_keys=["pixels"], out_keys=["logits"])),
        lambda actor: A2CLoss(actor, critic()),
        "the actor reads 'pixels', and what cartpole gives has ['observation']; name one of these in its in_keys",
    ),
    "no log-prob": lambda: (
        categorical(return_log_prob=False),
        lambda actor: ClipPPOLoss(actor, critic()),
        "ClipPPOLoss needs 'action_log_prob' of the actor, which writes ['logits']; build it with return_log_pr",
    ),
    "a memory": lambda: (
        categorical(
            module=TensorDictSequential(
                GRUModule(input_size=4, hidden_size=8, in_key="observation", out_key="h"),
                TensorDictModule(nn.Linear(8, 2), ["h"], ["logits"]),
            )
        ),
        lambda actor: A2CLoss(actor, critic()),
        "the actor has a GRUModule, and LossAgent keeps no memory from step to step; use an actor without, or an agent",
    ),
    "exploration of its own": lambda: (
        TensorDictSequential(q_actor(), EGreedyModule(spec=Categorical(2))),
        lambda actor: DQNLoss(actor[0], action_space="categorical", delay_value=True),
        "the actor has a EGreedyModule, whose exploration nothing here anneals; leave it out, and give LossAgent eps",
    ),
    "noise that nobody draws": lambda: (
        QValueActor(NoisyLinear(4, 2), in_keys=["observation"], spec=Categorical(2)),
        lambda actor: DQNLoss(actor, action_space="categorical", delay_value=True),
        "a network has a NoisyLinear, whose noise is drawn by calls of reset_noise() that no loop here makes; use",
    ),
    "random actions of another policy": lambda: (
        categorical(),
        lambda actor: ClipPPOLoss(actor, critic()),
        "epsilon=0.1 would take other actions than those whose log-probability ClipPPOLoss learns from; leave it out",
        {"epsilon": 0.1},
    ),
    "noise around another policy": lambda: (
        gaussian(1),
        lambda actor: ClipPPOLoss(actor, critic()),
        "noise=0.3 would take other actions than those whose log-probability ClipPPOLoss learns from; leave it out",
        {"noise": 0.3, "spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "a reduction": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic(), reduction="sum"),
        "A2CLoss has reduction='sum', and LossAgent takes the mean over rows that are no resets; leave it out.",
    ),
    "standardised rewards": lambda: (
        categorical(),
        lambda actor: with_estimator(A2CLoss(actor, critic()), ValueEstimators.TD0, average_rewards=True),
        "A2CLoss with average_rewards is not supported, for a batch is cut into chunks; scale rewards in the env",
    ),
    "standardised rewards of replay": lambda: (
        q_actor(),
        lambda actor: with_estimator(
            DQNLoss(actor, action_space="categorical", delay_value=True), ValueEstimators.TD0, average_rewards=True
        ),
        "DQNLoss with average_rewards is not supported, for a batch is cut into chunks; scale rewards in the env",
    ),
    "a critic that lags": lambda: (
        categorical(),
        lambda actor: ReinforceLoss(actor, critic(), delay_value=True),
        "ReinforceLoss has a target of critic_network, and what losses with a critic read here is of the networks "
        "themselves; make it without delay_value.",
    ),
    "advantages without a critic": lambda: (
        q_actor(),
        lambda actor: DQNLoss(actor, action_space="categorical", delay_value=True),
        "gae_lambda=0.9 is of losses with a critic, which DQNLoss has not.",
        {"gae_lambda": 0.9},
    ),
    "a multiplier": lambda: (
        gaussian(1, 4),
        lambda actor: CQLLoss(actor, q_critic(5), action_spec=ONE, with_lagrange=True),
        "CQLLoss with with_lagrange=True says nothing of single rows; leave it out.",
        {"spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "another weight": lambda: (
        TensorDictSequential(TensorDictModule(Sums(1), ["observation"], ["weight"]), categorical()),
        lambda actor: Weighing(actor[1], critic()),
        "the actor writes 'weight' for Weighing, and rows have something else of that name; give it another.",
    ),
    "a dict": lambda: (
        categorical(),
        lambda actor: InADict(actor, critic()),
        "forward() of InADict returns a dict; return a TensorDict.",
    ),
    "a distribution of other parameters": lambda: (
        ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 2), ["observation"], ["x"]), in_keys=["x"], distribution_class=TanhNormal
        ),
        lambda actor: A2CLoss(actor, critic()),
        "must match. Got this error message: ",
    ),
    "a frozen coefficient": lambda: (
        gaussian(1, 4),
        lambda actor: frozen(SACLoss(actor, q_critic(5), action_spec=ONE)),
        "log_alpha of SACLoss is frozen (requires_grad=False), and would be trained; let it be trained, or make the",
        {"spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "a log-prob of another name": lambda: (
        categorical(),
        lambda actor: with_keys(ClipPPOLoss(actor, critic()), sample_log_prob="lp"),
        "ClipPPOLoss needs 'lp' of the actor, which writes ['action_log_prob', 'logits']; build it with "
        "log_prob_key='lp', or tell the loss by set_keys(sample_log_prob='action_log_prob').",
    ),
    "a log-prob per number": lambda: (
        gaussian(2, distribution_class=Normal),
        lambda actor: ClipPPOLoss(actor, critic()),
        "the actor must write 'action_log_prob' with shape [] per row, and writes it with shape [2]; give it a "
        "distribution of whole actions, such as IndependentNormal or TanhNormal.",
        {"spec": replace(SPEC, action=Box((2,), -1.0, 1.0))},
    ),
    "rows by rows": lambda: (
        gaussian(1, distribution_class=Normal, return_log_prob=False),
        lambda actor: A2CLoss(actor, critic()),
        "loss_objective of A2CLoss has shape [26, 26] with reduction='none' and 26 rows; a loss must say what each row",
        {"spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "a one-hot loss": lambda: (
        q_actor(),
        lambda actor: DQNLoss(actor, action_space="one-hot"),
        "the actor writes 'action' with shape [] per row, and DQNLoss with action_space='one_hot' reads it with shape "
        "[2]; give both the same action_space, 'categorical' (of an actor with a distribution: Categorical) or ",
    ),
    "a one-hot actor": lambda: (
        categorical(distribution_class=OneHotCategorical),
        lambda actor: discrete_sac(actor, q_critic(4, 2, [], "action_value")),
        "the actor writes 'action' with shape [2] per row, and DiscreteSACLoss with action_space='categorical' reads "
        "it with shape []; give both the same action_space",
    ),
    "a group of nothing": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic()),
        "groups['actor'] of LossAgent has 'nope.', and no parameter of A2CLoss begins so; they begin with "
        "['actor_network', 'critic_network'].",
        {"groups": {"actor": ("nope.",), "critic": ("critic_network.",)}},
    ),
    "no action": lambda: (
        TensorDictModule(Sums(2), in_keys=["observation"], out_keys=["logits"]),
        lambda actor: A2CLoss(categorical(), critic()),
        "the actor must write 'action' with shape [] per row, and writes ['logits']; make it a ProbabilisticActor",
    ),
    "values of another shape": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic(3)),
        "must write 'state_value' with shape [1] per row, and writes it with shape [3]; give it a last axis of 1",
    ),
    "values of another name": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, TensorDictModule(Sums(1), ["observation"], ["value"])),
        "the critic of A2CLoss must write 'state_value' with shape [1] per row, and writes ['value']; name it so in",
    ),
    "actions that are numbers": lambda: (
        gaussian(2),
        lambda actor: SACLoss(actor, q_critic(6), action_spec=Bounded(-1.0, 1.0, (2,))),
        "the actor's action is float32 [2] per row, and cartpole takes [] (Discrete(num_values=2, dtype=torch.int64)); "
        "use an actor with a Categorical distribution, and DiscreteSACLoss in place of SACLoss.",
    ),
    "three actions": lambda: (
        categorical(3),
        lambda actor: ClipPPOLoss(actor, critic()),
        "an actor for cartpole, which takes Discrete(num_values=2, dtype=torch.int64), must write 'logits' with shape "
        "[2] per row, and writes it with shape [3]; give it a last axis of 2.",
    ),
    "values of three actions": lambda: (
        q_actor(3),
        lambda actor: DQNLoss(actor, delay_value=True),
        "value_network of DQNLoss must write 'action_value' with shape [2] per row, and writes it with shape [3]",
    ),
    "values of three actions beside an actor": lambda: (
        categorical(),
        lambda actor: DiscreteIQLLoss(actor, q_critic(4, 3, []), critic(), action_space="categorical"),
        "qvalue_network of DiscreteIQLLoss must write 'state_action_value' with shape [2] per row, and writes it with",
    ),
    "action values of another name": lambda: (
        categorical(),
        lambda actor: discrete_sac(actor, q_critic(4, 2, [])),
        "qvalue_network of DiscreteSACLoss must write 'action_value' with shape [2] per row, and writes "
        "['state_action_value']; name it so in out_keys, or tell the loss by set_keys.",
    ),
    "action values of another size": lambda: (
        categorical(),
        lambda actor: discrete_sac(actor, q_critic(5, 2, [], "action_value")),
        "qvalue_network of DiscreteSACLoss cannot use what cartpole gives, {'observation': [4]} per row: its "
        "Joined(in_features=5, out_features=2, bias=True) takes 5 numbers and gets 4; build it for that.",
    ),
    "action values of pixels": lambda: (
        categorical(),
        lambda actor: discrete_sac(actor, q_critic(4, 2, ["pixels"], "action_value")),
        "qvalue_network of DiscreteSACLoss reads 'pixels', and what cartpole gives has ['action', 'next.done', ",
    ),
    "another actor": lambda: (
        categorical(),
        lambda actor: A2CLoss(categorical(), critic()),
        "is no parameter of A2CLoss; build the loss from the networks that are used",
    ),
    "a mean per network": lambda: (
        categorical(),
        lambda actor: PerNetwork(actor, critic()),
        "a loss must say what each row costs, [..., 26] or [26, 1], to mask resets",
    ),
    "a head outside the networks": lambda: (
        categorical(),
        lambda actor: WithHead(actor, critic()),
        "WithHead has parameters outside its networks, ['head.weight', 'head.bias'], which would not be trained",
    ),
    "an actor of another size": lambda: (
        categorical(module=TensorDictModule(nn.Linear(5, 2), in_keys=["observation"], out_keys=["logits"])),
        lambda actor: A2CLoss(actor, critic()),
        "the actor cannot use what cartpole gives, {'observation': [4]} per row: its Linear(in_features=5, "
        "out_features=2, bias=True) takes 5 numbers and gets 4; build it for that.",
    ),
    "a critic of other keys": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, ValueOperator(Sums(1), in_keys=["pixels"])),
        "the critic of A2CLoss reads 'pixels', and what cartpole gives has ['observation']; name one of these in",
    ),
    "V-trace without a log-prob": lambda: (
        categorical(return_log_prob=False),
        lambda actor: with_estimator(A2CLoss(actor, critic()), ValueEstimators.VTrace, actor_network=actor),
        "A2CLoss needs 'action_log_prob' of the actor, which writes ['logits']; build it with return_log_prob=True.",
    ),
    "V-trace, standardised": lambda: (
        categorical(),
        lambda actor: with_estimator(
            A2CLoss(actor, critic()), ValueEstimators.VTrace, actor_network=actor, average_adv=True
        ),
        "A2CLoss with average_adv is not supported; use normalize_advantage of the loss.",
    ),
    "returns over rows": lambda: (
        q_actor(),
        lambda actor: with_estimator(DQNLoss(actor, delay_value=True), ValueEstimators.TDLambda),
        "DQNLoss gets rows in any order, and its TDLambdaEstimator reads them as time",
    ),
    "advantages standardised by the estimator": lambda: (
        categorical(),
        lambda actor: with_estimator(A2CLoss(actor, critic()), ValueEstimators.GAE, average_gae=True),
        "A2CLoss with average_gae is not supported; use normalize_advantage of the loss",
    ),
    "parameters of its own": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic(), functional=False),
        "A2CLoss must be made with functional=True and without advantage_norm",
    ),
    "no reduction": lambda: (
        categorical(),
        lambda actor: without(A2CLoss(actor, critic()), "reduction"),
        "A2CLoss has no reduction; a loss must say what each row costs, to mask resets",
    ),
    "no target network": lambda: (
        q_actor(),
        lambda actor: DQNLoss(actor, delay_value=False),
        "DQNLoss has no target network of values; make it with delay_value=True (it looks ahead with "
        "target_value_network_params, and of targets has none).",
    ),
    "dropout": lambda: (
        categorical(module=TensorDictModule(nn.Sequential(nn.Dropout(), Sums(2)), ["observation"], ["logits"])),
        lambda actor: A2CLoss(actor, critic()),
        "draws from torch's generator where it cannot be keyed",
    ),
    "statistics of batches": lambda: (
        categorical(module=TensorDictModule(nn.Sequential(nn.BatchNorm1d(4), Sums(2)), ["observation"], ["logits"])),
        lambda actor: A2CLoss(actor, critic()),
        "A2CLoss is no pure function of its parameters; modules that write to their buffers",
    ),
    "a network with parameters of its own": lambda: (
        q_actor(),
        lambda actor: OwnCQL(actor, action_space="categorical"),
        "OwnCQL is no pure function of its parameters; it calls requires_grad_() while it runs; ",
    ),
    "a loss that is not supported": lambda: (
        q_actor(),
        lambda actor: DiscreteCQLLoss(actor, action_space="categorical"),
        "LossAgent cannot train with DiscreteCQLLoss: it runs its network with parameters that no update reaches",
    ),
    "a loss of demonstrations": lambda: (
        categorical(),
        lambda actor: type("BCLoss", (A2CLoss,), {"__module__": "torchrl.objectives"})(actor, critic()),
        "LossAgent cannot train with BCLoss: it learns from demonstrations, and an agent here learns from what it did",
    ),
    **{
        f"{loss.__name__} with discrete actions": lambda loss=loss, own=own: (
            categorical(),
            lambda actor: loss(actor, Casting.critic(6 if loss.__name__ == "TQCLoss" else 1), **own),
            f"{loss.__name__} is for continuous actions, and cartpole takes Discrete(num_values=2, "
            "dtype=torch.int64); use DiscreteSACLoss in its place.",
        )
        for loss, own in {
            DDPGLoss: {"delay_value": True},
            **dict.fromkeys((TD3Loss, SACLoss, CQLLoss, REDQLoss, CrossQLoss, *TQC), {"action_spec": ONE}),
        }.items()
    },
    "a discrete loss with continuous actions": lambda: (
        gaussian(1),
        lambda actor: discrete_sac(actor, q_critic(4, 2, [], "action_value")),
        "DiscreteSACLoss is for discrete actions, and cartpole takes Box(shape=(1,), low=-1.0, high=1.0, "
        "dtype=torch.float32); use SACLoss in its place.",
        {"spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "a nested key of a plain observation": lambda: (
        categorical(module=TensorDictModule(Sums(2), [("observation", "x")], ["logits"])),
        lambda actor: A2CLoss(actor, critic()),
        "the actor reads ('observation', 'x'), and what cartpole gives has ['observation']; name one of these in its",
    ),
    "the whole of a dict": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic()),
        "the actor reads 'observation', which in what cartpole gives is the dict of [('observation', 'x'), "
        "('observation', 'y')]; name these in its in_keys.",
        {"spec": replace(SPEC, observation={"x": Array((4,)), "y": Array((3,))})},
    ),
    "observations of another type": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic()),
        "its Linear(in_features=4, out_features=2, bias=True) takes float32 and gets float64; build it for that.",
        {"spec": replace(SPEC, observation=Array((4,), torch.float64))},
    ),
    "observations that are numbers": lambda: (
        categorical(),
        lambda actor: A2CLoss(actor, critic()),
        "takes float32 and gets int64 (x.float() before it, or an embedding of classes); build it for that.",
        {"spec": replace(SPEC, observation=Discrete(16))},
    ),
    "no distribution, for a log-prob": lambda: (
        TensorDictModule(nn.Linear(4, 1), ["observation"], ["action"]),
        lambda actor: ClipPPOLoss(actor, critic()),
        "ClipPPOLoss needs 'action_log_prob' of the actor, which writes []; make it a ProbabilisticActor, with return",
        {"spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "no distribution": lambda: (
        TensorDictModule(nn.Linear(4, 1), ["observation"], ["action"]),
        lambda actor: IQLLoss(actor, q_critic(5), critic()),
        "IQLLoss asks the actor for its distribution, and it has none; make it a ProbabilisticActor.",
        {"spec": replace(SPEC, action=Box((1,), -1.0, 1.0))},
    ),
    "a key that nobody writes": lambda: (
        categorical(),
        lambda actor: Costly(actor, critic()),
        "; let the actor write it, or tell the loss by set_keys what it is called.",
    ),
    "a sum": lambda: (
        categorical(),
        lambda actor: Summed(actor, critic()),
        "has shape [] with reduction='none' and 26 rows",
    ),
}
"""By what is wrong: an actor, the loss made of it, what is told, and other arguments of `LossAgent`, if any."""


def frozen(loss):
    loss.log_alpha.requires_grad_(False)
    return loss


class OwnCQL(DiscreteCQLLoss):
    pass


class Costly(A2CLoss):
    def forward(self, data):
        return super().forward(data).set("loss_cost", data["cost"])


class Casting(Joined):
    """Takes whatever action it gets as a number."""

    def forward(self, x, action):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, action.float().reshape(*x.shape[:-1], -1))

    @classmethod
    def critic(cls, outputs):
        return TensorDictModule(cls(5, outputs), in_keys=["observation", "action"], out_keys=["state_action_value"])


class Weighing(A2CLoss):
    @property
    def in_keys(self):
        return [*super().in_keys, "weight"]

    @in_keys.setter
    def in_keys(self, values):
        self._set_in_keys()


class InADict(A2CLoss):
    def forward(self, data):
        return dict(super().forward(data).items())


class Summed(A2CLoss):
    def forward(self, data):
        return super().forward(data).apply(lambda x: x.sum())


class PerNetwork(A2CLoss):
    def forward(self, data):
        return super().forward(data).apply(lambda x: x.sum().expand(2))


class WithHead(A2CLoss):
    def __init__(self, *nets):
        super().__init__(*nets)
        self.head = nn.Linear(2, 2)


def with_estimator(loss, kind, **own):
    loss.make_value_estimator(kind, **own)
    return loss


def with_keys(loss, **keys):
    loss.set_keys(**keys)
    return loss


def without(loss, name):
    delattr(loss, name)
    return loss


def test_a_coefficient_that_changes_must_be_named():
    actor = categorical()
    told = "KLPENPPOLoss changes {'beta'} while it runs; name them in adaptive=..."
    with pytest.raises(ValueError, match=re.escape(told)):
        LossAgent(actor, KLPENPPOLoss(actor, critic()), spec=SPEC, adaptive=())


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_is_refused_with_a_sentence(what):
    actor, make, told, *own = UNFIT[what]()
    with pytest.raises(ValueError, match=re.escape(told)):
        LossAgent(actor, make(actor), **{"spec": SPEC} | dict(*own))


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"discount": 1.5}, "discount=1.5 of LossAgent must lie from 0 to 1."),
        ({"gae_lambda": -0.1}, "gae_lambda=-0.1 of LossAgent must lie from 0 to 1."),
        ({"target_rate": 2}, "target_rate=2 of LossAgent must lie from 0 to 1."),
        ({"epsilon": 3}, "epsilon=3 of LossAgent must lie from 0 to 1."),
        ({"exploration_fraction": float("nan")}, "exploration_fraction=nan of LossAgent must lie from 0 to 1."),
        ({"noise": -1}, "noise=-1 of LossAgent must be at least 0."),
        ({"target_interval": 0}, "target_interval=0 of LossAgent must be at least 1."),
    ],
)
def test_a_number_that_is_out_of_range_is_refused(own, told):
    actor = q_actor()
    with pytest.raises(ValueError, match=re.escape(told)):
        LossAgent(actor, DQNLoss(actor, action_space="categorical", delay_value=True), spec=SPEC, **own)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: categorical(module=TensorDictModule(nn.Linear(3, 2), *OBSERVATION_LOGITS)),
            "int64 [] per row, and pen",
        ),
        (lambda: TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"]), "float32 [2] per row, and pendulum"),
    ],
)
def test_an_actor_of_other_actions_is_refused_where_actions_are_numbers(make, told):
    actor = make()
    loss = DDPGLoss(actor, q_critic(4)) if isinstance(actor, TensorDictModule) else A2CLoss(actor, critic())
    with pytest.raises(ValueError, match=re.escape(f"the actor's action is {told}")):
        LossAgent(actor, loss, spec=Pendulum().spec)


@pytest.mark.parametrize(
    ("name", "env", "told"),
    [
        ("SACLoss", CartPole(), "SACLoss is for actions of shape [A], and cartpole has Discrete(num_values=2, "),
        ("SACLoss", CartPole(), "); use loss=DiscreteSACLoss."),
        ("IQLLoss", CartPole(), "); use loss=DiscreteIQLLoss."),
        ("DQNLoss", Pendulum(), "DQNLoss is for discrete actions, and pendulum has Box("),
        ("DQNLoss", Pendulum(), "); use loss=SACLoss."),
        ("PPO", CartPole(), "loss=PPO is not known; use one of A2CLoss"),
        ("DTLoss", CartPole(), "loss=DTLoss cannot be used here: it learns from demonstrations, and an agent here "),
    ],
)
def test_a_loss_for_other_actions_is_refused(name, env, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        torchrl_agent(env.spec, TorchRLConfig(name, hidden=(8,)))


@pytest.mark.parametrize(("name", "delay"), [("DDPGLoss", "value"), ("TD3Loss", "qvalue"), ("SACLoss", "qvalue")])
def test_a_target_of_the_actor_alone_is_none_of_values(name, delay):
    config = TorchRLConfig(name, hidden=(8,), arguments={f"delay_{delay}": False, "delay_actor": True})
    told = f"{name} has no target network of values; make it with delay_{delay}=True (it looks ahead with "
    told += f"target_{delay}_network_params, and of targets has target_actor_network_params)."
    with pytest.raises(ValueError, match=re.escape(told)):
        torchrl_agent(Pendulum().spec, config)


@pytest.mark.parametrize(
    ("loss", "arguments", "told"),
    [
        ("ClipPPOLoss", {"reduction": "mean"}, "ClipPPOLoss has no argument reduction to set; it has "),
        ("ClipPPOLoss", {"actor": 1}, "ClipPPOLoss has no argument actor to set; it has "),
        ("SACLoss", {"target_entropy": "foo"}, " It was made with algo.agent.arguments={'target_entropy': 'foo'}."),
        ("TD3Loss", {"loss_function": "foo"}, " It was made with algo.agent.arguments={'loss_function': 'foo'}."),
    ],
)
def test_arguments_that_do_not_fit_are_in_the_sentence(loss, arguments, told):
    spec = SPEC if loss == "ClipPPOLoss" else Pendulum().spec
    with pytest.raises(ValueError, match=re.escape(told)):
        torchrl_agent(spec, TorchRLConfig(loss, hidden=(8,), arguments=arguments))


def test_an_argument_that_the_loss_cannot_use_is_refused():
    told = "ClipPPOLoss cannot be made with arguments={'clip_epsilon': 'abc'}: "
    with pytest.raises(ValueError, match=re.escape(told)):
        torchrl_agent(SPEC, TorchRLConfig("ClipPPOLoss", hidden=(8,), arguments={"clip_epsilon": "abc"}))


def test_an_unknown_argument_of_the_loss_is_refused():
    with pytest.raises(ValueError, match="ClipPPOLoss has no argument epsilon to set; it has adv"):
        torchrl_agent(SPEC, TorchRLConfig("ClipPPOLoss", hidden=(8,), arguments={"epsilon": 0.1}))


@pytest.mark.parametrize("delay_value", [True, False])
def test_a_loss_that_looks_ahead_with_values_of_states_needs_their_target(delay_value):
    """SAC as in its first paper: a target of Q beside it does not count."""
    spec, actor = replace(SPEC, action=Box((1,), -1.0, 1.0)), gaussian(1)
    loss = SACLoss(actor, q_critic(5), critic(), action_spec=ONE, delay_value=delay_value)
    if delay_value:
        LossAgent(actor, loss, spec=spec)
        return
    with pytest.raises(ValueError, match="SACLoss has no target network of values; make it with delay_value=True"):
        LossAgent(actor, loss, spec=spec)


def test_an_action_of_another_name_is_found_where_the_loss_was_told_of_it(seed):
    """As the page says: names that were given with `set_keys` are respected."""
    outputs = []
    for name in ("action", "act"):
        torch.manual_seed(seed)
        actor = categorical(out_keys=[name])
        loss = with_keys(ClipPPOLoss(actor, critic()), action=name)
        agent, env = LossAgent(actor, loss, spec=SPEC), CartPole()
        keys = random.split(random.key(seed), 5)
        params, buffers = variables_of(agent)
        learner = Learner(agent, LearnerConfig(num_minibatches=1), num_iterations=1)
        with torch.no_grad():
            variables = params | buffers
            _, trajectory = unroll(make_step(agent, env), variables, start(agent, env, keys), keys, keys, length=6)
        state, _ = learner.update(learner.init(params, buffers), trajectory, keys)
        outputs.append((trajectory.output.action, [*state.params.values()]))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(outputs[0][1], outputs[1][1], strict=True))


@pytest.mark.parametrize(
    ("actor", "loss", "spec", "told"),
    [
        (
            nn.Linear(4, 2),
            None,
            SPEC,
            "takes an actor that is a TensorDictModuleBase, and got a Linear; wrap networks in",
        ),
        (
            None,
            A2CLoss,
            SPEC,
            "takes a loss that is a LossModule, and got the class A2CLoss; give an object of torchrl",
        ),
        (None, None, CartPole(), "takes a spec that is a EnvSpec, and got a CartPole; give the env.spec of an environ"),
    ],
)
def test_things_of_another_kind_are_refused(actor, loss, spec, told):
    own = categorical()
    with pytest.raises(ValueError, match=re.escape(told)):
        LossAgent(actor or own, loss or A2CLoss(own, critic()), spec=spec)


def test_a_loss_without_a_critic_is_refused():
    actor = categorical()
    with pytest.raises(
        ValueError, match="ClipPPOLoss was made without a critic; give it one that writes 'state_value'"
    ):
        LossAgent(actor, ClipPPOLoss(actor, None), spec=SPEC)


def test_a_coefficient_that_is_not_there_cannot_be_adaptive():
    actor = categorical()
    with pytest.raises(ValueError, match=r"adaptive=\('nope',\) has 'nope', and the coefficients of A2CLoss are \['"):
        LossAgent(actor, A2CLoss(actor, critic()), spec=SPEC, adaptive=("nope",))


def test_a_loss_was_told_of_the_actions_that_there_are():
    spec = Pendulum().spec  # within -2 and 2
    actor = gaussian(1, 3)
    loss = SACLoss(actor, q_critic(4), action_spec=Bounded(-2.0, 2.0, (3,)))
    with pytest.raises(
        ValueError, match=r"action_spec of SACLoss has actions of shape \[3\], and pendulum takes \[1\]"
    ):
        LossAgent(actor, loss, spec=spec)
    module = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    loss = TD3Loss(module, q_critic(4), action_spec=Bounded(-1.0, 1.0, (1,)))
    with pytest.raises(
        ValueError, match=r"TD3Loss clips actions by min_action=\[?-1.0\]?, and pendulum takes .*bounds"
    ):
        LossAgent(module, loss, spec=spec)
    right = TD3Loss(module, q_critic(4), action_spec=Bounded(-2.0, 2.0, (1,)))
    LossAgent(module, right, spec=spec)


@pytest.mark.parametrize("explore", [True, False])
def test_actions_beyond_the_bounds_are_those_that_are_done(explore, seed):
    """Without noise, too: replay holds what the environment did."""
    env = Pendulum()
    net = nn.Linear(3, 1)
    nn.init.constant_(net.bias, 50.0)
    actor = TensorDictModule(net, ["observation"], ["action"])
    agent = LossAgent(actor, DDPGLoss(actor, q_critic(4), delay_value=True), spec=env.spec)
    keys = random.split(random.key(seed), 4)
    output, _ = agent.act(env.init(keys)[1], (), keys, explore=explore)
    assert (output.action == 2.0).all()


def test_an_entropy_that_the_choices_cannot_have_is_none_to_aim_at():
    actor, values = categorical(), TensorDictModule(Sums(2), ["observation"], ["action_value"])
    loss = DiscreteSACLoss(actor, values, action_space="categorical", num_actions=5)
    told = r"target_entropy=1.577 of DiscreteSACLoss is more than log\(2\)=0.6931, .* make the loss with num_actions=2"
    with pytest.raises(ValueError, match=told):
        LossAgent(actor, loss, spec=SPEC)


def test_layers_of_unknown_size_are_made_before_the_loss_is():
    actor = QValueActor(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)), in_keys=["observation"], spec=Categorical(2))
    with pytest.raises(ValueError, match="the actor has layers of unknown size, such as LazyLinear; call it once"):
        LossAgent(actor, DQNLoss(actor, action_space="categorical", delay_value=True), spec=SPEC)
    actor(TensorDict({"observation": torch.zeros(1, 4)}, [1]))
    agent = LossAgent(actor, DQNLoss(actor, action_space="categorical", delay_value=True), spec=SPEC)
    params, _ = variables_of(agent)
    assert [list(x.shape) for x in params.values()] == [[8, 4], [8], [2, 8], [2]]
    check_agent(agent, CartPole(max_episode_steps=7), quick=True)


def test_a_loss_may_be_handed_to_a_second_agent():
    actor = categorical()
    loss = ClipPPOLoss(actor, critic(), normalize_advantage=True)
    assert [LossAgent(actor, loss, spec=SPEC).standardise for _ in range(2)] == [("advantage",)] * 2


@pytest.mark.parametrize("loss", ["ClipPPOLoss", "SACLoss", "TD3Loss"])
def test_an_actor_of_continuous_actions_reads_the_parts_of_a_dict(loss):
    spec = EnvSpec("dock", {"place": Array((2,)), "fuel": Array((1,))}, Box((2,), -1.0, 1.0))
    agent = torchrl_agent(spec, TorchRLConfig(loss, hidden=(8,)))
    params, buffers = variables_of(agent)
    parts = {"place": torch.randn(5, 2), "fuel": torch.randn(5, 1)}
    key, actions = random.split(random.key(0), 5), []
    for fuel in (parts["fuel"], parts["fuel"] + 1):
        timestep = TimeStep(torch.full((5,), MID), torch.zeros(5), torch.ones(5), parts | {"fuel": fuel}, {})
        output, _ = bind(agent, params | buffers).act(timestep, (), key, explore=False)
        actions.append(output.action)
    assert actions[0].shape == (5, 2) and not torch.equal(*actions)
