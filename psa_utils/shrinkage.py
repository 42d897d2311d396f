r"""Shrinkage of a noisy release: better vectors from ``signal + N(0, sigma^2)``, at no privacy cost.

Every function takes a released array, its public noise level sigma and constants fixed before the private data
were seen, never the data themselves. What they return is therefore post-processing, and a mu-GDP release stays
mu-GDP (Dong, Roth and Su 2022, Proposition 4; Dwork and Roth 2014, Proposition 2.1), whatever the estimator
assumes about the signal: a wrong assumption costs accuracy, never privacy. The noise must be N(0, sigma^2) on every
coordinate, so rotate by an orthonormal basis first if the rule should act there.
"""

import itertools
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

FIRST_BLOCK = 8


def james_stein(noisy: np.ndarray, sigma: float) -> np.ndarray:
    """Positive-part James-Stein: one factor (1 - (m - 2) sigma^2 / ||y||^2)_+ for all m numbers.

    Better than the noisy array in expected squared error for every signal if m >= 3 (James and Stein 1961; Baranchik
    1970); fewer numbers are returned as they are. It changes length only: use it on blocks to change direction.

    >>> james_stein(np.array([3.0, 4.0, 0.0, 0.0]), 1.0).round(3).tolist()
    [2.76, 3.68, 0.0, 0.0]
    """
    energy = float(np.square(noisy).sum())
    if noisy.size < 3 or energy == 0:
        return noisy
    return noisy * max(0.0, 1 - (noisy.size - 2) * sigma**2 / energy)


def efron_morris(noisy: np.ndarray, sigma: float) -> np.ndarray:
    """Matrix shrinkage of k rows of m numbers that point in similar directions, e.g. layers (Efron and Morris 1972).

    M = (I - (m - k - 1) sigma^2 (Y Y^T)^-1)_+ Y: each singular value s of Y becomes s (1 - (m - k - 1) sigma^2/s^2)_+,
    so directions that the rows share are kept and those in which only noise lives go. Minimax for m >= k + 2; with
    fewer columns, and with one row, James-Stein takes its place.

    >>> efron_morris(np.diag([4.0, 2.0]) @ np.eye(2, 5), 1.0).diagonal().tolist()
    [3.5, 1.0]
    """
    rows, columns = noisy.shape
    if columns < rows + 2 or rows == 1:
        return james_stein(noisy, sigma)
    left, values, right = np.linalg.svd(noisy, full_matrices=False)
    kept = np.maximum(0.0, 1 - (columns - rows - 1) * sigma**2 / np.maximum(values**2, np.finfo(float).tiny))
    return (left * (values * kept)) @ right


def rank_one(noisy: np.ndarray) -> np.ndarray:
    """Best rank-1 approximation of k layers: one direction, a length and sign per layer (Eckart and Young 1936).

    >>> rank_one(np.diag([4.0, 2.0])).tolist()
    [[4.0, 0.0], [0.0, 0.0]]
    """
    left, values, right = np.linalg.svd(noisy, full_matrices=False)
    return np.outer(left[:, 0] * values[0], right[0])


def edges(width: int) -> list[int]:
    """Borders of blocks 8, 16, 32, ... wide, in order of falling public eigenvalue; the last takes the rest.

    Doubling blocks lose little against the best factor per coordinate when energy falls with the index, and need
    not know how fast it falls (weakly geometric blocks: Cavalier and Tsybakov 2001).

    >>> edges(576), edges(5)
    ([0, 8, 24, 56, 120, 248, 576], [0, 5])
    """
    borders, block = [0], FIRST_BLOCK
    while width - (borders[-1] + block) >= block:
        borders.append(borders[-1] + block)
        block *= 2
    return [*borders, width]


def blockwise(
    noisy: np.ndarray, sigma: float, basis: np.ndarray, rule: Callable[[np.ndarray, float], np.ndarray]
) -> np.ndarray:
    """Rotate rows (r, d) into ``basis`` (d, d), shrink every block of :func:`edges` by ``rule``, rotate back.

    The basis is orthonormal, so the noise stays N(0, sigma^2) on every coordinate.
    """
    turned = noisy @ basis
    borders = edges(turned.shape[1])
    blocks = [rule(turned[:, a:b], sigma) for a, b in itertools.pairwise(borders)]
    return np.concatenate(blocks, axis=1) @ basis.T


