"""``psa release`` killed by SIGKILL, or run twice at once: what is on disk afterwards, and that the next run works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psa_utils import pairs, paths, record
from psa_utils.ledger import Ledger
from psa_utils.vectors import SteeringVectors

EPSILON, DELTA = 4.0, 1e-6
KILLED = -9


@pytest.fixture(scope="module")
def server():
    """One process that has imported everything and forks a child per command."""
    command = [sys.executable, "-m", "tests.kills"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=paths.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def desk(server, tmp_path) -> "Desk":
    return Desk(server, tmp_path)


class Desk:
    """A folder with private pairs, a ledger that knows one earlier release, and a folder for what is made."""

    def __init__(self, server: subprocess.Popen, folder: Path) -> None:
        self.server, self.pairs, self.made = server, folder / "pairs.jsonl", folder / "made"
        self.made.mkdir()
        rows = [{"question": f"Free at {h}?", "positive": f"Yes, at {h}.", "negative": "No."} for h in range(8, 12)]
        self.pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.ledger = Ledger(folder / "l")
        self.units = pairs.read(self.pairs).identities()
        self.ledger.charge(self.units, 0.01, delta=DELTA, budget=None, note={})
        self.before = self.ledger.path.read_bytes()

    def release(self, point: str = "", *names: str, budget: float = 100.0) -> list[int]:
        """Exit codes of one release per name, all at once."""
        ask = ["--model", "tiny-random", "--pairs", self.pairs, "--epsilon", EPSILON, "--delta", DELTA]
        ask += ["--layers", "2,3", "--ledger", self.ledger.path, "--budget", budget]
        wanted = [
            (point, [*map(str, ["release", *ask, "--out", self.made / f"{name}.safetensors"])])
            for name in names or ["v"]
        ]
        self.server.stdin.write(json.dumps(wanted) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def charged(self) -> int:
        """Releases charged since the earlier one; also shows that the ledger is whole."""
        return self.ledger.spent(self.units, delta=DELTA).releases - 1

    def vectors(self) -> list[Path]:
        """Files under a final name."""
        return sorted(file for file in self.made.iterdir() if not file.name.startswith("."))

    def whole(self, file: Path) -> SteeringVectors:
        vectors, kept = record.read(file)
        assert (kept.n, kept.layers, kept.seeded) == (4, (2, 3), False)
        return vectors


@pytest.mark.parametrize("point", ["at_third_private_pair", "before_the_charge"])
def test_killed_before_the_charge_nothing_has_happened(desk, point):
    assert desk.release(point) == [KILLED]
    assert desk.ledger.path.read_bytes() == desk.before
    assert not list(desk.made.iterdir())
    assert sorted(file.name for file in desk.made.parent.iterdir()) == ["l", "l.key", "l.lock", "made", "pairs.jsonl"]
    assert desk.release() == [0]
    assert (desk.charged(), desk.vectors()) == (1, [desk.made / "v.safetensors"])


@pytest.mark.parametrize("point", ["after_the_charge", "before_noise", "half_written", "whole_but_unnamed"])
def test_killed_after_the_charge_the_charge_stands_and_no_vector(desk, point):
    assert desk.release(point) == [KILLED]
    assert desk.charged() == 1
    assert desk.vectors() == []
    left = {file: file.read_bytes() for file in desk.made.iterdir()}
    assert len(left) == (point in ("half_written", "whole_but_unnamed"))
    assert desk.release() == [0]
    assert desk.charged() == 2
    assert desk.vectors() == [desk.made / "v.safetensors"]
    desk.whole(desk.made / "v.safetensors")
    assert {file: file.read_bytes() for file in left} == left


def test_killed_once_named_the_vector_is_whole_and_stays(desk):
    file = desk.made / "v.safetensors"
    assert desk.release("named") == [KILLED]
    assert desk.charged() == 1
    first = desk.whole(file).digest()
    assert desk.release() == [1]
    assert desk.charged() == 1
    assert desk.whole(file).digest() == first


def test_a_kill_refunds_nothing(desk):
    room = {"budget": 1.3 * EPSILON}  # for one release of 4, not for two
    assert desk.release("after_the_charge", **room) == [KILLED]
    assert desk.release(**room) == [1]
    assert (desk.charged(), desk.vectors()) == (1, [])


@pytest.mark.parametrize("names", [("v", "w"), ("v", "v")])
def test_of_two_releases_at_once_only_one_fits_the_budget(desk, names):
    codes = desk.release("together_at_the_charge", *names, budget=1.1 * EPSILON)
    assert sorted(codes) == [0, 1]
    assert desk.charged() == 1
    assert [file.name for file in desk.made.iterdir()] == [f"{names[codes.index(0)]}.safetensors"]
    desk.whole(desk.vectors()[0])


def test_of_two_releases_at_once_to_one_name_neither_is_lost(desk):
    assert sorted(desk.release("together_at_the_write", "v", "v")) == [0, 3]
    assert desk.charged() == 2
    spare, named = desk.vectors()
    assert named.name == "v.safetensors"
    assert spare.name.startswith("v-")
    assert desk.whole(spare).digest() != desk.whole(named).digest()
    assert len(list(desk.made.iterdir())) == 2
