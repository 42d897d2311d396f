r"""Private steering vectors at equal (epsilon, delta): PSA, what the literature offers, and better ones.

Every estimator has three steps, and only the first sees private data:

1. ``rows``: each pair's difference (k, d), alone, becomes a row (r, m) of L2 norm at most ``radius``;
2. the mean of n rows is released with N(0, sigma^2) noise on every coordinate;
3. ``finish``: the release, sigma and :class:`~psa_utils.public.Public` become vectors (k, d). Post-processing, free.

**Sensitivity.** Step 1 looks at one pair at a time, so replacing a pair replaces one row a by another b, and the mean
of the fixed, public number of rows moves by ||a - b||/n <= 2 radius/n. Two opposite rows reach it. Nothing else of an
estimator matters to the guarantee, so one argument and one test cover all; what differs is the radius:

* k rows of norm at most 1 each, stacked: sqrt(k) (``psa-*``, ``unit``, ``efron-morris``, ..., ``dp-jl``);
* one vector of norm at most 1 (``joint-clip``, ``shared*``, ``one-layer``): 1, hence sqrt(k) times less noise.

A pair with a value that is not finite, or past :data:`LARGEST` where a norm could overflow, becomes a zero row, which
is in the ball: an exception would tell something about the private data.

**Privacy.** Joint accounting: one Gaussian mechanism with mu = 2 radius/(n sigma), exactly mu-GDP
(:mod:`psa_utils.accounting`). ``psa-paper`` alone takes the paper's sigma.

**Public data.** Step 1's clips and step 3's bases, priors and lift come from ``Public``; read there what counts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from . import accounting, finishing, mechanism, rows, seeding
from .public import Public

LARGEST = 1e100
"""No activation is this large; a row that claims to be counts as zero."""

Rows = Callable[[np.ndarray, Public], np.ndarray]
Finish = Callable[[np.ndarray, float, Public], np.ndarray]


@dataclass(frozen=True)
class Estimator:
    """One way to a private vector; see the module's docstring for its three steps."""

    rows: Rows
    """(n, k, d) float64, finite -> (n, r, m), every row's Frobenius norm at most ``radius(k)``."""
    radius: Callable[[int], float]
    finish: Finish
    """Release (r, m), sigma, public -> (k, d)."""
    paper_accounting: bool = False

    def mean(self, differences: np.ndarray, public: Public) -> np.ndarray:
        """Statistic (r, m) that gets the noise. Replacing one pair moves it by at most :meth:`sensitivity`."""
        return self.bounded(differences, public).mean(axis=0)

    def bounded(self, differences: np.ndarray, public: Public) -> np.ndarray:
        """Rows (n, r, m), each of Frobenius norm at most ``radius``, one per pair."""
        d = np.asarray(differences, np.float64)
        if d.ndim != 3 or len(d) == 0 or d.shape[1:] != public.nearest.shape[1:]:
            k, width = public.nearest.shape[1:]
            raise ValueError(f"differences has shape {d.shape}; to fit the public data it must be (n, {k}, {width})")
        sane = (np.abs(d) <= LARGEST).all(axis=(1, 2), keepdims=True)  # False for NaN
        return self.rows(np.where(sane, d, 0.0), public)

    def sensitivity(self, *, n: int, layers: int) -> float:
        """Largest L2 move of :meth:`mean` when one of n pairs is replaced: 2 radius/n."""
        return self.radius(layers) * accounting.sensitivity(n)

    def sigma(self, epsilon: float, delta: float, *, n: int, layers: int) -> float:
        """Noise level for a total (epsilon, delta), replace-one: exact, or as the paper computes it."""
        if self.paper_accounting:
            return paper_sigma(epsilon, delta, n=n, layers=layers)
        return self.sensitivity(n=n, layers=layers) / accounting.mu_for_epsilon(epsilon, delta)


