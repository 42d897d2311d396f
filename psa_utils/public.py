"""What an estimator may know before it sees private data: scales, directions and eigenbases of PUBLIC differences.

Everything in :class:`Public` must come from pairs whose contents may be published; then it is a constant of the
mechanism and costs nothing. Pairs of the private data set are never public, nor are pairs of another data set only
because they serve another behaviour: they must be free to publish on their own account. The safe choice is a corpus
that anyone can download, such as the shipped benchmark in several answer formats (:mod:`psa_utils.corpus`).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import mechanism, seeding

RANK = 256
"""Leading public eigenvectors on which matrices are kept whole; the rest is treated as diagonal."""
RIDGE = 2.0
"""Ridge of the lift in units of the mean eigenvalue 1/d; between half of it and six times as much changes little."""
JL_WIDTH = 256


def unit(rows: np.ndarray) -> np.ndarray:
    """Divide by the L2 norm along the last axis; a zero row stays zero, and no row overflows or is lost.

    >>> unit(np.array([[3e300, 4e300], [0.0, 0.0], [0.0, 5e-324]])).tolist()
    [[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]]
    """
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scaled = rows / np.where(largest == 0, 1.0, largest)
    return scaled / np.where(largest == 0, 1.0, np.linalg.norm(scaled, axis=-1, keepdims=True))


def shared(differences: np.ndarray) -> np.ndarray:
    """One unit vector per pair, (n, d): the direction of the sum of its k unit-norm layers (n, k, d).

    >>> shared(np.array([[[2.0, 0.0], [0.0, 1.0]]])).round(3).tolist()
    [[0.707, 0.707]]
    """
    return unit(unit(differences).mean(axis=1))


@dataclass(frozen=True)
class Eigen:
    """Orthonormal eigenvectors (columns of ``basis``, d x d) and ``spectrum`` (d,), largest first."""

    basis: np.ndarray
    spectrum: np.ndarray

    @classmethod
    def of(cls, moment: np.ndarray) -> "Eigen":
        """Decompose a symmetric second moment (d, d); rounding below 0 becomes 0."""
        values, vectors = np.linalg.eigh(moment)
        return cls(vectors[:, ::-1], np.maximum(values[::-1], 0.0))


@dataclass(frozen=True)
class Lift:
    """From one shared vector to k layers: v_l = scale_l y + (y V) M_l, V the leading public eigenvectors (d, q).

    Ridge regression of the public pairs' unit-norm layers on their shared vectors, drawn towards scale_l times the
    identity where the public pairs say little (Hoerl and Kennard 1970, with a target other than 0): neighbouring
    layers turn a difference in the same way whatever the behaviour, and this undoes most of the shared vector's bias.
    """

    scale: np.ndarray
    basis: np.ndarray
    maps: np.ndarray

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """Vectors (k, d) for a shared vector (d,)."""
        return self.scale[:, None] * vector + np.einsum("q,kqd->kd", vector @ self.basis, self.maps)


@dataclass(frozen=True)
class Public:
    """Constants of the mechanism. ``nearest`` (n, k, d): pairs most like the private ones; ``sources``: all corpora.

    ``nearest`` sets the scales (clip, strength) and the prior direction; ``sources``, ``nearest`` among them, set the
    eigenbases and the lift. Sources count alike, however many pairs each has.
    """

    nearest: np.ndarray
    sources: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, nearest: np.ndarray, *others: np.ndarray) -> "Public":
        """Check and keep the public differences, each (pairs, k, d).

        Raises:
            ValueError: values that are not finite, differences that are mostly zero, or shapes (k, d) that differ.
        """
        sources = tuple(np.asarray(source, np.float64) for source in (nearest, *others))
        for source in sources:
            mechanism.mean(source)  # shape and finiteness
            if source.shape[1:] != sources[0].shape[1:]:
                raise ValueError(
                    f"public sources have shapes {sources[0].shape} and {source.shape}; k and d must agree"
                )
            if not (mechanism.public_clip(source) > 0).all():
                raise ValueError("half of a layer's public differences are zero; they give no scale, drop those pairs")
        return cls(sources[0], sources)

    @cached_property
    def clip(self) -> np.ndarray:
        """C_l (k,): median norm of each layer."""
        return mechanism.public_clip(self.nearest)

    @cached_property
    def joint_clip(self) -> float:
        """Median norm of the k layers stacked into one vector."""
        return float(np.median(np.linalg.norm(self.nearest, axis=(1, 2))))

    @cached_property
    def strength(self) -> np.ndarray:
        """(k,) norm of the public mean: what to rescale a vector to (``mechanism.rescale``)."""
        return np.linalg.norm(mechanism.mean(self.nearest), axis=1)

    @cached_property
    def prior(self) -> np.ndarray:
        """Unit vectors (k, d): direction of the mean of the unit-norm differences."""
        return unit(unit(self.nearest).mean(axis=0))

    @cached_property
    def layers(self) -> Eigen:
        """Eigenbasis of the unit-norm differences, all layers pooled."""
        return Eigen.of(
            self._average([np.einsum("nkd,nke->de", u, u, optimize=True) / u.shape[1] for u in self._units])
        )

    @cached_property
    def shared(self) -> Eigen:
        """Eigenbasis of the shared vectors."""
        return Eigen.of(self._average([s.T @ s for s in map(shared, self.sources)]))

    @cached_property
    def moments(self) -> np.ndarray:
        """Second moment (sources, q, q) of each source's shared vectors along the leading eigenvectors of them all."""
        turned = [shared(source) @ self.shared.basis[:, :RANK] for source in self.sources]
        return np.stack([t.T @ t / len(t) for t in turned])

    @cached_property
    def lift(self) -> Lift:
        """Map from a shared vector to the k layers."""
        basis, spectrum = self.shared.basis[:, :RANK], self.shared.spectrum[:RANK, None]
        pairs = [(shared(u), u) for u in self._units]
        scale = self._average([np.einsum("nd,nkd->k", s, u) for s, u in pairs])
        cross = self._average([np.einsum("nq,nkd->kqd", s @ basis, u, optimize=True) for s, u in pairs])
        beyond = cross - scale[:, None, None] * spectrum * basis.T
        return Lift(scale, basis, beyond / (spectrum + RIDGE / len(self.shared.basis)))

    @cached_property
    def projection(self) -> np.ndarray:
        """Johnson-Lindenstrauss matrix (d, r), entries N(0, 1/r): random once, the same for all data, public."""
        width = self.nearest.shape[2]
        narrow = min(JL_WIDTH, max(1, width // 2))
        return seeding.rng(0, "johnson-lindenstrauss", width).normal(0, narrow**-0.5, (width, narrow))

    @property
    def _units(self) -> list[np.ndarray]:
        return [unit(source) for source in self.sources]

    def _average(self, sums: list[np.ndarray]) -> np.ndarray:
        return sum(total / len(source) for total, source in zip(sums, self.sources, strict=True)) / len(sums)
