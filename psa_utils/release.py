"""``psa release``: from a file of private pairs to a vector file that says what it guarantees.

The order is the point. All that can be refused is refused before the ledger is charged; the charge is on disk before
noise is drawn; the vectors are written last, whole or not at all, and never over another file. A kill anywhere leaves
at worst a charge without a vector, and a hidden temporary file. Nothing is chosen by looking at the private pairs:
layers, scales, eigenbases and strength come from the model's shape and from public pairs.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from . import __version__, accounting, activations, corpus, estimators, packing, record, rows, safe_noise, target
from . import pairs as private_pairs
from .estimators import Estimator
from .ledger import Ledger, Spent
from .models import LM, load
from .pairs import Pairs
from .public import Public, unit
from .record import Certificate, Earlier, Model, PrivacyRecord
from .safe_noise import Released
from .vectors import SteeringVectors

WINDOW = 5
FORMAT = "text"
MULTIPLIER = 0.5
"""Suggested strength, in units of the public mean's norm: what ``make calibrate`` found for the packaged model."""


def release(
    *,
    model: str,
    pairs: Path,
    epsilon: float,
    delta: float,
    out: Path,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    layers: Sequence[int] | None = None,
    estimator: str | None = None,
    multiplier: float | None = None,
    ledger: Path | None = None,
    budget: float | None = None,
    demonstration: int | None = None,
) -> PrivacyRecord:
    """Compute vectors under (epsilon, delta)-DP for all layers together and write them with their record.

    Raises:
        ValueError: an argument that cannot be, named with its value and cure; a :class:`psa_utils.ledger.BudgetError`
            if the ledger's budget does not allow the release.
        FileExistsError: there is a file at ``out``.
        OSError: the target cannot be written; nothing was charged.
        psa_utils.target.ChargedError: the charge stands, but the vectors are not at ``out``; says where they are.
    """
    name = estimator or estimators.DEFAULT
    _check_options(name, epsilon, delta, multiplier, ledger, budget, demonstration)
    method, given = estimators.named(name), _read(pairs, delta)
    target.check(out, ledger)
    lm = load(model, revision=revision, dtype=dtype, device=device)
    chosen = lm.check_layers(automatic_layers(len(lm.blocks)) if layers is None else sorted(layers))
    sigma = method.sigma(epsilon, delta, n=given.n, layers=len(chosen))
    safe_noise.scale(given.n, sigma)  # refuses what could not be drawn
    packing.rows_of(lm, given.items, FORMAT)  # refuses pairs longer than the context, all at once
    public = Public.of(*corpus.differences(lm, chosen))
    bounded = method.bounded(_private(lm, given, chosen), public)
    mu = method.sensitivity(n=given.n, layers=len(chosen)) / sigma
    note = {"out": out.name, "model": _public_name(lm)}
    spent = ledger and Ledger(ledger).charge(given.identities(), mu, delta=delta, budget=budget, note=note)
    with target.charged(out):
        noisy = _draw(bounded, method, len(chosen), sigma, demonstration)
        vectors = SteeringVectors(chosen, _at_public_strength(method.finish(noisy.values, sigma, public), public))
        made = _record(
            lm,
            given,
            name,
            sigma,
            noisy,
            vectors,
            public,
            epsilons=record.claims(noisy.mu, given.n, delta),
            seed=demonstration,
            multiplier=MULTIPLIER if multiplier is None else multiplier,
            also_released=_earlier(spent, mu),
        )
        target.save(SteeringVectors(chosen, vectors.values, made.to_json()), out)
    return made


def automatic_layers(blocks: int) -> tuple[int, ...]:
    """Five consecutive blocks from two fifths of the depth on; all but the first where there are fewer than eight.

    >>> automatic_layers(30), automatic_layers(4)
    ((12, 13, 14, 15, 16), (1, 2, 3))
    """
    start = 2 * blocks // 5 if blocks >= 8 else 1
    return tuple(range(start, min(start + WINDOW, blocks)))


def _check_options(
    estimator: str,
    epsilon: float,
    delta: float,
    multiplier: float | None,
    ledger: Path | None,
    budget: float | None,
    demonstration: int | None,
) -> None:
    accounting.mu_for_epsilon(epsilon, delta)  # refuses a bad epsilon or delta
    if estimators.named(estimator).radius(1) == 0:
        raise ValueError(f"--estimator {estimator} reads no private data, so it has nothing to release; choose another")
    if multiplier is not None and not math.isfinite(multiplier):
        raise ValueError(f"--multiplier {multiplier} is no strength to suggest; give a finite number")
    if budget is not None and ledger is None:
        raise ValueError(f"--budget {budget:g} needs --ledger, the file that remembers what was spent")
    if demonstration is not None and demonstration < 0:
        raise ValueError(f"--demonstration {demonstration} is no seed; give a whole number of at least 0")
    if demonstration is not None and ledger is not None:
        raise ValueError(
            f"--ledger {ledger} cannot account for --demonstration {demonstration}: seeded noise protects nobody; "
            "leave one of them out"
        )