def paper_sigma(epsilon: float, delta: float, *, n: int, layers: int) -> float:
    """Sigma by the paper's formula (Section 4): classical bound per layer, epsilon/k and delta/k for each.

    Inverse of :func:`accounting.paper_epsilon`, whose delta is 1/n:

    >>> round(paper_sigma(accounting.paper_epsilon(n=290, sigma=0.02, layers=5).total, 1 / 290, n=290, layers=5), 12)
    0.02
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon={epsilon} must be positive and finite")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie in (0, 1)")
    return accounting.sensitivity(n) * math.sqrt(2 * math.log(1.25 * layers / delta)) * layers / epsilon


def _stacked(layers: int) -> float:
    return math.sqrt(layers)


def _one(layers: int) -> float:
    return 1.0


ESTIMATORS: dict[str, Estimator] = {
    "public-only": Estimator(rows.nothing, lambda layers: 0.0, finishing.prior),
    "psa-paper": Estimator(rows.clipped, _stacked, finishing.as_released, paper_accounting=True),
    "psa-exact": Estimator(rows.clipped, _stacked, finishing.as_released),
    "unit": Estimator(rows.directions, _stacked, finishing.as_released),
    "joint-clip": Estimator(rows.jointly_clipped, _one, finishing.as_released),
    "dp-jl": Estimator(rows.projected, _stacked, finishing.unprojected),
    "efron-morris": Estimator(rows.directions, _stacked, finishing.efron_morris),
    "rank-one": Estimator(rows.directions, _stacked, finishing.rank_one),
    "one-layer": Estimator(rows.middle_layer, _one, finishing.at_middle_layer),
    "shared": Estimator(rows.one_vector, _one, finishing.everywhere),
    "prior": Estimator(rows.directions, _stacked, finishing.towards_prior),
    "subspace": Estimator(rows.directions, _stacked, finishing.subspace),
    "wiener": Estimator(rows.directions, _stacked, finishing.wiener),
    "block-efron-morris": Estimator(rows.directions, _stacked, finishing.block_efron_morris),
    "shared-block": Estimator(rows.one_vector, _one, finishing.block_james_stein),
    "shared-block-lift": Estimator(rows.one_vector, _one, finishing.lifted_block_james_stein),
    "shared-bayes-lift": Estimator(rows.one_vector, _one, finishing.lifted_bayes),
    "shared-mixture-lift": Estimator(rows.one_vector, _one, finishing.lifted_mixture),
}

DEFAULT = "shared-mixture-lift"
"""Best on public data alone: the shipped benchmark, each behaviour private in turn, the others' corpus public."""


def estimate(
    name: str, differences: np.ndarray, *, epsilon: float, delta: float, public: Public, rng: np.random.Generator
) -> np.ndarray:
    """Vectors (k, d) from private differences (n, k, d), (epsilon, delta)-DP for all layers together, replace-one.

    Lengths are the estimator's own; rescale to a public strength before comparing effects. The guarantee holds if
    ``rng`` cannot be guessed and its Gaussians are exact: a seeded NumPy generator demonstrates, it does not protect.

    Raises:
        ValueError: unknown name, epsilon or delta out of range, or shapes that do not fit ``public``. Never because
            of a value in ``differences``.
    """
    estimator = named(name)
    mean = estimator.mean(differences, public)
    sigma = estimator.sigma(epsilon, delta, n=len(differences), layers=len(public.clip))
    return estimator.finish(mean + sigma * rng.standard_normal(mean.shape), sigma, public)


def named(name: str) -> Estimator:
    """Look an estimator up."""
    if name not in ESTIMATORS:
        raise ValueError(f"estimator={name!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def compare(
    private: np.ndarray,
    reference: np.ndarray,
    public: Public,
    *,
    epsilons: Sequence[float],
    delta: float,
    seeds: Iterable[int],
    names: Sequence[str] = tuple(ESTIMATORS),
) -> pd.DataFrame:
    """Every estimator at equal total (epsilon, delta) against ``reference`` (k, d), e.g. the non-private mean.

    One row per estimator, epsilon and noise seed: ``cosine`` and ``norm`` are means over the layers that the
    estimator steers (all, save ``one-layer``). A vector shrunk to zero has cosine 0. Reads the private data: the
    table is for judging estimators on data one may look at, not part of a release.
    """
    table = []
    seeds = tuple(seeds)
    for name in names:
        estimator, mean = named(name), named(name).mean(private, public)
        for epsilon in epsilons:
            sigma = estimator.sigma(epsilon, delta, n=len(private), layers=len(public.clip))
            for seed in seeds:
                noise = seeding.rng(seed, "compare", name).standard_normal(mean.shape)
                made = estimator.finish(mean + sigma * noise, sigma, public)
                table.append((name, epsilon, seed, *_closeness(made, reference)))
    return pd.DataFrame(table, columns=["estimator", "epsilon", "seed", "cosine", "norm"])


def _closeness(vectors: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    steered = vectors.any(axis=1)
    if not steered.any():
        return 0.0, 0.0
    vectors, reference = vectors[steered], reference[steered]
    return float(mechanism.cosine(vectors, reference).mean()), float(np.linalg.norm(vectors, axis=1).mean())
