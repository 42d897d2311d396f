"""What a notebook computes, as a digest: of its code cells only, so that saving or re-wording is no change."""

import hashlib
import sys
from pathlib import Path

import nbformat


def code_digest(notebook: Path) -> str:
    """SHA-256 over the sources of the code cells."""
    cells = nbformat.read(notebook, as_version=4).cells
    return hashlib.sha256("\0".join(c.source for c in cells if c.cell_type == "code").encode()).hexdigest()


if __name__ == "__main__":
    print(code_digest(Path(sys.argv[1])))
