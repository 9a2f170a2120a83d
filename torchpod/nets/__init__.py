"""Networks that compile without graph breaks and vmap over populations."""

from torchpod.nets.heads import Head, make_head
from torchpod.nets.moments import ObservationNormalizer, RunningMoments
from torchpod.nets.nets import CELLS, CNN, MLP, Encoder, GRUCell, LSTMCell, choose_torso, make_torso, orthogonal

__all__ = [
    "CELLS",
    "CNN",
    "MLP",
    "Encoder",
    "GRUCell",
    "Head",
    "LSTMCell",
    "ObservationNormalizer",
    "RunningMoments",
    "choose_torso",
    "make_head",
    "make_torso",
    "orthogonal",
]
