"""Notebook 04's comparison of estimators: what counts as public, what is kept, numbers by hand."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from psa_utils import ablations, accounting, activations, config, corpus, estimation, estimators, seeding, sweep_tables
from psa_utils import sweep_plots as plots
from psa_utils.config import BEHAVIOURS
from psa_utils.public import Public
from psa_utils.scoring import Variant
from psa_utils.vectors import SteeringVectors
from tests import reference
from tests.test_reports import item_rows, nowhere_nan


@pytest.fixture
def sweeps(smoke, tmp_path, monkeypatch) -> ablations.Sweeps:
    made = ablations.Sweeps.of(smoke.profile, 0, smoke.lm, "refusal")
    monkeypatch.setenv("PSA_OUT", str(tmp_path))
    return made


@pytest.fixture
def public(sweeps) -> Public:
    rng, shape = seeding.rng(0, "public"), sweeps.raw.private.shape[1:]
    return Public.of(sweeps.raw.public + rng.normal(0, 0.1, sweeps.raw.public.shape), rng.normal(0, 2, (20, *shape)))


def with_private(sweeps: ablations.Sweeps, private: np.ndarray) -> ablations.Sweeps:
    return dataclasses.replace(sweeps, raw=dataclasses.replace(sweeps.raw, private=private))


@pytest.mark.parametrize("form", corpus.FORMS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_rows_of_others_are_the_corpus_without_the_behaviour(behaviour, form):
    kept = [item for item, keep in zip(corpus.pairs(form), corpus.of_others(behaviour), strict=True) if keep]
    assert kept == corpus.pairs(form, [name for name in BEHAVIOURS if name != behaviour])


def test_corpus_differences_are_extracted_once_per_model_and_layers(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("PSA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(corpus, "STEP", 320)
    found = corpus.differences(llama, [1, 2])
    for form, differences in zip(corpus.FORMS, found, strict=True):
        items = corpus.pairs(form)
        assert differences.shape == (len(BEHAVIOURS), 2, llama.width)
        for i in (0, 6):
            expected = reference.difference(llama, items[i], [1, 2], "text")
            np.testing.assert_allclose(differences[i], expected, atol=1e-4)
    assert len(list((tmp_path / "public").iterdir())) == 1
    asked = []
    monkeypatch.setattr(
        activations, "differences", lambda _lm, items, *, layers: asked.append(layers) or np.concatenate(found)
    )
    for again, first in zip(corpus.differences(llama, [1, 2]), found, strict=True):
        np.testing.assert_array_equal(again, first)
    assert not asked
    corpus.differences(llama, [0, 1])
    assert asked == [[0, 1]]


def test_a_behaviours_own_pairs_are_public_only_where_the_private_ones_are_others(smoke):
    rng, n = seeding.rng(0, "corpus"), len(corpus.of_others("refusal"))
    sources = [rng.normal(size=(n, 2, 5)) for _ in corpus.FORMS]
    caa = dataclasses.replace(smoke.profile, data="caa")
    for behaviour in BEHAVIOURS:
        others = estimation.public_for(smoke.profile, sources, behaviour).sources
        for source, kept in zip(sources, others, strict=True):
            np.testing.assert_array_equal(kept, source[corpus.of_others(behaviour)])
            assert len(kept) == n * 6 // 7
        for source, kept in zip(sources, estimation.public_for(caa, sources, behaviour).sources, strict=True):
            np.testing.assert_array_equal(kept, source)


def test_compared_is_kept_and_computed_anew_for_other_data(sweeps, public, monkeypatch):
    calls, real = [], estimators.compare
    monkeypatch.setattr(estimators, "compare", lambda *a, **k: calls.append(0) or real(*a, **k))
    first = estimation.compared(sweeps.profile, sweeps, public)
    assert set(first.behaviour) == {"refusal"}
    assert len(first) == len(estimation.COMPARED) * len(estimation.EPSILONS) * sweeps.profile.few_seeds
    options = {"epsilons": (1.0,), "delta": 1e-5, "names": ("psa-exact", estimators.DEFAULT)}
    options["seeds"] = [seeding.derive_seed(0, "compare", "refusal", i) for i in (0, 1)]
    private = sweeps.raw.private
    expected = real(private, private.astype(float).mean(0), public, **options)
    chosen = first[(first.epsilon == 1.0) & first.estimator.isin(options["names"])]
    expected["seed"] = expected.seed.map({seed: i for i, seed in enumerate(options["seeds"])})
    pd.testing.assert_frame_equal(chosen.drop(columns="behaviour").reset_index(drop=True), expected)
    # What notebook 04 keeps of the steered estimators lies beside it, under another name.
    ablations.scored(sweeps, "estimators", list(estimation.variants(sweeps, public)))
    pd.testing.assert_frame_equal(estimation.compared(sweeps.profile, sweeps, public), first, check_exact=True)
    assert len(calls) == 1
    private = private.copy()
    private[3, 1, 0] += 1
    another = Public.of(public.nearest, 2 * public.sources[1])
    once = dataclasses.replace(sweeps.profile, few_seeds=1)
    for profile, data, known in (
        (sweeps.profile, with_private(sweeps, private), public),
        (sweeps.profile, sweeps, another),
        (once, sweeps, public),
        (sweeps.profile, dataclasses.replace(sweeps, seed=1), public),
        (sweeps.profile, dataclasses.replace(sweeps, behaviour="sycophancy"), public),
    ):
        before = len(calls)
        estimation.compared(profile, data, known)
        assert len(calls) == before + 1


def test_variants_are_the_estimates_at_the_public_strength(sweeps, public):
    variants = list(estimation.variants(sweeps, public))
    assert [v.labels["estimator"] for v in variants] == ["mean", *np.repeat(estimation.STEERED, 2)]
    for variant in variants:
        norms = np.linalg.norm(variant.vector.values.astype(float), axis=1)
        np.testing.assert_allclose(norms, np.linalg.norm(sweeps.raw.public.mean(0), axis=1), rtol=1e-5)
        assert variant.multiplier == sweeps.profile.multiplier
    mean = sweeps.raw.private.astype(float).mean(0)
    directions = [mean]
    for name in estimation.STEERED:
        for i in range(2):
            rng = seeding.rng(0, "estimators", name, "mini", "refusal", i)
            options = {"epsilon": 1.0, "delta": 1e-5, "public": public, "rng": rng}
            directions.append(estimators.estimate(name, sweeps.raw.private, **options))
    for variant, expected in zip(variants, directions, strict=True):
        values = variant.vector.values / np.linalg.norm(variant.vector.values, axis=1, keepdims=True)
        np.testing.assert_allclose(values, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)
    assert len({v.vector.digest() for v in variants}) == len(variants), "fresh noise in each"
    again = [v.vector.digest() for v in estimation.variants(sweeps, public)]
    assert again == [v.vector.digest() for v in variants]


def test_planned_cosine_is_the_formula_by_hand(sweeps):
    n, k, d = sweeps.raw.private.shape
    found = estimation.planned(sweeps, 0.7, [0.5, 4.0])
    for epsilon, cosine in zip((0.5, 4.0), found, strict=True):
        sigma = math.sqrt(k) * 2 / n / accounting.mu_for_epsilon(epsilon, 1e-5)
        assert cosine == pytest.approx(0.7 / math.sqrt(0.7**2 + d * sigma**2))


def test_planned_cosine_is_about_the_measured_one(sweeps):
    """Many wide pairs of one direction: signal 1, and the unit-norm mean is the plain one."""
    rng = seeding.rng(0, "wide")
    private = np.broadcast_to(rng.normal(size=(1, 3, 600)), (400, 3, 600))
    wide = with_private(sweeps, private)
    public = Public.of(rng.normal(size=(20, 3, 600)))
    options = {"epsilons": [0.5, 2.0], "delta": 1e-5, "seeds": range(5), "names": ["unit"]}
    measured = estimators.compare(private, private.mean(0), public, **options).groupby("epsilon").cosine.mean()
    np.testing.assert_allclose(estimation.planned(wide, 1.0, [0.5, 2.0]), measured, atol=0.02)


def test_shape_of_differences_that_are_known(sweeps):
    """Public: the first 64 of 80 axes. Private: mean directions at cosine 0.6, one partly outside, norm cos(t)."""
    axes = np.zeros((200, 2, 80))
    axes[..., :64] = seeding.rng(0, "axes").normal(size=(200, 2, 64))
    mean, across = np.zeros((2, 80)), np.zeros((2, 80))
    mean[0, 0], mean[1, [0, 70]] = 1, (0.6, 0.8)
    across[:, 1] = 1
    turn = 0.4
    signs = np.array([1, -1] * 5)[:, None, None]
    lengths = np.arange(1, 11)[:, None, None]
    private = lengths * (math.cos(turn) * mean + math.sin(turn) * signs * across)
    found = estimation.shape_of(with_private(sweeps, private), Public.of(axes))
    assert found["behaviour"] == "refusal"
    assert found["layer_cosine"] == pytest.approx(0.6)
    assert found["signal"] == pytest.approx(math.cos(turn))
    assert found["energy"] == pytest.approx((1 + 0.6**2) / 2)
    alone = estimation.shape_of(with_private(sweeps, private[:, 1:]), Public.of(axes[:, 1:]))
    assert (alone["layer_cosine"], alone["energy"]) == (1.0, pytest.approx(0.36))


def test_fluency_costs_nothing_without_a_push_and_is_kept_by_vector(sweeps, smoke, monkeypatch):
    monkeypatch.setattr(ablations.calibrate, "ordinary_text", lambda: ["Tea is ready.", "The lake lies still today."])
    layers, values = sweeps.profile.layers, sweeps.raw.private.mean(0)
    pushed, zero = SteeringVectors(layers, values), SteeringVectors(layers, np.zeros_like(values))
    variants = [Variant(zero, 1.0, {"what": "zero"}), Variant(pushed, 0.0, {"what": "off"})]
    variants += [Variant(pushed, 1.0, {"what": "on"})]
    costs = ablations.fluency(sweeps, "try", variants)
    assert costs.what.tolist() == ["zero", "off", "on"]
    assert costs.loss[:2].abs().max() < 1e-6 < 1e-3 < abs(costs.loss[2])
    turned = [*variants[:2], Variant(pushed.scaled(-1), 1.0, {"what": "on"})]
    other = ablations.fluency(sweeps, "try", turned)
    assert other.loss[2] != costs.loss[2]


@pytest.fixture
def cosines() -> pd.DataFrame:
    """Every estimator of the figure and one more, two behaviours, two seeds; all cosines different."""
    settings = [
        (name, epsilon, seed, behaviour)
        for name in (*plots.SHOWN, "prior")
        for epsilon in (0.5, 1.0)
        for seed in (0, 1)
        for behaviour in ("refusal", "sycophancy")
    ]
    table = pd.DataFrame(settings, columns=["estimator", "epsilon", "seed", "behaviour"])
    return table.assign(cosine=seeding.rng(0, "cosines").uniform(0.1, 0.9, len(table)))


@pytest.fixture
def scored() -> pd.DataFrame:
    """Item rows of the steered estimators over two behaviours of unequal size, whose items share their numbers."""
    rng, frames = seeding.rng(0, "scored"), []
    for behaviour, n in (("refusal", 4), ("sycophancy", 6)):
        frames.append(item_rows(behaviour, "zero-shot", rng.uniform(size=n), estimator="zero-shot"))
        frames.append(item_rows(behaviour, "Mean", rng.uniform(size=n), estimator="mean"))
        for name in estimation.STEERED:
            frames += [
                item_rows(behaviour, "PSA", rng.uniform(size=n), estimator=name, noise_seed=seed) for seed in (0, 1)
            ]
    return pd.concat(frames, ignore_index=True)


PROFILE = config.load_profile("smoke", behaviours=("refusal", "sycophancy"))


def test_pooled_averages_all_behaviours_items_alike(scored):
    found = sweep_tables.pooled(PROFILE, 0, scored, ("estimator", "method")).set_index("estimator")
    means = scored.groupby("estimator").probability.mean()
    for name in ("mean", *estimation.STEERED):
        row = found.loc[name]
        assert row.probability == pytest.approx(means[name])
        assert row.probability_change == pytest.approx(means[name] - means["zero-shot"])
        assert row.probability_change_low < row.probability_change < row.probability_change_high
        assert (row.n_items, row.n_seeds) == (10, 1 if name == "mean" else 2)
    by_behaviour = sweep_tables.pooled(PROFILE, 0, scored, ("estimator", "method"), within=("behaviour",))
    row = by_behaviour.query("behaviour == 'sycophancy' and estimator == 'psa-exact'").iloc[0]
    own = scored[scored.behaviour == "sycophancy"].groupby("estimator").probability.mean()
    assert (row.n_items, row.probability_change) == (6, pytest.approx(own["psa-exact"] - own["zero-shot"]))


def test_estimators_table_is_group_means_and_the_effect_where_it_was_measured(cosines, scored):
    names = ["mean", *estimation.STEERED] * 2
    costs = pd.DataFrame({"estimator": names, "loss": np.arange(8) / 4})
    numbers, printed = sweep_tables.estimators(PROFILE, 0, cosines, scored, costs)
    nowhere_nan(printed)
    assert printed.estimator.tolist() == ["mean, not private", *plots.SHOWN, "prior"]
    price = printed.set_index("estimator")["cost, ε = 1 (nats per token)"]
    assert price.loc[["mean, not private", *estimation.STEERED]].tolist() == ["0.50", "0.75", "1.00", "1.25"]
    assert price["dp-jl"] == "–"
    probability = scored.groupby("estimator").probability.mean()
    for row in numbers[numbers.estimator != "mean"].itertuples():
        own = cosines[(cosines.estimator == row.estimator) & (cosines.epsilon == row.epsilon)]
        averages = [own[own.behaviour == b].cosine.mean() for b in ("refusal", "sycophancy")]
        assert (row.mean, row.min) == (pytest.approx(np.mean(averages)), pytest.approx(min(averages)))
        steered = row.estimator in estimation.STEERED and row.epsilon == estimation.STEERED_EPSILON
        effect = probability[row.estimator] - probability["zero-shot"] if steered else math.nan
        assert row.probability_change == pytest.approx(effect, nan_ok=True)
        line = printed[printed.estimator == row.estimator].iloc[0]
        assert line[f"cosine, ε = {row.epsilon:g}"] == f"{row.mean:.2f}"
        if row.epsilon == 1.0:
            assert line["worst behaviour, ε = 1"] == f"{row.min:.2f}"
            shown = line["change, ε = 1 (points)"]
            assert shown.startswith(f"{100 * effect:+.1f} [") if steered else shown == "–"
    assert len(numbers) == 2 * (7 + 1)


def test_estimators_figure_has_a_line_per_estimator_from_worst_to_best_behaviour(cosines):
    figure = plots.estimators(cosines)
    (ax,) = figure.axes
    means = cosines.groupby(["estimator", "epsilon", "behaviour"]).cosine.mean().unstack()
    for name, bars in zip(plots.SHOWN, ax.containers, strict=True):
        line, _, (stems,) = bars
        np.testing.assert_allclose(np.asarray(line.get_ydata(), float), means.loc[name].mean(axis=1))
        np.testing.assert_allclose(np.asarray(line.get_xdata(), float), [0.5, 1.0], rtol=0.1)
        ends = np.array([segment[:, 1] for segment in stems.get_segments()])
        own = means.loc[name].to_numpy()
        np.testing.assert_allclose(ends.astype(float), np.stack([own.min(axis=1), own.max(axis=1)], axis=1))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.5", "1"]
    figure.canvas.draw()
    plt.close(figure)