def towards(noisy: np.ndarray, sigma: float, direction: np.ndarray) -> np.ndarray:
    """Shrink a vector (d,) towards the line through a public unit ``direction`` (d,), not towards 0.

    The part along the line is kept, with whatever sign and length was released; the rest shrinks by James-Stein
    (Stein's estimator with a linear subspace as its target; Sclove, Morris and Radhakrishnan 1972). The rest lives in
    d - 1 dimensions, so its factor uses d - 3.
    """
    along = (noisy @ direction) * direction
    rest = noisy - along
    energy = float(rest @ rest)
    if noisy.size < 4 or energy == 0:
        return noisy
    return along + rest * max(0.0, 1 - (noisy.size - 3) * sigma**2 / energy)


def wiener(noisy: np.ndarray, sigma: float, basis: np.ndarray, spectrum: np.ndarray) -> np.ndarray:
    """Wiener filter of rows (r, d): factor g_j / (g_j + sigma^2), g_j = c spectrum_j, in a public eigenbasis.

    c sets the prior's energy to what the release holds above the noise, (||y||^2 - r d sigma^2)_+, and at least to a
    twentieth of the noise's, so that pure noise does not turn the filter off.
    """
    noise = noisy.size * sigma**2
    energy = max(float(np.square(noisy).sum()) - noise, noise / 20) / len(noisy)
    prior = energy * spectrum / spectrum.sum()
    return (noisy @ basis) * (prior / (prior + sigma**2)) @ basis.T


def empirical_bayes(
    noisy: np.ndarray, sigma: float, basis: np.ndarray, spectra: np.ndarray, heads: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean of a vector (d,) under a mixture of public covariances that the release itself weighs.

    Prior N(0, sum_c weight_c G_c) in ``basis``, every G_c a public guess scaled to trace 1: diagonal, its energies
    ``spectra`` (c, d), except that ``heads`` (c, q, q) may give the block of the first q coordinates whole. The
    weights, energies all of them, maximise the likelihood of the release, y ~ N(0, sum_c weight_c G_c + sigma^2 I)
    (type II maximum likelihood: Robbins 1956; Efron and Morris 1973). A flat spectrum among the guesses keeps the rule
    from trusting a basis that does not fit. Returns the estimate and the weights.

    >>> y = np.array([5.0, -4.0, 0.2, 0.1])
    >>> guesses = np.array([[0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    >>> estimate, weights = empirical_bayes(y, 1.0, np.eye(4), guesses)
    >>> estimate.round(1).tolist(), weights.round(0).tolist()
    ([4.8, -3.8, 0.0, 0.0], [39.0, 0.0])
    """
    width = len(noisy)
    heads = np.zeros((len(spectra), 0, 0)) if heads is None else heads
    scale = width / spectra.sum(axis=1)  # in units of sigma^2 per coordinate, weights are near 1
    heads, tails = heads * scale[:, None, None], spectra[:, heads.shape[1] :] * scale[:, None]
    turned = noisy @ basis / sigma
    head, tail = np.split(turned, [heads.shape[1]])

    def loss(log_weights: np.ndarray) -> tuple[float, np.ndarray]:
        weights = np.exp(log_weights)
        inverse = np.linalg.inv(np.eye(len(head)) + np.tensordot(weights, heads, 1))
        variance, solved = 1 + weights @ tails, inverse @ head
        fit = tail**2 / variance
        deviance = head @ solved - np.linalg.slogdet(inverse)[1] + (np.log(variance) + fit).sum()
        slope = (inverse * heads).sum(axis=(1, 2)) - (heads @ solved) @ solved + tails @ ((1 - fit) / variance)
        return 0.5 * float(deviance), 0.5 * weights * slope

    energy = max(float(np.square(turned).mean()) - 1, 0.05)
    start, limits = np.full(len(spectra), np.log(energy / len(spectra))), [(-12.0, 15.0)] * len(spectra)
    weights = np.exp(minimize(loss, start, jac=True, method="L-BFGS-B", bounds=limits).x)
    block, variance = np.tensordot(weights, heads, 1), weights @ tails
    kept = [block @ np.linalg.solve(block + np.eye(len(head)), head), tail * variance / (variance + 1)]
    return basis @ np.concatenate(kept) * sigma, weights * width * sigma**2
