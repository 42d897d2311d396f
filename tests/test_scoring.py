"""Variants scored and kept: the plain path's numbers, read back if nothing changed, computed anew if anything did."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from psa_utils import data, evaluate, knowledge, scoring, stages, steering
from psa_utils.scoring import Variant
from psa_utils.vectors import SteeringVectors
from tests import reference


@pytest.fixture
def items(smoke):
    return stages.items(smoke.profile, "refusal", "test")


@pytest.fixture
def vector(smoke):
    return SteeringVectors((1, 2), np.random.default_rng(0).normal(size=(2, smoke.lm.width)))


@pytest.fixture
def passes(monkeypatch):
    """Grows by one with every scorer that is built, that is, with every table that is not read back."""
    plain, built = evaluate.Scorer, []
    monkeypatch.setattr(evaluate, "Scorer", lambda *a, **k: built.append(1) or plain(*a, **k))
    return built


def keep(smoke, items, variants, path):
    return scoring.Bench(smoke.profile, smoke.lm, items, "text").scored(variants, path)


@pytest.mark.parametrize(("recipe", "sign"), [("matched", 1), ("matched", -1), ("paper", 1)])
def test_alignment_is_the_plain_path_under_every_saved_vector(smoke, items, recipe, sign):
    ours = scoring.alignment(smoke.profile, smoke.lm, "refusal", "text")
    main = recipe == smoke.profile.recipe and sign > 0
    vector = stages.load_vectors(smoke.profile, "refusal", "text", recipe=recipe)[-1]
    with steering.apply(smoke.lm, vector, multiplier=sign * smoke.profile.multiplier):
        sides = [
            [reference.log_probability(smoke.lm, item, option, "text") for option in (item.matching, item.other)]
            for item in (items if main else items[:3])
        ]
    rows = ours[
        (ours.recipe == recipe) & (ours.method == "PSA") & (ours.noise_seed == 1) & (sign * ours.multiplier > 0)
    ]
    np.testing.assert_allclose(rows[["logp_matching", "logp_other"]], sides, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(
        rows.logp_matching / rows.tokens_matching,
        [a / t for (a, _), t in zip(sides, rows.tokens_matching, strict=True)],
        rtol=1e-4,
    )


def test_zero_shot_is_the_unsteered_model_and_belongs_to_no_recipe(smoke, items):
    ours = scoring.alignment(smoke.profile, smoke.lm, "refusal", "text").query("method == 'zero-shot'")
    plain = [reference.log_probability(smoke.lm, item, item.matching, "text") for item in items]
    np.testing.assert_allclose(ours.logp_matching, plain, rtol=1e-4, atol=1e-3)
    assert ours[["recipe", "multiplier", "noise_seed"]].drop_duplicates().values.tolist() == [["none", 0.0, -1]]


def test_labels_come_back_with_every_row(smoke, items, vector, tmp_path):
    variants = [scoring.zero_shot(), Variant(vector, 2.0, {"method": "Mean", "sigma": 0.02})]
    kept = keep(smoke, items, variants, tmp_path / "a.csv")
    assert kept.item.tolist() == [0, 1, 2, 3] * 2
    assert kept.method.tolist() == ["zero-shot"] * 4 + ["Mean"] * 4
    assert kept.sigma.isna().tolist() == [True] * 4 + [False] * 4


def test_what_is_kept_is_read_back(smoke, items, vector, tmp_path, passes):
    variants = [Variant(vector, 1.0, {"method": "Mean"})]
    first = keep(smoke, items, variants, tmp_path / "a.csv")
    same = Variant(SteeringVectors(vector.layers, vector.values.copy(), {"other": "record"}), 1.0, {"method": "Mean"})
    pd.testing.assert_frame_equal(keep(smoke, items, [same], tmp_path / "a.csv"), first)
    assert len(passes) == 1


@pytest.mark.parametrize(
    "what", ["values", "layers", "multiplier", "label", "items", "order", "template", "dtype", "fmt"]
)
def test_a_change_is_scored_anew(smoke, items, vector, tmp_path, passes, what):
    before = Variant(vector, 1.0, {"method": "Mean"})
    keep(smoke, items, [before], tmp_path / "a.csv")
    values = vector.values.copy()
    values[1, 7] = np.nextafter(values[1, 7], 9)
    after = {
        "values": Variant(SteeringVectors(vector.layers, values), 1.0, before.labels),
        "layers": Variant(SteeringVectors((1, 3), vector.values), 1.0, before.labels),
        "multiplier": Variant(vector, 1.5, before.labels),
        "label": Variant(vector, 1.0, {"method": "PSA"}),
    }.get(what, before)
    asked = {"items": [*items[:-1], dataclasses.replace(items[-1], question="Why?")], "order": items[::-1]}
    other = {"template": {"template": "llama2"}, "dtype": {"dtype": "bfloat16"}}.get(what, {})
    profile = dataclasses.replace(smoke.profile, **other)
    fmt = "letter" if what == "fmt" else "text"
    bench = scoring.Bench(profile, smoke.lm, asked.get(what, items), fmt)
    found = bench.scored([after], tmp_path / "a.csv")
    assert len(passes) == 2
    assert found.method.unique().tolist() == [after.labels["method"]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-20],
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b.replace(b"Mean", b"Meam"),
        lambda b: b[:-9] + b"\xff" + b[-8:],
    ],
)
def test_a_damaged_file_is_scored_anew(smoke, items, vector, tmp_path, passes, damage):
    path, variants = tmp_path / "a.csv", [Variant(vector, 1.0, {"method": "Mean"})]
    first = keep(smoke, items, variants, path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    pd.testing.assert_frame_equal(keep(smoke, items, variants, path), first)
    assert len(passes) == 2
    assert path.read_bytes() == whole


def test_an_interrupted_run_leaves_no_half_table_and_no_hook(smoke, items, vector, tmp_path, monkeypatch):
    plain, calls = evaluate.Scorer.score, []

    def dies_in_the_second(self):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(evaluate.Scorer, "score", dies_in_the_second)
    variants = [Variant(vector, m, {"method": "Mean"}) for m in (1.0, 2.0)]
    with pytest.raises(KeyboardInterrupt):
        keep(smoke, items, variants, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert not any(block._forward_hooks for block in smoke.lm.blocks)


def test_a_vector_that_two_sweeps_ask_for_is_scored_once_and_labelled_twice(
    smoke, items, vector, tmp_path, monkeypatch
):
    plain, calls = evaluate.Scorer.score, []
    monkeypatch.setattr(evaluate.Scorer, "score", lambda self: calls.append(1) or plain(self))
    bench = scoring.Bench(smoke.profile, smoke.lm, items, "text")
    twin = SteeringVectors(vector.layers, vector.values.copy())
    first = bench.scored([scoring.zero_shot(), Variant(vector, 1.0, {"sweep": "one"})], tmp_path / "one.csv")
    second = bench.scored([scoring.zero_shot(), Variant(twin, 1.0, {"sweep": "two"})], tmp_path / "two.csv")
    assert len(calls) == 2
    pd.testing.assert_frame_equal(first.drop(columns="sweep"), second.drop(columns="sweep"))
    bench.scored([Variant(vector, 0.5), Variant(SteeringVectors((1, 3), vector.values), 1.0)], tmp_path / "three.csv")
    assert len(calls) == 4, "another strength or another block is another result"


def test_lower_blocks_may_be_steered_after_higher_ones(smoke, items, tmp_path):
    bench, values = scoring.Bench(smoke.profile, smoke.lm, items, "text"), np.ones((1, smoke.lm.width))
    found = [bench.scored([Variant(SteeringVectors((b,), values), 1.0)], tmp_path / f"{b}.csv") for b in (3, 0)]
    for block, frame in zip((3, 0), found, strict=True):
        with steering.apply(smoke.lm, SteeringVectors((block,), values)):
            plain = [reference.log_probability(smoke.lm, item, item.matching, "text") for item in items]
        np.testing.assert_allclose(frame.logp_matching, plain, rtol=1e-4, atol=1e-3)


def test_checks_ask_few_items_and_the_main_recipe_all(smoke, items):
    ours = scoring.alignment(smoke.profile, smoke.lm, "refusal", "text")
    checks = (ours.multiplier < 0) | (ours.recipe == "paper")
    assert ours[checks].item.nunique() == 3 < ours[~checks].item.nunique() == len(items)
    assert ours[checks].groupby(["recipe", "method"]).noise_seed.nunique().max() == smoke.profile.few_seeds


@pytest.fixture
def known(smoke):
    return scoring.knowledge_kept(smoke.profile, smoke.lm, "general-knowledge", 0)


def test_knowledge_asks_the_drawn_questions_under_every_vector_and_sign(smoke, known):
    questions = knowledge.load("general-knowledge", limit=4, seed=0)
    zero = known[known.method == "zero-shot"]
    plain = evaluate.score(smoke.lm, questions)
    np.testing.assert_allclose(zero.probability, plain.probability, rtol=1e-4)
    assert len(known) == 4 * (1 + 2 * 2 * (2 + smoke.profile.few_seeds)), "behaviours, signs, PCA and Mean and PSA"
    assert set(known.behaviour) == {"none", "refusal", "survival-instinct"}
    assert set(known.recipe) == {"none", "matched"}
    steered = known[known.method != "zero-shot"]
    assert (steered.groupby(["behaviour", "method", "noise_seed"]).multiplier.nunique() == 2).all()


def test_knowledge_is_steered_by_the_vector_its_label_names(smoke, known):
    vector = stages.load_vectors(smoke.profile, "survival-instinct", "text", recipe="matched")[1]
    question = knowledge.load("general-knowledge", limit=4, seed=0)[2]
    with steering.apply(smoke.lm, vector, multiplier=-1.0):
        plain = reference.log_probability(smoke.lm, question, question.matching, "text")
    row = known.query("behaviour == 'survival-instinct' and method == 'Mean' and multiplier < 0 and item == 2")
    assert row.logp_matching.item() == pytest.approx(plain, abs=1e-3)


def test_few_keeps_what_has_no_noise_and_the_first_draws(smoke):
    vectors = stages.load_vectors(smoke.profile, "refusal", "text", recipe="paper")
    profile = dataclasses.replace(smoke.profile, few_seeds=1)
    assert [(v.record["method"], v.record["noise_seed"]) for v in scoring.few(profile, vectors)] == [
        ("PCA", None),
        ("Mean", None),
        ("PSA", 0),
    ]
    assert len(scoring.few(smoke.profile, vectors)) == len(vectors) == 4


def test_an_unusable_item_is_named_before_anything_is_kept(smoke, items, vector, tmp_path):
    endless = dataclasses.replace(items[0], question="and so on " * 600)
    with pytest.raises(data.DataError, match=r"item 2: .* tokens, the model's context holds 512"):
        keep(smoke, [items[0], endless], [Variant(vector, 1.0)], tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []
