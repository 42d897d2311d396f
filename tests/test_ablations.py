"""Every variant of a sweep against the mechanism written out by hand."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from psa_utils import ablations, accounting, activations, config, evaluate, seeding, stages, steering
from tests import reference


@pytest.fixture
def sweeps(smoke):
    return ablations.Sweeps.of(smoke.profile, 0, smoke.lm, "refusal")


def by_label(variants, **wanted):
    return [v for v in variants if all(v.labels.get(name) == value for name, value in wanted.items())]


def clipped(private: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Algorithm 1, lines 4 to 6, in loops."""
    n, k, d = private.shape
    total = np.zeros((k, d))
    for i in range(n):
        for layer in range(k):
            row = private[i, layer].astype(float)
            total[layer] += row / max(bound[layer], np.sqrt(row @ row))
    return total / n


def drawn(seed: int, shape: tuple[int, int]) -> np.ndarray:
    return seeding.rng(0, "psa", "mini", "refusal", "text", seed).standard_normal(shape)


def assert_direction(values: np.ndarray, expected: np.ndarray) -> None:
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (values, expected)]
    np.testing.assert_allclose(*unit, atol=1e-5)


def test_noise_is_the_clipped_mean_plus_sigma_times_one_and_the_same_draw(sweeps):
    raw, variants = sweeps.raw, list(sweeps.noise())
    signal = clipped(raw.private, raw.clip)
    for sigma in ablations.SIGMAS:
        for seed in range(2) if sigma else (-1,):
            values = signal + (sigma * drawn(seed, signal.shape) if sigma else 0)
            (paper,) = by_label(variants, recipe="paper", sigma=sigma, noise_seed=seed)
            np.testing.assert_allclose(paper.vector.values, values * raw.clip.mean(), rtol=1e-4, atol=1e-6)
            (matched,) = by_label(variants, recipe="matched", sigma=sigma, noise_seed=seed)
            assert_direction(matched.vector.values, values)
    assert len(variants) == 2 * (1 + 2 * 6), "recipes, noiseless once, six sigmas of two draws"


def test_noise_at_the_profiles_sigma_is_the_vector_of_notebook_02(sweeps, smoke):
    for recipe in config.RECIPES:
        kept = stages.load_vectors(smoke.profile, "refusal", "text", recipe=recipe)
        swept = by_label(sweeps.noise(), recipe=recipe, sigma=smoke.profile.sigma)
        for variant, vector in zip(swept, kept[2:], strict=True):
            np.testing.assert_array_equal(variant.vector.values, vector.values)


def test_labels_tell_norm_and_cosine_of_what_is_added(sweeps):
    mean = sweeps.raw.private.astype(float).mean(0)
    for variant in (*sweeps.noise(), *sweeps.clip(), *sweeps.strength()):
        values = variant.vector.values.astype(float)
        norms = np.linalg.norm(values, axis=1)
        cosines = (values * mean).sum(1) / norms / np.linalg.norm(mean, axis=1)
        assert variant.labels["norm"] == pytest.approx(variant.multiplier * norms.mean(), rel=1e-5)
        assert variant.labels["cosine"] == pytest.approx(cosines.mean(), abs=1e-5)
        if variant.labels["recipe"] == "matched":
            np.testing.assert_allclose(norms, np.linalg.norm(sweeps.raw.public.mean(0), axis=1), rtol=1e-5)


def test_clip_sweep_clips_at_every_bound_with_and_without_noise(sweeps):
    raw, variants = sweeps.raw, list(sweeps.clip())
    public = np.linalg.norm(raw.public, axis=2)
    bounds = {"0.5": np.full(3, 0.5), "1": np.full(3, 1.0)}
    bounds |= {f"quantile {q:g}": np.quantile(public, q, axis=0) for q in (0.1, 0.5, 0.9)}
    assert set(bounds) == set(sweeps.clips())
    for name, bound in bounds.items():
        signal = clipped(raw.private, bound)
        (noiseless,) = by_label(variants, clip=name, recipe="paper", sigma=0.0)
        np.testing.assert_allclose(noiseless.vector.values, signal * raw.clip.mean(), rtol=1e-4, atol=1e-6)
        noisy = by_label(variants, clip=name, recipe="paper", sigma=sweeps.profile.sigma)
        for seed, variant in enumerate(noisy):
            values = signal + sweeps.profile.sigma * drawn(seed, signal.shape)
            np.testing.assert_allclose(variant.vector.values, values * raw.clip.mean(), rtol=1e-4, atol=1e-6)
        assert len(noisy) == 2
    assert len(variants) == 2 * (1 + 5 * 3)


def test_the_unclipped_mean_stands_beside_the_clips(sweeps):
    raw = sweeps.raw
    matched, paper = by_label(sweeps.clip(), method="Mean")
    mean = raw.private.astype(float).mean(0)
    assert_direction(matched.vector.values, mean)
    np.testing.assert_allclose(paper.vector.values, mean / raw.clip[:, None] * raw.clip.mean(), rtol=1e-4, atol=1e-6)
    assert {matched.labels["clip"], paper.labels["clip"]} == {"none"}
    assert matched.labels["cosine"] == pytest.approx(1)


def test_strength_changes_the_multiplier_only(sweeps):
    variants = list(sweeps.strength())
    for method in ("Mean", "PSA"):
        chosen = by_label(variants, method=method)
        assert [v.multiplier for v in chosen] == [v.labels["multiplier"] for v in chosen] == [0.25, 0.5, 0.75, 1.0]
        assert len({v.vector.digest() for v in chosen}) == 1
    vectors = stages.load_vectors(sweeps.profile, "refusal", "text", recipe="matched")
    np.testing.assert_array_equal(by_label(variants, method="PSA")[0].vector.values, vectors[2].values)


