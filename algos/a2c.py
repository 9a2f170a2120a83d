"""Advantage actor-critic, the synchronous form of Mnih et al. 2016 (https://arxiv.org/abs/1602.01783).

One plain policy-gradient step on each trajectory: run it with `algo.learner.num_epochs=1
algo.learner.num_minibatches=1`, as configs/algo/a2c.yaml does. Networks, `act`, advantages and loss: actor_critic.py.
"""

from dataclasses import dataclass

from torch import Tensor

from torchpod.agent import Bound
from torchpod.algos.actor_critic import ActorCritic, ActorCriticConfig
from torchpod.bounds import bounded
from torchpod.specs import EnvSpec
from torchpod.types import Batch, LossOutput, Trajectory


@dataclass(frozen=True)
class A2CConfig(ActorCriticConfig):
    """Defaults: the paper's n-step returns, n to the end of the unroll."""

    gae_lambda: float = bounded(1.0, least=0, most=1)
    """Of generalised advantages: 0 trusts the value function, 1 the rewards that were seen."""
    normalize_advantage: bool = False
    """Advantages of mean 0 and standard deviation 1, in each minibatch, over all ranks."""


class A2C(ActorCritic):
    """See the module."""

    max_lag = 0

    def __init__(self, spec: EnvSpec, config: A2CConfig = A2CConfig()) -> None:
        super().__init__(spec, config)
        self.standardise = ("advantage",) if config.normalize_advantage else ()
        for name in ("discount", "gae_lambda", "value_coefficient", "entropy_coefficient"):
            self.hyperparameter(name, getattr(config, name))

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """Advantages and value targets; resets get weight 0."""
        return self._batch(trajectory, *self._gae(trajectory, self.gae_lambda))

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Section 4 of the paper."""
        return self._policy_gradient(batch)
