"""Profiles, paths, seeds, kept stages, vectors on disk."""

import os
import re
import stat
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from psa_utils import config, knowledge, paths, seeding, store
from psa_utils.vectors import SteeringVectors


@pytest.mark.parametrize("name", config.available())
def test_every_profile_loads(name):
    profile = config.load_profile(name)
    assert profile.name == name
    assert profile.title


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("desktop", {}, "profile='desktop' is unknown; choose one of .*laptop"),
        ("laptop", {"clip": 3}, r"unknown field\(s\) \['clip'\]"),
        ("laptop", {"sigma": 0.0}, "sigma=0.0 is not possible"),
        ("laptop", {"layers": ()}, r"layers=\(\) is not possible"),
        ("laptop", {"layers": (-1,)}, "layers"),
        ("laptop", {"recipe": "fair"}, "recipe='fair'"),
        ("laptop", {"formats": ("words",)}, "formats"),
        ("laptop", {"behaviours": ("greed",)}, "behaviours"),
        ("laptop", {"data": "imdb"}, "data='imdb'"),
        ("laptop", {"few_seeds": 6}, "few_seeds=6"),
        ("laptop", {"few_seeds": 0}, "few_seeds=0"),
        ("laptop", {"n_sweep": 1}, "n_sweep=1"),
        ("laptop", {"n_open": 0}, "n_open=0"),
        ("laptop", {"n_knowledge": 1}, "n_knowledge=1"),
        ("laptop", {"n_test": -3}, "n_test=-3"),
        ("laptop", {"temperature": -0.1}, "temperature=-0.1"),
        ("laptop", {"answer_tokens": 0}, "answer_tokens=0"),
        ("laptop", {"clips": (10.0, 0.0)}, r"clips=\(10.0, 0.0\)"),
        ("laptop", {"multiplier": 0.0}, "multiplier=0.0"),
        ("laptop", {"template": "vicuna"}, "template='vicuna'"),
        ("laptop", {"knowledge": ("trivia",)}, r"knowledge=\('trivia',\)"),
        ("laptop", {"scaling": ("laptop", "desktop")}, r"scaling=\('laptop', 'desktop'\)"),
        ("laptop", {"few_items": 1}, "few_items=1"),
        ("laptop", {"n_estimators": 0}, "n_estimators=0"),
    ],
)
def test_impossible_profiles(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        config.load_profile(name, **overrides)


BLOCKS = {
    "paper-llama2": 32,
    "paper-mistral": 32,
    "paper-gemma2": 26,
    "paper-qwen2.5-0.5b": 24,
    "paper-qwen2.5-1.5b": 28,
    "paper-qwen2.5-3b": 36,
    "paper-qwen2.5-7b": 28,
}
"""Decoder blocks of the published models."""


def test_every_paper_profile_is_known_here():
    assert {name for name in config.available() if name.startswith("paper-")} == set(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_paper_profiles_fit_their_models_and_pin_them(name):
    profile = config.load_profile(name)
    first, last = profile.layers[0], profile.layers[-1]
    assert profile.layers == tuple(range(first, first + 5)), "five consecutive blocks"
    assert BLOCKS[name] / 4 < first < last < 3 * BLOCKS[name] / 4, "in the middle"
    assert re.fullmatch("[0-9a-f]{40}", profile.revision)
    assert (profile.data, profile.recipe, profile.multiplier, profile.sigma) == ("caa", "paper", 1.0, 0.02)
    assert profile.behaviours == config.BEHAVIOURS
    assert profile.noise_seeds == 10
    assert (profile.template == "llama2") == (name == "paper-llama2")


@pytest.mark.parametrize("name", config.available())
def test_profiles_name_only_what_exists(name):
    profile = config.load_profile(name)
    sizes = [config.load_profile(other) for other in profile.scaling]
    assert profile.name not in profile.scaling, "it is there anyway"
    assert all(not size.scaling for size in sizes)
    assert set(profile.knowledge) <= set(knowledge.SETS) == set(config.KNOWLEDGE)


@pytest.mark.parametrize("module", ["accounting", "stats", "config", "paths", "seeding"])
def test_light_modules_do_not_import_torch(module):
    code = f"import sys, psa_utils.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_seeds_depend_on_labels_not_on_order():
    assert seeding.derive_seed(0, "a", "b") != seeding.derive_seed(0, "ab")
    assert seeding.derive_seed(0, "a", 1) != seeding.derive_seed(1, "a", 1)
    first = seeding.rng(0, "x").normal()
    seeding.rng(0, "y").normal()
    assert seeding.rng(0, "x").normal() == first


def test_require_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="made by `make 01_extract`"):
        paths.require(tmp_path / "absent", "make 01_extract")


def test_atomic_keeps_the_old_file_when_writing_fails(tmp_path):
    target = tmp_path / "table.csv"
    target.write_text("old")

    def fill_the_disk():
        with paths.atomic(target) as temporary:
            temporary.write_text("half")
            raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fill_the_disk()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_without_replacing_keeps_a_file_that_came_meanwhile(tmp_path):
    target = tmp_path / "table.csv"
    with paths.atomic(target, replace=False) as temporary:
        temporary.write_text("first")
    with (
        pytest.raises(FileExistsError, match=r"table.csv exists already; choose another name"),
        paths.atomic(target, replace=False) as temporary,
    ):
        temporary.write_text("second")
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("replace", [True, False])
def test_only_a_file_that_replaces_none_is_made_to_survive_a_power_cut(tmp_path, monkeypatch, replace):
    """Its content before it gets its name, then the folder that holds the name."""
    target, seen = tmp_path / "v", []

    def fsync(handle):
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        seen.append(("folder" if folder else "file", target.exists()))

    monkeypatch.setattr(paths.os, "fsync", fsync)
    with paths.atomic(target, replace=replace) as temporary:
        temporary.write_text("released")
    assert seen == ([] if replace else [("file", False), ("folder", True)])


@pytest.mark.parametrize("kind", ["arrays", "frame"])
def test_stages_are_kept_under_their_key_and_recomputed_when_damaged(tmp_path, kind):
    calls = []

    def compute():
        calls.append(1)
        table = {"x": np.arange(3.0), "y": np.array([0.1, 1e-17, np.pi])}
        return table if kind == "arrays" else pd.DataFrame(table)

    path = tmp_path / ("a.safetensors" if kind == "arrays" else "a.csv")
    keep = getattr(store, kind)
    first = keep(path, "k1", compute)
    again = keep(path, "k1", compute)
    assert len(calls) == 1
    np.testing.assert_array_equal(first["y"], again["y"])
    keep(path, "k2", compute)
    assert len(calls) == 2
    path.write_bytes(path.read_bytes()[:-5])
    damaged = keep(path, "k2", compute)
    assert len(calls) == 3
    np.testing.assert_array_equal(damaged["y"], first["y"])
    flipped = bytearray(path.read_bytes())
    flipped[-5] ^= 1
    path.write_bytes(flipped)
    damaged = keep(path, "k2", compute)
    assert len(calls) == 4
    np.testing.assert_array_equal(damaged["y"], first["y"])


def test_a_kept_table_holds_the_texts_it_was_given(tmp_path):
    """Only an empty field is missing, and no text ends a line or a table early."""
    texts = ["None", "N/A", "", 'a\rb, "c"', "a\r\nb\n", "# x,y", "é…\x85", " padded "]
    table = pd.DataFrame({"text": texts, "number": [0.1, np.nan, 1e-17, np.pi, 1.0, 2.0, -0.0, 1 / 3]})
    for _ in range(2):
        kept = store.frame(tmp_path / "a.csv", "k", lambda: table.assign(digits="007"), texts=("text", "digits"))
        assert kept.text.tolist() == texts
        assert set(kept.digits) == {"007"}
        np.testing.assert_allclose(kept.number, table.number, rtol=1e-15)


def test_vectors_round_trip_with_their_record(tmp_path):
    vectors = SteeringVectors((11, 3), np.random.default_rng(0).normal(size=(2, 8)), {"method": "PSA", "mu": 0.1})
    path = tmp_path / "v.safetensors"
    vectors.save(path)
    again = SteeringVectors.load(path)
    assert again.layers == (3, 11)
    np.testing.assert_array_equal(again.values, vectors.values[::-1])
    assert again.record == vectors.record


def test_damaged_vector_files_are_refused(tmp_path):
    path = tmp_path / "v.safetensors"
    SteeringVectors((1,), np.ones((1, 8))).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="no whole steering-vector file"):
        SteeringVectors.load(path)
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="no whole steering-vector file"):
        SteeringVectors.load(path)


@pytest.mark.parametrize(
    ("layers", "values", "message"),
    [
        ((1,), np.ones((2, 8)), r"shape \(2, 8\); it must be \(1 layers, d\)"),
        ((1,), np.ones(8), "shape"),
        ((1,), np.full((1, 8), np.nan), "not finite"),
    ],
)
def test_impossible_vectors(layers, values, message):
    with pytest.raises(ValueError, match=message):
        SteeringVectors(layers, values)
