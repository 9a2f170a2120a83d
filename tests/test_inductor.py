import threading
import time

import torch

from torchpod import inductor
from torchpod.compile import Compiler


def test_slices_of_a_concatenation_are_those_of_its_pieces(monkeypatch):
    """Slices inside a piece, across pieces, from the end, along another axis, and of the whole."""
    seen = []
    skip = inductor._skip_cats

    def watched(graph):
        skip(graph)
        seen.append(sum(node.target is torch.ops.aten.cat.default for node in graph.nodes))

    monkeypatch.setattr(inductor, "_skip_cats", watched)

    def inside(a, b):
        c = torch.cat([a, b], -1)
        return c[:, 0:1] + 1.0, c[:, 1:3] * 2.0, c[:, 3:5] - 1.0

    def across(a, b):
        c = torch.cat([a, b], 1)
        return c[:, 2:4] + 1.0, c[:, :-1] + 1.0, c[:, -1:] + 1.0, c[1:2] + 1.0, c.exp()

    def promoted(a, b):
        return (torch.cat([a.long(), b.int()], -1)[:, 3:5] * 3_000_000_000,)

    a, b = 9 * torch.rand(4, 3), 9 * torch.rand(4, 2)
    for fn in (inside, across, promoted):
        for got, want in zip(Compiler(True)(fn)(a, b), fn(a, b), strict=True):
            torch.testing.assert_close(got, want)
    assert seen == [0, 1, 1]


def test_other_threads_get_on_while_a_kernel_runs():
    def slow(x):
        for _ in range(100):
            x = (x * 1.0001).sin()
        return x

    compiled, x = Compiler(enabled=True)(slow), torch.rand(2_000_000)
    compiled(x)
    began = time.perf_counter()
    compiled(x)
    alone, gaps = time.perf_counter() - began, []
    thread = threading.Thread(target=compiled, args=(x,))
    last = time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    assert max(gaps) < alone / 2
