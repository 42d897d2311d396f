"""Run a notebook headless: ``python -m psa_utils.run 03_eval --profile laptop --seed 0``.

papermill executes a copy under a temporary name. Only if every cell completed and every promised figure and
table was written does it replace ``results/<profile>/notebooks/NAME.ipynb``; a failed run leaves
``NAME.FAILED.ipynb`` there and nothing else. The laptop run also refreshes the outputs shown in ``notebooks/``.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode

from . import artifacts, config, paths

DEFAULT_PROFILE = "laptop"
UNSTABLE_METADATA = ("papermill", "execution")


class RunError(RuntimeError):
    """A notebook did not do what it promised."""


def run(name: str, *, profile: str = DEFAULT_PROFILE, seed: int = 0) -> Path:
    """Execute notebook ``name`` and return the path of the executed copy.

    Raises:
        ValueError: no such notebook or profile.
        RunError: a parameter is not declared, a cell did not complete, or a promised file is missing.
        papermill.PapermillExecutionError: a cell raised.
    """
    source = paths.NOTEBOOKS / f"{name}.ipynb"
    if not source.exists():
        known = sorted(p.stem for p in paths.NOTEBOOKS.glob("*.ipynb"))
        raise ValueError(f"notebook={name!r} does not exist; choose one of {', '.join(known)}")
    config.load_profile(profile)
    parameters = {"profile": profile, "seed": seed}
    if missing := sorted(set(parameters) - set(papermill.inspect_notebook(source))):
        raise RunError(f"{source.name} declares no parameter(s) {missing} in its `parameters` cell")
    started = time.time()
    executed = _execute(source, parameters)
    _check_promises(name, profile, started)
    _write_manifest(paths.results(profile, name), seed)
    if profile == DEFAULT_PROFILE and paths.out() == paths.ROOT:
        _show_outputs(source, executed)
    return executed


def _execute(source: Path, parameters: dict[str, str | int]) -> Path:
    folder = paths.results(str(parameters["profile"]), "notebooks")
    folder.mkdir(parents=True, exist_ok=True)
    running, final = folder / f".{source.stem}.running.ipynb", folder / source.name
    failed = folder / f"{source.stem}.FAILED.ipynb"
    try:
        notebook = papermill.execute_notebook(
            source,
            running,
            parameters=parameters,
            kernel_name="python3",
            cwd=str(paths.ROOT),
            progress_bar=sys.stderr.isatty(),
            extra_arguments=["--IPKernelApp.log_level=40"],  # a local kernel over TCP needs no warning
        )
        _all_completed(source, notebook)
        nbformat.write(_stable(notebook), running)
    except BaseException:
        if running.exists():
            running.replace(failed)
        raise
    failed.unlink(missing_ok=True)
    running.replace(final)
    return final


def _all_completed(source: Path, notebook: NotebookNode) -> None:
    statuses = [(i, c.metadata.get("papermill", {}).get("status")) for i, c in enumerate(notebook.cells)]
    if bad := [i for i, status in statuses if status in ("failed", "pending", "running")]:
        raise RunError(f"{source.name}: cells {bad} did not complete")


def _stable(notebook: NotebookNode) -> NotebookNode:
    """Drop what differs from run to run: timings, papermill's notes, ids of the machine's kernel."""
    for holder in (notebook, *notebook.cells):
        for key in UNSTABLE_METADATA:
            holder.metadata.pop(key, None)
    return notebook


def _check_promises(name: str, profile: str, started: float) -> None:
    promised = [f for a in artifacts.registry().values() if a.notebook == name for f in a.files(profile)]
    # File systems may round times down to the second.
    late = [str(f) for f in promised if not f.exists() or f.stat().st_mtime < started - 1]
    if late:
        raise RunError(f"{name} promised but did not write: {', '.join(late)}")


def _write_manifest(folder: Path, seed: int) -> None:
    """List the stage's files with their digests; untouched if nothing changed, so that make stops there."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "manifest.json" and f.name[0] != ".")
    digests = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    text = json.dumps({"seed": seed, "files": digests}, indent=1, sort_keys=True)
    manifest = folder / "manifest.json"
    if not manifest.exists() or manifest.read_text() != text:
        with paths.atomic(manifest) as temporary:
            temporary.write_text(text)


def _show_outputs(source: Path, executed: Path) -> None:
    """Copy outputs of the executed cells into the notebook readers see, leaving its own cells as they are."""
    shown, ran = nbformat.read(source, 4), nbformat.read(executed, 4)
    ran.cells = [c for c in ran.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    counts = itertools.count(1)
    for cell, done in zip(shown.cells, ran.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = done.outputs, next(counts)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
    with paths.atomic(source) as temporary:
        nbformat.write(shown, temporary)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m psa_utils.run", description="Run one notebook headless.")
    parser.add_argument("notebook", help="name without .ipynb, e.g. 03_eval")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help=f"one of {', '.join(config.available())}")
    parser.add_argument("--seed", type=int, default=0, help="base seed of noise and bootstrap")
    args = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"  # committed outputs hold results, not library warnings
    try:
        run(args.notebook, profile=args.profile, seed=args.seed)
    except (ValueError, RuntimeError, papermill.PapermillExecutionError) as error:
        sys.exit(f"{args.notebook}: {error}")


if __name__ == "__main__":
    main()
