"""Tables and figures of notebooks 03 and 04: numbers by hand, and nothing printed that is not meant."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from scipy import stats as sps

from psa_utils import (
    ablations,
    accounting,
    config,
    reports,
    results,
    scoring,
    stages,
    sweep_plots,
    sweep_tables,
    tables,
)

METHODS = ("zero-shot", "Mean", "PSA")


def nowhere_nan(printed: pd.DataFrame) -> None:
    """Cells are strings, and none of them is a missing value that leaked into print."""
    for cell in printed.to_numpy().ravel():
        assert isinstance(cell, str), cell
        assert "nan" not in cell.lower().split("–")[0], printed
        assert cell not in ("None", "<NA>", "")


@pytest.fixture
def scored(smoke):
    profile = smoke.profile
    return pd.concat([scoring.alignment(profile, smoke.lm, b, "text") for b in profile.behaviours], ignore_index=True)


def item_rows(behaviour: str, method: str, values: list[float], **labels) -> pd.DataFrame:
    recipe = "none" if method == "zero-shot" else "matched"
    labels = {"multiplier": 0.0 if method == "zero-shot" else 1.0, "noise_seed": -1, "recipe": recipe, **labels}
    return pd.DataFrame(
        {"behaviour": behaviour, "method": method, "item": range(len(values)), "probability": values} | labels
    )


def test_comparisons_are_paired_t_tests_corrected_over_the_whole_table():
    rng = np.random.default_rng(0)
    profile = config.load_profile("laptop", behaviours=("refusal", "sycophancy"))
    base = rng.uniform(0.3, 0.7, 40)
    frames, expected = [], []
    for behaviour, shift in (("refusal", 0.05), ("sycophancy", 0.003)):
        mean = base + shift + rng.normal(0, 0.03, 40)
        psa = np.stack([base + shift / 2 + rng.normal(0, 0.05, 40) for _ in range(3)])
        frames += [item_rows(behaviour, "zero-shot", base), item_rows(behaviour, "Mean", mean)]
        frames += [item_rows(behaviour, "PSA", draw, noise_seed=s) for s, draw in enumerate(psa)]
        decoys = {"recipe": "paper"}, {"multiplier": -1.0}
        frames += [item_rows(behaviour, "Mean", mean + 0.3, **decoy) for decoy in decoys]
        frames += [item_rows(behaviour, "PSA", mean + 0.3, noise_seed=0, **decoy) for decoy in decoys]
        expected += [(mean, base), (psa.mean(0), base), (psa.mean(0), mean)]
    numbers, printed = reports.comparisons(profile, pd.concat(frames))
    p = [sps.ttest_rel(*pair).pvalue for pair in expected]
    np.testing.assert_allclose(numbers.p, p)
    np.testing.assert_allclose(numbers.difference, [(a - b).mean() for a, b in expected])
    by_hand = [min(1, max((6 - sorted(p).index(q)) * q for q in p if q <= own)) for own in p]
    np.testing.assert_allclose(numbers.p_holm, by_hand)
    stars = [text.endswith("*") for text in printed["p, Holm"]]
    assert stars == [q < 0.05 for q in by_hand]
    assert 0 < sum(stars) < 6
    assert printed.comparison.tolist() == ["Mean − zero-shot", "PSA − zero-shot", "PSA − Mean"] * 2
    assert numbers.n_items.tolist() == [40] * 6
    nowhere_nan(printed)


def test_recipes_show_norms_cosines_and_changes(smoke, scored):
    summed = results.summary(smoke.profile, 0, scored)
    numbers, printed = reports.recipes(smoke.profile, summed)
    assert len(numbers) == 2 * 2 * 3, "behaviours, recipes, methods"
    vectors = stages.load_vectors(smoke.profile, "refusal", "text", recipe="paper")
    row = numbers.query("behaviour == 'refusal' and recipe == 'paper' and method == 'PSA'").iloc[0]
    norms = [math.dist(layer, np.zeros(32)) for vector in vectors[2:] for layer in vector.values]
    assert row.norm == pytest.approx(np.mean(norms), rel=1e-5)
    asked = scored.item < smoke.profile.few_items
    pick = asked & (scored.behaviour == "refusal") & scored.recipe.isin(["paper", "none"]) & (scored.multiplier >= 0)
    means = scored[pick].groupby("method").probability.mean()
    assert row.probability_change == pytest.approx(means["PSA"] - means["zero-shot"])
    matched = numbers[numbers.recipe == "matched"]
    assert matched.groupby("behaviour").norm.agg(np.ptp).max() < 1e-4
    np.testing.assert_allclose(numbers[numbers.method == "Mean"].cosine, 1, atol=1e-5)
    nowhere_nan(printed)


@pytest.fixture
def noise(smoke):
    return swept(smoke, "noise")


def swept(smoke, name: str) -> pd.DataFrame:
    frames = []
    for behaviour in smoke.profile.behaviours:
        sweeps = ablations.Sweeps.of(smoke.profile, 0, smoke.lm, behaviour)
        frames.append(ablations.scored(sweeps, name, list(getattr(sweeps, name)())))
    return pd.concat(frames, ignore_index=True)


def test_sweep_pools_behaviours_and_prints_the_papers_numbers_beside(smoke, noise):
    paper = results.printed_by_paper("T17 noise")
    paper.index = [float(text.removeprefix("sigma=")) for text in paper.setting]
    numbers, printed = sweep_tables.sweep(smoke.profile, 0, noise, ("recipe", "sigma"), paper)
    assert len(printed) == 1 + 2 * len(ablations.SIGMAS)
    nowhere_nan(printed)
    pooled = numbers[numbers.behaviour == "all"].query("recipe == 'paper' and sigma == 0.02").iloc[0]
    zero = noise[noise.method == "zero-shot"].probability.mean()
    chosen = noise[(noise.recipe == "paper") & (noise.sigma == 0.02)].probability.mean()
    assert pooled.probability_change == pytest.approx(chosen - zero)
    assert (pooled.n_items, pooled.n_seeds) == (6, 2), "three items of two behaviours"
    line = printed[(printed.recipe == "matched") & (printed.sigma == "0.02")].iloc[0]
    own = noise[(noise.recipe == "matched") & (noise.sigma == 0.02) & (noise.behaviour == "refusal")]
    assert line.refusal == f"{100 * own.probability.mean():.1f} ({paper.loc[0.02, 'refusal']:.1f})"
    first = printed.iloc[0]
    assert (first.recipe, first.sigma, first.method, first["change, all (points)"]) == ("none", "–", "zero-shot", "–")
    assert "(" not in printed[printed.sigma == "0.005"].refusal.iloc[0], "the paper printed no such sigma"


def test_noise_figure_has_a_point_per_sigma_and_recipe(smoke, noise):
    numbers, _ = sweep_tables.sweep(smoke.profile, 0, noise, ("recipe", "sigma"))
    pooled, epsilons = numbers[numbers.behaviour == "all"], sweep_tables.epsilons(smoke.profile, 100)
    figure = sweep_plots.noise(pooled, epsilons)
    for ax, recipe in zip(figure.axes, config.RECIPES, strict=True):
        (bars,) = ax.containers
        rows = pooled[(pooled.recipe == recipe) & (pooled.method == "PSA")].sort_values("sigma")
        np.testing.assert_allclose(bars[0].get_ydata(), 100 * rows.probability_change)
        labels = [label.get_text().split("\n")[0] for label in ax.get_xticklabels()]
        assert labels == [f"{sigma:g}" for sigma in ablations.SIGMAS]
    figure.canvas.draw()
    plt.close(figure)


def test_clip_figure_and_tables_show_every_clip(smoke):
    clip = swept(smoke, "clip")
    clip["clip"] = clip["clip"].fillna("–").astype(str)
    names = list(ablations.Sweeps.of(smoke.profile, 0, smoke.lm, "refusal").clips())
    pooled = sweep_tables.pooled(smoke.profile, 0, clip, ("recipe", "clip", "sigma", "method"))
    figure = sweep_plots.clip(pooled, names)
    for ax, recipe in zip(figure.axes, config.RECIPES, strict=True):
        without, noisy = ax.containers
        rows = pooled[(pooled.recipe == recipe) & (pooled.method == "PSA")].set_index(["sigma", "clip"])
        for bars, sigma in ((without, 0.0), (noisy, 0.02)):
            expected = 100 * rows.probability_change.loc[sigma].loc[names]
            np.testing.assert_allclose(bars[0].get_ydata(), expected)
    figure.canvas.draw()
    plt.close(figure)
    paper = sweep_tables.paper_clips("T19 clip at sigma=0")
    assert paper.index.tolist() == ["10", "15", "20", "25"]
    _, printed = sweep_tables.sweep(smoke.profile, 0, clip[~(clip.sigma > 0)], ("recipe", "clip"), paper)
    nowhere_nan(printed)
    assert len(printed) == 1 + 2 * (1 + len(names))


def test_strength_figure_has_a_point_per_multiplier_and_method():
    multipliers = [0.25, 0.5, 0.75, 1.0]
    rows = [
        {"method": m, "multiplier": x, "loss": x**2, "probability_change": 0.1 * x}
        for m in METHODS[1:]
        for x in multipliers
    ]
    cells = pd.DataFrame(rows)
    cells = cells.assign(probability_change_low=cells.probability_change - 0.01, probability_change_high=1.0)
    figure = sweep_plots.strength(cells)
    for bars in figure.axes[0].containers:
        np.testing.assert_allclose(bars[0].get_xdata(), np.square(multipliers))
        np.testing.assert_allclose(bars[0].get_ydata(), 10 * np.array(multipliers))
    assert len(figure.axes[0].containers) == 2
    assert [t.get_text() for t in figure.axes[0].texts] == ["0.25", "0.5", "0.75", "1"] * 2
    figure.canvas.draw()
    plt.close(figure)


def test_epsilons_are_the_papers_formula_and_exact_values():
    profile = config.load_profile("laptop")
    table = sweep_tables.epsilons(profile, 1000).set_index("sigma")
    assert table.index.tolist() == list(ablations.SIGMAS)
    assert table.loc[0.0].isna().all()
    for sigma, row in table.iloc[1:].iterrows():
        assert row.epsilon_paper == pytest.approx(5 * 2 * math.sqrt(2 * math.log(1.25 * 5000)) / (1000 * sigma))
        mu = math.sqrt(5) * 2 / (1000 * sigma)
        assert accounting.gaussian_delta(mu, row.epsilon_exact) == pytest.approx(1e-3)
        assert accounting.gaussian_delta(mu, row["epsilon_1e-5"]) == pytest.approx(1e-5)
    assert (table.iloc[1:].diff().dropna() < 0).all(axis=None), "more noise, less epsilon"


def test_knowledge_counts_right_answers_and_their_paired_change(smoke):
    known = scoring.knowledge_kept(smoke.profile, smoke.lm, "general-knowledge", 0)
    numbers, printed = reports.knowledge(smoke.profile, 0, known)
    assert len(printed) == 1 + 2 * 2 * 3, "zero-shot once; behaviours, signs, methods"
    nowhere_nan(printed)
    row = numbers.query("behaviour == 'refusal' and sign == -1 and method == 'PSA'").iloc[0]
    own = known.query("behaviour == 'refusal' and multiplier < 0 and method == 'PSA'")
    zero = known[known.method == "zero-shot"]
    assert row.accuracy == pytest.approx(own.accuracy.mean())
    assert row.probability_change == pytest.approx(own.probability.mean() - zero.probability.mean())
    shown = printed.set_index(["vector of", "method"])["paper, MMLU, Llama-2 7B"]
    assert (shown["refusal", "+Mean"], shown["–", "zero-shot"], shown["refusal", "−Mean"]) == ("59.5", "63.6", "–")


@pytest.fixture
def judged():
    """Two behaviours; the judge has nothing usable to say of refusal's PCA answers, which are empty."""
    rng, rows = np.random.default_rng(0), []
    for behaviour in ("refusal", "sycophancy"):
        for method, sign, seed in (("zero-shot", 0, -1), *((m, s, -1) for m in ("PCA", "Mean") for s in (1, -1))):
            mute = (behaviour, method) == ("refusal", "PCA")
            for item in range(4):
                score = {"score": np.nan if mute or (method, item) == ("Mean", 3) else rng.uniform(0, 10)}
                text = {
                    name: np.nan if mute else rng.uniform() for name in ("logp_per_token", "distinct_2", "repetition")
                }
                labels = {"behaviour": behaviour, "method": method, "multiplier": 0.5 * sign, "noise_seed": seed}
                rows.append({**labels, "item": item, **score, **text, "length": 0 if mute else 5})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("sign", [1, -1])
