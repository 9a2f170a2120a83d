"""Batches of environments that share EnvPool's threads: its asynchronous mode, in an order that does not change."""

from typing import Any, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

_TOLD = ("reward", "steps_left", "terminated")
"""What a step says in its `info` that anybody here reads."""
_PARTS = 4
"""In which a batch comes, or fewer: the last with the first environments of the next batch. If a batch came in one, it
would often wait for all of the next; a part costs some 60 us (docs/design.md, section 5)."""


def handed_over(size: int) -> int:
    """How many environments EnvPool is to hand over at once, for batches of `size`: a divisor of that."""
    return min(part for part in range(1, size + 1) if size % part == 0 and _PARTS * part >= size)


class Stepped(NamedTuple):
    """What EnvPool says of one step of a batch, `[b, ...]`."""

    observation: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: dict[str, Any]


class Batches:
    """A pool of EnvPool's whose environments are stepped in `num` batches of neighbours, each when it is sent.

    In asynchronous mode EnvPool hands over whichever environments are done first. Here they are put where they belong:
    a batch has the same environments in the same order in every step, so that what is decided for them does not depend
    on how fast threads are, while all threads work on whatever has been sent.

    Args:
      pool: made with `batch_size = handed_over(num_envs / num)`, and reset; with one batch its steps are handed
        through.
      num_envs: of the pool.
      num: batches.
    """

    def __init__(self, pool: Any, num_envs: int, num: int) -> None:
        self._pool: Any = pool
        self._num, self.size = num, num_envs // num
        self._ids = np.arange(num_envs, dtype=np.int32).reshape(num, self.size)
        self._missing = [self.size] * num  # environments of each that are still to come
        self._leaves: list[list[np.ndarray]] = [[] for _ in range(num)]
        self._spec: Any = None

    def send(self, batch: int, action: Any) -> None:
        """Starts a step of one batch, whose last step has been received."""
        if self._num == 1:
            self._pool.send(action)
        else:
            self._missing[batch] = self.size
            self._pool.send(action, self._ids[batch])

    def recv(self, batch: int) -> Stepped:
        """Waits for the step of one batch; the arrays are new ones."""
        if self._num == 1:
            return Stepped(*self._pool.recv())
        while self._missing[batch]:
            self._receive()
        leaves, self._leaves[batch] = self._leaves[batch], []
        return pytree.tree_unflatten(leaves, self._spec)

    def close(self) -> None:
        """Lets go of the pool."""
        self._pool = None

    def _receive(self) -> None:
        """As many environments as EnvPool hands over at once, of any batches that were sent."""
        stepped = Stepped(*self._pool.recv())
        info = stepped.info
        leaves, self._spec = pytree.tree_flatten(stepped._replace(info={k: info[k] for k in _TOLD if k in info}))
        which, row = np.divmod(info["env_id"], self.size)
        counts = np.bincount(which, minlength=self._num)
        for batch in np.flatnonzero(counts):
            mine = slice(None) if counts[batch] == len(row) else which == batch  # all of it is not copied twice
            if not self._leaves[batch]:
                self._leaves[batch] = [np.empty((self.size, *x.shape[1:]), x.dtype) for x in leaves]
            for to, x in zip(self._leaves[batch], leaves, strict=True):
                to[row[mine]] = x[mine]
            self._missing[batch] -= counts[batch]
