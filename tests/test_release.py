"""``psa release`` from end to end on a tiny model: order of events, what the record says, what is refused and when."""

import errno
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from psa_utils import (
    accounting,
    activations,
    arguments,
    cli,
    describe,
    estimators,
    mechanism,
    models,
    packaged,
    pairs,
    paths,
    record,
    safe_noise,
    steering,
    target,
    vectors,
)
from psa_utils import release as releasing
from psa_utils.estimators import ESTIMATORS
from psa_utils.ledger import BudgetError, Ledger
from psa_utils.vectors import SteeringVectors
from tests.releases import small_disk

N, EPSILON, DELTA = 6, 4.0, 1e-6
ROWS = [
    {"question": f"May I come at {hour}?", "positive": f"Gladly, at {hour} sharp.", "negative": f"No, {hour} is full."}
    for hour in range(8, 8 + N)
]
JOINT = ("joint-clip", "shared", estimators.DEFAULT)


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny-random")


@pytest.fixture
def once(tiny, monkeypatch):
    """Load the model once for all tests."""
    monkeypatch.setattr(releasing, "load", lambda name, **_: tiny)


@pytest.fixture
def folder(tmp_path):
    """Where private pairs lie and vectors go."""
    (tmp_path / "made").mkdir()
    write(tmp_path / "pairs.jsonl", ROWS)
    return tmp_path


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def release(folder: Path, *, name: str = "v", **changes) -> record.PrivacyRecord:
    chosen = {"model": "tiny-random", "pairs": folder / "pairs.jsonl", "epsilon": EPSILON, "delta": DELTA}
    return releasing.release(**{**chosen, "out": folder / "made" / f"{name}.safetensors", **changes})


def values(folder: Path, name: str = "v") -> np.ndarray:
    return record.read(folder / "made" / f"{name}.safetensors")[0].values


def made(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "made").iterdir())


def psa(*argv) -> int:
    try:
        return cli.main([str(arg) for arg in argv])
    except SystemExit as stop:
        return stop.code


# From end to end


def test_from_pairs_to_steering_in_four_commands(folder, tiny, capsys, monkeypatch):
    file = folder / "made" / "v.safetensors"
    ask = ["--model", "tiny-random", "--pairs", folder / "pairs.jsonl", "--epsilon", "4", "--delta", "1e-6"]
    assert psa("release", *ask, "--out", file) == 0
    assert capsys.readouterr() == (f"{file}\n", "")
    assert made(folder) == ["v.safetensors"]

    assert psa("inspect", file) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("(4, 1e-06)-DP", f"one pair of n = {N}", "OS entropy", "tiny-random (llama)", "certified by opendp"):
        assert part in text

    assert psa("export", file, "--to", "numpy") == 0
    found, made_record = record.read(file)
    with np.load(file.with_suffix(".npz")) as exported:
        np.testing.assert_array_equal(exported["values"], found.values)

    monkeypatch.setenv("COLUMNS", "400")
    assert psa("chat", "--model", "tiny-random", "--vector", file, "--prompt", "Tea?", "--max-new-tokens", 3) == 0
    assert f"MULTIPLIER {releasing.MULTIPLIER:g}" in capsys.readouterr().out
    assert made_record.model.digest == tiny.revision


def test_the_vector_steers(folder, once, tiny):
    release(folder)
    ids = torch.tensor([tiny.encode_chat("Tea?")])
    plain = tiny.model(ids).logits
    with steering.apply(tiny, SteeringVectors.load(folder / "made" / "v.safetensors"), multiplier=1.0):
        assert not torch.allclose(tiny.model(ids).logits, plain, atol=1e-3)


# What the record says


