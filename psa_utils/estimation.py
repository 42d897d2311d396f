"""Notebook 04's comparison of private estimators: cosine and alignment at equal (epsilon, delta), kept on disk."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from . import ablations, corpus, estimators, mechanism, paths, planning, seeding, store
from .ablations import Sweeps
from .config import Profile
from .public import Public, unit
from .scoring import Variant

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
COMPARED = (
    "public-only",
    "psa-paper",
    "psa-exact",
    "unit",
    "joint-clip",
    "dp-jl",
    "efron-morris",
    "rank-one",
    "one-layer",
    "shared",
    "prior",
    "subspace",
    "wiener",
    "block-efron-morris",
    "shared-block",
    estimators.DEFAULT,
)
MEAN = "mean"
"""Label of the non-private mean among the steered."""
STEERED = ("psa-paper", "psa-exact", estimators.DEFAULT)
"""Estimators whose vectors are also applied, at :data:`STEERED_EPSILON`."""
STEERED_EPSILON = 1.0
LEADING = 64
"""Public eigenvectors whose share of a mean's energy is shown."""


def public_for(profile: Profile, sources: Sequence[np.ndarray], behaviour: str) -> Public:
    """What may count as public beside a behaviour's private pairs.

    All of the shipped corpus, whose differences ``sources`` are, unless the private pairs are the shipped ones too:
    then the behaviour's own are left out.
    """
    if profile.data != "mini":
        return Public.of(*sources)
    return Public.of(*(source[corpus.of_others(behaviour)] for source in sources))


def compared(profile: Profile, sweeps: Sweeps, public: Public) -> pd.DataFrame:
    """Cosine to the non-private mean and norm of every estimator; :func:`psa_utils.estimators.compare`, kept."""
    private = sweeps.raw.private
    seeds = [seeding.derive_seed(sweeps.seed, "compare", sweeps.behaviour, i) for i in range(profile.few_seeds)]
    key = store.key_of(
        private=store.digest_of(private),
        public=[store.digest_of(source) for source in public.sources],
        settings=(EPSILONS, DELTA, seeds, COMPARED),
        code=store.code_of("estimators", "rows", "finishing", "shrinkage", "public", "mechanism", "accounting"),
    )
    options = {"epsilons": EPSILONS, "delta": DELTA, "seeds": seeds, "names": COMPARED}
    path = paths.results(profile.name, ablations.STAGE) / f"cosines-{sweeps.behaviour}.csv"
    table = store.frame(path, key, lambda: estimators.compare(private, mechanism.mean(private), public, **options))
    number = {seed: i for i, seed in enumerate(seeds)}  # a table names draws, not seeds of 19 digits
    return table.assign(behaviour=sweeps.behaviour, seed=table.seed.map(number))


def shape_of(sweeps: Sweeps, public: Public) -> dict[str, object]:
    """What decides between estimators: do layers agree, and does the public eigenbasis hold the mean's energy?

    ``layer_cosine``: mean cosine between the layers' means of unit-norm differences; ``signal``: their mean norm s;
    ``energy``: share of their squared norm in the leading public eigenvectors.
    """
    means = unit(sweeps.raw.private.astype(float)).mean(axis=0)
    directions = unit(means)
    cosines = (directions @ directions.T)[np.triu_indices(len(means), 1)]
    leading = means @ public.layers.basis[:, :LEADING]
    return {
        "behaviour": sweeps.behaviour,
        "layer_cosine": float(cosines.mean()) if len(cosines) else 1.0,
        "signal": float(np.linalg.norm(means, axis=1).mean()),
        "energy": float((leading**2).sum() / (means**2).sum()),
    }


def variants(sweeps: Sweeps, public: Public) -> Iterator[Variant]:
    """The non-private mean, and ``few_seeds`` draws of the :data:`STEERED` estimators, all at the public strength."""
    yield next(sweeps.mean_and_psa(estimator=MEAN))
    for name in STEERED:
        for noise_seed in range(sweeps.profile.few_seeds):
            rng = seeding.rng(sweeps.seed, "estimators", name, sweeps.profile.data, sweeps.behaviour, noise_seed)
            options = {"epsilon": STEERED_EPSILON, "delta": DELTA, "public": public, "rng": rng}
            values = estimators.estimate(name, sweeps.raw.private, **options)
            yield sweeps.variant(values, "PSA", "matched", noise_seed, estimator=name)


def planned(sweeps: Sweeps, signal: float, epsilons: Sequence[float]) -> list[float]:
    """Cosine that :mod:`psa_utils.planning` expects of the unit-norm release at every epsilon."""
    n, layers, width = sweeps.raw.private.shape
    sigmas = [estimators.named("unit").sigma(epsilon, DELTA, n=n, layers=layers) for epsilon in epsilons]
    return [planning.expected_cosine(sigma, [signal**2], [width]) for sigma in sigmas]
