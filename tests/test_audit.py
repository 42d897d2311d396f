import itertools

import numpy as np
import pandas as pd
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from psa_utils import accounting, audit, bounds, mechanism
from psa_utils.trials import in_chunks
from tests import faults
from tests.faults import BENIGN, CLIP, LAYERS, SIGMA, N

CLAIM = accounting.gdp_mu(n=N, sigma=SIGMA, layers=LAYERS)
COPIES = bounds.copies_for(CLAIM)
EVERY_WORLDS = [faults.usual, faults.median_on_the_edge, faults.sums_between_two_bfloat16]


def verdicts(draws, worlds, *, trials, repetitions):
    games = (audit.white_box(draws, worlds, trials=trials, calibration=trials, seed=s) for s in range(repetitions))
    return [audit.judge(game, copies=worlds.copies) for game in games]


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_planted_faults_are_flagged(fault):
    """In every one of twenty audits of 1000 trials; the claim is mu at n = 320, five layers, sigma 0.02."""
    draws, worlds = faults.FAULTS[fault]
    assert all(v.exceeds(CLAIM) for v in verdicts(draws, worlds(), trials=1000, repetitions=20))


@pytest.mark.parametrize("worlds", EVERY_WORLDS)
@pytest.mark.parametrize("trials", [200, 1000])
def test_the_right_mechanism_is_not_flagged(worlds, trials):
    """On every data set on which a faulty one is, in 95 % of repetitions or more."""
    flagged = [v.exceeds(CLAIM) for v in verdicts(faults.right, worlds(), trials=trials, repetitions=40)]
    assert np.mean(flagged) <= 0.05


def test_the_right_mechanism_is_not_flagged_with_group_canaries():
    flagged = [v.exceeds(CLAIM) for v in verdicts(faults.right, faults.usual(COPIES), trials=500, repetitions=100)]
    assert np.mean(flagged) <= 0.05


def test_null_audit_gives_zero():
    """The same world twice: nothing to find, and nothing found in 95 % of repetitions."""
    usual = faults.usual()
    null = audit.Worlds(usual.positive, usual.positive, usual.difference)
    found = verdicts(faults.right, null, trials=300, repetitions=100)
    assert np.mean([v.mu_gdp > 0 for v in found]) <= 0.05
    assert np.mean([v.epsilon_gdp > 0 for v in found]) <= 0.05
    assert np.mean([v.epsilon_counts > 0 for v in found]) <= 0.05
    assert sum(v.mu_gaussian > 0 for v in found) <= 11  # exact at 5 %: 11 or fewer of 100 in 99 %


@pytest.mark.parametrize("n", [290, 320, 408, 1000])
@pytest.mark.parametrize("delta", [1e-5, "1/n"])
def test_group_canaries_reach_90_percent_of_the_exact_epsilon(n, delta):
    delta = 1 / n if delta == "1/n" else delta
    claim = accounting.gdp_mu(n=n, sigma=SIGMA, layers=LAYERS)
    exact = accounting.gaussian_epsilon(claim, delta)
    copies = bounds.copies_for(claim)
    worlds = audit.worst_case(np.resize(BENIGN, (n, *BENIGN.shape[1:])), clip=CLIP, seed=1, copies=copies)
    trials = audit.white_box(faults.right, worlds, trials=20_000, seed=1)
    verdict = audit.judge(trials, delta=delta, copies=copies)
    assert 0.9 * exact <= verdict.epsilon_gdp <= exact
    _, error = bounds.gaussian_mu(audit.scores_of(trials))
    stated = bounds.epsilon_of_mu(claim + 1.645 * error / copies, delta) - exact
    assert 0.9 * exact <= verdict.epsilon_gaussian <= exact + stated


def test_exact_epsilon_by_an_independent_accountant():
    """What the ratios above are relative to: one Gaussian mechanism, noise multiplier 1 / mu."""
    reference = pld.from_gaussian_mechanism(1 / CLAIM, value_discretization_interval=1e-4)
    assert accounting.gaussian_epsilon(CLAIM, 1e-5) == pytest.approx(reference.get_epsilon_for_delta(1e-5), rel=1e-3)


