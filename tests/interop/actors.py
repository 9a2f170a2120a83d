"""Actors and critics as a user of TorchRL builds them, for CartPole."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import (
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import (
    DiscreteSACLoss,
)

from torchpod.envs.classic.cartpole import CartPole

SPEC = CartPole().spec
OBSERVATION_LOGITS = ["observation"], ["logits"]


class Sums(nn.Module):
    def __init__(self, size, inputs=4):
        super().__init__()
        self.layer = nn.Linear(inputs, size)

    def forward(self, x):
        return self.layer(x)


def categorical(size=2, module=None, **own):
    module = module or TensorDictModule(Sums(size), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        module,
        in_keys=["logits"],
        **({"return_log_prob": True, "distribution_class": torch.distributions.Categorical} | own),
    )


def q_actor(size=2):
    return QValueActor(Sums(size), in_keys=["observation"], spec=Categorical(size))


def gaussian(size, inputs=4, **own):
    net = nn.Sequential(Sums(2 * size, inputs), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        **({"return_log_prob": True, "distribution_class": TanhNormal} | own),
    )


class Joined(nn.Linear):
    def forward(self, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(torch.cat(inputs, -1))


def q_critic(inputs, outputs=1, beside=("action",), key="state_action_value"):
    return TensorDictModule(Joined(inputs, outputs), in_keys=["observation", *beside], out_keys=[key])


def discrete_sac(actor, values):
    return DiscreteSACLoss(actor, values, action_space="categorical", num_actions=2)


def critic(size=1, inputs=4):
    return ValueOperator(Sums(size, inputs), in_keys=["observation"])
