"""What is shared, resumed or left out changes no number: every short cut against the plain path."""

import accelerate
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psa_utils import activations, data, engine, evaluate, generate, models, packing, steering
from psa_utils.engine import Engine
from psa_utils.vectors import SteeringVectors
from tests import reference
from tests.conftest import FAMILIES, tiny

FIRST = 1


def vectors(lm, seed: int) -> SteeringVectors:
    values = np.random.default_rng(seed).normal(size=(2, lm.width))
    return SteeringVectors((FIRST, FIRST + 2), values)


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_every_variant_resumes_to_the_plain_numbers(any_lm, items, fmt):
    scorer = evaluate.Scorer(any_lm, items, fmt=fmt, batch_tokens=150, first=FIRST)
    assert len(scorer.engine.prompts.beginning) > 5
    assert len(scorer.engine.index) > 1
    for seed, multiplier in ((0, 0.0), (1, 1.0), (2, -2.0), (3, 0.5)):
        with steering.apply(any_lm, vectors(any_lm, seed), multiplier=multiplier):
            ours = scorer.score()
            plain = [reference.log_probability(any_lm, item, item.matching, fmt) for item in items]
        np.testing.assert_allclose(ours.logp_matching, plain, atol=1e-3, rtol=1e-4)


def test_steering_below_the_first_block_is_refused(llama, items):
    scorer = evaluate.Scorer(llama, items, first=2)
    with (
        steering.apply(llama, vectors(llama, 0)),
        pytest.raises(ValueError, match=r"touches blocks \[1\], below first=2"),
    ):
        scorer.score()
    with steering.apply(llama, vectors(llama, 0), multiplier=0):
        assert len(scorer.score()) == len(items)


def test_lower_blocks_run_once(llama, items, monkeypatch):
    """Counted by calls of the attention modules below and above the first steered block."""
    calls = [0] * len(llama.blocks)

    def count(layer):
        def hook(*_):
            calls[layer] += 1

        return hook

    handles = [b.self_attn.register_forward_hook(count(i)) for i, b in enumerate(llama.blocks)]
    scorer = evaluate.Scorer(llama, items, first=2)
    for _ in range(5):
        scorer.score()
    for handle in handles:
        handle.remove()
    passes = 1 + len(scorer.engine.index)
    assert calls == [passes, passes, passes, 5 * passes]


def test_extraction_stops_after_the_last_block(llama, items):
    calls = []
    handle = llama.blocks[3].register_forward_hook(lambda *_: calls.append(1))
    head = llama.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    activations.differences(llama, items, layers=[0, 2])
    handle.remove()
    head.remove()
    assert calls == []


def test_blocks_are_themselves_again(llama, items):
    ids = torch.tensor([llama.encode_chat("Which way?")])
    before = llama.model(ids).logits
    evaluate.Scorer(llama, items, first=2).score()
    assert torch.equal(llama.model(ids).logits, before)
    assert not any("forward" in vars(block) for block in llama.blocks)


