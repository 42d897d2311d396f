"""The command ``psa``: what it prints, what it refuses, what it leaves on disk."""

import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import papermill
import pytest
import torch
from safetensors.numpy import save_file

from psa_utils import chat, cli, describe, export, models, release, run, steering
from psa_utils.record import Model
from psa_utils.vectors import RECORD, SteeringVectors
from tests.releases import WIDTH, example, values_of, vectors_of

CHAT = ["chat", "--model", "tiny-random", "--max-new-tokens", "6", "--vector"]


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny-random")


@pytest.fixture
def made(tiny):
    return example(model=Model.of(tiny.name, tiny.revision, tiny.model.config.model_type))


@pytest.fixture
def vector(made, tmp_path) -> Path:
    file = tmp_path / "vector.safetensors"
    vectors_of(made).save(file)
    return file


@pytest.fixture
def research(tmp_path) -> Path:
    file = tmp_path / "research.safetensors"
    SteeringVectors((1, 2), values_of((1, 2)), {"method": "PSA", "noise_seed": 0}).save(file)
    return file


def psa(*argv) -> int:
    try:
        return cli.main([str(arg) for arg in argv])
    except SystemExit as stop:
        return stop.code


# What works


def test_inspect_prints_the_description(vector, made, capsys):
    assert psa("inspect", vector) == 0
    out, err = capsys.readouterr()
    assert out.startswith(describe.describe(made))
    assert "hidden size     32" in out
    assert err == ""


def test_inspect_says_that_a_research_file_has_no_record(research, capsys):
    assert psa("inspect", research) == 0
    assert capsys.readouterr().out.startswith("NO PRIVACY RECORD")


@pytest.mark.parametrize("to", export.FORMATS)
def test_export_writes_beside_the_file_and_prints_where(vector, to, capsys):
    assert psa("export", vector, "--to", to) == 0
    target = Path(capsys.readouterr().out.strip())
    assert target == vector.with_suffix(export.FORMATS[to][0])
    assert target.stat().st_size > 0


def test_export_to_a_named_file_and_with_a_named_architecture(research, tmp_path):
    target = tmp_path / "new" / "v.gguf"
    assert psa("export", research, "--to", "gguf", "--out", target, "--architecture", "qwen2") == 0
    assert b"qwen2" in target.read_bytes()


