"""Answers' log-probabilities under many vectors, one per row, over few distinct questions.

A trial of an attack asks a question that other trials ask too, under a vector of its own. What happens below the first
steered block depends on the question alone and is computed once; a shared beginning is steered differently in every
row, so it is not shared.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from . import evaluate, packing, steering
from .engine import Engine, Prompts
from .models import LM
from .packing import Batch, Row


class Questions(Engine):
    """Distinct questions, each with its answers, of which the blocks below ``first`` are computed once."""

    def __init__(self, lm: LM, rows: Sequence[Row], *, first: int, batch_tokens: int = 1024) -> None:
        super().__init__(lm, [row.inputs() for row in rows], first=first, batch_tokens=batch_tokens)
        self.answers = [row.answers for row in rows]
        self.prompts = Prompts((), tuple(row.inputs() for row in rows))
        self.rows = self.prompts.rows
        self.index = list(packing.batches(self.rows, batch_tokens))
        self.batch_tokens = batch_tokens

    @cached_property
    def starts(self) -> list[Tensor]:
        """Output (length, d) of block ``first`` for every question, unsteered."""
        found = [torch.empty(0)] * len(self.rows)
        for index, hidden in zip(self.index, self._outputs_of_first, strict=True):
            for i, row in zip(index, hidden, strict=True):
                found[i] = row[: len(self.rows[i])]
        return found

    def log_probabilities(self, asked: Sequence[int], vectors: steering.PerRow, *, multiplier: float) -> np.ndarray:
        """Summed log-probability (nats) of every answer, (rows, answers), of question ``asked[i]`` under vector i."""
        if len(asked) != len(vectors):
            raise ValueError(f"{len(asked)} questions and {len(vectors)} vectors; give one vector per question asked")
        return evaluate.log_probabilities(_Asked(self, asked, vectors, multiplier), [self.answers[i] for i in asked])


class _Asked(Engine):
    def __init__(self, questions: Questions, asked: Sequence[int], vectors: steering.PerRow, multiplier: float) -> None:
        rows = [questions.rows[i] for i in asked]
        super().__init__(questions.lm, rows, first=questions.first, batch_tokens=questions.batch_tokens)
        self.rows, self.index = tuple(rows), list(packing.batches(rows, questions.batch_tokens))
        self.starts = [questions.starts[i] for i in asked]
        self.vectors, self.multiplier = vectors, multiplier

    def hidden(self) -> Iterator[tuple[list[int], Batch, Tensor]]:
        for index in self.index:
            batch = packing.pack([self.rows[i] for i in index])
            start = torch.nn.utils.rnn.pad_sequence([self.starts[i] for i in index], batch_first=True)
            with steering.apply(self.lm, [self.vectors[i] for i in index], multiplier=self.multiplier):
                hidden = self._pass(batch, None, start)
            yield index, batch, hidden
