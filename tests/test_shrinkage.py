import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psa_utils import seeding, shrinkage

SIGMA = 0.7


def basis(d: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(seeding.rng(seed, "basis").normal(size=(d, d)))[0]


def risk(rule, signal: np.ndarray, draws: int = 400) -> float:
    noise = seeding.rng(0, "risk").normal(0, SIGMA, (draws, *signal.shape))
    return float(np.mean([np.square(rule(signal + e, SIGMA) - signal).sum() for e in noise]))


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("rule", [shrinkage.james_stein, shrinkage.efron_morris])
def test_minimax_rules_never_lose_to_the_release_itself(rule, scale):
    signal = scale * seeding.rng(1, "signal").normal(size=(4, 40))
    assert risk(rule, signal) <= 1.01 * signal.size * SIGMA**2


def test_james_stein_has_its_exact_risk_at_zero():
    """E||y - (m-2) y sigma^2/||y||^2||^2 = 2 sigma^2 at signal 0 (James and Stein 1961); positive part does better."""
    assert risk(shrinkage.james_stein, np.zeros((1, 30))) < 2 * SIGMA**2


def test_efron_morris_is_its_formula():
    noisy = 3 * seeding.rng(2, "matrix").normal(size=(4, 40))
    formula = (np.eye(4) - (40 - 4 - 1) * SIGMA**2 * np.linalg.inv(noisy @ noisy.T)) @ noisy
    np.testing.assert_allclose(shrinkage.efron_morris(noisy, SIGMA), formula, atol=1e-12)


def test_efron_morris_gains_where_rows_agree_and_rank_one_where_they_are_one():
    direction = seeding.rng(3, "signal").normal(size=60)
    aligned = np.outer([1.0, 0.9, 1.1, 1.2], direction)
    plain, matrix = risk(shrinkage.james_stein, aligned), risk(shrinkage.efron_morris, aligned)
    assert risk(lambda y, s: shrinkage.rank_one(y), aligned) < matrix < plain
    assert np.linalg.matrix_rank(shrinkage.rank_one(aligned + seeding.rng(4, "noise").normal(size=aligned.shape))) == 1


@given(d=st.integers(1, 5000))
@settings(deadline=None)
def test_blocks_cover_every_coordinate_once_and_double(d):
    borders = shrinkage.edges(d)
    widths = np.diff(borders)
    assert borders[0] == 0
    assert borders[-1] == d
    assert (widths > 0).all()
    assert (widths[:-1] == 8 * 2 ** np.arange(len(widths) - 1)).all()


def test_blocks_in_a_basis_where_energy_is_concentrated_beat_one_block():
    v, d = basis(248), 248
    signal = np.concatenate([np.full(8, 3.0), np.zeros(d - 8)])[None] @ v.T
    blocks = risk(lambda y, s: shrinkage.blockwise(y, s, v, shrinkage.james_stein), signal)
    assert blocks < 0.5 * risk(shrinkage.james_stein, signal)
    # ... up to 2 sigma^2 a block of what the best factor per block would reach
    ideal = sum(e * m * SIGMA**2 / (e + m * SIGMA**2) for e, m in ((72.0, 8),))
    assert blocks <= ideal + 2 * SIGMA**2 * len(np.diff(shrinkage.edges(d)))


@pytest.mark.parametrize(
    "rule",
    [
        lambda y, s, v: shrinkage.blockwise(y[None], s, v, shrinkage.james_stein)[0],
        lambda y, s, v: shrinkage.wiener(y[None], s, v, np.arange(20, 0, -1.0))[0],
        lambda y, s, v: shrinkage.empirical_bayes(y, s, v, np.stack([np.arange(20, 0, -1.0), np.ones(20)]))[0],
    ],
)
def test_rules_turn_with_the_basis_and_scale_with_the_noise(rule):
    y, v, turn = seeding.rng(5, "y").normal(1, 1, size=20), basis(20), basis(20, 1)
    np.testing.assert_allclose(rule(turn @ y, SIGMA, turn @ v), turn @ rule(y, SIGMA, v), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rule(50 * y, 50 * SIGMA, v), 50 * rule(y, SIGMA, v), rtol=1e-4, atol=1e-4)


def test_towards_keeps_the_public_line_and_shrinks_the_rest():
    direction = basis(50)[0]
    along = risk(lambda y, s: shrinkage.towards(y, s, direction), 6 * direction)
    assert along < 4 * SIGMA**2 < risk(shrinkage.james_stein, 6 * direction)
    y = seeding.rng(6, "y").normal(size=50)
    assert shrinkage.towards(y, SIGMA, direction) @ direction == pytest.approx(y @ direction)
    across = basis(50)[1]
    assert risk(lambda y, s: shrinkage.towards(y, s, direction), 6 * across) <= 50 * SIGMA**2


def test_wiener_is_the_posterior_mean_when_the_spectrum_is_right():
    """Average risk over signals drawn from the prior comes near sum g sigma^2 / (g + sigma^2), the least there is."""
    v, spectrum = basis(100), 30.0 / np.arange(1, 101) ** 2
    rng = seeding.rng(7, "prior")
    signals = rng.normal(size=(120, 100)) * np.sqrt(spectrum) @ v.T
    noisy = signals + rng.normal(0, SIGMA, signals.shape)
    least = (spectrum * SIGMA**2 / (spectrum + SIGMA**2)).sum()
    for rule in (
        lambda y: shrinkage.wiener(y[None], SIGMA, v, spectrum)[0],
        lambda y: shrinkage.empirical_bayes(y, SIGMA, v, np.stack([spectrum, np.ones(100)]))[0],
    ):
        losses = [np.square(rule(y) - m).sum() for y, m in zip(noisy, signals, strict=True)]
        assert np.mean(losses) < 1.25 * least


def test_empirical_bayes_finds_the_energy_of_each_shape():
    shapes = np.stack([np.r_[np.ones(200), np.zeros(800)], np.r_[np.zeros(200), np.ones(800)]])
    y = seeding.rng(8, "y").normal(size=1000) * np.sqrt(SIGMA**2 + np.r_[np.full(200, 4.0), np.full(800, 0.5)])
    _, weights = shrinkage.empirical_bayes(y, SIGMA, np.eye(1000), shapes)
    assert weights == pytest.approx([800, 400], rel=0.2)


def test_empirical_bayes_reaches_the_best_likelihood_on_a_grid():
    shapes = np.stack([1 / np.arange(1, 31.0) ** 2, np.ones(30)])
    y = seeding.rng(9, "y").normal(size=30) * np.sqrt(SIGMA**2 + 40 * shapes[0])

    def likelihood(weights):
        variance = SIGMA**2 + sum(w * s / s.sum() for w, s in zip(weights, shapes, strict=True))
        return -0.5 * (np.log(variance) + y**2 / variance).sum()

    _, found = shrinkage.empirical_bayes(y, SIGMA, np.eye(30), shapes)
    grid = np.geomspace(1e-4, 1e4, 60)
    assert likelihood(found) >= max(likelihood((a, b)) for a in grid for b in grid) - 1e-3


def test_pure_noise_keeps_a_direction():
    """A vector of zeros could not be rescaled; the filter's and the prior's energies have a floor instead."""
    noise = seeding.rng(10, "noise").normal(0, 0.5 * SIGMA, 64)
    for kept in (
        shrinkage.wiener(noise[None], SIGMA, np.eye(64), np.ones(64))[0],
        shrinkage.empirical_bayes(noise, SIGMA, np.eye(64), np.stack([np.arange(64, 0, -1.0), np.ones(64)]))[0],
    ):
        assert np.linalg.norm(kept) > 0
        assert np.isfinite(kept).all()


def test_empirical_bayes_with_whole_blocks_turns_to_the_source_that_the_release_resembles():
    """Two correlated covariances; the posterior mean under the right one, known in closed form, is nearly reached."""
    rng, d, q = seeding.rng(11, "sources"), 60, 40
    roots = [np.linalg.qr(rng.normal(size=(q, q)))[0] * np.sqrt(40.0 * 0.7 ** np.arange(q)) for _ in range(2)]
    heads = np.stack([root @ root.T for root in roots])
    spectra = np.concatenate([np.einsum("sqq->sq", heads), np.zeros((2, d - q))], axis=1)
    flat = np.ones((1, d))
    losses = {"right": [], "found": [], "diagonal": []}
    for _ in range(30):
        signal = np.r_[roots[0] @ rng.normal(size=q), np.zeros(d - q)]
        y = signal + rng.normal(0, SIGMA, d)
        right = np.r_[heads[0] @ np.linalg.solve(heads[0] + SIGMA**2 * np.eye(q), y[:q]), np.zeros(d - q)]
        blocks = np.concatenate([heads, [np.eye(q)]])
        found, weights = shrinkage.empirical_bayes(y, SIGMA, np.eye(d), np.concatenate([spectra, flat]), blocks)
        diagonal, _ = shrinkage.empirical_bayes(y, SIGMA, np.eye(d), np.concatenate([spectra, flat]))
        for name, made in (("right", right), ("found", found), ("diagonal", diagonal)):
            losses[name].append(np.square(made - signal).sum())
    assert weights[0] > 5 * weights[1]
    assert np.mean(losses["found"]) < 1.3 * np.mean(losses["right"])
    assert np.mean(losses["found"]) < 0.8 * np.mean(losses["diagonal"])
