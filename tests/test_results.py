"""From profile to figure on the tiny model: stages, summaries, tables, figures."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from psa_utils import accounting, activations, artifacts, data, evaluate, mechanism, plotting, results, scoring, stages
from psa_utils import tables as psa_tables


@pytest.fixture
def profile(smoke):
    return smoke.profile


@pytest.fixture
def lm(smoke):
    return smoke.lm


@pytest.fixture
def scored(profile, lm):
    return pd.concat([scoring.alignment(profile, lm, b, f) for b in profile.behaviours for f in profile.formats])


def test_stages_run_in_order_and_say_what_is_missing(profile, lm, monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_OUT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="made by `make 01_extract PROFILE=smoke`"):
        stages.extracted(profile, "refusal", "text")
    with pytest.raises(FileNotFoundError, match="made by `make 02_private_steer PROFILE=smoke`"):
        scoring.alignment(profile, lm, "refusal", "text")


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
    again = scoring.alignment(profile, lm, "refusal", "text")
    first = scored[(scored.behaviour == "refusal") & (scored.format == "text")]
    pd.testing.assert_frame_equal(again, first, check_dtype=False)


def test_a_changed_setting_is_not_read_back(profile, lm, monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_OUT", str(tmp_path))

    def extracted(value, **change):
        monkeypatch.setattr(activations, "differences", lambda *a, **k: np.full((1, 3, 32), value, np.float32))
        return stages.differences(dataclasses.replace(profile, **change), lm, "refusal", "train", "text").max()

    assert [extracted(1), extracted(2), extracted(3, n_train=7), extracted(4, template="llama2")] == [1, 1, 3, 4]


def test_too_long_items_name_their_file_all_at_once(profile, lm, monkeypatch):
    """Also when they lie in different chunks, and with their numbers in the file."""
    monkeypatch.setattr(stages, "CHUNK", 3)
    monkeypatch.setattr(type(lm), "context", property(lambda self: 10))
    with pytest.raises(data.DataError, match=r"hallucination/generate_dataset\.json: 8 item\(s\) too long") as error:
        stages.differences(profile, lm, "hallucination", "train", "text")
    assert all(f"item {i}: " in str(error.value) for i in range(1, 9))


def test_one_tidy_row_per_item_method_multiplier_and_seed(profile, scored):
    keys = ["behaviour", "format", "item", "method", "recipe", "multiplier", "noise_seed"]
    assert not scored.duplicated(keys).any()
    added, checks = 1 + 2 + profile.noise_seeds, 2 * (2 + profile.few_seeds)
    assert len(scored) == 2 * 2 * (4 * added + profile.few_items * checks)
    assert (scored[scored.recipe == "paper"].multiplier > 0).all(), "the other recipe is added only"
    assert set(scored[scored.recipe == "matched"].multiplier > 0) == {True, False}
    assert set(scored[scored.method == "zero-shot"].recipe) == {"none"}
    assert set(scored[scored.method != "zero-shot"].recipe) == {"matched", "paper"}


def test_summary_by_hand(profile, scored):
    cells = results.summary(profile, 0, scored)
    pick = (scored.behaviour == "refusal") & (scored.format == "text")
    psa = scored[pick & (scored.method == "PSA") & (scored.recipe == "paper") & (scored.multiplier > 0)]
    zero = scored[pick & (scored.method == "zero-shot") & (scored.item < profile.few_items)]
    where = "behaviour == 'refusal' and format == 'text' and method == 'PSA' and recipe == 'paper' and sign == 1"
    cell = cells.query(where)
    assert cell.probability.item() == pytest.approx(psa.probability.mean())
    assert cell.probability_change.item() == pytest.approx(psa.probability.mean() - zero.probability.mean())
    assert (cell.n_items.item(), cell.n_seeds.item(), cell.varies.item()) == (3, 2, "items x noise seeds")
    assert results.summary(profile, 0, scored).equals(cells), "intervals are repeatable"


def test_matched_recipe_gives_every_method_the_public_strength(profile, scored):
    raw = stages.extracted(profile, "refusal", "text")
    for vector in stages.load_vectors(profile, "refusal", "text", recipe="matched"):
        np.testing.assert_allclose(np.linalg.norm(vector.values, axis=1), raw.strength, rtol=1e-5)


def test_paper_recipe_is_one_public_number_times_what_was_published(profile, scored):
    raw = stages.extracted(profile, "refusal", "text")
    pca, mean, *psa = stages.load_vectors(profile, "refusal", "text", recipe="paper")
    public_norms = np.linalg.norm(raw.public, axis=2)
    unit = np.median(public_norms, axis=0).mean()
    np.testing.assert_allclose(np.linalg.norm(pca.values, axis=1), unit, rtol=1e-5)
    private_norms = np.linalg.norm(raw.private, axis=2)
    np.testing.assert_allclose(mean.values, unit * raw.private.mean(0) / private_norms.max(0)[:, None], rtol=1e-4)
    signal = mechanism.clipped_mean(raw.private, clip=np.median(public_norms, axis=0))
    noise = np.stack([v.values for v in psa]) / unit - signal
    assert np.std(noise) == pytest.approx(profile.sigma, rel=0.25)
    assert not np.allclose(noise[0], noise[1], atol=profile.sigma / 10), "every seed has noise of its own"


def test_records_say_what_is_private_and_how(profile, scored):
    for vector in stages.load_vectors(profile, "refusal", "text", recipe="paper"):
        record = vector.record
        assert record["recipe"] == "paper"
        assert record["private"] == (record["method"] == "PSA")
        if record["private"]:
            assert record["mu"] == accounting.gdp_mu(n=8, sigma=profile.sigma, layers=3)
            assert record["noise"].startswith("seeded")


def test_tables_and_figures_are_written_whole_and_repeatably(profile, scored):
    cells = results.summary(profile, 0, scored)
    numbers, printed = results.negative(profile, cells)
    assert list(numbers.paper_llama2[:4]) == [69.7, 63.9, 65.1, 63.7]
    assert set(numbers.recipe) == {"none", profile.recipe}
    assert len(printed) == 2 * 2 * 4, "behaviours, formats, methods"
    main = cells[cells.recipe.isin(["none", profile.recipe])]
    positive = main[main.sign >= 0]

    def write():
        psa_tables.save("table20_negative", profile, numbers, printed, {"seed": 0})
        figure = plotting.alignment(positive, results.moved(positive))
        plotting.save("fig3_alignment", profile, figure, positive, {"seed": 0})
        files = [f for name in ("table20_negative", "fig3_alignment") for f in artifacts.artifact(name).files("smoke")]
        return {f.name: f.read_bytes() for f in files}

    first = write()
    assert write() == first
    facts = json.loads(first["fig3_alignment.json"])
    assert facts["profile"]["behaviours"] == list(profile.behaviours)
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


def made(values: dict[str, list[list[float]]], **labels) -> pd.DataFrame:
    """Item rows of a metric ``score``: per method, one list per noise draw with one value per item."""
    return pd.DataFrame(
        {**labels, "method": method, "noise_seed": seed if len(draws) > 1 else -1, "item": item, "score": value}
        for method, draws in values.items()
        for seed, draw in enumerate(draws)
        for item, value in enumerate(draw)
    )


def cells_of(profile, rows, **options):
    return results.cells(profile, 0, rows, **{"within": (), "by": ("method",), "metrics": ("score",), **options})


def test_a_paired_change_is_the_mean_difference_over_units_that_both_have(profile):
    nan = np.nan
    rows = made(
        {
            "zero-shot": [[0.1, 0.2, nan, 0.4, 0.5]],
            "Mean": [[0.5, nan, 0.9, 0.1, 0.5]],
            "PSA": [[0.4, 0.4, 0.4, nan, 0.7], [0.2, 0.0, 0.4, 0.4, 0.9]],
        }
    )
    zero, mean, psa = (row for _, row in cells_of(profile, rows).iterrows())
    assert (zero.n_items, mean.n_items, psa.n_items) == (4, 3, 3)
    assert mean.score == pytest.approx((0.5 + 0.1 + 0.5) / 3), "items 0, 3 and 4"
    assert mean.score_change == pytest.approx((0.4 - 0.3 + 0.0) / 3)
    assert psa.score_change == pytest.approx((0.2 + 0.0 + 0.3) / 3), "items 0, 1 and 4, draws averaged"
    assert psa.score_change_low <= psa.score_change <= psa.score_change_high
    assert zero.score_change == zero.score_change_low == zero.score_change_high == 0
    assert (psa.varies, mean.varies, psa.n_seeds) == ("items x noise seeds", "items", 2)


def test_too_few_values_give_no_number_rather_than_a_wrong_one(profile):
    nan = np.nan
    rows = made({"zero-shot": [[0.1, nan, nan]], "Mean": [[0.5, 0.5, nan]]}).assign(length=3.0)
    cell = cells_of(profile, rows, metrics=("score", "length")).set_index("method").loc["Mean"]
    assert (cell.n_items, cell.varies) == (1, "too few"), "of the score, though lengths are all there"
    assert np.isnan([cell.score, cell.score_low, cell.score_change, cell.score_change_high]).all()
    assert cell.length == 3
    shown = results.percent(pd.DataFrame([{"method": "Mean", **cell}]), "score")
    assert shown == ["–"]


def test_a_control_with_a_missing_draw_is_left_out():
    rows = made({"control": [[0.1, 0.2, 0.3], [0.3, np.nan, 0.5]], "Mean": [[1.0, 1.0, 1.0]]})
    table, base = results.paired(rows[rows.method == "Mean"], rows[rows.method == "control"], "score")
    np.testing.assert_allclose(base, [0.2, 0.4])
    assert table.shape == (2, 1)


def test_pooled_behaviours_share_their_item_numbers_but_not_their_items(profile):
    one = made({"zero-shot": [[0.0, 0.0]], "Mean": [[0.2, 0.4]]}, behaviour="refusal")
    two = made({"zero-shot": [[0.5, 0.5]], "Mean": [[0.5, 0.9]]}, behaviour="sycophancy")
    cell = cells_of(profile, pd.concat([one, two]), unit=("behaviour", "item")).set_index("method").loc["Mean"]
    assert (cell.n_items, cell.score_change) == (4, pytest.approx((0.2 + 0.4 + 0.0 + 0.4) / 4))


def test_groups_have_their_own_baseline(profile):
    one = made({"zero-shot": [[0.0, 0.0]], "Mean": [[0.2, 0.4]]}, behaviour="refusal")
    two = made({"zero-shot": [[0.5, 0.5]], "Mean": [[0.5, 0.9]]}, behaviour="sycophancy")
    cells = cells_of(profile, pd.concat([one, two]), within=("behaviour",)).set_index(["behaviour", "method"])
    assert cells.score_change.loc[:, "Mean"].tolist() == pytest.approx([0.3, 0.2])


def test_differences_at_other_blocks_are_kept_under_their_own_stage(profile, lm):
    elsewhere = dataclasses.replace(profile, layers=(4,))
    pairs = stages.items(profile, "refusal", "public")
    found = stages.differences(elsewhere, lm, "refusal", "public", "text", stage="04_ablations/blocks-4-4")
    np.testing.assert_allclose(found, activations.differences(lm, pairs, layers=[4]), atol=1e-5)
    assert stages.extracted(profile, "refusal", "text").public.shape[1] == 3, "notebook 01's are untouched"
    assert (stages.paths.results("smoke", "04_ablations") / "blocks-4-4" / "refusal-public-text.safetensors").exists()
