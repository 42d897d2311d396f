"""Contrastive pairs and test items: the shipped benchmark ``mini`` and the paper's CAA, one reader for both.

A file is a JSON list of objects with ``question`` (its options listed as "(A) ...", "(B) ..."),
``answer_matching_behavior`` and ``answer_not_matching_behavior`` (an option's letter, "(A)"). Every item can
be asked in two formats: ``letter``, the paper's, where the prompt lists the options and the completion is
"(A)", and ``text``, where the options are left out and the completion is the option's words.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import paths
from .config import BEHAVIOURS, FORMATS

MATCHING = {
    "sycophancy": "sides with the user's stated view",
    "hallucination": "makes things up, accepts false premises",
    "refusal": "declines the request",
    "survival-instinct": "accepts being shut down (CAA's sign)",
    "myopic-reward": "takes the smaller reward that comes sooner",
    "coordinate-other-ais": "sides with other AIs against people's wishes",
    "corrigible-neutral-HHH": "consents to being changed",
}
"""What the *matching* answer of each behaviour does."""
FILES = {
    "train": "generate/{}/generate_dataset.json",
    "public": "generate/{}/public_dataset.json",
    "test": "test/{}/test_dataset_ab.json",
    "open-ended": "test/{}/test_dataset_open_ended.json",
}
OPTION = re.compile(r"^[ \t]*\(([A-Z])\)[ \t]*", re.MULTILINE)
CHOICES = re.compile(r"\n*[ \t]*Choices:[ \t]*$")


class DataError(ValueError):
    """Malformed input; the message lists every fault with file, item number and cure."""


@dataclass(frozen=True)
class Item:
    """One A/B item: the question without its options, the options, and which two are compared.

    ``matching`` and ``other`` index ``options``. ``listed`` is the question as published, options included.
    """

    question: str
    listed: str
    options: tuple[str, ...]
    matching: int
    other: int
    frame: str = ""

    def prompt(self, fmt: str) -> str:
        """What the user says: with the options listed (``letter``) or without (``text``)."""
        _known("format", fmt, FORMATS)
        return self.listed if fmt == "letter" else self.question

    def completion(self, option: int, fmt: str) -> str:
        """The assistant's answer: "(A)" or the option's words.

        Raises:
            DataError: the option has no words (only where :class:`Fields` allowed it) and ``fmt`` is ``text``.
        """
        _known("format", fmt, FORMATS)
        letter = f"({chr(ord('A') + option)})"
        if fmt == "text" and not self.options[option]:
            raise DataError(f"{self.question!r}: option {letter} has no words; ask by letter or leave the item out")
        return letter if fmt == "letter" else self.options[option]


@dataclass(frozen=True)
class Fields:
    """Names under which a file keeps the parts of an item; the defaults are those of CAA's behaviours."""

    question: str = "question"
    matching: str = "answer_matching_behavior"
    other: str = "answer_not_matching_behavior"
    frame: str = "frame"
    frame_required: bool = False
    other_may_be_empty: bool = False
    """Whether the answer that does not match may have no words."""


@dataclass(frozen=True)
class OpenEnded:
    """A prompt without options, with one reference answer each way (None where the source has none)."""

    question: str
    matching: str | None
    other: str | None


def split_options(question: str) -> tuple[str, list[str]]:
    """Separate a published question from the options listed at its end.

    The options are the last run of lines that starts with "(A)"; "Choices:" before them is optional.

    >>> split_options("Tea or rest?\\n\\nChoices:\\n (A) Tea\\n (B) Rest")
    ('Tea or rest?', ['Tea', 'Rest'])
    """
    marks = list(OPTION.finditer(question))
    starts = [i for i, mark in enumerate(marks) if mark.group(1) == "A"]
    if not starts:
        return question.strip(), []
    marks = marks[starts[-1] :]
    if [m.group(1) for m in marks] != [chr(ord("A") + i) for i in range(len(marks))]:
        return question.strip(), []
    ends = [m.start() for m in marks[1:]] + [len(question)]
    options = [question[m.end() : end].strip() for m, end in zip(marks, ends, strict=True)]
    return CHOICES.sub("", question[: marks[0].start()].rstrip()).strip(), options


def root(source: str) -> Path:
    """Folder of ``mini`` (shipped) or ``caa`` (``PSA_DATA_DIR``, else what ``make data`` downloaded).

    Raises:
        FileNotFoundError: CAA is not there; the message says how to get it.
    """
    _known("source", source, ("mini", "caa"))
    if source == "mini":
        return paths.MINI
    folder = Path(os.environ.get("PSA_DATA_DIR") or paths.cache() / "caa")
    return paths.require(folder, "make data` (or set PSA_DATA_DIR to a folder with generate/ and test/; `make data")


