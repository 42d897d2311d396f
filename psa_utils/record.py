r"""The privacy record: what a released vector file guarantees, how it was made, on which model it works.

It travels as JSON inside the safetensors file (:class:`psa_utils.vectors.SteeringVectors`, ``record``), in the form
that ``record.schema.json`` fixes, and its numbers follow from each other: mu from n, sigma and layers, every epsilon
from mu. A record that contradicts itself, or vectors other than those it was made for, are refused. That catches
damage, mix-ups and hand edits; it is no signature: whoever rewrites all of it consistently still has to be trusted.

Research files of the notebooks carry a light record without a ``schema`` entry; they claim no guarantee.

>>> [(round(claim.epsilon, 2), claim.delta) for claim in claims(0.2236, 1000)]
[(0.52, 0.001), (0.82, 1e-05)]
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from . import accounting, paths
from .vectors import SteeringVectors

SCHEMA = "psa-privacy-record/1"
TIGHT_DELTA = 1e-5
CURE = "the record was edited or damaged, or its maker has a fault; get the file again or release anew"


class RecordError(ValueError):
    """A record that breaks its schema, contradicts itself, or belongs to other vectors."""


@dataclass(frozen=True)
class Claim:
    """One (epsilon, delta) guarantee."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Certificate:
    """Zero-concentrated DP of the noise, as the sampler's library certifies it."""

    rho: float
    library: str
    version: str


@dataclass(frozen=True)
class Model:
    """The model that was read and can be steered; ``architecture`` is its configuration's ``model_type``."""

    id: str
    architecture: str
    revision: str | None
    digest: str | None

    @classmethod
    def of(cls, name: str, revision: str, architecture: str) -> "Model":
        """Sort out what an :class:`psa_utils.models.LM` calls its revision: SHA-256 of weights, or a commit.

        >>> Model.of("org/model", "0a1b2c", "llama").revision
        '0a1b2c'
        """
        is_digest = re.fullmatch("[0-9a-f]{64}", revision) is not None
        return cls(name, architecture, None if is_digest else revision, revision if is_digest else None)


@dataclass(frozen=True)
class Earlier:
    """Another release from the same private data."""

    what: str
    mu: float


