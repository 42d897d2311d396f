"""Step 3 of an estimator: from the noisy release to vectors (k, d), free post-processing.

Arguments are the release (r, m) = signal + N(0, sigma^2), its public sigma and public constants; private data cannot
be reached from here, so the guarantee of the release carries over (:mod:`psa_utils.shrinkage` gives the sources).
"""

from collections.abc import Sequence

import numpy as np

from . import shrinkage
from .public import Public


def as_released(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """No post-processing."""
    return noisy


def everywhere(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Use the one released vector at every layer."""
    return np.repeat(noisy, len(public.clip), axis=0)


def at_middle_layer(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Middle layer from the release, zero elsewhere: only that layer is steered."""
    return noisy * (np.arange(len(public.clip)) == len(public.clip) // 2)[:, None]


def efron_morris(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Matrix shrinkage over the k layers (Efron and Morris 1972)."""
    return shrinkage.efron_morris(noisy, sigma)


def rank_one(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """One direction, found in the noisy matrix, with a length per layer."""
    return shrinkage.rank_one(noisy)


def towards_prior(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Each layer shrunk towards the line through the public prior direction."""
    return np.stack([shrinkage.towards(y, sigma, g) for y, g in zip(noisy, public.prior, strict=True)])


def subspace(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Projection onto the leading tenth of the public eigenvectors: helps or harms as the signal lies in it or not."""
    leading = public.layers.basis[:, : max(1, noisy.shape[1] // 10)]
    return noisy @ leading @ leading.T


def wiener(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Wiener filter in the public eigenbasis, the same for all layers."""
    return shrinkage.wiener(noisy, sigma, public.layers.basis, public.layers.spectrum)


def block_efron_morris(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Efron-Morris over the layers in every block of the public eigenbasis: adapts where the basis does not fit."""
    return shrinkage.blockwise(noisy, sigma, public.layers.basis, shrinkage.efron_morris)


def block_james_stein(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """James-Stein of the shared vector in every block of the public eigenbasis, then used at every layer."""
    return everywhere(
        shrinkage.blockwise(noisy, sigma, public.layers.basis, shrinkage.james_stein), sigma, public
    )  # fmt: skip


def lifted_block_james_stein(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Block James-Stein of the shared vector, carried to each layer by the public regression."""
    return public.lift(shrinkage.blockwise(noisy, sigma, public.shared.basis, shrinkage.james_stein)[0])


def lifted_bayes(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Empirical Bayes of the shared vector in the public eigenbasis, carried to each layer by the public regression.

    The prior's energy falls like the public spectrum, faster, slower or not at all; the release decides by its own
    likelihood.
    """
    estimate, _ = shrinkage.empirical_bayes(noisy[0], sigma, public.shared.basis, _falls(public, (2.0, 1.0, 0.5, 0.0)))
    return public.lift(estimate)


def lifted_mixture(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """As :func:`lifted_bayes`, but each public source also offers its own covariance.

    The release then leans to the sources it resembles, say to phrases when the private answers are phrases; beyond
    the leading eigenvectors, where little energy is left, sources count as their common spectrum.
    """
    falls, moments = _falls(public, (2.0, 0.5, 0.0)), public.moments
    rank = moments.shape[1]
    own = np.tile(public.shared.spectrum, (len(moments), 1))
    own[:, :rank] = np.einsum("sqq->sq", moments)
    heads = np.concatenate([[np.diag(fall[:rank]) for fall in falls], moments])
    spectra = np.concatenate([falls, own])
    return public.lift(shrinkage.empirical_bayes(noisy[0], sigma, public.shared.basis, spectra, heads)[0])


def _falls(public: Public, powers: Sequence[float]) -> np.ndarray:
    return np.stack([public.shared.spectrum**power for power in powers])


def unprojected(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Lift by the projection's transpose, so that on average over projections the signal comes back unbiased."""
    return noisy @ public.projection.T


def prior(noisy: np.ndarray, sigma: float, public: Public) -> np.ndarray:
    """Public direction as it is: what one has without private data."""
    return public.prior
