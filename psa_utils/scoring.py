"""Score items under many vectors, kept on disk: the alignment of notebook 03 and the base of every sweep."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from . import data, evaluate, knowledge, paths, stages, steering, store
from .config import RECIPES, Profile
from .models import LM
from .vectors import SteeringVectors

CODE = ("evaluate", "steering", "engine", "packing", "models")
NO_SEED = -1


@dataclass(frozen=True)
class Variant:
    """One way of steering, with the labels its rows carry in a table; no vector: zero-shot."""

    vector: SteeringVectors | None = None
    multiplier: float = 0.0
    labels: Mapping[str, Any] = field(default_factory=dict)

    def content(self) -> tuple[str | None, float, dict[str, Any]]:
        """What a result under this variant depends on, for its key."""
        return self.vector and self.vector.digest(), self.multiplier, dict(self.labels)


def scored(
    profile: Profile, lm: LM, items: Sequence[data.Item], variants: Sequence[Variant], fmt: str, path: Path
) -> pd.DataFrame:
    """Score items under every variant: one row per item and variant, with its labels; kept at ``path``.

    The blocks below the first steered one run once for all variants.
    """
    key = store.key_of(
        model=lm.revision,
        dtype=profile.dtype,
        items=data.digest(items),
        variants=[v.content() for v in variants],
        fmt=fmt,
        template=profile.template,
        code=store.code_of(*CODE),
    )
    return store.frame(path, key, lambda: _score(profile, lm, items, variants, fmt, path.stem))


def _score(
    profile: Profile, lm: LM, items: Sequence[data.Item], variants: Sequence[Variant], fmt: str, title: str
) -> pd.DataFrame:
    first = min((min(v.vector.layers) for v in variants if v.vector), default=None)
    options = {"fmt": fmt, "template": profile.template, "batch_tokens": profile.batch_tokens}
    scorer = evaluate.Scorer(lm, items, **options, first=first)
    frames = []
    for variant in tqdm(variants, desc=title, disable=None, leave=False):
        with steering.apply(lm, variant.vector or (), multiplier=variant.multiplier):
            frames.append(scorer.score().assign(**variant.labels))
    return pd.concat(frames, ignore_index=True)


def zero_shot(**labels: Any) -> Variant:
    """The unsteered model; it has no recipe."""
    return Variant(labels={"method": "zero-shot", "recipe": "none", "multiplier": 0.0, "noise_seed": NO_SEED, **labels})


def of_vector(vector: SteeringVectors, multiplier: float, **labels: Any) -> Variant:
    """A vector of notebook 02, labelled from its record."""
    noise_seed = vector.record["noise_seed"]
    told = {
        "method": vector.record["method"],
        "recipe": vector.record["recipe"],
        "multiplier": multiplier,
        "noise_seed": NO_SEED if noise_seed is None else noise_seed,
    }
    return Variant(vector, multiplier, {**told, **labels})


def alignment(profile: Profile, lm: LM, behaviour: str, fmt: str) -> pd.DataFrame:
    """Test items zero-shot and under every vector, both recipes.

    The main recipe's vectors are added with all noise draws and subtracted with few; the other's are added with few.
    """
    labels = {"behaviour": behaviour, "format": fmt}
    frames = []
    for recipe in RECIPES:
        vectors = stages.load_vectors(profile, behaviour, fmt, recipe=recipe)
        if recipe == profile.recipe:
            signed = [*((v, 1) for v in vectors), *((v, -1) for v in few(profile, vectors))]
            variants = [zero_shot(**labels), *(of_vector(v, sign * profile.multiplier, **labels) for v, sign in signed)]
        else:
            variants = [of_vector(v, profile.multiplier, **labels) for v in few(profile, vectors)]
        path = paths.results(profile.name, "03_eval") / f"{behaviour}-{fmt}-{recipe}.csv"
        frames.append(scored(profile, lm, stages.items(profile, behaviour, "test"), variants, fmt, path))
    return pd.concat(frames, ignore_index=True)


def knowledge_kept(profile: Profile, lm: LM, name: str, seed: int) -> pd.DataFrame:
    """Knowledge questions zero-shot and under the main recipe's vectors of every behaviour, both signs (Table 5).

    Of PSA the profile's first ``few_seeds`` noise draws.
    """
    fmt = profile.formats[0]
    questions = knowledge.askable(knowledge.load(name, limit=profile.n_knowledge, seed=seed), fmt)
    steered = (v for behaviour in profile.behaviours for v in both_signs(profile, behaviour, set=name))
    variants = [zero_shot(behaviour="none", set=name), *steered]
    path = paths.results(profile.name, "03_eval") / f"{name}.csv"
    return scored(profile, lm, questions, variants, fmt, path)


def both_signs(profile: Profile, behaviour: str, **labels: Any) -> Iterator[Variant]:
    """The main recipe's vectors of a behaviour in the main format, with few noise draws, added and subtracted."""
    vectors = stages.load_vectors(profile, behaviour, profile.formats[0], recipe=profile.recipe)
    for vector in few(profile, vectors):
        for sign in (1, -1):
            yield of_vector(vector, sign * profile.multiplier, behaviour=behaviour, **labels)


def few(profile: Profile, vectors: Sequence[SteeringVectors]) -> list[SteeringVectors]:
    """Vectors without those of later noise seeds, where a full set would cost too much."""
    return [v for v in vectors if (v.record["noise_seed"] or 0) < profile.few_seeds]
