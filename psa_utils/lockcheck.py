"""Does the running interpreter satisfy the lock? Standard library only: it runs before anything is installed.

``python psa_utils/lockcheck.py requirements.lock`` exits 0 if every pinned version is installed and ``psa_utils`` is
the one beside the lock, else 1 after naming the first differences.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def differences(lock: Path) -> list[str]:
    """Name every package whose installed version is not the pinned one."""
    pins = [line.split("==") for line in lock.read_text().splitlines() if "==" in line]
    found = [(name, pin.strip(), _installed(name)) for name, pin in pins]
    wrong = [f"{name}: {got or 'missing'}, lock has {pin}" for name, pin, got in found if got != pin]
    return (
        wrong if _package_folder() == lock.resolve().parent / "psa_utils" else [*wrong, "psa-utils: not this checkout"]
    )


def _package_folder() -> Path | None:
    spec = find_spec("psa_utils")
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def _installed(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1]))
    sys.exit("\n".join(wrong[:5]) if wrong else 0)
