import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps

from psa_utils import accounting, bounds

RATES = st.builds(
    lambda t0, t1, a, b: bounds.Rates(round(a * t0), t0, round(b * t1), t1),
    st.integers(1, 5000), st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1),
)  # fmt: skip


def gaussian_scores(mu: float, trials: int, seed: int) -> bounds.Scores:
    rng = np.random.default_rng(seed)
    return bounds.Scores(rng.normal(size=trials), rng.normal(mu, 1, trials))


@given(errors=st.integers(0, 50), more=st.integers(0, 2000), error=st.floats(1e-4, 0.5))
@settings(max_examples=50, deadline=None)
def test_clopper_pearson_is_scipys_exact_interval(errors, more, error):
    trials = errors + more + 1
    expected = sps.binomtest(errors, trials, alternative="less").proportion_ci(1 - error, method="exact").high
    assert bounds.clopper_pearson_upper(errors, trials, error) == pytest.approx(expected, rel=1e-9)


@given(rates=RATES, delta=st.floats(1e-9, 0.5))
@settings(max_examples=200, deadline=None)
def test_no_bound_beats_the_curve_at_the_upper_rates(rates, delta):
    """The rates are allowed by the mu that is reported, and the bound from counts is below that of the GDP curve."""
    mu = bounds.gdp_mu_lower(rates)
    fpr, fnr = rates.upper()
    assert 1 - fnr <= bounds.allowed_tpr(fpr, mu) + 1e-9
    assert 0 <= bounds.epsilon_lower(rates, delta) <= bounds.epsilon_of_mu(mu, delta) + 1e-6


@given(rates=RATES)
@settings(max_examples=200, deadline=None)
def test_rates_no_better_than_guessing_prove_nothing(rates):
    """In particular an attack that is always wrong: its absolute value would be a large epsilon."""
    if sum(rates.upper()) >= 1:
        assert bounds.gdp_mu_lower(rates) == bounds.epsilon_lower(rates, 1e-5) == 0
    assert bounds.gdp_mu_lower(bounds.Rates(100, 100, 100, 100)) == 0


@given(st.lists(st.integers(0, 6), min_size=2, max_size=30), st.lists(st.integers(0, 6), min_size=2, max_size=30))
@settings(max_examples=100, deadline=None)
def test_area_is_the_mann_whitney_statistic(negative, positive):
    """Ties included; scipy is the reference."""
    area, low, high = bounds.auc(bounds.Scores(np.array(negative), np.array(positive)))
    expected = sps.mannwhitneyu(positive, negative).statistic / (len(negative) * len(positive))
    assert area == pytest.approx(expected)
    assert 0 <= low <= area <= high <= 1


def test_area_of_the_likelihood_ratio_is_the_one_allowed_and_its_interval_covers():
    mu, repetitions = 1.0, 400
    found = [bounds.auc(gaussian_scores(mu, 200, seed)) for seed in range(repetitions)]
    assert np.mean([area for area, _, _ in found]) == pytest.approx(bounds.allowed_auc(mu), abs=0.005)
    missed = sum(not low <= bounds.allowed_auc(mu) <= high for _, low, high in found)
    assert sps.binomtest(missed, repetitions, 0.05).pvalue > 1e-3


def test_bounds_cover_in_95_percent_of_repetitions():
    """With the threshold fixed beforehand; the distribution-free bounds are conservative, the parametric one exact."""
    mu, delta, repetitions = 1.0, 1e-3, 2000
    rng = np.random.default_rng(0)
    errors = rng.binomial(1000, sps.norm.sf(mu / 2), (repetitions, 2))
    rates = [bounds.Rates(int(a), 1000, int(b), 1000) for a, b in errors]
    assert np.mean([bounds.gdp_mu_lower(r) > mu for r in rates]) <= 0.05
    assert np.mean([bounds.epsilon_lower(r, delta) > accounting.gaussian_epsilon(mu, delta) for r in rates]) <= 0.05
    above = sum(bounds.gaussian_mu_lower(gaussian_scores(mu, 200, s)) > mu for s in range(repetitions))
    assert sps.binomtest(above, repetitions, 0.05).pvalue > 1e-3


