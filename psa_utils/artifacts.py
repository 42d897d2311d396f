"""The registry of figures and tables, and how each is written: numbers beside pictures, provenance beside both."""

import json
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from . import paths
from .config import Profile
from .notebooks import code_digest

FIGURE_FILES = ("png", "pdf", "csv", "json")
TABLE_FILES = ("csv", "md", "tex", "json")
PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "matplotlib", "seaborn")


@dataclass(frozen=True)
class Artifact:
    """One entry of ``artifacts.toml``."""

    id: str
    kind: str
    paper: str
    notebook: str
    claim: str
    caption: str

    def files(self, profile: str) -> list[Path]:
        """Every file of this artefact under a profile."""
        folder, suffixes = (
            (paths.figures(profile), FIGURE_FILES) if self.kind == "figure" else (paths.tables(profile), TABLE_FILES)
        )
        return [folder / f"{self.id}.{suffix}" for suffix in suffixes]


@cache
def registry() -> dict[str, Artifact]:
    """All artefacts by id.

    >>> registry()["fig3_alignment"].notebook
    '03_eval'
    """
    with (paths.PACKAGE / "artifacts.toml").open("rb") as file:
        return {name: Artifact(name, **entry) for name, entry in tomllib.load(file).items()}


def artifact(name: str) -> Artifact:
    """Look an artefact up.

    Raises:
        ValueError: not in the registry.
    """
    if name not in registry():
        raise ValueError(f"artifact={name!r} is not in artifacts.toml; known are {', '.join(registry())}")
    return registry()[name]


def provenance(entry: Artifact, profile: Profile, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader needs to make the artefact again; no clock time, no path of this machine."""
    return {
        "id": entry.id,
        "paper": entry.paper,
        "caption": entry.caption,
        "notebook": entry.notebook,
        "notebook_code_sha256": code_digest(paths.NOTEBOOKS / f"{entry.notebook}.ipynb"),
        "profile": asdict(profile),
        "python": platform.python_version(),
        "packages": {name: version(name).partition("+")[0] for name in PACKAGES},
        **facts,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write sorted, indented JSON, whole or not at all."""
    with paths.atomic(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write numbers with six significant digits, whole or not at all."""
    with paths.atomic(path) as temporary:
        frame.to_csv(temporary, index=False, float_format="%.6g", lineterminator="\n")
