"""Proximal policy optimisation, Schulman et al. 2017 (https://arxiv.org/abs/1707.06347).

Read agent.py and learner.py first: this file is `prepare` and `loss`; networks, `act` and advantages are those of
actor_critic.py, everything else is the loop's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchpod.agent import Bound
from torchpod.algos.actor_critic import ActorCritic, ActorCriticConfig
from torchpod.bounds import bounded
from torchpod.specs import EnvSpec
from torchpod.types import Batch, LossOutput, Trajectory


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Defaults: table 3 and section 5 of the paper, as run on classic control by CleanRL and purejaxrl."""

    gae_lambda: float = bounded(0.95, least=0, most=1)
    """Of generalised advantages: 0 trusts the value function, 1 the rewards that were seen."""
    clip: float = bounded(0.2, least=0)
    """Epsilon of eq. 7: the ratio of probabilities, new to old, counts from 1 - clip to 1 + clip."""
    value_clip: bool = True
    """Let `clip` limit how far values move from those of the rollout, too."""
    normalize_advantage: bool = True
    """Advantages of mean 0 and standard deviation 1, in each minibatch, over all ranks."""


class PPO(ActorCritic):
    """See the module."""

    config: PPOConfig
    max_lag = 1  # the ratio corrects for a little

    def __init__(self, spec: EnvSpec, config: PPOConfig = PPOConfig()) -> None:
        super().__init__(spec, config)
        self.standardise = ("advantage",) if config.normalize_advantage else ()
        for name in ("discount", "gae_lambda", "clip", "value_coefficient", "entropy_coefficient"):
            self.hyperparameter(name, getattr(config, name))

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """Generalised advantages and value targets, and what both are clipped by: the policy and values of before."""
        advantage, value_target, v_tm1 = self._gae(trajectory, self.gae_lambda)
        batch = self._batch(trajectory, advantage, value_target, v_tm1)
        before = {"action_log_prob": self._said("action_log_prob", trajectory), "state_value": v_tm1}
        return batch._replace(steps=batch.steps | before)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Clipped surrogate (eq. 7 of the paper), clipped value loss, entropy bonus (eq. 9)."""
        b, c = batch.steps, self.config
        policy, value = self._forward(batch)
        log_prob, entropy = self.head.log_prob(policy, b["action"])
        log_ratio = log_prob - b["action_log_prob"]
        ratio, advantage = log_ratio.exp(), b["advantage"]
        policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * advantage)
        value_loss = (value - b["value_target"]).square()
        if c.value_clip:
            clipped = b["state_value"] + (value - b["state_value"]).clamp(-self.clip, self.clip)
            value_loss = torch.maximum(value_loss, (clipped - b["value_target"]).square())
        loss = policy_loss + self.value_coefficient * 0.5 * value_loss - self.entropy_coefficient * entropy
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": 0.5 * value_loss,
            "entropy": entropy,
            "approx_kl": ratio - 1 - log_ratio,
            "clip_fraction": ((ratio - 1).abs() > self.clip).float(),
        }
        weight = b["weight"]
        return LossOutput((loss * weight).sum(), {k: (v * weight).sum() for k, v in metrics.items()})
