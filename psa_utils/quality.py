"""Text quality of generated answers, without a judge: how likely, how varied, how repetitive, how long.

Everything is counted in the generating model's tokens, not in words: a model that is steered too hard repeats
punctuation and line breaks as readily as words. Compare answers of one model only.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd

from . import engine, evaluate, packing
from .models import LM

Tokens = Sequence[int]


def measure(lm: LM, prompts: Sequence[Tokens], answers: Sequence[Tokens], *, batch_tokens: int = 1024) -> pd.DataFrame:
    """Quality of answer i to prompt i, one row per answer.

    ``logp_per_token``: mean log-probability (nats) of the answer's tokens after the prompt, under the *unsteered*
    model; NaN for an empty answer. ``distinct_2`` and ``repetition``: :func:`distinct` of 2 tokens and 1 minus
    that of 4. ``length``: tokens.

    Args:
        lm: the model that wrote the answers, with no steering active.
        prompts: token ids, as :meth:`psa_utils.models.LM.encode_chat` makes them; repeat a prompt for each answer.
        answers: token ids, as :func:`psa_utils.generate.sample` returns them.
        batch_tokens: tokens in one forward pass, padding included.

    Raises:
        ValueError: numbers of prompts and answers differ, an empty prompt, steering is active, or a prompt with its
            answer exceeds the model's context.
    """
    _check(lm, prompts, answers)
    return pd.DataFrame(
        {
            "logp_per_token": _log_probabilities(lm, prompts, answers, batch_tokens),
            "distinct_2": [distinct(answer, 2) for answer in answers],
            "repetition": [1 - distinct(answer, 4) for answer in answers],
            "length": [len(answer) for answer in answers],
        }
    )


def distinct(tokens: Tokens, n: int) -> float:
    """Share of different n-grams among all n-grams; NaN where there are none.

    Distinct-n (Li et al., 2016) of one answer; 1 - distinct-4 is seq-rep-4 (Welleck et al., 2020).

    >>> distinct([5, 6, 5, 6, 5], 2), distinct([5, 6, 7], 2), distinct([5], 2)
    (0.5, 1.0, nan)
    """
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else float("nan")


def _log_probabilities(lm: LM, prompts: Sequence[Tokens], answers: Sequence[Tokens], batch_tokens: int) -> np.ndarray:
    """Answers to one prompt branch from it in one row: many answers to few prompts cost the answers' tokens only."""
    values = np.full(len(answers), np.nan)
    written = [i for i, answer in enumerate(answers) if len(answer)]
    each = [packing.Row(tuple(prompts[i]), (tuple(answers[i]),)) for i in written]
    by_count = defaultdict(list)  # rows that are scored together have equally many answers
    for row, members in zip(*packing.branching(each, batch_tokens), strict=True):
        by_count[len(members)].append((row, [written[i] for i in members]))
    for several in by_count.values():
        equal, index = (list(part) for part in zip(*several, strict=True))
        passes = engine.Engine(lm, [row.inputs() for row in equal], batch_tokens=batch_tokens)
        sums = evaluate.log_probabilities(passes, [row.answers for row in equal])
        values[index] = sums / [[len(answer) for answer in row.answers] for row in equal]
    return values


def _check(lm: LM, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> None:
    if len(prompts) != len(answers):
        raise ValueError(f"{len(prompts)} prompts and {len(answers)} answers; give the prompt of every answer")
    if steered := [i for i, block in enumerate(lm.blocks) if engine.is_steered(block)]:
        raise ValueError(f"blocks {steered} of {lm.name} are steered; measure outside of steering.apply(...)")
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not len(prompt):
            raise ValueError(f"prompts[{i}] is empty; an answer is measured after the prompt it was written for")
        if (total := len(prompt) + len(answer)) > lm.context:
            raise ValueError(f"prompt and answer {i} have {total} tokens, {lm.name} holds {lm.context}; shorten them")
