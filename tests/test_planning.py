import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psa_utils import accounting, mechanism, planning, seeding, shrinkage

SIZES = [8, 24, 100, 444]
ENERGIES = [0.2, 0.08, 0.06, 0.02]


def simulated(sigma: float, energies, sizes, *, oracle: bool, draws: int = 150) -> float:
    rng = seeding.rng(0, "planning", sum(sizes))
    directions = [rng.normal(size=m) for m in sizes]
    signal = [v * math.sqrt(e) / np.linalg.norm(v) for e, v in zip(energies, directions, strict=True)]
    got = []
    for _ in range(draws):
        made = []
        for m in signal:
            y, e = m + rng.normal(0, sigma, m.size), m @ m
            made.append(y * e / (e + m.size * sigma**2) if oracle else shrinkage.james_stein(y, sigma))
        got.append(float(mechanism.cosine(np.concatenate(made)[None], np.concatenate(signal)[None])[0]))
    return float(np.mean(got))


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.05])
def test_one_block_is_the_closed_form_and_what_noise_does(sigma):
    closed = float(mechanism.expected_cosine(np.array(0.6), sigma, 576))
    assert planning.expected_cosine(sigma, [0.36], [576]) == pytest.approx(closed, rel=1e-12)
    assert simulated(sigma, [0.36], [576], oracle=True) == pytest.approx(closed, abs=0.01)


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.05])
def test_blocks_are_what_the_best_factors_do_and_james_stein_nearly(sigma):
    expected = planning.expected_cosine(sigma, ENERGIES, SIZES)
    assert simulated(sigma, ENERGIES, SIZES, oracle=True) == pytest.approx(expected, abs=0.01)
    assert expected - 0.04 < simulated(sigma, ENERGIES, SIZES, oracle=False) < expected + 0.01


def few_pairs(width: int) -> np.ndarray:
    """Mean of 24 unit-norm differences (width,) that share a direction; its norm is about 0.64."""
    rng = seeding.rng(0, "few pairs", width)
    rows = rng.normal(size=width) + 1.3 * rng.normal(size=(24, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(axis=0)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 32.0])
def test_a_wide_release_of_few_pairs_is_as_good_as_planned(epsilon):
    """d = 4096, n = 24: noise 2/(n mu) straight on the mean, 400 times; cosines written out, without the package's."""
    mean, draws = few_pairs(4096), 400
    sigma = 2 / 24 / accounting.mu_for_epsilon(epsilon, 1e-5)
    noisy = mean + sigma * seeding.rng(0, "wide", str(epsilon)).standard_normal((draws, 4096))
    cosines = noisy @ mean / np.linalg.norm(noisy, axis=1) / np.linalg.norm(mean)
    expected = planning.expected_cosine(sigma, [mean @ mean], [4096])
    assert abs(cosines.mean() - expected) < 3 * cosines.std() / math.sqrt(draws)


@pytest.mark.parametrize("sigma", [0.005, 0.02])
def test_a_wide_release_in_blocks_is_as_good_as_planned(sigma):
    """d = 4096: most energy in few public directions, as an eigenbasis of public pairs leaves it."""
    sizes = [64, 448, 3584]
    energies = [0.25, 0.09, 0.04]
    expected = planning.expected_cosine(sigma, energies, sizes)
    assert simulated(sigma, energies, sizes, oracle=True) == pytest.approx(expected, abs=0.005)


@given(target=st.floats(0.05, 0.95), epsilon=st.floats(0.1, 8), radius=st.sampled_from([1.0, 5**0.5]))
@settings(deadline=None, max_examples=50)
def test_n_is_the_smallest_that_reaches_the_target(target, epsilon, radius):
    n = planning.demonstrations(
        target, epsilon=epsilon, delta=1e-5, energies=ENERGIES, sizes=SIZES, radius=radius, ceiling=0.97
    )
    mu = accounting.mu_for_epsilon(epsilon, 1e-5)

    def reached(count):
        sigma = radius * accounting.sensitivity(count) / mu
        return planning.expected_cosine(sigma, ENERGIES, SIZES, ceiling=0.97)

    assert reached(n) >= target
    assert n == 1 or reached(n - 1) < target


def test_n_against_the_algebra_of_one_block():
    """cos = s / sqrt(s^2 + d sigma^2) solved for n: n = 2 radius sqrt(d) cos / (mu s sqrt(1 - cos^2))."""
    mu = accounting.mu_for_epsilon(2.0, 1e-5)
    by_hand = 2 * math.sqrt(5 * 4096) * 0.8 / (mu * 0.5 * 0.6)
    got = planning.demonstrations(0.8, epsilon=2.0, delta=1e-5, energies=[0.25], sizes=[4096], radius=5**0.5)
    assert got == math.ceil(by_hand)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0.99, "ceiling": 0.9}, r"target=0.99 must lie in \(0, 0.9\)"),
        ({"target": 0}, "target=0 must lie"),
        ({"energies": [0.1, 0.2]}, r"energies=\[0.1, 0.2\] and sizes=\[576\] must pair"),
        ({"energies": [0.0]}, "must pair energies"),
        ({"epsilon": -1}, "epsilon=-1 must be a positive"),
    ],
)
def test_impossible_plans_are_named(change, message):
    plan = {"target": 0.8, "epsilon": 1.0, "delta": 1e-5, "energies": [0.25], "sizes": [576], **change}
    with pytest.raises(ValueError, match=message):
        planning.demonstrations(plan.pop("target"), **plan)
