"""Two models at one privacy setting."""

import dataclasses

import numpy as np
import pytest
from matplotlib import pyplot as plt

from psa_utils import (
    accounting,
    activations,
    config,
    evaluate,
    results,
    scaling,
    scoring,
    stages,
    steering,
    sweep_plots,
)
from tests import reference


@pytest.fixture
def compared(smoke):
    own = scoring.alignment(smoke.profile, smoke.lm, "refusal", "text")
    letters = scoring.alignment(smoke.profile, smoke.lm, "refusal", "letter")
    return scaling.compared(one(smoke), 0, smoke.lm, scaling.pd.concat([own, letters]))


def one(smoke) -> config.Profile:
    return dataclasses.replace(smoke.profile, behaviours=("refusal",))


@pytest.mark.parametrize("layers", [(3,), (1, 2), (0, 2, 3, 4, 5)])
@pytest.mark.parametrize("seeds", [1, 4])
def test_another_model_gets_the_same_data_and_mu(layers, seeds):
    profile = config.load_profile("laptop", noise_seeds=seeds, few_seeds=1, n_train=30, behaviours=("refusal",))
    other = scaling.like(config.load_profile("smoke", layers=layers, multiplier=0.3), profile)
    mus = [accounting.gdp_mu(n=30, sigma=p.sigma, layers=len(p.layers)) for p in (profile, other)]
    assert mus[0] == pytest.approx(mus[1])
    assert (other.model, other.layers, other.multiplier) == ("tiny-random", layers, 0.3)
    for name in ("behaviours", "data", "n_train", "n_test", "noise_seeds", "formats", "recipe", "clip_quantile"):
        assert getattr(other, name) == getattr(profile, name)
    assert other.name != profile.name, "results do not overwrite each other"


def test_every_model_has_a_row_per_item_and_variant(smoke, compared):
    per_model = compared.groupby("model", sort=False)
    assert list(per_model.groups) == ["tiny-random-wide", "tiny-random"]
    for _, rows in per_model:
        assert rows.groupby(["method", "noise_seed"]).size().to_dict() == {
            ("zero-shot", -1): 4,
            ("Mean", -1): 4,
            ("PSA", 0): 4,
            ("PSA", 1): 4,
        }
        assert set(rows.recipe) == {"none", "matched"}
        assert (rows.multiplier >= 0).all()
        assert set(rows.format) == {"text"}
    sizes = compared.groupby("model").parameters.first()
    assert sizes["tiny-random"] == smoke.lm.model.num_parameters()
    assert sizes["tiny-random-wide"] > sizes["tiny-random"]


def test_the_other_models_numbers_are_the_plain_path_under_its_own_mean(smoke, compared):
    profile = scaling.like(config.load_profile("smoke-wide"), one(smoke))
    lm = stages.load_model(profile)
    raw = stages.extracted(profile, "refusal", "text")
    mean = next(
        v for v in stages.vectors(profile, 0, "refusal", raw, "text", recipe="matched") if v.record["method"] == "Mean"
    )
    items = stages.items(profile, "refusal", "test")
    with steering.apply(lm, mean, multiplier=profile.multiplier):
        plain = [reference.log_probability(lm, item, item.matching, "text") for item in items]
    rows = compared[(compared.model == "tiny-random-wide") & (compared.method == "Mean")]
    np.testing.assert_allclose(rows.logp_matching, plain, rtol=1e-4, atol=1e-3)


def test_another_models_results_are_read_back(smoke, compared, monkeypatch):
    monkeypatch.setattr(activations, "differences", lambda *a, **k: pytest.fail("extracted again"))
    monkeypatch.setattr(evaluate, "Scorer", lambda *a, **k: pytest.fail("scored again"))
    own = scoring.alignment(smoke.profile, smoke.lm, "refusal", "text")
    assert scaling.compared(one(smoke), 0, smoke.lm, own).equals(compared)


def test_figure_4_has_a_point_per_model_and_method(smoke, compared):
    options = {"within": ("model", "parameters"), "by": ("method",), "metrics": ("probability",)}
    cells = results.cells(smoke.profile, 0, compared, **options, unit=("behaviour", "item"))
    figure = sweep_plots.scaling(cells)
    (ax,) = figure.axes
    for bars, method in zip(ax.containers, ("Mean", "PSA"), strict=True):
        rows = cells[cells.method == method].sort_values("parameters")
        np.testing.assert_allclose(bars[0].get_ydata(), 100 * rows.probability_change)
    assert [label.get_text().split("\n")[0] for label in ax.get_xticklabels()] == ["tiny-random", "tiny-random-wide"]
    figure.canvas.draw()
    plt.close(figure)
