"""Steering vectors in the formats of the programs people steer with; post-processing, free of privacy cost.

All four number decoder blocks as we do, 0-based, and add a vector to the output of its block:

=====================  ===========================================================================================
``gguf``               llama.cpp, ``--control-vector FILE``: one 1-D float32 tensor ``direction.<k>`` a layer
``steering-vectors``   ``SteeringVector(**torch.load(FILE, weights_only=True)["steering_vector"])``
``repeng``             ``ControlVector.import_gguf(FILE)``, then ``ControlModel(model, list(vector.directions))``
``numpy``              ``numpy.load(FILE)`` with ``layers`` (k,), ``values`` (k, d), ``record`` (JSON text)
=====================  ===========================================================================================

Tried with llama.cpp itself (xllamacpp 2026.10): on SmolLM2 the change of its logits under ``direction.k`` agrees with
ours under block k (correlation 0.97 to 1.00) and not under blocks k-1 or k+1 (0.69 to 0.81).

Every file also carries the record as JSON text (in GGUF under the key ``psa_record``), whose digest is that of the
original file's vectors. The other programs ignore it.
"""

import errno
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from . import paths
from .vectors import RECORD, SteeringVectors

Writer = Callable[[SteeringVectors, str | None, Path], None]


class ExportError(ValueError):
    """Vectors that another program's format cannot hold, or a file that cannot be written."""


def export(vectors: SteeringVectors, to: str, target: Path, *, architecture: str | None = None) -> None:
    """Write ``vectors`` to ``target``, replacing it, in the format ``to`` of :data:`FORMATS`: whole or not at all.

    ``architecture`` is the ``model_type`` of the model's configuration, such as ``llama``; the GGUF formats need it.

    Raises:
        ExportError: unknown format or architecture, layer 0 for llama.cpp, an existing .safetensors file (it may
            be a released vector, which only a second charge would replace), or the file cannot be written.
    """
    if to not in FORMATS:
        raise ExportError(f"to={to!r} is unknown; choose one of {', '.join(FORMATS)}")
    if target.suffix.lower() == ".safetensors" and target.exists():
        raise ExportError(f"--out {target} exists and may be another released vector; choose another name")
    try:
        with paths.atomic(target) as temporary:
            FORMATS[to][1](vectors, architecture, temporary)
    except OSError as error:
        cure = "free some space" if error.errno == errno.ENOSPC else "choose another --out"
        raise ExportError(f"cannot write {target} ({error.strerror or error}); nothing was kept, {cure}") from error


def default_target(source: Path, to: str) -> Path:
    """Name beside the source file: its stem with the ending of the format.

    >>> default_target(Path("a/kind.safetensors"), "gguf").name
    'kind.gguf'
    """
    return source.with_suffix(FORMATS[to][0])


def _gguf(vectors: SteeringVectors, architecture: str | None, file: Path) -> None:
    if 0 in vectors.layers:
        raise ExportError(
            "layers holds 0, which llama.cpp cannot steer: its control vectors start at the output of block 1, and it "
            "rejects a file with direction.0 whole; release without layer 0, or export to repeng or steering-vectors"
        )
    _control_vector(vectors, architecture, file)


def _control_vector(vectors: SteeringVectors, architecture: str | None, file: Path) -> None:
    """GGUF as llama.cpp's ``cvector-generator`` and repeng write it."""
    if not architecture:
        raise ExportError(
            "architecture is unknown, since no privacy record names the model; "
            "give --architecture: the model_type in the model's config.json, such as llama"
        )
    writer = GGUFWriter(file, "controlvector")
    writer.add_string("controlvector.model_hint", architecture)
    writer.add_uint32("controlvector.layer_count", len(vectors.layers))
    writer.add_string(RECORD, _record_text(vectors))
    for layer, row in zip(vectors.layers, vectors.values, strict=True):
        writer.add_tensor(f"direction.{layer}", row)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _steering_vectors(vectors: SteeringVectors, _architecture: str | None, file: Path) -> None:
    """The library has no file format of its own; this one loads without unpickling code."""
    import torch  # here, so that the other formats do without it

    rows = {layer: torch.from_numpy(row.copy()) for layer, row in zip(vectors.layers, vectors.values, strict=True)}
    content = {"layer_activations": rows, "layer_type": "decoder_block"}
    buffer = io.BytesIO()  # torch reports a full disk as such only if it does not write the file itself
    torch.save({"steering_vector": content, RECORD: _record_text(vectors)}, buffer)
    file.write_bytes(buffer.getvalue())


def _numpy(vectors: SteeringVectors, _architecture: str | None, file: Path) -> None:
    with file.open("wb") as stream:
        np.savez(stream, layers=np.array(vectors.layers), values=vectors.values, record=np.array(_record_text(vectors)))


def _record_text(vectors: SteeringVectors) -> str:
    return json.dumps(dict(vectors.record), sort_keys=True)


FORMATS: dict[str, tuple[str, Writer]] = {
    "gguf": (".gguf", _gguf),
    "steering-vectors": (".pt", _steering_vectors),
    "repeng": (".repeng.gguf", _control_vector),
    "numpy": (".npz", _numpy),
}
"""Ending and writer of every format."""
