r"""Noise that may leave the house: a discrete Gaussian on integers, drawn from the operating system's entropy.

A floating-point Gaussian leaks through its low bits (Mironov 2012): which doubles can occur depends on the mean it was
added to. Here everything random happens on integers. With GRID = 2^20, n rows and k layers:

1. ``integer_rows``: every row becomes integers r_i whose exact L2 norm is at most GRID, by truncation towards zero,
   which only shortens a row; what rounding left too long is clipped in integers. Each r_i depends on row i alone.
2. The sum S = sum_i r_i is exact in int64. Replacing one row moves a layer's S by at most 2 GRID, since the old and the
   new row have norm at most GRID each, and the k stacked layers by at most sqrt(k) 2 GRID.
3. OpenDP adds discrete Gaussian noise of scale s = sigma n GRID (Canonne, Kamath and Steinke 2020) to each coordinate.
   It certifies rho-zCDP with rho = (sqrt(k) 2 GRID / s)^2 / 2 = mu^2 / 2, every step rounded upwards.
4. The result divided by n GRID has standard deviation sigma on the vectors' own scale: post-processing.

**mu.** OpenDP certifies zCDP; the sharper number is mu = sqrt(k) 2 / (n sigma), the GDP value of the continuous
Gaussian (:func:`psa_utils.accounting.gdp_mu`). A continuous Gaussian *rounded* to integers is exactly mu-GDP: rounding
commutes with integer shifts and is post-processing. The discrete Gaussian is not it, but close: integrating the density
over a unit cell changes its logarithm by (z^2 - 1) / (24 s^2) + O(s^-4), z = y/s, so that over N = k d coordinates the
Kullback-Leibler divergence is N / (576 s^4) and, by Pinsker's inequality, the total variation at most
sqrt(N / 1152) / s^2 =: t. Hence delta(eps) exceeds the curve of mu by at most (1 + e^eps) t. Scales below 2^16 are
refused; at n sigma = 1 and N = 20,480, t is 4e-12, far below any delta in use.

**Entropy.** OpenDP's wheels draw from OpenSSL's generator, which the operating system seeds anew in every process and
after every fork. There is no seed to give away, and none can be set; :func:`demonstration_mean` is the seeded
counterpart, for demonstrations on data that are no secret.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np

from . import accounting

GRID = 2**20
"""Integer length of a row of norm 1."""
SMALLEST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**56
"""Noise scales s on integers: below, mu no longer describes the curve; above, noise comes near the end of int64."""


@dataclass(frozen=True, eq=False)
class Released:
    """A noisy mean ``values`` (k, d), float64, and what it costs.

    ``rho`` is the zCDP value that OpenDP certifies and ``mu`` the exact GDP value of the Gaussian, both for replacing
    one row, over all k layers together. With ``seeded`` noise neither protects anything: they are what a release with
    secret noise would cost.
    """

    values: np.ndarray
    rho: float
    mu: float
    sampler: str
    seeded: bool


def release_mean(rows: np.ndarray, *, sigma: float) -> Released:
    """Mean over n rows plus noise of standard deviation ``sigma`` per coordinate, safe to publish.

    Args:
        rows: (n, k, d), one row per unit of privacy and layer, already clipped or normalised to norm at most 1. A row
            that is longer is shortened to norm 1 and one that is not finite counts as zero: never an error, which would
            itself tell something about the private data.
        sigma: noise on the mean, as in :func:`psa_utils.accounting.sigma_for_epsilon`.

    Raises:
        ValueError: the shape, or n sigma outside the range in which the accounting holds. Both are public.

    >>> zero = release_mean(np.zeros((100, 5, 8)), sigma=0.2)
    >>> zero.values.shape, round(zero.mu, 6), round(zero.rho, 6), zero.seeded
    ((5, 8), 0.223607, 0.025, False)
    """
    sums, s = _sums(rows), scale(len(rows), sigma)
    noisy = np.array(_measurement(s)(sums.ravel().tolist()), np.int64)
    return _released(noisy, rows, sigma, f"OpenDP {version('opendp')} discrete Gaussian, OS entropy", seeded=False)


def demonstration_mean(rows: np.ndarray, *, sigma: float, rng: np.random.Generator) -> Released:
    """As :func:`release_mean`, with noise anyone who knows the seed can subtract: repeatable, and NOT private.

    >>> draws = [demonstration_mean(np.zeros((9, 1, 2)), sigma=0.2, rng=np.random.default_rng(3)) for _ in range(2)]
    >>> np.array_equal(draws[0].values, draws[1].values), draws[0].seeded
    (True, True)
    """
    sums, s = _sums(rows), scale(len(rows), sigma)
    noisy = sums.ravel() + np.rint(s * rng.standard_normal(sums.size)).astype(np.int64)
    return _released(noisy, rows, sigma, "NumPy rounded Gaussian, seeded: a demonstration, not private", seeded=True)


def integer_rows(rows: np.ndarray) -> np.ndarray:
    """Rows (..., d) as int64 of L2 norm at most GRID, exactly; each depends on its own row only.

    Multiplying by GRID, a power of two, is exact and truncation moves every coordinate towards zero. Only the float
    divisions that shorten rows longer than 1 could leave an excess, which :func:`_shorten` removes: the bound rests on
    integer arithmetic, not on how well a norm was computed. What truncation costs is less than one unit per
    coordinate: a relative 1e-4 of the norm at d = 16,384.

    >>> integer_rows(np.array([[0.6, -0.8], [3e300, 4e300], [np.nan, 0.0], [1 / 3, 5e-324]])).tolist()
    [[629145, -838860], [629145, 838860], [0, 0], [349525, 0]]
    """
    x = np.asarray(rows, np.float64)
    x = np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0.0)
    x = x / np.maximum(1.0, np.abs(x).max(axis=-1, keepdims=True))  # first, so that no square overflows
    x = x / np.maximum(1.0, np.linalg.norm(x, axis=-1, keepdims=True))
    return _shorten(np.trunc(x * GRID).astype(np.int64))


def scale(n: int, sigma: float) -> float:
    """Noise scale s = sigma n GRID on the integer sums; ask before a ledger is charged whether it can be drawn.

    Raises:
        ValueError: n sigma outside the range in which the accounting holds.

    >>> scale(100, 0.5) == 50 * GRID
    True
    """
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma={sigma} must be positive and finite; a release without noise is not private")
    s = sigma * n * GRID
    if not SMALLEST_SCALE <= s <= LARGEST_SCALE:
        raise ValueError(
            f"sigma={sigma} with n={n} gives n sigma = {sigma * n:.3g}; it must lie between "
            f"{SMALLEST_SCALE / GRID:.3g} (mu = {2 * GRID / SMALLEST_SCALE:.0f} a layer protects nobody) and "
            f"{LARGEST_SCALE / GRID:.3g}; choose sigma by accounting.sigma_for_epsilon"
        )
    return s


def sensitivity(layers: int) -> float:
    """L2 distance sqrt(k) 2 GRID that replacing one row can move the k layers' integer sums, rounded upwards.

    >>> sensitivity(4) >= 4 * GRID, sensitivity(4) / (4 * GRID) - 1 < 1e-15
    (True, True)
    """
    return math.nextafter(math.sqrt(layers), math.inf) * 2 * GRID


def _shorten(integers: np.ndarray) -> np.ndarray:
    """Move the largest coordinate of every row longer than GRID by one towards zero, until no row is."""
    flat = integers.reshape(-1, integers.shape[-1]).copy()
    while (over := np.flatnonzero((flat**2).sum(axis=1) > GRID**2)).size:
        largest = np.abs(flat[over]).argmax(axis=1)
        flat[over, largest] -= np.sign(flat[over, largest])
    return flat.reshape(integers.shape)


def _sums(rows: np.ndarray) -> np.ndarray:
    if rows.ndim != 3 or 0 in rows.shape:
        raise ValueError(f"rows has shape {rows.shape}; it must be (n rows, k layers, d), none of them 0")
    sums = np.zeros(rows.shape[1:], np.int64)
    for row in rows:  # one at a time, to hold no second copy of the rows
        sums += integer_rows(row)  # at most n GRID, below 2^63 for n < 2^43, more rows than any memory holds
    return sums


def _released(noisy: np.ndarray, rows: np.ndarray, sigma: float, sampler: str, *, seeded: bool) -> Released:
    n, layers, width = rows.shape
    return Released(
        values=noisy.reshape(layers, width) / (n * GRID),
        rho=_measurement(scale(n, sigma)).map(sensitivity(layers)),
        mu=accounting.gdp_mu(n=n, sigma=sigma, layers=layers),
        sampler=sampler,
        seeded=seeded,
    )


def _measurement(scale: float) -> Any:
    dp = _opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    return dp.m.make_gaussian(*space, scale=scale)


@cache
def _opendp() -> Any:
    import opendp.prelude as dp  # half a second, and only a release needs it

    dp.enable_features("contrib")
    return dp
