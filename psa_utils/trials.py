"""Trials of an attack, computed and kept in chunks, so that an interrupted run goes on where it stopped."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from . import store


def in_chunks(compute: Callable[[int], pd.DataFrame], chunks: int, path: Path | None, key: str) -> pd.DataFrame:
    """Concatenate ``compute(0)``, ``compute(1)``, ...; each is on disk beside ``path`` until all are there.

    ``key`` names everything the trials depend on (:func:`psa_utils.store.key_of`). With ``path`` None nothing is kept.
    """
    if path is None:
        return pd.concat(map(compute, range(chunks)), ignore_index=True)
    parts = [path.with_name(f".{path.stem}.{i}{path.suffix}") for i in range(chunks)]

    def whole() -> pd.DataFrame:
        kept = (store.frame(part, key, partial(compute, i)) for i, part in enumerate(parts))
        return pd.concat(kept, ignore_index=True)

    frame = store.frame(path, key, whole)
    for part in parts:
        part.unlink(missing_ok=True)
    return frame
