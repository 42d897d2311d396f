"""What the notebooks compute, stage by stage, from a profile: read back if finished, computed if not."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from . import accounting, activations, data, mechanism, models, packing, paths, seeding, store
from .config import Profile
from .models import LM
from .vectors import SteeringVectors

METHODS = ("zero-shot", "PCA", "Mean", "PSA")
SPLITS = ("train", "public")
EXTRACT = "01_extract"
CHUNK = 128
"""Pairs extracted between two writes to disk."""


def load_model(profile: Profile) -> LM:
    """Load the profile's model."""
    return models.load(profile.model, revision=profile.revision, dtype=profile.dtype, device=profile.device)


def items(profile: Profile, behaviour: str, split: str) -> list[data.Item]:
    """Items of a split, as many as the profile wants."""
    limit = {"train": profile.n_train, "test": profile.n_test}.get(split)
    return data.load_items(profile.data, behaviour, split, limit)


def differences(profile: Profile, lm: LM, behaviour: str, split: str, fmt: str, *, stage: str = EXTRACT) -> np.ndarray:
    """Difference vectors (n, k, d) of a behaviour's ``train`` (private) or ``public`` pairs; kept under ``stage``."""
    pairs = items(profile, behaviour, split)
    key = f"{_request(profile, pairs, fmt)} {lm.revision}"
    path = _differences_path(profile, behaviour, split, fmt, stage)
    return store.arrays(path, key, lambda: _extract(profile, lm, behaviour, split, fmt, pairs, key, path))[
        "differences"
    ]


def _extract(
    profile: Profile,
    lm: LM,
    behaviour: str,
    split: str,
    fmt: str,
    pairs: Sequence[data.Item],
    key: str,
    path: Path,
) -> dict[str, np.ndarray]:
    """Extract in chunks, each kept until all are there: an interrupted run goes on after the last whole chunk."""
    options = {"layers": profile.layers, "fmt": fmt, "template": profile.template, "batch_tokens": profile.batch_tokens}
    parts = {}
    try:
        packing.rows_of(lm, pairs, fmt, template=profile.template)  # names every item too long before hours of work
        for start in range(0, len(pairs), CHUNK):
            file, chunk = path.with_name(f".{path.stem}.{start}{path.suffix}"), pairs[start : start + CHUNK]
            kept = store.arrays(file, key, lambda c=chunk: {"part": activations.differences(lm, c, **options)})
            parts[file] = kept["part"]
    except data.DataError as error:
        after = f", counted after item {CHUNK * len(parts)}" if parts else ""
        raise data.DataError(f"{data.file_of(profile.data, behaviour, split)}{after}: {error}") from error
    for file in parts:
        file.unlink()
    return {"differences": np.concatenate(list(parts.values()))}


def _request(profile: Profile, pairs: Sequence[data.Item], fmt: str) -> str:
    """Everything but the weights that decides what an extraction gives."""
    return store.key_of(
        model=profile.model,
        dtype=profile.dtype,
        items=data.digest(pairs),
        layers=profile.layers,
        fmt=fmt,
        template=profile.template,
        code=store.code_of("activations", "engine", "packing", "models"),
    )


def _differences_path(profile: Profile, behaviour: str, split: str, fmt: str, stage: str = EXTRACT) -> Path:
    return paths.results(profile.name, stage) / f"{behaviour}-{split}-{fmt}.safetensors"


@dataclass(frozen=True)
class Extracted:
    """One behaviour's raw material: private and public differences and what is derived from the public ones."""

    private: np.ndarray
    public: np.ndarray
    clip: np.ndarray
    """C_l (k,): quantile of the public norms."""
    strength: np.ndarray
    """(k,) norm of the public mean: the common norm of ``recipe="matched"``."""

    @classmethod
    def of(cls, profile: Profile, private: np.ndarray, public: np.ndarray) -> "Extracted":
        """Derive clip and strength from the public differences."""
        clip = mechanism.public_clip(public, profile.clip_quantile)
        return cls(private, public, clip, np.linalg.norm(mechanism.mean(public), axis=1))


def extracted(profile: Profile, behaviour: str, fmt: str) -> Extracted:
    """Read back what notebook 01 kept.

    Raises:
        FileNotFoundError: notebook 01 has not run for this profile.
        ValueError: a kept file is damaged, or was made from other items, layers or code.
    """
    return Extracted.of(profile, *(_read_differences(profile, behaviour, split, fmt) for split in SPLITS))


def _read_differences(profile: Profile, behaviour: str, split: str, fmt: str) -> np.ndarray:
    made_by = f"make 01_extract PROFILE={profile.name}"
    file = paths.require(_differences_path(profile, behaviour, split, fmt), made_by)
    kept = store.read_arrays(file, _request(profile, items(profile, behaviour, split), fmt))
    if kept is None:
        raise ValueError(f"{file} is damaged or was made with other settings; delete it and run `{made_by}`")
    return kept["differences"]


