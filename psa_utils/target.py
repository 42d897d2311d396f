"""Where a release is written: checked before privacy is spent, never over another file, whole or not at all."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from .vectors import SteeringVectors

PROBE = 2**22
"""Bytes that must fit on the target's disk: more than the vectors of five layers of any model there is."""


def check(out: Path, ledger: Path | None) -> None:
    """Find out now, not after a charge, that the target cannot be written. Leaves nothing behind, even if killed.

    Raises:
        ValueError: a suffix other than .safetensors, or the ledger's own name.
        FileExistsError: the name is taken.
        OSError: the folder, the name or the disk does not take the file.
    """
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {out} must end in .safetensors, the format that carries the privacy record")
    if ledger is not None and out.resolve() == ledger.resolve():
        raise ValueError(f"--out {out} is the ledger itself; choose another name")
    try:
        if out.is_dir():
            raise IsADirectoryError("it is a folder; give the name of a file")
        folder = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
        missing = out.absolute().parent.relative_to(folder).parts
        # Names too long are refused here; the longest is that of a spare file's temporary one.
        for name in (*missing, f".12345678.{_spare(out).name}"):
            with contextlib.suppress(FileNotFoundError):
                os.lstat(folder / name)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(os.urandom(PROBE))
            probe.flush()
    except OSError as error:
        raise OSError(f"cannot write --out {out} ({error}); nothing was charged, choose another place") from error
    if os.path.lexists(out):
        raise FileExistsError(
            f"--out {out} exists already, and released vectors cannot be made again without a second charge; "
            "give another name, or delete the file"
        )


def save(vectors: SteeringVectors, out: Path) -> None:
    """Write charged vectors, over no file: if one got the name since :func:`check`, they go beside it.

    Raises:
        FileExistsError: the name was taken meanwhile; says under which other name the vectors are.
        OSError: the disk does not take them.
    """
    try:
        vectors.save(out, replace=False)
    except FileExistsError as error:
        spare = _spare(out)
        vectors.save(spare, replace=False)
        raise FileExistsError(
            f"--out {out} appeared meanwhile and stays as it is; the vectors are in {spare}"
        ) from error
    except OSError as error:
        raise OSError(f"{error}; the charge stands, although the vectors could not be written") from error


def _spare(out: Path) -> Path:
    """Name beside ``out`` that nobody has."""
    return out.with_stem(f"{out.stem}-{secrets.token_hex(4)}")