def file_of(source: str, behaviour: str, split: str) -> Path:
    """Path of one data file. Public pairs always come from ``mini``: they are ours, never anyone's secret."""
    _known("behaviour", behaviour, BEHAVIOURS)
    _known("split", split, tuple(FILES))
    return root("mini" if split == "public" else source) / FILES[split].format(behaviour)


def load_items(source: str, behaviour: str, split: str, limit: int | None = None) -> list[Item]:
    """Load the A/B items of ``split``: ``train`` (private), ``public`` or ``test``.

    Raises:
        DataError: malformed file; all faults at once.
        FileNotFoundError: the data set is not there.
    """
    return read_items(file_of(source, behaviour, split))[:limit]


def load_open_ended(source: str, behaviour: str) -> list[OpenEnded]:
    """Load the open-ended prompts of a behaviour (CAA's have no reference answers)."""
    path = file_of(source, behaviour, "open-ended")
    faults: list[str] = []
    rows = [_open_ended(i, row, faults) for i, row in enumerate(_read_list(path), 1)]
    _report(path, faults)
    return [row for row in rows if row is not None]


def read_items(path: Path, fields: Fields = Fields()) -> list[Item]:
    """Parse one A/B file whose objects name their parts as ``fields`` says.

    Raises:
        DataError: names the file, every faulty item's number (from 1) and the cure.
    """
    faults: list[str] = []
    items = [_item(i, row, fields, faults) for i, row in enumerate(_read_list(path), 1)]
    _report(path, faults)
    return [item for item in items if item is not None]


def digest(items: Sequence[Item]) -> str:
    """SHA-256 over the content of items, in order: the key under which results are kept."""
    return hashlib.sha256(repr(list(items)).encode()).hexdigest()


def _read_list(path: Path) -> list[object]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; `make data` downloads the CAA files")
    try:
        rows = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg}); it must hold a list of objects") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: holds {rows!r:.40}; it must be a JSON list with at least one item")
    return rows


def _fields(i: int, row: object, names: Sequence[str], faults: list[str]) -> bool:
    if not isinstance(row, dict):
        faults.append(f"item {i}: is a {type(row).__name__}; write an object with {', '.join(names)}")
        return False
    bad = [name for name in names if not isinstance(row.get(name), str) or not row[name].strip()]
    if bad:
        faults.append(f"item {i}: {', '.join(bad)} missing, empty or not text; add it as a string")
    return not bad


def _item(i: int, row: object, fields: Fields, faults: list[str]) -> Item | None:
    names = (fields.matching, fields.other)
    if not _fields(i, row, (fields.question, *names, *[fields.frame] * fields.frame_required), faults):
        return None
    question, options = split_options(row[fields.question])
    letters = [f"({chr(ord('A') + j)})" for j in range(len(options))]
    found = [row[name].strip() for name in names]
    before = len(faults)
    if len(options) < 2:
        faults.append(f"item {i}: the question lists no options; end it with lines '(A) ...' and '(B) ...'")
    else:
        faults += [
            f"item {i}: {n}={f!r} names none of {', '.join(letters)}; write the letter of an option"
            for n, f in zip(names, found, strict=True)
            if f not in letters
        ]
        faults += [
            f"item {i}: option {x} is empty; give it words"
            for x, o in zip(letters, options, strict=True)
            if not o and not (fields.other_may_be_empty and x == found[1])
        ]
        if found[0] == found[1] or _same_words(found, letters, options):
            faults.append(f"item {i}: the two answers are identical; they must differ")
        if not question:
            faults.append(f"item {i}: there is no question before the options; add one")
    if len(faults) > before:
        return None
    matching, other = (letters.index(f) for f in found)
    return Item(question, row[fields.question], tuple(options), matching, other, row.get(fields.frame, ""))


def _same_words(found: Sequence[str], letters: Sequence[str], options: Sequence[str]) -> bool:
    words = [options[letters.index(f)].casefold() for f in found if f in letters]
    return len(words) == 2 and words[0] == words[1] != ""


def _open_ended(i: int, row: object, faults: list[str]) -> OpenEnded | None:
    if not _fields(i, row, ("question",), faults):
        return None
    return OpenEnded(row["question"], row.get("matching_reference"), row.get("not_matching_reference"))


def _report(path: Path, faults: Sequence[str]) -> None:
    if faults:
        raise DataError(f"{path}: {len(faults)} fault(s)\n  " + "\n  ".join(faults))


def _known(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
