"""The only definition of an error bar: percentile bootstrap over items, crossed with noise seeds."""

from dataclasses import dataclass

import numpy as np


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