def test_open_ended_scores_leave_out_what_was_not_judged(judged, sign):
    profile = config.load_profile("laptop", behaviours=("refusal", "sycophancy"))
    numbers, printed = reports.open_ended(profile, 0, judged, sign, "a judge")
    nowhere_nan(printed)
    assert len(numbers) == 2 * 3
    at = judged.set_index(["behaviour", "method", "multiplier", "item"]).score.sort_index()
    row = numbers.set_index(["behaviour", "method"]).loc["sycophancy", "Mean"]
    treated, zero = at["sycophancy", "Mean", 0.5 * sign][:3], at["sycophancy", "zero-shot", 0.0][:3]
    assert row.score == pytest.approx(treated.mean())
    assert row.score_change == pytest.approx((treated - zero).mean())
    assert (row.n_items, row.judge) == (3, "a judge")
    mute = printed.set_index(["behaviour", "method"]).loc["refusal", "PCA"]
    assert (mute.score, mute.change, mute["log p per token"], mute.tokens) == ("–", "–", "–", "0")
    print_of = {1: "4.04", -1: "–"}[sign]
    paper = results.printed_by_paper("T3 GPT-4 score 0-10" if sign > 0 else "T21 GPT-4 score 0-10").set_index("method")
    for line in printed.itertuples(index=False):
        known = line.method in paper.index
        assert line[-1] == (f"{paper.loc[line.method, line.behaviour]:.2f}" if known else "–"), print_of


