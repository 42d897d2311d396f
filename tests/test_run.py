"""The runner: what it refuses, what it leaves behind, what it never touches."""

import json
import subprocess
import sys

import nbformat
import papermill
import pytest

from psa_utils import artifacts, notebooks, paths, run

PARAMETERS = 'profile = "smoke"\nseed = 0'


@pytest.fixture
def project(monkeypatch, tmp_path):
    """A project with one notebook, `99_try`, writing below a temporary folder."""
    monkeypatch.setenv("PSA_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    paths.NOTEBOOKS.mkdir()
    return tmp_path


def write(*cells: str, parameters: str = PARAMETERS) -> None:
    notebook = nbformat.v4.new_notebook()
    first = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    notebook.cells = [first, *map(nbformat.v4.new_code_cell, cells)]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, paths.NOTEBOOKS / "99_try.ipynb")


KEEP = (
    "from psa_utils import paths\n"
    "folder = paths.results(profile, '99_try')\n"
    "folder.mkdir(parents=True, exist_ok=True)\n"
    "(folder / 'value.txt').write_text(str(seed))"
)


def test_a_run_leaves_a_copy_and_a_manifest(project):
    write(KEEP, "1 / 4")
    executed = run.run("99_try", profile="smoke", seed=3)
    cells = nbformat.read(executed, 4).cells
    assert cells[-1].outputs[0].data["text/plain"] == "0.25"
    assert "papermill" not in json.dumps(nbformat.read(executed, 4))
    manifest = paths.results("smoke", "99_try") / "manifest.json"
    assert json.loads(manifest.read_text())["seed"] == 3
    before = manifest.stat().st_mtime_ns
    run.run("99_try", profile="smoke", seed=3)
    assert manifest.stat().st_mtime_ns == before, "same results must not look new to make"
    assert "outputs" in nbformat.read(paths.NOTEBOOKS / "99_try.ipynb", 4).cells[0]
    assert not nbformat.read(paths.NOTEBOOKS / "99_try.ipynb", 4).cells[-1].outputs, "only laptop shows its outputs"


def test_a_failing_cell_leaves_a_failed_copy_and_nothing_else(project):
    write("1 / 0")
    with pytest.raises(papermill.PapermillExecutionError, match="ZeroDivisionError"):
        run.run("99_try", profile="smoke")
    left = sorted(p.name for p in paths.results("smoke", "notebooks").iterdir())
    assert left == ["99_try.FAILED.ipynb"]
    assert not (paths.results("smoke", "99_try") / "manifest.json").exists()
    write("1 / 4")
    run.run("99_try", profile="smoke")
    assert sorted(p.name for p in paths.results("smoke", "notebooks").iterdir()) == ["99_try.ipynb"]


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_an_early_exit_is_no_success(project, leave):
    write(leave, "2 + 2")
    with pytest.raises((run.RunError, papermill.PapermillExecutionError, RuntimeError)):
        run.run("99_try", profile="smoke")


def test_an_undeclared_parameter_is_refused(project):
    write("1", parameters='profile = "smoke"')
    with pytest.raises(run.RunError, match=r"declares no parameter\(s\) \['seed'\]"):
        run.run("99_try", profile="smoke")


def test_a_promised_file_that_is_not_written_is_a_failure(project, monkeypatch):
    entry = artifacts.Artifact("table_x", "table", "", "99_try", "", "")
    monkeypatch.setattr(artifacts, "registry", lambda: {"table_x": entry})
    write("1")
    with pytest.raises(run.RunError, match=r"promised but did not write: .*table_x\.csv"):
        run.run("99_try", profile="smoke")


def test_unknown_names(project):
    write("1")
    with pytest.raises(ValueError, match="notebook='98_x' does not exist; choose one of 99_try"):
        run.run("98_x")
    with pytest.raises(ValueError, match="profile='desktop' is unknown"):
        run.run("99_try", profile="desktop")


def test_command_line_reports_without_a_traceback():
    command = [sys.executable, "-m", "psa_utils.run", "01_extract", "--profile", "desktop"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("01_extract: profile='desktop' is unknown")


def test_only_code_counts_as_a_change(project):
    write("1 + 1")
    path = paths.NOTEBOOKS / "99_try.ipynb"
    before = notebooks.code_digest(path)
    notebook = nbformat.read(path, 4)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("Prose."))
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="noise")]
    nbformat.write(notebook, path)
    assert notebooks.code_digest(path) == before
    write("1 + 2")
    assert notebooks.code_digest(path) != before
