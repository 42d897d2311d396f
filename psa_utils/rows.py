"""Step 1 of an estimator: one pair's difference (k, d) becomes a row of bounded norm, whatever the pair.

Every function maps (n, k, d), float64 and finite, to (n, r, m) pair by pair: row i depends on pair i and on public
constants only. The docstring states the largest Frobenius norm of a row; replacing a pair moves the mean of n rows
by at most twice that over n.
"""

import numpy as np

from .public import Public, shared, unit


def clipped(differences: np.ndarray, public: Public) -> np.ndarray:
    """Rows of PSA (Algorithm 1, lines 4-6), d / max(C, ||d||) per layer: k vectors of norm at most 1."""
    return _cut(differences, public.clip)


def directions(differences: np.ndarray, public: Public) -> np.ndarray:
    """Unit norm per layer: no clip to choose, and every row uses the whole ball. k vectors of norm at most 1."""
    return unit(differences)


def jointly_clipped(differences: np.ndarray, public: Public) -> np.ndarray:
    """All k layers as one vector, clipped to the public joint norm: norm at most 1 altogether."""
    stacked = differences.reshape(len(differences), -1)
    return _cut(stacked, public.joint_clip).reshape(differences.shape)


def one_vector(differences: np.ndarray, public: Public) -> np.ndarray:
    """Direction of the sum of the unit-norm layers: one vector (1, d) of norm at most 1."""
    return shared(differences)[:, None]


def middle_layer(differences: np.ndarray, public: Public) -> np.ndarray:
    """Middle layer alone at unit norm: one vector (1, d) of norm at most 1."""
    return unit(differences[:, [differences.shape[1] // 2]])


def projected(differences: np.ndarray, public: Public) -> np.ndarray:
    """DP-JL: project by the public matrix, THEN clip, since a projection may lengthen. k vectors of norm at most 1."""
    return clipped(differences @ public.projection, public)


def nothing(differences: np.ndarray, public: Public) -> np.ndarray:
    """Row that ignores the pair: norm 0."""
    return np.zeros((len(differences), 1, 1))


def _cut(vectors: np.ndarray, clip: np.ndarray | float) -> np.ndarray:
    return vectors / np.maximum(clip, np.linalg.norm(vectors, axis=-1))[..., None]
