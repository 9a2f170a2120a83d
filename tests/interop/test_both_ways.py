"""Branches on data in a traced function: each row of answers is the one that plain Python gives."""

import enum

import pytest
import torch
from tensordict import TensorDict

from torchpod.interop.both_ways import MAX_BRANCHES, both_ways
from torchpod.kernels.inductor import trace


def direct(run):
    return run()


def nested(x):
    y = x * 2
    if y.sum() > 1:
        y = y + 1
        if x[0] > x[1]:
            return {"a": y.exp()}
        y = y * 3
    elif x.max() > 0:
        y = y - 1
    return {"a": y if x[1] < 0 else -y}


def writing(x):
    y = torch.zeros(2)
    y.view(-1).index_add_(0, torch.tensor([1]), x[:1])
    z = x.clone()
    if x.sum() > 0:
        z.mul_(5)
        y[0] += 1
    return {"a": y + z}


def counting(x):
    """Equal calls whose results are written to."""
    a, b = torch.zeros(2), torch.zeros(2)
    if x.sum() > 0:
        a.add_(x)
    b.add_(2 * x)
    return {"a": a * 10 + b}


def checking(x):
    if not x.isfinite().all():
        raise ValueError(f"x has {x.sum():.2f}")
    if (x < -100).any():
        raise ValueError("too low")
    return {"a": x.exp() if x.min() >= 0 else x}


@pytest.mark.parametrize("fn", [nested, writing, counting, checking])
def test_results_and_gradients_are_those_of_the_way_that_the_data_says(fn, seed):
    def both(x, ways):
        gradient = torch.func.grad(lambda x: ways(lambda: fn(x))["a"].square().sum())(x)
        return {"result": ways(lambda: fn(x))["a"], "gradient": gradient}

    program = trace(lambda x: both(x, both_ways), (torch.zeros(2),))[0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        x = torch.randn(2, generator=generator)
        expected = both(x, direct)
        for found, name in zip(program(x), expected, strict=True):
            torch.testing.assert_close(found, expected[name], msg=name)


def test_what_all_ways_compute_is_computed_once():
    def fn(x):
        scale = torch.ones(())
        loss = (x @ x).tanh()
        if x.sum() > 0:
            scale = scale * 2
        return {"loss": loss @ x, "scale": scale}

    def loss(x):
        out = both_ways(lambda: fn(x))
        return out["loss"].sum(), out["scale"]

    def whole(x):
        gradient, scale = torch.func.grad(loss, has_aux=True)(x)
        return {"gradient": gradient, "scale": scale}

    graph = trace(whole, (torch.ones(3, 3),))[0].graph
    assert sum("mm" in str(node.target) for node in graph.nodes) == 6  # two, and two derivatives of each
    assert sum("where" in str(node.target) for node in graph.nodes) == 1


def test_an_error_of_every_way_is_raised():
    def fn(x):
        if x.sum() > 0:
            raise ValueError("positive")
        raise ValueError("negative")

    with pytest.raises(ValueError, match="negative"):
        trace(lambda x: both_ways(lambda: fn(x)), (torch.ones(2),))


def key_of_nothing(x):
    return {}["loss"]


def raised_key_error(x):
    raise KeyError("loss")


def too_many_arguments(x):
    return key_of_nothing(x, x)


def not_written_yet(x):
    raise NotImplementedError("later")


def no_number(x):
    """A ValueError that no `raise` of this file makes."""
    return int("x")


def not_in_the_enumeration(x):
    """One that a `raise` of Python's own library makes."""
    return enum.Enum("Kind", "a")("b")


def other_batch_size(x):
    """A RuntimeError that a `raise` of tensordict makes."""
    return TensorDict({"x": x}, batch_size=[3])


@pytest.mark.parametrize("way", [True, False])
@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (key_of_nothing, KeyError),
        (raised_key_error, KeyError),
        (too_many_arguments, TypeError),
        (not_written_yet, NotImplementedError),
        (no_number, ValueError),
        (not_in_the_enumeration, ValueError),
        (other_batch_size, RuntimeError),
    ],
)
def test_a_mistake_in_one_way_is_raised(mistake, error, way):
    """And is not taken for a check, which would leave the other way's result."""

    def fn(x):
        return {"a": mistake(x) if bool(x.sum() > 0) == way else x}

    with pytest.raises(error):
        trace(lambda x: both_ways(lambda: fn(x)), (torch.ones(2),))


class TooLow(ValueError):
    """A user's own."""


def asserting(x):
    assert (x > -100).all(), "too low"


def raising_its_own(x):
    try:
        if (x < -100).any():
            raise TooLow
    finally:
        x.sum()


def raising_runtime_error(x):
    if (x < -100).any():
        raise RuntimeError("too low")


@pytest.mark.parametrize("check", [asserting, raising_its_own, raising_runtime_error])
def test_a_check_is_left_out(check):
    def fn(x):
        check(x)
        return {"a": x * 2}

    program = trace(lambda x: both_ways(lambda: fn(x)), (torch.ones(2),))[0]
    torch.testing.assert_close(program(torch.ones(2))[0], torch.full((2,), 2.0))


def test_an_error_of_torch_is_no_check():
    """A way that cannot be traced is not left out."""

    def fn(x):
        return {"a": x @ torch.ones(3) if x.sum() > 0 else x}

    with pytest.raises(RuntimeError, match="size mismatch|shapes cannot be multiplied|inconsistent|must match"):
        trace(lambda x: both_ways(lambda: fn(x)), (torch.ones(2),))


def test_ways_that_return_other_things_are_refused():
    with pytest.raises(RuntimeError, match="a branch on data returns other things than the other branch"):
        trace(lambda x: both_ways(lambda: {"a": x} if x.sum() > 0 else {"b": x}), (torch.ones(2),))


def test_too_many_branches_are_left_to_torch():
    def fn(x):
        return {"a": sum(x if x[i] > 0 else -x for i in range(MAX_BRANCHES + 1))}

    with pytest.raises(RuntimeError, match="data-dependent"):
        trace(lambda x: both_ways(lambda: fn(x)), (torch.ones(MAX_BRANCHES + 1),))
