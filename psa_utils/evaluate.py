"""How strongly a (steered) model prefers the matching answer of A/B items."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from . import packing
from .data import Item
from .models import LM

METRICS = {"probability": "mean normalised probability", "accuracy": "accuracy"}


def score(
    lm: LM,
    items: Sequence[Item],
    *,
    fmt: str = "text",
    template: str = "chat",
    batch_tokens: int = 2048,
) -> pd.DataFrame:
    """Score the matching against the other answer of each item, under whatever steering is active.

    One row per item: ``logp_matching`` and ``logp_other`` (summed log-probability of the whole answer, nats),
    ``tokens_matching`` and ``tokens_other``, and the columns of :func:`preferences`.

    Raises:
        ValueError: no items. DataError: items longer than the model's context.
    """
    if not items:
        raise ValueError("items is empty; give at least one test item")
    rows = packing.rows_of(lm, items, fmt, template=template)
    logp = np.empty((len(items), 2))
    with tqdm(total=len(items), desc="items", disable=None, leave=False) as bar:
        for index in packing.batches(rows, batch_tokens):
            logp[index] = _log_probabilities(lm, [rows[i] for i in index])
            bar.update(len(index))
    tokens = np.array([[len(answer) for answer in row.answers] for row in rows])
    frame = pd.DataFrame({"item": np.arange(len(items))})
    frame[["logp_matching", "logp_other"]] = logp
    frame[["tokens_matching", "tokens_other"]] = tokens
    return frame.join(preferences(logp, tokens, fmt))


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


@torch.inference_mode()
def text_log_probability(lm: LM, texts: Sequence[str], *, batch_tokens: int = 2048) -> np.ndarray:
    """Mean log-probability per token (nats) of ordinary texts: what steering costs in fluency."""
    encoded = [tuple(lm.encode_answer(text)) for text in texts]
    rows = [packing.Row(ids[:1], (ids[1:],)) for ids in encoded]
    result = np.empty(len(rows))
    for index in packing.batches(rows, batch_tokens):
        chosen = [rows[i] for i in index]
        result[index] = _log_probabilities(lm, chosen)[:, 0] / [len(row.answers[0]) for row in chosen]
    return result


@torch.inference_mode()
def _log_probabilities(lm: LM, rows: Sequence[packing.Row]) -> np.ndarray:
    """Summed log-probability of every answer of every row, (rows, answers); the head sees answers only."""
    batch = packing.pack(rows)
    hidden = lm.forward_hidden(batch.ids, batch.allowed, batch.positions)
    where = [(b, c) for b, row in enumerate(rows) for a in range(len(row.answers)) for c in row.predictors(a)]
    targets = [t for row in rows for answer in row.answers for t in answer]
    b, c = torch.tensor(where, device=hidden.device).T
    picked = _target_log_probabilities(lm, hidden[b, c], torch.tensor(targets, device=hidden.device))
    lengths = [len(answer) for row in rows for answer in row.answers]
    sums = [part.sum().item() for part in picked.double().split(lengths)]
    return np.reshape(sums, (len(rows), -1))


def _target_log_probabilities(lm: LM, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = lm.logits(hidden)
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)
