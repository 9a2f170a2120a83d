"""Functions that only call compiled ones: recorded, they give the same bits, and whatever cannot be recorded is not."""

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.envs import CartPole
from torchpod.kernels.cpu_calls import Calls
from torchpod.kernels.inductor import Compiled
from torchpod.kernels.recorded import Recorded
from torchpod.learner import LearnerConfig


@pytest.fixture
def runs(monkeypatch):
    """How many programs each call of C++ called."""
    numbers = []
    run = Calls.run

    def watched(self, *args):
        numbers.append(sum(call.program is not None for call in self._calls))
        return run(self, *args)

    monkeypatch.setattr(Calls, "run", watched)
    return numbers


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_calls_after_the_first_go_through_no_line_of_the_function(seed, runs):
    double = Compiled(lambda x: (2 * x, {"sum": x.sum()}), "double", 1)
    add = Compiled(lambda x, y: x + y, "add", 1)
    calls = []

    def fn(tree, rest):
        calls.append(None)
        twice, sums = double(tree["a"])
        four, _ = double(twice)
        return {"both": add(four, rest[0]), "sum": sums["sum"], "given": tree["a"], "again": four}, ("constant", twice)

    recorded = Recorded(fn)
    for i in range(4):
        a, b = numbers(seed + i, 5, 3), numbers(seed - i, 5, 3)
        result, (word, twice) = recorded({"a": a}, [b])
        before = a.clone(), b.clone()
        torch.testing.assert_close(result["both"], 4 * a + b)
        torch.testing.assert_close(result["sum"], a.sum())
        assert torch.equal(result["given"], a) and torch.equal(result["again"], 4 * a)
        assert word == "constant" and torch.equal(twice, 2 * a)
        result["both"].zero_()
        twice.zero_()
        assert torch.equal(a, before[0]) and torch.equal(b, before[1])
    assert len(calls) == 1 and runs == [3, 3, 3]


def test_what_another_function_records_becomes_a_part_of_it(seed, runs):
    add = Compiled(lambda x, y: x + y, "add", 1)
    three = Recorded(lambda x, y: add(add(add(x, y), y), y))
    six = Recorded(lambda x, y: three(three(x, y), y))
    for i in range(3):
        x, y = numbers(seed + i, 4), numbers(seed - i, 4)
        torch.testing.assert_close(six(x, y), x + 6 * y)
    assert runs == [6, 6]
    x, y = numbers(seed, 4), numbers(seed + 1, 4)
    for _ in range(2):
        torch.testing.assert_close(three(x, y), x + 3 * y)
    assert runs == [6, 6, 3]


