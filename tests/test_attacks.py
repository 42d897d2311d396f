"""Notebook 05's games: claims by formula, attacks against the plain path, files that are resumed, what is shown."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from psa_utils import (
    attack_plots,
    attack_tables,
    attacks,
    audit,
    bounds,
    canaries,
    games,
    mechanism,
    paths,
    seeding,
    steering,
)
from psa_utils.attacks import Target
from psa_utils.rowwise import Questions
from psa_utils.vectors import SteeringVectors
from tests import reference
from tests.test_reports import nowhere_nan

N, SIGMA, DELTA = 8, 0.2, 1e-5
"""Eight pairs: at sigma 0.2 mu is 2.2, which few trials can prove."""
PAPER = pd.read_csv(paths.PACKAGE / "paper" / "table7_mia.csv")


@pytest.fixture
def target(smoke, tmp_path, monkeypatch) -> Target:
    """Refusal's pairs under attack, with an output folder of its own so that no other test's trials are read back."""
    options = {"sigma": SIGMA, "canaries": 3, "white_trials": 2000, "grey_trials": 12, "black_trials": 10}
    profile, raw = dataclasses.replace(smoke.profile, **options), smoke.raw()
    monkeypatch.setenv("PSA_OUT", str(tmp_path))
    return Target.of(profile, 0, smoke.lm, "refusal", raw)


def changed(target: Target, **fields) -> Target:
    return dataclasses.replace(target, profile=dataclasses.replace(target.profile, **fields))


def clipped_at(target: Target, factor: float) -> Target:
    return dataclasses.replace(target, raw=dataclasses.replace(target.raw, clip=factor * target.raw.clip))


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """Numbers of rows that the model was asked, call by call."""
    found, real = [], Questions.log_probabilities

    def counting(self, asked, vectors, *, multiplier):
        found.append(len(asked))
        return real(self, asked, vectors, multiplier=multiplier)

    monkeypatch.setattr(Questions, "log_probabilities", counting)
    return found


@pytest.fixture
def drawn(monkeypatch) -> list[int]:
    """Numbers of releases drawn for the white box, call by call."""
    found, real = [], audit.psa_draws

    def counting(**settings):
        draws = real(**settings)

        def counted(differences, rng, trials):
            found.append(trials)
            return draws(differences, rng, trials)

        return counted

    monkeypatch.setattr(audit, "psa_draws", counting)
    return found


def test_canaries_are_as_many_as_asked_unknown_to_the_model_and_repeat(target):
    assert len(target.canaries) == 3
    again = Target.of(target.profile, 0, target.lm, "refusal", target.raw)
    assert again.canaries == target.canaries
    assert Target.of(target.profile, 1, target.lm, "refusal", target.raw).canaries != target.canaries
    expected = reference.difference(target.lm, target.canaries[2].demonstration(1), list(target.profile.layers), "text")
    np.testing.assert_allclose(target.differences[2, 1], expected, atol=1e-4)


def test_words_the_model_guesses_are_no_canaries(target, monkeypatch):
    """The model is made to say every word but those in z."""
    said = " ".join(word for initial, group in canaries.WORDS.items() for word in group if initial != "z")
    monkeypatch.setattr(canaries, "first_guesses", lambda *_: [said])
    again = Target.of(target.profile, 0, target.lm, "refusal", target.raw)
    assert {word[0] for canary in again.canaries for word in (canary.anchor, *canary.targets)} == {"z"}


def test_sizes_end_with_all_records(target):
    assert target.sizes() == [N]
    more = dataclasses.replace(target.raw, private=np.tile(target.raw.private, (5, 1, 1)))
    assert dataclasses.replace(target, raw=more).sizes() == [8, 32, 40]


def test_claims_are_those_of_the_joint_gaussian_mechanism(target):
    assert target.mu(N) == target.claim("PSA", N) == pytest.approx(math.sqrt(3) * 2 / (N * SIGMA))
    assert target.mu(100, 0.01) == pytest.approx(math.sqrt(3) * 2 / (100 * 0.01))
    assert target.claim("Mean", N) == target.claim("PCA", N) == math.inf


def test_white_box_is_tight(target):
    target = changed(target, white_trials=10_000)
    row = attacks.white_row(target, delta=DELTA, n=N, sigma=SIGMA)
    assert row["mu_claim"] == target.mu(N)
    assert row["epsilon_claim"] == bounds.epsilon_of_mu(target.mu(N), DELTA)
    assert 0.95 * row["mu_claim"] <= row["mu_gaussian"] <= row["mu_claim"]
    assert 0.9 * row["mu_claim"] <= row["mu_gdp"] <= row["mu_claim"]
    assert 0 < row["epsilon_counts"] <= row["epsilon_gdp"]
    assert (row["trials"], row["copies"], row["refuted"]) == (20_000, 1, False)


@pytest.mark.parametrize(("sigma", "copies"), [(SIGMA, 1), (4 * SIGMA, 5)])
def test_white_box_never_refutes_a_true_claim(target, sigma, copies):
    rows = [
        attacks.white_row(dataclasses.replace(target, seed=seed), delta=DELTA, n=N, sigma=sigma, copies=copies)
        for seed in range(8)
    ]
    assert not any(row["refuted"] for row in rows)
    assert min(row["mu_gdp"] for row in rows) > 0.7 * target.mu(N, sigma)
    assert all(math.isnan(row["epsilon_counts"]) == (copies > 1) for row in rows)


def test_halved_noise_is_refuted(target):
    halved = attacks.numbers(target.white_box(n=N, sigma=SIGMA / 2), mu=target.mu(N), delta=DELTA)
    assert halved["refuted"]
    assert halved["epsilon_gdp"] > halved["epsilon_claim"]


def test_numbers_of_a_perfect_attack_on_a_mechanism_without_noise():
    """Every score at its world's value: no error is counted, so only the number of trials limits the proof."""
    phase = np.repeat(["calibration", "trial"], [20, 100])
    trials = pd.DataFrame({"phase": phase, "coin": np.arange(120) % 2, "score": np.arange(120) % 2 * 1.0})
    found = attacks.numbers(trials, mu=math.inf, delta=DELTA)
    upper = bounds.clopper_pearson_upper(0, 50, 0.025)
    assert (found["fpr"], found["fnr"], found["trials"], found["refuted"]) == (0, 0, 100, False)
    assert found["epsilon_counts"] == pytest.approx(math.log((1 - upper - DELTA) / upper))
    assert found["epsilon_paper_formula"] == found["epsilon_claim"] == found["mu_claim"] == math.inf


