"""The house: notebooks in the agreed form, Makefile, lock and README that tell the truth."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbconvert.filters import strip_ansi

from psa_utils import artifacts, calibrate, config, estimation, lockcheck, paths, results

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
README = (paths.ROOT / "README.md").read_text()
LAPTOP = config.load_profile("laptop")
notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(path):
    return [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]


def output_text(path) -> str:
    return strip_ansi(json.dumps([c.outputs for c in code_cells(path)]))


def test_ruff_is_content():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=paths.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@notebook
def test_notebook_form(path):
    cells = nbformat.read(path, 4).cells
    kernel = nbformat.read(path, 4).metadata.kernelspec.name
    prose = [c for c in cells if c.cell_type == "markdown"]
    assert kernel == "python3"
    assert len(prose) >= len(cells) - len(prose)
    tagged = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert len(tagged[0].source.splitlines()) <= 5
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= 15, cell.source
        assert not re.search(r"sys\.path|pip install|^[!%]", cell.source, re.MULTILINE)


@notebook
def test_committed_outputs_are_the_laptop_run_and_stable(path):
    text = output_text(path)
    assert '"laptop"' in text or "laptop" in text
    assert '"output_type": "error"' not in text
    assert '"stderr"' not in text
    assert str(paths.ROOT) not in text
    assert "it/s" not in text
    counts = [c.execution_count for c in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


ALL = set(config.BEHAVIOURS)
SWEPT = dict.fromkeys(("table17_noise", "table18_clip", "table19_clip_noiseless"), ALL | {"all"})
# Behaviours in the column of that name, where they are not just the seven.
BEHAVIOURS_OF = SWEPT | {
    "table5_mmlu": ALL | {"none"},  # zero-shot: no vector, so nobody's vector
    "fig5_noise": {"all"},  # items of all behaviours in one pool
    "fig_canaries": {config.BEHAVIOURS[0]},  # one behaviour's data are attacked through the model
}
POOLED = {"fig4_scaling", "fig5_clip", "table_layers", "fig_strength", "table_estimators", "fig6_tradeoff"}
"""No such column: behaviours pooled, or (Figure 6) curves of the first one."""


def steered(table):
    return table.estimator.isin((estimation.MEAN, *estimation.STEERED)) & (table.epsilon == estimation.STEERED_EPSILON)


def not_in_paper(name):
    return lambda table: ~table.method.isin(results.printed_by_paper(name).method)


CHANGE = ("probability_change", "probability_change_low", "probability_change_high")
EPSILONS = ("epsilon_paper", "epsilon_exact", "epsilon_1e-5")
# Numbers that are missing, by artefact and column: in exactly these rows, for the reason beside.
MISSING = {
    "fig5_noise": dict.fromkeys(EPSILONS, lambda t: t.sigma == 0),  # no noise, no epsilon
    "table17_noise": {"sigma": lambda t: t.method == "zero-shot"},
    # The paper printed MMLU, and added vectors only.
    "table5_mmlu": {"paper_llama2": lambda t: (t.sign < 0) | (t.set == "truthfulqa")},
    "table3_open_ended": {"paper_llama2": not_in_paper("T3 GPT-4 score 0-10")},
    "table21_negative_open_ended": {"paper_llama2": not_in_paper("T21 GPT-4 score 0-10")},
    "table_estimators": dict.fromkeys(
        (*CHANGE, "loss"), lambda t: ~steered(t)
    ),  # the rest has cosines, but steered no model
    "table7_mia": {"epsilon_counts": lambda t: t.copies > 1},  # delta of a group is another
    "fig6_tradeoff": dict.fromkeys(("low", "high"), lambda t: ~t.curve.isin(["white box", "grey box"])),  # no trials
}
ATTACKED = {
    **dict.fromkeys(("mu_claim", "epsilon_claim"), lambda t: t.method != "PSA"),  # no noise, no guarantee
    "epsilon_paper_formula": lambda t: (t.fnr == 0) & (t.fpr < 1),  # ln of a share over nothing
}
INFINITE = {"table7_mia": ATTACKED, "fig_canaries": ATTACKED}


def assert_schema(name: str, table: pd.DataFrame) -> None:
    """The behaviours an artefact is about, and numbers that are missing or infinite just where their meaning says."""
    assert len(table)
    assert ("behaviour" in table) == (name not in POOLED)
    if "behaviour" in table:
        assert set(table.behaviour) == BEHAVIOURS_OF.get(name, ALL)
    numbers = table.select_dtypes("number")
    for kind, exceptions, found in (("missing", MISSING, numbers.isna()), ("infinite", INFINITE, np.isinf(numbers))):
        for column, there in found.items():
            excused = exceptions.get(name, {}).get(column, lambda t: pd.Series(False, t.index))(table)
            assert there.tolist() == excused.tolist(), f"{name}: {kind} numbers in column {column}"
    assert (numbers.abs().replace(np.inf, 0).fillna(0) < 1e9).all(axis=None)


def test_exceptions_of_the_schema_name_artefacts():
    assert {*BEHAVIOURS_OF, *POOLED, *MISSING, *INFINITE} <= set(artifacts.registry())


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"cosine": np.nan}, "missing numbers in column cosine"),
        ({"cosine": np.inf}, "infinite numbers in column cosine"),
        ({"behaviour": "refusal"}, "refusal"),
    ],
)
def test_the_schema_sees_what_is_wrong(broken, what):
    good = pd.DataFrame({"behaviour": sorted(ALL), "cosine": 0.5})
    assert_schema("fig_estimators", good)
    with pytest.raises(AssertionError, match=what):
        assert_schema("fig_estimators", good.assign(**broken))


COMMITTED = ("laptop", "laptop-caa")
ARTEFACTS = tuple(artifacts.registry().values())


def artefact_files():
    return [(e, profile, file) for profile in COMMITTED for e in ARTEFACTS for file in e.files(profile)]


@pytest.mark.parametrize(("entry", "profile", "file"), artefact_files(), ids=lambda x: getattr(x, "name", None))
def test_committed_artefacts_exist_and_hold_their_schema(entry, profile, file):
    assert file.exists(), f"make figures PROFILE={profile}"
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        assert content["id"] == entry.id
        assert content["profile"]["name"] == profile
        assert {"seed", "packages", "notebook_code_sha256", "caption"} <= set(content)
        assert not re.search(r"20\d\d-\d\d-\d\d|/home/|/root/|/work/", file.read_text())
    if file.suffix == ".csv":
        assert_schema(entry.id, pd.read_csv(file))
    if file.suffix == ".pdf":
        assert b"CreationDate" not in file.read_bytes()
    if file.suffix == ".tex":
        assert file.read_text().count("\\begin") == file.read_text().count("\\end") == 2


@pytest.mark.parametrize("profile", COMMITTED)
def test_artefacts_belong_to_the_committed_code(profile):
    """Numbers of an older notebook would be a lie: the provenance names the code that is committed."""
    for entry in ARTEFACTS:
        told = json.loads(entry.files(profile)[-1].read_text())
        assert told["notebook_code_sha256"] == artifacts.code_digest(paths.NOTEBOOKS / f"{entry.notebook}.ipynb")
        assert told["profile"] == json.loads(json.dumps(artifacts.asdict(config.load_profile(profile))))


def test_alignment_numbers_are_consistent():
    for profile in COMMITTED:
        cells = pd.read_csv(paths.figures(profile) / "fig3_alignment.csv")
        assert set(cells.method) == {"zero-shot", "PCA", "Mean", "PSA"}
        assert (cells.n_items == 50).all()
        assert (cells.probability_low <= cells.probability).all()
        assert (cells.probability <= cells.probability_high).all()
        wide = cells.pivot(index=["behaviour", "format"], columns="method", values="probability")
        change = cells.pivot(index=["behaviour", "format"], columns="method", values="probability_change")["Mean"]
        np.testing.assert_allclose(wide["Mean"] - wide["zero-shot"], change, atol=1e-5)


def test_mean_steering_moves_most_behaviours():
    cells = pd.read_csv(paths.figures("laptop") / "fig3_alignment.csv")
    mean = cells[cells.method == "Mean"]
    assert (mean.probability_change_low > 0).sum() >= 4


def test_layers_and_multiplier_follow_the_rule_on_public_data():
    best = calibrate.choose(pd.read_csv(paths.tables("laptop") / "calibration.csv"))
    assert best.layers == f"{LAPTOP.layers[0]}-{LAPTOP.layers[-1]}"
    assert best.multiplier == LAPTOP.multiplier
    caa = config.load_profile("laptop-caa")
    assert (caa.layers, caa.multiplier, caa.model) == (LAPTOP.layers, LAPTOP.multiplier, LAPTOP.model)


def make(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run make as from a shell, although the tests themselves may run under `make test`."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, check=False, **options
    )


def makefile_database() -> str:
    return make("-pn", "figures").stdout


def test_make_knows_every_artefact_and_every_notebook():
    database = makefile_database()
    for entry in artifacts.registry().values():
        for file in entry.files("laptop"):
            assert f"./{file.relative_to(paths.ROOT)}" in database, file.name
    declared = re.search(r"^NOTEBOOKS := (.*)$", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert declared
    assert declared[1].split() == [p.stem for p in NOTEBOOKS]


def test_every_module_the_makefile_runs_exists():
    modules = set(re.findall(r"-m ((?:psa_utils|tests)[\w.]+)", (paths.ROOT / "Makefile").read_text()))
    assert "tests.benchmarks.bench_engines" in modules
    assert all(find_spec(module) for module in modules)


def test_the_environment_comes_before_everything_else():
    planned = make("-n", "test", "ACTIVE=", "VENV=build/absent/complete").stdout.splitlines()
    assert planned[0].startswith("rm -rf .venv")
    assert sum(line.startswith("rm -rf .venv") for line in planned[: planned.index("touch build/absent/complete")]) == 1


def test_old_make_is_told_so():
    text = (paths.ROOT / "Makefile").read_text()
    guard = "".join(text.splitlines(keepends=True)[: text.splitlines().index("endif") + 1])
    done = make("-f", "-", ".FEATURES=archives", input=guard)
    assert done.returncode != 0
    assert "GNU make >= 4.3 is needed" in done.stderr


def test_the_lock_is_exact_and_covers_what_we_ask_for():
    lines = (paths.ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line) for line in lines), "no markers, no local tags"
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["test"]
    assert not any("==" in line for line in asked)
    locked = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    assert {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in asked} <= locked


def test_lockcheck_sees_a_wrong_and_a_missing_version(tmp_path):
    lock = tmp_path / "lock"
    lock.write_text("pytest==0.0.1\nno-such-thing==1.0\n")
    wrong = lockcheck.differences(lock)
    assert wrong[0].startswith("pytest: ")
    assert "no-such-thing: missing, lock has 1.0" in wrong
    assert wrong[-1] == "psa-utils: not this checkout"
    assert lockcheck.differences(paths.ROOT / "requirements.lock") == []


def test_readme_names_real_make_targets_and_options():
    database = makefile_database()
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{re.escape(target)}:", database, re.MULTILINE), target
    for profile in re.findall(r"PROFILE=([\w-]+)", README):
        assert profile in config.available()


def test_readme_lists_every_artefact_with_its_notebook():
    for entry in artifacts.registry().values():
        assert re.search(rf"\| *`{entry.id}` *\|.*{re.escape(entry.paper)}.*`?{entry.notebook}", README), entry.id


def test_readme_numbers_are_those_of_the_tables():
    """The alignment table of the README, cell by cell, from the committed CSVs."""
    for profile, title in (("laptop", "mini"), ("laptop-caa", "CAA")):
        cells = pd.read_csv(paths.figures(profile) / "fig3_alignment.csv")
        cells = cells[cells.format == "text"].set_index(["behaviour", "method"])
        for behaviour in config.BEHAVIOURS:
            row = " | ".join(f"{100 * cells.probability[behaviour, m]:.1f}" for m in ("zero-shot", "Mean", "PSA"))
            assert f"| {behaviour} | {title} | {row} |" in README, (behaviour, title, row)


def test_no_path_of_this_machine_is_committed():
    names = subprocess.run(["git", "ls-files"], cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split():
        file = paths.ROOT / name
        if file.suffix not in (".png", ".pdf") and file.exists() and name != "tests/test_repository.py":
            assert not re.search(r"/(work|root|home)/\w", file.read_text()), name
