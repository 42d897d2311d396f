"""The ledger adds up exactly, refuses in time, and survives kills at every line, cut files and many processes."""

import json
import resource
import signal
import stat
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psa_utils import accounting, ledger, pairs
from psa_utils.ledger import BudgetError, Ledger, LedgerError

DELTA = 1e-5
OPTIONS = {"delta": DELTA, "budget": None, "note": {}}


@pytest.fixture
def book(tmp_path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def filled(book: Ledger) -> Ledger:
    for mu in (0.1, 0.2, 0.3):
        book.charge(["ann", "bob"], mu, **OPTIONS)
    return book


def snapshot(book: Ledger) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in book.path.parent.iterdir() if path.suffix != ".lock"}


def test_nothing_is_spent_and_nothing_written_before_the_first_release(book):
    assert book.spent(["ann"], delta=DELTA) == ledger.Spent(0.0, 0.0, 0.0, 0.0, 0)
    assert not list(book.path.parent.iterdir())


def test_mu_adds_up_exactly_for_the_unit_that_lost_most(book):
    book.charge(["ann", "bob"], 0.3, **OPTIONS)
    book.charge(["cy"], 1.2, **OPTIONS)
    spent = book.charge(["bob", "dee"], 0.4, **OPTIONS)
    assert spent == book.spent(["dee", "bob"], delta=DELTA)
    assert spent.mu_total == accounting.compose_mu([0.3, 0.4])
    assert spent.epsilon_total == accounting.gaussian_epsilon(spent.mu_total, DELTA)
    assert spent.mu_bound == accounting.compose_mu([0.3, 1.2, 0.4])
    assert spent.epsilon_bound == accounting.gaussian_epsilon(spent.mu_bound, DELTA)
    assert spent.releases == 3
    assert book.spent(["new"], delta=DELTA).mu_total == 0
    assert book.spent(["ann"], delta=1e-3).epsilon_total == accounting.gaussian_epsilon(0.3, 1e-3)


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.floats(1e-3, 3)), min_size=1, max_size=8))
@settings(deadline=None)
def test_totals_agree_with_a_table_kept_by_hand(releases):
    entries = [ledger._Entry(mu, frozenset(units)) for units, mu in releases]
    table = {unit: sum(mu**2 for units, mu in releases if unit in units) ** 0.5 for unit in "abcd"}
    for asked in ({"a"}, {"b", "c"}, set("abcd")):
        spent = ledger._spent(entries, frozenset(asked), DELTA)
        assert spent.mu_total == pytest.approx(max(table[unit] for unit in asked))
        assert spent.mu_total <= spent.mu_bound * (1 + 1e-15)


def test_a_release_of_exactly_the_budget_fits_and_the_next_does_not(book):
    mu = accounting.mu_for_epsilon(2.0, DELTA)
    spent = book.charge(["ann"], mu, delta=DELTA, budget=2.0, note={})
    assert spent.epsilon_total == pytest.approx(2.0, rel=1e-9)
    before = snapshot(book)
    with pytest.raises(
        BudgetError, match=r"epsilon would reach 2\.\d+ at delta 1e-05, over the budget of 2: 2 is spent"
    ):
        book.charge(["ann", "bob"], 0.1, delta=DELTA, budget=2.0, note={})
    assert snapshot(book) == before
    assert book.charge(["bob"], 0.1, delta=DELTA, budget=2.0, note={}).mu_total == 0.1


def test_equal_halves_of_the_budget_fill_it(book):
    mu = accounting.mu_for_epsilon(1.0, DELTA) / 3
    for _ in range(9):
        book.charge(["ann"], mu, delta=DELTA, budget=1.0, note={})
    with pytest.raises(BudgetError):
        book.charge(["ann"], 1e-3, delta=DELTA, budget=1.0, note={})


