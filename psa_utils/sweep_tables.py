"""The tables of notebook 04: sweeps with the paper's print in brackets, and estimators at equal epsilon."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from . import accounting, results
from .ablations import SIGMAS
from .config import Profile
from .estimation import MEAN
from .results import Table, percent


def epsilons(profile: Profile, n: int) -> pd.DataFrame:
    """Epsilon of every sigma of the noise sweep for n pairs: the paper's formula, exact at delta 1/n and 1e-5."""
    rows = []
    for sigma in SIGMAS:
        if sigma == 0:
            rows.append({"sigma": sigma, "epsilon_paper": np.nan, "epsilon_exact": np.nan, "epsilon_1e-5": np.nan})
            continue
        setting = {"n": n, "sigma": sigma, "layers": len(profile.layers)}
        mu = accounting.gdp_mu(**setting)
        exact = {
            "epsilon_exact": accounting.gaussian_epsilon(mu, 1 / n),
            "epsilon_1e-5": accounting.gaussian_epsilon(mu, 1e-5),
        }
        rows.append({"sigma": sigma, "epsilon_paper": accounting.paper_epsilon(**setting).total, **exact})
    return pd.DataFrame(rows)


def pooled(
    profile: Profile, seed: int, rows: pd.DataFrame, by: Sequence[str], *, within: Sequence[str] = ()
) -> pd.DataFrame:
    """Probability and its change from zero-shot with all behaviours' items in one pool; see :func:`results.cells`."""
    options = {"within": within, "by": by, "metrics": ("probability",), "unit": ("behaviour", "item")}
    return results.cells(profile, seed, rows, **options)


def sweep(
    profile: Profile, seed: int, rows: pd.DataFrame, by: Sequence[str], paper: pd.DataFrame | None = None
) -> Table:
    """One line per setting: the pooled change and every behaviour's probability, the paper's print in brackets.

    ``by`` are the columns that tell settings apart; the first is ``recipe``. ``paper`` has one row per setting it
    printed, indexed by the last of ``by``.
    """
    every = pooled(profile, seed, rows, (*by, "method"))
    options = {"within": ("behaviour",), "by": (*by, "method"), "metrics": ("probability",)}
    single = results.cells(profile, seed, rows, **options)
    numbers = pd.concat([every.assign(behaviour="all"), single], ignore_index=True)
    printed = every[list(by)].map(lambda value: "–" if pd.isna(value) else str(value)).assign(method=every.method)
    printed["change, all (points)"] = percent(every, "probability_change", signed=True)
    for behaviour in profile.behaviours:
        own = single[single.behaviour == behaviour].reset_index(drop=True)
        printed[behaviour] = [
            f"{100 * value:.1f}{_print_of(paper, setting, behaviour)}"
            for value, setting in zip(own.probability, own[by[-1]], strict=True)
        ]
    return numbers, printed


def _print_of(paper: pd.DataFrame | None, setting: object, behaviour: str) -> str:
    return "" if paper is None or setting not in paper.index else f" ({paper.loc[setting, behaviour]:.1f})"


def paper_clips(table: str) -> pd.DataFrame:
    """The paper's clip sweep, indexed by the clip as :meth:`psa_utils.ablations.Sweeps.clips` names it."""
    paper = results.printed_by_paper(table)
    return paper.set_index(paper.setting.str.removeprefix("C="))


def estimators(profile: Profile, seed: int, cosines: pd.DataFrame, scored: pd.DataFrame, costs: pd.DataFrame) -> Table:
    """Estimators at equal (epsilon, delta): cosine to the mean over behaviours, the worst one, effect and its price.

    ``cosines`` are rows of :func:`psa_utils.estimation.compared`; ``scored`` item rows and ``costs`` rows of
    :func:`psa_utils.ablations.fluency` of the steered ones. The non-private mean stands on top.
    """
    means = cosines.groupby(["estimator", "epsilon", "behaviour"], sort=False).cosine.mean()
    numbers = means.groupby(["estimator", "epsilon"], sort=False).agg(["mean", "min"]).reset_index()
    reference = pd.DataFrame({"epsilon": numbers.epsilon.unique()}).assign(estimator=MEAN, mean=1.0, min=1.0)
    numbers = pd.concat([reference[numbers.columns], numbers], ignore_index=True)
    effect = pooled(profile, seed, scored, ("estimator", "method")).set_index("estimator")
    effect["loss"] = costs.groupby("estimator").loss.mean()
    wide = numbers.pivot(index="estimator", columns="epsilon", values="mean").loc[numbers.estimator.unique()]
    printed = wide.map("{:.2f}".format).rename(columns="cosine, ε = {:g}".format)
    printed["worst behaviour, ε = 1"] = (
        numbers[numbers.epsilon == 1.0].set_index("estimator")["min"].map("{:.2f}".format)
    )
    change = pd.Series(percent(effect.reset_index(), "probability_change", signed=True), index=effect.index)
    printed["change, ε = 1 (points)"] = change.reindex(printed.index, fill_value="–")
    printed["cost, ε = 1 (nats per token)"] = effect.loss.map("{:.2f}".format).reindex(printed.index, fill_value="–")
    columns = [c for c in effect.columns if c.startswith("probability_change")]
    changes = effect[[*columns, "loss"]].reset_index().assign(epsilon=1.0)
    printed = printed.rename(index={MEAN: "mean, not private"}).reset_index()
    return numbers.merge(changes, on=["estimator", "epsilon"], how="left"), printed
