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


@dataclass(frozen=True, eq=False)
class Bench:
    """Items to score under many vectors.

    The blocks below the first steered one run once for all, and a vector that two sweeps ask for is scored once.
    """

    profile: Profile
    lm: LM
    items: Sequence[data.Item]
    fmt: str
    scorers: dict[int | None, evaluate.Scorer] = field(default_factory=dict, init=False)
    known: dict[tuple[str | None, float], pd.DataFrame] = field(default_factory=dict, init=False)

    def scored(self, variants: Sequence[Variant], path: Path) -> pd.DataFrame:
        """Score the items under every variant: one row per item and variant, with its labels; kept at ``path``."""
        key = store.key_of(
            model=self.lm.revision,
            dtype=self.profile.dtype,
            items=data.digest(self.items),
            variants=[v.content() for v in variants],
            fmt=self.fmt,
            template=self.profile.template,
            code=store.code_of(*CODE),
        )
        return store.frame(path, key, lambda: self._score(variants, path.stem))

    def _score(self, variants: Sequence[Variant], title: str) -> pd.DataFrame:
        first = min((min(v.vector.layers) for v in variants if v.vector), default=None)
        shown = tqdm(variants, desc=title, disable=None, leave=False)
        return pd.concat([self._one(v, first).assign(**v.labels) for v in shown], ignore_index=True)

    def _one(self, variant: Variant, first: int | None) -> pd.DataFrame:
        vector, multiplier, _ = variant.content()
        if (vector, multiplier) not in self.known:
            with steering.apply(self.lm, variant.vector or (), multiplier=multiplier):
                self.known[vector, multiplier] = self._scorer(first).score()
        return self.known[vector, multiplier]

    def _scorer(self, first: int | None) -> evaluate.Scorer:
        if first not in self.scorers:
            options = {"template": self.profile.template, "batch_tokens": self.profile.batch_tokens}
            self.scorers[first] = evaluate.Scorer(self.lm, self.items, fmt=self.fmt, first=first, **options)
        return self.scorers[first]


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
    """Test items zero-shot and under every vector of the main recipe; fewer items in two checks.

    The checks, with ``few_items`` items and ``few_seeds`` noise draws: the same vectors subtracted, and the other
    recipe's added.
    """
    labels = {"behaviour": behaviour, "format": fmt}
    main = stages.load_vectors(profile, behaviour, fmt, recipe=profile.recipe)
    others = (r for r in RECIPES if r != profile.recipe)
    other = [v for r in others for v in few(profile, stages.load_vectors(profile, behaviour, fmt, recipe=r))]
    added = [zero_shot(**labels), *(of_vector(v, profile.multiplier, **labels) for v in main)]
    checks = [of_vector(v, -profile.multiplier, **labels) for v in few(profile, main)]
    checks += [of_vector(v, profile.multiplier, **labels) for v in other]
    items, folder = stages.items(profile, behaviour, "test"), paths.results(profile.name, "03_eval")
    parts = ("added", items, added), ("checks", items[: profile.few_items], checks)
    frames = [
        Bench(profile, lm, part, fmt).scored(v, folder / f"{behaviour}-{fmt}-{name}.csv") for name, part, v in parts
    ]
    return pd.concat(frames, ignore_index=True)


def knowledge_kept(profile: Profile, lm: LM, name: str, seed: int) -> pd.DataFrame:
    """Knowledge questions zero-shot and under the main recipe's vectors of every behaviour, both signs (Table 5).

    Of PSA the profile's first ``few_seeds`` noise draws.
    """
    fmt = profile.formats[0]
    steered = (v for behaviour in profile.behaviours for v in both_signs(profile, behaviour, set=name))
    variants = [zero_shot(behaviour="none", set=name), *steered]
    path = paths.results(profile.name, "03_eval") / f"{name}.csv"
    return Bench(profile, lm, questions(profile, name, seed), fmt).scored(variants, path)


def questions(profile: Profile, name: str, seed: int) -> list[data.Item]:
    """The questions of a knowledge set that a profile asks, drawn with ``seed``."""
    return knowledge.askable(knowledge.load(name, limit=profile.n_knowledge, seed=seed), profile.formats[0])


def both_signs(profile: Profile, behaviour: str, **labels: Any) -> Iterator[Variant]:
    """The main recipe's vectors of a behaviour in the main format, with few noise draws, added and subtracted."""
    vectors = stages.load_vectors(profile, behaviour, profile.formats[0], recipe=profile.recipe)
    for vector in few(profile, vectors):
        for sign in (1, -1):
            yield of_vector(vector, sign * profile.multiplier, behaviour=behaviour, **labels)


def few(profile: Profile, vectors: Sequence[SteeringVectors]) -> list[SteeringVectors]:
    """Vectors without those of later noise seeds, where a full set would cost too much."""
    return [v for v in vectors if (v.record["noise_seed"] or 0) < profile.few_seeds]