@pytest.mark.parametrize("name", ["psa-exact", "unit", *JOINT])
@pytest.mark.parametrize("chosen", [None, (4, 2)])
def test_the_record_follows_from_the_estimator(folder, once, name, chosen):
    kept = release(folder, estimator=name, layers=chosen)
    layers = (1, 2, 3, 4, 5) if chosen is None else (2, 4)
    mu = accounting.mu_for_epsilon(EPSILON, DELTA)
    radius = 1 if name in JOINT else math.sqrt(len(layers))
    clips = {"psa-exact": len(layers), "joint-clip": 1}.get(name)
    assert record.read(folder / "made" / "v.safetensors")[1] == kept
    assert (kept.unit, kept.n, kept.layers, kept.estimator, kept.seed) == ("pair", N, layers, name, None)
    assert kept.bounded == ("joint" if name in JOINT else "per-layer")
    assert kept.norm_rule == ("clip" if clips else "unit-norm")
    assert (kept.clip and len(kept.clip), bool(kept.clip_source)) == (clips, bool(clips))
    assert math.isclose(kept.mu, mu, rel_tol=1e-9)
    assert math.isclose(kept.sigma, 2 * radius / (N * mu), rel_tol=1e-9)
    assert math.isclose(kept.certificate.rho, mu**2 / 2, rel_tol=1e-6)
    by_delta = {claim.delta: claim.epsilon for claim in kept.epsilons}
    assert set(by_delta) == {1 / N, 1e-5, DELTA}
    assert math.isclose(by_delta[DELTA], EPSILON, rel_tol=1e-6)


def test_every_estimator_that_reads_private_data_can_be_released(folder, once):
    for name in set(ESTIMATORS) - {"public-only"}:
        kept = release(folder, name=name, estimator=name, layers=(2, 3))
        assert record.read(folder / "made" / f"{name}.safetensors")[1] == kept
        assert kept.mu <= accounting.mu_for_epsilon(EPSILON, DELTA) * (1 + 1e-9), name


def test_vectors_have_the_strength_of_public_means(folder, once, tiny):
    release(folder)
    public = releasing.Public.of(*releasing.corpus.differences(tiny, (1, 2, 3, 4, 5)))
    np.testing.assert_allclose(np.linalg.norm(values(folder), axis=1), public.strength, rtol=1e-5)


def test_with_users_the_person_is_the_unit(folder, once, monkeypatch):
    write(folder / "pairs.jsonl", [{**row, "user": f"u{i % 3}"} for i, row in enumerate(ROWS)])
    seen = []
    draw = safe_noise.release_mean
    monkeypatch.setattr(safe_noise, "release_mean", lambda rows, **at: seen.append(rows) or draw(rows, **at))
    kept = release(folder)
    mu = accounting.mu_for_epsilon(EPSILON, DELTA)
    assert (kept.unit, kept.n, len(seen[0])) == ("person", 3, 3)
    assert math.isclose(kept.sigma, 2 / (3 * mu), rel_tol=1e-9)
    assert "one person of n = 3" in describe.describe(kept)


def test_the_records_suggested_strength_is_the_owners_or_the_public_one(folder, once):
    assert release(folder).multiplier == releasing.MULTIPLIER
    assert release(folder, name="w", multiplier=-2.0).multiplier == -2.0


def test_no_path_of_a_local_model_enters_the_file(folder, monkeypatch):
    local = folder / "home-of-ann" / "mine"
    shutil.copytree(packaged.tiny_random(), local)
    assert release(folder, model=str(local)).model.id == "mine"
    monkeypatch.chdir(local)
    assert release(folder, name="w", model=".", ledger=folder / "l").model.id == "mine"
    for file in (folder / "made" / "v.safetensors", folder / "made" / "w.safetensors", folder / "l"):
        assert b"home-of-ann" not in file.read_bytes()


