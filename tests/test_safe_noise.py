"""Release noise: exact integer norms, the sensitivity by brute force, certified cost, distribution, entropy."""

import inspect
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as sps

from psa_utils import accounting, safe_noise
from psa_utils.safe_noise import GRID

ANY = st.floats(width=64)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))


def exact_norms_squared(integers: np.ndarray) -> list[int]:
    """Squared norms in Python's unbounded integers, an independent check of the int64 arithmetic."""
    return [sum(int(x) ** 2 for x in row) for row in integers.reshape(-1, integers.shape[-1])]


def unit(row) -> np.ndarray:
    return np.asarray(row, np.float64) / np.linalg.norm(row)


ADVERSARIAL = {
    "third": np.full(9, 1 / 3),
    "third, one ulp above": np.full(9, np.nextafter(1 / 3, 1)),
    "denormals": np.full(8, 5e-324),
    "one denormal beside one": np.array([1.0, 5e-324]),
    "all of it in one coordinate": np.array([-1.0, 0.0, 0.0]),
    "float32 rounding above 1": (unit(np.arange(1, 4097)).astype(np.float32) * np.float32(1 + 1.2e-7)),
    "half, sixteen times too long": np.full(1024, 0.5),
    "just below a grid point": np.full(4, np.nextafter(0.5, 0)),
    "largest double": np.full(5, np.finfo(float).max),
    "infinite": np.array([1.0, -np.inf]),
    "not a number": np.array([np.nan, 1.0]),
    "negative zero": np.array([-0.0, 1.0]),
    "Pythagorean": np.array([0.28, -0.96]),
}


@pytest.mark.parametrize("row", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_adversarial_rows_never_exceed_the_grid(row):
    integers = safe_noise.integer_rows(row)
    assert exact_norms_squared(integers)[0] <= GRID**2
    if np.isfinite(row).all():
        x = row / max(1.0, np.abs(row).max())
        x = x / max(1.0, np.linalg.norm(x))
        assert (np.abs(integers) <= np.abs(x * GRID)).all()  # towards zero
        assert (np.abs(integers - x * GRID) < 2).all()  # by less than a unit, and one that shortening may take
    else:
        assert not integers.any()


@given(arrays(np.float64, st.integers(1, 40), elements=ANY))
@settings(deadline=None, max_examples=400)
def test_any_row_at_all_fits_exactly(row):
    assert exact_norms_squared(safe_noise.integer_rows(row))[0] <= GRID**2


@given(arrays(np.float64, st.integers(1, 2000), elements=st.floats(-1, 1), fill=st.floats(-1, 1)))
@settings(deadline=None, max_examples=200)
def test_unit_rows_lose_less_than_a_unit_per_coordinate(row):
    norm = np.linalg.norm(row)
    row = row / norm if norm > 1e-100 else row
    integers = safe_noise.integer_rows(row)
    assert (np.abs(integers) <= np.abs(row * GRID)).all()
    assert (np.abs(row * GRID - integers) < 1 + 1e-8).all() or np.linalg.norm(row) > 1


def test_shortening_acts_on_integers_that_are_too_long():
    long = np.array([[GRID, 1], [-GRID - 2, 0], [GRID, 0]])
    short = safe_noise._shorten(long)
    assert short.tolist() == [[GRID - 1, 1], [-GRID, 0], [GRID, 0]]
    assert long[0, 0] == GRID  # the caller's array is not touched


def test_the_bound_does_not_rest_on_an_accurate_norm(monkeypatch):
    rows = np.random.default_rng(3).normal(size=(50, 6))
    norm = np.linalg.norm
    monkeypatch.setattr(np.linalg, "norm", lambda *args, **options: norm(*args, **options) * (1 - 1e-6))
    assert max(exact_norms_squared(safe_noise.integer_rows(rows))) <= GRID**2


@given(data=arrays(np.float64, SHAPES, elements=ANY), seed=st.integers(0, 2**32), which=st.integers(0, 3),
       worst=st.booleans())  # fmt: skip
@example(data=np.ones((1, 3, 1)), seed=0, which=0, worst=True)
@settings(deadline=None, max_examples=300)
def test_replacing_one_row_moves_the_integer_sums_at_most_the_sensitivity(data, seed, which, worst):
    """Brute force in exact arithmetic; the worst replacement is the opposite of the row itself."""
    neighbour = data.copy()
    i = which % len(data)
    neighbour[i] = -data[i] if worst else np.random.default_rng(seed).normal(size=data[i].shape) * 10
    a, b = (safe_noise._sums(x) for x in (data, neighbour))
    shifts = exact_norms_squared(a - b)
    assert all(shift <= (2 * GRID) ** 2 for shift in shifts)
    assert sum(shifts) <= data.shape[1] * (2 * GRID) ** 2 <= safe_noise.sensitivity(data.shape[1]) ** 2


def test_the_sensitivity_is_reached():
    rows = np.zeros((3, 2, 4))
    rows[0, :, 0] = 1.0
    shift = safe_noise._sums(rows) - safe_noise._sums(-rows)
    assert exact_norms_squared(shift) == [(2 * GRID) ** 2] * 2


def test_the_sum_is_exact():
    rows = np.random.default_rng(0).normal(size=(500, 2, 7)) / 3
    expected = [[sum(int(x) for x in column) for column in layer.T] for layer in
                safe_noise.integer_rows(rows).swapaxes(0, 1)]  # fmt: skip
    assert safe_noise._sums(rows).tolist() == expected


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 7, 9, 32])
def test_rounded_sensitivity_is_never_below_the_true_one(layers):
    numerator, denominator = safe_noise.sensitivity(layers).as_integer_ratio()
    assert numerator**2 >= layers * (2 * GRID) ** 2 * denominator**2