def greedy(lm, prompt, vectors, multiplier):
    """transformers' own generation under our steering."""
    ids = torch.tensor([lm.encode_chat(prompt)])
    with steering.apply(lm, vectors, multiplier=multiplier):
        tokens = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return lm.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_chat_shows_both_answers(tiny, vector, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert psa(*CHAT, vector, "--multiplier", "2", "--prompt", "Tea?") == 0
    vectors = SteeringVectors.load(vector)
    plain, steered = (greedy(tiny, "Tea?", vectors, multiplier) for multiplier in (0.0, 2.0))
    assert plain != steered
    expected = chat.side_by_side(f"UNSTEERED\n{plain}", f"MULTIPLIER 2\n{steered}", width=400)
    assert capsys.readouterr().out.strip() == expected


def test_chat_reads_questions_until_they_end(vector, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tea?\n\nCoffee?\n"))
    assert psa(*CHAT, vector, "--multiplier", "-1") == 0
    assert capsys.readouterr().out.count("MULTIPLIER -1") == 2


def test_chat_takes_the_strength_the_record_suggests(made, vector, capsys):
    suggesting = example(model=made.model, multiplier=1.5)
    vectors_of(suggesting).save(vector)
    assert psa(*CHAT, vector, "--prompt", "Tea?") == 0
    assert "MULTIPLIER 1.5" in capsys.readouterr().out


def test_chat_draws_answers_from_the_seed(vector, capsys):
    def answer(seed):
        assert psa(*CHAT, vector, "--multiplier", "1", "--prompt", "Tea?", "--temperature", "1", "--seed", seed) == 0
        return capsys.readouterr().out

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_chat_takes_device_dtype_and_revision(made, vector, monkeypatch, tiny):
    pinned = example(model=Model("org/hub", "llama", tiny.revision, None))
    vectors_of(pinned).save(vector)
    asked = []
    monkeypatch.setattr(models, "load", lambda name, **options: asked.append((name, options)) or tiny)
    argv = ["chat", "--model", "org/hub", "--vector", vector, "--multiplier", "1", "--prompt", "?"]
    assert psa(*argv, "--max-new-tokens", "1", "--dtype", "bfloat16", "--device", "auto") == 0
    assert psa(*argv, "--max-new-tokens", "1", "--revision", "abc") == 0
    assert asked == [
        ("org/hub", {"revision": tiny.revision, "dtype": "bfloat16", "device": "auto"}),
        ("org/hub", {"revision": "abc", "dtype": "float32", "device": "cpu"}),
    ]


def test_run_hands_over_to_the_runner(monkeypatch, capsys):
    calls = []
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    monkeypatch.setattr(run, "run", lambda name, **options: calls.append((name, options)) or Path("copy.ipynb"))
    assert psa("run", "03_eval", "--profile", "smoke", "--seed", "4") == 0
    assert calls == [("03_eval", {"profile": "smoke", "seed": 4})]
    assert capsys.readouterr().out == "copy.ipynb\n"
    assert os.environ["PYTHONWARNINGS"] == "ignore"


def test_columns_hold_every_word_within_the_width():
    left, right = "a b c " * 30, "longer words follow here\n\nand a second paragraph " * 4
    rows = chat.side_by_side(left, right, width=60).splitlines()
    assert max(map(len, rows)) <= 60
    columns = [row.partition("|")[::2] for row in rows]
    assert " ".join(a for a, _ in columns).split() == left.split()
    assert " ".join(b for _, b in columns).split() == right.split()


COMMANDS = ("release", "inspect", "export", "chat", "run")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command, capsys):
    assert psa(command, "--help") == 0
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  psa ")]
    assert shown
    for line in shown:
        args = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', line)]
        assert cli.parser().parse_args(args[1:]).command == command


def test_the_module_runs_as_a_program_without_loading_torch(vector):
    code = (
        "import sys; from psa_utils import cli; code = cli.main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "inspect", vector], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    missing = [sys.executable, "-m", "psa_utils.cli", "inspect", "absent"]
    assert subprocess.run(missing, capture_output=True, check=False).returncode == 1


# What is refused: each case makes its file, and says what stands on standard error


def resave(vector: Path, **changes) -> Path:
    """Rewrite the record by hand, the tensors as they are."""
    vectors = SteeringVectors.load(vector)
    SteeringVectors(vectors.layers, vectors.values, {**vectors.record, **changes}).save(vector)
    return vector


def raw(vector: Path, tensors: dict, metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file of whatever content."""
    record = {RECORD: json.dumps(SteeringVectors.load(vector).record)}
    save_file(tensors, vector, metadata=record if metadata is None else metadata)
    return vector


def truncated(vector: Path) -> Path:
    vector.write_bytes(vector.read_bytes()[:-9])
    return vector


def emptied(vector: Path) -> Path:
    vector.write_bytes(b"")
    return vector


def swapped(vector: Path) -> Path:
    first, second = SteeringVectors.load(vector).values
    return raw(vector, {"layer.1": second, "layer.2": first})


def scaled(vector: Path) -> Path:
    vectors = SteeringVectors.load(vector)
    SteeringVectors(vectors.layers, 2 * vectors.values, vectors.record).save(vector)
    return vector


def row(value: float = 1.0, width: int = WIDTH) -> np.ndarray:
    return np.full(width, value, np.float32)


BAD_FILES = {
    "missing": (lambda v: v.with_name("absent.safetensors"), "absent.safetensors does not exist yet"),
    "folder": (lambda v: v.parent, "is a folder; give the .safetensors file"),
    "empty": (emptied, "is no whole steering-vector file"),
    "truncated": (truncated, "is no whole steering-vector file"),
    "text": (lambda v: v.write_text("hello") and v, "is no whole steering-vector file"),
    "a model's weights": (lambda v: raw(v, {"lm_head": row()}, {"format": "pt"}), "is no whole steering-vector file"),
    "no tensors": (lambda v: raw(v, {}), "is no whole steering-vector file"),
    "foreign tensor": (lambda v: raw(v, {"layer.1": row(), "bias": row()}), "is no whole steering-vector file"),
    "unequal widths": (lambda v: raw(v, {"layer.1": row(), "layer.2": row(width=8)}), "no whole steering-vector file"),
    "matrix": (lambda v: raw(v, {"layer.1": np.ones((2, 4), np.float32)}), "values has shape"),
    "record not JSON": (lambda v: raw(v, {"layer.1": row()}, {RECORD: "{"}), "is no whole steering-vector file"),
    "record a list": (lambda v: raw(v, {"layer.1": row()}, {RECORD: "[1]"}), "is no whole steering-vector file"),
    "not a number": (lambda v: raw(v, {"layer.1": row(math.nan)}), "values holds numbers that are not finite"),
    "infinite": (lambda v: raw(v, {"layer.1": row(math.inf)}), "values holds numbers that are not finite"),
    "tensors swapped": (swapped, "the vectors are not those of its record"),
    "tensors scaled": (scaled, "the vectors are not those of its record"),
    "layer missing": (lambda v: raw(v, {"layer.1": row()}), "the vectors are not those of its record"),
    "digest edited": (lambda v: resave(v, digest="b" * 64), "the vectors are not those of its record"),
    "n edited": (lambda v: resave(v, n=9999), "privacy record: mu="),
    "mu edited": (lambda v: resave(v, mu=0.001), "privacy record: mu=0.001 does not follow"),
    "epsilon edited": (
        lambda v: resave(v, epsilons=[{"epsilon": 0.01, "delta": 0.001}, {"epsilon": 0.01, "delta": 1e-5}]),
        "privacy record: epsilons=",
    ),
    "unit edited": (lambda v: resave(v, unit="nobody"), "privacy record: $.unit='nobody' is refused"),
    "schema version": (lambda v: resave(v, schema="psa-privacy-record/9"), "schema='psa-privacy-record/9'"),
    "unknown field": (lambda v: resave(v, approved=True), "'approved' was unexpected"),
    "layers edited": (lambda v: resave(v, layers=[1, 3]), "layers=(1, 3), the file holds (1, 2)"),
    "seed hidden": (lambda v: resave(v, certificate=None), "certificate=None does not go with seed=None"),
}


@pytest.mark.parametrize("command", ["inspect", "export", "chat"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_every_command(case, command, vector, tmp_path, capsys):
    spoil, message = BAD_FILES[case]
    file = spoil(vector)
    argv = {
        "inspect": ["inspect", file],
        "export": ["export", file, "--to", "numpy", "--out", tmp_path / "out.npz"],
        "chat": [*CHAT, file, "--multiplier", "1", "--prompt", "Tea?"],
    }[command]
    refused(argv, 1, message, tmp_path, capsys)


def refused(argv, code, message, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert psa(*argv) == code
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(folder.rglob("*")) == before, "nothing half-written"


def zero(v: Path) -> Path:
    SteeringVectors((0, 1), values_of((0, 1)), {"method": "Mean"}).save(v)
    return v


def wide(v: Path) -> Path:
    vectors_of(example(width=48), width=48).save(v)
    return v


def deep(v: Path) -> Path:
    vectors_of(example(layers=(1, 6))).save(v)
    return v


def other_weights(v: Path) -> Path:
    vectors_of(example()).save(v)
    return v


ASK = ["--multiplier", "1", "--prompt", "Tea?"]
BAD_CALLS = {
    "layer 0 to gguf": (lambda v: ["export", zero(v), "--to", "gguf", "--architecture", "llama"], 1, "layers holds 0"),
    "no architecture": (lambda v: ["export", zero(v), "--to", "repeng"], 1, "architecture is unknown"),
    "wrong architecture": (
        lambda v: ["export", v, "--to", "gguf", "--architecture", "gpt2"],
        1,
        "--architecture gpt2 contradicts the privacy record (llama)",
    ),
    "out is the vector": (lambda v: ["export", v, "--to", "numpy", "--out", v], 1, "is the vector file itself"),
    "out is another vector": (
        lambda v: ["export", v, "--to", "numpy", "--out", wide(v.with_name("other.safetensors"))],
        1,
        "other.safetensors exists and may be another released vector; choose another name",
    ),
    "out is a folder": (lambda v: ["export", v, "--to", "numpy", "--out", v.parent], 1, "cannot write"),
    "out below a file": (lambda v: ["export", v, "--to", "numpy", "--out", v / "x"], 1, "cannot write"),
    "unknown format": (lambda v: ["export", v, "--to", "onnx"], 2, "argument --to: invalid choice: 'onnx'"),
    "no format": (lambda v: ["export", v], 2, "required: --to"),
    "no command": (lambda v: [], 2, "required: COMMAND"),
    "unknown command": (lambda v: ["destroy", v], 2, "invalid choice: 'destroy'"),
    "other width": (lambda v: [*CHAT, wide(v), *ASK], 1, "vectors have hidden size 48, tiny-random has 32"),
    "layer past the end": (lambda v: [*CHAT, deep(v), *ASK], 1, "layers=[1, 6] must be distinct, 0-based blocks"),
    "other weights": (
        lambda v: [*CHAT, other_weights(v), *ASK],
        1,
        "the vectors were made on tiny-llama (weights aaaa",
    ),
    "no strength": (lambda v: [*CHAT, v, "--prompt", "Tea?"], 1, "suggests no strength; give --multiplier"),
    "strength nan": (lambda v: [*CHAT, v, "--multiplier", "nan"], 2, "argument --multiplier: 'nan' is not possible"),
    "strength a word": (lambda v: [*CHAT, v, "--multiplier", "much"], 2, "'much' is not possible; give a finite"),
    "cold": (lambda v: [*CHAT, v, *ASK, "--temperature", "-1"], 2, "argument --temperature: '-1' is not possible"),
    "no tokens": (lambda v: [*CHAT, v, *ASK, "--max-new-tokens", "0"], 2, "give a whole number of at least 1"),
    "empty prompt": (lambda v: [*CHAT, v, "--multiplier", "1", "--prompt", " "], 1, "prompt=' ' is empty"),
    "long prompt": (lambda v: [*CHAT, v, "--multiplier", "1", "--prompt", "tea " * 600], 1, "exceed the 512 tokens"),
    "unknown dtype": (lambda v: [*CHAT, v, *ASK, "--dtype", "int3"], 1, "dtype='int3' is unknown"),
    "no GPU": (lambda v: [*CHAT, v, *ASK, "--device", "cuda:99"], 1, "device"),
    "unknown model": (
        lambda v: ["chat", "--model", "nobody/nothing", "--vector", v, *ASK],
        1,
        "model='nobody/nothing' is no packaged model",
    ),
    "unknown notebook": (lambda v: ["run", "99_none"], 1, "notebook='99_none' does not exist"),
    "unknown profile": (lambda v: ["run", "03_eval", "--profile", "huge"], 2, "argument --profile: invalid choice"),
    "seed a word": (lambda v: ["run", "03_eval", "--seed", "x"], 2, "argument --seed: invalid int value"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(case, vector, tmp_path, capsys):
    argv, code, message = BAD_CALLS[case]
    argv = argv(vector)
    refused(argv, code, message, tmp_path, capsys)


@pytest.mark.parametrize("reason", ["No space left on device", "Permission denied", "Read-only file system"])
def test_a_disk_that_does_not_take_the_file_is_reported_and_keeps_the_old_one(
    reason, vector, tmp_path, capsys, monkeypatch
):
    target = tmp_path / "old.npz"
    target.write_text("old")

    def full(stream, **_arrays):
        stream.write(b"half")
        number = next(code for code in errno.errorcode if os.strerror(code) == reason)
        raise OSError(number, reason)

    monkeypatch.setattr(np, "savez", full)
    refused(["export", vector, "--to", "numpy", "--out", target], 1, reason, tmp_path, capsys)
    assert target.read_text() == "old"


def test_a_cell_that_fails_is_shown_without_our_own_traceback(monkeypatch, tmp_path, capsys):
    def fails(*_args, **_options):
        raise papermill.PapermillExecutionError(0, 1, "1 / 0", "ZeroDivisionError", "division by zero", ["1 / 0"])

    monkeypatch.setattr(run, "run", fails)
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    refused(["run", "03_eval"], 1, "Exception encountered", tmp_path, capsys)


# release: its options; what it does with them is in test_release.py

RELEASE = ["release", "--model", "m", "--pairs", "p.jsonl", "--epsilon", "1", "--out", "v.safetensors"]


def test_release_hands_every_option_over_and_prints_where(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(release, "release", lambda **options: calls.append(options))
    more = (
        "--revision abc --dtype bfloat16 --device cuda --delta 1e-6 --layers 13,11 --estimator shared "
        "--multiplier -0.5 --ledger l --budget 3 --demonstration 7"
    )
    assert psa(*RELEASE) == psa(*RELEASE, *more.split()) == 0
    assert capsys.readouterr().out == "v.safetensors\n" * 2
    plain = {"model": "m", "pairs": Path("p.jsonl"), "epsilon": 1.0, "out": Path("v.safetensors"), "delta": 1e-5}
    plain |= {"dtype": "float32", "device": "cpu"}
    unset = dict.fromkeys(["revision", "layers", "estimator", "multiplier", "ledger", "budget", "demonstration"])
    assert calls[0] == {**plain, **unset}
    assert calls[1] == {
        **plain, "revision": "abc", "dtype": "bfloat16", "device": "cuda", "delta": 1e-6, "layers": (11, 13),
        "estimator": "shared", "multiplier": -0.5, "ledger": Path("l"), "budget": 3.0, "demonstration": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--epsilon", "0"), ("--epsilon", "-1"), ("--epsilon", "inf"), ("--epsilon", "e"),
        ("--delta", "0"), ("--delta", "1"), ("--delta", "nan"),
        ("--layers", ""), ("--layers", "1,1"), ("--layers", "-1"), ("--layers", "1;2"),
        ("--budget", "0"), ("--demonstration", "yes"), ("--multiplier", "inf"),
    ],
)  # fmt: skip
def test_impossible_release_options(option, value, tmp_path, capsys):
    refused([*RELEASE, f"{option}={value}"], 2, f"argument {option}: ", tmp_path, capsys)


@pytest.mark.parametrize("option", ["--model", "--pairs", "--epsilon", "--out"])
def test_release_needs(option, tmp_path, capsys):
    at = RELEASE.index(option)
    refused(RELEASE[:at] + RELEASE[at + 2 :], 2, f"required: {option}", tmp_path, capsys)


def test_the_help_of_release_explains_its_exit_codes(capsys):
    assert psa("release", "--help") == 0
    assert "3 charged, but the vectors are\nnot under --out" in capsys.readouterr().out


def test_a_warning_is_one_line_without_the_source(monkeypatch, capsys):
    monkeypatch.setattr(release, "release", lambda **_: warnings.warn("delta is large", stacklevel=1))
    assert psa(*RELEASE) == 0
    assert capsys.readouterr().err == "psa release: warning: delta is large\n"
