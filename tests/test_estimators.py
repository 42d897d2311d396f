import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from psa_utils import accounting, corpus, estimators, mechanism, seeding
from psa_utils.config import BEHAVIOURS
from psa_utils.estimators import ESTIMATORS
from psa_utils.public import Public, shared, unit

N, K, D = 5, 3, 12
RATHER_MORE = 1 + 1e-12
ORDINARY = st.floats(-100, 100, width=32)
HOSTILE = st.sampled_from(
    [0.0, -0.0, 5e-324, 1e-160, -1e-30, 3e38, -1e99, 1e101, 1.7e308, math.inf, -math.inf, math.nan]
)
VALUES = st.one_of(ORDINARY, HOSTILE)
SPENDING = [name for name in ESTIMATORS if name != "public-only"]


def random_public(seed: int = 0, k: int = K, d: int = D) -> Public:
    rng = seeding.rng(seed, "public")
    return Public.of(rng.normal(0.3, 1, (30, k, d)), rng.normal(0, 2, (20, k, d)))


PUBLIC = random_public()


def moved(name: str, data: np.ndarray, neighbour: np.ndarray) -> float:
    estimator = ESTIMATORS[name]
    return float(np.linalg.norm(estimator.mean(data, PUBLIC) - estimator.mean(neighbour, PUBLIC)))


@pytest.mark.parametrize("name", ESTIMATORS)
@given(data=arrays(np.float64, (N, K, D), elements=VALUES), new=arrays(np.float64, (K, D), elements=VALUES),
       row=st.integers(0, N - 1))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_replacing_any_pair_by_any_other_moves_the_statistic_at_most_its_sensitivity(name, data, new, row):
    neighbour = data.copy()
    neighbour[row] = new
    assert moved(name, data, neighbour) <= ESTIMATORS[name].sensitivity(n=N, layers=K) * RATHER_MORE


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=10)
def test_the_worst_of_many_neighbours_stays_within_and_nearly_reaches_the_sensitivity(name, seed):
    """Every row replaced by every candidate, among them the row turned round and both of them far outside the clip."""
    rng = seeding.rng(seed, "worst")
    data = rng.normal(size=(N, K, D)) * 10.0 ** rng.integers(-6, 6, (N, 1, 1))
    data[0] = data[0] * 1e9 + rng.normal(size=D) * 1e15  # one pair whose layers agree: the shared vector's worst
    candidates = [*rng.normal(size=(20, K, D)), *-data, *(1e9 * data), *(-1e9 * data), np.zeros((K, D))]
    shifts = []
    for row in range(N):
        for candidate in candidates:
            neighbour = data.copy()
            neighbour[row] = candidate
            shifts.append(moved(name, data, neighbour))
    bound = ESTIMATORS[name].sensitivity(n=N, layers=K)
    assert 0.999 * bound <= max(shifts) <= bound * RATHER_MORE


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_depends_on_its_own_pair_alone(name):
    data = seeding.rng(0, "rows").normal(size=(N, K, D)) * 7
    together = ESTIMATORS[name].rows(data, PUBLIC)
    alone = np.concatenate([ESTIMATORS[name].rows(pair[None], PUBLIC) for pair in data])
    np.testing.assert_allclose(together, alone, rtol=1e-12, atol=1e-15)
    assert (np.linalg.norm(together, axis=(1, 2)) <= ESTIMATORS[name].radius(K) * RATHER_MORE).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.7e308])
def test_pairs_that_are_not_finite_count_as_zero(name, value):
    data = seeding.rng(1, "rows").normal(size=(N, K, D))
    broken, zeroed = data.copy(), data.copy()
    broken[2, 1, 3], zeroed[2] = value, 0
    with np.errstate(all="raise", under="ignore"):
        one, other = (estimate(name, d) for d in (broken, zeroed))
    np.testing.assert_array_equal(one, other)
    assert np.isfinite(one).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("fill", [0.0, 1e99, 5e-324, math.nan])
def test_no_data_set_raises(name, fill):
    """Not even one that is all zero, huge, tiny or broken: an exception would be a release of its own."""
    assert np.isfinite(estimate(name, np.full((N, K, D), fill))).all()


def estimate(name: str, data: np.ndarray, *, epsilon: float = 1.0, seed: int = 0) -> np.ndarray:
    return estimators.estimate(name, data, epsilon=epsilon, delta=1e-5, public=PUBLIC, rng=seeding.rng(seed, name))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_shape_repeatability_and_noise_that_is_the_callers(name):
    data = seeding.rng(2, "rows").normal(size=(N, K, D))
    assert estimate(name, data).shape == (K, D)
    np.testing.assert_array_equal(estimate(name, data), estimate(name, data))
    assert np.array_equal(estimate(name, data), estimate(name, data, seed=1)) == (name == "public-only")


