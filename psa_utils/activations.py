"""Difference vectors d_i = h_l(prompt, matching answer) - h_l(prompt, other answer), the raw material of steering.

h_l is the output of decoder block l (0-based) at the answer's read token (paper, Section 3).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from . import packing
from .data import DataError, Item
from .engine import Engine, Enough
from .models import LM


def differences(
    lm: LM,
    pairs: Sequence[Item],
    *,
    layers: Sequence[int],
    fmt: str = "text",
    template: str = "chat",
    batch_tokens: int = 1024,
    finite: bool = True,
) -> np.ndarray:
    """Activation differences of contrastive pairs, float32 (n, k, d).

    What else is in a batch does not matter: padding is masked and every pair has its own positions. Pairs with the same
    prompt share one pass over it.

    Args:
        lm: the model.
        pairs: items, read at their matching and their other answer.
        layers: 0-based blocks to read.
        fmt: answer format.
        template: chat template.
        batch_tokens: tokens in one pass, padding included.
        finite: refuse activations that are not finite. A release does not: an error would depend on private data.

    Raises:
        ValueError: no pairs, or layers out of range.
        DataError: pairs longer than the model's context, or activations that are not finite.

    Example: ``differences(lm, data.load_items("mini", "refusal", "train"), layers=[10, 11])``.
    """
    chosen = lm.check_layers(layers)
    if not pairs:
        raise ValueError("pairs is empty; give at least one contrastive pair")
    rows, members = packing.branching(packing.rows_of(lm, pairs, fmt, template=template), batch_tokens)
    engine = Engine(lm, rows, batch_tokens=batch_tokens)
    result = np.empty((len(pairs), len(chosen), lm.width), np.float32)
    with tqdm(total=len(pairs), desc="pairs", disable=None, leave=False) as bar, recording(lm, chosen) as hidden:
        for index, batch, _ in engine.hidden():
            read = [pair for i in index for pair in members[i]]
            result[read] = _differences(lm, [engine.rows[i] for i in index], batch, hidden, fmt)
            bar.update(len(read))
    if finite:
        _check_finite(result, lm)
    return result


def read_tokens(lm: LM, pairs: Sequence[Item], *, fmt: str = "text", template: str = "chat") -> list[dict[str, str]]:
    """Show, for both answers of each pair, the token that is read and the text just before it."""
    shown = []
    for row in packing.rows_of(lm, pairs, fmt, template=template):
        tokens = [*row.prompt, *(t for answer in row.answers for t in answer)]
        first, second = (packing.read_column(lm, row, a, fmt) for a in (0, 1))
        decode = lm.tokenizer.decode
        shown.append(
            {
                "matching ends": decode(tokens[max(first - 5, 0) : first]),
                "read": decode([tokens[first]]),
                "other ends": decode(tokens[max(second - 5, row.span(1).start) : second]),
                "read (other)": decode([tokens[second]]),
            }
        )
    return shown


def _differences(
    lm: LM, rows: Sequence[packing.Row], batch: packing.Batch, hidden: Mapping[int, Tensor], fmt: str
) -> np.ndarray:
    """Every two answers of a row are a pair."""
    b = torch.tensor([i for i, row in enumerate(rows) for _ in row.answers[::2]])
    sides = []
    for side in (0, 1):
        asked = [(row, answer) for row in rows for answer in range(side, len(row.answers), 2)]
        columns = torch.tensor([packing.read_column(lm, row, answer, fmt) for row, answer in asked])
        _assert_read(asked, columns, batch.ids[b, columns])
        sides.append(torch.stack([layer[b, columns].float().cpu() for layer in hidden.values()], 1))
    return (sides[0] - sides[1]).numpy()


def _assert_read(asked: Sequence[tuple[packing.Row, int]], columns: Tensor, tokens: Tensor) -> None:
    """The tokens at the columns read are tokens of this answer: never padding, the prompt or another answer."""
    for (row, answer), column, token in zip(asked, columns.tolist(), tokens.tolist(), strict=True):
        span = row.span(answer)
        assert column in range(span.start, span.stop), f"column {column} lies outside the answer's {span}"
        assert token == row.answers[answer][column - span.start], f"token {token} is not the answer's"


@contextmanager
def recording(lm: LM, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of ``layers``, in their order; every forward pass ends after the last of them."""
    hidden = dict.fromkeys(layers, torch.empty(0))

    def record(layer: int, output: Tensor | tuple) -> None:
        hidden[layer] = output[0] if isinstance(output, tuple) else output
        if layer == max(layers):
            raise Enough

    handles = [
        lm.blocks[layer].register_forward_hook(lambda _m, _i, out, layer=layer: record(layer, out)) for layer in layers
    ]
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()


def _check_finite(result: np.ndarray, lm: LM) -> None:
    if bad := np.flatnonzero(~np.isfinite(result).all(axis=(1, 2))).tolist():
        raise DataError(
            f"activations of {lm.name} are not finite for item(s) {[i + 1 for i in bad[:10]]}"
            f"{' ...' if len(bad) > 10 else ''}; load the model in float32 or drop these items"
        )
