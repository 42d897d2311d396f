"""The figures: one theme, methods told apart by colour and shape, numbers beside every picture."""

import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import artifacts, mechanism, paths
from .config import Profile
from .stages import METHODS

COLUMN = 3.5
"""Width of a text column, inches."""
PALETTE = dict(zip(METHODS, ("#555555", "#0072B2", "#D55E00", "#009E73"), strict=True))
MARKERS = dict(zip(METHODS, ("|", "s", "o", "D"), strict=True))
BEHAVIOUR_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def theme() -> None:
    """Set the look of every figure (Okabe and Ito's colours, readable at column width)."""
    sns.set_theme(style="ticks", context="paper")
    mpl.rcParams.update(
        {
            "font.size": 8,
            "axes.labelsize": 8,
            "axes.titlesize": 8,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "legend.frameon": False,
            "figure.dpi": 110,
            "savefig.dpi": 300,
            "pdf.fonttype": 42,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )


def save(name: str, profile: Profile, figure: Figure, numbers: pd.DataFrame, facts: Mapping[str, Any]) -> None:
    """Write the four files of figure ``name``: PNG, PDF, the plotted numbers, and provenance.

    Raises:
        ValueError: ``name`` is no figure of ``artifacts.toml``.
    """
    entry = artifacts.artifact(name)
    png, pdf, csv, json = entry.files(profile.name)
    # No dates or versions inside the files: the same numbers give the same bytes.
    for path, metadata in ((png, {"Software": None}), (pdf, {"CreationDate": None, "Producer": None})):
        with paths.atomic(path) as temporary:
            figure.savefig(temporary, metadata=metadata, bbox_inches="tight", pad_inches=0.03)
    artifacts.write_csv(csv, numbers)
    artifacts.write_json(json, artifacts.provenance(entry, profile, facts))


def geometry(numbers: pd.DataFrame, profile: Profile, width: int) -> Figure:
    """Draw Figure 2: norm (left) and cosine (right) of private vectors against the clipped mean's norm."""
    theme()
    figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.7), layout="constrained")
    signal = np.linspace(0.01, max(1.02 * numbers.signal.max(), 0.3), 200)
    noise = profile.sigma * np.sqrt(width)
    axes[0].plot(signal, np.hypot(signal, noise), color="black", lw=1, label="theory")
    axes[1].plot(signal, mechanism.expected_cosine(signal, profile.sigma, width), color="black", lw=1)
    colours = sns.color_palette("colorblind", 7)
    for (behaviour, group), marker, colour in zip(
        numbers.groupby("behaviour", sort=False), BEHAVIOUR_MARKERS, colours, strict=False
    ):
        for ax, column in zip(axes, ("private_norm", "cosine"), strict=True):
            _points(ax, group, column, marker, colour, behaviour)
    axes[0].axline((0, 0), slope=1, color="0.7", lw=0.8, ls=":")
    axes[0].set(ylabel="norm of the PSA vector", ylim=(0, None))
    axes[1].set(ylabel="cosine of PSA to clipped mean", ylim=(0, 1.02))
    for ax in axes:
        ax.set(xlabel="norm of the clipped mean, $s$", xlim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", handletextpad=0.3)
    return figure


def _points(ax: Axes, group: pd.DataFrame, column: str, marker: str, colour: Any, label: str) -> None:
    spread = group.groupby("signal")[column].agg(["mean", "min", "max"])
    bars = [spread["mean"] - spread["min"], spread["max"] - spread["mean"]]
    ax.errorbar(spread.index, spread["mean"], bars, fmt=marker, ms=4, lw=0.8, color=colour, label=label)


def alignment(cells: pd.DataFrame, moved: pd.Series) -> Figure:
    """Draw Figure 3: one row per behaviour, one point with its interval per method, one panel per answer format.

    ``cells`` are the rows of :func:`psa_utils.results.summary` for zero-shot and positive sign, ``moved`` says which
    of them are drawn filled.
    """
    theme()
    behaviours, formats = (list(dict.fromkeys(cells[name])) for name in ("behaviour", "format"))
    size = (COLUMN * (0.4 + 0.6 * len(formats)), 0.55 * len(behaviours) + 0.9)
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(1, len(formats), figsize=size, layout="constrained", **shared)
    for ax, fmt in zip(axes[0], formats, strict=True):
        _alignment_panel(ax, cells[cells.format == fmt], moved[cells.format == fmt], behaviours)
        ax.set_xlabel(
            "P(matching answer), mean over items" if len(formats) == 1 else f"P(matching answer), {fmt} answers"
        )
    handles = [_legend_handle(m) for m in METHODS]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, handletextpad=0.2, columnspacing=1.0)
    return figure


def _alignment_panel(ax: Axes, cells: pd.DataFrame, moved: pd.Series, behaviours: list[str]) -> None:
    offsets = dict(zip(METHODS, np.linspace(-0.27, 0.27, len(METHODS)), strict=True))
    for row, filled in zip(cells.itertuples(), moved, strict=True):
        _interval(ax, row, behaviours.index(row.behaviour) + offsets[row.method], filled=filled)
    for y in range(1, len(behaviours)):
        ax.axhline(y - 0.5, color="0.9", lw=0.6, zorder=0)
    ax.axvline(0.5, color="0.7", lw=0.8, ls=":", zorder=0)
    ax.set(yticks=range(len(behaviours)), ylim=(len(behaviours) - 0.5, -0.5))
    ax.set_yticklabels([re.sub("(corrigible|coordinate)-", r"\1-\n", b) for b in behaviours])
    ax.tick_params(axis="y", length=0)


def _interval(ax: Axes, row: Any, y: float, *, filled: bool) -> None:
    colour = PALETTE[row.method]
    if row.method == "zero-shot":
        ax.plot([row.probability] * 2, [y - 0.12, y + 0.66], color=colour, lw=0.8, alpha=0.5, zorder=1)
    ax.plot([row.probability_low, row.probability_high], [y, y], color=colour, lw=1.1, zorder=2)
    face = colour if filled else "white"
    ax.plot(row.probability, y, MARKERS[row.method], ms=5, mec=colour, mfc=face, mew=1.1, zorder=3)


def _legend_handle(method: str) -> mpl.lines.Line2D:
    colour = PALETTE[method]
    return mpl.lines.Line2D(
        [], [], color=colour, marker=MARKERS[method], ms=5, mfc=colour, mec=colour, lw=1.1, label=method
    )
