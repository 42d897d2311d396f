"""The games of notebook 05, each kept on disk: who attacks which vector, at which n, sigma and multiplier."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from . import accounting, audit, bounds, canaries, games, mechanism, paths, seeding, store
from .audit import Release
from .canaries import Canary
from .config import Profile
from .models import LM
from .stages import Extracted

STAGE = "05_mia"
SIZES = (8, 32, 128)
"""Private records of the sweep, beside all there are."""


@dataclass(frozen=True, eq=False)
class Target:
    """One behaviour's private data under attack, and the canaries that may be among them."""

    profile: Profile
    seed: int
    lm: LM
    behaviour: str
    raw: Extracted
    canaries: Sequence[Canary]
    differences: np.ndarray
    """(canaries, 2, k, d) of the canaries' demonstrations, by coin."""

    @classmethod
    def of(cls, profile: Profile, seed: int, lm: LM, behaviour: str, raw: Extracted) -> "Target":
        """Draw ``profile.canaries`` canaries whose words the model does not say by itself."""
        drawn = _drawn(profile, lm, seed)
        options = {"layers": profile.layers, "fmt": profile.formats[0], "template": profile.template}
        return cls(profile, seed, lm, behaviour, raw, drawn, games.canary_differences(lm, drawn, **options))

    def sizes(self) -> list[int]:
        """Numbers of private records to try, all of them last."""
        return [n for n in SIZES if n < len(self.raw.private)] + [len(self.raw.private)]

    def mu(self, n: int, sigma: float | None = None) -> float:
        """Claim of PSA over ``n`` records."""
        return accounting.gdp_mu(n=n, sigma=sigma or self.profile.sigma, layers=len(self.profile.layers))

    def claim(self, method: str, n: int) -> float:
        """Mu that a method's guarantee allows; without noise there is none."""
        return self.mu(n) if method == "PSA" else math.inf

    def white_box(self, *, n: int, sigma: float, copies: int = 1) -> pd.DataFrame:
        """The strongest attack on PSA: the worst neighbours, all vectors seen."""
        trials = self.profile.white_trials
        name = f"white-{self.profile.data}-{self.behaviour}-{n}-{sigma:g}-{copies}"
        # Audits would share one noise draw otherwise, and would all be lucky or unlucky together.
        seed = seeding.derive_seed(self.seed, name)
        worlds = audit.worst_case(self.raw.private[:n], clip=self.raw.clip, seed=seed, copies=copies)
        return audit.white_box(
            audit.psa_draws(clip=self.raw.clip, sigma=sigma),
            worlds,
            trials=trials,
            calibration=max(100, trials // 10),
            seed=seed,
            path=paths.results(self.profile.name, STAGE) / f"{name}.csv",
            key=f"{name} {sigma} {self.raw.clip.tolist()}",
        )

    def grey_box(self, method: str, *, n: int, multiplier: float) -> pd.DataFrame:
        """The attacker who sees log-probabilities of the steered model."""
        trials, name = self.profile.grey_trials, f"grey-{method}-{n}-{multiplier:g}"
        return games.grey_box(self._attack(method, n, multiplier), **self._kept(name, trials))

    def black_box(self, method: str, *, n: int, multiplier: float) -> pd.DataFrame:
        """The paper's attacker, who counts a word in sampled text."""
        trials, name = self.profile.black_trials, f"black-{method}-{n}-{multiplier:g}"
        options = {"samples": self.profile.black_samples, "max_new_tokens": 10}
        return games.black_box(self._attack(method, n, multiplier), **self._kept(name, trials), **options)

    def _kept(self, name: str, trials: int) -> dict[str, object]:
        path = paths.results(self.profile.name, STAGE) / f"{self.behaviour}-{name}.csv"
        return {"trials": trials, "calibration": max(20, trials // 5), "path": path, "key": self._setting(name)}

    def _setting(self, name: str) -> str:
        code = store.code_of("attacks")
        return f"{name} {self.profile.sigma} {self.raw.clip.tolist()} {self.raw.strength.tolist()} {code}"

    def _attack(self, method: str, n: int, multiplier: float) -> games.Attack:
        return games.Attack(
            self.lm,
            self.canaries,
            self.differences,
            self.raw.private[:n],
            self.profile.layers,
            release(method, self.raw, self.profile.sigma),
            multiplier=multiplier,
            seed=self.seed,
            fmt=self.profile.formats[0],
            template=self.profile.template,
        )


def release(method: str, raw: Extracted, sigma: float) -> Release:
    """Mean, PCA or PSA as applied in the matched recipe."""
    if method == "PSA":
        return lambda d, rng: mechanism.rescale(mechanism.psa(d, clip=raw.clip, sigma=sigma, rng=rng), raw.strength)
    plain = {"Mean": mechanism.mean, "PCA": mechanism.pca}[method]
    known: dict[str, np.ndarray] = {}

    def once(differences: np.ndarray, _rng: np.random.Generator) -> np.ndarray:
        """No noise: the same data give the same vector, which need not be computed in every trial."""
        digest = hashlib.sha256(np.ascontiguousarray(differences).tobytes()).hexdigest()
        if digest not in known:
            known[digest] = mechanism.rescale(plain(differences), raw.strength)
        return known[digest]

    return once


def _drawn(profile: Profile, lm: LM, seed: int) -> list[Canary]:
    rng = seeding.rng(seed, "canaries")
    asked = [canaries.draw(rng).demonstration(1).prompt(profile.formats[0]) for _ in range(4)]
    words = canaries.without_guesses(lm, canaries.WORDS, asked)
    return [canaries.draw(rng, words) for _ in range(profile.canaries)]


def white_row(target: Target, *, delta: float, n: int, sigma: float, copies: int = 1) -> dict[str, object]:
    """Line of Table 7 for the white box on PSA."""
    trials = target.white_box(n=n, sigma=sigma, copies=copies)
    labels = {"adversary": "white box", "method": "PSA", "behaviour": target.behaviour, "n": n, "sigma": sigma}
    return {**labels, "multiplier": 1.0, **numbers(trials, mu=target.mu(n, sigma), delta=delta, copies=copies)}


def model_row(
    target: Target, adversary: str, method: str, *, delta: float, n: int, multiplier: float
) -> dict[str, object]:
    """Line of Table 7 for the grey or the black box."""
    play = {"grey box": target.grey_box, "black box": target.black_box}[adversary]
    trials = play(method, n=n, multiplier=multiplier)
    labels = {"adversary": adversary, "method": method, "behaviour": target.behaviour, "n": n}
    labels |= {"sigma": target.profile.sigma, "multiplier": multiplier}
    return {**labels, **numbers(trials, mu=target.claim(method, n), delta=delta)}


def numbers(trials: pd.DataFrame, *, mu: float, delta: float, copies: int = 1) -> dict[str, object]:
    """Error rates, what they suggest, what they prove, and the claim ``mu``."""
    verdict = audit.judge(trials, delta=delta, copies=copies)
    fpr, fnr = verdict.rates.fpr, verdict.rates.fnr
    auc, auc_low, auc_high = bounds.auc(audit.scores_of(trials))
    return {
        "trials": verdict.rates.negatives + verdict.rates.positives,
        "copies": copies,
        "fpr": fpr,
        "fnr": fnr,
        "auc": auc,
        "auc_low": auc_low,
        "auc_high": auc_high,
        "epsilon_paper_formula": bounds.paper_epsilon(fpr, fnr),
        "epsilon_counts": verdict.epsilon_counts,
        "epsilon_gdp": verdict.epsilon_gdp,
        "epsilon_gaussian": verdict.epsilon_gaussian,
        "epsilon_claim": bounds.epsilon_of_mu(mu, delta) if math.isfinite(mu) else math.inf,
        "mu_gdp": verdict.mu_gdp,
        "mu_gaussian": verdict.mu_gaussian,
        "mu_claim": mu,
        "refuted": verdict.exceeds(mu),
    }