VIEWS = {
    "row": lambda x: x[1],
    "column": lambda x: x[:, 2],
    "steps": lambda x: x[::2],
    "transposed": lambda x: x.T,
    "view of a view": lambda x: x.reshape(2, 3, 4)[1].unbind(1)[2],
    "all": lambda x: x[:],
    "expanded": lambda x: x[0].expand(3, 4),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_what_is_given_and_of_what_is_made_are_made_anew_in_every_call(view, seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 4)
    recorded = Recorded(
        lambda x: {"in between": double(view(double(x))), "before": double(view(x)), "after": view(double(x))}
    )
    kept = []
    for i in range(4):
        x = numbers(seed + i, 6, 4)
        before, result = x.clone(), recorded(x)
        torch.testing.assert_close(result, {"in between": 4 * view(x), "before": 2 * view(x), "after": 2 * view(x)})
        kept.append((result["after"], 2 * view(before)))
        assert torch.equal(x, before) and result["after"].stride() == view(2 * x).stride()
    assert len(runs) == 3
    for ours, expected in kept:  # later calls write elsewhere
        torch.testing.assert_close(ours, expected)


def test_arguments_that_lie_in_the_middle_of_their_memory_have_views(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    recorded = Recorded(lambda x: double(x[1]))
    for i in range(3):
        whole = numbers(seed + i, 7, 4)
        torch.testing.assert_close(recorded(whole[i:][:3]), 2 * whole[i + 1])
    assert runs == [1, 1]


def test_arguments_that_shared_memory_when_recorded_must_share_it_later(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    recorded = Recorded(lambda x, y: (double(x[1]), double(y[0])))
    whole, other = numbers(seed, 6, 4), numbers(seed + 1, 6, 4)
    for x, y in ((whole[:-1], whole[1:]), (other[:-1], other[1:]), (whole[:-1], other[1:]), (other[1:], other[:-1])):
        torch.testing.assert_close(recorded(x, y), (2 * x[1], 2 * y[0]))
    assert runs == [2]


def test_what_autograd_looks_into_is_not_recorded(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    recorded, x = Recorded(lambda x: double(double(x))), numbers(seed, 5)
    with torch.no_grad():
        torch.testing.assert_close(recorded(x.clone().requires_grad_()), 4 * x)
    for _ in range(2):
        own = x.clone().requires_grad_()
        recorded(own).sum().backward()
        torch.testing.assert_close(own.grad, torch.full((5,), 4.0))
    assert runs == []
    for _ in range(2):
        torch.testing.assert_close(recorded(x), 4 * x)
    assert runs == [2]


def test_a_view_that_reaches_beyond_a_tensor_is_left_to_the_function(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    recorded = Recorded(lambda x, y: double(x.as_strided((6,), (1,), x.storage_offset())))
    for i in range(3):
        x, y = numbers(seed + i, 2, 4)
        whole = torch.cat([x, y])
        torch.testing.assert_close(recorded(x, y), 2 * whole[:6])
    assert runs == []


def test_a_tensor_with_gaps_has_no_recorded_views(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    recorded = Recorded(lambda x: double(x[1]))
    for i in range(3):
        x = numbers(seed + i, 3, 4)[:, :2]
        torch.testing.assert_close(recorded(x), 2 * x[1])
    assert runs == []


def test_a_recording_keeps_no_memory(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    seen = []

    def fn(x):
        for _ in range(8):
            x = double(x)
            seen.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
            assert sum(not ref.expired() for ref in seen) <= 2
        return x

    recorded, x = Recorded(fn), numbers(seed, 1000)
    for _ in range(2):
        torch.testing.assert_close(recorded(x), 256 * x)
    assert runs == [8] and len(seen) == 8


@pytest.mark.parametrize("between", [lambda x: x + 1, lambda x: x.clone()], ids=["sum", "copy"])
def test_a_function_that_makes_tensors_itself_is_always_called(between, seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    inside, outside = Recorded(lambda x: double(between(double(x)))), Recorded(lambda x: between(double(x)))
    for i in range(3):
        x = numbers(seed + i, 6)
        torch.testing.assert_close(inside(x), 2 * between(2 * x))
        torch.testing.assert_close(outside(x), between(2 * x))
    assert runs == []


def test_a_tensor_that_the_function_closes_over_is_seen_when_it_changes(seed, runs):
    add = Compiled(lambda x, y: x + y, "add", 1)
    held = [torch.zeros(4)]
    recorded = Recorded(lambda x: add(x, held[0]))
    for i in range(3):
        held[0] = torch.full((4,), float(i))
        x = numbers(seed + i, 4)
        torch.testing.assert_close(recorded(x), x + i)
    assert runs == []


def test_one_tensor_twice_and_other_shapes_are_left_to_the_function(seed, runs):
    add = Compiled(lambda x, y: x + y, "add", 2)
    recorded = Recorded(add)
    x, y = numbers(seed, 4), numbers(seed + 1, 4)
    torch.testing.assert_close(recorded(x, x), 2 * x)
    torch.testing.assert_close(recorded(x, x[:]), 2 * x)
    torch.testing.assert_close(recorded(x, y), x + y)
    torch.testing.assert_close(recorded(y, y), 2 * y)
    long = numbers(seed, 9), numbers(seed + 1, 9)
    torch.testing.assert_close(recorded(*long), long[0] + long[1])
    assert runs == []
    torch.testing.assert_close(recorded(y, x), x + y)
    assert runs == [1]


def test_trees_with_more_in_them_and_other_constants_are_left_to_the_function(seed, runs):
    add = Compiled(lambda x, y: x + y, "add", 1)

    def fn(tensors, power, more):
        total = add(tensors[0], tensors[1])
        for x in (*tensors[2:], *more.values()):
            total = add(total, x)
        for _ in range(power):
            total = add(total, total.clone())
        return [total]

    recorded = Recorded(fn)
    xs = [numbers(seed + i, 5) for i in range(4)]
    for _ in range(2):
        torch.testing.assert_close(recorded(xs[:2], 0, {})[0], xs[0] + xs[1])
    assert runs == [1]
    torch.testing.assert_close(recorded(xs, 0, {})[0], sum(xs))
    torch.testing.assert_close(recorded(xs[:2], 0, {"a": xs[2]})[0], xs[0] + xs[1] + xs[2])
    torch.testing.assert_close(recorded(xs[:2], 1, {})[0], 2 * (xs[0] + xs[1]))
    assert runs == [1]


def test_errors_leave_the_function_usable(seed, runs):
    double = Compiled(lambda x: 2 * x, "double", 1)
    broken = [True]

    def fn(x):
        x = double(x)
        if broken[0]:
            raise KeyError("not now")
        return x

    recorded = Recorded(fn)
    x = numbers(seed, 3)
    with pytest.raises(KeyError):
        recorded(x)
    broken[0] = False
    for _ in range(2):
        torch.testing.assert_close(recorded(x), 2 * x)
    assert runs == [1]


def ppo(population=1, **learner):
    """On 8 CartPoles, 16 steps at a time."""
    return Anakin(
        lambda: PPO(CartPole().spec, PPOConfig(hidden=(16,))),
        CartPole(),
        num_envs=8,
        unroll_length=16,
        num_iterations=5,
        learner=LearnerConfig(**learner),
        compiler=Compiler(True, population),
    )


@pytest.mark.parametrize(
    ("population", "chunk_rows"), [(1, 16), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, None), (2, 16)))]
)
def test_an_update_is_the_same_with_and_without(population, chunk_rows, seed, monkeypatch):
    def run(recorded):
        if not recorded:
            monkeypatch.setattr(Compiler, "recorded", lambda self, fn: fn)
        anakin = ppo(population, chunk_rows=chunk_rows)
        state = anakin.init(seed)
        for _ in range(3):
            state, reports = anakin.iterate(state)
        return state.learner, reports

    ours, theirs = run(True), run(False)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_the_epochs_of_an_update_are_one_call(seed, runs):
    anakin = ppo(num_epochs=2, num_minibatches=4, chunk_rows=16)
    state = anakin.init(seed)
    for _ in range(2):
        runs.clear()
        state, _ = anakin.iterate(state)
    assert runs == [16, 2 * (1 + 4 * (2 + 1))]  # steps; of each epoch a deal, 4 minibatches of 2 chunks and an Adam
