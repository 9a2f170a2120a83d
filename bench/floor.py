"""The physical floor of an iteration on a GPU: what its launches, bytes and flops take at the very least.

Formulae, for R = T * B rows per iteration and E epochs, the network's linear layers i x o, F = 2 * sum of i * o:

    launches   kernels, copies and fills of the captured iteration, each LAUNCH_S after the one before
    bytes      R * (2 * state + (1 + E) * row): every step reads and writes the states of the environments and writes a
               row, every epoch reads each row once; a row is 4 * (observation + ROW_NUMBERS) bytes
    flops      R * (F + E * (3 F - F_input)): a forward pass to act; per epoch one more, the gradients of weights and
               those of inputs, but for the layers F_input that read the observation

The three can overlap, so that the floor is the largest of them. Activations, sorting, the environments' own arithmetic
and the optimizer are left out: they could stay on the chip.
"""

from collections.abc import Sequence
from typing import NamedTuple

LAUNCH_S = 1e-6
"""Assumed: from the start of a kernel in a CUDA graph to that of the next, which depends on it."""
ROW_NUMBERS = 6
"""Float32 beside the observation: action, its log-probability, value, reward, advantage, value target."""


class Gpu(NamedTuple):
    """Peaks by the manufacturer's data sheet, without sparsity."""

    bytes_per_s: float
    tf32_flops_per_s: float
    float32_flops_per_s: float


GPUS = {
    "H200": Gpu(4.8e12, 494.5e12, 67e12),
    "H100 PCIe": Gpu(2.0e12, 378e12, 51e12),
    "H100": Gpu(3.35e12, 494.5e12, 67e12),  # SXM, "NVIDIA H100 80GB HBM3"
}
"""By a part of the device's name; the first that fits."""


class Floor(NamedTuple):
    """Seconds of one iteration."""

    launches_s: float
    bytes_s: float
    flops_s: float

    @property
    def seconds(self) -> float:
        """The largest."""
        return max(self)


def flops(rows: int, epochs: int, layers: Sequence[Sequence[int]], observation_size: int) -> float:
    """Of one iteration; `layers` are (inputs, outputs), and those with `observation_size` inputs read observations."""
    forward = 2 * sum(i * o for i, o in layers)
    first = 2 * sum(i * o for i, o in layers if i == observation_size)
    return rows * (forward + epochs * (3 * forward - first))


def moved_bytes(rows: int, epochs: int, observation_size: int, state_bytes: float) -> float:
    """Of one iteration; `state_bytes` are those of one environment."""
    return rows * (2 * state_bytes + (1 + epochs) * 4 * (observation_size + ROW_NUMBERS))


def floor(kernels: int, num_bytes: float, num_flops: float, *, gpu: Gpu, tf32: bool) -> Floor:
    """What these take at least."""
    peak = gpu.tf32_flops_per_s if tf32 else gpu.float32_flops_per_s
    return Floor(kernels * LAUNCH_S, num_bytes / gpu.bytes_per_s, num_flops / peak)


def find(device_name: str | None) -> Gpu | None:
    """The peaks of a device; None if they are not known."""
    return next((gpu for name, gpu in GPUS.items() if name in (device_name or "")), None)
