"""Where a release is written: checked before privacy is spent, never over another file, whole or not at all."""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .vectors import SteeringVectors

PROBE = 2**22
"""Bytes that must fit on the target's disk: more than the vectors of five layers of any model there is."""


class ChargedError(RuntimeError):
    """The privacy is spent, but the vectors are not under the name asked for; another run would spend it again."""

    exit_code = 3
    """Of ``psa``; other errors exit with 1."""

    def __init__(self, why: str, place: Path | None = None) -> None:
        where = f"the vectors are in {place}" if place else "the vectors are lost; running it again charges again"
        super().__init__(f"{why}; the charge stands, and {where}")


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


@contextlib.contextmanager
def charged(out: Path) -> Iterator[None]:
    """Turn every error after the charge into a :class:`ChargedError`, so that no caller takes it for a refusal."""
    try:
        yield
    except ChargedError:
        raise
    except Exception as error:
        raise ChargedError(f"--out {out} was not made ({type(error).__name__}: {error})") from error


def save(vectors: SteeringVectors, out: Path) -> None:
    """Write charged vectors, over no file: at ``out``, else beside it, else in the system's temporary folder.

    Raises:
        ChargedError: not at ``out``; says where instead, or that they are lost.
    """
    failure = None
    for place in _places(out):
        try:
            vectors.save(place, replace=False)
        except OSError as error:
            failure = failure or error
        else:
            break
    else:
        place = None
    if failure:
        raise ChargedError(_why(out, failure), place) from failure


def _places(out: Path) -> Iterator[Path]:
    """Where to write, one after the other: the temporary folder is looked for only where nothing else is left."""
    yield out
    yield _spare(out)
    with contextlib.suppress(FileNotFoundError):  # there may be none
        yield Path(tempfile.gettempdir(), _spare(out).name)


def _why(out: Path, error: OSError) -> str:
    if os.path.lexists(out):
        return f"--out {out} appeared meanwhile and stays as it is"
    return f"cannot write --out {out} ({error})"


def _spare(out: Path) -> Path:
    """Name beside ``out`` that nobody has."""
    return out.with_stem(f"{out.stem}-{secrets.token_hex(4)}")
