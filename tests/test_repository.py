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

from psa_utils import artifacts, calibrate, config, lockcheck, paths

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


def artefact_files():
    entries = [(entry, profile) for profile in ("laptop", "laptop-caa") for entry in artifacts.registry().values()]
    return [(entry, profile, file) for entry, profile in entries for file in entry.files(profile)]


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
        numbers = pd.read_csv(file)
        assert len(numbers)
        assert set(config.BEHAVIOURS) == set(numbers.behaviour)
        assert numbers.select_dtypes("number").map(lambda x: x == x and abs(x) < 1e9).to_numpy().all()
    if file.suffix == ".pdf":
        assert b"CreationDate" not in file.read_bytes()
    if file.suffix == ".tex":
        assert file.read_text().count("\\begin") == file.read_text().count("\\end") == 2


@pytest.mark.parametrize("profile", ["laptop", "laptop-caa"])
def test_artefacts_belong_to_the_committed_code(profile):
    """Numbers of an older notebook would be a lie: the provenance names the code that is committed."""
    for entry in artifacts.registry().values():
        told = json.loads(entry.files(profile)[-1].read_text())
        assert told["notebook_code_sha256"] == artifacts.code_digest(paths.NOTEBOOKS / f"{entry.notebook}.ipynb")
        assert told["profile"] == json.loads(json.dumps(artifacts.asdict(config.load_profile(profile))))


def test_alignment_numbers_are_consistent():
    for profile in ("laptop", "laptop-caa"):
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
