"""The sweeps of notebook 04 (noise, clip, layers, strength), each scored once and kept."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from . import calibrate, evaluate, mechanism, paths, scoring, stages, steering, store
from .config import RECIPES, Profile
from .models import LM
from .scoring import NO_SEED, Bench, Variant
from .stages import Extracted
from .vectors import SteeringVectors

STAGE = "04_ablations"
SIGMAS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)
"""The paper's Figure 5 and Table 17, and weaker noise."""
QUANTILES = (0.1, 0.5, 0.9)
"""Of public norms: clips of the sweep beside the profile's constant ones."""
MULTIPLIERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False)
class Sweeps:
    """Variants of one behaviour's vectors, from its cached differences."""

    profile: Profile
    seed: int
    behaviour: str
    fmt: str
    raw: Extracted
    bench: Bench
    """The items that all sweeps are scored on."""

    @classmethod
    def of(cls, profile: Profile, seed: int, lm: LM, behaviour: str) -> "Sweeps":
        """Read what notebook 01 kept; score on the first ``n_sweep`` test items, in the main format."""
        fmt = profile.formats[0]
        bench = Bench(profile, lm, stages.items(profile, behaviour, "test")[: profile.n_sweep], fmt)
        return cls(profile, seed, behaviour, fmt, stages.extracted(profile, behaviour, fmt), bench)

    def on(self, n: int | None) -> "Sweeps":
        """The same vectors, scored on the first ``n`` test items."""
        items = stages.items(self.profile, self.behaviour, "test")[:n]
        return replace(self, bench=Bench(self.profile, self.bench.lm, items, self.fmt))

    def first(self, n: int) -> "Sweeps":
        """The same with the first ``n`` private pairs only, so that behaviours of different size compare."""
        return replace(self, raw=replace(self.raw, private=self.raw.private[:n]))

    def noise(self) -> Iterator[Variant]:
        """PSA at every sigma in both recipes; sigma 0 is the clipped mean."""
        for recipe in RECIPES:
            for sigma in SIGMAS:
                yield from self._private(recipe, self.raw.clip, sigma)

    def clip(self) -> Iterator[Variant]:
        """Every clip with the profile's noise and with none, in both recipes; the unclipped mean beside them."""
        for recipe in RECIPES:
            yield self._mean(recipe, clip="none")
            for name, bound in self.clips().items():
                for sigma in (0.0, self.profile.sigma):
                    yield from self._private(recipe, bound, sigma, clip=name)

    def clips(self) -> dict[str, np.ndarray]:
        """Clip (k,) of every layer by the name it has in tables."""
        constant = {f"{c:g}": np.full(len(self.profile.layers), c) for c in self.profile.clips}
        public = {f"quantile {q:g}": mechanism.public_clip(self.raw.public, q) for q in QUANTILES}
        return constant | public

    def strength(self) -> Iterator[Variant]:
        """Mean and one PSA draw, at matched norm, at several multipliers."""
        for multiplier in MULTIPLIERS:
            at = replace(self, profile=replace(self.profile, multiplier=multiplier))
            yield at._mean("matched")
            yield next(at._private("matched", self.raw.clip, self.profile.sigma))

    def mean_and_psa(self, **labels: Any) -> Iterator[Variant]:
        """The plain mean and PSA at the profile's sigma, at matched norm."""
        yield self._mean("matched", **labels)
        yield from self._private("matched", self.raw.clip, self.profile.sigma, **labels)

    def variant(self, values: np.ndarray, method: str, recipe: str, noise_seed: int, **labels: Any) -> Variant:
        """``values`` (k, d) in a recipe, steered with at the profile's multiplier."""
        multiplier = self.profile.multiplier
        vector = SteeringVectors(self.profile.layers, stages.in_recipe(values, self.raw, recipe))
        told = {"method": method, "recipe": recipe, "multiplier": multiplier, "noise_seed": noise_seed}
        return Variant(vector, multiplier, told | labels)

    def _private(self, recipe: str, bound: np.ndarray, sigma: float, **labels: Any) -> Iterator[Variant]:
        """One variant per noise draw; just one without noise."""
        signal = mechanism.clipped_mean(self.raw.private, clip=bound)
        for noise_seed in range(self.profile.few_seeds) if sigma > 0 else (NO_SEED,):
            rng = stages.noise_of(self.profile, self.seed, self.behaviour, self.fmt, noise_seed)
            values = signal + sigma * rng.standard_normal(signal.shape)
            yield self._measured(values, "PSA", recipe, noise_seed, sigma=sigma, **labels)

    def _mean(self, recipe: str, **labels: Any) -> Variant:
        """The plain mean, divided by the profile's clip as the clipped one is."""
        values = mechanism.mean(self.raw.private) / self.raw.clip[:, None]
        return self._measured(values, "Mean", recipe, NO_SEED, sigma=0.0, **labels)

    def _measured(self, values: np.ndarray, method: str, recipe: str, noise_seed: int, **labels: Any) -> Variant:
        """:meth:`variant`, its labels telling cosine to the mean and norm as well."""
        plain = self.variant(values, method, recipe, noise_seed)
        geometry = {
            "cosine": float(mechanism.cosine(values, mechanism.mean(self.raw.private)).mean()),
            "norm": float(plain.multiplier * np.linalg.norm(plain.vector.values, axis=1).mean()),
        }
        return replace(plain, labels=plain.labels | geometry | labels)