def test_overlapping_pairs_compose(tmp_path, book):
    def owner(name: str, rows: range, **user) -> list[str]:
        path = tmp_path / f"{name}.json"
        texts = [{"question": f"Q{i}?", "positive": "Yes.", "negative": "No.", **user} for i in rows]
        path.write_text(json.dumps(texts))
        return pairs.read(path).identities()

    book.charge(owner("first", range(5)), 0.3, **OPTIONS)
    assert book.charge(owner("overlapping", range(4, 9)), 0.4, **OPTIONS).mu_total == pytest.approx(0.5)
    assert book.charge(owner("apart", range(20, 25)), 0.4, **OPTIONS).mu_total == 0.4


def test_the_file_tells_nothing_without_the_key(book):
    filled(book)
    text = book.path.read_text()
    assert "ann" not in text
    again = Ledger(book.path.with_name("other.jsonl"))
    again.charge(["ann", "bob"], 0.1, **OPTIONS)
    hashes = [set(json.loads(b.path.read_text().splitlines()[1])["units"]) for b in (book, again)]
    assert len(hashes[0]) == 2
    assert not hashes[0] & hashes[1]
    for path in (book.path, book.key_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_links_to_one_ledger_share_its_lock(tmp_path, book):
    link = tmp_path / "link"
    link.symlink_to(book.path)
    assert Ledger(link).path == book.path
    filled(book)
    assert Ledger(link).charge(["ann"], 0.1, **OPTIONS).releases == 4


def test_the_note_is_kept(book):
    book.charge(["ann"], 0.1, delta=DELTA, budget=None, note={"model": "smol", "layers": [10, 11]})
    assert json.loads(book.path.read_text().splitlines()[1])["note"] == {"model": "smol", "layers": [10, 11]}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_half_a_line_was_never_granted(book, cut):
    filled(book)
    content = book.path.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    for end in (last + cut, len(content) - cut):
        book.path.write_bytes(content[:end])
        assert book.spent(["ann"], delta=DELTA).mu_total == accounting.compose_mu([0.1, 0.2])
        assert book.charge(["ann"], 0.6, **OPTIONS).mu_total == accounting.compose_mu([0.1, 0.2, 0.6])
        assert book.spent(["ann"], delta=DELTA).releases == 3


def test_zeros_at_the_end_after_a_power_cut_are_half_a_line(book):
    filled(book)
    with book.path.open("ab") as file:
        file.write(bytes(300))
    assert book.charge(["ann"], 0.1, **OPTIONS).releases == 4


def change(text: str) -> str:
    return text.replace('"mu": 0.2', '"mu": 0.1')


def drop(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(lines[:2] + lines[3:])


def swap(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:2], lines[3], lines[2]])