def test_worst_case_reaches_the_sensitivity_and_scores_follow_theory():
    worlds = faults.usual()
    shift = mechanism.clipped_mean(worlds.positive, clip=CLIP) - mechanism.clipped_mean(worlds.negative, clip=CLIP)
    np.testing.assert_allclose(shift, worlds.difference, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(shift, axis=1), accounting.sensitivity(N))
    changed = (worlds.negative != worlds.positive).any(axis=(1, 2))
    assert changed.sum() == 1
    scores = audit.scores_of(audit.white_box(faults.right, worlds, trials=10_000, seed=5))
    assert scores.positive.mean() - scores.negative.mean() == pytest.approx(CLAIM, abs=0.05)
    assert scores.negative.std() == pytest.approx(1, abs=0.05)


def test_psa_draws_are_the_mechanisms_bit_for_bit():
    fast = audit.psa_draws(clip=CLIP, sigma=SIGMA)(BENIGN, np.random.default_rng(3), 4)
    release = lambda d, rng: mechanism.psa(d, clip=CLIP, sigma=SIGMA, rng=rng)  # noqa: E731
    assert np.array_equal(fast, audit.one_by_one(release)(BENIGN, np.random.default_rng(3), 4))


def test_same_seed_same_table_whatever_else_was_drawn():
    options = {"trials": 700, "calibration": 100}
    one = audit.white_box(faults.right, faults.usual(), **options, seed=3)
    np.random.default_rng(0).normal(size=9)
    pd.testing.assert_frame_equal(one, audit.white_box(faults.right, faults.usual(), **options, seed=3))
    other = audit.white_box(faults.right, faults.usual(), **options, seed=4)
    assert not np.isin(one.score, other.score).any()
    assert one.score.is_unique  # every trial has noise of its own
    assert one.groupby(["phase", "coin"]).size().tolist() == [100, 100, 700, 700]


def test_an_interrupted_audit_resumes(tmp_path):
    options = {"trials": 1700, "calibration": 100, "seed": 0, "key": "psa"}
    counter = itertools.count()

    def failing(differences, rng, trials):
        if next(counter) == 6:  # two calls of calibration, two per chunk
            raise KeyboardInterrupt
        return faults.right(differences, rng, trials)

    path, worlds = tmp_path / "trials.csv", faults.usual()
    with pytest.raises(KeyboardInterrupt):
        audit.white_box(failing, worlds, path=path, **options)
    assert len(list(tmp_path.iterdir())) == 2
    calls = itertools.count()
    counted = lambda d, rng, trials: (next(calls), faults.right(d, rng, trials))[1]  # noqa: E731
    resumed = audit.white_box(counted, worlds, path=path, **options)
    assert next(calls) == 2 + 2 * 2
    assert list(tmp_path.iterdir()) == [path]
    pd.testing.assert_frame_equal(resumed, audit.white_box(faults.right, worlds, **options))
    pd.testing.assert_frame_equal(resumed, audit.white_box(failing, worlds, path=path, **options))
    changed = audit.white_box(faults.right, worlds, path=path, **{**options, "seed": 1})
    assert not changed.score.equals(resumed.score)


def test_chunks_of_another_key_are_not_taken(tmp_path):
    frame = lambda value: lambda i: pd.DataFrame({"x": [value + i]})  # noqa: E731
    assert in_chunks(frame(0), 2, tmp_path / "a.csv", "one").x.tolist() == [0, 1]
    assert in_chunks(frame(5), 2, tmp_path / "a.csv", "one").x.tolist() == [0, 1]
    assert in_chunks(frame(5), 2, tmp_path / "a.csv", "two").x.tolist() == [5, 6]


def test_threshold_comes_from_calibration_alone():
    """Trials may say what they like: the threshold, and so the counted errors, follow the calibration scores."""
    frame = audit.white_box(faults.right, faults.usual(), trials=500, calibration=500, seed=0)
    calibration = frame[frame.phase == audit.CALIBRATION]
    shifted = pd.concat([calibration, frame[frame.phase == audit.TRIAL].assign(score=lambda f: f.score + 100)])
    assert audit.judge(shifted).rates == bounds.Rates(500, 500, 0, 500)


def test_group_canaries_leave_the_bound_from_counts_out():
    game = audit.white_box(faults.right, faults.usual(3), trials=300, calibration=300, seed=0)
    assert np.isnan(audit.judge(game, copies=3).epsilon_counts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: audit.worst_case(BENIGN, clip=CLIP, seed=0, copies=N + 1), "copies=321 must lie between 1 and"),
        (lambda: audit.worst_case(BENIGN, clip=CLIP, seed=0, copies=0), "copies=0 must lie"),
        (lambda: audit.neighbours(BENIGN, BENIGN[0], BENIGN[0], clip=CLIP), "records are equal after clipping"),
    ],
)
def test_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
