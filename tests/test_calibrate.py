"""The rule that chose layers and multiplier, against the plain path: whole model, one vector at a time."""

import numpy as np
import pandas as pd
import pytest

from psa_utils import calibrate, config, evaluate, stages, steering
from psa_utils.vectors import SteeringVectors
from tests import reference
from tests.conftest import tiny

PAIRS = stages.items(config.load_profile("smoke"), "refusal", "public")[::8]


def test_gain_is_that_of_held_out_halves_and_loss_that_of_ordinary_text(tokenizer, monkeypatch):
    lm, layers = tiny("llama", tokenizer, blocks=8), (2, 3, 4, 5, 6)
    monkeypatch.setattr(calibrate, "MULTIPLIERS", (0.5,))
    monkeypatch.setattr(stages, "items", lambda *_: PAIRS)
    text = ["A walk by the lake.", "Rain is expected in the evening."]
    monkeypatch.setattr(calibrate, "ordinary_text", lambda: text)
    row = calibrate.measure(config.load_profile("smoke", behaviours=("refusal",)), lm).iloc[0]
    differences = np.stack([reference.difference(lm, pair, layers, "text") for pair in PAIRS])
    strength = np.linalg.norm(differences.mean(0), axis=1, keepdims=True)
    gains, losses = [], []
    for half in calibrate.halves(PAIRS):
        mean = differences[half].mean(0)
        vector = SteeringVectors(layers, mean / np.linalg.norm(mean, axis=1, keepdims=True) * strength)
        held_out = [pair for pair, inside in zip(PAIRS, half, strict=True) if not inside]
        plain = evaluate.score(lm, held_out).probability.mean(), evaluate.TextScorer(lm, text).score().mean()
        with steering.apply(lm, vector, multiplier=0.5):
            gains.append(evaluate.score(lm, held_out).probability.mean() - plain[0])
            losses.append(plain[1] - evaluate.TextScorer(lm, text).score().mean())
    assert (row.layers, row.multiplier) == ("2-6", 0.5)
    assert row.gain == pytest.approx(np.mean(gains), abs=1e-4)
    assert row.loss == pytest.approx(np.mean(losses), abs=1e-4)
    assert min(map(abs, gains + losses)) > 1e-4, "the vectors do something"


def test_halves_share_no_situation_and_together_are_all_pairs():
    first, second = calibrate.halves(PAIRS)
    assert (first ^ second).all()
    frames = [{PAIRS[i].frame for i in np.flatnonzero(half)} for half in (first, second)]
    assert all(frames)
    assert not frames[0] & frames[1]


def test_a_loss_past_the_budget_is_never_chosen():
    rows = pd.DataFrame({"multiplier": [0.5, 1.0], "gain": [0.1, 0.9], "loss": [0.1, calibrate.BUDGET + 0.01]})
    assert calibrate.choose(rows).multiplier == 0.5
    with pytest.raises(ValueError, match=r"within 0\.29 nats per token; try smaller multipliers"):
        calibrate.choose(rows.iloc[1:])
