"""Several answers to one prompt in one row, so that the shared prompt is computed once.

A row is ``prompt, answer 0, answer 1, ...``. Every answer sees the prompt and itself, never another answer,
and its positions go on where the prompt ended: each answer is computed exactly as if it stood alone after
the prompt. Rows are padded on the right; padding is seen by nobody.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import DataError, Item
from .models import LM

PADDING = -1
PROMPT = 0
MIN_FILLED = 7 / 8
"""Shortest row of a batch, in units of its longest."""
CHEAP = 64
"""Padding that costs less time than another pass through the weights."""


@dataclass(frozen=True)
class Row:
    """Token ids of one prompt and of the answers that branch from it."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.answers))

    def span(self, answer: int) -> slice:
        """Columns of an answer's tokens."""
        start = len(self.prompt) + sum(map(len, self.answers[:answer]))
        return slice(start, start + len(self.answers[answer]))

    def inputs(self) -> "Row":
        """The row without each answer's last token: all that is needed to predict every token of the answers."""
        return Row(self.prompt, tuple(answer[:-1] for answer in self.answers))

    def predictors(self, answer: int) -> list[int]:
        """Columns of :meth:`inputs` whose output predicts the answer's tokens: the prompt's last, then the answer's."""
        span = self.inputs().span(answer)
        return [len(self.prompt) - 1, *range(span.start, span.stop)]


@dataclass(frozen=True)
class Batch:
    """Padded rows: ``ids``, ``positions`` (batch, query) and ``allowed`` (batch, query, key)."""

    ids: Tensor
    positions: Tensor
    allowed: Tensor


def rows_of(lm: LM, items: Sequence[Item], fmt: str, *, template: str = "chat") -> list[Row]:
    """Encode items with their matching answer first and the other second.

    Raises:
        DataError: items longer than the model's context, all at once.
    """
    rows, faults = [], []
    for i, item in enumerate(items, 1):
        prompt = tuple(lm.encode_chat(item.prompt(fmt), template=template))
        answers = [tuple(lm.encode_answer(item.completion(o, fmt))) for o in (item.matching, item.other)]
        longest = len(prompt) + max(map(len, answers))
        if longest > lm.context:
            faults.append(f"item {i}: {longest} tokens, the model's context holds {lm.context}; shorten or drop it")
        rows.append(Row(prompt, tuple(answers)))
    if faults:
        raise DataError(f"{len(faults)} item(s) too long for {lm.name}\n  " + "\n  ".join(faults))
    return rows


def branching(rows: Sequence[Row], tokens: int) -> tuple[list[Row], list[list[int]]]:
    """Put rows with the same prompt into one, up to ``tokens`` long; with the numbers of those that went into each.

    >>> merged, members = branching([Row((1, 2), ((7,),)), Row((3,), ((8,),)), Row((1, 2), ((9,),))], 100)
    >>> merged[0].answers, members
    (((7,), (9,)), [[0, 2], [1]])
    """
    merged: list[Row] = []
    members: list[list[int]] = []
    last: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(rows):
        at = last.get(row.prompt)
        if at is None or len(merged[at]) + len(row) - len(row.prompt) > tokens:
            at = last[row.prompt] = len(merged)
            merged.append(Row(row.prompt, ()))
            members.append([])
        merged[at] = Row(row.prompt, merged[at].answers + row.answers)
        members[at].append(i)
    return merged, members


def read_column(lm: LM, row: Row, answer: int, fmt: str) -> int:
    """Column of the token whose activation stands for an answer.

    ``text``: the answer's last token. ``letter``: the token that holds the letter, whatever the tokenizer made
    of the parentheses around it.
    """
    span, tokens = row.span(answer), row.answers[answer]
    if fmt == "text":
        return span.stop - 1
    pieces = [lm.tokenizer.decode([token]) for token in tokens]
    holders = [i for i, piece in enumerate(pieces) if any(c.isalpha() for c in piece)]
    if len(holders) != 1:
        raise DataError(f"answer tokens {pieces} hold no single letter; use format 'text' with this tokenizer")
    return span.start + holders[0]


def pack(rows: Sequence[Row], *, offset: int = 0) -> Batch:
    """Pad rows to one length and build positions and the branching attention mask.

    ``offset`` tokens come before every row and are not part of it: positions go on from there, and ``allowed`` gets
    that many leading key columns, seen by all.
    """
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    branch = torch.full((len(rows), length), PADDING)
    for b, row in enumerate(rows):
        start = len(row.prompt)
        ids[b, : len(row)] = torch.tensor([*row.prompt, *(t for answer in row.answers for t in answer)])
        positions[b, :start] = torch.arange(start)
        branch[b, :start] = PROMPT
        for a, answer in enumerate(row.answers):
            positions[b, row.span(a)] = torch.arange(start, start + len(answer))
            branch[b, row.span(a)] = a + 1
    beginning = torch.ones(*branch.shape, offset, dtype=torch.bool)
    return Batch(ids, positions + offset, torch.cat([beginning, _allowed(branch)], dim=2))


def _allowed(branch: Tensor) -> Tensor:
    causal = torch.ones(branch.shape[1], branch.shape[1], dtype=torch.bool).tril()
    query, key = branch[:, :, None], branch[:, None, :]
    seen = (key == PROMPT) | (key == query)
    # A padding query sees itself, so that no softmax runs over nothing.
    return causal & seen & ((key != PADDING) | torch.eye(branch.shape[1], dtype=torch.bool))


def batches(rows: Sequence[Row], tokens: int) -> Iterator[list[int]]:
    """Yield row numbers in batches of at most ``tokens`` padded tokens, long rows first.

    No row is more than 1/8 padding, unless the padding of the whole batch is :data:`CHEAP`.

    >>> rows = [Row((1,) * n, ((2,),)) for n in (30, 99, 30, 40)]
    >>> list(batches(rows, 130)), list(batches(rows, 1))
    ([[1], [3, 0, 2]], [[1], [3], [0], [2]])
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    while order:
        lengths = [len(rows[i]) for i in order[: max(1, tokens // len(rows[order[0]]))]]
        padding = itertools.accumulate(lengths[0] - length for length in lengths)
        fits = (n >= MIN_FILLED * lengths[0] or p <= CHEAP for n, p in zip(lengths, padding, strict=True))
        size = sum(1 for _ in itertools.takewhile(bool, fits))
        yield order[:size]
        order = order[size:]
