"""DelayedChain: the first action decides what comes at the end.

The delayed chain MDPs of Oh et al. 2020, "Discovering reinforcement learning algorithms"
(https://arxiv.org/abs/2007.08794), appendix A, after the umbrella task of bsuite, Osband et al. 2020
(https://arxiv.org/abs/1908.03568).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, true_or_false
from torchpod.specs import Box, Discrete, EnvSpec
from torchpod.types import TimeStep


class Chain(NamedTuple):
    """What an environment keeps for life, each `[B]` int64. `DelayedChain.draw` makes chains."""

    length: Tensor
    """Steps of an episode, from `low` to `high`."""
    good: Tensor
    """0 or 1: the first action that is rewarded."""


class DelayedChainState(NamedTuple):
    """One episode in one chain."""

    chain: Chain
    num_steps: Tensor
    """`[B]` int64, steps taken."""
    choice: Tensor
    """`[B]` int64, the first action; 0 before it."""
    distractors: Tensor
    """`[B, num_distractors]` int64, 0 or 1."""


class DelayedChain(TensorEnv):
    """The last reward is 1 if the first action was the good one, else -1; all other actions do nothing.

    Observation `[B, 2 * (high + 1) + num_distractors]`: one-hot of the steps taken + (high + 1) * (the first action),
    then the distractors, fair bits that are drawn anew in every step. Actions: 0 and 1. Length and good action are
    drawn when an environment starts and stay for life.

    The variants of the paper: short (5 to 30), long (5 to 50), each also noisy, and state distraction (short, with 20
    distractors).

    Args:
      low: the shortest length of an episode.
      high: the longest length of an episode.
      noisy: every reward but the last is 1 or -1, equally likely, instead of 0.
      num_distractors: random bits in the observation.
      lifetime_seed: None: each environment draws its own chain; an integer: all have the chain of this seed.
    """

    def __init__(
        self,
        low: int = 5,
        high: int = 30,
        noisy: bool = False,
        num_distractors: int = 0,
        lifetime_seed: int | None = None,
    ) -> None:
        at_least(1, low=low, high=high)
        at_least(0, num_distractors=num_distractors, lifetime_seed=lifetime_seed or 0)
        true_or_false(noisy=noisy)
        if low > high:
            raise ValueError(f"low={low} is above high={high}; use a low of at most {high}.")
        self.low, self.high, self.noisy, self.lifetime_seed = low, high, noisy, lifetime_seed
        self.num_distractors = num_distractors
        width = 2 * (high + 1) + num_distractors
        self.spec = EnvSpec("delayed_chain", Box((width,), 0.0, 1.0), Discrete(2))

    def draw(self, keys: Tensor) -> Chain:
        """Chains, one per key `[B, 3]`; equal keys, equal chains."""
        words = random.bits(random.fold_in(keys, 0), 2)
        length = self.low + random.to_integer(words[..., 0], self.high - self.low + 1)
        return Chain(length, random.to_integer(words[..., 1], 2))

    def init(self, keys: Tensor, chain: Chain | None = None) -> tuple[Any, TimeStep]:
        """See `Env.init`.

        Args:
          keys: `[B, 3]`.
          chain: `[B]` each, the chains to live in; by default drawn.

        Raises:
          ValueError: if a part of `chain` has the wrong shape or values out of range.
        """
        if chain is None:
            return super().init(keys)
        for name, low, high in (("length", 1, self.high), ("good", 0, 1)):
            value = getattr(chain, name)
            if value.shape != keys.shape[:1] or not ((value >= low) & (value <= high)).all():
                raise ValueError(
                    f"chain.{name} must be {keys.shape[0]} integers from {low} to {high}, one per key; it is {value}."
                )
        return self.begin(self._start(chain, keys), keys)

    def reset(self, keys: Tensor) -> DelayedChainState:
        """A new life: a chain, and its first step."""
        seed = self.lifetime_seed
        return self._start(self.draw(keys if seed is None else random.key(seed, keys.device).expand_as(keys)), keys)

    def restart(self, state: DelayedChainState, keys: Tensor) -> DelayedChainState:
        """The first step of the same chain."""
        return self._start(state.chain, keys)

    def _start(self, chain: Chain, keys: Tensor) -> DelayedChainState:
        zero = torch.zeros_like(chain.length)
        return DelayedChainState(chain, zero, zero, self._bits(keys)[1])

    def transition(
        self, state: DelayedChainState, action: Tensor, keys: Tensor
    ) -> tuple[DelayedChainState, Tensor, Tensor]:
        """One step along the chain."""
        coin, distractors = self._bits(keys)
        choice = torch.where(state.num_steps == 0, action, state.choice)
        num_steps = state.num_steps + 1
        over = num_steps >= state.chain.length
        noise = (2 * coin - 1).float() if self.noisy else 0.0
        outcome = torch.where(choice == state.chain.good, 1.0, -1.0)
        return DelayedChainState(state.chain, num_steps, choice, distractors), torch.where(over, outcome, noise), over

    def observe(self, state: DelayedChainState) -> Tensor:
        """One-hot of step and choice, and the distractors."""
        index = state.num_steps + (self.high + 1) * state.choice
        one_hot = torch.arange(2 * (self.high + 1), device=index.device) == index[..., None]
        return torch.cat([one_hot, state.distractors], -1).float()

    def _bits(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Fair bits `[B]` and `[B, num_distractors]`, 32 per word; a restart and a transition draw the same."""
        num = 1 + self.num_distractors
        words = random.bits(keys, (num + 31) // 32)
        shifted = (words[..., None] >> torch.arange(32, device=keys.device)).flatten(-2)
        return shifted[..., 0] & 1, shifted[..., 1:num] & 1
