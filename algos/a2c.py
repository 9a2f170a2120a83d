"""Advantage actor-critic, the synchronous form of Mnih et al. 2016 (https://arxiv.org/abs/1602.01783).

PPO with another loss: one plain policy-gradient step on each trajectory. Run it with
`algo.learner.num_epochs=1 algo.learner.num_minibatches=1`, as configs/algo/a2c.yaml does.
"""

from dataclasses import dataclass

from torch import Tensor

from torchpod.agent import Bound
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.specs import EnvSpec
from torchpod.types import Batch, LossOutput


@dataclass(frozen=True)
class A2CConfig(PPOConfig):
    """Of PPO's settings, `clip` and `value_clip` have no effect."""

    gae_lambda: float = 1.0
    normalize_advantage: bool = False
    value_clip: bool = False


class A2C(PPO):
    """See the module."""

    max_lag = 0

    def __init__(self, spec: EnvSpec, config: A2CConfig = A2CConfig()) -> None:
        super().__init__(spec, config)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """`-log pi(a|s) A + c_v (V - R)^2 / 2 - c_e H`, section 4 of the paper."""
        b = batch.steps
        policy, value = self._forward(batch)
        log_prob, entropy = self.head.log_prob(policy, b["action"])
        policy_loss = -log_prob * b["advantage"]
        value_loss = 0.5 * (value - b["value_target"]).square()
        loss = policy_loss + self.value_coefficient * value_loss - self.entropy_coefficient * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return LossOutput((loss * b["weight"]).sum(), {k: (v * b["weight"]).sum() for k, v in metrics.items()})
