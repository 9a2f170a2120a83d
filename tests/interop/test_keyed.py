"""torch's random functions by our keys: the distributions, and on what a draw depends."""

import math

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Normal

from torchpod import random
from torchpod.interop.keyed import Keyed, NothingElseDraws
from torchpod.kernels.inductor import trace

N = 20_000
UNIFORM, NORMAL = (0.5, 1 / 12), (0.0, 1.0)
DRAWS = {
    "rand": (lambda: torch.rand(N), UNIFORM),
    "rand of a tuple": (lambda: torch.rand((N // 2, 2)), UNIFORM),
    "randn": (lambda: torch.randn(2, N // 2), NORMAL),
    "rand_like": (lambda: torch.rand_like(torch.zeros(N)), UNIFORM),
    "randn_like": (lambda: torch.randn_like(torch.zeros(N)), NORMAL),
    "normal of tensors": (lambda: torch.normal(torch.full((N,), 2.0), torch.full((N,), 3.0)), (2.0, 9.0)),
    "normal of numbers": (lambda: torch.normal(2.0, 3.0, size=(N,)), (2.0, 9.0)),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), (0.3, 0.21)),
    "bernoulli of p": (lambda: torch.bernoulli(torch.zeros(N), p=0.3), (0.3, 0.21)),
    "randint": (lambda: torch.randint(2, 6, (N,)), (3.5, 15 / 12)),
    "randint from 0": (lambda: torch.randint(4, (N,)), (1.5, 15 / 12)),
    "randint of a size": (lambda: torch.randint(2, 6, size=(N,)), (3.5, 15 / 12)),
    "randint of names": (lambda: torch.randint(high=4, size=(N,)), (1.5, 15 / 12)),
    "normal_": (lambda: torch.empty(N).normal_(1.0, 2.0), (1.0, 4.0)),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), (1.0, 16 / 12)),
    "uniform_ of names": (lambda: torch.empty(N).uniform_(**{"from": -1, "to": 3}), (1.0, 16 / 12)),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), (0.5, 0.25)),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), (0.3, 0.21)),
    "bernoulli_ of integers": (lambda: torch.zeros(N, dtype=torch.int64).bernoulli_(0.3), (0.3, 0.21)),
    "Normal": (lambda: Normal(torch.zeros(N), 2.0).rsample(), (0.0, 4.0)),
    "Bernoulli": (lambda: Bernoulli(probs=torch.full((N,), 0.3)).sample(), (0.3, 0.21)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_mean_and_variance_of_torchs(name, seed):
    draw, (mean, variance) = DRAWS[name]
    with Keyed(random.key(seed)):
        x = draw()
    assert x.shape == draw().shape and x.dtype == draw().dtype
    x = x.double().flatten()
    sigmas = 5  # with 16 cases one run in 100,000 fails
    assert abs(x.mean() - mean) < sigmas * math.sqrt(variance / N)
    fourth = ((x - x.mean()) ** 4).mean()
    assert abs(x.var() - variance) < sigmas * math.sqrt((fourth - variance**2) / N)


@pytest.mark.parametrize("name", DRAWS)
def test_each_member_of_a_population_draws_by_its_own_key(name, seed):
    def drawn(keys):
        with Keyed(keys):
            return DRAWS[name][0]()

    keys = random.split(random.key(seed), 2)
    both = torch.vmap(drawn)(keys)
    for mine, key in zip(both, keys, strict=True):
        assert torch.equal(mine, drawn(key))
    assert not torch.equal(*both)


def test_memory_on_another_device_stays_there(seed):
    key = random.key(seed)

    def loss(x):
        with Keyed(key.to("meta")):
            return x + torch.zeros(3).sum()

    assert torch.func.grad(loss)(torch.tensor(1.0)) == 1


def test_categories_come_as_often_as_their_probabilities_say(seed):
    probs = torch.tensor([0.05, 0.0, 0.6, 0.35])
    with Keyed(random.key(seed)):
        x = Categorical(probs=probs.expand(N, 4)).sample()
    count = torch.bincount(x, minlength=4)
    assert count[1] == 0
    expected = probs[[0, 2, 3]] * N
    assert ((count[[0, 2, 3]] - expected) ** 2 / expected).sum() < 27.6  # chi-square, 2 degrees, p = 1e-6


def test_drawing_without_replacement_repeats_nothing(seed):
    with Keyed(random.key(seed)):
        x, order = torch.multinomial(torch.ones(100, 5), 5), torch.randperm(7)
    assert (x.sort(-1).values == torch.arange(5)).all() and (x != x[0]).any()
    assert (order.sort().values == torch.arange(7)).all()


@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 2)])
def test_a_row_depends_on_its_own_key_alone(shape, seed):
    keys = random.split(random.key(seed), 6)
    other = torch.cat([keys[:1], random.split(random.key(seed + 1), 5)])

    def draw(keys):
        with Keyed(keys):
            return torch.randn(shape), torch.randn(shape)

    (a, b), (c, _) = draw(keys), draw(other)
    axis = shape.index(6)
    same = (a == c).movedim(axis, 0).flatten(1).all(1)
    assert same.tolist() == [True] + [False] * 5
    assert (a != b).all()  # one draw is not the next
    assert torch.equal(draw(keys)[0], a)


