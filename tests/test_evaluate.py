import numpy as np
import pytest
import torch

from psa_utils import evaluate, steering
from psa_utils.vectors import SteeringVectors
from tests import reference


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_scores_equal_plain_path(any_lm, items, fmt):
    ours = evaluate.score(any_lm, items, fmt=fmt)
    for column, option in (("logp_matching", "matching"), ("logp_other", "other")):
        plain = [reference.log_probability(any_lm, item, getattr(item, option), fmt) for item in items]
        np.testing.assert_allclose(ours[column], plain, atol=1e-3, rtol=1e-4)


def test_steered_scores_equal_plain_path_whatever_the_batch(lm, items):
    vectors = SteeringVectors((1, 2), np.random.default_rng(0).normal(size=(2, lm.width)))
    with steering.apply(lm, vectors):
        together = evaluate.score(lm, items)
        single = evaluate.score(lm, items, batch_tokens=1)
        plain = [reference.log_probability(lm, item, item.matching, "text") for item in items]
    np.testing.assert_allclose(together.logp_matching, single.logp_matching, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(together.logp_matching, plain, atol=1e-4, rtol=1e-4)
    assert np.abs(together.logp_matching - evaluate.score(lm, items).logp_matching).max() > 0.01


def test_preferences_by_hand():
    logp = np.log([[0.2, 0.1], [0.01, 0.3], [0.25, 0.25]])
    tokens = np.array([[1, 2], [2, 1], [1, 1]])
    letter = evaluate.preferences(logp, tokens, "letter")
    np.testing.assert_allclose(letter.probability, [2 / 3, 0.01 / 0.31, 0.5])
    assert letter.accuracy.tolist() == [1.0, 0.0, 0.5]
    text = evaluate.preferences(logp, tokens, "text")
    per_token = np.array([[0.2, 0.1**0.5], [0.1, 0.3], [0.25, 0.25]])
    np.testing.assert_allclose(text.probability, per_token[:, 0] / per_token.sum(1))
    assert text.accuracy.tolist() == [0.0, 0.0, 0.5]
    np.testing.assert_allclose(text.probability_sum, letter.probability)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_without_a_token_to_predict_is_named(llama, text):
    with pytest.raises(ValueError, match=rf"\['{text}'\] have fewer than two tokens"):
        evaluate.TextScorer(llama, ["Long enough.", text])


def test_text_log_probability(llama):
    text = "The kettle is on and the bread is in the oven."
    ids = llama.encode_answer(text)
    logp = llama.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    plain = logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
    assert evaluate.TextScorer(llama, [text, "Short one."]).score()[0] == pytest.approx(plain, abs=1e-4)


def test_no_items(llama):
    with pytest.raises(ValueError, match="items is empty"):
        evaluate.score(llama, [])


def per_token(lm, text: str) -> float:
    ids = lm.encode_answer(text)
    logp = lm.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()


def test_texts_score_as_they_stand_under_every_vector(lm):
    """One scorer, several vectors, resumed from the first steered block, texts of unequal length that share nothing."""
    texts = [
        "The kettle is on.",
        "A dog ran over the bridge while it rained on the harbour and the town.",
        "Two by two",
    ]
    scorer = evaluate.TextScorer(lm, texts, first=1, batch_tokens=40)
    for seed, multiplier in ((0, 0.0), (1, 1.0), (2, -2.0)):
        vectors = SteeringVectors((1, 3), np.random.default_rng(seed).normal(size=(2, lm.width)))
        with steering.apply(lm, vectors, multiplier=multiplier):
            np.testing.assert_allclose(scorer.score(), [per_token(lm, t) for t in texts], atol=1e-4, rtol=1e-4)
