"""Someone's own private pairs: JSONL, JSON, CSV, Parquet or a ``datasets`` folder, read strictly.

Columns: ``question`` (or ``prompt``), ``positive`` (an answer to steer towards), ``negative`` (one to steer away from),
and, optionally, ``user``. Any other column is refused: a misspelt ``User`` that is ignored would silently protect pairs
instead of people.

**n is public.** Privacy is under the replace-one relation: neighbouring data sets differ in what one unit (a pair, or
with ``user`` a person with all their pairs) says, never in how many units there are. So n is not protected; it is
published with the vector and sets the noise. That is sound only if n is fixed before anything is computed: every row
that cannot be used is an error here, for the owner of the file to settle, and nothing is dropped later. How many
*pairs* the persons have is protected, hence must not be published.

Error messages name file, row, column and cure, and never repeat the private text.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from . import tabular
from .data import DataError, Item
from .tabular import Row, column_name, type_name

PROMPTS = ("question", "prompt")
ANSWERS = ("positive", "negative")
USER = "user"
SHOWN = 20
"""Faults listed in one message."""


@dataclass(frozen=True)
class Pairs:
    """Contrastive pairs, in file order, and who gave them (None: no ``user`` column); its repr shows neither."""

    items: tuple[Item, ...] = field(repr=False)
    users: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def unit(self) -> str:
        """What is protected: a ``person`` with all their pairs, or a single ``pair``."""
        return "pair" if self.users is None else "person"

    @cached_property
    def units(self) -> tuple[int, ...] | None:
        """Number of the person, from 0 in order of appearance, that each pair belongs to; None without users."""
        if self.users is None:
            return None
        number = {user: i for i, user in enumerate(dict.fromkeys(self.users))}
        return tuple(number[user] for user in self.users)

    @property
    def n(self) -> int:
        """Number of units of privacy: the n of the mean and of the accounting, public."""
        return len(self.items) if self.units is None else len(set(self.units))

    def identities(self) -> list[str]:
        """Everything whose loss must be added up over releases: every pair, and every person where they are known.

        Secret, meant for :class:`psa_utils.ledger.Ledger`, which hashes them under its key. Case, spacing and which
        answer is the positive one make no difference: such an edit does not make a pair new.
        """
        people = (json.dumps([USER, _plain(user)]) for user in self.users or ())
        return sorted({*map(_identity, self.items), *people})


def read(path: str | Path) -> Pairs:
    """Read ``path`` (.jsonl, .json, .csv, .parquet, or a folder that ``datasets`` saved).

    Whole numbers in ``user`` are read as text, spaces around any text are dropped. Give the items to
    :func:`psa_utils.activations.differences` with ``fmt="text"``; they have no letters.

    Raises:
        FileNotFoundError: there is no such path.
        DataError: anything that is not as described above; lists the faulty rows with the cure.
    """
    path = Path(path)
    rows = tabular.read(path)
    columns = list(dict.fromkeys(name for _, row in rows if isinstance(row, Mapping) for name in row))
    others = [(where, row) for where, row in rows if not isinstance(row, Mapping)]
    faults = [f"{where}: is a {type_name(row)}; write an object" for where, row in others]
    if faults := (faults or _column_faults(columns)) if rows else ["holds no rows; add one row per pair"]:
        raise _error(path, faults)
    prompt = next(name for name in PROMPTS if name in columns)
    return _pairs(path, rows, (prompt, *ANSWERS, *([USER] if USER in columns else [])))


def per_unit(differences: np.ndarray, units: Sequence[int] | None) -> np.ndarray:
    """Average each person's pairs first: differences (n, k, d) of pairs to (persons, k, d), float64.

    A person's row depends on that person's pairs only, so that after clipping, which comes next, replacing a person
    with all their pairs moves the mean by at most 2/n with n the number of persons (user-level privacy).

    Raises:
        ValueError: not one unit per pair, or the units are not 0, 1, ..., n - 1.

    >>> per_unit(np.array([[[1.0]], [[5.0]], [[3.0]]]), [0, 1, 0]).ravel().tolist()
    [2.0, 5.0]
    """
    d = np.asarray(differences, np.float64)
    if units is None:
        return d
    if len(units) != len(d):
        raise ValueError(f"units has {len(units)} entries for {len(d)} pairs; give one per pair")
    counts = np.bincount(units)
    if not counts.all():
        raise ValueError("units must number the persons 0, 1, ..., n - 1 without gaps; take them from Pairs.units")
    sums = np.zeros((len(counts), *d.shape[1:]))
    np.add.at(sums, np.asarray(units), d)
    return sums / counts[:, None, None]


def _column_faults(columns: Sequence[str]) -> list[str]:
    known = (*PROMPTS, *ANSWERS, USER)
    unused = [column_name(name) for name in columns if name not in known]
    faults = [f"column {name} is not used; name it {', '.join(known)} or drop it" for name in unused]
    faults += [f"column {name!r} is missing; add it" for name in ANSWERS if name not in columns]
    prompts = [name for name in PROMPTS if name in columns]
    if len(prompts) != 1:
        faults.append(f"{'both' if prompts else 'neither'} of {' and '.join(map(repr, PROMPTS))}; give one of them")
    return faults


def _pairs(path: Path, rows: Sequence[Row], names: Sequence[str]) -> Pairs:
    faults = [f"{where}: {fault}" for where, row in rows for fault in _row_faults(row, names)]
    if faults:
        raise _error(path, faults)
    cells = [tuple(str(row[name]).strip() for name in names) for _, row in rows]
    items = tuple(Item(c[0], c[0], c[1:3], matching=0, other=1) for c in cells)
    pairs = Pairs(items, tuple(c[3] for c in cells) if USER in names else None)
    if faults := _repeats(pairs, [where for where, _ in rows]):
        raise _error(path, faults)
    if pairs.n < 2:
        raise _error(path, [f"holds a single {pairs.unit}, who cannot hide among others; add more"])
    return pairs


def _repeats(pairs: Pairs, places: Sequence[str]) -> list[str]:
    """Rows that would count a pair twice, from the same person or from nobody known."""
    first: dict[tuple[str, str], str] = {}
    users = pairs.users or [""] * len(pairs.items)
    faults = []
    for item, user, where in zip(pairs.items, users, places, strict=True):
        if (earlier := first.setdefault((_identity(item), user), where)) != where:
            faults.append(f"{where}: has the texts of {earlier}; keep one of them, or the pair counts twice")
    return faults


def _identity(item: Item) -> str:
    return json.dumps(["pair", _plain(item.question), *sorted(map(_plain, item.options))])


def _row_faults(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    faults = [fault for name in names if (fault := _cell_fault(row, name))]
    if not faults and _plain(row[ANSWERS[0]]) == _plain(row[ANSWERS[1]]):
        faults = ["positive and negative are the same answer; they must differ"]
    return faults


def _cell_fault(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None:
        return f"{name} is missing; add it{', in every row or in none' if name == USER else ''}"
    if name == USER and isinstance(value, int) and not isinstance(value, bool):
        return None
    if not isinstance(value, str):
        return f"{name} is a {type_name(value)}; write {'text or a whole number' if name == USER else 'text'}"
    if not value.strip():
        return f"{name} is empty; give it words"
    if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        return f"{name} holds half a surrogate pair, which is no character; write the text again"
    return None


def _plain(text: str) -> str:
    """Text without what a careless copy changes: case, spacing, compatibility forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _error(path: Path, faults: Sequence[str]) -> DataError:
    more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    return DataError(f"{path}: {len(faults)} fault(s)\n  " + "\n  ".join([*faults[:SHOWN], *more]))
