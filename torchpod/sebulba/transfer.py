"""How tensors move between the host, the actors' devices and the learner's, without waiting where nobody must.

On CUDA every actor thread has a stream. What it hands to another thread comes with an event, which the other's stream
waits for; the host waits for an actor's stream only where an environment on the host needs the actions. On the CPU all
of this is nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.graph import Replay
from torchpod.trees import reader, writer
from torchpod.types import Tree

FIRST_PRIORITY = -1
"""The priority of what actors launch, before what a learner does."""

_ALIGNED = 256
"""Bytes at a multiple of which a tensor begins, as in memory of its own."""


class Handed(NamedTuple):
    """A tree that one thread made for another."""

    tree: Tree
    ready: Any
    """The CUDA event after which it is complete; None on the CPU."""

    def complete(self) -> bool:
        """Whether it is by now: who takes it does not wait."""
        return self.ready is None or self.ready.query()

    def wait(self, leaves: Sequence[Tensor], *devices: torch.device) -> None:
        """Has what follows on the current streams of these devices and of the tensors' wait, and keeps their memory.

        A copy to another GPU may begin with one on the tensor's own.
        """
        streams = {d: torch.cuda.current_stream(d) for d in {*devices, *(x.device for x in leaves)} if d.type == "cuda"}
        if self.ready is not None:
            for stream in streams.values():
                stream.wait_event(self.ready)
        for x in leaves:
            if x.device in streams:
                x.record_stream(streams[x.device])


def hand_over(tree: Tree, device: torch.device) -> Handed:
    """To be called where the tree was made, on the stream that made it."""
    if device.type != "cuda":
        return Handed(tree, None)
    return Handed(tree, torch.cuda.current_stream(device).record_event())


def take(handed: Handed, device: torch.device) -> Tree:
    """To be called where the tree is needed: on `device`, complete for what follows on the current stream there."""
    if handed.ready is None and device.type != "cuda":
        return handed.tree
    leaves = pytree.tree_leaves(handed.tree)
    # Of "cuda" the current one: tensors know which GPU they are on.
    here = torch.cuda.current_stream(device).device if device.type == "cuda" else device
    with contextlib.ExitStack() as streams:
        # torch copies to another GPU on the current stream of the tensor's own, where an update may be running.
        for other in {x.device for x in leaves if x.device.type == "cuda"} - {here}:
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(other)))
        handed.wait(leaves, here)
        return pytree.tree_map(lambda x: x.to(here, non_blocking=True), handed.tree)


class Port:
    """Copies trees of one structure between the host and a device, through pinned memory that is used again and again.

    Args:
      device: of the other side. On the CPU everything is copied all the same, which is how it is tested.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up: _Pinned | None = None
        self._down: _Pinned | None = None

    def upload(self, tree: Tree) -> Tree:
        """Starts a copy to the device, of the same strides.

        The last `upload` must be over: a `download` of what came after it says so.
        """
        if self._up is None:
            self._up = _Pinned(tree, self._device)
        self._up.fill(tree)
        there = torch.empty_like(self._up.memory, device=self._device).copy_(self._up.memory, non_blocking=True)
        return self._up.tree(self._up.leaves_in(there))

    def download(self, tree: Tree) -> Tree:
        """A copy on the host, valid until the next; waits for everything before it on the current stream."""
        if self._down is None:
            self._down = _Pinned(tree, self._device)
        self._down.fill(tree)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._down.tree(self._down.leaves)


