"""A consistent privacy record with its vectors, and a disk that fills up."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from psa_utils import record
from psa_utils.record import Certificate, Model, PrivacyRecord
from psa_utils.vectors import SteeringVectors

WIDTH = 32


def values_of(layers: tuple[int, ...], width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(layers), width)).astype(np.float32)


def example(*, width: int = WIDTH, **changes: Any) -> PrivacyRecord:
    """A release of two layers of ``tiny-llama``; what depends on a changed field changes with it."""
    chosen = {"n": 1000, "sigma": 0.02, "layers": (1, 2), "bounded": "per-layer", **changes}
    n, layers = chosen["n"], chosen["layers"]
    mu = record.release_mu(n=n, sigma=chosen["sigma"], layers=len(layers), bounded=chosen["bounded"])
    clip = tuple(3.5 + i for i in range(1 if chosen["bounded"] == "joint" else len(layers)))
    derived = {
        "unit": "pair",
        "norm_rule": "clip",
        "clip": clip,
        "clip_source": "median norm of public pairs",
        "mu": mu,
        "epsilons": record.claims(mu, n),
        "certificate": Certificate(mu**2 / 2, "opendp", "0.16.0"),
        "accounting": "exact Gaussian, layers jointly (Balle and Wang 2018)",
        "estimator": "clipped mean",
        "sampler": "OpenDP 0.16.0 discrete Gaussian, OS entropy",
        "seed": None,
        "model": Model("tiny-llama", "llama", None, "a" * 64),
        "format": "text",
        "multiplier": None,
        "software": "psa_utils 0.1.0",
        "also_released": (),
        "digest": SteeringVectors(layers, values_of(layers, width)).digest(),
    }
    return PrivacyRecord(**{**derived, **chosen})


def vectors_of(made: PrivacyRecord, width: int = WIDTH) -> SteeringVectors:
    return SteeringVectors(made.layers, values_of(made.layers, width), made.to_json())


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow past 200 bytes: a write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
