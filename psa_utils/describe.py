"""A vector file in words: its privacy record line by line, then what the vectors are.

What a guarantee costs (epsilon, delta, mu, rho) is rounded upwards, so that no print claims more than holds.
"""

import math
import textwrap

import numpy as np

from . import accounting
from .record import TIGHT_DELTA, PrivacyRecord
from .vectors import SteeringVectors

WIDTH = 100
LABEL = 16
NO_RECORD = (
    "NO PRIVACY RECORD: this file claims no guarantee. Vectors of the notebooks look like this: "
    "their noise is seeded, or they have none."
)


def describe_file(vectors: SteeringVectors, record: PrivacyRecord | None) -> str:
    """What ``psa inspect`` prints of a file that :func:`psa_utils.record.read` accepted: record, then vectors."""
    if record is None:
        lines = [textwrap.fill(NO_RECORD, WIDTH), *(_line(name, str(value)) for name, value in vectors.record.items())]
    else:
        lines = [describe(record), _line("vectors", "those the record was made for (digest checked)")]
    norms = np.linalg.norm(vectors.values, axis=1)
    by_layer = ", ".join(f"{layer} ({norm:.3g})" for layer, norm in zip(vectors.layers, norms, strict=True))
    return "\n".join([*lines, _line("hidden size", str(vectors.values.shape[1])), _line("layers (norm)", by_layer)])


def describe(record: PrivacyRecord) -> str:
    """Say what a record guarantees, to whom, and how it was reached; several lines without a newline at the end."""
    lines = {
        "would guarantee" if record.seeded else "guarantee": _guarantee(record),
        "protects": f"one {record.unit} of n = {record.n} (n is public), replaced by any other",
        "together with": _composed(record),
        "noise": _noise(record),
        "bounded by": _bound(record),
        "accounting": record.accounting,
        "estimator": record.estimator,
        "model": _model(record),
        "answers": record.format,
        "multiplier": "none suggested" if record.multiplier is None else f"{record.multiplier:g} suggested",
        "software": record.software,
        "digest": f"sha256 {record.digest}",
    }
    warning = ["DEMONSTRATION: the noise can be drawn again from its seed. This file protects nobody."]
    return "\n".join([*(warning if record.seeded else []), *(_line(name, text) for name, text in lines.items())])


def _line(name: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{name:<{LABEL}}", subsequent_indent=" " * LABEL)


def _up(value: float) -> str:
    """Round upwards to four significant digits.

    >>> _up(0.91891), _up(0.5), _up(1e-5), _up(0.0)
    ('0.919', '0.5', '1e-05', '0')
    """
    if value == 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.ceil(value / unit - 1e-6) * unit:.4g}"


def _guarantee(record: PrivacyRecord) -> str:
    epsilons = ", ".join(f"({_up(c.epsilon)}, {_up(c.delta)})-DP" for c in record.epsilons)
    zcdp = f"; {_certificate(record)}" if record.certificate else ""
    return f"{epsilons}; {_up(record.mu)}-GDP{zcdp}; relation: {record.relation}"


def _certificate(record: PrivacyRecord) -> str:
    return f"{_up(record.certificate.rho)}-zCDP certified by {record.certificate.library} {record.certificate.version}"


def _composed(record: PrivacyRecord) -> str:
    if not record.also_released:
        return "no earlier release from the same data on record; what no ledger saw is not counted"
    earlier = ", ".join(f"{e.what} (mu = {_up(e.mu)})" for e in record.also_released)
    epsilon = accounting.gaussian_epsilon(record.total_mu, TIGHT_DELTA)
    return (
        f"{earlier}; all from the same data, in total {_up(record.total_mu)}-GDP, ({_up(epsilon)}, {TIGHT_DELTA:g})-DP"
    )


def _noise(record: PrivacyRecord) -> str:
    source = record.sampler if record.seed is None else f"{record.sampler}, seed {record.seed}"
    return f"standard deviation {record.sigma:.6g} of one summand's largest norm; {source}"


def _bound(record: PrivacyRecord) -> str:
    where = "in every layer" if record.bounded == "per-layer" else "over all layers together"
    if record.clip is None:
        return f"unit norm {where}"
    return f"clipping at C = {', '.join(f'{c:.4g}' for c in record.clip)} {where}; C from {record.clip_source}"


def _model(record: PrivacyRecord) -> str:
    m = record.model
    pins = [f"revision {m.revision}" if m.revision else "", f"sha256 {m.digest}" if m.digest else ""]
    return f"{m.id} ({m.architecture}), {', '.join(filter(None, pins))}"
