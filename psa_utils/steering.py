"""Add steering vectors to a model's hidden activations, at every token, for the time of a ``with`` block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .models import LM
from .vectors import SteeringVectors

PerRow = Sequence[SteeringVectors | None]


@contextmanager
def apply(lm: LM, vectors: SteeringVectors | PerRow, *, multiplier: float = 1.0) -> Iterator[None]:
    """Add ``multiplier * vectors`` to the outputs of their decoder blocks (paper, Section 3, eq. 2).

    Applied at every token, prompt included, under ``forward`` and ``generate``, with and without a cache. A sequence
    gives every row of the batch its own vectors, or none. Uses nest and add up; the model is as before afterwards,
    also after an exception. Multiplier 0 touches nothing.

    Raises:
        ValueError: layers out of range, a hidden size that is not the model's, or, at the forward pass, a batch of
            another number of rows than there are vectors.

    Example: ``with steering.apply(lm, vectors, multiplier=-1.0): lm.model.generate(...)``.
    """
    shifts = _shift_of_all(lm, vectors) if isinstance(vectors, SteeringVectors) else _shift_of_rows(lm, vectors)
    handles = []
    try:
        if multiplier != 0:
            handles = [_add(lm.blocks[layer], multiplier * shift) for layer, shift in shifts.items()]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shift_of_all(lm: LM, vectors: SteeringVectors) -> dict[int, Tensor]:
    """Check vectors against the model; their values (d,) by layer."""
    layers = lm.check_layers(vectors.layers)
    if vectors.values.shape[1] != lm.width:
        raise ValueError(
            f"vectors have hidden size {vectors.values.shape[1]}, {lm.name} has {lm.width}; "
            "a vector steers only the model it was computed on"
        )
    return dict(zip(layers, torch.from_numpy(vectors.values), strict=True))


def _shift_of_rows(lm: LM, rows: PerRow) -> dict[int, Tensor]:
    """Values (rows, 1, d) by layer, zero where a row has no vector there."""
    by_row = [{} if row is None else _shift_of_all(lm, row) for row in rows]
    nothing = torch.zeros(lm.width)
    layers = sorted({layer for row in by_row for layer in row})
    return {layer: torch.stack([row.get(layer, nothing) for row in by_row])[:, None] for layer in layers}


def _add(block: nn.Module, shift: Tensor) -> Any:
    placed: dict[torch.device, Tensor] = {}

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        # Blocks return the hidden states, in some families as the first of a tuple.
        hidden = output[0] if isinstance(output, tuple) else output
        if shift.ndim == 3 and len(shift) != len(hidden):
            raise ValueError(f"the batch has {len(hidden)} rows, steering was given {len(shift)} vectors; one per row")
        # Follow the activations, not the weights: a device map may keep a block's weights elsewhere until it runs.
        if hidden.device not in placed:
            placed[hidden.device] = shift.to(hidden.device, hidden.dtype)
        steered = hidden + placed[hidden.device]
        return (steered, *output[1:]) if isinstance(output, tuple) else steered

    hook.steers = True  # lets the engine see that it must not leave this block out
    return block.register_forward_hook(hook)
