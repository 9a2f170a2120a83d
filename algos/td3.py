"""Twin delayed DDPG: Fujimoto et al. 2018 (https://arxiv.org/abs/1802.09477). Read ddpg.py first.

Three things differ: two critics, of which the smaller counts; a policy and targets that wait for the critics; and noise
on the action that the targets are asked about.
"""

from dataclasses import dataclass

from torch import Tensor

from torchpod import random
from torchpod.agent import Bound
from torchpod.algos.ddpg import DDPG, DDPGConfig
from torchpod.bounds import bounded
from torchpod.specs import EnvSpec
from torchpod.types import Batch, Trajectory, Tree


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """Noise, its clip and the delay are those of section 6.1; layers of 256 and no random start, unlike there."""

    policy_interval: int = 2
    """Updates of the critics per update of the policy and of all targets."""
    target_noise_std: float = bounded(0.2, least=0)
    """Standard deviation of the noise on the target's action, in units of half the action range."""
    target_noise_clip: float = bounded(0.5, least=0)
    """The noise on the target's action is clipped to [-target_noise_clip, target_noise_clip]."""


class TD3(DDPG):
    """See the module."""

    num_critics = 2

    def __init__(self, spec: EnvSpec, config: TD3Config = TD3Config()) -> None:
        super().__init__(spec, config)
        if config.policy_interval < 1:
            raise ValueError(f"policy_interval={config.policy_interval} must be at least 1.")
        self.optimizer_intervals, self.target_interval = {"policy": config.policy_interval}, config.policy_interval
        self.hyperparameter("target_noise_std", config.target_noise_std)
        self.hyperparameter("target_noise_clip", config.target_noise_clip)

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """As DDPG, and the noise of `next_action`, drawn here: among gradients it is slower to compile and to run."""
        noise = self.target_noise_std * random.normal(keys, self.num_actions)
        noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
        return Batch(super().prepare(trajectory, keys).steps | {"noise": noise[None]})

    def next_action(self, steps: dict[str, Tree], target: Bound) -> Tensor:
        """That of the target policy, smoothed: section 5.3 of the paper."""
        return (super().next_action(steps, target) + steps["noise"]).clamp(-1.0, 1.0)
