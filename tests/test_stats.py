import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


def holm_by_hand(p_values):
    """Holm (1979) from its definition: reject while the k-th smallest p is at most a / (m - k + 1), a the smallest."""
    ranked, adjusted = sorted(range(len(p_values)), key=lambda i: p_values[i]), {}
    for k, i in enumerate(ranked):
        adjusted[i] = min(1.0, max((len(p_values) - j) * p_values[ranked[j]] for j in range(k + 1)))
    return [adjusted[i] for i in range(len(p_values))]


def test_holm_worked_by_hand():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert stats.holm([0.2]).tolist() == [0.2]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_equals_its_definition_and_lies_between_raw_and_bonferroni(p_values):
    ours = stats.holm(p_values)
    np.testing.assert_allclose(ours, holm_by_hand(p_values))
    assert (ours >= p_values).all()
    assert (ours <= np.minimum(1, len(p_values) * np.array(p_values)) + 1e-15).all()


def test_holm_rarely_errs_anywhere_when_nothing_is_there():
    """Ten true null hypotheses: any star in about 5 % of tables; without correction in 40 %."""
    tables = np.random.default_rng(5).random((4000, 10))
    any_star = np.mean([stats.holm(p).min() < 0.05 for p in tables])
    assert any_star == pytest.approx(0.05, abs=0.012)


def test_paired_p_is_the_paired_t_test_of_seed_averages():
    generator = np.random.default_rng(6)
    control = generator.normal(size=30)
    treated = control[:, None] + 0.2 + 0.5 * generator.normal(size=(30, 4))
    assert stats.paired_p(treated[:, 0], control) == pytest.approx(sps.ttest_rel(treated[:, 0], control).pvalue)
    assert stats.paired_p(treated, control) == pytest.approx(sps.ttest_rel(treated.mean(1), control).pvalue)
    assert stats.paired_p(control, treated) == pytest.approx(stats.paired_p(treated, control)), "two-sided"


def test_paired_p_where_all_differences_are_equal():
    assert stats.paired_p(np.ones(5), np.ones(5)) == 1
    assert stats.paired_p(np.ones(5), np.zeros(5)) == 0
    with pytest.raises(ValueError, match=r"1 item\(s\) cannot be tested"):
        stats.paired_p(np.ones(1), np.zeros(1))


@pytest.mark.parametrize("power", [0.5, 0.8])
def test_a_detectable_difference_is_found_with_the_stated_power(power):
    generator = np.random.default_rng(7)
    noise = 0.3 * generator.normal(size=60)
    effect = stats.detectable(noise, np.zeros(60), power=power)
    assert effect == pytest.approx((1.96 + sps.norm.ppf(power)) * noise.std(ddof=1) / np.sqrt(60), rel=1e-4)
    spread = noise.std(ddof=1)
    found = [stats.paired_p(effect + spread * generator.normal(size=60), np.zeros(60)) < 0.05 for _ in range(1500)]
    assert np.mean(found) == pytest.approx(power, abs=0.04)


def test_more_items_detect_less():
    alternating = np.tile([0.1, -0.1], 100)
    few, many = (stats.detectable(alternating[:n], np.zeros(n)) for n in (50, 200))
    assert few / many == pytest.approx(2, rel=0.01)