def test_releases_have_the_public_strength_and_their_own_direction(target):
    raw = target.raw
    plain = {
        "Mean": raw.private.astype(float).mean(0),
        "PCA": mechanism.pca(raw.private),
        "PSA": mechanism.psa(raw.private, clip=raw.clip, sigma=SIGMA, rng=seeding.rng(5)),
    }
    for method, expected in plain.items():
        made = attacks.release(method, raw, SIGMA)(raw.private, seeding.rng(5))
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), raw.strength, rtol=1e-6)
        np.testing.assert_allclose(mechanism.cosine(made, expected), 1, atol=1e-6)


def test_without_noise_a_release_is_computed_once_and_with_noise_always(target, monkeypatch):
    calls, private = [], target.raw.private
    for name in ("mean", "pca", "psa"):
        real = getattr(mechanism, name)
        monkeypatch.setattr(mechanism, name, lambda *a, _n=name, _r=real, **k: calls.append(_n) or _r(*a, **k))
    for method in ("Mean", "PCA", "PSA"):
        release = attacks.release(method, target.raw, SIGMA)
        made = [release(data, seeding.rng(i)) for i, data in enumerate((private, private.copy(), private + 1))]
        assert np.array_equal(made[0], made[1]) == (method != "PSA")
        assert not np.array_equal(made[0], made[2])
    assert {name: calls.count(name) for name in ("mean", "pca", "psa")} == {"mean": 2, "pca": 2, "psa": 3}


