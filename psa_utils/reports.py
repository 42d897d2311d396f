"""The tables of notebook 03 beyond alignment: full numbers, and what a reader sees."""

from itertools import product

import numpy as np
import pandas as pd

from . import mechanism, results, stages, stats
from .config import BEHAVIOURS, RECIPES, Profile
from .results import ZERO_SHOT, Table, percent

PAIRS = (("Mean", ZERO_SHOT), ("PSA", ZERO_SHOT), ("PSA", "Mean"))


def comparisons(profile: Profile, scored: pd.DataFrame) -> Table:
    """Paired tests between methods over the same items, Holm-corrected over all of them, and what could be found.

    ``scored`` are item rows of the main format; the main recipe at positive multiplier is compared.
    """
    chosen = scored[(scored.multiplier >= 0) & scored.recipe.isin(["none", profile.recipe])]
    rows = [_comparison(chosen[chosen.behaviour == b], b, *pair) for b, pair in product(profile.behaviours, PAIRS)]
    numbers = pd.DataFrame(rows)
    numbers["p_holm"] = stats.holm(numbers.p)
    printed = pd.DataFrame(
        {
            "behaviour": numbers.behaviour,
            "comparison": numbers.treated + " − " + numbers.control,
            "difference (points)": (100 * numbers.difference).map("{:+.1f}".format),
            "p, Holm": numbers.p_holm.map(_starred),
            "detectable (points)": (100 * numbers.detectable).map("{:.1f}".format),
        }
    )
    return numbers, printed


def _starred(p: float) -> str:
    """A corrected p-value with its star.

    >>> _starred(0.0002), _starred(0.049), _starred(0.2)
    ('< 0.001*', '0.049*', '0.200')
    """
    return f"{'< 0.001' if p < 0.001 else f'{p:.3f}'}{'*' if p < 0.05 else ''}"


def _comparison(rows: pd.DataFrame, behaviour: str, treated: str, control: str) -> dict[str, object]:
    table, base = results.paired(rows[rows.method == treated], rows[rows.method == control], "probability")
    found = {"difference": float((table.mean(axis=1) - base).mean()), "p": stats.paired_p(table, base)}
    found |= {"detectable": stats.detectable(table, base), "n_items": len(base)}
    return {"behaviour": behaviour, "treated": treated, "control": control, **found}


def recipes(profile: Profile, summed: pd.DataFrame) -> Table:
    """Both recipes side by side: norm added per layer, cosine to the mean, and change from zero-shot."""
    fmt = profile.formats[0]
    rows = [
        {**strength, **_change(summed, behaviour, fmt, strength["recipe"], strength["method"])}
        for behaviour, recipe in product(profile.behaviours, RECIPES)
        for strength in _strengths(profile, behaviour, fmt, recipe)
    ]
    numbers = pd.DataFrame(rows)
    text = pd.DataFrame(
        {
            "behaviour": numbers.behaviour,
            "recipe": numbers.recipe,
            "method": numbers.method,
            "norm": numbers.norm.map("{:.1f}".format),
            "cosine to mean": numbers.cosine.map("{:.2f}".format),
            "change (points)": percent(numbers, "probability_change", signed=True),
        }
    )
    return numbers, text


def _strengths(profile: Profile, behaviour: str, fmt: str, recipe: str) -> list[dict[str, object]]:
    """Norm and cosine of each method's vectors, averaged over layers and noise draws."""
    vectors = stages.load_vectors(profile, behaviour, fmt, recipe=recipe)
    mean = next(v.values for v in vectors if v.record["method"] == "Mean").astype(float)
    rows = pd.DataFrame(
        {
            "method": v.record["method"],
            "norm": profile.multiplier * np.linalg.norm(v.values, axis=1).mean(),
            "cosine": mechanism.cosine(v.values.astype(float), mean).mean(),
        }
        for v in vectors
    )
    averaged = rows.groupby("method", sort=False, as_index=False).mean()
    return averaged.assign(behaviour=behaviour, recipe=recipe).to_dict("records")


def _change(summed: pd.DataFrame, behaviour: str, fmt: str, recipe: str, method: str) -> dict[str, float]:
    chosen = summed.query("behaviour == @behaviour and format == @fmt and recipe == @recipe and method == @method")
    row = chosen[chosen.sign > 0].iloc[0]
    return {name: row[name] for name in summed.columns if name.startswith("probability_change")}


