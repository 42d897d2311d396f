import math

import numpy as np
import pytest
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from psa_utils import accounting, config, paths, results

ADD_REMOVE = privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE


def oracle(multiplier: float, count: int = 1) -> PLDAccountant:
    """dp-accounting on Gaussians of sensitivity 1: its REPLACE_ONE would double the sensitivity by itself."""
    accountant = PLDAccountant(ADD_REMOVE, value_discretization_interval=1e-4)
    return accountant.compose(dp_event.GaussianDpEvent(multiplier), count)


@pytest.mark.parametrize(("n", "sigma", "layers"), [(1000, 0.02, 5), (290, 0.02, 5), (320, 0.02, 1), (50, 0.1, 3)])
@pytest.mark.parametrize("relation", accounting.RELATIONS)
def test_exact_epsilon_agrees_with_dp_accounting(n, sigma, layers, relation):
    """The joint release is k Gaussian mechanisms with the same noise multiplier, composed."""
    mu = accounting.gdp_mu(n=n, sigma=sigma, layers=layers, relation=relation)
    theirs = oracle(sigma / accounting.sensitivity(n, relation=relation), layers)
    for delta in (1 / n, 1e-5):
        ours = accounting.gaussian_epsilon(mu, delta)
        assert ours == pytest.approx(theirs.get_epsilon(delta), rel=2e-3, abs=2e-4)


def test_rdp_is_an_upper_bound_of_the_exact_value():
    mu = accounting.gdp_mu(n=290, sigma=0.02, layers=5)
    rdp = RdpAccountant(neighboring_relation=ADD_REMOVE).compose(dp_event.GaussianDpEvent(1 / mu))
    exact = accounting.gaussian_epsilon(mu, 1e-5)
    assert exact < rdp.get_epsilon(1e-5) < 1.25 * exact


@given(mu=st.floats(0.05, 8), epsilon=st.floats(0, 20))
@settings(deadline=None)
def test_delta_is_the_hockey_stick_divergence(mu, epsilon):
    """delta(eps) = integral of (p - e^eps q)_+ for p = N(mu, 1), q = N(0, 1): the definition, by quadrature."""
    edge = mu / 2 + epsilon / mu
    excess = lambda x: norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x)  # noqa: E731
    expected, _ = quad(excess, edge, max(edge, mu) + 12, epsabs=1e-12, limit=200)
    assert accounting.gaussian_delta(mu, epsilon) == pytest.approx(expected, abs=1e-9)


@given(mu=st.floats(0.01, 20), delta=st.floats(1e-9, 0.3))
@settings(deadline=None)
def test_epsilon_inverts_delta(mu, delta):
    epsilon = accounting.gaussian_epsilon(mu, delta)
    assert epsilon >= 0
    if epsilon > 0:
        assert accounting.gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)


@given(epsilon=st.floats(0.05, 10), delta=st.floats(1e-8, 0.05), n=st.integers(2, 5000), layers=st.integers(1, 8))
@settings(deadline=None)
def test_sigma_for_epsilon_spends_exactly_epsilon(epsilon, delta, n, layers):
    sigma = accounting.sigma_for_epsilon(epsilon, delta, n=n, layers=layers)
    mu = accounting.gdp_mu(n=n, sigma=sigma, layers=layers)
    assert accounting.gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-6)


def test_layers_are_one_mechanism():
    """k layers jointly equal the composition of k single ones."""
    one = accounting.gdp_mu(n=400, sigma=0.02, layers=1)
    assert accounting.compose_mu([one] * 5) == pytest.approx(accounting.gdp_mu(n=400, sigma=0.02, layers=5))


def test_paper_per_layer_joint_are_ordered():
    setting = {"n": 1000, "sigma": 0.02, "layers": 5}
    paper = accounting.paper_epsilon(**setting).total
    stacked = accounting.per_layer_epsilon(1 / 1000, **setting)
    joint = accounting.gaussian_epsilon(accounting.gdp_mu(**setting), 1 / 1000)
    assert [round(e, 2) for e in (paper, stacked, joint)] == [2.09, 1.27, 0.52]


def test_classical_formula_fails_above_one():
    """Why it is not enough: at large epsilon the paper's per-layer claim is not even true."""
    n, sigma = 10, 0.02
    claim = accounting.paper_epsilon(n=n, sigma=sigma, layers=1)
    assert accounting.gaussian_epsilon(accounting.gdp_mu(n=n, sigma=sigma, layers=1), claim.delta) > claim.per_layer


def test_table_2_of_the_paper():
    sizes = {"sycophancy": 1000, "hallucination": 1000, "refusal": 408, "survival-instinct": 903}
    sizes |= {"myopic-reward": 950, "coordinate-other-ais": 360, "corrigible-neutral-HHH": 290}
    table = results.privacy(config.load_profile("laptop"), sizes)
    assert list(table.paper_n) == list(sizes.values())
    off = (table.formula_total - table.paper_total).abs().set_axis(table.behaviour)
    # The paper multiplies rounded per-layer values by 5, and prints 0.94 where its formula gives 0.97 (refusal).
    assert (off.drop("refusal") <= 0.1).all()
    assert 0.15 < off["refusal"] < 0.16
    np.testing.assert_allclose(table.formula_total, table.formula_total_at_paper_n)
    assert (table["exact_1/n"] < table.paper_total / 3).all()
    assert (table["exact_add_remove_1/n"] < table["exact_1/n"]).all()
    assert (paths.PACKAGE / "paper" / "table2_privacy.csv").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accounting.gdp_mu(n=10, sigma=0, layers=5), "sigma=0 must be"),
        (lambda: accounting.gdp_mu(n=10, sigma=float("nan"), layers=5), "sigma=nan must be"),
        (lambda: accounting.gdp_mu(n=0, sigma=1, layers=5), "n=0 must be at least 1"),
        (lambda: accounting.gdp_mu(n=10, sigma=1, layers=0), "layers=0 must be"),
        (lambda: accounting.sensitivity(5, relation="swap"), "relation='swap' is unknown"),
        (lambda: accounting.gaussian_epsilon(1, 0), "delta=0 must lie"),
        (lambda: accounting.gaussian_epsilon(1, 1), "delta=1 must lie"),
        (lambda: accounting.gaussian_delta(1, -1), "epsilon=-1 must not be negative"),
        (lambda: accounting.mu_for_epsilon(0, 1e-5), "epsilon=0 must be"),
        (lambda: accounting.paper_epsilon(n=5, sigma=-1, layers=5), "sigma=-1 must be"),
    ],
)
def test_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