def test_examples_are_one_answer_of_every_method_on_one_line():
    rows = [
        {
            "behaviour": "refusal",
            "question": "Why?",
            "method": m,
            "multiplier": x,
            "noise_seed": s,
            "item": i,
            "answer": f"{m} {x} {s}\n{i}",
        }
        for m, x, s in (
            ("zero-shot", 0.0, -1),
            ("PCA", 1.0, -1),
            ("Mean", 1.0, -1),
            ("Mean", -1.0, -1),
            ("PSA", 1.0, 0),
            ("PSA", 1.0, 1),
        )
        for i in (0, 1)
    ]
    numbers, printed = reports.examples(pd.DataFrame(rows), item=1, words=3)
    assert printed.answer.tolist() == ["zero-shot 0.0 -1 …", "Mean 1.0 -1 …", "PSA 1.0 0 …"]
    assert numbers.answer.tolist()[2] == "PSA 1.0 0\n1", "the CSV has it whole"


HOSTILE = "a|b $x$ {y} ~ \\ 50% #1 & _ ^ <s>\n\n− ε δ σ ∞"


def test_latex_cells_hold_only_what_latex_prints_as_it_stands():
    text = tables.latex(pd.DataFrame({"behaviour": [HOSTILE], "b": ["x"]}), "caption with 5 % and {")
    (row,) = [line for line in text.split("\n") if line.startswith("a")]
    assert row == (
        r"a\textbar{}b \$x\$ \{y\} \~{} \textbackslash{} 50\% \#1 \& \_ \^{} \textless{}s\textgreater{}"
        r"  $-$ $\varepsilon$ $\delta$ $\sigma$ $\infty$ & x \\"
    )
    assert r"\caption{caption with 5 \% and \{}" in text
    unescaped = row.replace(r"\{", "").replace(r"\}", "")
    assert unescaped.count("{") == unescaped.count("}")
    assert row.replace(r"\&", "").count("&") == 1, "two columns"


def test_markdown_cells_stay_in_their_cell():
    lines = tables.markdown(pd.DataFrame({"behaviour": ["one"], "text": [HOSTILE]})).split("\n")
    assert len(lines) == 3
    assert [line.replace(r"\|", "").count("|") for line in lines] == [3, 3, 3]


def test_a_change_of_main_recipe_compares_that_recipe(smoke, scored):
    changes = {}
    for recipe in config.RECIPES:
        profile = dataclasses.replace(smoke.profile, recipe=recipe)
        numbers, _ = reports.comparisons(profile, scored)
        changes[recipe] = numbers.query("behaviour == 'refusal' and treated == 'Mean'").difference.item()
        own = scored[(scored.behaviour == "refusal") & (scored.multiplier >= 0)]
        own = own if recipe == smoke.profile.recipe else own[own.item < smoke.profile.few_items]
        means = own[own.recipe.isin([recipe, "none"])].groupby("method").probability.mean()
        assert changes[recipe] == pytest.approx(means["Mean"] - means["zero-shot"])
    assert changes["matched"] != changes["paper"]
