"""MinAtar, Young and Tian 2019 (https://arxiv.org/abs/1903.03176): five Atari games on a 10 x 10 grid."""

from torchpod.envs.minatar.asterix import Asterix
from torchpod.envs.minatar.breakout import Breakout
from torchpod.envs.minatar.freeway import Freeway
from torchpod.envs.minatar.seaquest import Seaquest
from torchpod.envs.minatar.space_invaders import SpaceInvaders

__all__ = ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"]
