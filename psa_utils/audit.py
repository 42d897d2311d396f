"""The white-box membership game: can a mechanism's release tell two data sets apart that differ in one record?

Per trial the mechanism draws FRESH noise on one of the two data sets and releases vectors v (k, d). The attacker knows
both data sets, so also the difference Delta (k, d) that the record makes to the mean, and scores the release by its dot
product with Delta over all k layers: the likelihood ratio if the noise is white. So that noise that is not white
(one draw for several layers) is caught too, the score is the matched filter for the covariance that the products
<Delta_l, v_m> show in calibration trials. Calibration trials also fix the score's sign and the thresholds; they are
counted nowhere else. Any mechanism can be audited: it is a function that the game only calls.

A right PSA mechanism passes, with n = 40 pairs, three layers:

>>> from psa_utils import accounting, bounds
>>> benign = np.random.default_rng(0).normal(size=(40, 3, 8))
>>> worlds = worst_case(benign, clip=1.0, seed=0)
>>> trials = white_box(psa_draws(clip=1.0, sigma=0.1), worlds, trials=2000, seed=0)
>>> verdict = judge(trials)
>>> claim = accounting.gdp_mu(n=40, sigma=0.1, layers=3)
>>> round(claim, 2), round(verdict.mu_gdp, 2), round(verdict.mu_gaussian, 2), verdict.exceeds(claim)
(0.87, 0.72, 0.83, False)
>>> halved = judge(white_box(psa_draws(clip=1.0, sigma=0.05), worlds, trials=2000, seed=0))
>>> halved.exceeds(claim)
True
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from . import bounds, mechanism, seeding, store
from .trials import in_chunks

Release = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""A mechanism: differences (n, k, d) and a generator to vectors (k, d)."""
Draws = Callable[[np.ndarray, np.random.Generator, int], np.ndarray]
"""The same, released several times with fresh noise: (trials, k, d)."""
CHUNK = 500
"""Trials of each world computed between two writes."""
OUTLIER = 1e6
"""Norm of a worst-case record in units of the clip."""
RIDGE = 1e-9
"""Share of the signal taken for noise where none is seen, so that a noise-free direction has a finite weight."""
CALIBRATION, TRIAL = "calibration", "trial"


@dataclass(frozen=True, eq=False)
class Worlds:
    """Two data sets (n, k, d) that differ in ``copies`` records, and the change of the mean the attacker expects."""

    negative: np.ndarray
    positive: np.ndarray
    difference: np.ndarray
    """(k, d) clipped mean of the positive minus that of the negative world, under the claimed clip."""
    copies: int = 1


def neighbours(
    benign: np.ndarray, negative: np.ndarray, positive: np.ndarray, *, clip: np.ndarray | float, copies: int = 1
) -> Worlds:
    """Replace the last ``copies`` of the benign rows (n, k, d) by one or the other record (k, d).

    Raises:
        ValueError: more copies than rows, or records that clip to the same vector.
    """
    if not 1 <= copies <= len(benign):
        raise ValueError(f"copies={copies} must lie between 1 and the number of rows, {len(benign)}")
    sides = [mechanism.clipped_mean(record[None], clip=clip) for record in (negative, positive)]
    if np.array_equal(*sides):
        raise ValueError("the two records are equal after clipping; no attack can tell them apart")
    worlds = (np.concatenate([benign[copies:], np.repeat(record[None], copies, 0)]) for record in (negative, positive))
    return Worlds(*worlds, difference=(sides[1] - sides[0]) * copies / len(benign), copies=copies)


def worst_case(benign: np.ndarray, *, clip: np.ndarray | float, seed: int, copies: int = 1) -> Worlds:
    """Neighbours that reach the sensitivity: one random direction, huge, of opposite sign in the two worlds.

    Its sign alternates over layers, so that noise shared by layers cancels between them while the record does not.
    """
    _, layers, width = benign.shape
    direction = seeding.rng(seed, "worst-case").standard_normal(width)
    signs = np.where(np.arange(layers) % 2, -1.0, 1.0)
    record = OUTLIER * np.max(clip) * signs[:, None] * direction / np.linalg.norm(direction)
    return neighbours(benign, -record, record, clip=clip, copies=copies)


def psa_draws(*, clip: np.ndarray | float, sigma: float) -> Draws:
    """:func:`psa_utils.mechanism.psa`, summing the data once for all draws; bit for bit the same numbers."""

    def draws(differences: np.ndarray, rng: np.random.Generator, trials: int) -> np.ndarray:
        signal = mechanism.clipped_mean(differences, clip=clip)
        return signal + sigma * rng.standard_normal((trials, *signal.shape))

    return draws


def one_by_one(release: Release) -> Draws:
    """Audit any mechanism as it is called, once per trial; ``psa`` over 320 pairs takes milliseconds each time."""
    return lambda differences, rng, trials: np.stack([release(differences, rng) for _ in range(trials)])


