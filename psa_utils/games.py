"""The membership game through a model: grey box (log-probabilities) and black box (counts in sampled text).

The paper's Algorithm 3. Per trial: draw a canary, flip a coin, put its demonstration for t1 (coin 1) or t2 (coin 0)
among the benign ones, let the mechanism draw FRESH noise and release vectors, steer the model with them and ask about
the anchor. Many samples from one released vector are one sample of the mechanism: trials are counted, not samples.

Benign and canary differences are extracted once; a trial only swaps one row. Example, with n benign differences::

    canary = canary_differences(lm, canaries, layers=layers)
    attack = Attack(lm, canaries, canary, benign, layers, mechanism, multiplier=0.5, seed=0)
    audit.judge(grey_box(attack, trials=1000))
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from . import activations, generate, packing, seeding, store
from .audit import CALIBRATION, TRIAL, Release
from .canaries import Canary
from .data import Item
from .models import LM
from .packing import Row
from .rowwise import Questions
from .trials import in_chunks
from .vectors import SteeringVectors

CHUNK = 64
"""Grey-box trials computed between two writes."""
SAMPLED = 128
"""Answers sampled at once, and between two writes: more would spend its time moving the cache of keys and values."""
CODE = (
    *("games", "rowwise", "canaries", "seeding", "mechanism"),
    *("steering", "engine", "generate", "evaluate", "packing", "models"),
)
SIMULATED = 8
"""Releases on benign data that the grey-box attacker averages to see what the model says without the canary."""


def canary_differences(
    lm: LM, canaries: Sequence[Canary], *, layers: Sequence[int], fmt: str = "text", template: str = "chat"
) -> np.ndarray:
    """Differences (canaries, 2, k, d) of each canary's demonstration for t2 (coin 0) and t1 (coin 1)."""
    items = [canary.demonstration(coin) for canary in canaries for coin in (0, 1)]
    differences = activations.differences(lm, items, layers=layers, fmt=fmt, template=template)
    return differences.reshape(len(canaries), 2, *differences.shape[1:])


@dataclass(frozen=True, eq=False)
class Attack:
    """One setting of the game: whom is attacked, with what, and how strongly the model is steered."""

    lm: LM
    canaries: Sequence[Canary]
    differences: np.ndarray
    """(canaries, 2, k, d), by coin: :func:`canary_differences`."""
    benign: np.ndarray
    """(n, k, d); a trial replaces the last row, so n stays the number of private records."""
    layers: Sequence[int]
    mechanism: Release
    """Differences (n, k, d) and a generator to the vectors (k, d) that are applied."""
    multiplier: float
    seed: int
    fmt: str = "text"
    template: str = "chat"

    def __post_init__(self) -> None:
        expected = (len(self.canaries), 2, *self.benign.shape[1:])
        if self.differences.shape != expected or len(self.layers) != self.benign.shape[1]:
            raise ValueError(
                f"differences {self.differences.shape}, benign {self.benign.shape} and {len(self.layers)} layers do "
                f"not belong together; differences must be {expected}, with one row per layer"
            )

    @cached_property
    def items(self) -> list[Item]:
        """The questions, with t1 as the matching answer and t2 as the other."""
        return [canary.demonstration(1) for canary in self.canaries]

    @cached_property
    def rows(self) -> list[Row]:
        """Encoded questions with both answers, one per canary."""
        return packing.rows_of(self.lm, self.items, self.fmt, template=self.template)

    def trial(self, i: int) -> tuple[int, int, SteeringVectors]:
        """Canary, coin and released vectors of trial ``i``; everything random in it comes from a seed of its own."""
        rng = seeding.rng(self.seed, "game", i)
        canary, coin = int(rng.integers(len(self.canaries))), int(rng.integers(2))
        records = np.concatenate([self.benign[:-1], self.differences[canary, coin][None]])
        return canary, coin, SteeringVectors(self.layers, self.mechanism(records, rng))

    def reference(self) -> SteeringVectors:
        """Mean of simulated releases on the benign records, which the attacker knows."""
        rng = seeding.rng(self.seed, "reference")
        return SteeringVectors(
            self.layers, np.mean([self.mechanism(self.benign, rng) for _ in range(SIMULATED)], axis=0)
        )

    def key(self, **settings: Any) -> str:
        """Everything but the mechanism's code that trials depend on."""
        arrays = (np.ascontiguousarray(part).tobytes() for part in (self.differences, self.benign))
        return store.key_of(
            model=self.lm.revision,
            dtype=str(self.lm.model.dtype),
            canaries=repr(list(self.canaries)),
            arrays=[hashlib.sha256(part).hexdigest() for part in arrays],
            layers=list(self.layers),
            multiplier=self.multiplier,
            seed=self.seed,
            fmt=self.fmt,
            template=self.template,
            code=store.code_of(*CODE),
            **settings,
        )


