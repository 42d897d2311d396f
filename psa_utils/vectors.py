"""Steering vectors on disk: one safetensors file with the tensors and a record of where they came from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import paths

RECORD = "psa_record"


@dataclass(frozen=True, eq=False)
class SteeringVectors:
    """Vectors (k, d) for k decoder blocks (0-based), float32, with a JSON-able record."""

    layers: tuple[int, ...]
    values: np.ndarray
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(map(int, self.layers)))
        object.__setattr__(self, "values", np.asarray(self.values, np.float32))
        if self.values.ndim != 2 or len(self.values) != len(self.layers):
            raise ValueError(f"values has shape {self.values.shape}; it must be ({len(self.layers)} layers, d)")
        if not np.isfinite(self.values).all():
            raise ValueError("values holds numbers that are not finite; steering with them would break the model")

    def scaled(self, multiplier: float) -> "SteeringVectors":
        """The same vectors, ``multiplier`` times as long."""
        return SteeringVectors(self.layers, multiplier * self.values, self.record)

    def digest(self) -> str:
        """SHA-256 of layers and values, whatever the order of the layers."""
        order = np.argsort(self.layers)
        layers = tuple(self.layers[i] for i in order)
        return hashlib.sha256(repr(layers).encode() + self.values[order].tobytes()).hexdigest()

    def save(self, path: Path, *, replace: bool = True) -> None:
        """Write the file whole or not at all.

        Raises:
            FileExistsError: the file exists and is not to be replaced.
            OSError: the disk does not take it.
        """
        tensors = {f"layer.{layer}": row for layer, row in zip(self.layers, self.values, strict=True)}
        with paths.atomic(path, replace=replace) as temporary:
            try:
                save_file(tensors, temporary, metadata={RECORD: json.dumps(dict(self.record), sort_keys=True)})
            except SafetensorError as error:
                raise OSError(f"cannot write {path} ({error}); nothing was kept") from error

    @classmethod
    def load(cls, path: Path) -> "SteeringVectors":
        """Read a file written by :meth:`save`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: truncated, not a steering-vector file, or not the vectors whose ``digest`` the record has.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                record = json.loads((file.metadata() or {})[RECORD])
                named = {int(name.removeprefix("layer.")): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                layers: Sequence[int] = sorted(named)
                vectors = cls(tuple(layers), np.stack([named[layer] for layer in layers]), dict(record))
        except FileNotFoundError:
            raise
        except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
            raise ValueError(f"{path} is no whole steering-vector file ({error}); make it again") from error
        if "digest" in vectors.record and vectors.record["digest"] != vectors.digest():
            raise ValueError(f"{path}: the vectors are not those of its record (digest differs); get the file again")
        return vectors
