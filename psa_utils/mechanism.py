r"""From difference vectors to steering vectors: mean, PCA and PSA, as pure functions in float64.

``differences`` is (n, k, d): n pairs, k layers, hidden size d; results are (k, d). Nothing here reads a file,
keeps state or creates randomness: noise comes from the generator the caller passes.
"""

import numpy as np

TINY = np.finfo(np.float64).tiny


def mean(differences: np.ndarray) -> np.ndarray:
    """Plain mean over pairs (Rimsky et al. 2024): the non-private steering vector.

    >>> mean(np.array([[[1.0, 0.0]], [[3.0, 2.0]]])).tolist()
    [[2.0, 1.0]]
    """
    return _checked(differences).mean(axis=0)


def max_norm_mean(differences: np.ndarray) -> np.ndarray:
    """Mean after dividing every difference by the layer's largest norm, as the paper's released code does.

    Not private: the largest norm is a statistic of the private data.

    >>> max_norm_mean(np.array([[[3.0, 4.0]], [[0.0, 0.0]]])).round(6).tolist()
    [[0.3, 0.4]]
    """
    d = _checked(differences)
    return d.mean(axis=0) / np.maximum(_norms(d).max(axis=0), TINY)[:, None]


def pca(differences: np.ndarray) -> np.ndarray:
    """First right singular vector of each layer's uncentred n x d difference matrix: unit norm, not private.

    This is the direction of the in-context vectors (Liu et al. 2024). Uncentred, so that a common shift, which
    is what steers, counts as variation; the sign is the one that agrees with the mean. A full SVD in
    float64, no random sketch.

    >>> pca(np.array([[[2.0, 0.1]], [[2.0, -0.1]]])).round(6).tolist()
    [[1.0, 0.0]]
    """
    d = _checked(differences)
    directions = np.stack([np.linalg.svd(layer, full_matrices=False)[2][0] for layer in d.swapaxes(0, 1)])
    agreement = np.einsum("kd,kd->k", directions, d.mean(axis=0))
    return directions * np.where(agreement < 0, -1.0, 1.0)[:, None] + 0.0


def public_clip(public: np.ndarray, quantile: float = 0.5) -> np.ndarray:
    """Clip C_l (k,) of each layer: a quantile of the norms of PUBLIC pairs' differences.

    Taking C from the private data would leak outside the account: one record can move the release by far
    more than the sensitivity.

    >>> public_clip(np.array([[[3.0, 4.0]], [[0.0, 1.0]], [[0.0, 2.0]]])).tolist()
    [2.0]
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile={quantile} must lie in (0, 1]")
    return np.quantile(_norms(_checked(public)), quantile, axis=0)


def clipped_mean(differences: np.ndarray, *, clip: np.ndarray | float) -> np.ndarray:
    """Mean of d_i / max(C, ||d_i||): every summand has norm at most 1 (paper, Algorithm 1, lines 4-6).

    Replacing one pair moves each layer's result by at most 2/n. A row that is not finite counts as zero, since
    an error here would itself reveal something about the private data.

    >>> clipped_mean(np.array([[[6.0, 8.0]], [[0.0, 1.0]]]), clip=2.0).tolist()
    [[0.3, 0.65]]
    """
    d = np.asarray(differences, np.float64)
    _shape(d)
    d = np.where(np.isfinite(d).all(axis=2, keepdims=True), d, 0.0)
    bound = np.maximum(_clip(clip, d.shape[1]), _norms(d))
    return (d / bound[:, :, None]).mean(axis=0)


def psa(differences: np.ndarray, *, clip: np.ndarray | float, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Private steering vectors: clipped mean plus N(0, sigma^2) on every coordinate (paper, Algorithm 1).

    Signal norm at most 1 per layer. The guarantee is :func:`psa_utils.accounting.gdp_mu`'s, if ``clip`` is
    public and ``rng`` cannot be guessed: a seeded generator demonstrates, it does not protect.

    Raises:
        ValueError: sigma <= 0 or clip <= 0; use :func:`clipped_mean` for no noise.
    """
    if not (sigma > 0 and np.isfinite(sigma)):
        raise ValueError(f"sigma={sigma} must be positive and finite; for sigma 0 call clipped_mean")
    signal = clipped_mean(differences, clip=clip)
    return signal + sigma * rng.standard_normal(signal.shape)


def rescale(vectors: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Give each layer's vector the stated norm: equal strength, so that methods differ in direction only.

    Post-processing, free of privacy cost as long as ``norms`` (k,) are public.

    >>> rescale(np.array([[3.0, 4.0]]), np.array([10.0])).tolist()
    [[6.0, 8.0]]
    """
    length = np.linalg.norm(vectors, axis=1)
    if not (length > 0).all():
        raise ValueError(f"vectors of norm {length.tolist()} cannot be rescaled; a zero vector has no direction")
    return vectors * (norms / length)[:, None]


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine (k,) between two (k, d) sets of vectors, layer by layer."""
    return np.einsum("kd,kd->k", a, b) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def expected_cosine(signal: np.ndarray, sigma: float, width: int) -> np.ndarray:
    """Cosine to expect between signal + N(0, sigma^2 I_d) and the signal, from the signal's norm s.

    cos = 1 / sqrt(1 + d sigma^2 / s^2), since the noise is nearly orthogonal to the signal and its norm
    concentrates at sigma sqrt(d).

    >>> round(float(expected_cosine(np.array(0.48), 0.02, 576)), 3)
    0.707
    """
    return 1 / np.sqrt(1 + width * sigma**2 / np.square(signal))


def _norms(d: np.ndarray) -> np.ndarray:
    return np.linalg.norm(d, axis=-1)


def _clip(clip: np.ndarray | float, layers: int) -> np.ndarray:
    c = np.broadcast_to(np.asarray(clip, np.float64), (layers,))
    if not ((c > 0) & np.isfinite(c)).all():
        raise ValueError(f"clip={np.asarray(clip).tolist()} must be positive and finite for every layer")
    return c


def _shape(d: np.ndarray) -> None:
    if d.ndim != 3 or 0 in d.shape:
        raise ValueError(f"differences has shape {d.shape}; it must be (n pairs, k layers, d), none of them 0")


def _checked(differences: np.ndarray) -> np.ndarray:
    d = np.asarray(differences, np.float64)
    _shape(d)
    if bad := np.flatnonzero(~np.isfinite(d).all(axis=(1, 2))).tolist():
        raise ValueError(f"differences has values that are not finite in row(s) {bad[:10]}; drop those pairs")
    return d
