"""What releases from the same private data cost together: an append-only file that refuses the one too many.

Releases compose: mu of several is the root of the sum of squares (:func:`psa_utils.accounting.compose_mu`). A release
is charged to every *unit* it used, a unit being whatever :meth:`psa_utils.pairs.Pairs.identities` names: each pair and
each person. The budget holds for the unit that has lost most, so that overlapping data sets compose where they overlap.

**Reserve, then release.** :meth:`Ledger.charge` returns after the charge is on disk; only then may noise be drawn and
the vector be written. Whatever is killed in between leaves a charge without a vector, never the reverse. There is no
refund: nobody can show that the noise was not seen.

**File.** One JSON object a line: a header, then per release mu, note and the sorted keyed hashes of its units
(HMAC-SHA256, cut to 64 bits; a collision charges too much, never too little). Every line carries a keyed hash of
itself and of the line before, so a changed, lost or reordered line is an error. The last line counts only with its line
end, which is written last: half a line is a charge that was never granted, and the next charge removes it. The random
key lies beside the ledger, readable by the owner only. Without it the hashes tell nothing but how many units there are
and how many two releases share.

**What it cannot see**: data that was edited (beyond case and spacing) or comes under another user name counts as new;
a person with several names, or releases of pairs without names, are not joined; a ledger deleted, cut at a line's end
or put back from a copy has forgotten what it lost. User numbers of unrelated data sets ("1", "2") overlap and are
charged too much: keep a ledger for each.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from . import accounting, paths

VERSION = 1
SLACK = 1e-9
"""Relative rounding allowed when epsilon is compared with the budget: a release of exactly the budget fits."""
HEX_DIGITS = 16
WAIT = 60
"""Seconds to wait for another process that holds the ledger."""


class LedgerError(ValueError):
    """The ledger is damaged, without its key or held by another process; nothing was charged."""


class BudgetError(LedgerError):
    """The release would cost some unit more than the budget; nothing was charged."""


@dataclass(frozen=True)
class Spent:
    """What has been released so far, at the delta asked for.

    ``mu_total`` and ``epsilon_total`` are exact for the unit of the given data that has lost most. They depend on which
    units were used before, so they are for the owner of the data only. ``mu_bound`` and ``epsilon_bound`` add up all
    ``releases`` of the ledger, as if each had used the same data: never less, and the same whatever the data are, so
    that they may be published.
    """

    mu_total: float
    epsilon_total: float
    mu_bound: float
    epsilon_bound: float
    releases: int


@dataclass(frozen=True)
class _Entry:
    mu: float
    units: frozenset[str]


class Ledger:
    """The ledger at ``path``; its key is at ``path`` + ".key", its lock at ``path`` + ".lock".

    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> _ = ledger.charge(["ann", "bob"], 0.3, delta=1e-5, budget=2.0, note={})
    >>> spent = ledger.charge(["bob", "cy"], 0.4, delta=1e-5, budget=2.0, note={"model": "m"})
    >>> round(spent.mu_total, 12), round(ledger.spent(["cy"], delta=1e-5).mu_total, 12)
    (0.5, 0.4)
    >>> ledger.charge(["ann"], 5.0, delta=1e-5, budget=2.0, note={})
    Traceback (most recent call last):
    psa_utils.ledger.BudgetError: ...
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()  # links to one ledger share its lock and its key
        self.key_path = Path(f"{self.path}.key")
        self._new_key_path = Path(f"{self.path}.key.new")

    def charge(
        self, units: Collection[str], mu: float, *, delta: float, budget: float | None, note: Mapping[str, Any]
    ) -> Spent:
        """Add a release of ``mu`` from ``units`` and return what is spent with it. Call it BEFORE any noise is drawn.

        Args:
            units: identities of the private data, e.g. ``Pairs.identities()``; only their keyed hashes are kept.
            mu: GDP value of the release (``safe_noise`` and ``accounting.gdp_mu`` have it).
            delta: where epsilon is read off the exact curve.
            budget: largest epsilon at ``delta`` that any unit may lose in all; None: keep count only.
            note: what is released, JSON-able, kept as plain text: nothing private.

        Raises:
            BudgetError: over the budget. Nothing is charged.
            LedgerError: damaged, foreign, moved away or locked for a minute. Nothing is charged.
            OSError: the disk is full or not writable. The charge may stand, but do not release.
        """
        accounting.gaussian_epsilon(mu, delta)  # rejects a bad mu or delta
        if not units:
            raise ValueError("units is empty; name the private data that is released from")
        if budget is not None and not budget > 0:
            raise ValueError(f"budget={budget} must be a positive epsilon, or None")
        with self._locked():
            key = self._create()
            entries, chain, length = self._read(key)
            entry = _Entry(float(mu), _hashes(key, units))
            spent = _spent([*entries, entry], entry.units, delta)
            if budget is not None and spent.epsilon_total > budget * (1 + SLACK):
                raise BudgetError(_over(entries, entry, delta, budget, spent))
            body = {"mu": entry.mu, "note": dict(note), "units": sorted(entry.units)}
            self._append(_line(key, chain, body), length)
        return spent

    def spent(self, units: Collection[str], *, delta: float) -> Spent:
        """What the releases so far have cost ``units``; zero where there is no ledger yet."""
        if self._is_new():
            return _spent([], frozenset(), delta)
        with self._locked():
            key = self._key()
            return _spent(self._read(key)[0], _hashes(key, units), delta)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(f"{self.path}.lock", timeout=WAIT):
                yield
        except filelock.Timeout as error:
            raise LedgerError(f"{self.path} is held by another process for {WAIT} s; wait for it and retry") from error

    def _create(self) -> bytes:
        """Make a new ledger: the key gets its name last, so that a key without ledger means that the ledger is away."""
        if self._is_new():
            key = secrets.token_hex(32).encode()
            _write_private(self._new_key_path, key)
            _write_private(self.path, _line(key, "", {"psa_ledger": VERSION}))
        return self._key()

    def _is_new(self) -> bool:
        has_key = self.key_path.exists()  # asked first: another process makes the key last
        if self.path.exists():
            return False
        if has_key:
            raise LedgerError(
                f"{self.path} is missing, but its key {self.key_path} is there; put the ledger back, or move the key "
                "away too, to begin a new ledger that knows of no earlier release"
            )
        return True

    def _key(self) -> bytes:
        if not self.key_path.exists() and self._new_key_path.exists():
            self._new_key_path.replace(self.key_path)  # also after a kill before this line
        if not self.key_path.exists():
            raise LedgerError(f"{self.key_path} is missing; put back the key: {self.path} cannot be read without it")
        if os.name == "posix" and (mode := self.key_path.stat().st_mode & 0o077):
            raise LedgerError(f"{self.key_path} is open to others (mode ...{mode:02o}); `chmod 600` it")
        text = self.key_path.read_bytes()
        if len(text) != 64:
            raise LedgerError(f"{self.key_path} holds {len(text)} characters, not 64; put back the key")
        return text

    def _read(self, key: bytes) -> tuple[list[_Entry], str, int]:
        """Entries, keyed hash of the last whole line, and length in bytes of the whole lines."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        bodies, chain = [], ""
        for number, line in enumerate(whole.splitlines(), 1):
            body, chain = self._checked(key, chain, number, line)
            bodies.append(body)
        if not bodies or bodies[0].get("psa_ledger") != VERSION:
            raise LedgerError(f"{self.path} is no ledger of version {VERSION}; give the path of a new file or of one")
        return [_Entry(body["mu"], frozenset(body["units"])) for body in bodies[1:]], chain, len(whole)

    def _checked(self, key: bytes, chain: str, number: int, line: bytes) -> tuple[dict[str, Any], str]:
        try:
            body = json.loads(line)
            found = body.pop("mac")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LedgerError(f"{self.path}:{number} is damaged; put back a copy, it cannot be mended") from error
        expected = _mac(key, chain, body)
        if not hmac.compare_digest(str(found).encode(), expected.encode()):
            why = "the key is another ledger's" if number == 1 else "it was changed, or a line before it is missing"
            raise LedgerError(f"{self.path}:{number} does not fit {self.key_path.name}: {why}; put back the right copy")
        return body, expected

    def _append(self, line: bytes, length: int) -> None:
        with self.path.open("r+b") as file:
            file.truncate(length)  # half a line of a killed charge
            file.seek(length)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _spent(entries: list[_Entry], units: frozenset[str], delta: float) -> Spent:
    losses: dict[str, list[float]] = {unit: [] for unit in units}
    for entry in entries:
        for unit in units & entry.units:
            losses[unit].append(entry.mu)
    total = max(map(accounting.compose_mu, losses.values()), default=0.0)
    bound = accounting.compose_mu(entry.mu for entry in entries)
    return Spent(total, _epsilon(total, delta), bound, _epsilon(bound, delta), len(entries))


def _epsilon(mu: float, delta: float) -> float:
    return accounting.gaussian_epsilon(mu, delta) if mu else 0.0


def _over(entries: list[_Entry], entry: _Entry, delta: float, budget: float, spent: Spent) -> str:
    before = _spent(entries, entry.units, delta)
    return (
        f"epsilon would reach {spent.epsilon_total:.4g} at delta {delta:g}, over the budget of {budget:g}: "
        f"{before.epsilon_total:.4g} is spent and this release alone costs {_epsilon(entry.mu, delta):.4g}; "
        "release with less epsilon, or not at all"
    )


def _hashes(key: bytes, units: Collection[str]) -> frozenset[str]:
    return frozenset(hmac.digest(key, b"unit\0" + u.encode(), hashlib.sha256).hex()[:HEX_DIGITS] for u in units)


def _mac(key: bytes, chain: str, body: Mapping[str, Any]) -> str:
    return hmac.digest(key, f"line\0{chain}\0{_json(body)}".encode(), hashlib.sha256).hex()


def _line(key: bytes, chain: str, body: Mapping[str, Any]) -> bytes:
    return (_json({**body, "mac": _mac(key, chain, body)}) + "\n").encode()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _write_private(path: Path, content: bytes) -> None:
    """Write a new file for the owner's eyes, whole or not at all, and make sure that it survives a power cut."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    paths.sync(path.parent)
