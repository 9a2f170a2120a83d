"""The captured iteration on a GPU; and, wherever the tests run, the same code uncaptured."""

from types import SimpleNamespace

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
        "different_integers_compiled_captured/8",
        "random_words_as_on_cpu/8",
        "host_syncs_per_replay/8",
    ]


def test_what_differs_and_what_waits_is_found():
    state = gpu.build("cpu", 8, compiled=False).init(0)
    other = state._replace(iteration=state.iteration + 1, episode_return=state.episode_return + 1)
    assert gpu.different_integers(state, state) == [] and gpu.different_integers(state, other) == [".iteration"]

    def event(name, start, end):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("cudaDeviceSynchronize", 0, 1),
        event("replay", 2, 9),
        event("cudaGraphLaunch", 3, 4),
        event("cudaStreamSynchronize", 4, 5),
        event("Memcpy DtoH (Device -> Pageable)", 10, 11),
        event("cudaDeviceSynchronize", 12, 13),
    ]
    assert gpu.waits(events) == ["cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)"]


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
