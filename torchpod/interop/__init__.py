"""Doors to other libraries of the PyTorch world."""

from torchpod.interop.policy import policy_module
from torchpod.interop.tensordicts import to_tensordict, to_trajectory

__all__ = ["policy_module", "to_tensordict", "to_trajectory"]
