"""Sebulba: host environments stepped by actor threads, and a learner that uses the same update as Anakin."""

from torchpod.sebulba.exchange import ActorError
from torchpod.sebulba.loop import Sebulba, SebulbaConfig
from torchpod.sebulba.program import train
from torchpod.sebulba.transfer import devices_of

__all__ = ["ActorError", "Sebulba", "SebulbaConfig", "devices_of", "train"]
