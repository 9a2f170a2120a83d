import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.compile import Compiler

MASK = 2**32 - 1


def philox(counter, key):
    """Philox4x32-10 in Python integers, as printed in figure 3 and section 4.3 of Salmon et al. 2011."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def random_keys(seed, *shape):
    """Keys `[*shape, 3]` with words at random, the extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 2**32, (*shape, 3), generator=generator)
    flat = keys.view(-1, 3)
    extremes = torch.tensor([[0, 0, 0], [MASK, MASK, MASK], [0, MASK, 0], [2**31, 2**31 - 1, 2**31]])
    flat[: len(extremes)] = extremes[: len(flat)]
    return keys


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_reference_gives_the_known_answers_of_random123(counter, key, words):
    assert philox(counter, key) == words


def test_bits_of_the_zero_key_are_the_known_answer():
    words = random.bits(torch.zeros(3, dtype=torch.int64), 4)
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_bits_equal_the_reference_on_random_and_extreme_keys(seed):
    keys = random_keys(seed, 5, 7)
    words = random.bits(keys, 10)
    assert words.shape == (5, 7, 10)
    for key, row in zip(keys.view(-1, 3).tolist(), words.view(-1, 10).tolist(), strict=True):
        lanes = [philox((lane, key[2], 0, 0), key[:2]) for lane in range(3)]
        assert row == sum(lanes, [])[:10]


def test_fold_in_equals_the_reference_and_never_shares_words_with_draws(seed):
    keys = random_keys(seed, 6)
    data = torch.tensor([0, 1, 2, MASK, 2**31, seed])
    children = random.fold_in(keys, data)
    for key, number, child in zip(keys.tolist(), data.tolist(), children.tolist(), strict=True):
        assert child == [*philox((number, key[2], 0, 1), key[:2])[:2], 0]
        assert child[:2] != philox((number, key[2], 0, 0), key[:2])[:2]


def test_more_words_begin_with_fewer_words(seed):
    keys = random_keys(seed, 8)
    for num in (1, 2, 3, 4, 5, 11):
        torch.testing.assert_close(random.bits(keys, num), random.bits(keys, 12)[..., :num], rtol=0, atol=0)


def test_key_holds_both_words_of_a_64_bit_seed():
    assert random.key(2**40 + 3).tolist() == [3, 2**8, 0]
    assert random.key(2**64 - 1).tolist() == [MASK, MASK, 0]
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="out of range"):
            random.key(wrong)


def test_numbers_for_keys_may_be_of_any_integers(seed):
    keys, numbers = random_keys(seed, 4), torch.arange(4)
    for make in (random.fold_in, random.at, random.advance):
        assert torch.equal(make(keys, numbers.int()), make(keys, numbers))
        assert torch.equal(make(keys, numbers)[3], make(keys[3], 3))
    many = random_keys(seed, 2, 4)  # from the left: one per row of the first axis
    assert torch.equal(random.advance(many, numbers[:2])[1], random.advance(many[1], 1))


def test_at_sets_the_counter_alone_and_advance_adds_to_it(seed):
    keys = random_keys(seed, 4, 3)
    assert torch.equal(random.at(keys, 17)[..., :2], keys[..., :2])
    assert (random.at(keys, 17)[..., 2] == 17).all()
    counters = torch.arange(4)  # from the left: one per row of the first axis
    assert torch.equal(random.at(keys, counters)[..., 2], counters[:, None].expand(4, 3))
    assert torch.equal(random.at(keys, torch.tensor(5)), random.at(keys, 5))
    assert torch.equal(random.advance(random.at(keys, 5), 3), random.at(keys, 8))
    assert torch.equal(random.advance(random.at(keys, MASK), 1), random.at(keys, 0))  # 32 bits
    assert not torch.equal(random.bits(random.at(keys, 5), 4), random.bits(random.at(keys, 6), 4))


def test_children_of_a_key_differ_and_do_not_depend_on_how_many_there_are(seed):
    parent = random_keys(seed, 8)[-1]
    children = random.split(parent, 2000)
    assert len({tuple(c) for c in children.tolist()}) == 2000
    assert torch.equal(random.split(parent, 5), children[:5])
    assert torch.equal(children[3], random.fold_in(parent, 3))
    assert (children[:, 2] == 0).all()


def test_the_keys_of_two_ranks_are_the_halves_of_one_ranks(seed):
    parent = random.key(seed)
    whole = random.split(parent, 12)
    parts = [random.split(parent, 6, offset=6 * rank) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat([random.bits(p, 9) for p in parts]), random.bits(whole, 9))