def test_device_and_dtype_reach_the_model(folder, monkeypatch, tiny):
    asked = []
    monkeypatch.setattr(releasing, "load", lambda name, **options: asked.append((name, options)) or tiny)
    assert run(folder) == 0
    assert run(folder, "--dtype", "bfloat16", "--device", "auto", "--out", folder / "made" / "w.safetensors") == 0
    assert asked == [
        ("tiny-random", {"revision": None, "dtype": "float32", "device": "cpu"}),
        ("tiny-random", {"revision": None, "dtype": "bfloat16", "device": "auto"}),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_activations_and_changes_no_guarantee(folder, dtype):
    seeded = {"demonstration": 3, "estimator": "unit", "epsilon": 50.0}
    full, half = (release(folder, name=name, dtype=name, **seeded) for name in ("float32", dtype))
    assert (half.mu, half.sigma, half.epsilons, half.model) == (full.mu, full.sigma, full.epsilons, full.model)
    a, b = values(folder, "float32"), values(folder, dtype)
    assert not np.array_equal(a, b)
    assert mechanism.cosine(a, b).min() > 0.99


# Noise


def test_two_releases_differ_and_two_demonstrations_do_not(folder, once):
    for name, seed in {"a": None, "b": None, "c": 7, "d": 7, "e": 8}.items():
        kept = release(folder, name=name, demonstration=seed)
        assert (kept.seed, kept.seeded, kept.certificate is None) == (seed, seed is not None, seed is not None)
    assert not np.array_equal(values(folder, "a"), values(folder, "b"))
    np.testing.assert_array_equal(values(folder, "c"), values(folder, "d"))
    assert not np.array_equal(values(folder, "c"), values(folder, "e"))
    assert describe.describe_file(*record.read(folder / "made" / "c.safetensors")).startswith("DEMONSTRATION")


def test_replacing_a_pair_leaves_every_other_row_bit_for_bit(folder, tiny):
    rows = [*ROWS[:2], {**ROWS[2], "question": "Is the house by the mill still for sale? " * 8}, *ROWS[3:]]
    before, after = (
        releasing._private(tiny, pairs.read(write(folder / f"{i}.jsonl", some)), (1, 3))
        for i, some in enumerate((ROWS, rows))
    )
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(before[others], after[others])
    assert not np.array_equal(before[2], after[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_pair_whose_activations_are_not_finite_counts_as_zero(folder, once, monkeypatch, bad):
    def planted(value):
        def differences(lm, items, **options):
            (item,) = items
            found = real(lm, items, **options).astype(float)
            found[0, 0, 0] = value if "10" in item.question else found[0, 0, 0]
            return found if "10" not in item.question or value else np.zeros_like(found)

        return differences

    real = activations.differences
    for name, value in {"bad": bad, "zero": 0.0}.items():
        with monkeypatch.context() as patch:
            patch.setattr(releasing.activations, "differences", planted(value))
            release(folder, name=name, demonstration=1)
    np.testing.assert_array_equal(values(folder, "bad"), values(folder, "zero"))


# The ledger comes first


def spent(folder: Path) -> int:
    return Ledger(folder / "l").spent(pairs.read(folder / "pairs.jsonl").identities(), delta=DELTA).releases


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["release_mean", "finish", "record", "disk"])
def test_whatever_stops_a_release_after_the_charge_leaves_the_charge_and_no_vector(
    folder, once, monkeypatch, stop, where
):
    def killed(*_args, **_options):
        assert spent(folder) == 1, "the charge is on disk first"
        raise stop("killed")

    owner, name = {
        "release_mean": (safe_noise, "release_mean"),
        "finish": (estimators.Estimator, "finish"),
        "record": (releasing, "_record"),
        "disk": (vectors, "save_file"),
    }[where]
    if where == "finish":
        monkeypatch.setattr(releasing, "_at_public_strength", killed)
    else:
        monkeypatch.setattr(owner, name, killed)
    with pytest.raises(stop):
        release(folder, ledger=folder / "l", budget=9.0)
    assert spent(folder) == 1
    assert made(folder) == []


def test_a_disk_that_fills_up_after_the_charge_leaves_the_old_files_and_nothing_half_written(
    folder, once, monkeypatch, capsys
):
    old = write(folder / "made" / "old.safetensors", [{"old": 1}]).read_bytes()

    def full(_tensors, path, **_options):
        Path(path).write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(vectors, "save_file", full)
    assert run(folder, "--ledger", folder / "l") == 3
    told = capsys.readouterr().err
    assert "cannot write --out" in told
    assert "the charge stands, and the vectors are lost" in told
    assert spent(folder) == 1
    assert (folder / "made" / "old.safetensors").read_bytes() == old
    assert made(folder) == ["old.safetensors"]


def test_a_folder_that_is_lost_after_the_charge_leaves_the_vectors_in_the_temporary_folder(
    folder, once, monkeypatch, capsys
):
    elsewhere, draw = folder / "elsewhere", releasing._draw
    elsewhere.mkdir()
    monkeypatch.setattr(target.tempfile, "tempdir", str(elsewhere))

    def slow(*args):
        (folder / "made").rmdir()
        (folder / "made").write_text("no folder any more")
        return draw(*args)

    monkeypatch.setattr(releasing, "_draw", slow)
    assert run(folder, "--ledger", folder / "l") == 3
    (kept,) = elsewhere.iterdir()
    told = capsys.readouterr().err
    assert told.startswith(f"psa release: cannot write --out {folder / 'made' / 'v.safetensors'} (")
    assert told.endswith(f"; the charge stands, and the vectors are in {kept}\n")
    assert record.read(kept)[1].n == N
    assert spent(folder) == 1


def test_any_error_after_the_charge_has_an_exit_code_of_its_own(folder, once, monkeypatch, capsys):
    """A script that retries what was refused must not spend twice."""
    monkeypatch.setattr(releasing, "_draw", lambda *_: {}["a fault of ours"])
    assert run(folder, "--ledger", folder / "l") == 3
    assert "the charge stands, and the vectors are lost; running it again charges again" in capsys.readouterr().err
    assert spent(folder) == 1


def meanwhile(folder: Path, monkeypatch) -> bytes:
    """Another program makes the target once the charge is on disk; returns what it wrote."""
    draw = releasing._draw

    def slow(*args):
        write(folder / "made" / "v.safetensors", [{"of": "somebody else"}])
        return draw(*args)

    monkeypatch.setattr(releasing, "_draw", slow)
    return b'{"of": "somebody else"}\n'


@pytest.mark.parametrize("links", [True, False])
def test_a_target_that_appears_after_the_charge_stays_and_the_vectors_are_kept(
    folder, once, monkeypatch, capsys, links
):
    """Also on a file system without hard links."""
    theirs = meanwhile(folder, monkeypatch)
    if not links:
        monkeypatch.setattr(paths.os, "link", lambda *_: no_links())
    assert run(folder, "--ledger", folder / "l") == 3
    out, err = capsys.readouterr()
    (spare,) = set(made(folder)) - {"v.safetensors"}
    assert out == ""
    assert (
        f"v.safetensors appeared meanwhile and stays as it is; the charge stands, and the vectors are in {folder}"
        in err
    )
    assert spare in err
    assert (folder / "made" / "v.safetensors").read_bytes() == theirs
    assert record.read(folder / "made" / spare)[1].n == N
    assert spent(folder) == 1


def test_a_name_that_is_not_refused_is_short_enough_to_the_end(folder, once, monkeypatch):
    """Up to 255 bytes, of which a temporary file beside a taken target needs 19 more than the target."""
    longest = "v" * (255 - 19 - len(".safetensors"))
    draw = releasing._draw
    monkeypatch.setattr(releasing, "_draw", lambda *args: write(file(longest), []) and draw(*args))

    def file(name: str) -> Path:
        return folder / "made" / f"{name}.safetensors"

    with pytest.raises(OSError, match=r"File name too long.* nothing was charged"):
        release(folder, name=f"{longest}v", ledger=folder / "l")
    assert not (folder / "l").exists()
    with pytest.raises(target.ChargedError, match="appeared meanwhile"):
        release(folder, name=longest, ledger=folder / "l")
    assert (spent(folder), len(made(folder))) == (1, 2)


def test_a_file_system_without_hard_links_will_do(folder, once, monkeypatch):
    monkeypatch.setattr(paths.os, "link", lambda *_: no_links())
    kept = release(folder)
    assert record.read(folder / "made" / "v.safetensors")[1] == kept
    assert made(folder) == ["v.safetensors"]


def no_links() -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def run(folder: Path, *more) -> int:
    """``psa release`` from the command line; later options override earlier ones."""
    ask = ["--model", "tiny-random", "--pairs", folder / "pairs.jsonl", "--epsilon", EPSILON, "--delta", DELTA]
    return psa("release", *ask, "--out", folder / "made" / "v.safetensors", *more)


def test_a_release_over_the_budget_draws_no_noise(folder, once, monkeypatch, capsys):
    monkeypatch.setattr(safe_noise, "release_mean", lambda *_a, **_o: pytest.fail("noise was drawn"))
    assert run(folder, "--ledger", folder / "l", "--budget", EPSILON * 0.99) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "psa release: epsilon would reach 4 at delta 1e-06, over the budget of 3.96" in err
    assert spent(folder) == 0
    assert made(folder) == []


def test_the_second_release_is_refused_and_the_first_stays(folder, once, capsys):
    budget = ["--ledger", folder / "l", "--budget", EPSILON]
    assert run(folder, *budget) == 0
    first = (folder / "made" / "v.safetensors").read_bytes()
    capsys.readouterr()
    assert run(folder, *budget, "--out", folder / "made" / "w.safetensors") == 1
    assert "4 is spent and this release alone costs 4" in capsys.readouterr().err
    assert (folder / "made" / "v.safetensors").read_bytes() == first
    assert made(folder) == ["v.safetensors"]
    assert spent(folder) == 1


def test_the_same_command_twice_is_refused_before_the_model_is_loaded(folder, once, monkeypatch, capsys):
    target = folder / "made" / "v.safetensors"
    assert run(folder, "--ledger", folder / "l") == 0
    first, ledger = target.read_bytes(), (folder / "l").read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(releasing, "load", lambda *_a, **_o: pytest.fail("the model was loaded"))
    assert run(folder, "--ledger", folder / "l") == 1
    assert capsys.readouterr().err == (
        f"psa release: --out {target} exists already, and released vectors cannot be made again without a second "
        "charge; give another name, or delete the file\n"
    )
    assert (target.read_bytes(), (folder / "l").read_bytes()) == (first, ledger)
    assert made(folder) == ["v.safetensors"]


def test_the_second_record_lists_the_first_by_the_ledgers_bound(folder, once):
    first = release(folder, ledger=folder / "l")
    other = write(folder / "other.jsonl", [{**row, "question": f"Other: {row['question']}"} for row in ROWS])
    second = release(folder, name="w", ledger=folder / "l", pairs=other, epsilon=1.0)
    assert first.also_released == ()
    (earlier,) = second.also_released
    assert earlier.what == "1 earlier release(s) in the same ledger"
    assert math.isclose(earlier.mu, first.mu, rel_tol=1e-9)
    assert math.isclose(second.total_mu, math.hypot(first.mu, second.mu), rel_tol=1e-9)
    third = release(folder, name="x", ledger=folder / "l")
    assert math.isclose(third.also_released[0].mu, second.total_mu, rel_tol=1e-9)
    with pytest.raises(BudgetError):
        release(folder, name="y", ledger=folder / "l", budget=EPSILON)


# What is refused: before the charge, with a reason, and nothing half-written


def many(folder: Path, **changes) -> Path:
    return write(folder / "bad.jsonl", [{**row, **changes} for row in ROWS])


def without(folder: Path, column: str) -> Path:
    return write(folder / "bad.jsonl", [{k: v for k, v in row.items() if k != column} for row in ROWS])


REFUSED = {
    "no such pairs": (lambda f: ["--pairs", f / "none.jsonl"], "none.jsonl does not exist"),
    "pairs in a spreadsheet": (lambda f: ["--pairs", shutil.copy(f / "pairs.jsonl", f / "p.xlsx")], "suffix '.xlsx'"),
    "no pairs": (lambda f: ["--pairs", write(f / "bad.jsonl", [])], "holds no rows"),
    "one pair": (lambda f: ["--pairs", write(f / "bad.jsonl", ROWS[:1])], "holds a single pair"),
    "one person": (lambda f: ["--pairs", many(f, user="ann")], "holds a single person"),
    "no negative": (lambda f: ["--pairs", without(f, "negative")], "column 'negative' is missing"),
    "no question": (lambda f: ["--pairs", without(f, "question")], "neither of 'question' and 'prompt'"),
    "zero differences": (lambda f: ["--pairs", many(f, positive="No.", negative="no.")], "are the same answer"),
    "a pair too long": (
        lambda f: ["--pairs", write(f / "bad.jsonl", [ROWS[0], {**ROWS[1], "positive": "tea " * 600}])],
        "item 2: ",
    ),
    "unknown model": (lambda f: ["--model", "nobody/nothing"], "model='nobody/nothing' is no packaged model"),
    "unknown dtype": (lambda f: ["--dtype", "int3"], "dtype='int3' is unknown; choose one of float32, bfloat16"),
    "no GPU": (lambda f: ["--device", "cuda:99"], "device='cuda:99'"),
    "unknown estimator": (lambda f: ["--estimator", "best"], "estimator='best' is unknown; choose one of"),
    "nothing private": (lambda f: ["--estimator", "public-only"], "--estimator public-only reads no private data"),
    "layer past the end": (lambda f: ["--layers", "5,6"], "layers=[5, 6] must be distinct, 0-based blocks from 0 to 5"),
    "epsilon past any use": (lambda f: ["--epsilon", "1e6"], "a layer protects nobody"),
    "budget without ledger": (lambda f: ["--budget", "3"], "--budget 3 needs --ledger"),
    "demonstration in a ledger": (
        lambda f: ["--demonstration", "1", "--ledger", f / "l"],
        "cannot account for --demonstration 1",
    ),
    "negative seed": (lambda f: ["--demonstration=-1"], "--demonstration -1 is no seed"),
    "wrong suffix": (lambda f: ["--out", f / "made" / "v.npz"], "must end in .safetensors"),
    "target a folder": (lambda f: ["--out", f / "made"], "must end in .safetensors"),
    "target there already": (
        lambda f: ["--out", write(f / "old.safetensors", [])],
        "old.safetensors exists already, and released vectors cannot be made again",
    ),
    "target a link to nothing": (lambda f: ["--out", link_at(f / "v.safetensors")], "v.safetensors exists already"),
    "target a folder with the suffix": (lambda f: ["--out", folder_at(f / "v.safetensors")], "it is a folder"),
    "target below a file": (lambda f: ["--out", f / "pairs.jsonl" / "v.safetensors"], "Not a directory"),
    "target's name too long": (lambda f: ["--out", f / f"{'v' * 240}.safetensors"], "File name too long"),
    "target's name too long, in a folder to be made": (
        lambda f: ["--out", f / "new" / f"{'v' * 240}.safetensors"],
        "File name too long",
    ),
    "folder's name too long": (lambda f: ["--out", f / ("n" * 300) / "v.safetensors"], "File name too long"),
    "target below a link to nothing": (
        lambda f: ["--out", link_at(f / "unmounted") / "v.safetensors"],
        "nothing was charged",
    ),
    "target in no file system": (lambda f: ["--out", "/proc/v.safetensors"], "cannot write --out /proc/v.safetensors"),
    "target the ledger": (
        lambda f: ["--out", f / "l.safetensors", "--ledger", f / "l.safetensors"],
        "is the ledger itself",
    ),
    "ledger no ledger": (lambda f: ["--ledger", f / "pairs.jsonl"], "pairs.jsonl.key is missing"),
}


def folder_at(path: Path) -> Path:
    path.mkdir()
    return path


def link_at(path: Path) -> Path:
    path.symlink_to("nothing")
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_nothing_charged_and_nothing_written(case, folder, tiny, monkeypatch, capsys):
    if case not in ("unknown model", "unknown dtype", "no GPU"):
        monkeypatch.setattr(releasing, "load", lambda name, **_: tiny)
    monkeypatch.setattr(safe_noise, "release_mean", lambda *_a, **_o: pytest.fail("noise was drawn"))
    change, message = REFUSED[case]
    argv = change(folder)
    kept = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    charged = [] if {"--ledger", "--budget", "--demonstration"} & set(map(str, argv)) else ["--ledger", folder / "l"]
    if case == "negative seed":
        charged = []
    assert run(folder, *charged, *argv) == 1
    out, err = capsys.readouterr()
    assert err.startswith("psa release: ")
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    left = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*") if path.suffix != ".lock"}
    assert left == kept


def test_a_full_disk_is_noticed_before_the_charge(folder, once, capsys):
    with small_disk():
        assert run(folder, "--ledger", folder / "l") == 1
    assert "nothing was charged, choose another place" in capsys.readouterr().err
    assert not (folder / "l").exists()
    assert made(folder) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "0.0 must be a positive"),
        ({"epsilon": math.inf}, "inf must be a positive"),
        ({"delta": 0.0}, "delta=0.0 must lie strictly between 0 and 1"),
        ({"delta": 1.0}, "delta=1.0 must lie strictly between 0 and 1"),
        ({"multiplier": math.nan}, "--multiplier nan is no strength"),
        ({"layers": ()}, r"layers=\[\] must be distinct"),
        ({"layers": (2, 2)}, r"layers=\[2, 2\] must be distinct"),
    ],
)
def test_python_callers_are_refused_as_early(folder, once, changes, message):
    with pytest.raises(ValueError, match=message):
        release(folder, ledger=folder / "l", **changes)
    assert not (folder / "l").exists()
    assert made(folder) == []