def plain_scores(target: Target, method: str, multiplier: float, trials: int) -> np.ndarray:
    """Every trial by itself: its vectors computed anew, put on the model by hooks, one answer at a time."""
    attack = target._attack(method, N, multiplier)
    compute = {"Mean": mechanism.mean, "PCA": mechanism.pca}[method]

    def ratio(canary: int, records: np.ndarray) -> float:
        values = mechanism.rescale(compute(records), target.raw.strength)
        with steering.apply(target.lm, SteeringVectors(attack.layers, values), multiplier=multiplier):
            item = target.canaries[canary].demonstration(1)
            logp = [reference.log_probability(target.lm, item, option, "text") for option in (0, 1)]
        return logp[0] - logp[1]

    scores = []
    for i in range(trials):
        canary, coin, _ = attack.trial(i)
        records = np.concatenate([target.raw.private[: N - 1], target.differences[canary, coin][None]])
        scores.append(ratio(canary, records) - ratio(canary, target.raw.private[:N]))
    return np.array(scores)


@pytest.mark.parametrize("method", ["Mean", "PCA"])
def test_grey_box_asks_a_repeated_vector_once_and_scores_as_without_the_memo(target, asked, method):
    found = target.grey_box(method, n=N, multiplier=2.0)
    assert found.phase.tolist() == ["calibration"] * 20 + ["trial"] * 12
    distinct = len(found[["canary", "coin"]].drop_duplicates())
    assert sum(asked) == len(target.canaries) + distinct < len(found)
    np.testing.assert_allclose(found.score, plain_scores(target, method, 2.0, len(found)), atol=2e-3)
    assert found.score.abs().max() > 0.01, "the canary leaves a trace"


def test_grey_box_remembers_vectors_from_one_chunk_to_the_next(target, asked, monkeypatch):
    whole = target.grey_box("Mean", n=N, multiplier=1.0)
    before = sum(asked)
    monkeypatch.setattr(games, "CHUNK", 5)
    pd.testing.assert_frame_equal(
        games.grey_box(target._attack("Mean", N, 1.0), trials=12, calibration=20), whole, rtol=1e-4, atol=1e-4
    )
    assert sum(asked) == 2 * before


def test_grey_box_asks_every_noisy_vector(target, asked):
    found = target.grey_box("PSA", n=N, multiplier=1.0)
    assert sum(asked) == len(target.canaries) + len(found)
    assert found.score.nunique() == len(found)


def test_kept_trials_are_read_back_and_computed_anew_for_another_sigma_or_clip(target, asked):
    first = target.grey_box("PSA", n=N, multiplier=1.0)
    done = sum(asked)
    pd.testing.assert_frame_equal(target.grey_box("PSA", n=N, multiplier=1.0), first, check_exact=True)
    assert sum(asked) == done + len(target.canaries), "only what the model says without the canary"
    for other in (changed(target, sigma=SIGMA * (1 + 1e-9)), clipped_at(target, 1.5)):
        before = sum(asked)
        again = other.grey_box("PSA", n=N, multiplier=1.0)
        assert sum(asked) == before + done
        assert not again.score.equals(first.score)


def test_kept_white_trials_are_read_back_and_drawn_anew_for_another_sigma_or_clip(target, drawn):
    first = target.white_box(n=N, sigma=SIGMA)
    done = sum(drawn)
    pd.testing.assert_frame_equal(target.white_box(n=N, sigma=SIGMA), first, check_exact=True)
    assert sum(drawn) == done + (first.phase == "calibration").sum(), "the filter alone"
    other, wider = SIGMA * (1 + 1e-9), clipped_at(target, 1.5)
    for again in (lambda: target.white_box(n=N, sigma=other), lambda: wider.white_box(n=N, sigma=SIGMA)):
        before = sum(drawn)
        assert not again().score.equals(first.score)
        assert sum(drawn) == before + done


