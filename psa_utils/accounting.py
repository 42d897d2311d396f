r"""How private a release is: sigma to epsilon and back, the paper's way and exactly.

One PSA release publishes, for each of k layers, a mean of n clipped differences (norm at most 1 each) plus
N(0, sigma^2 I). Replacing one demonstration moves a layer's mean by at most 2/n, all k layers together by
sqrt(k) 2/n in L2, so the release is one Gaussian mechanism with noise multiplier

    mu = sqrt(k) * sensitivity / sigma,

and is mu-GDP (Dong, Roth and Su 2022): its exact privacy curve is
delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2) (Balle and Wang 2018, Theorem 8).
The paper (Section 4, Table 2) instead applies the classical bound (Dwork and Roth 2014, Theorem A.1) to every
layer and adds the layers up. That bound is proven for epsilon < 1 only; both are reported, side by side.

With the paper's sycophancy setting, n = 1000, sigma = 0.02, five layers:

>>> paper = paper_epsilon(n=1000, sigma=0.02, layers=5)
>>> round(paper.per_layer, 2), round(paper.total, 2), paper.delta
(0.42, 2.09, 0.001)
>>> mu = gdp_mu(n=1000, sigma=0.02, layers=5)
>>> round(mu, 4), round(gaussian_epsilon(mu, 1 / 1000), 2), round(gaussian_epsilon(mu, 1e-5), 2)
(0.2236, 0.52, 0.82)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

RELATIONS = ("replace-one", "add-remove")


@dataclass(frozen=True)
class PaperEpsilon:
    """Epsilon by the paper's formula: for one layer, for all layers, at the total ``delta`` = 1/n."""

    per_layer: float
    total: float
    delta: float


def sensitivity(n: int, *, relation: str = "replace-one") -> float:
    """L2 sensitivity of the mean of n vectors of norm at most 1.

    Replace-one: one summand moves by at most 2, so 2/n. Add-remove: 1/n, but only because the denominator
    is the fixed, public n (a removed demonstration counts as a zero row); dividing by the changed count
    would cost 2/(n+1).

    Raises:
        ValueError: n below 1 or an unknown relation.

    >>> sensitivity(100), sensitivity(100, relation="add-remove")
    (0.02, 0.01)
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1: the number of private demonstrations")
    if relation not in RELATIONS:
        raise ValueError(f"relation={relation!r} is unknown; choose one of {', '.join(RELATIONS)}")
    return (2.0 if relation == "replace-one" else 1.0) / n


def gdp_mu(*, n: int, sigma: float, layers: int, relation: str = "replace-one") -> float:
    """Return mu of the joint release of ``layers`` layers with the same n and sigma.

    The k stacked means form one vector of L2 sensitivity sqrt(k) * sensitivity, with noise sigma on every
    coordinate: one Gaussian mechanism, no composition needed.
    """
    _positive("sigma", sigma)
    _positive("layers", layers)
    return math.sqrt(layers) * sensitivity(n, relation=relation) / sigma


def compose_mu(mus: Iterable[float]) -> float:
    """Mu of several releases from the same data: the root of the sum of squares (Dong et al., Corollary 3.3).

    >>> round(compose_mu([0.3, 0.4]), 12)
    0.5
    """
    return math.hypot(*mus)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Exact delta of a mu-GDP release at ``epsilon`` (Balle and Wang 2018, Theorem 8).

    >>> round(gaussian_delta(1.0, 0.0), 4), round(gaussian_delta(1.0, 1.0), 4)
    (0.3829, 0.1269)
    """
    _positive("mu", mu)
    if epsilon < 0:
        raise ValueError(f"epsilon={epsilon} must not be negative")
    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    # e^eps Phi(b) in the log domain: both factors leave the range of a double long before their product.
    return max(0.0, float(ndtr(a) - math.exp(epsilon + log_ndtr(b))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon at which a mu-GDP release is (epsilon, delta)-DP; inverse of :func:`gaussian_delta`.

    >>> round(gaussian_delta(0.7, gaussian_epsilon(0.7, 1e-6)) / 1e-6, 6)
    1.0
    """
    _positive("mu", mu)
    _probability("delta", delta)
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # delta(eps) <= Phi(mu/2 - eps/mu), so the root lies below the upper end.
    upper = mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta)) + 1)
    return float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, upper, xtol=1e-12, rtol=1e-12))


def mu_for_epsilon(epsilon: float, delta: float) -> float:
    """Largest mu whose release is (epsilon, delta)-DP.

    >>> round(gaussian_epsilon(mu_for_epsilon(2.0, 1e-5), 1e-5), 9)
    2.0
    """
    _positive("epsilon", epsilon)
    _probability("delta", delta)
    upper = 1.0
    while gaussian_delta(upper, epsilon) < delta:
        upper *= 2
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-9, upper, xtol=1e-14, rtol=1e-12))


def sigma_for_epsilon(epsilon: float, delta: float, *, n: int, layers: int, relation: str = "replace-one") -> float:
    """Smallest sigma whose joint release over ``layers`` layers is exactly (epsilon, delta)-DP.

    The paper's total for n = 1000 (epsilon 2.09) needs only a third of the noise it adds:

    >>> round(sigma_for_epsilon(2.09, 1 / 1000, n=1000, layers=5), 4)
    0.0062
    """
    mu = mu_for_epsilon(epsilon, delta)
    return math.sqrt(layers) * sensitivity(n, relation=relation) / mu


def paper_epsilon(*, n: int, sigma: float, layers: int) -> PaperEpsilon:
    """Epsilon as the paper computes it: classical Gaussian bound per layer, then basic composition.

    Per layer epsilon = 2 sqrt(2 ln(1.25/delta)) / (n sigma) with delta = 1/(k n); totals are k epsilon and
    k delta = 1/n. (The paper has k = 5 throughout and writes delta = 1/(5n).)
    """
    _positive("sigma", sigma)
    delta = 1 / (layers * n)
    per_layer = sensitivity(n) * math.sqrt(2 * math.log(1.25 / delta)) / sigma
    return PaperEpsilon(per_layer=per_layer, total=layers * per_layer, delta=1 / n)


def per_layer_epsilon(delta: float, *, n: int, sigma: float, layers: int) -> float:
    """Total epsilon at total ``delta`` when every layer is exact but layers are composed the basic way.

    Lies between the paper's number and the joint one; kept to show how much each step gains.

    >>> round(per_layer_epsilon(1 / 1000, n=1000, sigma=0.02, layers=5), 2)
    1.27
    """
    return layers * gaussian_epsilon(gdp_mu(n=n, sigma=sigma, layers=1), delta / layers)


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be a positive, finite number")


def _probability(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name}={value} must lie strictly between 0 and 1")
