"""IMPALA, Espeholt et al. 2018 (https://arxiv.org/abs/1802.01561): an actor-critic that corrects for old actors.

The networks and `act` are those of actor_critic.py. `prepare` weighs the trajectory by what the parameters of the
update would have done (V-trace), once; `loss` is the gradient of section 4.2. With one epoch of one minibatch this is
the paper's agent; more minibatches reuse the same targets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchpod.agent import Bound
from torchpod.algos.actor_critic import ActorCritic, ActorCriticConfig
from torchpod.bounds import bounded
from torchpod.ops.returns import vtrace
from torchpod.specs import EnvSpec
from torchpod.types import FIRST, LAST, Batch, LossOutput, Trajectory


@dataclass(frozen=True)
class IMPALAConfig(ActorCriticConfig):
    """Defaults: section 5.1 and table D.1 of the paper, for small networks."""

    lambda_: float = bounded(1.0, least=0, most=1)
    """Multiplies the weights c of V-trace (remark 2 of the paper): below 1, values far ahead count less."""
    rho_clip: float = bounded(1.0, least=0)
    """Of the importance weights rho in the temporal differences: which policy's values are learned."""
    c_clip: float = bounded(1.0, least=0)
    """Of the weights c of V-trace, at most rho_clip: how fast values are learned."""


class IMPALA(ActorCritic):
    """See the module."""

    max_lag = None

    def __init__(self, spec: EnvSpec, config: IMPALAConfig = IMPALAConfig()) -> None:
        super().__init__(spec, config)
        if config.rho_clip < config.c_clip:
            raise ValueError(f"rho_clip={config.rho_clip:g} must be at least c_clip={config.c_clip:g}; raise it.")
        for name in ("discount", "lambda_", "rho_clip", "c_clip", "value_coefficient", "entropy_coefficient"):
            self.hyperparameter(name, getattr(config, name))

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """V-trace targets and policy advantages; resets get weight 0."""
        t, out = trajectory.timestep, trajectory.output
        policy, value = self._current(trajectory)
        log_prob, _ = self.head.log_prob(policy, out.action)
        target, advantage = vtrace(
            log_prob - self._said("action_log_prob", trajectory),
            self._reward(t.reward[1:]),
            t.discount[1:] * self.discount,
            t.step_type[1:] == LAST,
            value[:-1],
            value[1:],
            lambda_=self.lambda_,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        return self._batch(trajectory, advantage, target, value[:-1])

    def _current(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Policy output `[T, B, A]` and value `[T + 1, B]` of the parameters that are to be updated."""
        if self.reuse_forward:  # they are those that acted
            forward = trajectory.output.extras["forward"]
            return forward["policy"], torch.cat([forward["value"], self._bootstrap(trajectory)[None]])
        t = trajectory.timestep
        policy, value = self._sequence(t.observation, t.step_type == FIRST, trajectory.actor_state)
        return policy[:-1], value

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """`-log pi(a|s) A + c_v (V - v)^2 / 2 - c_e H`, section 4.2 of the paper."""
        return self._policy_gradient(batch)
