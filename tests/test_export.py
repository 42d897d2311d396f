"""Exports load in the programs they are for, and steer there as they do here.

steering-vectors and repeng pin old versions of what we use, so they are installed without their dependencies, into
``build/peers`` (``make peers``).
"""

import importlib
import json
import sys
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from psa_utils import export, models, paths, steering
from psa_utils.export import ExportError
from psa_utils.vectors import SteeringVectors
from tests.releases import example, small_disk, vectors_of

PEERS = paths.ROOT / "build" / "peers"
PROMPT = "Which way to the harbour?"
MULTIPLIER = 0.7


@pytest.fixture
def vectors():
    return vectors_of(example())


def written(vectors, to, folder):
    target = folder / f"vector{export.FORMATS[to][0]}"
    export.export(vectors, to, target, architecture="llama")
    return target


def peer(name: str, monkeypatch) -> ModuleType:
    """Import a library from the environment or from ``build/peers``."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEERS)])
    # Both need scikit-learn, repeng 0.4.0 also NumPy 1's float_, at import; they use them only to train.
    monkeypatch.setattr(np, "float_", np.float64, raising=False)
    stubs = {"sklearn": (), "sklearn.decomposition": ("PCA",)}
    stubs["sklearn.linear_model"] = ("LinearRegression", "LogisticRegression")
    for module, names in stubs.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for unused in names:
            # A class that can be made: they stand in annotations and default arguments.
            setattr(sys.modules[module], unused, type(unused, (), {"__init__": lambda self, *_, **__: None}))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        pytest.skip(f"{name} is not installed; `make peers` puts it into build/peers without its dependencies")


@contextmanager
def steered_by_repeng(repeng, lm, file):
    vector = repeng.ControlVector.import_gguf(file)
    controlled = repeng.ControlModel(lm.model, list(vector.directions))
    controlled.set_control(vector, MULTIPLIER)
    try:
        yield
    finally:
        controlled.unwrap()


def steered_by_steering_vectors(library, lm, file):
    content = torch.load(file, weights_only=True)["steering_vector"]
    return library.SteeringVector(**content).apply(lm.model, multiplier=MULTIPLIER)


THEIRS = {
    "repeng": ("repeng", steered_by_repeng),
    "gguf": ("repeng", steered_by_repeng),
    "steering-vectors": ("steering_vectors", steered_by_steering_vectors),
}


def same_logits(lm, vectors, to, folder, monkeypatch):
    name, theirs = THEIRS[to]
    library, file = peer(name, monkeypatch), written(vectors, to, folder)
    prompt = torch.tensor([lm.encode_chat(PROMPT)])
    with torch.no_grad():
        plain = lm.model(prompt).logits
        with steering.apply(lm, vectors, multiplier=MULTIPLIER):
            ours = lm.model(prompt).logits
        with theirs(library, lm, file):
            found = lm.model(prompt).logits
        after = lm.model(prompt).logits
    torch.testing.assert_close(found, ours, atol=1e-4, rtol=0)
    assert (ours - plain).abs().max() > 0.1, "the vectors must matter for the comparison to mean anything"
    assert torch.equal(after, plain)


@pytest.mark.parametrize("to", THEIRS)
def test_the_other_program_gives_our_logits(llama, vectors, to, tmp_path, monkeypatch):
    same_logits(llama, vectors, to, tmp_path, monkeypatch)


@pytest.mark.parametrize("to", THEIRS)
def test_also_on_the_packaged_model(to, tmp_path, monkeypatch):
    peer(THEIRS[to][0], monkeypatch)  # skip before the model is loaded
    lm = models.load("smollm2-135m")
    values = np.random.default_rng(1).normal(size=(3, lm.width))
    same_logits(lm, SteeringVectors((11, 12, 29), values), to, tmp_path, monkeypatch)


def test_layer_zero_is_fine_for_the_others(llama, tmp_path, monkeypatch):
    values = np.random.default_rng(1).normal(size=(1, llama.width))
    for to in ("repeng", "steering-vectors"):
        same_logits(llama, SteeringVectors((0,), values), to, tmp_path, monkeypatch)


@pytest.mark.parametrize("to", ["gguf", "repeng"])
def test_gguf_is_what_llama_cpp_reads(vectors, to, tmp_path):
    reader = GGUFReader(written(vectors, to, tmp_path))
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "llama"
    assert reader.get_field("controlvector.layer_count").contents() == 2
    assert json.loads(reader.get_field("psa_record").contents()) == vectors.record
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {"direction.1", "direction.2"}
    for layer, row in zip(vectors.layers, vectors.values, strict=True):
        tensor = tensors[f"direction.{layer}"]
        assert tensor.tensor_type.name == "F32"
        assert list(tensor.shape) == [vectors.values.shape[1]]
        np.testing.assert_array_equal(tensor.data, row)


def test_numpy_has_everything(vectors, tmp_path):
    with np.load(written(vectors, "numpy", tmp_path)) as file:
        again = SteeringVectors(file["layers"], file["values"], json.loads(str(file["record"])))
    assert again.digest() == vectors.digest() == again.record["digest"]


def test_steering_vectors_file_carries_the_record(vectors, tmp_path):
    content = torch.load(written(vectors, "steering-vectors", tmp_path), weights_only=True)
    assert json.loads(content["psa_record"]) == vectors.record


def test_layer_zero_is_refused_for_llama_cpp_with_the_reason(tmp_path):
    with pytest.raises(ExportError, match=r"layers holds 0, which llama.cpp cannot steer: .* release without layer 0"):
        written(SteeringVectors((0, 1), np.ones((2, 4))), "gguf", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["gguf", "repeng"])
def test_a_model_hint_is_needed(vectors, to, tmp_path):
    with pytest.raises(ExportError, match=r"architecture is unknown.* --architecture"):
        export.export(vectors, to, tmp_path / "v.gguf")
    assert list(tmp_path.iterdir()) == []


def test_unknown_format(vectors, tmp_path):
    with pytest.raises(ExportError, match="to='onnx' is unknown; choose one of gguf, steering-vectors, repeng, numpy"):
        export.export(vectors, "onnx", tmp_path / "v.onnx")


@pytest.mark.parametrize("to", export.FORMATS)
def test_a_write_that_fails_half_way_leaves_the_old_file(vectors, to, tmp_path):
    target = tmp_path / f"vector{export.FORMATS[to][0]}"
    target.write_text("old")
    with small_disk(), pytest.raises(ExportError, match=r"cannot write .*vector.*File too large.*nothing was kept"):
        written(vectors, to, tmp_path)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_says_so(vectors, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(ExportError, match=r"No space left on device\); nothing was kept, free some space"):
        written(vectors, "numpy", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", export.FORMATS)
def test_targets_that_cannot_be_files(vectors, to, tmp_path):
    (tmp_path / "file").write_text("x")
    for target in (tmp_path, tmp_path / "file" / "below.gguf"):
        with pytest.raises(ExportError, match=r"cannot write .*choose another --out"):
            export.export(vectors, to, target, architecture="llama")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
