"""Write a table as CSV (full numbers), Markdown and LaTeX (as printed), with its provenance."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from . import artifacts, paths
from .config import Profile

SPECIAL = {
    **{character: f"\\{character}" for character in "&%#_${}"},
    **{"^": r"\^{}", "~": r"\~{}", "\\": r"\textbackslash{}", "−": "$-$", "∞": r"$\infty$"},
    **{"|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}", "\n": " "},
    **{"ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$"},
}


def save(
    name: str,
    profile: Profile,
    numbers: pd.DataFrame,
    printed: pd.DataFrame,
    facts: Mapping[str, Any],
) -> None:
    """Write the four files of table ``name``.

    ``numbers`` goes to CSV; ``printed``, all strings as a reader sees them, to Markdown and LaTeX.

    Raises:
        ValueError: ``name`` is no table of ``artifacts.toml``.
    """
    entry = artifacts.artifact(name)
    csv, md, tex, json = entry.files(profile.name)
    artifacts.write_csv(csv, numbers)
    with paths.atomic(md) as temporary:
        temporary.write_text(f"{markdown(printed)}\n\n{entry.caption}\n")
    with paths.atomic(tex) as temporary:
        temporary.write_text(latex(printed, entry.caption))
    artifacts.write_json(json, artifacts.provenance(entry, profile, facts))


def markdown(printed: pd.DataFrame) -> str:
    """Render a frame of strings as a Markdown table.

    >>> print(markdown(pd.DataFrame({"n": ["8"], "epsilon": ["2.0"]})))
    | n | epsilon |
    |:--|--:|
    | 8 | 2.0 |
    """
    rows = [list(printed.columns), *printed.to_numpy().tolist()]
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    rule = "|:--|" + "--:|" * (len(printed.columns) - 1)
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(value: object) -> str:
    """One line, in which a bar is no border.

    >>> _cell("a|b\\nc")
    'a\\\\|b c'
    """
    return str(value).replace("|", r"\|").replace("\n", " ")


def latex(printed: pd.DataFrame, caption: str) -> str:
    """Render a frame of strings as a booktabs table with its caption."""
    columns = "l" + "r" * (len(printed.columns) - 1)
    rows = [list(printed.columns), *printed.to_numpy().tolist()]
    lines = [" & ".join(_escape(str(cell)) for cell in row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _escape(text: str) -> str:
    """Escape LaTeX's special characters.

    >>> _escape("50 % of a_b")
    '50 \\\\% of a\\\\_b'
    """
    return "".join(SPECIAL.get(character, character) for character in text)
