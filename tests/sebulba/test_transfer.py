"""Copies between host and devices, and which devices a rank has."""

import itertools
import re

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.sebulba.transfer import Handed, Port, Static, devices_of, hand_over, take

CPU = torch.device("cpu")


def tree():
    return {"a": torch.rand(3, 2), "b": (torch.randint(9, (4,)), torch.rand(2) > 0.5)}


def assert_equal(a, b):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), a, b)


def test_what_was_uploaded_stays_while_the_staging_memory_is_used_again():
    port, sent = Port(CPU), [tree() for _ in range(3)]
    there = [port.upload(x) for x in sent]
    for x, y in zip(sent, there, strict=True):
        assert_equal(x, y)
        assert x["a"].data_ptr() != y["a"].data_ptr()


def test_a_tree_is_uploaded_as_one_copy_whatever_its_types_and_sizes():
    sent = tree() | {
        "empty": torch.rand(0, 3),
        "one": torch.tensor(7),
        "transposed": torch.rand(3, 5, dtype=torch.float64).T,
        "repeated": torch.rand(4, 1).expand(4, 6),
    }
    port = Port(CPU)
    for _ in range(2):
        there = port.upload(sent)
        assert_equal(there, sent)
        leaves = pytree.tree_leaves(there)
        assert len({x.untyped_storage().data_ptr() for x in leaves}) == 1
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in leaves)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all(x.storage_offset() * x.element_size() % 256 == 0 for x in leaves)


def test_an_image_with_its_channels_moved_is_uploaded_as_it_lies_in_memory():
    image = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8).movedim(1, -1)
    port = Port(CPU)
    for _ in range(2):
        there = port.upload({"image": image})["image"]
        assert torch.equal(there, image) and there.stride() == image.stride()


@pytest.mark.parametrize("other", [torch.zeros(3, dtype=torch.int64), torch.zeros(1)])
def test_what_a_copy_would_convert_or_broadcast_is_refused(other):
    port = Port(CPU)
    port.upload({"reward": torch.zeros(3)})
    told = re.escape(f"a tensor is {other.dtype} {[*other.shape]}, and was torch.float32 [3] in the first tree.")
    with pytest.raises(TypeError, match=told):
        port.upload({"reward": other})


def test_a_download_is_valid_until_the_next():
    port, first, second = Port(CPU), tree(), tree()
    here = port.download(first)
    assert_equal(here, first)
    port.download(second)
    assert_equal(here, second)


def test_a_static_function_sees_every_new_argument_and_its_results_stay():
    def fn(scale, tensors):
        return pytree.tree_map(lambda x: x * scale, tensors)

    two = torch.tensor(2.0)
    static, results, wanted = Static(fn, (two, tree()), capture=False), [], []
    for scale in (two, two, torch.tensor(3.0), torch.tensor(3.0)):
        tensors = tree()
        results.append(static(scale, tensors))
        wanted.append(fn(scale, tensors))
    assert_equal(results, wanted)


def test_a_static_function_knows_its_arguments_by_their_names():
    first = {"scale": torch.tensor(2.0), "x": torch.rand(3)}
    static = Static(lambda given: given["scale"] * given["x"], (first,), capture=False)
    later = {"x": torch.rand(3), "scale": torch.tensor(3.0)}
    assert_equal(static(later), 3 * later["x"])


def test_on_the_cpu_nothing_is_copied_on_the_way_between_threads():
    tensors = tree()
    assert take(hand_over(tensors, CPU), CPU) is tensors


@pytest.mark.parametrize("index", [None, 0])
def test_what_is_on_this_gpu_already_waits_on_the_stream_that_needs_it(index, monkeypatch):
    told = []

    class Stream:
        """Of a GPU that is not there."""

        device = torch.device("cuda", 0)

        def wait_event(self, event):
            told.append((self, event))

    class OnGPU:
        """A tensor on it."""

        device = torch.device("cuda", 0)

        def record_stream(self, stream):
            told.append((stream, self))

        def to(self, device, non_blocking):
            return self

    mine, other = Stream(), Stream()
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: mine)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: other)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: pytest.fail("it went to another stream"))
    x = OnGPU()
    assert take(Handed([x], "event"), torch.device("cuda", index)) == [x]
    assert set(told) == {(mine, "event"), (mine, x)}


@pytest.mark.parametrize(
    ("split", "size", "want"),
    [
        ("1:1", 1, [([0], 1)]),
        ("1:3", 3, [([0], 1), ([0], 2), ([0], 3)]),
        ("2:4", 4, [([0], 2), ([0], 3), ([1], 4), ([1], 5)]),
        ("6:2", 2, [([0, 1, 2], 6), ([3, 4, 5], 7)]),
    ],
)
def test_every_rank_has_a_gpu_to_learn_on_and_its_share_of_those_that_act(split, size, want):
    for rank, (actors, learner) in enumerate(want):
        got = devices_of(split, rank, size)
        assert got == ([torch.device("cuda", i) for i in actors], torch.device("cuda", learner))


@pytest.mark.parametrize(
    ("split", "size", "message"),
    [
        ("3", 1, "loop.split=3 is not of the form A:L, e.g. 1:3"),
        ("0:2", 2, "loop.split=0:2 is not of the form A:L"),
        ("a:b", 2, "loop.split=a:b is not of the form A:L"),
        ("1:3", 2, "has 3 learners per host, and this run 2 rank.* torchrun --nproc-per-node=3"),
        ("2:3", 3, "loop.split=2:3: one number must be a multiple of the other"),
    ],
)
def test_a_split_that_cannot_be_is_refused(split, size, message):
    with pytest.raises(ValueError, match=message):
        devices_of(split, 0, size)