DAMAGE = {
    "a changed number": (change, ":3 does not fit ledger.jsonl.key: it was changed"),
    "a missing line": (drop, ":3 does not fit"),
    "lines swapped": (swap, ":3 does not fit"),
    "a line twice": (lambda text: text + text.splitlines(keepends=True)[-1], ":5 does not fit"),
    "half a middle line": (lambda text: text.replace('"note": {}', "", 1), ":2 is damaged"),
    "binary in the middle": (lambda text: text[:200] + "\0\0" + text[202:], ":2 is damaged|:2 does not fit"),
    "a hash removed": (lambda text: text.replace('"mac"', '"mad"', 1), ":1 is damaged"),
    "an empty line": (lambda text: text.replace("\n", "\n\n", 1), ":2 is damaged"),
    "a line that is a list": (lambda text: text.replace("\n", "\n[1]\n", 1), ":2 is damaged"),
    "no header": (lambda text: text.partition("\n")[2], ":1 does not fit"),
    "an empty file": (lambda text: "", "is no ledger of version 1"),
    "half a header": (lambda text: text[:20], "is no ledger of version 1"),
    "another file": (lambda text: "question,positive,negative\n", ":1 is damaged"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_ledger_is_an_error_and_stays_as_it_is(book, damage, message):
    filled(book)
    changed = damage(book.path.read_text())
    assert changed != book.path.read_text()
    book.path.write_text(changed)
    before = snapshot(book)
    for use in (lambda: book.charge(["ann"], 0.1, **OPTIONS), lambda: book.spent(["ann"], delta=DELTA)):
        with pytest.raises(LedgerError, match=message):
            use()
    assert snapshot(book) == before


def test_a_missing_foreign_or_open_key_is_an_error(book):
    filled(book)
    right = book.key_path.read_bytes()
    book.key_path.chmod(0o644)
    with pytest.raises(LedgerError, match=r"open to others \(mode ...44\); `chmod 600` it"):
        book.charge(["ann"], 0.1, **OPTIONS)
    book.key_path.chmod(0o600)
    book.key_path.write_bytes(right[::-1])
    with pytest.raises(LedgerError, match="the key is another ledger's"):
        book.charge(["ann"], 0.1, **OPTIONS)
    book.key_path.write_bytes(right[:10])
    with pytest.raises(LedgerError, match="holds 10 characters, not 64"):
        book.charge(["ann"], 0.1, **OPTIONS)
    book.key_path.unlink()
    with pytest.raises(LedgerError, match="is missing; put back the key"):
        book.charge(["ann"], 0.1, **OPTIONS)
    assert not book.key_path.exists()


def test_a_ledger_that_was_away_can_be_put_back(book):
    """Nothing is charged without it, and a new one, which forgets, is begun only once the key is away too."""
    filled(book)
    away, key = book.path.rename(book.path.with_name("away")), book.key_path.read_bytes()
    for use in (lambda: book.charge(["ann"], 0.1, **OPTIONS), lambda: book.spent(["ann"], delta=DELTA)):
        with pytest.raises(LedgerError, match=r"ledger.jsonl is missing, but its key .*ledger.jsonl.key is there; put"):
            use()
    assert (book.path.exists(), book.key_path.read_bytes()) == (False, key)
    away.replace(book.path)
    assert book.spent(["ann"], delta=DELTA).releases == 3
    for path in (book.path, book.key_path):
        path.rename(path.with_name(f"old-{path.name}"))
    assert book.charge(["ann"], 0.1, **OPTIONS).releases == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": []}, "units is empty"),
        ({"mu": 0.0}, "mu=0.0"),
        ({"mu": float("nan")}, "mu=nan"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"budget": 0.0}, "budget=0.0 must be a positive epsilon"),
        ({"budget": float("nan")}, "budget=nan"),
        ({"note": {"x": float("nan")}}, "JSON compliant"),
    ],
)
def test_bad_arguments_charge_nothing(book, changes, message):
    arguments = {"units": ["ann"], "mu": 0.1, **OPTIONS, **changes}
    with pytest.raises(ValueError, match=message):
        book.charge(arguments.pop("units"), arguments.pop("mu"), **arguments)
    assert book.spent(["ann"], delta=DELTA).releases == 0


def test_another_process_holding_the_ledger(book, monkeypatch):
    filled(book)
    monkeypatch.setattr(ledger, "WAIT", 0.1)
    with ledger.filelock.FileLock(f"{book.path}.lock"), pytest.raises(LedgerError, match="held by another process"):
        book.charge(["ann"], 0.1, **OPTIONS)


