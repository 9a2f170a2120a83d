"""Specs that no network, statistic or ring could do anything with are refused."""

import re

import numpy as np
import pytest
import torch

from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete


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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Array(2), "shape=2 must be a tuple of sizes, integers of at least 0, e.g. (2,)."),
        (lambda: Array((2, -1)), "shape=(2, -1) must be a tuple of sizes"),
        (lambda: Array((2,), np.float32), "dtype=<class 'numpy.float32'> must be a dtype of torch's, e.g. torch.float"),
        (lambda: Box(3, -1, 1), "shape=3 must be a tuple of sizes, integers of at least 0, e.g. (3,)."),
        (lambda: Box((3,), -1, 1, "float32"), "dtype='float32' must be a dtype of torch's"),
        (lambda: Discrete((3,)), "Discrete needs an integer, at least one value, not num_values=(3,)."),
        (lambda: Discrete(2, int), "dtype=<class 'int'> must be a dtype of torch's"),
        (lambda: MultiDiscrete(4), "nvec=4 must be a tuple of numbers of values, integers of at least 1, e.g. (4,)."),
        (lambda: MultiDiscrete(np.array([2, 3])), "nvec=array([2, 3]) must be a tuple of numbers of values"),
        (lambda: MultiDiscrete(()), "MultiDiscrete needs at least one integer, not nvec=(), e.g. (2,)."),
        (lambda: MultiDiscrete((2, 0)), "nvec=(2, 0) must be a tuple of numbers of values, integers of at least 1"),
        (
            lambda: EnvSpec("b", Array((2,)), Discrete(3), "20"),
            "max_episode_steps='20' of b must be an integer of at least 1, or None for no limit.",
        ),
        (
            lambda: EnvSpec("b", {"a": (2,)}, Discrete(3)),
            "observation['a'] of b must be an Array, Box, Discrete or MultiDiscrete of torchpod.specs, or a dict",
        ),
        (lambda: EnvSpec("b", Array((2,)), 3), "action of b must be an Array, Box, Discrete or MultiDiscrete"),
        (
            lambda: EnvSpec("b", {"a": Array((2,))}, {"a": Discrete(3)}, groups=["a"]),
            "groups=['a'] of b must be a dict of how many agents each group has, at least 1",
        ),
    ],
)
def test_what_is_no_spec_is_refused_with_what_was_expected(make, told):
    with pytest.raises(ValueError, match=rf"^{re.escape(told)}"):
        make()


def test_sizes_may_be_integers_of_numpy():
    assert Array((np.int64(2),)).shape == torch.Size([2]) and Discrete(np.int32(3)).num_values == 3


def test_bounds_may_be_any_numbers():
    assert Box((2,), -1, np.float32(1)).bounded and Box((2,), 0, 0).bounded
    assert not Box((2,), 0.0).bounded and not Box((2,)).bounded
