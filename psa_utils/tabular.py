"""Rows of a file, whatever its format: strict, in order, each with the place where it stands.

What is in the rows is for the caller to judge; here only what makes a file unreadable is an error.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .data import DataError

Row = tuple[str, Any]
"""Where a row stands ("line 3" of a text file, else "row 3") and what stands there."""


def read(path: Path) -> list[Row]:
    """Rows of a .jsonl, .json (a list), .csv or .parquet file, or of a folder that ``datasets`` saved.

    Blank lines of text files are no rows.

    Raises:
        FileNotFoundError: there is no such path.
        DataError: unknown suffix, or the file is damaged, not UTF-8, or names a column twice.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a file ({', '.join(READERS)}) or a datasets folder")
    reader = _dataset if path.is_dir() else READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: suffix {path.suffix!r} is unknown; use one of {', '.join(READERS)}")
    return list(reader(path))


def type_name(value: Any) -> str:
    """Name of a JSON value's type, for messages.

    >>> type_name({}), type_name(None), type_name(1.5)
    ('object', 'null', 'float')
    """
    return {dict: "object", bool: "truth value", type(None): "null"}.get(type(value), type(value).__name__)


def column_name(name: str) -> str:
    """Name of a column, for messages; a long one is text, perhaps private, where the header should be.

    >>> column_name("User"), column_name("My knee hurts since I fell from the ladder")
    ("'User'", 'of 42 characters (is the header missing?)')
    """
    return repr(name) if len(name) <= 24 else f"of {len(name)} characters (is the header missing?)"


def _jsonl(path: Path) -> Iterator[Row]:
    for i, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            yield f"line {i}", _json(path, line, i)


def _json_list(path: Path) -> Iterator[Row]:
    text = _text(path)
    rows = _json(path, text) if text.strip() else []
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds a JSON {type_name(rows)}; it must be a list of objects, one per pair")
    return ((f"row {i}", row) for i, row in enumerate(rows, 1))


def _csv(path: Path) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _unique(path, header)
        for cells in reader:
            if cells and len(cells) != len(header):
                raise DataError(
                    f"{path}: line {reader.line_num} has {len(cells)} cells, the header {len(header)}; "
                    'put text with commas or line breaks in double quotes, with quotes in it doubled ("")'
                )
            if cells:
                yield f"line {reader.line_num}", dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num} is not CSV ({error}); close every double quote") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            table = pq.ParquetFile(file)
            _unique(path, table.schema_arrow.names)
            rows = table.read().to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({_first_line(error)}); write it again") from error
    return ((f"row {i}", row) for i, row in enumerate(rows, 1))


def _dataset(path: Path) -> Iterator[Row]:
    import datasets  # a second, and only this format needs it
    import pyarrow as pa

    try:
        table = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: not a datasets folder ({_first_line(error)}); write it by save_to_disk") from error
    if isinstance(table, datasets.DatasetDict):
        raise DataError(
            f"{path}: holds the splits {', '.join(table)}; give the folder of one, e.g. {next(iter(table))}"
        )
    return ((f"row {i}", row) for i, row in enumerate(table, 1))


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json_list,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def _json(path: Path, text: str, line: int = 0) -> Any:
    def once(members: list[tuple[str, Any]]) -> dict[str, Any]:
        _unique(path, [name for name, _ in members], f" in one object{f' on line {line}' if line else ''}")
        return dict(members)

    try:
        return json.loads(text, object_pairs_hook=once)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        where = line or getattr(error, "lineno", 1)
        raise DataError(f"{path}: line {where} is not JSON ({getattr(error, 'msg', 'unreadable')}); mend it") from error


def _unique(path: Path, names: Sequence[str], where: str = "") -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: column(s) {', '.join(map(column_name, twice))} appear twice{where}; keep one of each")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:120] or type(error).__name__