@dataclass(frozen=True)
class PrivacyRecord:
    """Everything a reader needs to judge a released vector. ``record.schema.json`` says what each field means.

    Raises:
        RecordError: a field breaks the schema, or two fields contradict each other; names field, value and cure.
    """

    unit: str
    n: int
    sigma: float
    norm_rule: str
    bounded: str
    clip: tuple[float, ...] | None
    clip_source: str | None
    layers: tuple[int, ...]
    mu: float
    epsilons: tuple[Claim, ...]
    certificate: Certificate | None
    accounting: str
    estimator: str
    sampler: str
    seed: int | None
    model: Model
    format: str
    multiplier: float | None
    software: str
    also_released: tuple[Earlier, ...]
    digest: str
    relation: str = "replace-one"

    def __post_init__(self) -> None:
        _validate(self.to_json())
        for field, fault in _contradictions(self):
            raise RecordError(f"privacy record: {field}={getattr(self, field)!r} {fault}; {CURE}")

    @property
    def seeded(self) -> bool:
        """Whether the noise can be drawn again, so that nobody is protected."""
        return self.seed is not None

    @property
    def total_mu(self) -> float:
        """Mu of this release and all earlier ones from the same data together."""
        return accounting.compose_mu([self.mu, *(earlier.mu for earlier in self.also_released)])

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, as it is kept in the file; inverse of :meth:`from_json`."""
        # Through text, so that tuples become the lists a JSON reader sees.
        return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(self)))}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "PrivacyRecord":
        """Read a record back.

        Raises:
            RecordError: another schema version, or anything the class refuses.
        """
        if raw.get("schema") != SCHEMA:
            raise RecordError(
                f"privacy record: schema={raw.get('schema')!r}, this version reads {SCHEMA!r}; "
                f"use the software that wrote it ({raw.get('software')!r})"
            )
        _validate(raw)
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items() if name != "schema"}
        fields["epsilons"] = tuple(Claim(**claim) for claim in raw["epsilons"])
        fields["also_released"] = tuple(Earlier(**earlier) for earlier in raw["also_released"])
        fields["model"] = Model(**raw["model"])
        fields["certificate"] = raw["certificate"] and Certificate(**raw["certificate"])
        return cls(**fields)


def claims(mu: float, n: int, *deltas: float) -> tuple[Claim, ...]:
    """Exact guarantees of a mu-GDP release at delta 1/n (the paper's), 1e-5, and any further ``deltas``."""
    chosen = dict.fromkeys([1 / n, TIGHT_DELTA, *deltas])
    return tuple(Claim(accounting.gaussian_epsilon(mu, delta), delta) for delta in chosen)


def release_mu(*, n: int, sigma: float, layers: int, bounded: str) -> float:
    """Mu of one release: sensitivity 2/n in every layer, or 2/n in all where one vector of norm 1 is released.

    >>> round(release_mu(n=1000, sigma=0.02, layers=5, bounded="per-layer"), 4)
    0.2236
    >>> round(release_mu(n=1000, sigma=0.02, layers=5, bounded="joint"), 4)
    0.1
    """
    return accounting.gdp_mu(n=n, sigma=sigma, layers=1 if bounded == "joint" else layers)


def read(path: Path) -> tuple[SteeringVectors, PrivacyRecord | None]:
    """Vectors of a file and their privacy record; None where the file has a research record or none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no whole vector file, or vectors whose digest is not the record's.
        RecordError: a record that is not to be believed.
    """
    vectors = SteeringVectors.load(path)
    if "schema" not in vectors.record:
        return vectors, None
    try:
        record = PrivacyRecord.from_json(vectors.record)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    if record.layers != vectors.layers:
        raise RecordError(f"{path}: privacy record: layers={record.layers}, the file holds {vectors.layers}; {CURE}")
    return vectors, record


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    """Check of the shape alone, from ``record.schema.json``."""
    return jsonschema.Draft202012Validator(json.loads((paths.PACKAGE / "record.schema.json").read_text()))


def _validate(raw: Mapping[str, Any]) -> None:
    error = jsonschema.exceptions.best_match(validator().iter_errors(raw))
    if error is not None:
        value = "" if isinstance(error.instance, Mapping) else f"={error.instance!r}"
        meaning = f" ({error.schema['description']})" if "description" in error.schema else ""
        raise RecordError(f"privacy record: {error.json_path}{value} is refused: {error.message:.200}{meaning}; {CURE}")


def _contradictions(r: PrivacyRecord) -> Iterator[tuple[str, str]]:
    """Fields that cannot stand beside the others, each with the reason."""
    for field in ("sigma", "mu", "multiplier"):
        if not math.isfinite(getattr(r, field) or 0.0):
            yield field, "is not finite"
            return
    if list(r.layers) != sorted(r.layers):
        yield "layers", "is not ascending"
    if (r.certificate is None) != r.seeded:
        yield "certificate", f"does not go with seed={r.seed}: a release is certified, a seeded demonstration never"
    if r.model.revision is None and r.model.digest is None:
        yield "model", "has neither revision nor digest, so nothing says which weights these are"
    yield from _clip_contradictions(r)
    yield from _number_contradictions(r)


def _clip_contradictions(r: PrivacyRecord) -> Iterator[tuple[str, str]]:
    if r.norm_rule == "unit-norm":
        if r.clip is not None or r.clip_source is not None:
            yield "clip", "stands beside norm_rule='unit-norm', which has no C"
        return
    expected = 1 if r.bounded == "joint" else len(r.layers)
    if r.clip is None or len(r.clip) != expected or not all(map(math.isfinite, r.clip)):
        yield "clip", f"is not the {expected} finite number(s) of norm_rule='clip', bounded={r.bounded!r}"
    if r.clip_source is None:
        yield "clip_source", "does not say where C came from"


def _number_contradictions(r: PrivacyRecord) -> Iterator[tuple[str, str]]:
    mu = release_mu(n=r.n, sigma=r.sigma, layers=len(r.layers), bounded=r.bounded)
    if not math.isclose(r.mu, mu, rel_tol=1e-9):
        yield "mu", f"does not follow from n={r.n}, sigma={r.sigma}, {len(r.layers)} layer(s), {r.bounded} (mu={mu})"
    if not {1 / r.n, TIGHT_DELTA} <= {claim.delta for claim in r.epsilons}:
        yield "epsilons", f"lacks delta=1/n={1 / r.n} or delta={TIGHT_DELTA}"
    for claim in r.epsilons:
        exact = accounting.gaussian_epsilon(r.mu, claim.delta)
        if not math.isclose(claim.epsilon, exact, rel_tol=1e-6, abs_tol=1e-9):
            yield "epsilons", f"holds epsilon={claim.epsilon} at delta={claim.delta}, but mu={r.mu} gives {exact}"
    # A mu-GDP Gaussian is exactly (mu^2/2)-zCDP; no correct certificate lies below it.
    if r.certificate is not None and not mu**2 / 2 * (1 - 1e-9) <= r.certificate.rho < math.inf:
        yield "certificate", f"certifies less than the Gaussian's own rho={mu**2 / 2}, or nothing finite"
