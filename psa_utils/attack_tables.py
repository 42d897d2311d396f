"""Table 7: every attack's error rates and what they prove, with the paper's print below."""

import numpy as np
import pandas as pd

from .results import Table


def attacks(rows: pd.DataFrame, paper: pd.DataFrame) -> Table:
    """Table 7: one line per attack, the paper's print below; epsilons at one delta, all bounds lower ones."""
    names = ("epsilon_paper_formula", "epsilon_counts", "epsilon_gdp", "epsilon_gaussian", "epsilon_claim")
    printed = pd.DataFrame(
        {
            "adversary": rows.adversary,
            "method": rows.method,
            "behaviour": rows.behaviour,
            "n": rows.n.map("{:d}".format),
            "σ": [f"{s:g}" if m == "PSA" else "–" for s, m in zip(rows.sigma, rows.method, strict=True)],
            "multiplier": rows.multiplier.map("{:g}".format),
            "copies": rows.copies.map("{:d}".format),
            "FPR": rows.fpr.map("{:.3f}".format),
            "FNR": rows.fnr.map("{:.3f}".format),
            **{title: rows[name].map(_epsilon) for title, name in zip(EPSILONS, names, strict=True)},
        }
    )
    theirs = pd.DataFrame(
        {
            "adversary": "paper: black box",
            "method": paper.method + ", " + paper.model,
            "n": "1000",
            "FPR": paper.fpr.map("{:.3f}".format),
            "FNR": paper.fnr.map("{:.3f}".format),
            EPSILONS[0]: paper.epsilon_empirical.map("{:.1f}".format),
            EPSILONS[-1]: paper.epsilon_theoretical.map(_epsilon),
        }
    )
    return rows, pd.concat([printed, theirs], ignore_index=True).fillna("–")


EPSILONS = ("ε, formula", "ε ≥, counts", "ε ≥, GDP", "ε ≥, Gaussian", "ε, claim")


def _epsilon(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:.2f}" if np.isfinite(value) else "∞"


def reached(rows: pd.DataFrame, bound: str) -> str:
    """Shares of the claimed epsilon that a bound (``gdp`` or ``gaussian``) proves, from the lowest to the highest.

    >>> reached(pd.DataFrame({"epsilon_gdp": [0.9, 2.0], "epsilon_claim": [1.0, 2.0]}), "gdp")
    '90% to 100%'
    """
    share = rows[f"epsilon_{bound}"] / rows.epsilon_claim
    return f"{share.min():.0%} to {share.max():.0%}"
