import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psa_utils import generate, quality, steering
from psa_utils.vectors import SteeringVectors


def plain_log_probability(lm, prompt, answer):
    logp = lm.model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).mean().item()


def test_log_probability_is_that_of_the_plain_path_after_its_own_prompt(lm):
    """Answers of one prompt, among others, in rows of one, two and three."""
    users = ("Tea?", "Which day suits you best for the long walk?", "Tea?", "So?", "Tea?", "So?", "Tea?", "And?")
    said = (
        "Yes, tea.",
        "On Friday, after the rain.",
        "",
        "No",
        "No, not for me today.",
        "So what?",
        "Tea",
        "And so on",
    )
    prompts, answers = [lm.encode_chat(user) for user in users], [lm.encode_answer(text) for text in said]
    frame = quality.measure(lm, prompts, answers)
    short = quality.measure(lm, prompts, answers, batch_tokens=60)
    np.testing.assert_allclose(short.logp_per_token, frame.logp_per_token, atol=1e-4, rtol=1e-4)
    expected = [
        plain_log_probability(lm, *pair) if pair[1] else math.nan for pair in zip(prompts, answers, strict=True)
    ]
    np.testing.assert_allclose(frame.logp_per_token, expected, atol=1e-3, rtol=1e-4)
    np.testing.assert_array_equal(
        frame.logp_per_token, quality.measure(lm, prompts, answers).logp_per_token, "deterministic"
    )
    alone = [quality.measure(lm, [p], [a]).logp_per_token[0] for p, a in zip(prompts, answers, strict=True)]
    np.testing.assert_allclose(frame.logp_per_token, alone, atol=1e-4, rtol=1e-4)


def test_a_greedy_answer_is_likelier_than_another_prompts(llama):
    prompts = [llama.encode_chat("Tea?"), llama.encode_chat("How do I mend a bicycle tyre?")]
    greedy = [answers[0] for answers in generate.sample(llama, prompts, [None] * 2, temperature=0, max_new_tokens=6)]
    own = quality.measure(llama, prompts, greedy).logp_per_token
    swapped = quality.measure(llama, prompts, greedy[::-1]).logp_per_token
    assert (own > swapped).all()


def test_counts_by_hand(llama):
    prompt = llama.encode_chat("Tea?")
    answers = [[7, 7, 7, 7, 7, 7], [7, 8, 9, 10, 11], [7, 8, 9], [7], []]
    frame = quality.measure(llama, [prompt] * 5, answers)
    assert frame.length.tolist() == [6, 5, 3, 1, 0]
    np.testing.assert_allclose(frame.distinct_2, [1 / 5, 1, 1, math.nan, math.nan])
    np.testing.assert_allclose(frame.repetition, [2 / 3, 0, math.nan, math.nan, math.nan])
    assert frame.logp_per_token.isna().tolist() == [False, False, False, False, True]


def test_nothing_but_empty_answers(llama):
    frame = quality.measure(llama, [[1], [1]], [[], []])
    assert frame.length.tolist() == [0, 0]
    assert frame.drop(columns="length").isna().all(axis=None)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_distinct_is_a_share_and_one_iff_nothing_repeats(tokens, n):
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    value = quality.distinct(tokens, n)
    assert math.isnan(value) == (not grams)
    if grams:
        assert 0 < value <= 1
        assert (value == 1) == all(grams.count(gram) == 1 for gram in grams)


def test_impossible_requests(llama):
    with pytest.raises(ValueError, match="2 prompts and 1 answers"):
        quality.measure(llama, [[1], [2]], [[3]])
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        quality.measure(llama, [[]], [[3]])
    with pytest.raises(ValueError, match=r"answer 1 have 601 tokens, tiny-llama holds 512"):
        quality.measure(llama, [[1], [1]], [[3], [3] * 600])
    vector = SteeringVectors((3,), np.ones((1, 32)))
    with steering.apply(llama, vector), pytest.raises(ValueError, match=r"blocks \[3\] of tiny-llama are steered"):
        quality.measure(llama, [[1]], [[3]])
