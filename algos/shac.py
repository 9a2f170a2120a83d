"""Short-horizon actor-critic, Xu et al. 2022 (https://arxiv.org/abs/2204.07137): APG with a value at the end.

Unrolls are short, so that gradients stay small, and a critic says what comes after them. Read apg.py first. One thing
differs from the paper: per unroll the critic takes one step, as the policy does, not 16 epochs of 4 minibatches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod.agent import Bound
from torchpod.algos.apg import APG, APGConfig
from torchpod.bounds import bounded
from torchpod.nets import Encoder, orthogonal
from torchpod.ops.returns import gae
from torchpod.specs import EnvSpec
from torchpod.types import Batch, LossOutput, Trajectory, Tree


@dataclass(frozen=True)
class SHACConfig(APGConfig):
    """Defaults: appendix A.2 of the paper, where it gives them."""

    activation: str = "silu"
    """Of hidden layers: tanh, relu or silu, which is smooth, as the paper's ELU is."""
    initial_log_std: float | None = -1.0
    lambda_: float = bounded(0.95, least=0, most=1)
    """Of the critic's TD(lambda) targets."""
    target_rate: float = bounded(0.05, least=0, most=1)
    """How fast the target critic follows, per update."""
    reward_scale: float = 1.0
    """Multiplies rewards before they are learned from."""


class SHAC(APG):
    """See the module."""

    def __init__(self, spec: EnvSpec, config: SHACConfig = SHACConfig()) -> None:
        super().__init__(spec, config)
        self.target_rate = config.target_rate
        self.hyperparameter("lambda_", config.lambda_)
        self.hyperparameter("reward_scale", config.reward_scale)
        self.value_encoder = Encoder(spec.observation, config.hidden, config.activation)
        self.value = orthogonal(nn.Linear(self.value_encoder.out_features, 1), 1.0)

    def optimizer_groups(self) -> dict[str, tuple[str, ...]]:
        """Policy and critic."""
        return {"policy": ("encoder.", "policy.", "log_std"), "value": ("value_encoder.", "value.")}

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """As APG, and the observations on both sides of each row."""
        steps = super().prepare(trajectory, keys).steps
        steps["reward"] = steps["reward"] * self.reward_scale
        observation = trajectory.timestep.observation
        sides = {"observation": slice(0, -1), "next_observation": slice(1, None)}
        return Batch(steps | {k: pytree.tree_map(lambda x, i=i: x[i], observation) for k, i in sides.items()})

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Eq. 5 of the paper for the policy; eq. 6 with the TD(lambda) targets of eq. 7 for the critic.

        An episode that is truncated in the unroll ends, like the unroll, with the value of its true final observation;
        one that terminates with 0.
        """
        assert target is not None
        b = batch.steps
        v_t = target("value_of", b["next_observation"])
        policy_loss = self._policy_loss(batch, v_t)
        observation, reward, v_t = pytree.tree_map(Tensor.detach, (b["observation"], b["reward"], v_t))
        with torch.no_grad():
            v_tm1 = target("value_of", observation)
            value_target = v_tm1 + gae(reward, b["discount"], b["is_last"], v_tm1, v_t, lambda_=self.lambda_)
        value_loss = 0.5 * ((self.value_of(observation) - value_target).square() * b["weight"]).sum()
        return LossOutput({"policy": policy_loss, "value": value_loss}, {})

    def value_of(self, observation: Tree) -> Tensor:
        """The value `[...]` of observations `[..., *shape]`."""
        return self.value(self.value_encoder(observation)).squeeze(-1)
