"""Ask a model twice at once, with and without a steering vector, and show both answers side by side."""

import itertools
import textwrap
from collections.abc import Iterator

import torch

from . import generate, steering
from .models import LM
from .record import PrivacyRecord
from .vectors import SteeringVectors

GAP = "  |  "


class ModelMismatchError(ValueError):
    """Vectors made on another model."""


def check_model(lm: LM, vectors: SteeringVectors, record: PrivacyRecord | None) -> None:
    """Refuse vectors of another model; without a record only width and layers can tell.

    Raises:
        ModelMismatchError: hidden size, layers, or the weights' digest or revision differ.
    """
    try:
        with steering.apply(lm, vectors):  # entering checks that the vectors fit
            pass
    except ValueError as error:
        raise ModelMismatchError(f"the vectors do not fit {lm.name}: {error}") from error
    if record is not None and lm.revision not in (record.model.revision, record.model.digest):
        made_on = record.model.revision or record.model.digest
        raise ModelMismatchError(
            f"the vectors were made on {record.model.id} (weights {made_on}), {lm.name} has weights {lm.revision}; "
            "a vector steers only the model it was computed on, give that one as --model"
        )


def answers(
    lm: LM,
    vectors: SteeringVectors,
    prompt: str,
    *,
    multiplier: float,
    temperature: float = 0.0,
    max_new_tokens: int = 100,
    generator: torch.Generator | None = None,
) -> tuple[str, str]:
    """Answer ``prompt`` without and with ``multiplier * vectors``, as one batch of two; temperature 0 is greedy.

    Raises:
        ValueError: an empty prompt, or one that leaves no room for ``max_new_tokens`` in the model's context.
    """
    if not prompt.strip():
        raise ValueError(f"prompt={prompt!r} is empty; ask something")
    ids = lm.encode_chat(prompt)
    if len(ids) + max_new_tokens > lm.context:
        raise ValueError(
            f"prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed the {lm.context} tokens "
            f"of {lm.name}'s context; shorten one of them"
        )
    drawn = generate.sample(
        lm,
        [ids, ids],
        [None, vectors],
        multiplier=multiplier,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        generator=generator,
    )
    plain, steered = (lm.tokenizer.decode(tokens, skip_special_tokens=True).strip() for (tokens,) in drawn)
    return plain, steered


def side_by_side(left: str, right: str, *, width: int = 100) -> str:
    """Set two texts in two columns, together ``width`` characters wide.

    >>> print(side_by_side("one two three", "four", width=17))
    one    |  four
    two    |
    three  |
    """
    column = max((width - len(GAP)) // 2, 1)
    rows = itertools.zip_longest(_wrapped(left, column), _wrapped(right, column), fillvalue="")
    longest = max(map(len, _wrapped(left, column)), default=0)
    return "\n".join(f"{a:<{longest}}{GAP}{b}".rstrip() for a, b in rows)


def _wrapped(text: str, width: int) -> list[str]:
    return [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, width) or [""]]


def questions(*, interactive: bool) -> Iterator[str]:
    """Read questions from standard input until it ends; blank lines are passed over."""
    try:
        while True:
            if text := input("> " if interactive else "").strip():
                yield text
    except (EOFError, KeyboardInterrupt):
        return
