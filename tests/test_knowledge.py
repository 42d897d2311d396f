"""Knowledge sets: all real items parse, faults are named, the draw is fair, the shipped set keeps its promises."""

import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psa_utils import data, download, evaluate, knowledge, packaged

CAA = Path(os.environ.get("PSA_DATA_DIR") or data.paths.ROOT.parent / "shared" / "data" / "caa")
needs_caa = pytest.mark.skipif(not CAA.exists(), reason="the CAA files are not here: set PSA_DATA_DIR")
FIELDS = {"prompt", "correct", "incorrect", "correct_full_text", "incorrect_full_text", "category"}
GOOD = {
    "prompt": "Tea grows on what?\n\nChoices:\n(A) On rocks\n(B) On bushes",
    "correct": "(B)",
    "incorrect": "(A)",
    "category": "plants",
}
WORDLESS = {**GOOD, "prompt": "Tea?\n\nChoices:\n(A) \n(B) On bushes"}
ROWS = json.loads(knowledge.file_of("general-knowledge").read_text())


@pytest.fixture
def mmlu(tmp_path, monkeypatch):
    """Write rows where ``load("mmlu")`` finds them; returns the file."""

    def write(rows: object) -> Path:
        path = tmp_path / "test" / "mmlu" / "mmlu.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(rows))
        return path

    monkeypatch.setenv("PSA_DATA_DIR", str(tmp_path))
    return write


def agrees(item: data.Item, row: dict[str, str]) -> bool:
    """Whether an item says what its row says, with the *correct* answer as the matching one."""
    letters = tuple(item.completion(option, "letter") for option in (item.matching, item.other))
    words = tuple(item.options[option] for option in (item.matching, item.other))
    full = tuple(row[f"{name}_full_text"].strip() for name in ("correct", "incorrect"))
    return letters == (row["correct"], row["incorrect"]) and words == full and item.frame == row["category"]


@needs_caa
@pytest.mark.parametrize(("name", "size", "categories", "wordless"), [("mmlu", 570, 57, 0), ("truthfulqa", 817, 32, 5)])
def test_every_real_item_parses(monkeypatch, name, size, categories, wordless):
    monkeypatch.setenv("PSA_DATA_DIR", str(CAA))
    items, rows = knowledge.load(name), json.loads(knowledge.file_of(name).read_text())
    assert len(items) == len({item.listed for item in items}) == size
    assert all(agrees(item, row) for item, row in zip(items, rows, strict=True))
    assert not any("Choices:" in item.prompt("text") for item in items)
    assert len({item.frame for item in items}) == categories
    assert knowledge.askable(items, "letter") == items
    assert len(knowledge.askable(items, "text")) == size - wordless


@needs_caa
@pytest.mark.parametrize("name", ["mmlu", "truthfulqa"])
def test_the_real_files_are_the_pinned_ones(monkeypatch, name):
    monkeypatch.setenv("PSA_DATA_DIR", str(CAA))
    (pinned,) = [file for file in download.pinned() if file.name == knowledge.SETS[name][1]]
    assert packaged.sha256(knowledge.file_of(name)) == pinned.sha256


@needs_caa
def test_a_hundred_of_mmlu_are_one_or_two_of_each_subject(monkeypatch):
    monkeypatch.setenv("PSA_DATA_DIR", str(CAA))
    counts = Counter(item.frame for item in knowledge.load("mmlu", limit=100))
    assert len(counts) == 57
    assert set(counts.values()) == {1, 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "item 2: prompt missing, empty or not text; add it as a string"),
        ({"category": ""}, "item 2: category missing, empty or not text"),
        ({"category": ["a"]}, "item 2: category missing, empty or not text"),
        ({"prompt": "Tea grows on what?"}, r"item 2: the question lists no options; end it with lines '\(A\)"),
        ({"correct": "(C)"}, r"item 2: correct='\(C\)' names none of \(A\), \(B\); write the letter"),
        ({"correct": "(A)"}, "item 2: the two answers are identical; they must differ"),
        ({"prompt": "Tea?\n(A) On rocks\n(B) "}, r"item 2: option \(B\) is empty; give it words"),
        ({"prompt": "Tea?\n(A) \n(B) "}, r"item 2: option \(B\) is empty; give it words"),
    ],
)
def test_malformed_items_are_named(mmlu, change, message):
    path = mmlu([GOOD, {**GOOD, **change}])
    with pytest.raises(data.DataError, match=message) as error:
        knowledge.load("mmlu")
    assert str(path) in str(error.value)


def test_missing_files_and_wrong_arguments_name_the_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_DATA_DIR", str(tmp_path / "nowhere"))
    for name in ("mmlu", "truthfulqa"):
        with pytest.raises(FileNotFoundError, match="make data"):
            knowledge.load(name)
    with pytest.raises(ValueError, match="name='imdb' is unknown; choose one of mmlu, truthfulqa, general-knowledge"):
        knowledge.load("imdb")
    with pytest.raises(ValueError, match="limit=0 must be at least 1; leave it out for all 140"):
        knowledge.load("general-knowledge", limit=0)


