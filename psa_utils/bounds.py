r"""What the error rates of an attack prove about epsilon.

An attacker who guesses between two neighbouring data sets errs at rates FPR and FNR. A mu-GDP release allows at most
TPR = Phi(Phi^-1(FPR) + mu) (Dong, Roth and Su 2022), an (epsilon, delta)-DP one at least
FPR + e^epsilon FNR >= 1 - delta and the same with the rates exchanged (Kairouz, Oh and Viswanath 2015). Read backwards,
rates bound mu and epsilon from below. Rates are counted in finitely many trials, so every bound here except
:func:`paper_epsilon` is a one-sided confidence bound: it lies above the truth in at most 5 % of audits.

The four bounds, from the least assumed to the most: :func:`epsilon_lower` (nothing but independent trials),
:func:`gdp_mu_lower` (the release is Gaussian), :func:`gaussian_mu_lower` (so are the scores), and any of the last two
with g copies of the canary, mu(g) / g.

>>> rates = Rates(false_positives=668, negatives=10_000, false_negatives=668, positives=10_000)
>>> mu = gdp_mu_lower(rates)
>>> round(mu, 2), round(epsilon_of_mu(mu, 1e-3), 1), round(epsilon_lower(rates, 1e-3), 1)
(2.92, 12.6, 2.6)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from . import accounting

CONFIDENCE = 0.95
GRID = 200
"""Thresholds tried, and points of a ROC curve."""
NOISELESS = 1e3
"""A mu that no audit of a noisy release reports: its epsilon would be half a million."""


@dataclass(frozen=True)
class Rates:
    """Errors counted in independent trials of both worlds."""

    false_positives: int
    negatives: int
    false_negatives: int
    positives: int

    def __post_init__(self) -> None:
        counts = (self.false_positives, self.negatives, self.false_negatives, self.positives)
        if not (0 <= counts[0] <= counts[1] > 0 and 0 <= counts[2] <= counts[3] > 0):
            raise ValueError(f"counts {counts} are impossible; both worlds need trials, and no more errors than those")

    @property
    def fpr(self) -> float:
        """Share of trials of the negative world that were guessed positive."""
        return self.false_positives / self.negatives

    @property
    def fnr(self) -> float:
        """Share of trials of the positive world that were guessed negative."""
        return self.false_negatives / self.positives

    def upper(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Upper bounds of FPR and FNR that hold together (Clopper-Pearson, half the error each)."""
        error = (1 - confidence) / 2
        return (
            clopper_pearson_upper(self.false_positives, self.negatives, error),
            clopper_pearson_upper(self.false_negatives, self.positives, error),
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of independent trials, (T0,) of the negative and (T1,) of the positive world; high means positive."""

    negative: np.ndarray
    positive: np.ndarray

    def __post_init__(self) -> None:
        for name, values in (("negative", self.negative), ("positive", self.positive)):
            if len(values) < 2 or not np.isfinite(values).all():
                raise ValueError(f"{name} holds {len(values)} scores; give two or more, all finite")

    def rates(self, threshold: float) -> Rates:
        """Count the errors of guessing positive where the score exceeds ``threshold``."""
        false_positives, false_negatives = (self.negative > threshold).sum(), (self.positive <= threshold).sum()
        return Rates(int(false_positives), len(self.negative), int(false_negatives), len(self.positive))

    def thresholds(self) -> np.ndarray:
        """At most :data:`GRID` candidates, each half way between two scores that occur."""
        values = np.unique(np.concatenate([self.negative, self.positive]))
        middles = (values[:-1] + values[1:]) / 2 if len(values) > 1 else values
        return middles[np.linspace(0, len(middles) - 1, min(GRID, len(middles))).astype(int)]


def paper_epsilon(fpr: float, fnr: float) -> float:
    """Point estimate ln((1 - FPR) / FNR), without an interval: it proves nothing.

    This is the expression under which the paper's Table 7 gives its own epsilons for three rows of four, if the two
    PSA epsilons (0.6 and 1.6) are exchanged; its fourth, Mean on Qwen-2.5, is printed as 6.0.

    >>> round(paper_epsilon(0.040, 0.018), 1), round(paper_epsilon(0.10, 0.19), 1)  # Llama-2: Mean, PSA
    (4.0, 1.6)
    >>> round(paper_epsilon(0.020, 0.005), 1), round(paper_epsilon(0.09, 0.50), 1)  # Qwen-2.5: Mean, PSA
    (5.3, 0.6)
    """
    if fnr == 0 or fpr == 1:
        return math.inf if fpr < 1 else 0.0
    return max(0.0, math.log((1 - fpr) / fnr))


def clopper_pearson_upper(errors: int, trials: int, error: float) -> float:
    """Exact upper confidence bound of a binomial rate, wrong with probability at most ``error``.

    >>> round(clopper_pearson_upper(0, 100, 0.05), 4)  # 1 - 0.05 ** (1 / 100)
    0.0295
    """
    return 1.0 if errors == trials else float(betaincinv(errors + 1, trials - errors, 1 - error))


def epsilon_lower(rates: Rates, delta: float, confidence: float = CONFIDENCE) -> float:
    """Lower bound of epsilon at ``delta``: max(ln((1-FNR-delta)/FPR), ln((1-FPR-delta)/FNR), 0) at the upper rates."""
    fpr, fnr = rates.upper(confidence)
    powers = [(1 - fnr - delta) / fpr, (1 - fpr - delta) / fnr]
    return math.log(max(1.0, *powers))


def gdp_mu_lower(rates: Rates, confidence: float = CONFIDENCE) -> float:
    """Lower bound of mu (Nasr et al. 2023): max(0, Phi^-1(1 - FPR) - Phi^-1(FNR)) at the upper rates.

    Never its absolute value: rates worse than guessing are no evidence of a leak.
    """
    return implied_mu(*rates.upper(confidence))


def implied_mu(fpr: float, fnr: float) -> float:
    """Smallest mu whose trade-off curve allows the rates.

    The paper's PSA attack on Llama-2 needs ten times the mu of its n = 1000, sigma = 0.02:

    >>> round(implied_mu(0.10, 0.19), 2), round(accounting.gdp_mu(n=1000, sigma=0.02, layers=5), 2)
    (2.16, 0.22)
    """
    return 0.0 if fpr + fnr >= 1 else float(ndtri(1 - fpr) - ndtri(fnr))


def gaussian_mu(scores: Scores) -> tuple[float, float]:
    """Difference of the mean scores in units of their pooled standard deviation, and its standard error.

    For scores N(a, s^2) and N(a + s mu, s^2). The scale is estimated, not taken from the claim, since a mechanism with
    too little noise has the wrong one; that costs the mu^2 in var = 1/T0 + 1/T1 + mu^2 / (2 (T0 + T1)).
    """
    sizes = len(scores.negative), len(scores.positive)
    squares = sum(size * np.var(part) for size, part in zip(sizes, (scores.negative, scores.positive), strict=True))
    shift, scale = float(scores.positive.mean() - scores.negative.mean()), math.sqrt(squares / (sum(sizes) - 2))
    if scale == 0:
        return math.copysign(math.inf, shift) if shift else 0.0, 0.0
    mu = shift / scale
    return mu, math.sqrt(1 / sizes[0] + 1 / sizes[1] + mu**2 / (2 * sum(sizes)))


def gaussian_mu_lower(scores: Scores, confidence: float = CONFIDENCE) -> float:
    """Lower bound of mu for Gaussian scores of equal variance: estimate minus z times its standard error, or 0."""
    mu, error = gaussian_mu(scores)
    return max(0.0, mu - float(ndtri(confidence)) * error)


def copies_for(mu: float) -> int:
    """Copies g of a canary at which mu(g) / g bounds ``mu`` best: mu(g) near 3.

    With more, errors become too rare to count; with fewer, the sampling error of mu(g) is divided by less.

    >>> copies_for(0.2236), copies_for(5)
    (13, 1)
    """
    return max(1, round(3 / mu))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Epsilon at ``delta`` of a mu-GDP release; 0 for mu = 0, infinite where no noise was seen at all."""
    if mu == 0:
        return 0.0
    return accounting.gaussian_epsilon(mu, delta) if mu < NOISELESS else math.inf


def choose_threshold(calibration: Scores, objective: Callable[[Rates], float]) -> float:
    """Threshold with the largest ``objective``, on trials that are counted nowhere else."""
    candidates = calibration.thresholds()
    return float(candidates[np.argmax([objective(calibration.rates(t)) for t in candidates])])


def chance_of(refuted: int, audits: int, confidence: float = CONFIDENCE) -> float:
    """Probability that ``refuted`` or more of independent audits of right claims refute them: each may err.

    Several audits at 95 % are bound to refute a right mechanism now and then; a wrong one fails in most of them.

    >>> round(chance_of(1, 14), 2), round(chance_of(5, 14), 4)
    (0.51, 0.0004)
    """
    return float(binom.sf(refuted - 1, audits, 1 - confidence))


def allowed_tpr(fpr: np.ndarray | float, mu: float) -> np.ndarray:
    """Largest TPR that a mu-GDP release allows at ``fpr``: Phi(Phi^-1(FPR) + mu).

    >>> round(float(allowed_tpr(0.10, 0.2236)), 3)  # the paper prints a TPR of 0.81 there
    0.145
    """
    return ndtr(ndtri(fpr) + mu)


def allowed_auc(mu: float) -> float:
    """Largest area under the ROC curve that a mu-GDP release allows: Phi(mu / sqrt 2), that of :func:`allowed_tpr`.

    >>> round(allowed_auc(1.0), 3), round(float(np.trapezoid(allowed_tpr(np.linspace(0, 1, 100_001), 1.0), dx=1e-5)), 3)
    (0.76, 0.76)
    """
    return float(ndtr(mu / math.sqrt(2)))


def auc(scores: Scores, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Area under the ROC curve, ties counted half, with DeLong's interval (DeLong et al. 1988).

    It needs no threshold, so attackers can be compared by it; it is no bound of mu.

    >>> auc(Scores(np.array([0.0, 1.0]), np.array([2.0, 3.0])))
    (1.0, 1.0, 1.0)
    """
    negative, positive = (np.sort(part) for part in (scores.negative, scores.positive))
    # How much of the other world each score beats: its variance over scores is the variance of the area.
    wins = 1 - _share_below(positive, negative), _share_below(negative, positive)
    area = float(wins[1].mean())
    error = math.sqrt(sum(part.var(ddof=1) / len(part) for part in wins))
    half = float(ndtri((1 + confidence) / 2)) * error
    return area, max(0.0, area - half), min(1.0, area + half)


def _share_below(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Share of sorted ``values`` (m,) below each of ``at`` (T,), equal ones counted half."""
    return sum(np.searchsorted(values, at, side=side) for side in ("left", "right")) / (2 * len(values))


@dataclass(frozen=True, eq=False)
class Roc:
    """TPR (GRID + 1,) at evenly spaced FPR, with a band that holds for the whole curve at once."""

    fpr: np.ndarray
    tpr: np.ndarray
    low: np.ndarray
    high: np.ndarray


def roc(scores: Scores, confidence: float = CONFIDENCE) -> Roc:
    """ROC of "guess positive above a threshold" with a simultaneous band.

    Both empirical distributions lie within sqrt(ln(2 / a) / (2 T)) of the true ones everywhere, with probability 1 - a
    each (Dvoretzky-Kiefer-Wolfowitz, with Massart's constant); a is half the error.
    """
    fpr = np.linspace(0, 1, GRID + 1)
    slack = [math.sqrt(math.log(4 / (1 - confidence)) / (2 * len(s))) for s in (scores.negative, scores.positive)]
    low, high = _tpr_at(scores, fpr - slack[0]) - slack[1], _tpr_at(scores, fpr + slack[0]) + slack[1]
    return Roc(fpr, _tpr_at(scores, fpr), np.clip(low, 0, 1), np.clip(high, 0, 1))


def _tpr_at(scores: Scores, fpr: np.ndarray) -> np.ndarray:
    """Empirical TPR of the lowest threshold, among the negative scores, whose FPR is at most ``fpr``."""
    descending = np.sort(scores.negative)[::-1]
    allowed = np.floor(np.clip(fpr, -1, 1) * len(descending) + 1e-9).astype(int)
    thresholds = np.append(descending, -np.inf)[np.maximum(allowed, 0)]
    above = len(scores.positive) - np.searchsorted(np.sort(scores.positive), thresholds, side="right")
    return np.where(allowed < 0, 0.0, above / len(scores.positive))
