"""Every path of the project, anchored on this file so that any working directory will do."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
NOTEBOOKS = ROOT / "notebooks"
MINI = PACKAGE / "mini"
SHARED_PROFILES = PACKAGE / "profiles"


def out() -> Path:
    """Where results, figures and tables go: ``PSA_OUT``, else the repository."""
    return Path(os.environ.get("PSA_OUT") or ROOT).resolve()


def results(profile: str, stage: str) -> Path:
    """Folder of intermediate results of one notebook, e.g. ``results/laptop/01_extract``."""
    return out() / "results" / profile / stage


def figures(profile: str) -> Path:
    """Folder of a profile's figures."""
    return out() / "figures" / profile


def tables(profile: str) -> Path:
    """Folder of a profile's tables."""
    return out() / "tables" / profile


def cache() -> Path:
    """Folder for downloads and converted models: ``PSA_CACHE_DIR``, else the platform's cache directory."""
    return Path(os.environ.get("PSA_CACHE_DIR") or platformdirs.user_cache_dir("psa_utils"))


def require(path: Path, made_by: str) -> Path:
    """Return ``path`` if it exists.

    Raises:
        FileNotFoundError: names the command that makes the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist yet; it is made by `{made_by}`")
    return path


@contextmanager
def atomic(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary name beside ``target``; rename it to ``target`` only if the body succeeds.

    A file that replaces none survives a power cut, as a released vector must; the others can be made again.

    Raises:
        FileExistsError: ``target`` exists and is not to be replaced, even if it appeared while the body ran.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomic(target) as tmp:
    ...     _ = tmp.write_text("whole or not at all")
    >>> target.read_text(), len(list(target.parent.iterdir()))
    ('whole or not at all', 1)
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        if replace:
            temporary.replace(target)
        else:
            sync(temporary)
            _claim(temporary, target)
            with suppress(OSError):  # some network file systems refuse it for folders
                sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when the file or folder is on the disk, not in a cache of it."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _claim(temporary: Path, target: Path) -> None:
    """Give a file a name that nobody has. A hard link does it in one step, which no rename of Python's does."""
    try:
        os.link(temporary, target)
    except OSError:
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists already; choose another name") from None
        temporary.replace(target)  # a file system without hard links, such as FAT
