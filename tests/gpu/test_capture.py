"""The captured iteration on a GPU; and, wherever the tests run, the same code uncaptured."""

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.bench import gpu
from torchpod.graph import Replay


@pytest.fixture(scope="module")
def small_suite():
    return gpu.correctness("cpu", num_envs=8)


def test_uncaptured_program_on_cpu_equals_eager_and_compiled(small_suite):
    rows, failures = small_suite
    assert failures == []
    assert [row.name for row in rows] == [
        "difference_eager_compiled/8",
        "difference_compiled_captured/8",
        "host_syncs_per_replay/8",
    ]


def test_a_replay_keeps_its_buffers_where_they_are():
    anakin = gpu.build("cpu", 8, compiled=False)
    replay = Replay(anakin.iterate, anakin.init(0), capture=False)
    before = [leaf.data_ptr() for leaf in pytree.tree_leaves(replay.state)]
    replay()
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(replay.state)] == before
    assert int(replay.state.iteration) == 1


@pytest.mark.gpu
def test_captured_iteration_on_cuda_equals_compiled_and_eager_without_host_syncs():
    rows, failures = gpu.correctness("cuda", num_envs=1024)
    assert failures == [], rows


@pytest.mark.gpu
def test_captured_run_resumes_bit_for_bit():
    anakin = gpu.build("cuda", 256, compiled=True)
    state = anakin.init(0)
    through = Replay(anakin.iterate, state, capture=True)
    for _ in range(4):
        through()
    half = Replay(anakin.iterate, state, capture=True)
    half()
    half()
    rest = Replay(anakin.iterate, pytree.tree_map(torch.clone, half.state), capture=True)
    rest()
    rest()
    for a, b in zip(pytree.tree_leaves(through.state), pytree.tree_leaves(rest.state), strict=True):
        assert torch.equal(a, b)