def test_uniforms_lie_in_their_interval_and_are_uniform(seed):
    words = torch.tensor([0, 511, 512, MASK])
    assert random.to_uniform(words).tolist() == [0.0, 0.0, 2.0**-23, 1 - 2.0**-23]
    u = random.uniform(random.split(random.key(seed), 1000), 200)
    assert u.dtype == torch.float32 and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 6 * (1 / 12 / u.numel()) ** 0.5
    assert abs(u.var() - 1 / 12) < 6 * (1 / 180 / u.numel()) ** 0.5
    # 99 degrees of freedom: mean 99, standard deviation 14.1
    assert chi_square(torch.histc(u, 100, 0, 1), u.numel() / 100) < 99 + 6 * 14.1
    pairs = torch.bincount((u[:, :-1] * 8).long().flatten() * 8 + (u[:, 1:] * 8).long().flatten(), minlength=64)
    assert chi_square(pairs, pairs.sum() / 64) < 63 + 8 * 11.2  # neighbours are independent
    wide = random.uniform(random.split(random.key(seed), 100), 100, -3.0, 5.0)
    assert -3 <= wide.min() < -2.9 and 4.9 < wide.max() < 5


def test_normals_have_the_moments_of_the_standard_normal(seed):
    x = random.normal(random.split(random.key(seed), 1000), 201).double()
    assert x.shape == (1000, 201) and x.isfinite().all()
    n = x.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 6 * (variance / n) ** 0.5
    edges = torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0, 1, 51)[1:-1].double())
    counts = torch.bincount(torch.bucketize(x.flatten(), edges), minlength=50)
    assert chi_square(counts, n / 50) < 49 + 6 * 9.9
    assert abs(torch.corrcoef(x.T[[0, 100, 101, 200]]).triu(1)).max() < 6 / 1000**0.5
    worst = random.to_normal(torch.tensor([0, 0, MASK, MASK]))  # log(0) must not be reached
    assert worst.isfinite().all()


@pytest.mark.parametrize("num", [1, 2, 7, 1000])
def test_integers_are_uniform_below_their_bound(seed, num):
    x = random.to_integer(random.bits(random.split(random.key(seed), 500), 200), num)
    counts = torch.bincount(x.flatten(), minlength=num)
    assert len(counts) == num
    assert chi_square(counts, x.numel() / num) <= (num - 1) + 6 * (2 * (num - 1)) ** 0.5
    assert random.to_integer(torch.tensor([0, MASK]), num).tolist() == [0, num - 1]


@pytest.mark.parametrize("num", [2, 5, 32, 33, 100])
def test_categorical_follows_its_probabilities_and_never_draws_a_masked_action(seed, num):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num, generator=generator)
    masked = torch.rand(num, generator=generator) < 0.4
    masked[0], masked[-1] = False, True
    logits = logits.masked_fill(masked, -float("inf"))
    draws = random.categorical(random.split(random.key(seed), 100_000), logits.expand(100_000, num))
    counts, probs = torch.bincount(draws, minlength=num), logits.double().softmax(-1)
    assert len(counts) == num
    assert (counts[masked] == 0).all()
    common = probs * 100_000 > 10
    dof = int(common.sum()) - 1
    assert chi_square(counts[common], (probs * 100_000)[common]) <= dof + 8 * (2 * max(dof, 1)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [32, 33])
def test_categorical_draws_unlikely_actions_from_short_floats(num, dtype, seed):
    logits = torch.full((num,), -5.8, dtype=dtype)
    logits[0] = 0.0
    draws = random.categorical(random.split(random.key(seed), 100_000), logits.expand(100_000, num))
    counts, probs = torch.bincount(draws, minlength=num), logits.double().softmax(-1)
    assert chi_square(counts, probs * 100_000) <= (num - 1) + 8 * (2 * (num - 1)) ** 0.5


def test_categorical_keeps_to_allowed_actions_where_equal_sums_are_rounded_differently(monkeypatch):
    """As a scan on a GPU does, which groups each sum in its own way."""
    num, generator, cumsum = 64, torch.Generator().manual_seed(0), torch.Tensor.cumsum
    masked = torch.rand(num, generator=generator) < 0.5
    masked[0] = False
    logits = torch.randn(num, generator=generator).masked_fill(masked, -float("inf"))
    odd = 1.0 + 2.0**-23 * torch.randint(-1, 2, (num,), generator=generator)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) * odd)
    near = (logits.softmax(-1).cumsum(-1) / logits.softmax(-1).cumsum(-1)[-1])[:, None]
    heights = (near + 2.0**-23 * torch.arange(-8, 9)).clamp(0.0, 1.0 - 2.0**-23).reshape(-1, 1)
    drawn = random.choose(heights, logits.expand(len(heights), num))
    assert not masked[drawn].any() and len(drawn.unique()) == int((~masked).sum())