@pytest.mark.parametrize("name", [n for n in SPENDING if n != "psa-paper"])
def test_the_noise_spends_the_whole_budget_exactly(name):
    estimator = ESTIMATORS[name]
    sigma = estimator.sigma(1.3, 1e-6, n=290, layers=5)
    mu = estimator.sensitivity(n=290, layers=5) / sigma
    assert accounting.gaussian_epsilon(mu, 1e-6) == pytest.approx(1.3, rel=1e-9)
    if estimator.radius(5) > 1:
        assert sigma == pytest.approx(accounting.sigma_for_epsilon(1.3, 1e-6, n=290, layers=5))


def test_the_papers_noise_is_its_formula_turned_round():
    spent = accounting.paper_epsilon(n=1000, sigma=0.02, layers=5)
    paper = ESTIMATORS["psa-paper"].sigma(spent.total, spent.delta, n=1000, layers=5)
    assert paper == pytest.approx(0.02)
    assert ESTIMATORS["psa-exact"].sigma(spent.total, spent.delta, n=1000, layers=5) < 0.4 * paper


def test_noise_has_the_stated_deviation():
    """On zero rows the plain estimators release noise alone."""
    zeros = np.zeros((N, K, D))
    for name in ("psa-exact", "unit", "joint-clip", "shared"):
        draws = np.stack([estimate(name, zeros, seed=s) for s in range(300)])
        assert draws.std() == pytest.approx(ESTIMATORS[name].sigma(1.0, 1e-5, n=N, layers=K), rel=0.05)


def test_psa_is_the_mechanisms_clipped_mean():
    data = seeding.rng(3, "rows").normal(size=(N, K, D)) * 3
    np.testing.assert_allclose(
        ESTIMATORS["psa-exact"].mean(data, PUBLIC), mechanism.clipped_mean(data, clip=PUBLIC.clip), rtol=1e-12
    )


def layered(seed: int, *, n: int, d: int = 96, leading: int = 6) -> list[np.ndarray]:
    """Differences of six behaviours: spectrum that falls, layers that turn alike whatever the behaviour."""
    rng = seeding.rng(seed, "layered")
    turns = [np.linalg.qr(np.eye(d) + 0.06 * layer * rng.normal(size=(d, d)) / 2)[0] for layer in range(4)]
    turns = [turn * np.sign(np.diag(turn)) for turn in turns]
    scales = 1 / (1 + np.arange(d) / leading)
    made = []
    for _ in range(6):
        core = scales * rng.normal(size=d) + scales * rng.normal(size=(n, d))
        made.append(np.stack([core @ turn + 0.1 * rng.normal(size=(n, d)) * scales for turn in turns], axis=1))
    return made


def mean_cosines(private: np.ndarray, public: Public, *, epsilon: float) -> dict[str, float]:
    table = estimators.compare(private, private.mean(0), public, epsilons=[epsilon], delta=1e-5, seeds=range(6))
    return table.groupby("estimator").cosine.mean().to_dict()


@pytest.fixture(scope="module")
def behaviours():
    return layered(0, n=400)


def test_order_at_equal_epsilon(behaviours):
    """What the field's arguments predict on layers that agree and a public basis that fits."""
    private, *others = behaviours
    got = mean_cosines(private, Public.of(*others), epsilon=0.2)
    ladder = ["psa-paper", "psa-exact", "efron-morris", "shared", "shared-block", "shared-bayes-lift"]
    assert [got[name] for name in ladder] == sorted(got[name] for name in ladder)
    assert got[estimators.DEFAULT] > got["shared-bayes-lift"] - 0.02
    assert got["dp-jl"] < got["psa-exact"] + 0.02
    assert got["shared-bayes-lift"] > got["psa-exact"] + 0.3
    assert got["shared-bayes-lift"] > got["public-only"] + 0.3


def test_a_public_basis_that_does_not_fit_costs_little(behaviours):
    """A subspace chosen in advance is ruined by a wrong basis; rules that the release itself tunes are not."""
    private = behaviours[0]
    misleading = Public.of(seeding.rng(9, "misfit").normal(size=(300, *private.shape[1:])) * np.arange(1, 97) ** 1.5)
    got = mean_cosines(private, misleading, epsilon=0.5)
    assert got["subspace"] < got["shared"] - 0.5
    assert got["wiener"] < got["unit"] - 0.3
    assert got["shared-bayes-lift"] > got["shared"] - 0.03
    assert got["shared-mixture-lift"] > got["shared"] - 0.03
    assert got["block-efron-morris"] > got["efron-morris"] - 0.03


def test_the_lift_undoes_how_public_layers_turn(behaviours):
    private, *others = behaviours
    vector = shared(private).mean(axis=0)
    lifted = mechanism.cosine(Public.of(*others).lift(vector), private.mean(0)).mean()
    assert lifted > 0.97
    assert lifted > mechanism.cosine(np.tile(vector, (4, 1)), private.mean(0)).mean() + 0.02