def test_an_interrupted_game_goes_on_where_it_stopped(target, asked, monkeypatch):
    monkeypatch.setattr(games, "CHUNK", 8)
    real = Questions.log_probabilities

    def breaks(self, rows, vectors, *, multiplier):
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(self, rows, vectors, multiplier=multiplier)

    with monkeypatch.context() as patch:
        patch.setattr(Questions, "log_probabilities", breaks)
        with pytest.raises(KeyboardInterrupt):
            target.grey_box("PSA", n=N, multiplier=1.0)
    asked.clear()
    found = target.grey_box("PSA", n=N, multiplier=1.0)
    assert asked == [3, 8, 8], "without the canary, then the two chunks that were not done"
    fresh = games.grey_box(target._attack("PSA", N, 1.0), trials=12, calibration=20)
    pd.testing.assert_frame_equal(found, fresh, rtol=1e-4, atol=1e-4)
    assert [file.name for file in paths.results("smoke", attacks.STAGE).iterdir()] == ["refusal-grey-PSA-8-1.csv"]


def table_of(target: Target) -> pd.DataFrame:
    rows = [attacks.white_row(target, delta=DELTA, n=N, sigma=SIGMA)]
    rows.append(attacks.white_row(target, delta=DELTA, n=N, sigma=SIGMA, copies=2))
    settings = [("grey box", "Mean", 1.0), ("grey box", "Mean", 2.0), ("grey box", "PSA", 1.0)]
    settings += [("black box", "Mean", 1.0), ("black box", "PSA", 1.0)]
    options = {"delta": DELTA, "n": N}
    rows += [attacks.model_row(target, who, method, **options, multiplier=m) for who, method, m in settings]
    return pd.DataFrame(rows)


def test_the_same_seed_gives_the_same_table(target, tmp_path, monkeypatch):
    tables = []
    for folder, seed in (("one", 0), ("two", 0), ("other", 1)):
        monkeypatch.setenv("PSA_OUT", str(tmp_path / folder))
        tables.append(table_of(dataclasses.replace(target, seed=seed)))
    pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=True)
    assert not tables[0].mu_gaussian.equals(tables[2].mu_gaussian)
    assert tables[0].mu_claim.tolist() == tables[2].mu_claim.tolist()
    assert not tables[0].refuted.any()


def test_table_7_has_a_line_per_attack_and_the_papers_below(target):
    rows = table_of(target)
    numbers, printed = attack_tables.attacks(rows, PAPER)
    nowhere_nan(printed)
    pd.testing.assert_frame_equal(numbers, rows)
    assert len(printed) == len(rows) + 4
    first, group = printed.iloc[0], printed.iloc[1]
    assert (first.adversary, first.n, first["σ"], first.copies) == ("white box", "8", "0.2", "1")
    assert float(first.FPR) == pytest.approx(rows.fpr[0], abs=5.1e-4)
    assert first["ε, claim"] == f"{bounds.epsilon_of_mu(target.mu(N), DELTA):.2f}"
    assert (group.copies, group["ε ≥, counts"]) == ("2", "–")
    mean = printed[(printed.method == "Mean") & (printed.adversary == "grey box")].iloc[0]
    assert (mean["σ"], mean["ε, claim"]) == ("–", "∞")
    theirs = printed.tail(4)
    assert theirs.method.tolist() == ["Mean, Llama-2 7B", "PSA, Llama-2 7B", "Mean, Qwen-2.5 7B", "PSA, Qwen-2.5 7B"]
    assert theirs["ε, formula"].tolist() == ["4.0", "0.6", "6.0", "1.6"]
    assert theirs["ε, claim"].tolist() == ["–", "2.00", "–", "2.00"]
    assert set(theirs["ε ≥, counts"]) == set(theirs["copies"]) == {"–"}


def plotted(ax, label: str) -> tuple[np.ndarray, np.ndarray]:
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return line.get_xdata(), line.get_ydata()


