"""Networks that compile without graph breaks and vmap over populations."""

from torchpod.nets.nets import CNN, MLP, Encoder, GRUCell, orthogonal

__all__ = ["CNN", "MLP", "Encoder", "GRUCell", "orthogonal"]