def test_scored_asks_the_first_items_and_adds_zero_shot(sweeps, smoke):
    (variant,) = by_label(sweeps.strength(), method="Mean", multiplier=0.5)
    kept = ablations.scored(sweeps, "try", [variant])
    assert kept.method.tolist() == ["zero-shot"] * 3 + ["Mean"] * 3, "n_sweep items"
    assert set(kept.behaviour) == {"refusal"}
    items = stages.items(smoke.profile, "refusal", "test")[:3]
    with steering.apply(smoke.lm, variant.vector, multiplier=0.5):
        plain = [reference.log_probability(smoke.lm, item, item.matching, "text") for item in items]
    np.testing.assert_allclose(kept.logp_matching[3:], plain, rtol=1e-4, atol=1e-3)


@pytest.fixture
def one_block(smoke):
    """Sweeps of a profile that steers block 2 alone: its windows include blocks that were not extracted before."""
    profile = dataclasses.replace(smoke.profile, layers=(2,), few_seeds=1)
    raw = smoke.raw()
    middle = stages.Extracted.of(profile, raw.private[:, 1:2], raw.public[:, 1:2])
    return dataclasses.replace(ablations.Sweeps.of(smoke.profile, 0, smoke.lm, "refusal"), profile=profile, raw=middle)


def test_windows_cost_the_same_privacy_and_push_as_hard(one_block, smoke):
    layers = ablations.windows(one_block.profile, 6)
    assert layers == {"1": (2,), "3": (1, 2, 3), "1 earlier": (0,), "1 later": (4,)}
    n = len(one_block.raw.private)
    mu = accounting.gdp_mu(n=n, sigma=one_block.profile.sigma, layers=1)
    for chosen in layers.values():
        there = ablations._at(one_block, chosen, ablations._by_block(one_block, chosen)).profile
        assert there.layers == chosen
        assert accounting.gdp_mu(n=n, sigma=there.sigma, layers=len(chosen)) == pytest.approx(mu)
        assert there.multiplier * len(chosen) == pytest.approx(one_block.profile.multiplier)


@pytest.mark.parametrize("chosen", [(4,), (1, 2, 3)])
def test_windows_read_their_own_blocks(one_block, smoke, chosen):
    there = ablations._at(one_block, chosen, ablations._by_block(one_block, chosen))
    for side, split in (("private", "train"), ("public", "public")):
        pairs = stages.items(smoke.profile, "refusal", split)
        plain = activations.differences(smoke.lm, pairs, layers=chosen)
        np.testing.assert_allclose(getattr(there.raw, side), plain, atol=1e-4, rtol=1e-4)
    mean, psa = there.mean_and_psa(window="here")
    assert mean.vector.layers == psa.vector.layers == chosen
    signal = clipped(there.raw.private, np.median(np.linalg.norm(there.raw.public, axis=2), axis=0))
    sigma = 0.02 * np.sqrt(len(chosen))
    assert_direction(psa.vector.values, signal + sigma * drawn(0, signal.shape))


def test_blocks_already_extracted_are_not_extracted_again(sweeps, smoke, monkeypatch):
    monkeypatch.setattr(activations, "differences", lambda *a, **k: pytest.fail("extracted again"))
    there = ablations._at(sweeps, (2,), ablations._by_block(sweeps, (2,)))
    np.testing.assert_array_equal(there.raw.private, sweeps.raw.private[:, 1:2])
    np.testing.assert_array_equal(there.raw.public, sweeps.raw.public[:, 1:2])
    np.testing.assert_allclose(there.raw.clip, sweeps.raw.clip[1:2])


def test_layers_scores_every_window_with_a_zero_shot_of_its_own(one_block, smoke):
    found = ablations.layers(one_block)
    assert found.groupby("window", sort=False).blocks.first().to_dict() == {
        "1": "2-2",
        "3": "1-3",
        "1 earlier": "0-0",
        "1 later": "4-4",
    }
    assert (found.groupby("window").method.value_counts() == 3).all(), "zero-shot, Mean, one PSA draw; 3 items"
    zero = found[found.method == "zero-shot"]
    assert np.ptp(zero.pivot(index="item", columns="window", values="probability"), axis=1).max() < 1e-5
    assert found[found.method == "Mean"].groupby("window").probability.mean().nunique() == 4


@pytest.mark.parametrize("profile", ["laptop", "paper-llama2", "paper-qwen2.5-0.5b"])
def test_windows_lie_in_the_model_and_differ(profile):
    profile = config.load_profile(profile)
    found = ablations.windows(profile, 24)
    assert profile.layers in found.values()
    assert len(set(found.values())) == len(found)
    assert all(w[0] >= 0 and w[-1] < 24 and w == tuple(range(w[0], w[-1] + 1)) for w in found.values())
    assert not set(found["5 earlier"]) & set(profile.layers)


def test_fluency_is_what_a_text_loses_per_token(sweeps, smoke):
    variants = by_label(sweeps.strength(), method="PSA")[::3]
    costs = ablations.fluency(sweeps, "try", variants)
    text = ablations.calibrate.ordinary_text()[::2]
    plain = evaluate.TextScorer(smoke.lm, text).score().mean()
    for variant, row in zip(variants, costs.itertuples(), strict=True):
        with steering.apply(smoke.lm, variant.vector, multiplier=variant.multiplier):
            steered = evaluate.TextScorer(smoke.lm, text).score().mean()
        assert row.loss == pytest.approx(plain - steered, abs=1e-4)
        assert row.multiplier == variant.multiplier
    assert abs(costs.loss).min() > 1e-3, "the vector does something"
    pd.testing.assert_frame_equal(ablations.fluency(sweeps, "try", variants), costs)
