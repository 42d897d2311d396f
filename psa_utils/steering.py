"""Add steering vectors to a model's hidden activations, at every token, for the time of a ``with`` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .models import LM
from .vectors import SteeringVectors


@contextmanager
def apply(lm: LM, vectors: SteeringVectors, *, multiplier: float = 1.0) -> Iterator[None]:
    """Add ``multiplier * vectors`` to the outputs of their decoder blocks (paper, Section 3, eq. 2).

    Applied at every token, prompt included, under ``forward`` and ``generate``, with and without a cache. Uses
    nest and add up; the model is as before afterwards, also after an exception. Multiplier 0 touches nothing.

    Raises:
        ValueError: layers out of range or a hidden size that is not the model's.

    Example: ``with steering.apply(lm, vectors, multiplier=-1.0): lm.model.generate(...)``.
    """
    layers = lm.check_layers(vectors.layers)
    if vectors.values.shape[1] != lm.width:
        raise ValueError(
            f"vectors have hidden size {vectors.values.shape[1]}, {lm.name} has {lm.width}; "
            "a vector steers only the model it was computed on"
        )
    handles = []
    try:
        if multiplier != 0:
            shifts = multiplier * torch.from_numpy(vectors.values)
            handles = [_add(lm.blocks[layer], s) for layer, s in zip(layers, shifts, strict=True)]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(block: nn.Module, shift: Tensor) -> Any:
    reference = next(block.parameters())
    shift = shift.to(reference.device, reference.dtype)

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        # Blocks return the hidden states, in some families as the first of a tuple.
        return (output[0] + shift, *output[1:]) if isinstance(output, tuple) else output + shift

    return block.register_forward_hook(hook)