def test_public_bases_are_orthonormal_and_sources_count_alike():
    rng = seeding.rng(0, "sources")
    small, large = rng.normal(size=(10, K, D)), rng.normal(size=(50, K, D))
    for eigen in (PUBLIC.layers, PUBLIC.shared):
        np.testing.assert_allclose(eigen.basis.T @ eigen.basis, np.eye(D), atol=1e-12)
        assert (np.diff(eigen.spectrum) <= 0).all()
        assert eigen.spectrum.sum() == pytest.approx(1)
    once, twice = Public.of(small, large), Public.of(np.tile(small, (3, 1, 1)), large)
    np.testing.assert_allclose(once.shared.spectrum, twice.shared.spectrum, atol=1e-12)
    assert not np.allclose(once.shared.spectrum, Public.of(np.concatenate([small, large])).shared.spectrum)


def test_unit_norm_forgets_lengths():
    data = seeding.rng(4, "rows").normal(size=(N, K, D))
    longer = data * seeding.rng(5, "rows").lognormal(size=(N, K, 1))
    for name in ("unit", "shared", "shared-bayes-lift", "one-layer"):
        np.testing.assert_allclose(estimate(name, data), estimate(name, longer), rtol=1e-6, atol=1e-9)
    assert not np.allclose(estimate("psa-exact", data), estimate("psa-exact", longer))
    np.testing.assert_allclose(np.linalg.norm(unit(data), axis=-1), 1)


def test_compare_is_a_table_of_what_estimate_returns():
    data = seeding.rng(6, "rows").normal(1, 1, size=(40, K, D))
    table = estimators.compare(
        data,
        data.mean(0),
        PUBLIC,
        epsilons=[1, 4],
        delta=1e-5,
        seeds=[3, 8],
        names=["unit", "one-layer", "public-only"],
    )
    assert list(table.columns) == ["estimator", "epsilon", "seed", "cosine", "norm"]
    assert len(table) == 3 * 2 * 2
    made = estimators.estimate(
        "unit", data, epsilon=4, delta=1e-5, public=PUBLIC, rng=seeding.rng(8, "compare", "unit")
    )
    row = table.query("estimator == 'unit' and epsilon == 4 and seed == 8").iloc[0]
    assert row.cosine == pytest.approx(mechanism.cosine(made, data.mean(0)).mean())
    assert row.norm == pytest.approx(np.linalg.norm(made, axis=1).mean())
    free = table[table.estimator == "public-only"]
    assert free.cosine.tolist() == pytest.approx([mechanism.cosine(PUBLIC.prior, data.mean(0)).mean()] * 4)


def test_a_vector_shrunk_to_nothing_has_cosine_zero():
    zeros = np.zeros((N, K, D))
    table = estimators.compare(
        zeros, np.ones((K, D)), PUBLIC, epsilons=[1], delta=1e-5, seeds=range(40), names=["efron-morris"]
    )
    assert (table[table.norm == 0].cosine == 0).all()
    assert table.cosine.notna().all()


def test_the_corpus_has_four_forms_of_the_same_questions():
    forms = {form: corpus.pairs(form) for form in corpus.FORMS}
    assert {len(items) for items in forms.values()} == {len(BEHAVIOURS) * 320 // corpus.STEP}
    assert len({tuple(item.prompt("text") for item in items) for items in forms.values()}) == 1
    assert all(option[-1].isalnum() or option[-1] in "\"')%" for item in forms["phrase"] for option in item.options)
    assert {item.options for item in forms["agree-disagree"]} == {("Agree", "Disagree")}
    assert len(corpus.pairs("sentence", BEHAVIOURS[:2])) == 80


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: estimators.named("pca"), "estimator='pca' is unknown; choose one of public-only, psa-paper"),
        (lambda d: estimate("unit", d[0]), r"shape \(3, 12\); to fit the public data it must be \(n, 3, 12\)"),
        (lambda d: estimate("unit", d[:, :2]), r"shape \(5, 2, 12\)"),
        (lambda d: estimate("unit", d[:0]), r"shape \(0, 3, 12\)"),
        (lambda d: estimate("unit", d, epsilon=0), "epsilon=0 must be a positive"),
        (lambda d: estimate("psa-paper", d, epsilon=-1), "epsilon=-1 must be positive"),
        (lambda d: estimators.paper_sigma(1, 1.0, n=5, layers=5), r"delta=1.0 must lie in \(0, 1\)"),
        (lambda d: Public.of(d, d[:, :, :4]), r"shapes \(5, 3, 12\) and \(5, 3, 4\)"),
        (lambda d: Public.of(np.where(d == d[1, 0, 0], np.nan, d)), r"not finite in row\(s\) \[1\]"),
        (lambda d: Public.of(0 * d), "half of a layer's public differences are zero"),
        (lambda d: corpus.pairs("letter"), "form='letter' is unknown"),
    ],
)
def test_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((N, K, D)) * np.arange(1, N + 1)[:, None, None])
