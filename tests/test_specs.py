"""Specs that no network, statistic or ring could do anything with are refused."""

import re

import numpy as np
import pytest
import torch

from torchpod.specs import Array, Box, Discrete, EnvSpec


@pytest.mark.parametrize(
    ("observation", "action", "told"),
    [
        (Array((0,)), Discrete(2), "observation of empty is of shape (0,)"),
        ({}, Discrete(2), "observation of empty is {}"),
        (
            {"a": Array((3,)), "b": Array((4, 0), torch.uint8)},
            Discrete(2),
            "observation['b'] of empty is of shape (4, 0)",
        ),
        ({"a": {"b": {}}}, Discrete(2), "observation['a']['b'] of empty is {}"),
        (Array((3,)), Box((0,), -1.0, 1.0), "action of empty is of shape (0,)"),
    ],
)
def test_what_holds_no_number_is_refused(observation, action, told):
    with pytest.raises(ValueError, match=re.escape(f"{told} and holds no number: leave such a part out")):
        EnvSpec("empty", observation, action)


def test_a_single_number_has_no_axis():
    assert EnvSpec("one", {"a": Array(())}, Discrete(1)).observation == {"a": Array(())}


@pytest.mark.parametrize(
    ("low", "high"),
    [(torch.tensor([-1.0, -2.0]), 1.0), (-1.0, np.ones(2)), (1.0, (2,)), (2.0, 1.0), (float("nan"), 1.0)],
)
def test_a_box_has_one_pair_of_bounds(low, high):
    with pytest.raises(
        ValueError, match=r"^Box\(shape, low, high\) needs two numbers, low <= high, .*Box\(shape, -1.0"
    ):
        Box((2,), low, high)


def test_bounds_may_be_any_numbers():
    assert Box((2,), -1, np.float32(1)).bounded and Box((2,), 0, 0).bounded
    assert not Box((2,), 0.0).bounded and not Box((2,)).bounded