def _read(path: Path, delta: float) -> Pairs:
    given = private_pairs.read(path)
    if delta >= 1 / given.n:
        warnings.warn(
            f"delta={delta:g} is not below 1/n={1 / given.n:.3g}: such a delta permits a mechanism that publishes one "
            f"whole {given.unit} at random; choose a delta far below 1/n, for example 1e-5",
            stacklevel=3,
        )
    return given


def _private(lm: LM, given: Pairs, layers: Sequence[int]) -> np.ndarray:
    """Differences (n, k, d) by unit of privacy.

    One pair at a time: in a common batch a pair's activations differ in the last bits with what else is in it, so that
    replacing one pair would move other pairs' rows, which no sensitivity accounts for. What is not finite is handed
    on: it becomes a zero row, never an error, which would tell something about a private pair.
    """
    items = tqdm(given.items, desc="private pairs", disable=None, leave=False)
    found = [activations.differences(lm, [item], layers=layers, fmt=FORMAT, finite=False) for item in items]
    return private_pairs.per_unit(np.concatenate(found), given.units)


def _draw(bounded: np.ndarray, method: Estimator, layers: int, sigma: float, demonstration: int | None) -> Released:
    """Noisy mean of the bounded rows (n, r, m); jointly bounded rows are one long vector to the sampler."""
    flat = bounded.reshape(len(bounded), 1, -1) if method.radius(layers) == 1 else bounded
    if demonstration is None:
        noisy = safe_noise.release_mean(flat, sigma=sigma)
    else:
        noisy = safe_noise.demonstration_mean(flat, sigma=sigma, rng=np.random.default_rng(demonstration))
    return replace(noisy, values=noisy.values.reshape(bounded.shape[1:]))


def _at_public_strength(values: np.ndarray, public: Public) -> np.ndarray:
    """Vectors (k, d) at the norm of the public mean; one that shrinkage left at zero stays zero."""
    return unit(values) * public.strength[:, None]


def _record(
    lm: LM,
    given: Pairs,
    name: str,
    sigma: float,
    noisy: Released,
    vectors: SteeringVectors,
    public: Public,
    **chosen: Any,
) -> PrivacyRecord:
    method = estimators.named(name)
    clip, source = _clip(method, public)
    return PrivacyRecord(
        unit=given.unit,
        n=given.n,
        sigma=sigma,
        norm_rule="unit-norm" if clip is None else "clip",
        bounded="joint" if method.radius(len(vectors.layers)) == 1 else "per-layer",
        clip=clip,
        clip_source=source,
        layers=vectors.layers,
        mu=noisy.mu,
        certificate=None if noisy.seeded else Certificate(noisy.rho, "opendp", version("opendp")),
        accounting="exact Gaussian, all layers jointly (Balle and Wang 2018), scipy " + version("scipy"),
        estimator=name,
        sampler=noisy.sampler,
        model=Model.of(_public_name(lm), lm.revision, lm.model.config.model_type),
        format=FORMAT,
        software=f"psa_utils {__version__}",
        digest=vectors.digest(),
        **chosen,
    )


def _clip(method: Estimator, public: Public) -> tuple[tuple[float, ...] | None, str | None]:
    """C of an estimator that clips, and where it came from; none for unit norm."""
    source = "median norm of the shipped public pairs"
    if method.rows is rows.jointly_clipped:
        return (public.joint_clip,), f"{source}, layers stacked"
    if method.rows in (rows.clipped, rows.projected):
        return tuple(map(float, public.clip)), source
    return None, None


def _public_name(lm: LM) -> str:
    """Name of the model without the folders that lead to it on this machine."""
    return Path(lm.name).resolve().name if Path(lm.name).exists() else lm.name


def _earlier(spent: Spent | None, mu: float) -> tuple[Earlier, ...]:
    """Earlier releases of the ledger, as if all had used the same data.

    The bound over the whole ledger may be published; which units were used before may not.
    """
    if spent is None or spent.releases < 2:
        return ()
    before = math.sqrt(max(spent.mu_bound**2 - mu**2, 0.0))
    return (Earlier(f"{spent.releases - 1} earlier release(s) in the same ledger", before),)