def scored(sweeps: Sweeps, name: str, variants: Sequence[Variant]) -> pd.DataFrame:
    """Score zero-shot and variants; kept on disk."""
    path = paths.results(sweeps.profile.name, STAGE) / f"{name}-{sweeps.behaviour}.csv"
    return sweeps.bench.scored([scoring.zero_shot(), *variants], path).assign(behaviour=sweeps.behaviour)


def windows(profile: Profile, blocks: int) -> dict[str, tuple[int, ...]]:
    """Which consecutive blocks to steer: fewer around the middle of the profile's, as many earlier and later.

    >>> from psa_utils import config
    >>> windows(config.load_profile("laptop"), 30)["5 later"]
    (18, 19, 20, 21, 22)
    """
    k, start = len(profile.layers), profile.layers[0]
    middle = profile.layers[k // 2]
    found = {"1": (middle, 1), "3": (middle - 1, 3), f"{k}": (start, k)}
    found |= {f"{k} earlier": (start - k - 1, k), f"{k} later": (start + k + 1, k)}
    chosen = {name: tuple(range(first, first + width)) for name, (first, width) in found.items()}
    return {name: layers for name, layers in chosen.items() if layers[0] >= 0 and layers[-1] < blocks}


def layers(sweeps: Sweeps) -> pd.DataFrame:
    """Score every window at equal total epsilon and equal total push.

    With j layers instead of the profile's k, sigma is multiplied by sqrt(j / k), which leaves
    mu = sqrt(j) 2 / (n sigma) as it is, and the multiplier by k / j.
    """
    frames, chosen = [], windows(sweeps.profile, len(sweeps.bench.lm.blocks))
    known = _by_block(sweeps, {block for window in chosen.values() for block in window})
    for name, window in chosen.items():
        there = _at(sweeps, window, known)
        labels = {"window": name, "blocks": f"{window[0]}-{window[-1]}"}
        variants = list(there.mean_and_psa(**labels))
        frames.append(scored(there, f"layers-{labels['blocks']}", variants).assign(**labels))
    return pd.concat(frames, ignore_index=True)


ByBlock = dict[int, tuple[np.ndarray, np.ndarray]]
"""Private (n, d) and public (m, d) differences by block."""


def _by_block(sweeps: Sweeps, blocks: Collection[int]) -> ByBlock:
    """Differences at all ``blocks``; those that notebook 01 did not keep are extracted, all in one pass."""
    own = _columns(sweeps.profile.layers, sweeps.raw.private, sweeps.raw.public)
    missing = tuple(sorted(set(blocks) - set(own)))
    if not missing:
        return own
    profile = replace(sweeps.profile, layers=missing)
    options = {"fmt": sweeps.fmt, "stage": f"{STAGE}/blocks"}
    sides = (
        stages.differences(profile, sweeps.bench.lm, sweeps.behaviour, split, **options) for split in stages.SPLITS
    )
    return own | _columns(missing, *sides)


def _columns(layers: Sequence[int], private: np.ndarray, public: np.ndarray) -> ByBlock:
    return {layer: (private[:, i], public[:, i]) for i, layer in enumerate(layers)}


def _at(sweeps: Sweeps, window: tuple[int, ...], known: ByBlock) -> Sweeps:
    """The same sweep at other layers."""
    share = len(window) / len(sweeps.profile.layers)
    profile = replace(
        sweeps.profile,
        layers=window,
        sigma=sweeps.profile.sigma * np.sqrt(share),
        multiplier=sweeps.profile.multiplier / share,
    )
    private, public = (np.stack(side, axis=1) for side in zip(*(known[block] for block in window), strict=True))
    return replace(sweeps, profile=profile, raw=Extracted.of(profile, private, public))


def fluency(sweeps: Sweeps, name: str, variants: Sequence[Variant]) -> pd.DataFrame:
    """What variants cost: ``loss`` in mean log-probability per token (nats) of every other ordinary sentence; kept."""
    lm, text = sweeps.bench.lm, calibrate.ordinary_text()[::2]
    key = store.key_of(
        model=lm.revision,
        dtype=sweeps.profile.dtype,
        text=text,
        variants=[v.content() for v in variants],
        code=store.code_of(*scoring.CODE),
    )
    path = paths.results(sweeps.profile.name, STAGE) / f"{name}-fluency-{sweeps.behaviour}.csv"
    return store.frame(path, key, lambda: _losses(lm, text, variants)).assign(behaviour=sweeps.behaviour)


def _losses(lm: LM, text: Sequence[str], variants: Sequence[Variant]) -> pd.DataFrame:
    scorer = evaluate.TextScorer(lm, text, first=min(min(v.vector.layers) for v in variants))
    plain = scorer.score().mean()
    rows = []
    for variant in variants:
        with steering.apply(lm, variant.vector, multiplier=variant.multiplier):
            rows.append({**variant.labels, "loss": plain - scorer.score().mean()})
    return pd.DataFrame(rows)
