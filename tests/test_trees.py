from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.trees import contiguous, outline, paths, reader, writer


class Point(NamedTuple):
    x: torch.Tensor
    rest: dict


def make(offset):
    tensors = [torch.tensor(offset + i) for i in range(5)]
    tree = ([tensors[0]], Point(tensors[1], {"b": tensors[2], "a": (tensors[3], None, 7)}), (), tensors[4])
    return tree, tensors


def test_tensors_come_in_the_order_of_their_places():
    tree, tensors = make(0)
    assert paths(tree) == ["[0][0]", "[1].x", "[1].rest['b']", "[1].rest['a'][0]", "[3]"]
    assert all(a is b for a, b in zip(reader(make(10)[0])(tree), tensors, strict=True))


def test_a_tree_is_put_together_from_other_tensors_with_the_same_constants():
    want, tensors = make(10)
    got = writer(make(0)[0])(tensors)
    assert got == want and isinstance(got[1], Point)


def test_what_torch_returns_several_of_is_a_node():
    tree = {"most": torch.tensor([[1.0, 3.0]]).max(-1)}
    found = writer(tree)(reader(tree)(tree))["most"]
    assert type(found) is type(tree["most"]) and found.values == 3.0 and found.indices == 1


def test_another_tree_cannot_be_read():
    with pytest.raises(KeyError):
        reader({"a": torch.ones(1)})({"b": torch.ones(1)})


def test_a_node_of_another_kind_is_refused():
    @dataclass
    class Node:
        x: torch.Tensor

    pytree.register_dataclass(Node)
    with pytest.raises(TypeError, match="Node in a state, timestep or batch: use NamedTuples"):
        writer([Node(torch.ones(1)), torch.ones(1)])


def test_outlines_are_lengths_and_constants():
    x = torch.zeros(2)
    point = Point(x, {"a": x, "b": [x, (), None]})
    of = outline((point, 3, [x]))
    assert of((point, 3, [x])) == (3, 2, 3, 0, type(None), None, int, 3, 1)
    assert of((point, 3.0, [x])) != of((point, 3, [x]))
    assert of((Point(x + 1, point.rest), 3, [x - 1])) == of((point, 3, [x]))
    more = point._replace(rest={**point.rest, "c": x})
    assert of((point, 3, [x])) not in {of((point, 3, [x, x])), of((point, 4, [x])), of((more, 3, [x]))}


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (1, 1, 2), (0, 3), (2, 0, 3)])
def test_contiguous_means_the_strides_of_what_was_just_made(shape):
    made = torch.zeros(*shape, 5)
    for x in (made[..., 0], made.transpose(0, 1), made.expand(2, *made.shape)[:1], made):
        assert contiguous(x).stride() == torch.zeros(x.shape).stride()
        assert torch.equal(contiguous({"x": (x,)})["x"][0], x)
    member = torch.vmap(lambda x: contiguous(x[..., 0]))(torch.arange(12.0).view(2, 1, 6))
    assert member.tolist() == [[0.0], [6.0]]