def knowledge(profile: Profile, seed: int, scored: pd.DataFrame) -> Table:
    """Table 5: probability and accuracy of the correct answer under every behaviour's vectors, both signs."""
    rows = scored.assign(sign=np.sign(scored.multiplier).astype(int))
    options = {"within": ("set",), "by": ("behaviour", "sign", "method"), "metrics": ("probability", "accuracy")}
    numbers = results.cells(profile, seed, rows, **options)
    numbers["paper_llama2"] = [
        _paper_mmlu(row.set, row.method, row.behaviour, row.sign) for row in numbers.itertuples(index=False)
    ]
    printed = pd.DataFrame(
        {
            "set": numbers.set,
            "vector of": numbers.behaviour.replace("none", "–"),
            "method": _signed(numbers),
            "probability (%)": percent(numbers, "probability"),
            "change": percent(numbers, "probability_change", signed=True),
            "accuracy (%)": percent(numbers, "accuracy"),
            "paper, MMLU, Llama-2 7B": _or_dash(numbers.paper_llama2, "{:.1f}"),
        }
    )
    return numbers, printed


def _paper_mmlu(questions: str, method: str, behaviour: str, sign: int) -> float | None:
    """The paper's MMLU print; it has none for TruthfulQA or for subtracted vectors."""
    paper = results.printed_by_paper("T5 MMLU").set_index("method")
    if questions == "truthfulqa" or sign < 0:
        return None
    return float(paper.loc[method, BEHAVIOURS[0] if method == ZERO_SHOT else behaviour])


def _signed(cells: pd.DataFrame) -> list[str]:
    signs = {1: "+", 0: "", -1: "−"}
    return [f"{signs[sign]}{method}" for sign, method in zip(cells.sign, cells.method, strict=True)]


QUALITY = ("logp_per_token", "distinct_2", "repetition", "length")


def open_ended(profile: Profile, seed: int, judged: pd.DataFrame, sign: int, judge: str) -> Table:
    """Tables 3 and 21: judged open-ended answers at one sign, beside zero-shot, with the text's own quality.

    ``judged`` are answers with a column ``score`` and those of :func:`psa_utils.quality.measure`.
    """
    rows = judged.assign(sign=np.sign(judged.multiplier).astype(int))
    rows = rows[rows.sign.isin([0, sign])]
    options = {"within": ("behaviour",), "by": ("method",), "metrics": ("score", *QUALITY)}
    numbers = results.cells(profile, seed, rows, **options)
    numbers.insert(2, "judge", judge)
    name = "T3 GPT-4 score 0-10" if sign > 0 else "T21 GPT-4 score 0-10"
    paper = results.printed_by_paper(name).set_index("method")
    numbers["paper_llama2"] = [
        paper.loc[m, b] if m in paper.index else None for m, b in zip(numbers.method, numbers.behaviour, strict=True)
    ]
    printed = pd.DataFrame(
        {
            "behaviour": numbers.behaviour,
            "method": numbers.method,
            "score": _interval(numbers, "score", "{:.2f}"),
            "change": _interval(numbers, "score_change", "{:+.2f}"),
            "log p per token": _or_dash(numbers.logp_per_token, "{:.2f}"),
            "distinct-2": _or_dash(numbers.distinct_2, "{:.2f}"),
            "repetition": _or_dash(numbers.repetition, "{:.2f}"),
            "tokens": _or_dash(numbers.length, "{:.0f}"),
            "paper, GPT-4 0-10": _or_dash(numbers.paper_llama2, "{:.2f}"),
        }
    )
    return numbers, printed


def _or_dash(values: pd.Series, form: str) -> list[str]:
    """Format numbers; a dash where there is none.

    >>> _or_dash(pd.Series([0.5, np.nan]), "{:.2f}")
    ['0.50', '–']
    """
    return ["–" if pd.isna(value) else form.format(value) for value in values]


def _interval(cells: pd.DataFrame, name: str, form: str) -> list[str]:
    triples = cells[[name, f"{name}_low", f"{name}_high"]].to_numpy()
    whole = f"{form} [{form}, {form}]"
    texts = ["–" if np.isnan(triple).any() else whole.format(*triple) for triple in triples]
    changes = name.endswith("_change")
    return ["–" if changes and m == ZERO_SHOT else text for m, text in zip(cells.method, texts, strict=True)]


def examples(answers: pd.DataFrame, *, item: int = 0, words: int = 40) -> Table:
    """Table 4: one prompt per behaviour, answered zero-shot, under Mean and under the first PSA draw."""
    chosen = answers[(answers.multiplier >= 0) & (answers.noise_seed <= 0) & (answers.item == item)]
    numbers = chosen[chosen.method.isin((ZERO_SHOT, "Mean", "PSA"))][["behaviour", "question", "method", "answer"]]
    printed = numbers.assign(answer=[_shortened(text, words) for text in numbers.answer])
    return numbers, printed


def _shortened(text: str, words: int) -> str:
    """The first words of a text on one line.

    >>> _shortened("one two\\nthree", 2)
    'one two …'
    """
    pieces = text.split()
    return " ".join(pieces[:words]) + (" …" if len(pieces) > words else "")
