"""Figures of notebook 05: attackers against the curve that the guarantee allows, and what a canary leaves behind."""

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import audit, bounds
from .plotting import COLUMN, PALETTE, theme

ADVERSARIES = {"white box": "#009E73", "grey box": "#CC79A7", "black box": "#E69F00"}


def tradeoff(
    white: pd.DataFrame, grey: pd.DataFrame, mu: float, paper: pd.DataFrame, paper_mu: float
) -> tuple[Figure, pd.DataFrame]:
    """Draw Figure 6; returns it with the plotted curves (``panel``, ``curve``, ``fpr``, ``tpr``, band).

    Args:
        white: trials of the white box on PSA.
        grey: trials of the grey box on PSA.
        mu: what the guarantee of these trials allows.
        paper: the paper's printed rates (Table 7).
        paper_mu: what the guarantee of the paper's setting allows.
    """
    theme()
    figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 3.0), layout="constrained", sharey=True)
    fpr = np.linspace(0, 1, 201)
    curves = [_curve(axes[0], fpr, mu, "ours"), _curve(axes[1], fpr, paper_mu, "paper")]
    for trials, name in ((white, "white box"), (grey, "grey box")):
        curves.append(_roc(axes[0], trials, name))
    for row, marker in zip(paper.itertuples(), "osD^", strict=False):
        colour = PALETTE[row.method]
        axes[1].plot(row.fpr, 1 - row.fnr, marker, color=colour, ms=6, label=f"{row.method}, {row.model}", ls="none")
    points = paper.assign(panel="paper", curve=paper.method + ", " + paper.model, tpr=1 - paper.fnr)
    axes[0].set(title=f"measured, $\\mu$ = {mu:.2f}", ylabel="true positive rate", ylim=(0, 1.02))
    axes[1].set(title=f"printed in the paper, $\\mu$ = {paper_mu:.2f}")
    for ax in axes:
        ax.set(xlabel="false positive rate", xlim=(0, 1))
        ax.legend(loc="lower right", fontsize=7)
    return figure, pd.concat([*curves, points[["panel", "curve", "fpr", "tpr"]]], ignore_index=True)


def _curve(ax: Axes, fpr: np.ndarray, mu: float, panel: str) -> pd.DataFrame:
    tpr = bounds.allowed_tpr(fpr, mu)
    ax.plot(fpr, tpr, color="black", lw=1.2, label="largest that DP allows")
    ax.fill_between(fpr, tpr, 1, color="0.93", lw=0)
    ax.plot([0, 1], [0, 1], color="0.7", lw=0.8, ls=":")
    return pd.DataFrame({"panel": panel, "curve": "allowed", "fpr": fpr, "tpr": tpr})


def _roc(ax: Axes, trials: pd.DataFrame, name: str) -> pd.DataFrame:
    roc, colour = bounds.roc(audit.scores_of(trials)), ADVERSARIES[name]
    ax.plot(roc.fpr, roc.tpr, color=colour, lw=1.2, ls="-" if name == "white box" else "--", label=name)
    ax.fill_between(roc.fpr, roc.low, roc.high, color=colour, alpha=0.2, lw=0)
    return pd.DataFrame(
        {"panel": "ours", "curve": name, "fpr": roc.fpr, "tpr": roc.tpr, "low": roc.low, "high": roc.high}
    )


def canaries(rows: pd.DataFrame) -> Figure:
    """Draw how well attackers tell the worlds apart against the number of records: area under the ROC curve.

    ``rows`` are lines of Table 7 with ``adversary``, ``method``, ``n``, ``multiplier``, ``auc`` and its interval.
    """
    theme()
    figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.6), layout="constrained", sharey=True)
    chosen = rows[rows.copies == 1]
    grey = chosen[(chosen.adversary == "grey box") & (chosen.method == "Mean")]
    for i, (multiplier, part) in enumerate(grey.groupby("multiplier")):
        style = {"color": PALETTE["Mean"], "marker": "o^s"[i % 3], "ls": ("-", "--", ":")[i % 3]}
        _areas(axes[0], part, label=f"multiplier {multiplier:g}", shift=SPREAD ** (i - 1), **style)
    axes[0].set_title("grey box on the non-private mean")
    private = chosen[chosen.method == "PSA"]
    _allowed_areas(axes[1], private)
    for i, (adversary, marker) in enumerate(zip(ADVERSARIES, "Dov", strict=True)):
        part = private[private.adversary == adversary]
        style = {"color": ADVERSARIES[adversary], "marker": marker, "ls": "none"}
        _areas(axes[1], part, label=adversary, shift=SPREAD**i, **style)  # the white box stands at its n, on the curve
    axes[1].set_title("all attackers on PSA")
    for ax in axes:
        ax.axhline(0.5, color="0.7", lw=0.8, ls=":")
        ax.set(xscale="log", xlabel="private records $n$", ylim=(0.2, 1.02))
        ax.set_xticks(sorted(set(chosen.n)), labels=sorted(set(chosen.n)), minor=False)
        ax.minorticks_off()
        ax.legend(loc="lower left")
    axes[0].set_ylabel("area under the ROC curve")
    return figure


SPREAD = 1.12
"""Factor between the places of attackers with the same n, so that their bars stand side by side."""


def _areas(ax: Axes, rows: pd.DataFrame, *, label: str, shift: float, **style: object) -> None:
    part = rows.sort_values("n")
    bars = [part.auc - part.auc_low, part.auc_high - part.auc]
    ax.errorbar(part.n * shift, part.auc, yerr=bars, label=label, ms=4, lw=1, capsize=2, **style)


def _allowed_areas(ax: Axes, rows: pd.DataFrame) -> None:
    """The guarantee as a curve over n; mu n is the same for every n."""
    n = np.geomspace(rows.n.min(), rows.n.max(), 100)
    allowed = [bounds.allowed_auc(mu) for mu in (rows.n * rows.mu_claim).mean() / n]
    ax.plot(n, allowed, color="black", lw=1.2, label="largest that DP allows")
    ax.fill_between(n, allowed, 1.02, color="0.93", lw=0)
