import numpy as np
import pytest
import scipy.stats

from torchpod.stats import bootstrap_ci, iqm


def test_iqm_by_hand():
    assert iqm([100.0, 1.0, 2.0, -50.0]) == 1.5  # one dropped at each end
    assert iqm([0.0, 1.0, 5.0]) == 2.0  # too few to drop any
    assert iqm([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == 4.5  # 1, 2 and 7, 9 dropped


@pytest.mark.parametrize("count", range(1, 14))
def test_iqm_is_the_trimmed_mean_of_scipy(count):
    x = np.random.default_rng(count).normal(size=(count, 3))
    assert iqm(x) == pytest.approx(scipy.stats.trim_mean(x.ravel(), 0.25), abs=1e-14)
    np.testing.assert_allclose(iqm(x, axis=0), scipy.stats.trim_mean(x, 0.25, axis=0), rtol=0, atol=1e-14)
    np.testing.assert_allclose(iqm(x, axis=1), scipy.stats.trim_mean(x, 0.25, axis=1), rtol=0, atol=1e-14)


def test_iqm_ignores_the_order_of_runs_and_scales_with_them():
    x = np.random.default_rng(0).normal(size=11)
    assert iqm(x[::-1]) == pytest.approx(iqm(x))
    assert iqm(3.0 * x + 2.0) == pytest.approx(3.0 * iqm(x) + 2.0)


def test_bootstrap_of_two_values_by_hand():
    # The mean of a resample of (0, 1) is 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert bootstrap_ci([0.0, 1.0], np.mean, confidence=0.95) == (0.0, 1.0)
    assert bootstrap_ci([0.0, 1.0], np.mean, confidence=0.4) == (0.5, 0.5)


def test_bootstrap_agrees_with_scipy():
    x = np.random.default_rng(1).normal(size=20)
    expected = scipy.stats.bootstrap(
        (x,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    low, high = bootstrap_ci(x, np.mean, num_resamples=20_000)
    assert low == pytest.approx(expected.low, abs=0.02)
    assert high == pytest.approx(expected.high, abs=0.02)


def test_bootstrap_is_stratified():
    # Columns that differ by 100 and have no spread of their own: a resample never mixes them.
    x = np.tile([0.0, 100.0, 200.0], (5, 1))
    assert bootstrap_ci(x, np.mean) == (100.0, 100.0)


def test_bootstrap_draws_every_column_on_its_own():
    # The same column twice, the second negated: drawn together, every resample would have a mean of 0.
    x = np.random.default_rng(3).normal(size=(8, 1)) * np.array([1.0, -1.0])
    low, high = bootstrap_ci(x, np.mean)
    assert low < -0.1 and high > 0.1


def test_bootstrap_of_curves_gives_one_interval_per_point():
    curves = np.random.default_rng(4).normal(size=(10, 6)) + np.arange(6)
    low, high = bootstrap_ci(curves, lambda c: iqm(c, axis=0))
    assert low.shape == high.shape == (6,)
    assert (low < iqm(curves, axis=0)).all() and (iqm(curves, axis=0) < high).all()


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    intervals = [bootstrap_ci(rng.normal(size=30), np.mean, num_resamples=200, seed=i) for i in range(200)]
    assert 0.88 <= np.mean([low < 0.0 < high for low, high in intervals]) <= 0.99


def test_bootstrap_repeats_with_its_seed_and_has_no_width_for_one_run():
    x = np.random.default_rng(6).normal(size=9)
    assert bootstrap_ci(x, iqm, seed=3) == bootstrap_ci(x, iqm, seed=3) != bootstrap_ci(x, iqm, seed=4)
    assert bootstrap_ci([7.0], iqm) == (7.0, 7.0)


@pytest.mark.parametrize(("x", "problem"), [([], "is empty"), ([1.0, float("nan")], "holds 1 NaN")])
def test_missing_results_are_refused(x, problem):
    with pytest.raises(ValueError, match=problem):
        iqm(x)
    with pytest.raises(ValueError, match=problem):
        bootstrap_ci(x, np.mean)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\); expected \[runs\]"):
        bootstrap_ci(np.zeros((2, 2, 2)), np.mean)
    with pytest.raises(ValueError, match="confidence=95 must lie between 0 and 1"):
        bootstrap_ci([1.0, 2.0], np.mean, confidence=95)
