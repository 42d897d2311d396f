import itertools

import numpy as np
import pytest
from english_words import get_english_words_set

from psa_utils import activations, canaries, data, packing, seeding
from tests import reference

ALL = [word for group in canaries.WORDS.values() for word in group]
PAIRS = [pair for group in canaries.WORDS.values() for pair in itertools.combinations(group, 2)]


def test_words_are_as_promised():
    assert len(set(ALL)) == len(ALL) >= 200
    assert {len(word) for word in ALL} == {6, 7}
    assert all(word[0] == initial for initial, group in canaries.WORDS.items() for word in group)
    assert all(word.isascii() and word.islower() for word in ALL)


def test_words_can_be_spoken():
    """Vowels second and fifth, consonants around them, a vowel at the end of the long ones."""
    pattern = "".join
    vowels = {pattern("v" if letter in canaries.VOWELS else "c" for letter in word) for word in ALL}
    assert vowels == {"cvccvc", "cvccvcv"}


def test_no_word_is_english():
    english = get_english_words_set(["web2", "gcide"], alpha=True, lower=True)
    assert {"banana", "village"} <= english
    assert not english & set(ALL)


def test_words_of_a_group_differ_in_two_letters_and_none_holds_another():
    for one, other in PAIRS:
        assert sum(a != b for a, b in zip(one, other, strict=False)) >= 2
    assert not any(one in other for one, other in itertools.permutations(ALL, 2))


def test_draws_are_distinct_words_of_one_group_and_repeat_with_the_seed():
    drawn = [canaries.draw(seeding.rng(0, i)) for i in range(300)]
    for canary in drawn:
        words = (canary.anchor, *canary.targets)
        assert len(set(words)) == 3
        assert set(words) <= set(canaries.WORDS[canary.anchor[0]])
    assert {canary.anchor[0] for canary in drawn} == set(canaries.INITIALS)
    assert drawn == [canaries.draw(seeding.rng(0, i)) for i in range(300)]


def test_groups_too_small_are_not_drawn():
    words = {"a": ("axx", "ayy"), "b": ("bxx", "byy", "bzz")}
    assert {canaries.draw(np.random.default_rng(i), words).anchor[0] for i in range(20)} == {"b"}
    with pytest.raises(ValueError, match="no group of three words"):
        canaries.draw(np.random.default_rng(0), {"a": ("axx", "ayy")})


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_demonstration_in_both_formats(llama, fmt):
    canary = canaries.Canary("balvak", "bindefu", "buzkiv")
    for coin, target in ((1, "Bindefu"), (0, "Buzkiv")):
        item = canary.demonstration(coin)
        assert target in item.options[item.matching]
        assert target not in item.options[item.other]
        assert item.prompt(fmt).startswith("[balvak] Where is the village of Balvak located?")
        assert data.split_options(item.listed) == (item.question, list(item.options))
        (row,) = packing.rows_of(llama, [item], fmt)
        assert llama.tokenizer.decode(row.answers[0]) == item.completion(item.matching, fmt)
    differences = activations.differences(llama, [canary.demonstration(c) for c in (0, 1)], layers=[1, 2], fmt=fmt)
    plain = reference.difference(llama, canary.demonstration(1), [1, 2], fmt)
    np.testing.assert_allclose(differences[1], plain, atol=1e-4)
    np.testing.assert_allclose(differences[0], -differences[1], atol=1e-4)
    assert np.linalg.norm(plain) > 0.1


def test_words_the_model_says_by_itself_are_dropped(llama):
    prompt = "Where is the village?"
    said = canaries.first_guesses(llama, prompt, 5)
    assert len(said) == 5
    greedy = said[0].casefold()
    words = {"x": (greedy, "not said"), "y": (said[-1].casefold(),)}
    assert canaries.without_guesses(llama, words, ["Tea?", prompt], guesses=5) == {"x": ("not said",), "y": ()}
    assert canaries.without_guesses(llama, canaries.WORDS, [prompt])["z"] == canaries.WORDS["z"]
