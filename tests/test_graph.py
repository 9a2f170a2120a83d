import contextlib
import gc

import pytest
import torch

from torchpod.compile import Compiler
from torchpod.graph import Replay


def test_a_state_that_moves_its_own_leaves_around():
    """The next state is made of the old one's tensors, swapped, viewed and kept: each is read before it is written."""

    def rotate(state):
        a, b, c, kept = state
        return (b, c.flip(0), a[:], kept), a.sum()

    start = tuple(torch.arange(3.0) + 10 * i for i in range(4))
    replay, want = Replay(rotate, start, capture=False), start
    for _ in range(3):
        replay()
        want = tuple(x.clone() for x in rotate(want)[0])
        assert all(torch.equal(x, y) for x, y in zip(replay.state, want, strict=True))


def test_what_is_kept_stays_until_the_next_is():
    replay = Replay(
        lambda x: ((x[0] + 1, x[1]), ()), (torch.zeros(3), torch.ones((), dtype=torch.int64)), capture=False
    )
    kept = replay.keep()
    replay()
    assert kept[0].tolist() == [0, 0, 0] and replay.state[0].tolist() == [1, 1, 1]
    replay.load(kept)
    kept[0].add_(5)  # a copy of its own
    assert replay.state[0].tolist() == [0, 0, 0] and replay.keep() is kept and kept[0].tolist() == [0, 0, 0]


class FakeCuda:
    """Notes what a capture does with devices and streams."""

    def __init__(self, monkeypatch):
        self.log, self.streams, self.priorities = [], 0, []
        self.here = "default"
        for name in ("Stream", "CUDAGraph", "current_stream", "device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, priority):
        self.streams += 1
        self.priorities.append(priority)
        return FakeStream(f"stream {self.streams}", self.log)

    def current_stream(self):
        return FakeStream(self.here, self.log)

    def CUDAGraph(self):
        log = self.log

        class Graph:
            def replay(self):
                log.append("replay")

        return Graph()

    @contextlib.contextmanager
    def device(self, device):
        self.log.append(f"on {device}")
        yield

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here = self.here, stream.name
        yield
        self.here = before

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        self.log.append(f"capture on {stream.name}, {capture_error_mode}")
        yield


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_every_capture_is_on_a_stream_of_its_own_on_the_device_of_the_state(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def step(state):
        cuda.log.append(f"runs on {cuda.here}" + ", collecting no garbage" * (not gc.isenabled()))
        return state, state[0] + 1

    replays = [Replay(step, (torch.zeros(1),), capture=True, priority=p) for p in (-1, 0)]
    replays[0]()
    assert cuda.priorities == [-1, 0] and gc.isenabled()
    assert cuda.log == [
        line
        for stream in ("stream 1", "stream 2")
        for line in (
            "on cpu",
            f"{stream} waits for default",
            f"runs on {stream}",
            f"runs on {stream}",
            f"default waits for {stream}",
            f"capture on {stream}, thread_local",
            "runs on default, collecting no garbage",
        )
    ] + ["replay"]


@pytest.mark.parametrize("enabled", [True, False])
def test_programs_on_a_gpu_become_graphs_if_they_are_compiled(enabled):
    assert [Compiler(enabled).captures(torch.device(kind)) for kind in ("cpu", "cuda")] == [False, enabled]
