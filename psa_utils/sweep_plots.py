"""Figures 4 and 5 and the price of strength, in the theme of :mod:`psa_utils.plotting`."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .estimators import DEFAULT
from .plotting import COLUMN, MARKERS, PALETTE, theme

RECIPE_NAMES = {"matched": "equal strength", "paper": "as published"}
CHANGE = "change in P(matching), points"


def noise(pooled: pd.DataFrame, epsilons: pd.DataFrame) -> Figure:
    """Draw Figure 5, noise: pooled change from zero-shot against sigma, both recipes, epsilon under every sigma.

    ``pooled`` are the rows with behaviour "all" of :func:`psa_utils.sweep_tables.sweep`; ``epsilons`` comes from
    :func:`psa_utils.sweep_tables.epsilons`.
    """
    theme()
    figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.7), layout="constrained", sharey=True)
    labels = [_sigma_label(row) for row in epsilons.itertuples()]
    for ax, (recipe, title) in zip(axes, RECIPE_NAMES.items(), strict=True):
        rows = pooled[(pooled.recipe == recipe) & (pooled.method == "PSA")].set_index("sigma").loc[epsilons.sigma]
        _points(ax, np.arange(len(rows)), rows, "PSA")
        ax.axhline(100 * rows.probability_change.iloc[0], color="0.6", lw=0.8, ls="--", zorder=0)
        _finish(ax, labels, title)
        ax.set_xlabel(r"noise $\sigma$; total $\varepsilon$, exact (paper's formula)")
    axes[0].set_ylabel(CHANGE)
    return figure


def _sigma_label(row: tuple) -> str:
    if row.sigma == 0:
        return "0\n$\\infty$"
    return f"{row.sigma:g}\n{row.epsilon_exact:.1f}\n({row.epsilon_paper:.1f})"


def clip(pooled: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Draw Figure 5, clip: pooled change from zero-shot at every clip, without and with noise, both recipes."""
    theme()
    figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.7), layout="constrained", sharey=True)
    for ax, (recipe, title) in zip(axes, RECIPE_NAMES.items(), strict=True):
        rows = pooled[(pooled.recipe == recipe) & (pooled.method == "PSA")]
        noisy = rows.sigma > 0
        _points(
            ax, np.arange(len(names)) - 0.12, rows[~noisy].set_index("clip").loc[names], "Mean", "clipped, no noise"
        )
        _points(ax, np.arange(len(names)) + 0.12, rows[noisy].set_index("clip").loc[names], "PSA", "PSA")
        plain = pooled[(pooled.recipe == recipe) & (pooled.method == "Mean")].probability_change.iloc[0]
        ax.axhline(100 * plain, color="0.6", lw=0.8, ls="--", zorder=0, label="unclipped mean")
        _finish(ax, [name.replace("quantile ", "q ") for name in names], title)
        ax.set_xlabel("clip $C$ (q: quantile of public norms)")
    axes[0].set_ylabel(CHANGE)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def strength(cells: pd.DataFrame) -> Figure:
    """Draw alignment against fluency: one line per method, one point per multiplier.

    ``cells`` need ``method``, ``multiplier``, ``loss`` (nats per token of ordinary text) and the change's interval.
    """
    theme()
    figure, ax = plt.subplots(figsize=(COLUMN, 2.6), layout="constrained")
    for method, rows in cells.groupby("method", sort=False):
        ax.plot(rows.loss, 100 * rows.probability_change, color=PALETTE[method], lw=0.9, zorder=1)
        _points(ax, rows.loss.to_numpy(), rows, method, method)
        for row in rows.itertuples():
            offset, side = ((4, -9), "left") if method == "PSA" else ((-4, 5), "right")
            spot = (row.loss, 100 * row.probability_change)
            ax.annotate(f"{row.multiplier:g}", spot, offset, textcoords="offset points", ha=side, fontsize=6.5)
    ax.axhline(0, color="0.7", lw=0.8, ls=":", zorder=0)
    ax.set(xlabel="cost, nats per token of ordinary text", ylabel=CHANGE)
    ax.margins(x=0.1)  # room for the first label
    ax.legend(loc="lower right")
    return figure


