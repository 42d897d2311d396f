"""Do every piece of a forward pass once: the shared beginning of all prompts, and the blocks below the first steered.

Three facts make passes cheap without changing a number beyond rounding:

* all prompts of a set begin with the same tokens (system prompt and template head): their keys and values are computed
  once, in one row, and every row attends to them;
* what happens up to the first steered block is the same for every vector: its output, before the vector is added, is
  computed once per prompt set, and every variant resumes from there;
* nothing is needed after the last block that is read.

Tests hold each of them to the plain path, one whole sequence at a time.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
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
        first: first block that is ever steered; every pass resumes from its output. None: keep nothing, start from
            the tokens.
        batch_tokens: tokens in one pass, padding included.
    """

    def __init__(self, lm: LM, rows: Sequence[Row], *, first: int | None = None, batch_tokens: int = 1024) -> None:
        self.lm, self.first = lm, first
        self.prompts = Prompts.of(rows)
        self.rows = self.prompts.rows
        self.index = list(packing.batches(self.rows, batch_tokens))

    def batches(self) -> Iterator[Batch]:
        """Packed batches, in the order of ``index``; packed anew each time, so that memory does not grow with rows."""
        offset = len(self.prompts.beginning)
        return (packing.pack([self.rows[i] for i in index], offset=offset) for index in self.index)

    def hidden(self) -> Iterator[tuple[list[int], Batch, Tensor]]:
        """Yield row numbers, packed batch and last hidden states (batch, length, d).

        Raises:
            ValueError: steering is active on a block below ``first``, which a resumed pass would leave out.
        """
        if steered := [i for i, block in enumerate(self.lm.blocks[: self.first or 0]) if is_steered(block)]:
            raise ValueError(f"steering touches blocks {steered}, below first={self.first}; lower `first`")
        starts = itertools.repeat(None) if self.first is None else self._outputs_of_first
        for index, (batch, hidden) in zip(self.index, self._passes(starts), strict=True):
            yield index, batch, hidden

    @cached_property
    def _outputs_of_first(self) -> list[Tensor]:
        """Outputs of block ``first``, unsteered: of the shared beginning, if there is one, and of every batch."""
        kept: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Tensor | tuple) -> None:
            kept.append(output[0] if isinstance(output, tuple) else output)
            raise Enough

        # Before any other hook: steering that is active now must not be part of what is kept.
        handle = self.lm.blocks[self.first].register_forward_hook(keep, prepend=True)
        try:
            for _ in self._passes(itertools.repeat(None)):
                pass
        finally:
            handle.remove()
        return kept

    def _passes(self, outputs_of_first: Iterable[Tensor | None]) -> Iterator[tuple[Batch, Tensor | None]]:
        starts = iter(outputs_of_first)
        cache = SharedCache() if self.prompts.beginning else None
        if cache is not None:
            self._pass(packing.pack([Row(self.prompts.beginning, ())]), cache, next(starts))
        for batch in self.batches():
            yield batch, self._pass(batch, cache, next(starts))

    @torch.inference_mode()
    def _pass(self, batch: Batch, cache: SharedCache | None, start: Tensor | None) -> Tensor | None:
        """One pass; from the output ``start`` of block ``first`` if it is known; None if it was stopped early."""
        with ExitStack() as stack:
            if start is not None:
                for block in self.lm.blocks[: self.first + 1]:
                    stack.enter_context(_handing_on(block, start))
            try:
                return self.lm.forward_hidden(batch.ids, batch.allowed, batch.positions, cache)
            except Enough:
                return None


class Enough(Exception):
    """Ends a forward pass after the last block that is needed."""


def is_steered(block: nn.Module) -> bool:
    """Whether one of :mod:`psa_utils.steering`'s hooks, which mark themselves, sits on the block."""
    return any(getattr(hook, "steers", False) for hook in block._forward_hooks.values())


@contextmanager
def _handing_on(block: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Let a block return ``hidden`` without computing anything; its hooks still run."""
    own = vars(block).get("forward")
    block.forward = lambda *_, **__: hidden
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
