"""MemoryChain: remember what was shown at the start. "Memory length" of bsuite, a stylised T-maze.

Osband et al. 2020, "Behaviour suite for reinforcement learning" (https://arxiv.org/abs/1908.03568), appendix
A. Step for step the episodes are those of bsuite's own code, which shows the context in the first two
observations, not in the first alone as the paper says.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Array, Discrete, EnvSpec


class MemoryChainState(NamedTuple):
    """One episode."""

    context: Tensor
    """`[B, num_bits]` int64, 0 or 1: what to remember."""
    query: Tensor
    """`[B]` int64: which of the bits will be asked for."""
    num_steps: Tensor
    """`[B]` int64, steps taken."""


class MemoryChain(TensorEnv):
    """Only the last action of an episode counts: reward 1 if it equals the bit that is asked for, else -1.

    Observation `[B, 2 + num_bits]`: the time left, falling from 1 to 0; the index of the bit that is asked
    for, shown before the last action and 0 till then; the bits as -1 or 1, shown in the first two
    observations and 0 afterwards. Actions: 0 and 1. An episode has `memory_length` + 1 steps. With
    `memory_length` > 1 no policy without memory gets more than 0 on average.
    """

    def __init__(self, memory_length: int = 8, num_bits: int = 1) -> None:
        at_least(1, memory_length=memory_length, num_bits=num_bits)
        self.memory_length, self.num_bits = memory_length, num_bits
        self.spec = EnvSpec("memory_chain", observation=Array((2 + num_bits,)), action=Discrete(2))

    def reset(self, keys: Tensor) -> MemoryChainState:
        """Fair bits, and one of them to ask for."""
        words = random.bits(keys, self.num_bits + 1)
        query = random.to_integer(words[..., 0], self.num_bits)
        return MemoryChainState(random.to_integer(words[..., 1:], 2), query, torch.zeros_like(query))

    def transition(
        self, state: MemoryChainState, action: Tensor, keys: Tensor
    ) -> tuple[MemoryChainState, Tensor, Tensor]:
        """Counts; at the end compares the action with the bit."""
        over = state.num_steps >= self.memory_length
        bit = state.context.gather(-1, state.query[..., None])[..., 0]
        outcome = torch.where(action == bit, 1.0, -1.0)
        return state._replace(num_steps=state.num_steps + 1), torch.where(over, outcome, 0.0), over

    def observe(self, state: MemoryChainState) -> Tensor:
        """Time left, query, context."""
        clock = (state.num_steps - 1).clamp(min=0)  # 0 twice: the first two observations are the same
        query = torch.where(clock == self.memory_length - 1, state.query, 0)
        context = torch.where((clock == 0)[..., None], 2 * state.context - 1, 0)
        head = torch.stack([1 - clock / self.memory_length, query], -1)
        return torch.cat([head, context], -1)
