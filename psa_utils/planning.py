r"""How many demonstrations a target cosine needs, given epsilon, width and what is public about the signal.

A release y = m + N(0, sigma^2 I_d) of a mean with norm s has cos(y, m) = s / sqrt(s^2 + d sigma^2), up to terms of
order 1/sqrt(d). Suppose d splits into blocks of m_b coordinates with signal energy e_b (sum s^2), and each block is
multiplied by its best factor a_b = e_b / (e_b + m_b sigma^2), which block James-Stein reaches up to 2 sigma^2 a block.
Inner product with the mean: sum a_b e_b. Squared norm: sum a_b^2 (e_b + m_b sigma^2) = sum a_b e_b. Hence

    cos^2 = sum_b (e_b / s^2) e_b / (e_b + m_b sigma^2),

which is the first formula for one block. ``ceiling`` is the estimator's bias: the cosine without noise. Energies and
ceiling must come from public pairs; sigma = 2 radius / (n mu).
"""

import math
from collections.abc import Sequence

import numpy as np

from . import accounting


def expected_cosine(
    sigma: float, energies: Sequence[float], sizes: Sequence[int], *, ceiling: float = 1.0
) -> float:  # fmt: skip
    """Cosine to expect at noise ``sigma``: ``energies`` e_b and numbers of coordinates ``sizes`` of the blocks.

    The signal's norm 0.48 over 576 coordinates, then with nine tenths of its energy in the first 64:

    >>> round(expected_cosine(0.02, [0.2304], [576]), 3)
    0.707
    >>> round(expected_cosine(0.02, [0.9 * 0.2304, 0.1 * 0.2304], [64, 512]), 3)
    0.901
    """
    e, m = _blocks(energies, sizes)
    return ceiling * math.sqrt(float((e**2 / (e + m * sigma**2)).sum() / e.sum()))


def demonstrations(
    target: float,
    *,
    epsilon: float,
    delta: float,
    energies: Sequence[float],
    sizes: Sequence[int],
    radius: float = 1.0,
    ceiling: float = 1.0,
) -> int:
    """Smallest n whose :func:`expected_cosine` reaches ``target`` at a total (epsilon, delta), replace-one.

    ``radius`` is the estimator's: sqrt(k) for k stacked layers, 1 for one shared vector. n enters by sigma alone, so
    it grows like 1/epsilon, and like sqrt(d) without a public basis.

    Raises:
        ValueError: target not in (0, ceiling).

    >>> plan = {"epsilon": 1.0, "delta": 1e-5, "energies": [0.36]}
    >>> demonstrations(0.9, sizes=[576], **plan), demonstrations(0.9, sizes=[4096], **plan)
    (617, 1644)
    >>> demonstrations(0.9, sizes=[576], radius=5**0.5, **plan)
    1378
    """
    if not 0 < target < ceiling:
        raise ValueError(f"target={target} must lie in (0, {ceiling}), the cosine that the estimator has without noise")
    mu = accounting.mu_for_epsilon(epsilon, delta)

    def reached(n: int) -> bool:
        sigma = radius * accounting.sensitivity(n) / mu
        return expected_cosine(sigma, energies, sizes, ceiling=ceiling) >= target

    most = 1
    while not reached(most):
        most *= 2
    least = most // 2  # not enough, or 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if reached(middle) else (middle, most)
    return most


def _blocks(energies: Sequence[float], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    e, m = np.asarray(energies, float), np.asarray(sizes, float)
    if e.shape != m.shape or e.ndim != 1 or not (e >= 0).all() or e.sum() <= 0 or not (m >= 1).all():
        raise ValueError(f"energies={list(energies)} and sizes={list(sizes)} must pair energies >= 0 with sizes >= 1")
    return e, m