def white_box(
    draws: Draws,
    worlds: Worlds,
    *,
    trials: int = 20_000,
    calibration: int = 2_000,
    seed: int,
    path: Path | None = None,
    key: str = "",
) -> pd.DataFrame:
    """Play the game ``trials`` times per world: columns ``phase`` (calibration, trial), ``coin`` (world), ``score``.

    Args:
        draws: the mechanism.
        worlds: the two data sets.
        trials: per world; they count.
        calibration: trials per world that fix direction, sign and (in :func:`judge`) thresholds.
        seed: the same seed gives the same table.
        path: CSV file in which finished chunks are kept, or None.
        key: names the mechanism and its settings; the data, the seed and this code are added to it.
    """
    features = partial(_features, draws, worlds, seed)
    first = np.stack([features(CALIBRATION, coin, 0, calibration) for coin in (0, 1)])
    weights = _matched_filter(first, worlds.difference)
    size = min(CHUNK, trials)

    def chunk(i: int) -> pd.DataFrame:
        count = min(size, trials - i * size)
        return _frame(TRIAL, [features(TRIAL, coin, i, count) @ weights for coin in (0, 1)])

    data = [hashlib.sha256(world.tobytes()).hexdigest() for world in (worlds.negative, worlds.positive)]
    code = store.code_of("audit", "mechanism", "seeding")
    key = store.key_of(mechanism=key, data=data, trials=trials, calibration=calibration, seed=seed, code=code)
    counted = in_chunks(chunk, -(-trials // size), path, key)
    return pd.concat([_frame(CALIBRATION, list(first @ weights)), counted], ignore_index=True)


def _features(draws: Draws, worlds: Worlds, seed: int, phase: str, coin: int, chunk: int, trials: int) -> np.ndarray:
    """Products <Delta_l, v_m> (trials, k * k) of fresh releases of one world."""
    world = worlds.positive if coin else worlds.negative
    releases = draws(world, seeding.rng(seed, "white-box", phase, coin, chunk), trials)
    return np.einsum("tmd,ld->tlm", releases, worlds.difference, optimize=True).reshape(trials, -1)


def _matched_filter(features: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """Weights (k * k,) from calibration features (2 worlds, trials, k * k) and the expected difference (k, d).

    Covariance^-1 times the expected shift, which is the likelihood ratio of two Gaussians; scaled so that scores
    have variance 1 and, if the expected shift is the true one, means mu apart; signed so that the positive world scores
    higher.
    """
    shift = (difference @ difference.T).ravel()
    residuals = np.concatenate(list(features - features.mean(axis=1, keepdims=True)))
    covariance = residuals.T @ residuals / (len(residuals) - 2)
    floor = RIDGE * (np.trace(covariance) + shift @ shift) / len(shift)
    weights = np.linalg.solve(covariance + floor * np.eye(len(shift)), shift)
    means = features.mean(axis=1) @ weights
    return weights / np.sqrt(weights @ shift) * (1 if means[1] >= means[0] else -1)


def _frame(phase: str, scores: Sequence[np.ndarray]) -> pd.DataFrame:
    """Scores of the negative and the positive world, one row per trial."""
    coins = np.repeat([0, 1], [len(part) for part in scores])
    return pd.DataFrame({"phase": phase, "coin": coins, "score": np.concatenate(scores)})


@dataclass(frozen=True)
class Verdict:
    """What one game proves; every bound holds in at least 95 % of audits."""

    rates: bounds.Rates
    """Errors at the threshold of ``mu_gdp``."""
    mu_gdp: float
    """Lower bound of mu, if the release is Gaussian."""
    mu_gaussian: float
    """Lower bound of mu, if the scores are Gaussian too: for the white box, not for counts."""
    delta: float
    epsilon_counts: float
    """Lower bound of epsilon at ``delta`` from nothing but counts; NaN for group canaries, whose delta is another."""

    @property
    def epsilon_gdp(self) -> float:
        """``mu_gdp`` as epsilon at ``delta``."""
        return bounds.epsilon_of_mu(self.mu_gdp, self.delta)

    @property
    def epsilon_gaussian(self) -> float:
        """``mu_gaussian`` as epsilon at ``delta``."""
        return bounds.epsilon_of_mu(self.mu_gaussian, self.delta)

    def exceeds(self, mu: float) -> bool:
        """Whether the trials refute the claim that the release is ``mu``-GDP (epsilon grows with mu at every delta)."""
        return self.mu_gdp > mu


def judge(trials: pd.DataFrame, *, delta: float = 1e-5, copies: int = 1) -> Verdict:
    """Turn the trials of any of the three games into bounds; thresholds come from the calibration trials alone."""
    calibration, counted = (scores_of(trials, phase) for phase in (CALIBRATION, TRIAL))
    rates = counted.rates(bounds.choose_threshold(calibration, bounds.gdp_mu_lower))
    epsilon = partial(bounds.epsilon_lower, delta=delta)
    return Verdict(
        rates=rates,
        mu_gdp=bounds.gdp_mu_lower(rates) / copies,
        mu_gaussian=bounds.gaussian_mu_lower(counted) / copies,
        delta=delta,
        epsilon_counts=epsilon(counted.rates(bounds.choose_threshold(calibration, epsilon))) if copies == 1 else np.nan,
    )


def scores_of(trials: pd.DataFrame, phase: str = TRIAL) -> bounds.Scores:
    """Split the scores of a phase by world."""
    chosen = trials[trials.phase == phase]
    return bounds.Scores(*(chosen.score[chosen.coin == coin].to_numpy(float) for coin in (0, 1)))
