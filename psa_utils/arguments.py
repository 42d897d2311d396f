"""Types of command-line options: each turns text into a value or says why it cannot."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def finite(text: str) -> float:
    """Return a finite number.

    >>> finite("-0.5")
    -0.5
    """
    return _number(text, "a finite number", lambda _: True)


def positive(text: str) -> float:
    """Return a finite number above 0."""
    return _number(text, "a number above 0", lambda value: value > 0)


def not_negative(text: str) -> float:
    """Return a finite number of at least 0."""
    return _number(text, "a number of at least 0", lambda value: value >= 0)


def probability(text: str) -> float:
    """Return a number strictly between 0 and 1."""
    return _number(text, "a number between 0 and 1", lambda value: 0 < value < 1)


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ArgumentTypeError(f"{text!r} is not possible; give a whole number of at least 1")
    return int(text)


def layers(text: str) -> tuple[int, ...] | None:
    """Return 0-based decoder blocks, ascending; None for ``auto``.

    >>> layers("13,11"), layers("auto")
    ((11, 13), None)
    """
    if text == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ArgumentTypeError(f"{text!r} is not possible; give auto, or distinct 0-based blocks such as 11,12,13")
    return tuple(sorted(map(int, parts)))


def _number(text: str, wanted: str, accepts: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and accepts(value)):
        raise ArgumentTypeError(f"{text!r} is not possible; give {wanted}")
    return value