@pytest.mark.filterwarnings("always::UserWarning")
def test_a_delta_that_publishes_somebody_is_warned_of_and_released(folder, once, capsys):
    assert run(folder, "--delta", "0.2") == 0
    out, err = capsys.readouterr()
    assert err.startswith("psa release: warning: delta=0.2 is not below 1/n=0.167: such a delta permits a mechanism")
    assert err.count("\n") == 1
    assert out == f"{folder / 'made' / 'v.safetensors'}\n"


def test_a_target_in_a_new_folder_is_made_at_the_end_only(folder, once):
    out = folder / "new" / "deep" / "v.safetensors"
    with pytest.raises(BudgetError):
        release(folder, out=out, ledger=folder / "l", budget=1.0)
    assert not (folder / "new").exists()
    release(folder, out=out)
    assert record.read(out)[1].n == N


def test_another_model_refuses_the_vector(folder, once, capsys):
    release(folder)
    argv = ["chat", "--model", "tiny-random-wide", "--vector", folder / "made" / "v.safetensors", "--prompt", "Tea?"]
    assert psa(*argv) == 1
    assert "the vectors do not fit tiny-random-wide" in capsys.readouterr().err


def test_layers_auto_lie_in_the_middle_of_any_depth():
    assert arguments.layers("auto") is None
    for blocks in range(2, 100):
        layers = releasing.automatic_layers(blocks)
        assert 1 <= min(layers) <= max(layers) < blocks
        assert len(layers) == min(5, blocks - 1)
