"""The sum tree against sums and searches in NumPy."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from torchpod.replay import sum_tree

SIZES = [1, 15, 16, 17, 63, 64, 65, 256, 257, 4097]


def reference_write(leaves, index, values):
    """In place; of several values for one leaf the largest counts."""
    new = {}
    for i, v in zip(index, values, strict=True):
        new[i] = max(v, new.get(i, -1.0))
    for i, v in new.items():
        leaves[i] = v


def assert_sums(tree, leaves):
    """The leaves, and level by level the running sums of 16 that lie together, whatever was written before."""
    padded = np.zeros(len(tree[0]))
    padded[: len(leaves)] = leaves
    np.testing.assert_array_equal(tree[0].numpy(), padded)
    for upto in tree[1:]:
        items = np.zeros(len(upto))
        items[: len(padded)] = padded
        nodes = items.reshape(-1, 16)
        np.testing.assert_allclose(upto.reshape(-1, 16).numpy(), nodes.cumsum(1), rtol=1e-5)
        padded = nodes.sum(1)
    assert len(tree[-1]) == 16 and len(tree[0]) < len(leaves) + 16
    np.testing.assert_allclose(sum_tree.total(tree).item(), leaves.sum(dtype=np.float64), rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_levels_are_sums_after_many_writes_and_of_duplicates_the_largest_counts(seed, size):
    rng = np.random.default_rng(seed)
    tree, leaves = sum_tree.make(size), np.zeros(size, np.float32)
    for _ in range(60):
        index = rng.integers(0, size, rng.integers(1, 200))
        values = (rng.exponential(size=len(index)) * (rng.random(len(index)) > 0.2)).astype(np.float32)
        reference_write(leaves, index, values)
        sum_tree.write(tree, torch.from_numpy(index), torch.from_numpy(values))
        assert_sums(tree, leaves)
    sum_tree.write(tree, torch.arange(size), torch.zeros(size))
    assert all((level == 0).all() for level in tree)  # nothing is left over, as increments would leave


@pytest.mark.parametrize("size", SIZES)
def test_a_population_of_trees_is_as_many_single_trees(seed, size):
    rng = np.random.default_rng(seed)
    many, single = sum_tree.make(size, (2, 3)), [[sum_tree.make(size) for _ in range(3)] for _ in range(2)]
    for _ in range(10):
        index = torch.from_numpy(rng.integers(0, size, (2, 3, 50)))
        values = torch.from_numpy(rng.exponential(size=(2, 3, 50)).astype(np.float32))
        sum_tree.write(many, index, values)
        for i in range(2):
            for j in range(3):
                sum_tree.write(single[i][j], index[i, j], values[i, j])
                for level, own in zip(many, single[i][j], strict=True):
                    assert torch.equal(level[i, j], own)
                assert sum_tree.total(many)[i, j] == sum_tree.total(single[i][j])


@pytest.mark.parametrize("size", SIZES)
def test_find_returns_the_leaf_whose_share_of_the_total_the_height_lies_in(seed, size):
    """With whole numbers, which float32 adds exactly: also at the borders, and the numbers right below them."""
    rng = np.random.default_rng(seed)
    leaves = rng.integers(1, 50, size) * (rng.random(size) > 0.5)
    leaves[rng.integers(size)] = 7
    if size > 200:
        leaves[64:128] = 0  # whole nodes of nothing
    tree = sum_tree.make(size)
    sum_tree.write(tree, torch.arange(size), torch.from_numpy(leaves).float())
    upto = leaves.cumsum()
    before = (upto - leaves)[leaves > 0].astype(np.float32)
    below = np.nextafter(upto[leaves > 0].astype(np.float32), np.float32(0))
    inside = (rng.random(3000) * upto[-1]).astype(np.float32)
    height = np.concatenate([before, below, inside[inside < upto[-1]]])
    found = sum_tree.find(tree, torch.from_numpy(height)).numpy()
    assert (found == np.searchsorted(upto, height.astype(np.float64), side="right")).all()
    assert (leaves[found] > 0).all()
    assert set(found) >= set(np.flatnonzero(leaves))


@pytest.mark.parametrize("size", SIZES)
def test_find_never_returns_a_leaf_of_0_where_sums_are_rounded(seed, size):
    """At heights up to the last number below the total, and at the total itself, which rounding may reach."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        leaves = (rng.exponential(size=size) ** 4 * (rng.random(size) > 0.7)).astype(np.float32)
        leaves[rng.integers(size)] = 1e-4
        tree = sum_tree.make(size)
        sum_tree.write(tree, torch.arange(size), torch.from_numpy(leaves))
        total = sum_tree.total(tree)
        edge = [total]
        for _ in range(20):
            edge.append(torch.nextafter(edge[-1], torch.tensor(0.0)))
        upto = leaves.astype(np.float64).cumsum()
        near = np.concatenate([upto, upto * (1 - 1e-7), upto * (1 + 1e-7)]).astype(np.float32)
        height = torch.cat([torch.stack(edge), torch.from_numpy(near).clamp(max=total), torch.zeros(1)])
        found, height = sum_tree.find(tree, height).numpy(), height.numpy()
        assert (leaves[found] > 0).all()
        slack = 1e-5 * upto[-1]
        assert ((upto - leaves)[found] <= height + slack).all() and (height <= upto[found] + slack).all()


@pytest.mark.parametrize("size", [63, 65, 4097])
def test_leaves_are_found_in_proportion_to_their_values(seed, size):
    rng = np.random.default_rng(seed)
    leaves = (rng.exponential(size=size) + 0.1) * (rng.random(size) > 0.3)
    tree = sum_tree.make(size)
    sum_tree.write(tree, torch.arange(size), torch.from_numpy(leaves).float())
    num = 100 * size
    height = torch.from_numpy(rng.random(num)) * sum_tree.total(tree).double()
    count = np.bincount(sum_tree.find(tree, height.float()), minlength=size)
    some = leaves > 0
    assert count[~some].sum() == 0
    assert chisquare(count[some], leaves[some] / leaves.sum() * num).pvalue > 1e-6


def test_find_maps_over_a_population(seed):
    rng = np.random.default_rng(seed)
    tree = sum_tree.make(300, (2,))
    sum_tree.write(tree, torch.arange(300).expand(2, -1), torch.from_numpy(rng.random((2, 300))).float())
    height = torch.from_numpy(rng.random((2, 40))).float() * sum_tree.total(tree)[:, None]
    found = torch.vmap(sum_tree.find)(tree, height)
    for i in range(2):
        assert torch.equal(found[i], sum_tree.find([level[i] for level in tree], height[i]))
