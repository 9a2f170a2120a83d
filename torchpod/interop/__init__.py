"""Doors to other libraries of the PyTorch world."""

from torchpod.interop.tensordicts import to_tensordict, to_trajectory

__all__ = ["to_tensordict", "to_trajectory"]
