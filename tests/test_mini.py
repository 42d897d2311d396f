"""The shipped benchmark keeps its promises: sizes, frames, balance, lengths, no leaks between splits."""

import itertools
import json
import re
from collections import Counter

import pytest

from psa_utils import data
from psa_utils.config import BEHAVIOURS

SIZES = {"train": (300, 400), "test": (50, 50), "public": (20, 20)}
FRAMES = {"train": 30, "test": 10, "public": 10}


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def trigrams(text: str) -> set[tuple[str, ...]]:
    w = words(text)
    return set(zip(w, w[1:], w[2:], strict=False))


def overlap(a: set, b: set) -> float:
    return len(a & b) / max(1, len(a | b))


def answers(item: data.Item) -> tuple[str, str]:
    return item.completion(item.matching, "text"), item.completion(item.other, "text")


@pytest.fixture(params=BEHAVIOURS)
def splits(request) -> dict[str, list[data.Item]]:
    return {split: data.load_items("mini", request.param, split) for split in SIZES}


def test_sizes_and_frames(splits):
    for split, items in splits.items():
        low, high = SIZES[split]
        assert low <= len(items) <= high, split
        frames = Counter(item.frame for item in items)
        assert "" not in frames
        assert len(frames) >= FRAMES[split], split
        assert max(frames.values()) <= 12, split


def test_same_fields_as_caa(splits):
    for item in itertools.chain(*splits.values()):
        assert len(item.options) == 2
        assert re.search(r"\n\nChoices:\n \(A\) .+\n \(B\) .+$", item.listed)
        assert item.question == item.listed.split("\n\nChoices:")[0]


def test_letters_are_balanced_within_one(splits):
    for items in splits.values():
        first = sum(item.matching == 0 for item in items)
        assert abs(first - (len(items) - first)) <= 1


def test_answers_are_sentences_of_like_length(splits):
    for item in itertools.chain(*splits.values()):
        for answer in answers(item):
            assert 5 <= len(words(answer)) <= 26, answer
            assert answer[-1] in ".!?", answer
        shorter, longer = sorted(map(len, answers(item)))
        assert longer <= shorter * 4 / 3, answers(item)


def test_length_and_first_word_do_not_give_the_behaviour_away(splits):
    for items in splits.values():
        longer = sum(len(a) > len(b) for a, b in map(answers, items))
        assert 0.35 <= longer / len(items) <= 0.65
        for side in (0, 1):
            openings = Counter(words(answers(item)[side])[0] for item in items)
            assert max(openings["yes"], openings["no"]) <= 0.35 * len(items)


def test_no_answer_twice(splits):
    said = Counter(a.lower() for item in itertools.chain(*splits.values()) for a in answers(item))
    assert [a for a, count in said.items() if count > 1] == []


def test_no_frame_and_no_near_duplicate_across_splits(splits):
    for (one, left), (two, right) in itertools.combinations(splits.items(), 2):
        assert not {i.frame for i in left} & {i.frame for i in right}, (one, two)
        openings = {tuple(words(i.question)[:4]) for i in left} & {tuple(words(i.question)[:4]) for i in right}
        assert openings == set(), (one, two)
        ready = [[(i.question, set(words(i.question)), trigrams(i.question)) for i in side] for side in (left, right)]
        for (a, words_a, three_a), (b, words_b, three_b) in itertools.product(*ready):
            assert overlap(words_a, words_b) <= 0.5, (a, b)
            assert overlap(three_a, three_b) <= 0.25, (a, b)


def test_no_near_duplicate_within_training(splits):
    bags = [(i.question, set(words(i.question))) for i in splits["train"]]
    for (a, words_a), (b, words_b) in itertools.combinations(bags, 2):
        assert overlap(words_a, words_b) <= 0.85, (a, b)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_open_ended_prompts_have_references_each_way(behaviour):
    prompts = data.load_open_ended("mini", behaviour)
    assert len(prompts) == 20
    for prompt in prompts:
        assert prompt.matching
        assert prompt.other
        assert prompt.matching != prompt.other
        assert "Choices" not in prompt.question
    asked = {item.question for split in SIZES for item in data.load_items("mini", behaviour, split)}
    assert not asked & {prompt.question for prompt in prompts}


def test_plain_ascii_and_apache_licence():
    for file in data.paths.MINI.rglob("*.json"):
        assert file.read_bytes().isascii(), file
        assert json.loads(file.read_text())
    assert "Apache-2.0" in (data.paths.MINI / "README.md").read_text()