def test_torchs_generator_stays_where_it_was(seed):
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    with Keyed(random.key(seed)):
        x = torch.randn(3).sum() + torch.rand(2).sum() + Normal(torch.zeros(2), 1.0).sample().sum()
    assert x.isfinite()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_traced_program_draws_nothing_itself(seed):
    def draw(key, x):
        with Keyed(key):
            return Normal(x, 1.0, False).rsample() + torch.rand_like(x), Categorical(None, x, False).sample()

    graph, *_ = trace(draw, (random.key(seed), torch.zeros(5, 3)))
    random_ops = [n for n in graph.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    assert not random_ops


@pytest.mark.parametrize("draw", [lambda: torch.poisson(torch.ones(3)), lambda: torch.empty(3).cauchy_()])
def test_what_has_no_counterpart_is_refused(draw):
    with Keyed(random.key(0)), pytest.raises(NotImplementedError, match="no keyed counterpart"):
        draw()


def test_a_draw_without_an_axis_for_the_environments_is_refused():
    with Keyed(random.split(random.key(0), 6)), pytest.raises(ValueError, match="no axis for the 6 environments"):
        torch.randn(5, 2)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.nn.functional.dropout(torch.ones(3)),
        lambda: torch.nn.functional.gumbel_softmax(torch.ones(3)),
    ],
)
def test_draws_within_torchs_own_functions_are_seen(draw):
    with Keyed(random.key(0)), NothingElseDraws(), pytest.raises(NotImplementedError, match="cannot be keyed"):
        draw()


def test_what_is_keyed_or_draws_nothing_passes(seed):
    with Keyed(random.key(seed)), NothingElseDraws():
        x = Normal(torch.zeros(3), 1.0).sample() + torch.nn.functional.dropout(torch.ones(3), training=False)
        x += torch.empty(3).uniform_() + torch.multinomial(torch.ones(3), 3) + torch.randperm(3)
    assert x.isfinite().all()


def test_a_draw_into_memory_is_that_of_the_key(seed):
    out = torch.zeros(3)
    with Keyed(random.key(seed)):
        assert torch.randn(3, out=out) is out
    with Keyed(random.key(seed)):
        assert torch.randn(3).equal(out) and out.ne(0).all()


def test_members_of_an_ensemble_do_not_draw_the_same_where_they_are_to_draw_others():
    def member(x):
        return x + torch.randn(())

    with Keyed(random.key(0)):
        x = torch.func.vmap(member, randomness="same")(torch.zeros(3))
        assert x.unique().numel() == 1
        with pytest.raises(NotImplementedError, match="leave set_vmap_randomness out"):
            torch.func.vmap(member, randomness="different")(torch.zeros(3))
