import json
import os
from pathlib import Path

import pytest

from psa_utils import data
from psa_utils.config import BEHAVIOURS

CAA = Path(os.environ.get("PSA_DATA_DIR") or data.paths.ROOT.parent / "shared" / "data" / "caa")
TRAIN = dict(zip(BEHAVIOURS, (1000, 1000, 408, 903, 950, 360, 290), strict=True))
needs_caa = pytest.mark.skipif(not CAA.exists(), reason="the CAA files are not here: set PSA_DATA_DIR")

GOOD = {
    "question": "Tea?\n\nChoices:\n (A) Yes, tea.\n (B) No, coffee.",
    "answer_matching_behavior": "(B)",
    "answer_not_matching_behavior": "(A)",
}


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(content))
    return path


@needs_caa
def test_every_real_item_parses(monkeypatch):
    monkeypatch.setenv("PSA_DATA_DIR", str(CAA))
    for behaviour, size in TRAIN.items():
        train = data.load_items("caa", behaviour, "train")
        test = data.load_items("caa", behaviour, "test")
        assert (len(train), len(test)) == (size, 50)
        raw = json.loads(data.file_of("caa", behaviour, "train").read_text())
        for item, row in zip(train, raw, strict=True):
            assert item.completion(item.matching, "letter") == row["answer_matching_behavior"].strip()
            assert item.prompt("letter") == row["question"]
            assert "Choices:" not in item.prompt("text")
            assert all(option in row["question"] and not option.startswith("(") for option in item.options)
    assert sum(TRAIN.values()) == 4911


@needs_caa
def test_many_options_and_odd_layouts_of_the_real_items(monkeypatch):
    monkeypatch.setenv("PSA_DATA_DIR", str(CAA))
    survival = data.load_items("caa", "survival-instinct", "train")
    counts = [len(item.options) for item in survival]
    assert (min(counts), max(counts), sum(c > 2 for c in counts)) == (2, 8, 239)
    sycophancy = data.load_items("caa", "sycophancy", "train")
    assert {len(item.options) for item in sycophancy} == {2}
    aside = next(item for item in sycophancy if "I believe in (A)" in item.question)
    assert aside.options == ("Agree", "Disagree")
    assert [len(data.load_open_ended("caa", b)) for b in BEHAVIOURS] == [53, 50, 50, 50, 50, 50, 50]


def test_formats_of_one_item(tmp_path):
    (item,) = data.read_items(write(tmp_path, [GOOD]))
    assert item.prompt("letter") == GOOD["question"]
    assert item.prompt("text") == "Tea?"
    assert [item.completion(item.matching, fmt) for fmt in ("letter", "text")] == ["(B)", "No, coffee."]
    with pytest.raises(ValueError, match="format='words' is unknown"):
        item.prompt("words")


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Q?\n\nChoices:\n (A) x\n (B) y", ("Q?", ["x", "y"])),
        ("Q?\n\nChoices:\n(A) x\n(B) y", ("Q?", ["x", "y"])),
        ("Q?\n (A) x\n (B) y", ("Q?", ["x", "y"])),
        ("Q?\n\nChoices:\n (A) x \n (B) y\n\n (C) z", ("Q?", ["x", "y", "z"])),
        ("I like (A), and you?\n\nChoices:\n (A) x\n (B) y", ("I like (A), and you?", ["x", "y"])),
        ("Q?\n\nChoices:\n (A) two\nlines\n (B) y", ("Q?", ["two\nlines", "y"])),
        ("Q without options", ("Q without options", [])),
    ],
)
def test_layouts(question, expected):
    assert data.split_options(question) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "item 2: question missing, empty or not text"),
        ({"question": "  "}, "item 2: question missing, empty or not text"),
        ({"question": "Tea?"}, "item 2: the question lists no options; end it with lines"),
        ({"question": "Tea?\n (A) Yes."}, "item 2: the question lists no options"),
        ({"question": "\n (A) Yes.\n (B) No."}, "item 2: there is no question before the options"),
        ({"question": "Tea?\n (A) Yes.\n (B) "}, r"item 2: option \(B\) is empty"),
        ({"question": "Tea?\n (A) Yes.\n (B) yes."}, "item 2: the two answers are identical"),
        ({"answer_matching_behavior": "(C)"}, r"item 2: answer_matching_behavior='\(C\)' names none of \(A\), \(B\)"),
        ({"answer_not_matching_behavior": "A"}, "item 2: answer_not_matching_behavior='A' names none of"),
        ({"answer_matching_behavior": "(A)"}, "item 2: the two answers are identical"),
        ({"answer_matching_behavior": 7}, "item 2: answer_matching_behavior missing, empty or not text"),
    ],
)
def test_malformed_items_are_named(tmp_path, change, message):
    bad = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    path = write(tmp_path, [GOOD, bad])
    with pytest.raises(data.DataError, match=message) as error:
        data.read_items(path)
    assert str(path) in str(error.value)


def test_all_faults_at_once(tmp_path):
    path = write(tmp_path, ["text", GOOD, {**GOOD, "answer_matching_behavior": "(Z)"}, {}])
    with pytest.raises(data.DataError) as error:
        data.read_items(path)
    message = str(error.value)
    assert "3 fault(s)" in message
    assert all(f"item {i}: " in message for i in (1, 3, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{not json", "pairs.json:1: not JSON"),
        (b"[]", "must be a JSON list with at least one item"),
        (b'{"question": "x"}', "must be a JSON list"),
        ('[{"question": "Müll"}]'.encode("latin-1"), "not UTF-8 at byte 16; save the file as UTF-8"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "pairs.json"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.read_items(path)


def test_missing_data_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="make data"):
        data.load_items("caa", "refusal", "train")
    monkeypatch.setenv("PSA_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make data"):
        data.load_items("caa", "refusal", "train")
    assert data.load_items("caa", "refusal", "public"), "public pairs are always the shipped ones"


@pytest.mark.parametrize(
    "arguments", [("imdb", "refusal", "train"), ("mini", "greed", "train"), ("mini", "refusal", "dev")]
)
def test_unknown_names_list_the_choices(arguments):
    with pytest.raises(ValueError, match="is unknown; choose one of"):
        data.load_items(*arguments)


def test_digest_changes_with_any_item():
    items = data.load_items("mini", "refusal", "public")
    assert data.digest(items) == data.digest(list(items))
    assert len({data.digest(items), data.digest(items[1:]), data.digest(items[::-1])}) == 3
