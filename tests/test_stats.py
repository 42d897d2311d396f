import numpy as np
import pytest
from scipy import stats as sps

from psa_utils import stats


def rng():
    return np.random.default_rng(0)


def test_interval_over_items_agrees_with_scipy():
    values = np.random.default_rng(1).beta(2, 3, 50)
    ours = stats.mean_interval(values, rng=rng(), draws=20_000)
    theirs = sps.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=rng()).confidence_interval
    assert ours.mean == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.003)
    assert ours.varies == "items"


def test_crossed_interval_covers_item_and_seed_effects():
    """With a random effect per item and per seed, the interval holds the true mean about as often as it says."""
    generator, covered = np.random.default_rng(2), 0
    for _ in range(200):
        table = generator.normal(size=(50, 1)) + generator.normal(size=(1, 30)) + 0.1 * generator.normal(size=(50, 30))
        bar = stats.mean_interval(table, rng=generator, draws=400)
        covered += bar.low <= 0 <= bar.high
    assert 0.88 <= covered / 200 <= 1
    assert bar.varies == "items x noise seeds"


def test_seeds_widen_the_interval():
    items = np.random.default_rng(3).random((50, 1))
    seeds = np.array([[-0.3, -0.1, 0.0, 0.1, 0.3]])
    alone = stats.mean_interval(items, rng=rng())
    crossed = stats.mean_interval(items + seeds, rng=rng())
    assert crossed.high - crossed.low > 1.5 * (alone.high - alone.low)


def test_paired_difference_removes_what_items_share():
    items = np.random.default_rng(4).normal(size=50)
    change = stats.difference_interval(items + 0.1, items, rng=rng())
    assert (change.low, change.mean, change.high) == pytest.approx((0.1, 0.1, 0.1))
    assert change.excludes_zero
    assert not stats.mean_interval(items, rng=rng()).excludes_zero


@pytest.mark.parametrize("values", [np.array([1.0]), np.array([1.0, np.nan]), np.ones((2, 2, 2))])
def test_impossible_values(values):
    with pytest.raises(ValueError, match="must be"):
        stats.mean_interval(values, rng=rng())


def test_items_must_pair():
    with pytest.raises(ValueError, match="treated has 3 items, control 2"):
        stats.difference_interval(np.ones(3), np.ones(2), rng=rng())
