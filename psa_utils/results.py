"""From scored items to the numbers that figures and tables show, each with its interval."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from . import accounting, mechanism, paths, seeding, stages, stats
from .config import Profile
from .stages import METHODS, Extracted
from .stats import Interval

ZERO_SHOT = "zero-shot"
Table = tuple[pd.DataFrame, pd.DataFrame]
"""Full numbers, and their printed form as strings."""


def privacy(profile: Profile, sizes: dict[str, int]) -> pd.DataFrame:
    """Epsilon of one release per behaviour: the paper's print, its formula, and exact values (Table 2).

    ``sizes`` maps behaviours to n. ``paper_*`` columns are the paper's print for its own n.
    """
    printed = pd.read_csv(paths.PACKAGE / "paper" / "table2_privacy.csv").set_index("behaviour")
    return pd.DataFrame([_privacy_row(profile, b, n, printed.loc[b]) for b, n in sizes.items()])


def _privacy_row(profile: Profile, behaviour: str, n: int, printed: pd.Series) -> dict[str, object]:
    setting = {"sigma": profile.sigma, "layers": len(profile.layers)}
    formula, theirs = (accounting.paper_epsilon(n=m, **setting) for m in (n, int(printed.n)))
    mu = accounting.gdp_mu(n=n, **setting)
    add_remove = accounting.gdp_mu(n=n, **setting, relation="add-remove")
    return {
        "behaviour": behaviour,
        "paper_n": int(printed.n),
        "paper_layer": printed.epsilon_per_layer,
        "paper_total": printed.epsilon_total,
        "formula_total_at_paper_n": theirs.total,
        "n": n,
        "formula_layer": formula.per_layer,
        "formula_total": formula.total,
        "exact_1/n": accounting.gaussian_epsilon(mu, 1 / n),
        "exact_1e-5": accounting.gaussian_epsilon(mu, 1e-5),
        "exact_add_remove_1/n": accounting.gaussian_epsilon(add_remove, 1 / n),
        "mu": mu,
    }


def privacy_printed(table: pd.DataFrame) -> pd.DataFrame:
    """Table 2 as a reader sees it: strings, paper first, then ours."""
    columns = {
        "behaviour": ("behaviour", "{}"),
        "paper: n": ("paper_n", "{}"),
        "paper: ε per layer": ("paper_layer", "{:.2f}"),
        "paper: ε total": ("paper_total", "{:.1f}"),
        "its formula at its n": ("formula_total_at_paper_n", "{:.2f}"),
        "our n": ("n", "{}"),
        "formula: ε total": ("formula_total", "{:.2f}"),
        "exact ε, δ = 1/n": ("exact_1/n", "{:.2f}"),
        "exact ε, δ = 1e-5": ("exact_1e-5", "{:.2f}"),
        "add/remove, δ = 1/n": ("exact_add_remove_1/n", "{:.2f}"),
    }
    return pd.DataFrame({title: table[name].map(form.format) for title, (name, form) in columns.items()})


def geometry(profile: Profile, seed: int, behaviour: str, raw: Extracted, fmt: str) -> pd.DataFrame:
    """Norm and cosine of the private vectors against the non-private ones, per layer and noise seed.

    ``signal`` is the norm of the clipped, noiseless mean, ``theory`` the cosine to expect from it.
    """
    clipped = mechanism.clipped_mean(raw.private, clip=raw.clip)
    plain = mechanism.mean(raw.private)
    signal = np.linalg.norm(clipped, axis=1)
    columns = {
        "behaviour": behaviour,
        "layer": profile.layers,
        "signal": signal,
        "cosine_clipped_to_mean": mechanism.cosine(clipped, plain),
        "theory": mechanism.expected_cosine(signal, profile.sigma, raw.private.shape[2]),
    }
    frames = []
    for noise_seed in range(profile.noise_seeds):
        private = stages.draw(profile, seed, behaviour, raw, fmt, noise_seed)
        measured = {
            "noise_seed": noise_seed,
            "private_norm": np.linalg.norm(private, axis=1),
            "cosine": mechanism.cosine(private, clipped),
            "cosine_to_mean": mechanism.cosine(private, plain),
        }
        frames.append(pd.DataFrame({**columns, **measured}))
    return pd.concat(frames, ignore_index=True)


def summary(profile: Profile, seed: int, scored: pd.DataFrame) -> pd.DataFrame:
    """Mean probability and accuracy per behaviour, format, recipe, sign and method; see :func:`cells`."""
    scored = scored.assign(sign=np.sign(scored.multiplier).astype(int))
    metrics = ("probability", "accuracy", "probability_sum", "accuracy_sum")
    options = {"within": ("behaviour", "format"), "by": ("recipe", "sign", "method"), "metrics": metrics}
    return cells(profile, seed, scored, **options)


def cells(
    profile: Profile,
    seed: int,
    rows: pd.DataFrame,
    *,
    within: Sequence[str],
    by: Sequence[str],
    metrics: Sequence[str],
    unit: Sequence[str] = ("item",),
) -> pd.DataFrame:
    """Mean of every metric per group, with its interval, and its paired change from zero-shot.

    Args:
        profile: says how many bootstrap draws.
        seed: of the bootstrap.
        rows: one per unit and variant; zero-shot rows are the baseline of their group of ``within``.
        within: columns that set groups with a common baseline apart.
        by: columns that tell variants of a group apart, noise draws aside.
        metrics: columns to average; units with a missing value, on either side, are left out and not counted.
        unit: columns that name what is redrawn, ``("behaviour", "item")`` where behaviours are pooled.

    ``varies`` says what the first metric's interval is over; ``n_items`` counts units, the fewest of any metric.
    """
    found = []
    for where, group in rows.groupby(list(within), sort=False) if within else [((), rows)]:
        zero = group[group.method == ZERO_SHOT]
        for what, part in group.groupby(list(by), sort=False, dropna=False):
            labels = dict(zip([*within, *by], [*where, *what], strict=True))
            found.append({**labels, **_cell(profile, seed, part, zero, labels, metrics, list(unit))})
    return pd.DataFrame(found)


def _cell(
    profile: Profile,
    seed: int,
    part: pd.DataFrame,
    zero: pd.DataFrame,
    labels: Mapping[str, object],
    metrics: Sequence[str],
    unit: list[str],
) -> dict[str, object]:
    cell: dict[str, object] = {"n_items": len(part[unit].drop_duplicates()), "n_seeds": part.noise_seed.nunique()}
    for metric in metrics:
        table, base = paired(part, zero, metric, unit)
        rng = seeding.rng(seed, "bootstrap", metric, *map(str, labels.values()))
        options = {"rng": rng, "draws": profile.bootstrap}
        if len(base) < 2:  # a judge may leave fewer verdicts than an interval needs
            bar = change = Interval(np.nan, np.nan, np.nan, "too few")
        else:
            bar = stats.mean_interval(table, **options)
            change = stats.difference_interval(table, base, **options)
        cell |= {"n_items": min(cell["n_items"], len(base)), "varies": cell.get("varies", bar.varies)}
        cell |= {**_spread(metric, bar), **_spread(f"{metric}_change", change)}
    return cell


def paired(
    part: pd.DataFrame, control: pd.DataFrame, metric: str, unit: Sequence[str] = ("item",)
) -> tuple[np.ndarray, np.ndarray]:
    """Values (units, seeds) of one variant and (units,) of its control, over the units that both have."""
    table, base = (rows.pivot(index=list(unit), columns="noise_seed", values=metric) for rows in (part, control))
    both = table.join(base.mean(axis=1, skipna=False).rename("control"), how="inner").dropna()
    return both.drop(columns="control").to_numpy(), both.control.to_numpy()


def _spread(name: str, bar: Interval) -> dict[str, float]:
    return {name: bar.mean, f"{name}_low": bar.low, f"{name}_high": bar.high}


def moved(cell: pd.DataFrame, metric: str = "probability") -> pd.Series:
    """Whether the paired change from zero-shot excludes zero."""
    return (cell[f"{metric}_change_low"] > 0) | (cell[f"{metric}_change_high"] < 0)


def negative(profile: Profile, summed: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Table 20: numbers and printed form for multiplier -1, with the paper's Llama-2 print beside."""
    paper = printed_by_paper("T20 negative steering").set_index("method")
    chosen = summed[(summed.sign <= 0) & summed.recipe.isin(["none", profile.recipe])].copy()
    chosen["paper_llama2"] = [paper.loc[m, b] for m, b in zip(chosen.method, chosen.behaviour, strict=True)]
    rank = {"format": profile.formats.index, "behaviour": profile.behaviours.index, "method": METHODS.index}
    chosen = chosen.sort_values(list(rank), key=lambda column: column.map(rank[column.name]))
    printed = pd.DataFrame(
        {
            "behaviour": chosen.behaviour,
            "format": chosen.format,
            "method": chosen.method,
            "probability (%)": percent(chosen, "probability"),
            "change from zero-shot": percent(chosen, "probability_change", signed=True),
            "accuracy (%)": percent(chosen, "accuracy"),
            "paper, Llama-2 7B (%)": chosen.paper_llama2.map("{:.1f}".format),
        }
    )
    return chosen, printed


def printed_by_paper(table: str) -> pd.DataFrame:
    """Rows of one of the paper's tables for Llama-2 7B, in percent or points as printed."""
    paper = pd.read_csv(paths.PACKAGE / "paper" / "llama2_7b.csv")
    return paper[paper.table == table]


def percent(cells: pd.DataFrame, name: str, *, signed: bool = False) -> list[str]:
    """Format a metric and its interval in percent: "52.1 [48.0, 56.3]"; a dash where there is none."""
    sign = "+" if signed else ""
    triples = 100 * cells[[name, f"{name}_low", f"{name}_high"]].to_numpy()
    form = f"{{:{sign}.1f}} [{{:{sign}.1f}}, {{:{sign}.1f}}]"
    texts = ["–" if np.isnan(triple).any() else form.format(*triple) for triple in triples]
    return ["–" if signed and m == ZERO_SHOT else text for m, text in zip(cells.method, texts, strict=True)]