@pytest.mark.parametrize("num", [3, 32, 33, 300])
def test_categorical_keeps_to_allowed_actions_at_the_ends_of_the_unit_interval(num, monkeypatch):
    """The smallest and the largest uniform there are, with masks in front and behind."""
    extremes = torch.tensor([0, MASK]).view(2, 1)
    monkeypatch.setattr(random, "bits", lambda key, num: extremes.expand(2, num))
    for allowed in ([0], [num - 1], [1], [1, num // 2], list(range(1, num - 1)), list(range(num))):
        logits = torch.full((num,), -float("inf"))
        logits[allowed] = torch.linspace(0.0, 3.7, len(allowed))
        first, last = random.categorical(torch.zeros(2, 3, dtype=torch.int64), logits.expand(2, num)).tolist()
        assert (first, last) == (allowed[0], allowed[-1])


def test_permutations_are_permutations_and_all_are_equally_likely(seed):
    keys = random.split(random.key(seed), 24_000)
    long = random.permutation(keys[:20], 257)
    assert torch.equal(long.sort(-1).values, torch.arange(257).expand(20, -1))
    assert len({tuple(p) for p in long.tolist()}) == 20
    codes = random.permutation(keys, 4) @ torch.tensor([64, 16, 4, 1])
    _, counts = codes.unique(return_counts=True)
    assert len(counts) == 24
    assert chi_square(counts, 1000) < 23 + 6 * 6.8


def draw(keys):
    """Everything that must come out the same to the bit, and then what need not (log and cosine differ in ulps)."""
    children = random.fold_in(keys, 3)
    words = random.bits(random.at(children, keys[..., 2] // 2), 9)
    uniform = random.uniform(keys, 5, -2.0, 3.0)
    return words, children, uniform, random.permutation(keys, 13), random.advance(keys, 2), random.normal(keys, 6)


def test_draws_mapped_by_vmap_equal_single_draws_to_the_bit(seed):
    keys = random_keys(seed, 6, 4)
    mapped = torch.vmap(draw)(keys)
    single = [draw(k) for k in keys]
    for i, leaf in enumerate(mapped):
        assert torch.equal(leaf, torch.stack([s[i] for s in single]))


def many(keys):
    """Also more words than fill a vector register: the compiler takes another path for them."""
    *exact, normal = draw(keys)
    return *exact, random.bits(keys, 130), random.split(keys[0], 21), normal


def test_compiled_draws_equal_eager_ones_to_the_bit(seed):
    keys = random_keys(seed, 16)
    eager, compiled = many(keys), Compiler(enabled=True)(many)(keys)
    for mine, theirs in zip(compiled[:-1], eager[:-1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(compiled[-1], eager[-1], rtol=1e-5, atol=1e-6)


def test_uniforms_are_the_same_with_and_without_fused_multiply_add(seed):
    """Product and sum in float64, where both are exact, against the function compiled with contraction on."""
    keys = random_keys(seed, 500)
    low, width = -0.05, np.float32(0.1)
    words = random.bits(keys, 7).numpy()
    want = ((words >> 9) * (2.0**-23 * float(width)) + low).astype(np.float32)
    eager = random.uniform(keys, 7, low, 0.05)
    compiled = Compiler(True)(lambda k: random.uniform(k, 7, low, 0.05))(keys)
    assert np.array_equal(eager.numpy(), want) and torch.equal(eager, compiled)
    assert (eager >= low).all() and (eager < 0.05).all()


def test_permutations_of_a_population_are_those_of_its_members(seed):
    keys = random_keys(seed, 3, 5)
    mapped = torch.vmap(lambda k: random.permutation(k, 9))(keys)
    assert torch.equal(mapped, torch.stack([random.permutation(k, 9) for k in keys]))
    assert torch.equal(mapped.sort(-1).values, torch.arange(9).expand(3, 5, 9))


@pytest.mark.parametrize(("low", "high"), [(100.0, 101.0), (0.9, 1.0), (-1.0, 1e-9), (0.0, 1.0)])
def test_no_uniform_reaches_its_upper_end(low, high):
    words = torch.tensor([0, MASK - 1, MASK])
    values = random.to_uniform(words, low, high)
    assert (values >= np.float32(low)).all() and (values < np.float32(high)).all()
