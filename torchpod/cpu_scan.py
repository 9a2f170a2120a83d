"""Discounted sums in a CPU program are one operator: see ops/returns.py, which asks for it, and cpu_scan.cpp."""

import functools

from torch.fx import GraphModule

from torchpod.gxx import library


@functools.cache
def load() -> None:
    """Compiles the operator, once per machine, and loads it."""
    library("cpu_scan.cpp", "-ftree-loop-vectorize", "-ffp-contract=fast")


def load_if_called(module: GraphModule) -> None:
    """Loads the operator if a graph calls it."""
    if any("torchpod.discounted_sum" in str(node.target) for node in module.graph.nodes):
        load()