@pytest.mark.parametrize(("n", "layers", "sigma"), [(290, 5, 0.02), (1000, 5, 0.0062), (30, 1, 0.5), (7, 3, 1 / 3)])
def test_certified_rho_is_the_closed_form(n, layers, sigma):
    released = safe_noise.release_mean(np.zeros((n, layers, 3)), sigma=sigma)
    closed = layers * (2 / (n * sigma)) ** 2 / 2
    assert released.rho == pytest.approx(closed, rel=1e-12)
    assert released.rho == pytest.approx(released.mu**2 / 2, rel=1e-12)
    assert released.rho >= closed * (1 - 1e-15)
    assert released.mu == accounting.gdp_mu(n=n, sigma=sigma, layers=layers)


def discrete_gaussian_delta(shift: int, scale: float, epsilon: float) -> float:
    """Exact delta at epsilon between the discrete Gaussians at 0 and at ``shift``, by summing both mass functions."""
    y = np.arange(-int(40 * scale), int(40 * scale) + shift)
    p, q = (np.exp(-((y - m) ** 2) / (2 * scale**2)) for m in (shift, 0))
    p, q = p / p.sum(), q / q.sum()
    return float(np.maximum(0, p - math.exp(epsilon) * q).sum())


@pytest.mark.parametrize("scale", [20.0, 100.0, 1000.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 2.0])
def test_the_discrete_curve_is_the_gaussian_one_up_to_the_stated_distance(scale, epsilon):
    shift = int(scale * 0.7)
    exact = discrete_gaussian_delta(shift, scale, epsilon)
    bound = (1 + math.exp(epsilon)) * math.sqrt(1 / 1152) / scale**2
    assert exact <= accounting.gaussian_delta(shift / scale, epsilon) + bound
    assert exact == pytest.approx(accounting.gaussian_delta(shift / scale, epsilon), rel=0.05 / scale, abs=bound)


def test_total_variation_to_the_rounded_gaussian_is_as_stated():
    for scale in (5.0, 30.0):
        y = np.arange(-int(12 * scale), int(12 * scale) + 1)
        rounded = np.diff(sps.norm.cdf(np.append(y, y[-1] + 1) - 0.5, scale=scale))
        discrete = np.exp(-(y**2) / (2 * scale**2))
        distance = np.abs(rounded - discrete / discrete.sum()).sum() / 2
        assert 0 < distance <= math.sqrt(1 / 1152) / scale**2


