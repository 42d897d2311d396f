import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as sps
from scipy.sparse.linalg import svds

from psa_utils import accounting, mechanism, seeding

FINITE = st.floats(-1e6, 1e6, width=32)


@pytest.fixture
def differences():
    rng = np.random.default_rng(0)
    return (rng.normal(size=(40, 3, 16)) * rng.lognormal(size=(40, 1, 1)) + 0.7).astype(np.float32)


@given(data=arrays(np.float32, (6, 2, 5), elements=FINITE), new=arrays(np.float32, (2, 5), elements=FINITE),
       row=st.integers(0, 5), clip=st.floats(1e-3, 1e3))  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_replacing_one_pair_moves_each_layer_at_most_two_over_n(data, new, row, clip):
    neighbour = data.copy()
    neighbour[row] = new
    shift = mechanism.clipped_mean(data, clip=clip) - mechanism.clipped_mean(neighbour, clip=clip)
    assert (np.linalg.norm(shift, axis=1) <= accounting.sensitivity(6) * (1 + 1e-12)).all()
    assert np.linalg.norm(shift) <= np.sqrt(2) * accounting.sensitivity(6) * (1 + 1e-12)


def test_the_bound_is_reached():
    data = np.zeros((4, 1, 2))
    data[0, 0] = [50.0, 0.0]
    neighbour = -data
    shift = mechanism.clipped_mean(data, clip=1.0) - mechanism.clipped_mean(neighbour, clip=1.0)
    assert np.linalg.norm(shift) == pytest.approx(accounting.sensitivity(4))


def test_clip_from_the_private_data_breaks_the_bound():
    """Why the clip must be public: if C is the data's own median norm, one record moves the result much further."""
    data = np.array([1e-6] * 51 + [1.0] * 50).reshape(-1, 1, 1)
    neighbour = data.copy()
    neighbour[0] = 1.0
    own = [mechanism.clipped_mean(x, clip=mechanism.public_clip(x)) for x in (data, neighbour)]
    assert np.abs(own[0] - own[1]).max() > 20 * accounting.sensitivity(101)


def test_rows_that_are_not_finite_count_as_zero(differences):
    broken = differences.copy()
    broken[3, 0, 0], broken[5, 1, 2] = np.nan, np.inf
    zeroed = differences.copy()
    zeroed[3, 0], zeroed[5, 1] = 0, 0
    np.testing.assert_array_equal(mechanism.clipped_mean(broken, clip=1.0), mechanism.clipped_mean(zeroed, clip=1.0))


def test_psa_is_clipped_mean_plus_gaussian_noise(differences):
    clip = mechanism.public_clip(differences)
    signal = mechanism.clipped_mean(differences, clip=clip)
    draws = np.stack(
        [mechanism.psa(differences, clip=clip, sigma=0.02, rng=seeding.rng(0, i)) - signal for i in range(400)]
    )
    assert sps.kstest(draws.ravel() / 0.02, "norm").pvalue > 1e-3
    across_layers = np.corrcoef(draws[:, 0].ravel(), draws[:, 1].ravel())[0, 1]
    across_draws = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(across_layers) < 0.05
    assert abs(across_draws) < 0.05


def test_noise_is_the_callers(differences):
    options = {"clip": 1.0, "sigma": 0.1}
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    one = mechanism.psa(differences, **options, rng=np.random.default_rng(1))
    same = mechanism.psa(differences, **options, rng=np.random.default_rng(1))
    other = mechanism.psa(differences, **options, rng=np.random.default_rng(2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_norm_bias_of_a_large_clip(differences):
    """Far above all norms, clipping is division by C; far below, every row has unit norm."""
    np.testing.assert_allclose(
        mechanism.clipped_mean(differences, clip=1e9) * 1e9, mechanism.mean(differences), rtol=1e-6
    )
    units = differences / np.linalg.norm(differences, axis=2, keepdims=True)
    np.testing.assert_allclose(mechanism.clipped_mean(differences, clip=1e-9), units.mean(0), atol=1e-6)


def test_pca_agrees_with_a_sparse_solver_and_the_mean(differences):
    ours = mechanism.pca(differences)
    for layer in range(3):
        _, _, vt = svds(differences[:, layer].astype(float), k=1)
        assert abs(vt[0] @ ours[layer]) == pytest.approx(1, abs=1e-8)
    assert (np.einsum("kd,kd->k", ours, mechanism.mean(differences)) > 0).all()
    np.testing.assert_allclose(mechanism.pca(-differences), -ours)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1)


def test_max_norm_mean_by_hand(differences):
    largest = np.linalg.norm(differences, axis=2).max(0)
    np.testing.assert_allclose(
        mechanism.max_norm_mean(differences), mechanism.mean(differences) / largest[:, None], rtol=1e-6
    )


def test_expected_cosine_agrees_with_draws():
    signal = np.zeros((1, 576))
    signal[0, 0] = 0.4
    noisy = signal + 0.02 * np.random.default_rng(0).standard_normal((500, 1, 576))
    measured = np.mean([mechanism.cosine(v, signal)[0] for v in noisy])
    assert measured == pytest.approx(float(mechanism.expected_cosine(np.array(0.4), 0.02, 576)), abs=0.005)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: mechanism.psa(d, clip=1, sigma=0, rng=np.random.default_rng()), "sigma=0 must be positive"),
        (lambda d: mechanism.psa(d, clip=1, sigma=-1, rng=np.random.default_rng()), "sigma=-1 must be positive"),
        (lambda d: mechanism.clipped_mean(d, clip=0), "clip=0.* must be positive"),
        (lambda d: mechanism.clipped_mean(d, clip=np.array([1, 1, np.nan])), "clip=.*nan.* must be positive"),
        (lambda d: mechanism.mean(d[0]), r"shape \(3, 16\); it must be \(n pairs, k layers, d\)"),
        (lambda d: mechanism.mean(d[:0]), "shape"),
        (lambda d: mechanism.mean(np.where(d == d[2, 0, 0], np.nan, d)), r"not finite in row\(s\) \[2\]"),
        (lambda d: mechanism.public_clip(d, 0), "quantile=0 must lie"),
        (lambda d: mechanism.rescale(np.zeros((2, 3)), np.ones(2)), "zero vector has no direction"),
    ],
)
def test_impossible_arguments_are_named(differences, call, message):
    with pytest.raises(ValueError, match=message):
        call(differences)