def test_a_full_disk_grants_nothing_and_the_next_charge_mends_the_file(book):
    """The limit on file size stops the write in the middle of the line, as a full disk does."""
    filled(book)
    size, limits = book.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            book.charge(["ann"], 0.7, **OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert book.path.stat().st_size == size + 50
    assert book.charge(["ann"], 0.4, **OPTIONS).mu_total == accounting.compose_mu([0.1, 0.2, 0.3, 0.4])


def run(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


KILL_EVERYWHERE = """
    import json, os, signal, sys
    from pathlib import Path
    from psa_utils import accounting, ledger

    folder, existing = Path(sys.argv[1]), sys.argv[2] == "existing"
    options = dict(delta=1e-5, budget=9.0, note={})

    def release(book, vector, kill_at):
        "Charge, then write the vector; die at the kill_at-th line that runs in ledger.py."
        count = 0
        def trace(frame, event, _argument):
            nonlocal count
            if frame.f_code.co_filename != ledger.__file__:
                return None
            count += event == "line"
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        book.charge(["ann"], 0.2, **options)
        sys.settrace(None)
        vector.write_text("released")

    outcomes, kill_at = [], 0
    while True:
        kill_at += 1
        book = ledger.Ledger(folder / str(kill_at) / "ledger.jsonl")
        vector = folder / f"{kill_at}.vector"
        if existing:
            book.charge(["ann"], 0.1, **options)
        child = os.fork()
        if not child:
            release(book, vector, kill_at)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        spent = book.spent(["ann"], delta=1e-5)
        after = book.charge(["ann"], 0.3, **options)
        mus = [0.1] * existing + [0.2] * (spent.releases - existing) + [0.3]
        outcomes.append([killed, vector.exists(), spent.releases - existing,
                         after.mu_total == accounting.compose_mu(mus) and after.releases == len(mus)])
        if not killed:
            break
    print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("ledger_is", ["new", "existing"])
def test_killed_at_every_single_line(tmp_path, ledger_is):
    """SIGKILL before each line of ledger.py that a charge runs: the file stays good, no vector without its charge."""
    process = run(KILL_EVERYWHERE, tmp_path, ledger_is)
    outcomes = json.loads(process.communicate(timeout=300)[0])
    assert len(outcomes) > 50
    assert [killed for killed, *_ in outcomes] == [True] * (len(outcomes) - 1) + [False]
    assert all(good for *_, good in outcomes)
    assert all(charged == 1 for _, vector, charged, _ in outcomes if vector)
    charged = [charged for _, _, charged, _ in outcomes]
    assert charged == sorted(charged)  # nothing, up to the write; from then on the charge stands
    assert {0, 1} == set(charged)
    assert any(killed and charged for killed, _, charged, _ in outcomes)


ONE_FITS = """
    import sys
    from psa_utils.ledger import BudgetError, Ledger
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        Ledger(sys.argv[1]).charge(["ann"], float(sys.argv[2]), delta=1e-5, budget=1.0, note={})
        print("granted")
    except BudgetError:
        print("refused")
"""


def test_of_two_processes_at_once_only_one_fits(book):
    mu = 0.8 * accounting.mu_for_epsilon(1.0, DELTA)
    processes = [run(ONE_FITS, book.path, mu) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = sorted(process.communicate(timeout=300)[0].strip() for process in processes)
    assert answers == ["granted", "refused"]
    assert book.spent(["ann"], delta=DELTA).mu_total == mu


MANY = """
    import os, sys
    from psa_utils.ledger import Ledger
    for child in range(5):
        if not os.fork():
            for _ in range(8):
                Ledger(sys.argv[1]).charge([str(child)], 0.1, delta=1e-5, budget=None, note={})
            os._exit(0)
    statuses = [os.wait()[1] for _ in range(5)]
    print(statuses)
"""


def test_no_charge_of_many_processes_is_lost(book):
    assert run(MANY, book.path).communicate(timeout=300)[0].strip() == "[0, 0, 0, 0, 0]"
    spent = book.spent(["3"], delta=DELTA)
    assert spent.releases == 40
    assert spent.mu_total == pytest.approx(0.1 * 8**0.5)


ENDLESS = """
    import sys
    from psa_utils.ledger import Ledger
    while True:
        Ledger(sys.argv[1]).charge(["ann", *map(str, range(2000))], 0.1, delta=1e-5, budget=None, note={})
        print("granted", flush=True)
"""


def test_a_process_killed_while_it_charges_leaves_what_it_was_granted(book):
    for round_ in range(3):
        process = run(ENDLESS, book.path)
        before = book.spent(["ann"], delta=DELTA).releases
        granted = [process.stdout.readline() for _ in range(3 + round_)]
        process.send_signal(signal.SIGKILL)
        granted += process.communicate()[0].splitlines()
        releases = book.spent(["ann"], delta=DELTA).releases - before
        assert len(granted) <= releases <= len(granted) + 1