@pytest.mark.parametrize("draw", ["release", "demonstration"])
def test_noise_has_the_stated_distribution(draw):
    """Mean, variance and shape over 40,000 coordinates; chance fails a check once in 100,000 runs."""
    rows, sigma = np.zeros((50, 4, 10_000)), 0.03
    rows[:, :, 0] = 0.5
    if draw == "release":
        released = safe_noise.release_mean(rows, sigma=sigma)
    else:
        released = safe_noise.demonstration_mean(rows, sigma=sigma, rng=np.random.default_rng(0))
    z = (released.values - rows.mean(0)).ravel() / sigma
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / z.size)
    assert sps.kstest(z, "norm").pvalue > 1e-6
    layers = z.reshape(4, -1)
    assert np.abs(np.corrcoef(layers) - np.eye(4)).max() < 5.5 / math.sqrt(10_000)
    lattice = released.values * 50 * GRID
    np.testing.assert_allclose(lattice, np.rint(lattice), rtol=1e-15)


def test_the_mean_is_recovered_when_noise_is_small():
    rows = np.random.default_rng(1).normal(size=(4000, 2, 16))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    released = safe_noise.release_mean(rows, sigma=1e-4)
    np.testing.assert_allclose(released.values, rows.mean(0), atol=7e-4)


DRAWS = """
import os
import numpy as np
from psa_utils import safe_noise
np.random.seed(0)
draw = lambda: print(safe_noise.release_mean(np.zeros((10, 1, 4)), sigma=1.0).values.tolist(), flush=True)
draw()
child = os.fork()
draw()
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_no_process_repeats_another():
    """Two processes started alike, each with a fork: every draw of all four is another one."""
    started = [subprocess.Popen([sys.executable, "-c", DRAWS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for process in started for line in process.communicate(timeout=300)[0].splitlines()]
    assert len(lines) == len(set(lines)) == 6


def test_a_release_cannot_be_seeded():
    assert list(inspect.signature(safe_noise.release_mean).parameters) == ["rows", "sigma"]
    assert "rng" in inspect.signature(safe_noise.demonstration_mean).parameters


def test_a_demonstration_says_so_and_leaves_the_global_generator_alone():
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    rows = np.zeros((10, 2, 3))
    shown = safe_noise.demonstration_mean(rows, sigma=1.0, rng=np.random.default_rng(5))
    real = safe_noise.release_mean(rows, sigma=1.0)
    assert (shown.rho, shown.mu, shown.values.shape) == (real.rho, real.mu, real.values.shape)
    assert (shown.seeded, real.seeded) == (True, False)
    assert "not private" in shown.sampler
    assert "OS entropy" in real.sampler
    assert np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_rows_that_are_not_finite_count_as_zero_and_raise_nothing():
    rows = np.random.default_rng(2).normal(size=(20, 2, 4)) / 4
    broken, zeroed = rows.copy(), rows.copy()
    broken[3, 0, 1], broken[7, 1, 2] = np.nan, np.inf
    zeroed[3, 0], zeroed[7, 1] = 0, 0
    assert np.array_equal(safe_noise._sums(broken), safe_noise._sums(zeroed))
    assert np.isfinite(safe_noise.release_mean(broken, sigma=1.0).values).all()


@pytest.mark.parametrize(
    ("shape", "sigma", "message"),
    [
        ((5, 3), 1.0, "shape"),
        ((0, 2, 3), 1.0, "shape"),
        ((5, 2, 3), 0.0, "sigma=0.0"),
        ((5, 2, 3), -1.0, "sigma=-1"),
        ((5, 2, 3), math.nan, "sigma=nan"),
        ((5, 2, 3), math.inf, "sigma=inf"),
        ((5, 2, 3), 1e-3, "n sigma = 0.005"),
        ((5, 2, 3), 1e12, "n sigma"),
    ],
)
def test_bad_arguments_fail_before_any_noise_is_drawn(shape, sigma, message, monkeypatch):
    monkeypatch.setattr(safe_noise, "_measurement", lambda scale: pytest.fail("noise was drawn"))
    with pytest.raises(ValueError, match=message):
        safe_noise.release_mean(np.zeros(shape), sigma=sigma)
