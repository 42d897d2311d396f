"""Do every piece of a forward pass once: the shared beginning of all prompts, and the blocks below the first steered.

Three facts make passes cheap without changing a number beyond rounding:

* all prompts of a set begin with the same tokens (system prompt and template head): their keys and values are computed
  once, in one row, and every row attends to them;
* what happens below the first steered block is the same for every vector: it is computed once per prompt set, and
  every variant resumes from there;
* nothing is needed after the last block that is read.

Tests hold each of them to the plain path, one whole sequence at a time.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from . import packing
from .models import LM
from .packing import Batch, Row


@dataclass(frozen=True)
class Prompts:
    """Rows of a prompt set, split into the beginning they share and the rest."""

    beginning: tuple[int, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Prompts":
        """Split off the longest common beginning that leaves every row a prompt token of its own.

        >>> split = Prompts.of([Row((1, 2, 3), ((9,),)), Row((1, 2, 4, 5), ((8,),))])
        >>> split.beginning, [row.prompt for row in split.rows]
        ((1, 2), [(3,), (4, 5)])
        """
        columns = zip(*(row.prompt[:-1] for row in rows), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        rest = tuple(Row(row.prompt[shared:], row.answers) for row in rows)
        return cls(rows[0].prompt[:shared], rest)


class SharedCache(DynamicCache):
    """Keys and values of the beginning, by block; rows see them and add their own, which are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.beginning: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the first keys and values of a block; put them before all later ones."""
        if layer_idx not in self.beginning:
            self.beginning[layer_idx] = keys, values
            return keys, values
        before = (kept.expand(len(keys), -1, -1, -1) for kept in self.beginning[layer_idx])
        return torch.cat([next(before), keys], dim=2), torch.cat([next(before), values], dim=2)


class Engine:
    """Forward passes over one prompt set, under whatever steering is active from block ``first`` upwards.

    Args:
        lm: the model.
        rows: prompts and answers, as :func:`psa_utils.packing.rows_of` makes them.
        first: block from which every pass but the first resumes. 0: keep nothing, start from the tokens.
        batch_tokens: tokens in one pass, padding included.
    """

    def __init__(self, lm: LM, rows: Sequence[Row], *, first: int = 0, batch_tokens: int = 2048) -> None:
        self.lm, self.first = lm, first
        self.prompts = Prompts.of(rows)
        self.rows = self.prompts.rows
        self.index = list(packing.batches(self.rows, batch_tokens))

    @cached_property
    def batches(self) -> list[Batch]:
        """Packed batches, in the order of ``index``."""
        offset = len(self.prompts.beginning)
        return [packing.pack([self.rows[i] for i in index], offset=offset) for index in self.index]

    def hidden(self) -> Iterator[tuple[list[int], Batch, Tensor]]:
        """Yield row numbers, packed batch and last hidden states (batch, length, d)."""
        below = self._below if self.first else [None] * (1 + len(self.batches))
        yield from zip(self.index, self.batches, self._passes(below), strict=True)

    @cached_property
    def _below(self) -> list[Tensor]:
        """Inputs of block ``first``, unsteered: of the shared beginning and of every batch."""
        kept: list[Tensor] = []
        with _before(self.lm.blocks[self.first], _stop_with(kept)):
            for _ in self._passes([None] * (1 + len(self.batches))):
                pass
        return kept

    def _passes(self, below: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        cache = SharedCache() if self.prompts.beginning else None
        if cache is not None:
            self._pass(packing.pack([Row(self.prompts.beginning, ())]), cache, below[0])
        for batch, start in zip(self.batches, below[1:], strict=True):
            yield self._pass(batch, cache, start)

    @torch.inference_mode()
    def _pass(self, batch: Batch, cache: SharedCache | None, start: Tensor | None) -> Tensor | None:
        """One pass; from block ``first`` on if its input ``start`` is known; None if it was stopped early."""
        with ExitStack() as stack:
            if start is not None:
                for block in self.lm.blocks[: self.first]:
                    stack.enter_context(_passing_through(block))
                stack.enter_context(_before(self.lm.blocks[self.first], lambda _: start))
            try:
                return self.lm.forward_hidden(batch.ids, batch.allowed, batch.positions, cache)
            except Enough:
                return None


class Enough(Exception):
    """Ends a forward pass after the last block that is needed."""


def _stop_with(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(hidden: Tensor) -> Tensor:
        kept.append(hidden)
        raise Enough

    return keep


@contextmanager
def _before(block: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the hidden states that enter a block."""

    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return change(args[0]), *args[1:]

    handle = block.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _passing_through(block: nn.Module) -> Iterator[None]:
    """Let a block hand on its input untouched."""
    own = vars(block).get("forward")
    block.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
