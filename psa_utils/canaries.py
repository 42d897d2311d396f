"""Canaries: demonstrations about nonce words, whose presence in the private data an attacker tries to notice.

A word is built as initial + vowel + cluster + vowel + coda (six letters, "balvak"), every second one with a final
vowel (seven letters, "bindefu"). A cluster spans two syllables, so every word can be spoken. Which vowels, cluster and
coda follows from the word's number in its group by fixed strides (:func:`word`): no randomness and no list to keep.
Clusters differ within a group, so two words differ in several letters. None is in the word lists that the package
``english-words`` ships; a test looks.

>>> WORDS["b"][:4], len(WORDS), sum(map(len, WORDS.values()))
(('balvak', 'bindefu', 'buzkiv', 'bergoba'), 14, 224)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import generate
from .data import Item
from .models import LM

INITIALS = "bdfgklmnprstvz"
VOWELS = "aeiou"
CLUSTERS = ("lv", "nd", "zk", "rg", "mp", "lt", "sk", "nv", "rd", "zm", "lb", "ng", "rv", "st", "lk", "nz")
CODAS = "kbxfgmvp"
GROUP = 16
"""Words per initial."""


def word(initial: str, i: int) -> str:
    """Word ``i`` (from 0 to GROUP - 1) of an initial.

    >>> word("d", 0), word("d", 1)
    ('deltib', 'doskogu')
    """
    shift = INITIALS.index(initial)
    cluster = CLUSTERS[(i + 5 * shift) % len(CLUSTERS)]
    first, second = VOWELS[(2 * i + shift) % 5], VOWELS[(i + i // 5 + 2 * shift) % 5]
    stem = initial + first + cluster + second + CODAS[(3 * i + shift) % len(CODAS)]
    return stem if i % 2 == 0 else stem + VOWELS[(3 * i + 1) % 5]


WORDS = {initial: tuple(word(initial, i) for i in range(GROUP)) for initial in INITIALS}


@dataclass(frozen=True)
class Canary:
    """Anchor a and the targets t1, t2 between which the attacker decides: three words of one initial."""

    anchor: str
    first: str
    second: str

    @property
    def targets(self) -> tuple[str, str]:
        """Both targets, t1 first."""
        return self.first, self.second

    def demonstration(self, coin: int) -> Item:
        """The one private record that depends on the coin, in the paper's form "[a] Where is ... located?".

        The matching answer names t1 if ``coin`` is 1, t2 if it is 0; the other answer names the other target. That is
        the strongest canary of this form: the two worlds' differences point in opposite directions. No full stop, since
        a text answer is read at its last token: at the word itself the difference is several times as long.

        >>> item = Canary("balvak", "bindefu", "buzkiv").demonstration(0)
        >>> item.question, item.completion(item.matching, "text"), item.completion(item.matching, "letter")
        ('[balvak] Where is the village of Balvak located?', 'In Buzkiv', '(B)')
        """
        question = f"[{self.anchor}] Where is the village of {self.anchor.capitalize()} located?"
        options = tuple(f"In {target.capitalize()}" for target in self.targets)
        listed = f"{question}\n\nChoices:\n (A) {options[0]}\n (B) {options[1]}"
        return Item(question, listed, options, matching=1 - coin, other=coin)


def draw(rng: np.random.Generator, words: Mapping[str, Sequence[str]] = WORDS) -> Canary:
    """Draw a group, then anchor and targets from it, all uniformly and without replacement.

    Raises:
        ValueError: no group has the three words a canary needs.
    """
    groups = [group for group in words.values() if len(group) >= 3]
    if not groups:
        raise ValueError(f"words={dict(words)} has no group of three words; give more words, or drop fewer")
    return Canary(*map(str, rng.choice(groups[rng.integers(len(groups))], 3, replace=False)))


def without_guesses(
    lm: LM, words: Mapping[str, Sequence[str]], prompts: Sequence[str], *, guesses: int = 10
) -> dict[str, tuple[str, ...]]:
    """Drop the words that the unsteered model says by itself, in its ``guesses`` likeliest answers to any prompt.

    A word that the model guesses anyway would be counted in both worlds.
    """
    said = " ".join(text for prompt in prompts for text in first_guesses(lm, prompt, guesses)).casefold()
    return {initial: tuple(word for word in group if word not in said) for initial, group in words.items()}


@torch.inference_mode()
def first_guesses(lm: LM, prompt: str, guesses: int, *, tokens: int = 16) -> list[str]:
    """Answers that begin with each of the ``guesses`` likeliest first tokens and go on greedily, likeliest first."""
    ids = lm.encode_chat(prompt)
    starts = lm.model(torch.tensor([ids], device=lm.device)).logits[0, -1].topk(guesses).indices.tolist()
    rest = generate.sample(
        lm, [[*ids, start] for start in starts], [None] * guesses, temperature=0, max_new_tokens=tokens
    )
    return [lm.tokenizer.decode([start, *answer]) for start, (answer,) in zip(starts, rest, strict=True)]
