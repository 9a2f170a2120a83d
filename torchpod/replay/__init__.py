"""Replay: what was seen is kept on the device, and learned from again."""

from torchpod.replay.buffer import Priorities, ReplayBuffer, ReplayConfig, Sample
from torchpod.replay.transitions import transitions

__all__ = ["Priorities", "ReplayBuffer", "ReplayConfig", "Sample", "transitions"]
