"""One iteration as a replayable program: static buffers, and on CUDA one graph.

`Replay(fn, state)` owns a copy of `state`. A call runs `fn(state) -> (state, metrics)` and copies the result back into
the same memory. On CUDA the run, if all of it is compiled, is captured once and then replayed: nothing returns to
Python between the first environment step and the last optimizer step. On CPU the very same code runs uncaptured, from
the first call on.
From then on cuDNN takes algorithms that add in one order, in the whole process, so that two runs are equal to the bit.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchpod.trees import copy, reader
from torchpod.types import Tree


class Replay:
    """See the module.

    Args:
      fn: same shapes out as in. It may write to leaves of the state, which it then returns, and to memory of its own,
        if a second run from the same state writes the same.
      state: where to start; copied.
      capture: use a CUDA graph.
      capturable: asked after the first run, whether that can be.
      priority: of the kernels that are captured; of two -1 is first.

    Attributes:
      state: where it stands; overwritten in place by every call.
      capture_s: seconds that the capture took, without compilation and warm-up before it; 0 if there was none.
    """

    def __init__(
        self,
        fn: Callable[[Tree], tuple[Tree, Tree]],
        state: Tree,
        *,
        capture: bool,
        capturable: Callable[[], bool] = lambda: True,
        priority: int = 0,
    ) -> None:
        self._fn, self._leaves = fn, reader(state)
        self.state = pytree.tree_map(torch.clone, state)
        self._to = self._leaves(self.state)
        self._own = {x.untyped_storage().data_ptr() for x in self._to}
        self._kept: Tree = None
        if any(x.is_cuda for x in self._to):
            torch.backends.cudnn.deterministic = True
        self.metrics: Tree = None
        self._graph: Any = None
        self.capture_s = 0.0
        if not capture:
            return
        with torch.cuda.device(pytree.tree_leaves(state)[0].device):
            # A stream of its own, kept: cuBLAS has one workspace per stream, and graphs that share one must not run at
            # the same time. (torch's default stream for captures is one per process, on whatever device came first.)
            self._stream = torch.cuda.Stream(priority=priority)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # compilation, and the lazy set-up of libraries, must not happen during capture
                    fn(pytree.tree_map(torch.clone, self.state))
            torch.cuda.current_stream().wait_stream(self._stream)
            if not capturable():
                return
            began = time.perf_counter()
            self._graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.disable()  # garbage may wait for the device when it goes (a ring in memory of the host: memory.py)
            try:
                with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._run()
            finally:
                if collects:
                    gc.enable()
            self.capture_s = time.perf_counter() - began

    def __call__(self) -> Tree:
        """One iteration. Returns its metrics: copy them before the next call overwrites them."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        return self.metrics

    def load(self, state: Tree) -> None:
        """Sets the state, in place. A leaf of the new state may be (a view of) any leaf of the old one."""
        moved = [(a, b) for a, b in zip(self._to, self._leaves(state), strict=True) if a is not b]
        if moved:
            to, given = zip(*moved, strict=True)
            copy([x.clone() if x.untyped_storage().data_ptr() in self._own else x for x in given], to)

    def keep(self) -> Tree:
        """A copy of the state, which the next `keep` overwrites."""
        if self._kept is None:
            self._kept = pytree.tree_map(torch.clone, self.state)
        else:
            copy(self._to, self._leaves(self._kept))
        return self._kept

    def _run(self) -> None:
        state, self.metrics = self._fn(self.state)
        self.load(state)