@pytest.mark.parametrize("mu", [0.2, 0.7, 3.0, 8.0])
def test_parametric_bound_agrees_with_the_noncentral_t(mu):
    """sqrt(T/2) times the estimate has a noncentral t distribution with 2T - 2 degrees of freedom: the exact bound."""
    scores = gaussian_scores(mu, 500, 1)
    estimate, _ = bounds.gaussian_mu(scores)
    assert estimate == pytest.approx(sps.ttest_ind(scores.positive, scores.negative).statistic / math.sqrt(250))
    lower = bounds.gaussian_mu_lower(scores)
    tail = sps.nct.sf(estimate * math.sqrt(250), 998, lower * math.sqrt(250))
    assert tail == pytest.approx(0.05, abs=0.005)


def test_scores_without_noise():
    same = bounds.Scores(np.ones(9), np.ones(9))
    apart = bounds.Scores(np.ones(9), np.full(9, 2.0))
    backwards = bounds.Scores(np.full(9, 2.0), np.ones(9))
    assert [bounds.gaussian_mu_lower(s) for s in (same, apart, backwards)] == [0, math.inf, 0]
    assert bounds.epsilon_of_mu(math.inf, 1e-5) == math.inf
    assert bounds.choose_threshold(apart, bounds.gdp_mu_lower) == 1.5
    assert apart.rates(1.5) == bounds.Rates(0, 9, 0, 9)


def test_threshold_maximises_the_objective():
    scores = gaussian_scores(2.0, 4000, 2)
    chosen = bounds.choose_threshold(scores, lambda r: -(r.fpr + r.fnr))
    assert chosen == pytest.approx(1.0, abs=0.15)  # where the two densities cross


def test_group_canaries_bound_best_near_mu_of_three():
    """Expected bound mu(g) / g, from expected counts of 2000 trials."""

    def bound(group_mu):
        errors = round(2000 * sps.norm.sf(group_mu / 2))
        return bounds.gdp_mu_lower(bounds.Rates(errors, 2000, errors, 2000)) / group_mu

    best = max(np.arange(0.5, 7, 0.25), key=bound)
    assert 2.5 <= best <= 4.5
    assert bound(3.0) > 0.98 * bound(best)
    assert [bounds.copies_for(mu) for mu in (0.2236, 0.6988, 1.5, 9)] == [13, 4, 2, 1]


@pytest.mark.parametrize("mu", [0.0, 0.7, 2.0])
def test_roc_band_holds_the_whole_curve(mu):
    """Simultaneously, in at least 95 % of repetitions; and it is no wider than it says."""
    misses = 0
    for seed in range(200):
        curve = bounds.roc(gaussian_scores(mu, 500, seed))
        truth = bounds.allowed_tpr(curve.fpr, mu)
        misses += not ((curve.low <= truth + 1e-12) & (truth <= curve.high + 1e-12)).all()
    assert misses <= 10
    assert (np.diff(curve.tpr) >= 0).all()
    assert (curve.fpr[-1], curve.tpr[-1]) == (1, 1)
    assert np.median(curve.high - curve.low) < 0.4


def test_roc_equals_counting():
    scores = gaussian_scores(1.0, 400, 3)
    curve = bounds.roc(scores)
    for i in (0, 7, 100, 199):
        allowed = [t for t in [*scores.negative, -np.inf] if (scores.negative > t).mean() <= curve.fpr[i] + 1e-12]
        assert curve.tpr[i] == (scores.positive > min(allowed)).mean()


def test_the_papers_points_lie_above_what_its_noise_allows():
    mu = accounting.gdp_mu(n=1000, sigma=0.02, layers=5)
    for fpr, fnr in ((0.10, 0.19), (0.09, 0.50)):
        assert 1 - fnr > 3 * bounds.allowed_tpr(fpr, mu)
        assert bounds.implied_mu(fpr, fnr) > 5 * mu


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.Rates(3, 2, 0, 5), r"counts \(3, 2, 0, 5\) are impossible"),
        (lambda: bounds.Rates(0, 0, 0, 5), "both worlds need trials"),
        (lambda: bounds.Scores(np.ones(1), np.ones(5)), "negative holds 1 scores"),
        (lambda: bounds.Scores(np.ones(5), np.array([1, np.nan])), "positive .* all finite"),
    ],
)
def test_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bounds_need_neither_torch_nor_pandas():
    code = "import psa_utils.bounds, sys; assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
