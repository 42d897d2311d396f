"""Finished stages on disk, each with the key of the inputs it was computed from.

A stage is kept only under its whole key (model, items, layers, ...): a changed input recomputes, an unchanged
one is read back, and an interrupted run goes on after the last stage it finished.
"""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import paths

KEY, DIGEST = "key", "sha256"


def key_of(**inputs: Any) -> str:
    """SHA-256 of named, JSON-able inputs.

    >>> key_of(layers=[1, 2], model="a") == key_of(model="a", layers=[1, 2]) != key_of(layers=[1], model="a")
    True
    """
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=list).encode()).hexdigest()


def code_of(*modules: str) -> str:
    """SHA-256 over the sources of modules of this package: a result of other code is not this code's result."""
    sources = (paths.PACKAGE / f"{name}.py" for name in modules)
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def digest_of(values: np.ndarray) -> str:
    """SHA-256 of an array's type, shape and content."""
    return _digest_arrays({"": np.ascontiguousarray(values)})


def arrays(path: Path, key: str, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays kept at ``path`` under ``key``, computing and saving them if they are not there."""
    if (kept := read_arrays(path, key)) is not None:
        return kept
    values = {name: np.ascontiguousarray(value) for name, value in compute().items()}
    with paths.atomic(path) as temporary:
        save_file(values, temporary, metadata={KEY: key, DIGEST: _digest_arrays(values)})
    return values


def read_arrays(path: Path, key: str) -> dict[str, np.ndarray] | None:
    """Return the arrays kept at ``path`` under a key that begins with ``key``.

    None if the file is absent, kept under another key, or damaged: truncated, or a single bit of it flipped.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError):
        return None
    whole = about.get(KEY, "").startswith(key) and about.get(DIGEST) == _digest_arrays(values)
    return values if whole else None


def _digest_arrays(values: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
    return digest.hexdigest()


def frame(path: Path, key: str, compute: Callable[[], pd.DataFrame], *, texts: Sequence[str] = ()) -> pd.DataFrame:
    """Return the table kept at ``path`` (CSV) under ``key``, computing and saving it if it is not there.

    Columns ``texts`` hold text whatever it looks like: "7", "None" or nothing at all.
    The first line holds the key and a digest of the rest, so that a truncated or edited file is recomputed.
    """
    if (kept := _read_frame(path, key, texts)) is None:
        # Text in quotes: a generated answer may hold a bare carriage return, which would end the line.
        table = compute().to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).encode()
        with paths.atomic(path) as temporary:
            temporary.write_bytes(f"# {key} {_digest(table)}\n".encode() + table)
        kept = _read_frame(path, key, texts)
    assert kept is not None, f"{path} changed while it was written"
    return kept


def _read_frame(path: Path, key: str, texts: Sequence[str]) -> pd.DataFrame | None:
    if not path.exists():
        return None
    head, _, table = path.read_bytes().partition(b"\n")
    if head != f"# {key} {_digest(table)}".encode():
        return None
    types = dict.fromkeys(texts, str)
    kept = pd.read_csv(io.BytesIO(table), dtype=types, keep_default_na=False, na_values=[""])
    return kept.fillna(dict.fromkeys(texts, ""))


def _digest(table: bytes) -> str:
    return hashlib.sha256(table).hexdigest()[:16]
