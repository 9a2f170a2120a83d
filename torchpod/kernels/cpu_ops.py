"""Operators of ops/ that are C++ in a CPU program; whether they are asked for is decided there."""

import functools

from torch.fx import GraphModule

from torchpod.kernels.gxx import need

FILES = {
    "torchpod.discounted_sum": ("cpu_scan.cpp", "-ftree-loop-vectorize", "-ffp-contract=fast"),
    "torchpod.nearest": ("cpu_nearest.cpp", "-fno-math-errno", "-ffp-contract=off"),
}
"""Per operator, what it is compiled from and with."""


@functools.cache
def load(name: str) -> None:
    """Compiles an operator, once per machine, and has it loaded for the next program."""
    need(*FILES[name])


def load_those_called(module: GraphModule) -> None:
    """By a graph."""
    targets = {str(node.target) for node in module.graph.nodes}
    for name in FILES:
        if any(name in target for target in targets):
            load(name)