def test_blocks_are_themselves_again_after_an_exception(llama, items, monkeypatch):
    scorer = evaluate.Scorer(llama, items, first=2)
    scorer.score()
    handle = llama.blocks[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score()
    handle.remove()
    assert not any("forward" in vars(block) for block in llama.blocks)


def test_prompts_that_share_nothing(llama):
    rows = [packing.Row((5, 6), ((7,), (8, 9))), packing.Row((6, 5, 4), ((7, 7), (8,)))]
    assert Engine(llama, rows).prompts.beginning == ()

    def logp(some: list[packing.Row]) -> np.ndarray:
        return evaluate.log_probabilities(Engine(llama, [row.inputs() for row in some]), [row.answers for row in some])

    together, alone = logp(rows), np.concatenate([logp([row]) for row in rows])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_one_row_keeps_a_prompt_token_of_its_own(llama):
    (only,) = engine.Prompts.of([packing.Row((5, 6, 7), ((8,),))]).rows
    assert only.prompt == (7,)


@pytest.fixture(scope="module")
def smollm2():
    return models.load("smollm2-135m")


@pytest.fixture(scope="module")
def real_items(items) -> list[data.Item]:
    """Unequal lengths, two and three options."""
    return [*items[:2], *data.load_items("mini", "refusal", "test", 2)]


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_real_model_equals_the_plain_path(smollm2, real_items, fmt):
    """SmolLM2-135M: shared beginning, packed answers, padding, resumed blocks, all at once."""
    layers = [12, 14]
    ours = activations.differences(smollm2, real_items, layers=layers, fmt=fmt)
    plain = np.stack([reference.difference(smollm2, item, layers, fmt) for item in real_items])
    np.testing.assert_allclose(ours, plain, atol=1e-4 * np.abs(plain).max())
    shift = SteeringVectors(tuple(layers), plain.mean(0))
    scorer = evaluate.Scorer(smollm2, real_items, fmt=fmt, first=12)
    scorer.score()
    with steering.apply(smollm2, shift, multiplier=0.5):
        steered = scorer.score()
        for column, option in (("logp_matching", "matching"), ("logp_other", "other")):
            plain_logp = [reference.log_probability(smollm2, i, getattr(i, option), fmt) for i in real_items]
            np.testing.assert_allclose(steered[column], plain_logp, rtol=1e-4, atol=1e-4)


def test_real_model_generates_the_plain_answers_under_a_vector_per_row(smollm2, real_items):
    values = np.random.default_rng(0).normal(size=(2, 2, smollm2.width))
    rows = [SteeringVectors((12, 14), values[0]), None, SteeringVectors((12, 14), values[1])]
    prompts = [smollm2.encode_chat(item.question) for item in real_items[:3]]
    ours = generate.sample(smollm2, prompts, rows, temperature=0, max_new_tokens=10)
    for prompt, row, (answer,) in zip(prompts, rows, ours, strict=True):
        ids = torch.tensor([prompt])
        with steering.apply(smollm2, [row]):
            plain = smollm2.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, use_cache=False
            )
        assert answer == plain[0, len(prompt) : len(prompt) + len(answer)].tolist()
        assert len(answer) > 3


answers_of = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3)
rows_of = st.builds(packing.Row, st.lists(st.integers(0, 9), min_size=1, max_size=30).map(tuple), answers_of.map(tuple))


@settings(deadline=None)
@given(rows_of)
def test_predictors_are_the_columns_just_before_every_answer_token(row):
    """Read in the row that is really fed: the token at a predictor precedes its target in prompt + answer."""
    inputs = row.inputs()
    fed = [*inputs.prompt, *(t for answer in inputs.answers for t in answer)]
    assert len(fed) == len(inputs) == len(row) - len(row.answers)
    for a, answer in enumerate(row.answers):
        columns = row.predictors(a)
        assert [fed[c] for c in columns] == [*row.prompt, *answer][len(row.prompt) - 1 : -1]
        assert len(columns) == len(answer)
        assert columns[0] == len(row.prompt) - 1
        assert list(range(inputs.span(a).start, inputs.span(a).stop)) == columns[1:]


@settings(deadline=None)
@given(st.lists(rows_of, min_size=1, max_size=30), st.integers(1, 200))
def test_batches_hold_every_row_once_within_the_budget_and_with_little_padding(rows, tokens):
    batches = list(packing.batches(rows, tokens))
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        lengths = [len(rows[i]) for i in batch]
        assert len(batch) == 1 or max(lengths) * len(batch) <= tokens
        assert min(lengths) >= 7 / 8 * max(lengths) or sum(max(lengths) - n for n in lengths) <= 64
    longest = [max(len(rows[i]) for i in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True), "what needs most memory comes first"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_elsewhere_until_they_run_give_the_same_scores(family, tokenizer, items):
    """Blocks, embeddings and head offloaded by accelerate, as a device map does with what does not fit."""
    lm = tiny(family, tokenizer)

    def scores():
        scorer = evaluate.Scorer(lm, items, first=FIRST)
        with steering.apply(lm, vectors(lm, 0)):
            return np.stack([scorer.score().logp_matching, evaluate.score(lm, items).logp_other])

    plain = scores()
    for module in (*lm.blocks, lm.model.get_input_embeddings(), lm.model.get_output_embeddings()):
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert lm.model.get_output_embeddings().weight.is_meta
    assert lm.device == torch.device("cpu")
    assert all(p.is_meta for p in lm.blocks[0].parameters())
    np.testing.assert_allclose(scores(), plain, rtol=1e-5)
