"""Does the running interpreter satisfy the lock? Standard library only: it runs before anything is installed.

``python psa_utils/lockcheck.py requirements.lock`` exits 0 if every pinned version and this package are
installed, else 1 after naming the first differences.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def differences(lock: Path) -> list[str]:
    """Name every package whose installed version is not the pinned one."""
    pins = [line.split("==") for line in lock.read_text().splitlines() if "==" in line]
    found = [(name, pin.strip(), _installed(name)) for name, pin in pins]
    wrong = [f"{name}: {got or 'missing'}, lock has {pin}" for name, pin, got in found if got != pin]
    return wrong if _installed("psa-utils") else [*wrong, "psa-utils: missing"]


def _installed(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1]))
    sys.exit("\n".join(wrong[:5]) if wrong else 0)
