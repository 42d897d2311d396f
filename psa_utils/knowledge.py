"""Knowledge questions with two options: what steering does to what a model knows (Table 5 of the paper).

MMLU and TruthfulQA in CAA's A/B form, fetched by ``make data``, and ``general-knowledge``, the shipped set that
stands in for them beside ``mini``. All three become :class:`psa_utils.data.Item`, whose *matching* option is the
correct one, so that :class:`psa_utils.evaluate.Scorer` asks them in both answer formats; ``frame`` is the category.
"""

from collections.abc import Sequence
from pathlib import Path

from . import data, seeding

SETS = {
    "mmlu": ("caa", "test/mmlu/mmlu.json"),
    "truthfulqa": ("caa", "test/truthfulqa/truthful_qa.json"),
    "general-knowledge": ("mini", "test/general-knowledge/general_knowledge.json"),
}
"""Source (as in :func:`psa_utils.data.root`) and file of every set: 570, 817 and 140 questions."""
FIELDS = data.Fields("prompt", "correct", "incorrect", "category", frame_required=True, other_may_be_empty=True)
"""The wrong option of five TruthfulQA items has no words: see :func:`askable`."""


def file_of(name: str) -> Path:
    """Path of one set's file.

    Raises:
        ValueError: unknown set.
        FileNotFoundError: there is no CAA folder; the message says how to get it.
    """
    if name not in SETS:
        raise ValueError(f"name={name!r} is unknown; choose one of {', '.join(SETS)}")
    source, file = SETS[name]
    return data.root(source) / file


def load(name: str, *, limit: int | None = None, seed: int = 0) -> list[data.Item]:
    """Load a set in file order, or the ``limit`` questions of it that :func:`subsample` draws with ``seed``.

    Raises:
        ValueError: unknown set or a limit below 1.
        DataError: malformed file; names it, every faulty item's number and the cure.
        FileNotFoundError: the data set is not there.

    >>> question = load("general-knowledge")[0]
    >>> question.frame, question.prompt("text"), question.completion(question.matching, "text")
    ('geography', 'What is the capital of France?', 'The city of Paris')
    >>> len(load("general-knowledge")), len(load("general-knowledge", limit=30))
    (140, 30)
    """
    items = data.read_items(file_of(name), FIELDS)
    return items if limit is None else subsample(items, limit, seed=seed)


def askable(items: Sequence[data.Item], fmt: str) -> list[data.Item]:
    """Leave out what cannot be asked in a format: in ``text``, items with an option without words.

    Of TruthfulQA's 817 items five have an empty wrong option; ``letter`` asks all, ``text`` 812.
    """
    return [item for item in items if fmt == "letter" or all(item.options)]


def subsample(items: Sequence[data.Item], limit: int, *, seed: int) -> list[data.Item]:
    """Draw ``limit`` items (all, if there are fewer) in proportion to their categories, and keep their order.

    Systematic sampling: items are shuffled, sorted by category, and every (n / limit)-th is taken from a random start.
    So each item is drawn with the same probability limit / n, and a category of m items gets m limit / n, rounded
    up or down. The draw depends on the seed, the limit and the items' number and categories only.

    Raises:
        ValueError: a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1; leave it out for all {len(items)} items")
    n, limit = len(items), min(limit, len(items))
    rng = seeding.rng(seed, "knowledge")
    by_category = sorted(rng.permutation(n), key=lambda i: items[i].frame)
    start = int(rng.integers(n))
    return [items[i] for i in sorted(by_category[(j * n + start) // limit] for j in range(limit))]
