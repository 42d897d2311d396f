import numpy as np
import pandas as pd
import pytest
import torch

from psa_utils import canaries, games, mechanism, packing, seeding, steering
from psa_utils.rowwise import Questions
from psa_utils.vectors import SteeringVectors
from tests import reference

LAYERS = (1, 2)
CANARIES = [canaries.draw(seeding.rng(0, i)) for i in range(3)]


def attack_on(lm, release, fmt="text", multiplier=1.0, seed=0):
    differences = games.canary_differences(lm, CANARIES, layers=LAYERS, fmt=fmt)
    benign = np.random.default_rng(0).normal(size=(4, len(LAYERS), lm.width)).astype(np.float32)
    return games.Attack(lm, CANARIES, differences, benign, LAYERS, release, multiplier, seed=seed, fmt=fmt)


def private(differences, rng):
    return mechanism.psa(differences, clip=1.0, sigma=0.02, rng=rng)


def plain(differences, rng):
    return mechanism.clipped_mean(differences, clip=1.0)


def test_differences_belong_to_canary_and_coin(llama):
    found = games.canary_differences(llama, CANARIES, layers=LAYERS)
    assert found.shape == (3, 2, 2, llama.width)
    for c, coin in ((0, 1), (2, 0)):
        expected = reference.difference(llama, CANARIES[c].demonstration(coin), list(LAYERS), "text")
        np.testing.assert_allclose(found[c, coin], expected, atol=1e-4)


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_log_probabilities_row_by_row_equal_one_at_a_time(lm, fmt):
    """Unequal questions, resumed from the first steered block, a vector or none in every row: the plain path's."""
    items = [canary.demonstration(1) for canary in CANARIES]
    rng = np.random.default_rng(1)
    asked = [0, 2, 1, 0]
    vectors = [SteeringVectors(LAYERS, rng.normal(size=(2, lm.width))) for _ in asked[1:]] + [None]
    questions = Questions(lm, packing.rows_of(lm, items, fmt), first=1, batch_tokens=150)
    found = questions.log_probabilities(asked, vectors, multiplier=1.5)
    for question, vector, values in zip(asked, vectors, found, strict=True):
        item = items[question]
        with steering.apply(lm, [vector], multiplier=1.5):
            expected = [reference.log_probability(lm, item, option, fmt) for option in (item.matching, item.other)]
        np.testing.assert_allclose(values, expected, atol=2e-3)


def test_one_vector_per_question(llama):
    questions = Questions(llama, packing.rows_of(llama, [CANARIES[0].demonstration(1)], "text"), first=1)
    with pytest.raises(ValueError, match="2 questions and 1 vectors"):
        questions.log_probabilities([0, 0], [None], multiplier=1.0)


def test_a_trial_replaces_one_record_and_draws_fresh_noise(llama):
    seen = []

    def spy(differences, rng):
        seen.append(differences)
        return private(differences, rng)

    attack = attack_on(llama, spy)
    trials = [attack.trial(i) for i in range(40)]
    for records, (canary, coin, _) in zip(seen, trials, strict=True):
        assert np.array_equal(records[:-1], attack.benign[:-1])
        assert np.array_equal(records[-1], attack.differences[canary, coin])
    assert {(canary, coin) for canary, coin, _ in trials} == {(c, coin) for c in range(3) for coin in (0, 1)}
    assert len({vector.digest() for *_, vector in trials}) == 40
    assert attack.trial(7)[2].digest() == trials[7][2].digest()


def test_grey_box_scores_are_the_plain_paths(llama):
    attack = attack_on(llama, private)
    found = games.grey_box(attack, trials=4, calibration=2, batch_tokens=100)
    assert found.phase.tolist() == ["calibration"] * 2 + ["trial"] * 4
    for i in (0, 5):
        canary, coin, vector = attack.trial(i)
        ratios = []
        for steered in (vector, attack.reference()):
            with steering.apply(llama, steered):
                logp = [reference.log_probability(llama, attack.items[canary], option, "text") for option in (0, 1)]
            ratios.append(logp[0] - logp[1])
        assert (found.canary[i], found.coin[i]) == (canary, coin)
        assert found.score[i] == pytest.approx(ratios[0] - ratios[1], abs=2e-3)


def test_black_box_counts_named_targets(llama, monkeypatch):
    """Against answers that are known: trial i names t1 in i of its samples, t2 in one."""
    attack = attack_on(llama, private)
    asked = []

    def answers(lm, prompts, vectors, *, samples, generator, **_):
        asked.extend(prompts)
        assert isinstance(generator, torch.Generator)
        texts = []
        for i in range(len(prompts)):
            canary = CANARIES[attack.trial(i)[0]]
            texts.append([f"In {canary.first.title()}, yes"] * i + [canary.second] + ["no"] * (samples - i - 1))
        return [[lm.encode_answer(text) for text in part] for part in texts]

    monkeypatch.setattr(games.generate, "sample", answers)
    found = games.black_box(attack, trials=3, calibration=2, samples=8)
    assert found.score.tolist() == [0, 1, 2, 3, 4]
    assert found.other.tolist() == [1] * 5
    assert list(asked[0]) == llama.encode_chat(attack.items[attack.trial(0)[0]].question)


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_games_repeat_with_the_seed_and_resume(llama, tmp_path, fmt, monkeypatch):
    monkeypatch.setattr(games, "CHUNK", 4)
    attack = attack_on(llama, private, fmt)
    options = {"trials": 6, "calibration": 4}
    grey = games.grey_box(attack, **options, path=tmp_path / "grey.csv")
    pd.testing.assert_frame_equal(grey, games.grey_box(attack, **options), rtol=1e-4, atol=1e-4)
    pd.testing.assert_frame_equal(grey, games.grey_box(attack, **options, path=tmp_path / "grey.csv"), check_exact=True)
    assert not grey.score.equals(games.grey_box(attack_on(llama, private, fmt, seed=1), **options).score)
    sampled = {**options, "samples": 2, "max_new_tokens": 3}
    black = games.black_box(attack, **sampled, path=tmp_path / "black.csv")
    pd.testing.assert_frame_equal(black, games.black_box(attack, **sampled))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["black.csv", "grey.csv"]


def test_arrays_must_belong_together(llama):
    attack = attack_on(llama, private)
    with pytest.raises(ValueError, match=r"do not belong together; differences must be \(3, 2, 1, 32\)"):
        games.Attack(llama, CANARIES, attack.differences, attack.benign[:, :1], (1,), private, 1.0, seed=0)
