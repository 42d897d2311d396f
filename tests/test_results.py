"""From profile to figure on the tiny model: stages, summaries, tables, figures."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from psa_utils import accounting, activations, artifacts, config, data, evaluate, mechanism, plotting, results, stages
from psa_utils import tables as psa_tables

BEHAVIOURS = ("refusal", "survival-instinct")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(autouse=True)
def output(monkeypatch, folder):
    monkeypatch.setenv("PSA_OUT", str(folder))


@pytest.fixture(scope="module")
def profile():
    return config.load_profile("smoke", behaviours=BEHAVIOURS, formats=("text", "letter"), n_train=8, n_test=4)


@pytest.fixture(scope="module")
def lm(profile):
    return stages.load_model(profile)


@pytest.fixture
def scored(profile, lm):
    for behaviour in profile.behaviours:
        for fmt in profile.formats:
            for split in stages.SPLITS:
                stages.differences(profile, lm, behaviour, split, fmt)
            raw = stages.extracted(profile, behaviour, fmt)
            for vector in stages.vectors(profile, 0, behaviour, raw, fmt):
                stages.save_vector(profile, vector)
    return pd.concat([stages.scores(profile, lm, b, f) for b in profile.behaviours for f in profile.formats])


def test_stages_run_in_order_and_say_what_is_missing(profile, lm, monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_OUT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="made by `make 01_extract PROFILE=smoke`"):
        stages.extracted(profile, "refusal", "text")
    with pytest.raises(FileNotFoundError, match="made by `make 02_private_steer PROFILE=smoke`"):
        stages.scores(profile, lm, "refusal", "text")


def test_an_interrupted_extraction_goes_on_after_the_last_whole_chunk(profile, lm, monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_OUT", str(tmp_path))
    monkeypatch.setattr(stages, "CHUNK", 3)
    plain, done = activations.differences, []

    def dies_in_the_third(lm, pairs, **options):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(len(pairs))
        return plain(lm, pairs, **options)

    monkeypatch.setattr(activations, "differences", dies_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        stages.differences(profile, lm, "refusal", "train", "text")
    monkeypatch.setattr(
        activations, "differences", lambda lm, pairs, **o: done.append(len(pairs)) or plain(lm, pairs, **o)
    )
    resumed = stages.differences(profile, lm, "refusal", "train", "text")
    assert done == [3, 3, 2], "each chunk once"
    whole = plain(lm, stages.items(profile, "refusal", "train"), layers=profile.layers)
    np.testing.assert_allclose(resumed, whole, atol=1e-4, rtol=1e-4)
    assert len(list(stages.paths.results("smoke", "01_extract").iterdir())) == 1, "no chunk is left behind"


def test_a_damaged_stage_is_named(profile, scored):
    kept = stages.paths.results("smoke", "01_extract") / "refusal-public-text.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:-9])
    with pytest.raises(ValueError, match=r"refusal-public-text.* is damaged or .*; delete it and run `make 01_extract"):
        stages.extracted(profile, "refusal", "text")
    kept.write_bytes(content)


def test_differences_of_other_layers_or_items_are_not_read_back(profile, scored):
    stages.extracted(profile, "refusal", "text")
    for change in ({"layers": (1, 2)}, {"n_train": 5}, {"template": "llama2"}):
        with pytest.raises(ValueError, match="made with other settings"):
            stages.extracted(dataclasses.replace(profile, **change), "refusal", "text")


def test_finished_stages_are_read_back(profile, lm, scored, monkeypatch):
    monkeypatch.setattr(activations, "differences", lambda *a, **k: pytest.fail("extracted again"))
    monkeypatch.setattr(evaluate, "Scorer", lambda *a, **k: pytest.fail("scored again"))
    stages.differences(profile, lm, "refusal", "train", "text")
    again = stages.scores(profile, lm, "refusal", "text")
    first = scored[(scored.behaviour == "refusal") & (scored.format == "text")]
    pd.testing.assert_frame_equal(again, first, check_dtype=False)


def test_a_changed_setting_is_not_read_back(profile, lm, scored, monkeypatch):
    monkeypatch.setattr(activations, "differences", lambda *a, **k: np.zeros((1, 3, 32), np.float32))
    shorter = dataclasses.replace(profile, n_train=7)
    assert not stages.differences(shorter, lm, "refusal", "train", "text").any()
    monkeypatch.undo()


def test_too_long_items_name_their_file_all_at_once(profile, lm, monkeypatch, folder):
    """Also when they lie in different chunks, and with their numbers in the file."""
    monkeypatch.setattr(stages, "CHUNK", 3)
    monkeypatch.setattr(type(lm), "context", property(lambda self: 10))
    with pytest.raises(data.DataError, match=r"hallucination/generate_dataset\.json: 8 item\(s\) too long") as error:
        stages.differences(profile, lm, "hallucination", "train", "text")
    assert all(f"item {i}: " in str(error.value) for i in range(1, 9))


def test_one_tidy_row_per_item_method_multiplier_and_seed(profile, scored):
    keys = ["behaviour", "format", "item", "method", "multiplier", "noise_seed"]
    assert not scored.duplicated(keys).any()
    per_item = 1 + 2 * (2 + profile.noise_seeds)
    assert len(scored) == 2 * 2 * 4 * per_item


def test_summary_by_hand(profile, scored):
    cells = results.summary(profile, 0, scored)
    pick = (scored.behaviour == "refusal") & (scored.format == "text")
    psa = scored[pick & (scored.method == "PSA") & (scored.multiplier > 0)]
    zero = scored[pick & (scored.method == "zero-shot")]
    cell = cells[
        (cells.behaviour == "refusal") & (cells.format == "text") & (cells.method == "PSA") & (cells.sign == 1)
    ]
    assert cell.probability.item() == pytest.approx(psa.probability.mean())
    assert cell.probability_change.item() == pytest.approx(psa.probability.mean() - zero.probability.mean())
    assert (cell.n_items.item(), cell.n_seeds.item(), cell.varies.item()) == (4, 2, "items x noise seeds")
    assert results.summary(profile, 0, scored).equals(cells), "intervals are repeatable"


def test_matched_recipe_gives_every_method_the_public_strength(profile, scored):
    raw = stages.extracted(profile, "refusal", "text")
    for vector in stages.load_vectors(profile, "refusal", "text"):
        np.testing.assert_allclose(np.linalg.norm(vector.values, axis=1), raw.strength, rtol=1e-5)


def test_paper_recipe_leaves_vectors_as_published(profile, scored):
    raw = stages.extracted(profile, "refusal", "text")
    pca, mean, *psa = stages.vectors(dataclasses.replace(profile, recipe="paper"), 0, "refusal", raw, "text")
    np.testing.assert_allclose(np.linalg.norm(pca.values, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(mean.values, mechanism.max_norm_mean(raw.private), rtol=1e-5)
    signal = mechanism.clipped_mean(raw.private, clip=raw.clip)
    noise = np.stack([v.values for v in psa]) - signal
    assert np.std(noise) == pytest.approx(profile.sigma, rel=0.25)


def test_records_say_what_is_private_and_how(profile, scored):
    for vector in stages.load_vectors(profile, "refusal", "text"):
        record = vector.record
        assert record["private"] == (record["method"] == "PSA")
        if record["private"]:
            assert record["mu"] == accounting.gdp_mu(n=8, sigma=profile.sigma, layers=3)
            assert record["noise"].startswith("seeded")


def test_tables_and_figures_are_written_whole_and_repeatably(profile, scored):
    cells = results.summary(profile, 0, scored)
    numbers, printed = results.negative(profile, cells)
    assert list(numbers.paper_llama2[:4]) == [69.7, 63.9, 65.1, 63.7]
    positive = cells[cells.sign >= 0]

    def write():
        psa_tables.save("table20_negative", profile, numbers, printed, {"seed": 0})
        figure = plotting.alignment(positive, results.moved(positive))
        plotting.save("fig3_alignment", profile, figure, positive, {"seed": 0})
        files = [f for name in ("table20_negative", "fig3_alignment") for f in artifacts.artifact(name).files("smoke")]
        return {f.name: f.read_bytes() for f in files}

    first = write()
    assert write() == first
    facts = json.loads(first["fig3_alignment.json"])
    assert facts["profile"]["behaviours"] == list(BEHAVIOURS)
    assert b"refusal" in first["table20_negative.md"]
    with pytest.raises(ValueError, match=r"'fig9' is not in artifacts\.toml"):
        artifacts.artifact("fig9")


def test_geometry_follows_the_theory_line_when_noise_is_drawn_often(profile):
    rng = np.random.default_rng(0)
    private = (rng.normal(size=(50, 3, 256)) + 0.5).astype(np.float32)
    raw = stages.Extracted(private, private, mechanism.public_clip(private), np.ones(3))
    numbers = results.geometry(dataclasses.replace(profile, noise_seeds=20), 0, "refusal", raw, "text")
    assert (numbers.cosine - numbers.theory).abs().max() < 0.06
    assert len(numbers) == 60