class _Pinned:
    """One piece of memory of the host for trees like one, pinned if the other side is a GPU."""

    def __init__(self, example: Tree, device: torch.device) -> None:
        self._read, self.tree, self._places, end = reader(example), writer(example), [], 0
        for x in self._read(example):
            dense = torch.empty_like(x, device="meta")
            self._places.append((x.dtype, x.shape, dense.stride(), end // x.element_size()))
            end = -(-(end + dense.nbytes) // _ALIGNED) * _ALIGNED
        self.memory = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.leaves = self.leaves_in(self.memory)

    def leaves_in(self, memory: Tensor) -> list[Tensor]:
        """The tensors of a tree whose bytes these are."""
        typed = {dtype: memory.view(dtype) for dtype, *_ in self._places}
        return [typed[dtype].as_strided(shape, stride, begin) for dtype, shape, stride, begin in self._places]

    def fill(self, tree: Tree) -> None:
        """Starts a copy of a tree.

        Raises:
          TypeError: if it has other types or shapes than the example, which a copy would convert or broadcast.
        """
        for to, x in zip(self.leaves, self._read(tree), strict=True):
            if to.dtype is not x.dtype or to.shape != x.shape:
                raise TypeError(
                    f"a tensor is {x.dtype} {list(x.shape)}, and was {to.dtype} {list(to.shape)} in the first tree."
                )
            to.copy_(x, non_blocking=True)


class Static:
    """A pure function with its own copy of all arguments, compiled here and on CUDA captured as a graph.

    Args:
      fn: of trees of tensors.
      args: to begin with.
      capture: use a CUDA graph.
      capturable: asked after the first run, whether that can be.
      priority: as of `Replay`.
    """

    def __init__(
        self,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...],
        *,
        capture: bool,
        capturable: Callable[[], bool] = lambda: True,
        priority: int = 0,
    ) -> None:
        if not capture:
            fn(*pytree.tree_map(torch.clone, args))  # compiles, which no actor's thread may; nothing but time is lost
        self._replay = Replay(
            lambda own: (own, fn(*own)), args, capture=capture, capturable=capturable, priority=priority
        )
        self._leaves = reader(args)  # by their names, for an update may hand on dicts in another order
        self._own = self._leaves(self._replay.state)
        self._given: tuple[Tensor | None, ...] = (None,) * len(self._own)
        self._result: tuple[Any, Any] | None = None

    def __call__(self, *args: Tree) -> Tree:
        """The same as `fn`. An argument that is the tensor of the last call is taken to be as it was."""
        given = self._leaves(args)
        for to, x, before in zip(self._own, given, self._given, strict=True):
            if x is not before:
                to.copy_(x, non_blocking=True)
        self._given = given
        result = self._replay()
        if self._result is None:
            self._result = reader(result), writer(result)
        read, write = self._result
        return write([x.clone() for x in read(result)])


def on(device: torch.device) -> Any:
    """A context in which CUDA means this GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """What is launched within goes to a new stream of the device, if it is a GPU, before what a learner launches."""
    if device.type != "cuda":
        yield
        return
    with on(device), torch.cuda.stream(torch.cuda.Stream(priority=FIRST_PRIORITY)):
        yield


def wait_for(*devices: torch.device) -> None:
    """Until everything that was launched on these devices is done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def devices_of(split: str, local_rank: int, local_size: int) -> tuple[list[torch.device], torch.device]:
    """Which GPUs of its host a rank acts on, and which one it learns on.

    Args:
      split: "A:L". The first A GPUs act, the next L learn, one rank each.
      local_rank: among the ranks of this host.
      local_size: how many there are.

    Raises:
      ValueError: if actors and learners cannot be matched.
    """
    left, colon, right = split.partition(":")
    if not (colon and left.isdecimal() and right.isdecimal() and int(left) > 0 and int(right) > 0):
        raise ValueError(f"loop.split={split} is not of the form A:L, e.g. 1:3.")
    num_actors, num_learners = int(left), int(right)
    if num_learners != local_size:
        raise ValueError(
            f"loop.split={split} has {num_learners} learners per host, and this run {local_size} rank(s); start it "
            f"with torchrun --nproc-per-node={num_learners}."
        )
    if max(num_actors, num_learners) % min(num_actors, num_learners):
        raise ValueError(f"loop.split={split}: one number must be a multiple of the other.")
    if num_actors >= num_learners:
        each = num_actors // num_learners
        indices = range(local_rank * each, (local_rank + 1) * each)
    else:
        indices = [local_rank * num_actors // num_learners]
    return [torch.device("cuda", i) for i in indices], torch.device("cuda", num_actors + local_rank)
