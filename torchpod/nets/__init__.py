"""Networks that compile without graph breaks and vmap over populations."""

from torchpod.nets.moments import ObservationNormalizer, RunningMoments
from torchpod.nets.nets import CELLS, CNN, MLP, Encoder, GRUCell, LSTMCell, make_torso, orthogonal

__all__ = [
    "CELLS",
    "CNN",
    "MLP",
    "Encoder",
    "GRUCell",
    "LSTMCell",
    "ObservationNormalizer",
    "RunningMoments",
    "make_torso",
    "orthogonal",
]