def test_tradeoff_draws_roc_curves_under_the_allowed_one_and_returns_what_it_draws(target):
    white, grey = target.white_box(n=N, sigma=SIGMA), target.grey_box("PSA", n=N, multiplier=1.0)
    figure, curves = attack_plots.tradeoff(white, grey, target.mu(N), PAPER, 0.22)
    ours, theirs = figure.axes
    for ax, panel, mu in ((ours, "ours", target.mu(N)), (theirs, "paper", 0.22)):
        fpr, tpr = plotted(ax, "largest that DP allows")
        told = curves[(curves.panel == panel) & (curves.curve == "allowed")]
        np.testing.assert_array_equal(told[["fpr", "tpr"]], np.stack([fpr, tpr], 1))
        np.testing.assert_allclose(tpr, bounds.allowed_tpr(fpr, mu))
    for name in ("white box", "grey box"):
        told = curves[curves.curve == name]
        np.testing.assert_array_equal(told[["fpr", "tpr"]], np.stack(plotted(ours, name), 1))
        assert (told.low <= bounds.allowed_tpr(told.fpr, target.mu(N)) + 1e-12).all()
        assert (told.low <= told.tpr).all()
        assert (told.tpr <= told.high).all()
        corners = {tuple(v) for band in ours.collections for path in band.get_paths() for v in path.vertices}
        assert {*zip(told.fpr, told.low, strict=True), *zip(told.fpr, told.high, strict=True)} <= corners
    allowed = bounds.allowed_tpr(curves[curves.curve == "white box"].fpr, target.mu(N))
    assert np.abs(allowed - curves[curves.curve == "white box"].tpr).mean() < 0.02, "the strongest attack reaches it"
    points = curves[(curves.panel == "paper") & (curves.curve != "allowed")]
    for point in points.itertuples():
        assert plotted(theirs, point.curve) == ([point.fpr], [point.tpr])
    np.testing.assert_allclose(points.tpr, 1 - PAPER.fnr)
    assert len(curves) == 2 * 201 + 2 * 201 + 4
    figure.canvas.draw()
    plt.close(figure)


def test_canary_figure_shows_the_areas_of_single_canaries_below_what_dp_allows():
    settings = [("grey box", "Mean", n, m) for m in (1.0, 2.0) for n in (32, 8)]
    settings += [("white box", "PSA", n, 1.0) for n in (32, 8)] + [("black box", "PSA", 32, 1.0)]
    rows = pd.DataFrame(settings, columns=["adversary", "method", "n", "multiplier"])
    rows = rows.assign(auc=np.linspace(0.5, 0.9, len(rows)), copies=1, mu_claim=8.0 / rows.n)
    rows = rows.assign(auc_low=rows.auc - 0.1, auc_high=rows.auc + 0.05)
    group = rows.iloc[[4]].assign(copies=13, auc=0.99)
    figure = attack_plots.canaries(pd.concat([rows, group], ignore_index=True))
    mean, psa = figure.axes
    for ax, label, expected in (
        (mean, "multiplier 1", rows.iloc[[1, 0]]),
        (mean, "multiplier 2", rows.iloc[[3, 2]]),
        (psa, "white box", rows.iloc[[5, 4]]),
        (psa, "black box", rows.iloc[[6]]),
    ):
        (drawn,) = [c for c in ax.containers if c.get_label() == label]
        np.testing.assert_allclose(drawn.lines[0].get_ydata().astype(float), expected.auc)
        ends = [(low, high) for (_, low), (_, high) in drawn.lines[2][0].get_segments()]
        np.testing.assert_allclose(ends, expected[["auc_low", "auc_high"]].to_numpy())
    n, allowed = plotted(psa, "largest that DP allows")
    np.testing.assert_allclose(allowed, [bounds.allowed_auc(8.0 / each) for each in n])
    figure.canvas.draw()
    plt.close(figure)


def test_every_audit_draws_noise_of_its_own(target):
    """One draw for all would make audits lucky or unlucky together, and counting refutations against chance wrong."""
    other = dataclasses.replace(target, behaviour="another")
    audits = [(target, {"sigma": SIGMA}), (other, {"sigma": SIGMA}), (target, {"sigma": SIGMA / 2})]
    audits.append((target, {"sigma": SIGMA, "copies": 2}))
    trials = [audited.white_box(n=N, **options) for audited, options in audits]
    scores = [part.query("phase == 'trial' and coin == 0").score.to_numpy() for part in trials]
    correlations = np.corrcoef(scores)[np.triu_indices(len(audits), 1)]
    assert np.abs(correlations).max() < 0.1