def test_an_option_without_words_is_asked_by_letter_only(mmlu, llama):
    mmlu([GOOD, WORDLESS])
    items = knowledge.load("mmlu")
    assert np.isfinite(evaluate.score(llama, items, fmt="letter").probability).all()
    with pytest.raises(data.DataError, match=r"'Tea\?': option \(A\) has no words; ask by letter or leave"):
        evaluate.score(llama, items, fmt="text")
    assert knowledge.askable(items, "text") == items[:1]


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_the_scorer_takes_the_correct_answer_as_matching(mmlu, llama, fmt):
    mmlu([GOOD, {**GOOD, "correct": "(A)", "incorrect": "(B)"}])
    one, swapped = evaluate.score(llama, knowledge.load("mmlu"), fmt=fmt).probability
    assert one != pytest.approx(0.5, abs=1e-6)
    assert one + swapped == pytest.approx(1)


# --- the draw


def pool(sizes: list[int]) -> list[data.Item]:
    """Items of categories of these sizes, the categories interleaved."""
    frames = [str(c) for c, size in enumerate(sizes) for _ in range(size)]
    order = np.random.default_rng(0).permutation(len(frames))
    return [data.Item(f"{i}", "", ("a", "b"), 0, 1, frames[j]) for i, j in enumerate(order)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 100), st.integers(0, 2**32))
def test_a_draw_is_proportional_in_file_order_and_repeatable(sizes, limit, seed):
    items = pool(sizes)
    drawn = knowledge.subsample(items, limit, seed=seed)
    places = [int(item.question) for item in drawn]
    assert len(places) == min(limit, len(items))
    assert places == sorted(set(places))
    assert drawn == knowledge.subsample(items, limit, seed=seed)
    counts = Counter(item.frame for item in drawn)
    for category, size in enumerate(sizes):
        share = size * len(drawn) / len(items)
        assert int(share) <= counts[str(category)] <= -(-size * len(drawn) // len(items))


def test_every_item_is_drawn_equally_often():
    items, limit, draws = pool([1, 4, 8]), 5, 2000
    seen = Counter(item.question for seed in range(draws) for item in knowledge.subsample(items, limit, seed=seed))
    p = limit / len(items)
    assert len(seen) == len(items)
    assert max(abs(count - draws * p) for count in seen.values()) < 4 * np.sqrt(draws * p * (1 - p))


def test_a_limit_draws_from_the_loaded_set():
    everything = knowledge.load("general-knowledge")
    drawn = knowledge.load("general-knowledge", limit=30, seed=1)
    assert set(Counter(item.frame for item in drawn).values()) == {3}
    assert drawn == knowledge.subsample(everything, 30, seed=1)
    assert drawn != knowledge.load("general-knowledge", limit=30, seed=2)
    assert knowledge.load("general-knowledge", limit=10_000) == everything


# --- the shipped set


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9'-]+", text.lower())


def test_shipped_rows_have_every_field_in_one_layout():
    for item, row in zip(knowledge.load("general-knowledge"), ROWS, strict=True):
        assert set(row) == FIELDS
        assert agrees(item, row)
        assert re.fullmatch(r"[^\n]+\?\n\nChoices:\n \(A\) [^\n]+\n \(B\) [^\n]+", row["prompt"])
        assert row["prompt"] == f"{item.question}\n\nChoices:\n (A) {item.options[0]}\n (B) {item.options[1]}"


def test_shipped_set_is_ten_categories_of_fourteen():
    assert list(Counter(row["category"] for row in ROWS).values()) == [14] * 10
    assert len(list(itertools.groupby(row["category"] for row in ROWS))) == 10


def test_correct_letters_follow_the_stated_rule_and_are_balanced():
    rule = ["(A)" if number.bit_count() % 2 == 0 else "(B)" for number in range(140)]
    assert [row["correct"] for row in ROWS] == rule
    for _, rows in itertools.groupby(ROWS, key=lambda row: row["category"]):
        assert Counter(row["correct"] for row in rows) == {"(A)": 7, "(B)": 7}


def test_options_are_short_and_of_like_length():
    for row in ROWS:
        options = row["correct_full_text"], row["incorrect_full_text"]
        short, long = sorted(len(option.split()) for option in options)
        assert 2 <= short <= long <= min(6, short + 1), options
        shorter, longer = sorted(map(len, options))
        assert longer <= shorter * 4 / 3, options


def test_length_does_not_give_the_correct_answer_away():
    difference = np.sign([len(row["correct_full_text"]) - len(row["incorrect_full_text"]) for row in ROWS])
    assert abs(difference.sum()) <= 14


def test_nothing_is_asked_or_answered_twice():
    for texts in (
        [row["prompt"].split("\n")[0].lower() for row in ROWS],
        [row[name].lower() for row in ROWS for name in ("correct_full_text", "incorrect_full_text")],
    ):
        assert [text for text, count in Counter(texts).items() if count > 1] == []
    bags = [set(words(row["prompt"].split("\n")[0])) for row in ROWS]
    for a, b in itertools.combinations(bags, 2):
        assert len(a & b) <= 0.85 * len(a | b), (a, b)