SHOWN = {
    "psa-paper": ("PSA, paper's accounting", "#999999", "v"),
    "psa-exact": ("PSA, exact accounting", "#009E73", "D"),
    "dp-jl": ("DP-JL", "#CC79A7", "x"),
    "efron-morris": ("unit norm, Efron-Morris", "#E69F00", "^"),
    "block-efron-morris": ("the same, public eigenbasis", "#56B4E9", "s"),
    DEFAULT: ("shared vector, public prior, lift", "#0072B2", "o"),
}


def estimators(cosines: pd.DataFrame) -> Figure:
    """Draw the mean cosine over behaviours against epsilon, one line per estimator; bars: lowest to highest behaviour.

    ``cosines`` are rows of :func:`psa_utils.estimation.compared`.
    """
    theme()
    figure, ax = plt.subplots(figsize=(1.45 * COLUMN, 2.9), layout="constrained")
    means = cosines.groupby(["estimator", "epsilon", "behaviour"]).cosine.mean()
    for i, (name, (label, colour, marker)) in enumerate(SHOWN.items()):
        rows = means[name].groupby("epsilon").agg(["mean", "min", "max"])
        x = rows.index * 1.03 ** (i - 2.5)
        bars = [rows["mean"] - rows["min"], rows["max"] - rows["mean"]]
        style = {"fmt": f"{marker}-", "ms": 4, "lw": 1.0, "elinewidth": 0.6, "color": colour}
        ax.errorbar(x, rows["mean"], bars, label=label, **style)
    ticks = sorted(cosines.epsilon.unique())
    ax.set(xscale="log", xlabel="total $\\varepsilon$ at $\\delta = 10^{-5}$", ylabel="cosine to the non-private mean")
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_ylim(0, 1.02)
    figure.legend(loc="outside right center", fontsize=7)
    return figure


def scaling(cells: pd.DataFrame) -> Figure:
    """Draw Figure 4: pooled change from zero-shot under Mean and PSA against the number of parameters."""
    theme()
    figure, ax = plt.subplots(figsize=(COLUMN, 2.5), layout="constrained")
    for method, shift in (("Mean", 0.93), ("PSA", 1.07)):
        rows = cells[cells.method == method].sort_values("parameters")
        ax.plot(shift * rows.parameters, 100 * rows.probability_change, color=PALETTE[method], lw=0.7, zorder=1)
        _points(ax, shift * rows.parameters.to_numpy(), rows, method, method)
    ax.axhline(0, color="0.7", lw=0.8, ls=":", zorder=0)
    models = cells.drop_duplicates("model").sort_values("parameters")
    ax.set(xscale="log", ylabel=CHANGE, xlim=(0.4 * models.parameters.min(), 2.5 * models.parameters.max()))
    ax.set_xticks(models.parameters, [f"{m}\n{_size(n)}" for m, n in zip(models.model, models.parameters, strict=True)])
    ax.minorticks_off()
    ax.legend(loc="upper left")
    return figure


def _size(parameters: int) -> str:
    """A number of parameters as one writes it.

    >>> _size(134_515_008), _size(7_615_616_512), _size(60_000)
    ('135M', '7.6B', '60k')
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.{1 if unit == 1e9 else 0}f}{name}"
    return str(parameters)


def _points(ax: Axes, x: np.ndarray, rows: pd.DataFrame, method: str, label: str | None = None) -> None:
    middle, low, high = (100 * rows[f"probability_change{s}"].to_numpy() for s in ("", "_low", "_high"))
    bars = [middle - low, high - middle]
    style = {"color": PALETTE[method], "ms": 4.5, "lw": 1.0, "zorder": 2}
    ax.errorbar(x, middle, bars, fmt=MARKERS[method], label=label, **style)


def _finish(ax: Axes, labels: Sequence[str], title: str) -> None:
    ax.axhline(0, color="0.7", lw=0.8, ls=":", zorder=0)
    ax.set_xticks(range(len(labels)), labels)
    ax.set_title(title)