def draw(profile: Profile, seed: int, behaviour: str, raw: Extracted, fmt: str, noise_seed: int) -> np.ndarray:
    """PSA vectors (k, d) of one noise seed, before any rescaling: a seeded demonstration, not a release."""
    rng = noise_of(profile, seed, behaviour, fmt, noise_seed)
    return mechanism.psa(raw.private, clip=raw.clip, sigma=profile.sigma, rng=rng)


def noise_of(profile: Profile, seed: int, behaviour: str, fmt: str, noise_seed: int) -> np.random.Generator:
    """Generator of one noise draw, the same for every sigma and clip, so that sweeps differ in nothing else."""
    return seeding.rng(seed, "psa", profile.data, behaviour, fmt, noise_seed)


def vectors(
    profile: Profile, seed: int, behaviour: str, raw: Extracted, fmt: str, *, recipe: str
) -> list[SteeringVectors]:
    """Mean, PCA and one PSA vector per noise seed in a recipe, each with its record; see :func:`in_recipe`."""
    plain = mechanism.mean(raw.private) if recipe == "matched" else mechanism.max_norm_mean(raw.private)
    made: list[tuple[str, int | None, np.ndarray]] = [
        ("PCA", None, mechanism.pca(raw.private)),
        ("Mean", None, plain),
        *(("PSA", s, draw(profile, seed, behaviour, raw, fmt, s)) for s in range(profile.noise_seeds)),
    ]
    return [
        SteeringVectors(
            profile.layers,
            in_recipe(values, raw, recipe),
            _record(profile, behaviour, fmt, method, noise_seed, raw, recipe),
        )
        for method, noise_seed, values in made
    ]


def in_recipe(values: np.ndarray, raw: Extracted, recipe: str) -> np.ndarray:
    """Give vectors (k, d) the strength of a recipe; both are post-processing with public numbers.

    ``matched``: every method has the norm of the public mean at every layer, so that methods differ in direction
    only. ``paper``: as published (mean over the largest norm, PCA at unit norm, PSA as drawn), all times one public
    number, the clip averaged over layers, which puts a multiplier of both recipes in about the same units.
    """
    return mechanism.rescale(values, raw.strength) if recipe == "matched" else values * raw.clip.mean()


def _record(
    profile: Profile, behaviour: str, fmt: str, method: str, noise_seed: int | None, raw: Extracted, recipe: str
) -> dict[str, Any]:
    record = {
        "method": method,
        "behaviour": behaviour,
        "format": fmt,
        "model": profile.model,
        "recipe": recipe,
        "noise_seed": noise_seed,
        "private": method == "PSA",
    }
    if method == "PSA":
        n, layers = len(raw.private), len(profile.layers)
        mu = accounting.gdp_mu(n=n, sigma=profile.sigma, layers=layers)
        record |= {
            "n": n,
            "sigma": profile.sigma,
            "clip": raw.clip.round(6).tolist(),
            "relation": "replace-one",
            "mu": mu,
            "epsilon_at_1e-5": accounting.gaussian_epsilon(mu, 1e-5),
            "noise": "seeded: demonstrates the mechanism, protects nobody",
        }
    return record


def vector_path(profile: Profile, behaviour: str, fmt: str, recipe: str, method: str, noise_seed: int | None) -> Path:
    """Where notebook 02 keeps a vector."""
    seed = "" if noise_seed is None else f"-{noise_seed}"
    return paths.results(profile.name, "02_private_steer") / f"{behaviour}-{fmt}-{recipe}-{method}{seed}.safetensors"


def save_vector(profile: Profile, vector: SteeringVectors) -> None:
    """Keep a vector for notebook 03."""
    names = (vector.record[name] for name in ("behaviour", "format", "recipe", "method", "noise_seed"))
    vector.save(vector_path(profile, *names))


def load_vectors(profile: Profile, behaviour: str, fmt: str, *, recipe: str) -> list[SteeringVectors]:
    """Read back the vectors notebook 02 kept, in the order PCA, Mean, PSA 0, PSA 1, ..."""
    wanted = [("PCA", None), ("Mean", None), *(("PSA", seed) for seed in range(profile.noise_seeds))]
    made_by = f"make 02_private_steer PROFILE={profile.name}"
    files = (vector_path(profile, behaviour, fmt, recipe, method, noise_seed) for method, noise_seed in wanted)
    return [SteeringVectors.load(paths.require(file, made_by)) for file in files]


def describe(profile: Profile) -> pd.DataFrame:
    """Show the resolved profile as a table of one field per row."""
    rows = [(name, str(list(v) if isinstance(v, tuple) else v)) for name, v in asdict(profile).items()]
    return pd.DataFrame(rows, columns=["setting", "value"]).set_index("setting")
