from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.trees import outline, paths, reader, writer


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
    assert of((point, 3, [x])) == (3, 2, 3, 0, None, 3, 1)
    assert of((Point(x + 1, point.rest), 3, [x - 1])) == of((point, 3, [x]))
    more = point._replace(rest={**point.rest, "c": x})
    assert of((point, 3, [x])) not in {of((point, 3, [x, x])), of((point, 4, [x])), of((more, 3, [x]))}