def grey_box(
    attack: Attack, *, trials: int = 1000, calibration: int = 200, path: Path | None = None, key: str = "",
    batch_tokens: int = 1024,
) -> pd.DataFrame:  # fmt: skip
    """Score trials by log P(t1) - log P(t2) (nats) after the anchor's question, less what it is without the canary.

    Returns columns ``phase``, ``coin``, ``canary``, ``score`` for :func:`psa_utils.audit.judge`. ``calibration`` trials
    come first; ``path`` and ``key`` (which names the mechanism) as for :func:`psa_utils.audit.white_box`.
    """
    questions = Questions(attack.lm, attack.rows, first=min(attack.layers), batch_tokens=batch_tokens)

    def ratios(asked: Sequence[int], vectors: Sequence[SteeringVectors]) -> np.ndarray:
        first, second = questions.log_probabilities(asked, vectors, multiplier=attack.multiplier).T
        return first - second

    every = range(len(attack.canaries))
    without = ratios(every, [attack.reference()] * len(every))

    known: dict[tuple[int, str], float] = {}

    def scores(_chunk: int, asked: Sequence[int], vectors: Sequence[SteeringVectors]) -> dict[str, np.ndarray]:
        """A mechanism without noise releases few different vectors: each is asked once."""
        keys = [(canary, vector.digest()) for canary, vector in zip(asked, vectors, strict=True)]
        new = {key: i for i, key in enumerate(keys) if key not in known}
        if new:
            found = ratios([asked[i] for i in new.values()], [vectors[i] for i in new.values()])
            known.update(zip(new, found, strict=True))
        return {"score": np.array([known[key] for key in keys]) - without[list(asked)]}

    key = attack.key(game="grey", mechanism=key, trials=trials, calibration=calibration)
    return _play(attack, scores, calibration, trials, CHUNK, path, key)


def black_box(
    attack: Attack, *, trials: int = 200, calibration: int = 50, samples: int = 20, max_new_tokens: int = 12,
    temperature: float = 0.8, path: Path | None = None, key: str = "",
) -> pd.DataFrame:  # fmt: skip
    """Score trials by the number of ``samples`` answers that name t1, the paper's attack.

    Returns the columns of :func:`grey_box` and ``other``, the answers that name t2.
    """

    def counts(chunk: int, canaries: Sequence[int], vectors: Sequence[SteeringVectors]) -> dict[str, list[int]]:
        generator = torch.Generator(attack.lm.device).manual_seed(seeding.derive_seed(attack.seed, "samples", chunk))
        answers = generate.sample(
            attack.lm, [attack.rows[c].prompt for c in canaries], vectors, multiplier=attack.multiplier,
            samples=samples, temperature=temperature, max_new_tokens=max_new_tokens, generator=generator,
        )  # fmt: skip
        texts = [attack.lm.tokenizer.batch_decode(answer) for answer in answers]
        named = [[_naming(attack, c, option, t) for option in (0, 1)] for c, t in zip(canaries, texts, strict=True)]
        return {"score": [n[0] for n in named], "other": [n[1] for n in named]}

    key = attack.key(
        game="black", mechanism=key, trials=trials, calibration=calibration, samples=samples,
        max_new_tokens=max_new_tokens, temperature=temperature,
    )  # fmt: skip
    return _play(attack, counts, calibration, trials, max(1, SAMPLED // samples), path, key)


ScoreChunk = Callable[[int, Sequence[int], Sequence[SteeringVectors]], Mapping[str, Sequence[float]]]
"""Number of a chunk, its canaries and released vectors to columns of scores."""


def _play(
    attack: Attack, score: ScoreChunk, calibration: int, trials: int, size: int, path: Path | None, key: str
) -> pd.DataFrame:
    total = calibration + trials

    def chunk(i: int) -> pd.DataFrame:
        numbers = range(i * size, min(total, (i + 1) * size))
        canaries, coins, vectors = zip(*map(attack.trial, numbers), strict=True)
        phase = [CALIBRATION if number < calibration else TRIAL for number in numbers]
        return pd.DataFrame({"phase": phase, "coin": coins, "canary": canaries, **score(i, canaries, vectors)})

    return in_chunks(chunk, -(-total // size), path, key)


def _naming(attack: Attack, canary: int, option: int, answers: Sequence[str]) -> int:
    """How many answers name a canary's t1 (option 0) or t2: the word, or the letter where letters are asked for."""
    marks = {attack.canaries[canary].targets[option]}
    if attack.fmt == "letter":
        marks.add(attack.items[canary].completion(option, attack.fmt).casefold())
    return sum(any(mark in answer.casefold() for mark in marks) for answer in answers)
