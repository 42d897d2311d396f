"""Free answers: the plain greedy ones, repeatable samples, texts that a CSV would spoil, and what is said of them."""

import dataclasses

import numpy as np
import pytest
import torch

from psa_utils import data, generate, open_ended, quality, scoring, stages, steering

KEYS = ["method", "recipe", "multiplier", "noise_seed"]


@pytest.fixture
def written(smoke):
    return open_ended.answers(smoke.profile, smoke.lm, "refusal", 0)


def test_greedy_answers_are_the_models_own_one_prompt_and_vector_at_a_time(smoke, monkeypatch, tmp_path):
    """Signs, vectors and prompts of unequal length in one batch, cut into batches at odd places."""
    monkeypatch.setattr(open_ended, "ROWS", 5)
    vectors = {("zero-shot", -1): None}
    for vector in stages.load_vectors(smoke.profile, "refusal", "text", recipe="matched"):
        noise_seed = vector.record["noise_seed"]
        vectors[vector.record["method"], -1 if noise_seed is None else noise_seed] = vector
    profile = dataclasses.replace(smoke.profile, temperature=0.0, name="greedy")
    monkeypatch.setattr(stages, "load_vectors", lambda *_, **__: [v for v in vectors.values() if v])
    ours = open_ended.answers(profile, smoke.lm, "refusal", 0)
    assert len(ours) == 2 * (1 + 2 * 4)
    for row in ours.itertuples():
        ids = torch.tensor([smoke.lm.encode_chat(row.question)])
        with steering.apply(smoke.lm, vectors[row.method, row.noise_seed] or (), multiplier=row.multiplier):
            plain = smoke.lm.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, use_cache=False
            )
        tokens = [t for t in plain[0, ids.shape[1] :].tolist() if t != smoke.lm.tokenizer.eos_token_id]
        assert row.answer == smoke.lm.tokenizer.decode(tokens).strip()
    assert ours.groupby("item").answer.nunique().min() > 1, "steering changes something"


def test_one_answer_per_prompt_and_variant(smoke, written):
    prompts = [prompt.question for prompt in data.load_open_ended("mini", "refusal")[:2]]
    assert written[written.item == 1].question.unique().tolist() == prompts[1:]
    assert (written.groupby(KEYS).size() == 2).all()
    assert len(written) == 2 * (1 + 2 * (2 + smoke.profile.few_seeds))
    assert set(written.recipe) == {"none", "matched"}
    assert set(written.behaviour) == {"refusal"}


def test_a_seed_gives_the_same_answers_and_another_seed_others(smoke, written, monkeypatch, tmp_path):
    assert open_ended.answers(smoke.profile, smoke.lm, "refusal", 0).equals(written)
    elsewhere = dataclasses.replace(smoke.profile, name="elsewhere")
    plain = stages.load_vectors
    monkeypatch.setattr(stages, "load_vectors", lambda _profile, *a, **k: plain(smoke.profile, *a, **k))
    again = open_ended.answers(elsewhere, smoke.lm, "refusal", 0)
    assert again.answer.tolist() == written.answer.tolist(), "sampled anew, not read back"
    assert open_ended.answers(elsewhere, smoke.lm, "refusal", 1).answer.tolist() != written.answer.tolist()


def test_finished_answers_are_read_back_until_something_changes(smoke, written, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("sampled again")

    monkeypatch.setattr(generate, "sample", refuse)
    assert open_ended.answers(smoke.profile, smoke.lm, "refusal", 0).equals(written)
    for change in ({"n_open": 3}, {"temperature": 0.7}, {"answer_tokens": 7}, {"template": "llama2"}, {"few_seeds": 1}):
        with pytest.raises(RuntimeError, match="sampled again"):
            open_ended.answers(dataclasses.replace(smoke.profile, **change), smoke.lm, "refusal", 0)


@pytest.mark.parametrize(
    "texts",
    [
        ["None", "N/A", "null", "nan", ""],
        ["7", "007", "7.0", "", "1e5"],
        ["7", "8", "9", "10", "11"],
        ['a\rb, "c"', "a\r\nb", "a\n\nb", "# a,b", "é\x85…"],
        ["", "", "", "", ""],
    ],
)
def test_texts_survive_being_kept(smoke, monkeypatch, tmp_path, texts):
    """A CSV reader's idea of missing values, numbers and line ends is not what a model meant."""
    monkeypatch.setenv("PSA_OUT", str(tmp_path))
    monkeypatch.setattr(scoring, "both_signs", lambda *_, **__: [])
    monkeypatch.setattr(type(smoke.lm.tokenizer), "decode", lambda _self, tokens, **_: texts[tokens[0]])
    monkeypatch.setattr(generate, "sample", lambda _lm, prompts, *_, **__: [[[i]] for i in range(len(prompts))])
    profile = dataclasses.replace(smoke.profile, n_open=5)
    for _ in range(2):
        kept = open_ended.answers(profile, smoke.lm, "refusal", 0).answer.tolist()
        assert kept == texts


class Counting:
    """A judge whose score is an answer's length in characters; it has nothing to say of empty answers."""

    name = "characters"

    def __init__(self):
        self.asked = []

    def scores(self, behaviour, questions, answers):
        self.asked.append(behaviour)
        return np.array([len(answer) or np.nan for answer in answers])


def test_answers_are_judged_by_behaviour_and_measured(smoke, written):
    other = written.assign(behaviour="survival-instinct", answer=[*written.answer[:-1], ""])
    both = open_ended.pd.concat([written, other], ignore_index=True)
    judge = Counting()
    rated = open_ended.judged(smoke.profile, smoke.lm, judge, both)
    assert judge.asked == ["refusal", "survival-instinct"]
    assert rated[both.columns.tolist()].equals(both)
    assert rated.score[:-1].tolist() == [
        len(answer) or pytest.approx(np.nan, nan_ok=True) for answer in both.answer[:-1]
    ]
    assert np.isnan(rated.score.iloc[-1])
    assert np.isnan(rated.logp_per_token.iloc[-1])
    assert rated.length.iloc[-1] == 0
    for row in rated.iloc[[0, 3, -2]].itertuples():
        prompt, tokens = smoke.lm.encode_chat(row.question), smoke.lm.encode_answer(row.answer)
        (plain,) = quality.measure(smoke.lm, [prompt], [tokens]).itertuples()
        assert row.logp_per_token == pytest.approx(plain.logp_per_token, abs=1e-4)
        assert (row.distinct_2, row.repetition, row.length) == pytest.approx(
            (plain.distinct_2, plain.repetition, plain.length), nan_ok=True
        )
