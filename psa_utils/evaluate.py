"""How strongly a (steered) model prefers the matching answer of A/B items."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from . import packing
from .data import Item
from .engine import Engine
from .models import LM

SLICE = 4096
"""Words of the vocabulary whose logits are computed at once."""


class Scorer:
    """Scores the matching against the other answer of each item, as often as there are vectors to try.

    Args:
        first: first block that is ever steered; what comes before is computed once for all calls of :meth:`score`.

    Raises:
        ValueError: no items. DataError: items longer than the model's context.
    """

    def __init__(
        self,
        lm: LM,
        items: Sequence[Item],
        *,
        fmt: str = "text",
        template: str = "chat",
        batch_tokens: int = 1024,
        first: int | None = None,
    ) -> None:
        if not items:
            raise ValueError("items is empty; give at least one test item")
        self.fmt = fmt
        self.rows = packing.rows_of(lm, items, fmt, template=template)
        self.engine = Engine(lm, [row.inputs() for row in self.rows], first=first, batch_tokens=batch_tokens)

    def score(self) -> pd.DataFrame:
        """Score under whatever steering is active, one row per item.

        ``logp_matching`` and ``logp_other`` (summed log-probability of the whole answer, nats), ``tokens_matching``
        and ``tokens_other``, and the columns of :func:`preferences`.
        """
        logp = log_probabilities(self.engine, [row.answers for row in self.rows])
        tokens = np.array([[len(answer) for answer in row.answers] for row in self.rows])
        frame = pd.DataFrame({"item": np.arange(len(logp))})
        frame[["logp_matching", "logp_other"]] = logp
        frame[["tokens_matching", "tokens_other"]] = tokens
        return frame.join(preferences(logp, tokens, self.fmt))


def score(lm: LM, items: Sequence[Item], **options: Any) -> pd.DataFrame:
    """Score items once; see :class:`Scorer` for options and :meth:`Scorer.score` for the result."""
    return Scorer(lm, items, **options).score()


def preferences(logp: np.ndarray, tokens: np.ndarray, fmt: str) -> pd.DataFrame:
    """Turn log-probabilities (items, 2) of matching and other answer into the reported metrics.

    ``probability`` = P(matching) / (P(matching) + P(other)), the paper's measure (it calls its mean
    accuracy), and ``accuracy``, whether the matching answer is the likelier (a tie counts half). Letters have
    equal length and use the whole answer's probability; text answers use the probability per token, so that
    the shorter answer is not preferred for being short. The ``_sum`` columns never normalise.

    >>> preferences(np.log([[0.3, 0.1]]), np.array([[3, 3]]), "letter").probability.round(2).tolist()
    [0.75]
    """
    per_token = logp / tokens
    main = logp if fmt == "letter" else per_token
    columns = {}
    for suffix, values in (("", main), ("_sum", logp)):
        margin = values[:, 0] - values[:, 1]
        columns[f"probability{suffix}"] = 0.5 * (1 + np.tanh(margin / 2))
        columns[f"accuracy{suffix}"] = 0.5 * (1 + np.sign(margin))
    return pd.DataFrame(columns)


class TextScorer:
    """Mean log-probability per token of ordinary texts, as often as there are vectors: what steering costs in fluency.

    Args:
        first: as in :class:`Scorer`.

    Raises:
        ValueError: a text of fewer than two tokens, of which none has a token before it.
    """

    def __init__(self, lm: LM, texts: Sequence[str], *, batch_tokens: int = 1024, first: int | None = None) -> None:
        encoded = [tuple(lm.encode_answer(text)) for text in texts]
        if short := [text for text, ids in zip(texts, encoded, strict=True) if len(ids) < 2]:
            raise ValueError(f"texts {short} have fewer than two tokens; leave them out or give longer ones")
        rows = [packing.Row(ids[:1], (ids[1:],)) for ids in encoded]
        self.answers = [row.answers for row in rows]
        self.engine = Engine(lm, [row.inputs() for row in rows], first=first, batch_tokens=batch_tokens)

    def score(self) -> np.ndarray:
        """Nats per token of every text (texts,), under whatever steering is active."""
        return log_probabilities(self.engine, self.answers)[:, 0] / [len(a) for (a,) in self.answers]


Answers = Sequence[Sequence[int]]


def log_probabilities(engine: Engine, answers: Sequence[Answers]) -> np.ndarray:
    """Summed log-probability (nats) of every answer of every row, (rows, answers); the head sees answers only.

    Args:
        engine: runs the rows' inputs (:meth:`psa_utils.packing.Row.inputs`).
        answers: whole answers of every row.
    """
    result = np.empty((len(answers), len(answers[0])))
    with tqdm(total=len(result), desc="items", disable=None, leave=False) as bar:
        for index, _, hidden in engine.hidden():
            whole = [packing.Row(engine.rows[i].prompt, answers[i]) for i in index]
            result[index] = _sums(engine.lm, whole, hidden)
            bar.update(len(index))
    return result


@torch.inference_mode()
def _sums(lm: LM, rows: Sequence[packing.Row], hidden: Tensor) -> np.ndarray:
    places = [(b, c) for b, row in enumerate(rows) for a in range(len(row.answers)) for c in row.predictors(a)]
    targets = [t for row in rows for answer in row.answers for t in answer]
    # The last token of a prompt predicts the first of every answer: look at it once.
    places, which = torch.tensor(places, device=hidden.device).unique(dim=0, return_inverse=True)
    logp = _target_log_probabilities(lm, hidden[*places.T], which, torch.tensor(targets, device=hidden.device))
    lengths = [len(answer) for row in rows for answer in row.answers]
    sums = [part.sum().item() for part in logp.double().split(lengths)]
    return np.reshape(sums, (len(rows), -1))


def _target_log_probabilities(lm: LM, hidden: Tensor, which: Tensor, targets: Tensor) -> Tensor:
    """log P(targets[i]) (nats) after ``hidden[which[i]]``, a slice of the vocabulary at a time.

    All logits at once would be hundreds of megabytes that stream through memory several times; a slice stays in the
    processor's cache.
    """
    total = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
    picked = torch.empty_like(targets, dtype=torch.float32)
    for start, logits in lm.logit_slices(hidden, SLICE):
        logits = logits.to(hidden.device)
        total = torch.logaddexp(total, logits.logsumexp(dim=1))
        inside = (start <= targets) & (targets < start + logits.shape[1])
        picked[inside] = logits[which[inside], targets[inside] - start]
    return picked - total[which]
