"""The only definition of an error bar (bootstrap over items, crossed with noise seeds) and of a star (paired tests)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, and what the interval is over."""

    mean: float
    low: float
    high: float
    varies: str
    """``items`` or ``items x noise seeds``."""

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.low > 0 or self.high < 0


def mean_interval(values: np.ndarray, *, rng: np.random.Generator, draws: int = 2000, level: float = 0.95) -> Interval:
    """Mean of ``values`` (items,) or (items, seeds) with a bootstrap percentile interval.

    Items and seeds are redrawn independently (crossed random effects), because every seed is scored on the same
    items: treating the cells as independent would understate the error.

    Raises:
        ValueError: fewer than two items, or values that are not finite.

    >>> mean_interval(np.array([0.0, 1.0] * 50), rng=np.random.default_rng(0)).mean
    0.5
    """
    table = np.asarray(values, float)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or len(table) < 2 or not np.isfinite(table).all():
        raise ValueError(f"values of shape {np.shape(values)} must be (items, seeds), 2 items or more, finite")
    means = _bootstrap_means(table, rng, draws)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    varies = "items x noise seeds" if table.shape[1] > 1 else "items"
    return Interval(float(table.mean()), float(low), float(high), varies)


def difference_interval(
    treated: np.ndarray,
    control: np.ndarray,
    *,
    rng: np.random.Generator,
    draws: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Interval of the mean paired difference over the same items; ``control`` (items,) has no seeds.

    >>> bar = difference_interval(np.full((9, 2), 0.7), np.full(9, 0.5), rng=np.random.default_rng(0))
    >>> round(bar.mean, 3), bar.excludes_zero, bar.varies
    (0.2, True, 'items x noise seeds')
    """
    treated = np.asarray(treated, float)
    treated = treated[:, None] if treated.ndim == 1 else treated
    if len(treated) != len(control):
        raise ValueError(f"treated has {len(treated)} items, control {len(control)}; pair the same items")
    return mean_interval(treated - np.asarray(control, float)[:, None], rng=rng, draws=draws, level=level)


def _bootstrap_means(table: np.ndarray, rng: np.random.Generator, draws: int) -> np.ndarray:
    items, seeds = table.shape
    item_weights = rng.multinomial(items, np.full(items, 1 / items), size=draws) / items
    seed_weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=draws) / seeds
    return np.einsum("bi,is,bs->b", item_weights, table, seed_weights, optimize=True)


def paired_p(treated: np.ndarray, control: np.ndarray) -> float:
    """Two-sided p-value of the mean paired difference over items (t test); noise seeds are averaged per item first.

    Conditional on the noise draws: it says what these vectors do to other items. 1 where nothing differs at all.

    >>> round(paired_p(np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0, 1.0])), 3)
    0.13
    """
    difference = _per_item(treated) - _per_item(control)
    if len(difference) < 2:
        raise ValueError(f"{len(difference)} item(s) cannot be tested; give at least 2")
    if np.ptp(difference) == 0:
        return float(difference[0] == 0)
    return float(stats.ttest_1samp(difference, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p-values (Holm 1979): stars at level a then err anywhere with probability at most a.

    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, float)
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return adjusted.clip(max=1.0)


def detectable(treated: np.ndarray, control: np.ndarray, *, level: float = 0.05, power: float = 0.8) -> float:
    """Smallest true mean paired difference that a test at ``level`` finds with probability ``power``.

    (z_{1 - level/2} + z_power) s / sqrt(items), s the standard deviation of the paired differences.

    >>> alternating = np.array([0.1, -0.1] * 25)
    >>> round(detectable(alternating, np.zeros(50)), 3)
    0.04
    """
    difference = _per_item(treated) - _per_item(control)
    quantiles = stats.norm.ppf(1 - level / 2) + stats.norm.ppf(power)
    return float(quantiles * difference.std(ddof=1) / np.sqrt(len(difference)))


def _per_item(values: np.ndarray) -> np.ndarray:
    table = np.asarray(values, float)
    return table if table.ndim == 1 else table.mean(axis=1)
