"""Proximal policy optimisation, Schulman et al. 2017 (https://arxiv.org/abs/1707.06347).

Read agent.py and learner.py first: this file is `prepare` (advantages) and `loss`; the networks and `act` are those of
actor_critic.py, everything else is the loop's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.agent import Bound
from torchpod.algos.actor_critic import ActorCritic, ActorCriticConfig
from torchpod.ops.returns import gae
from torchpod.specs import EnvSpec
from torchpod.types import FIRST, LAST, Batch, LossOutput, Trajectory


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Defaults: table 3 and section 5 of the paper, as run on classic control by CleanRL and purejaxrl."""

    gae_lambda: float = 0.95
    """Of generalised advantages: 0 trusts the value function, 1 the rewards that were seen."""
    clip: float = 0.2
    """Epsilon of eq. 7: the ratio of probabilities, new to old, counts from 1 - clip to 1 + clip."""
    value_clip: bool = True
    """Clip how far values move from those of the rollout, too."""
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
        """Advantages and value targets; resets get weight 0."""
        t, out = trajectory.timestep, trajectory.output
        v_tm1 = self._said("state_value", trajectory)  # [T, B]
        v_t = torch.cat([v_tm1[1:], self._bootstrap(trajectory)[None]])
        reward, discount = self._reward(t.reward[1:]), t.discount[1:] * self.discount
        advantage = gae(reward, discount, t.step_type[1:] == LAST, v_tm1, v_t, lambda_=self.gae_lambda)
        steps = {
            "observation": pytree.tree_map(lambda x: x[:-1], t.observation),
            "first": t.step_type[:-1] == FIRST,
            "action": out.action,
            "action_log_prob": self._said("action_log_prob", trajectory),
            "state_value": v_tm1,
            "advantage": advantage,
            "value_target": advantage + v_tm1,
            # LAST -> FIRST is a reset, no transition: mask it, or the value is learned across episodes.
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        report = {"reward": t.reward[1:], "value": v_tm1, "value_target": steps["value_target"]}
        return Batch(steps | self._reused(out), trajectory.actor_state, report)

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
