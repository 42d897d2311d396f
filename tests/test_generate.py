import numpy as np
import pytest
import torch

from psa_utils import generate, steering
from psa_utils.vectors import SteeringVectors

PROMPTS = ("Which way to the harbour?", "Tea?", "Tell me about the long walk around the lake, please.")


@pytest.fixture
def rows(lm):
    rng = np.random.default_rng(0)
    one = SteeringVectors((1, 2), rng.normal(size=(2, lm.width)))
    other = SteeringVectors((2, 3), rng.normal(size=(2, lm.width)))
    return [one, None, other]


@pytest.fixture
def prompts(lm):
    return [lm.encode_chat(text) for text in PROMPTS]


def alone(lm, prompt, vector, **options):
    ids = torch.tensor([prompt])
    with steering.apply(lm, [vector], multiplier=1.5):
        out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def test_forward_with_a_vector_per_row_equals_one_at_a_time(lm, rows, prompts):
    ids = torch.tensor([prompts[0]] * 3)
    with steering.apply(lm, rows, multiplier=1.5):
        together = lm.model(ids).logits
    for row, vector in enumerate(rows):
        with steering.apply(lm, vector, multiplier=1.5) if vector else steering.apply(lm, [None]):
            single = lm.model(ids[:1]).logits
        torch.testing.assert_close(together[row], single[0], atol=1e-4, rtol=1e-4)


def test_greedy_batch_equals_transformers_one_by_one(lm, rows, prompts):
    """Left padding, unequal prompts, a vector per row, samples branching from one cache: the same tokens."""
    ours = generate.sample(lm, prompts, rows, multiplier=1.5, samples=2, temperature=0, max_new_tokens=8)
    for prompt, vector, answers in zip(prompts, rows, ours, strict=True):
        expected = alone(lm, prompt, vector, max_new_tokens=8)
        if lm.tokenizer.eos_token_id in expected:
            expected = expected[: expected.index(lm.tokenizer.eos_token_id)]
        assert answers == [expected, expected]


def test_transformers_generate_takes_a_vector_per_row(lm, rows, prompts):
    ids = torch.tensor([prompts[0]] * 3)
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    with steering.apply(lm, rows, multiplier=1.5):
        out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    for row, vector in zip(out.tolist(), rows, strict=True):
        assert row[len(prompts[0]) :] == alone(lm, prompts[0], vector, **options)


def test_samples_follow_the_model_distribution(llama):
    prompt = llama.encode_chat("Tea?")
    vector = SteeringVectors((1,), np.random.default_rng(1).normal(size=(1, llama.width)))
    with steering.apply(llama, vector):
        logits = llama.model(torch.tensor([prompt])).logits[0, -1]
    expected = (logits / 0.8).softmax(0)
    (answers,) = generate.sample(
        llama, [prompt], [vector], samples=4000, max_new_tokens=1, generator=torch.Generator().manual_seed(0)
    )
    drawn = torch.tensor([answer[0] for answer in answers if answer])
    counts = torch.bincount(drawn, minlength=len(expected)) / 4000
    top = expected.topk(3).indices
    assert (counts[top] - expected[top]).abs().max() < 0.04


def test_samples_repeat_with_the_generator_and_differ_among_each_other(llama):
    prompt = llama.encode_chat("Tea?")

    def draw(seed):
        return generate.sample(
            llama, [prompt], [None], samples=4, max_new_tokens=8, generator=torch.Generator().manual_seed(seed)
        )

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(map(tuple, draw(1)[0]))) > 1


def test_answers_end_at_the_end_token(llama, monkeypatch):
    prompt = llama.encode_chat("Tea?")
    (((first, second, *_),),) = generate.sample(llama, [prompt], [None], temperature=0, max_new_tokens=4)
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", [second, 999_999])
    expected = [] if first == second else [first]
    assert generate.sample(llama, [prompt], [None], temperature=0, max_new_tokens=4) == [[expected]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_draw_nothing(bad):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match="logits are not finite"):
        generate._choose(logits, 0.8, torch.Generator())


def test_impossible_requests(llama):
    prompt = llama.encode_chat("Tea?")
    with pytest.raises(ValueError, match="1 prompts and 2 vectors"):
        generate.sample(llama, [prompt], [None, None], temperature=0)
    with pytest.raises(ValueError, match=r"temperature=0\.8 needs a generator"):
        generate.sample(llama, [prompt], [None])
    vector = SteeringVectors((1,), np.ones((1, 32)))
    with steering.apply(llama, [vector, vector]), pytest.raises(ValueError, match=r"has 1 rows, .* 2 vectors"):
        llama.model(torch.tensor([prompt]))
