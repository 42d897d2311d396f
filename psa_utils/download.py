"""Fetch the public CAA files at pinned revisions: ``python -m psa_utils.download`` (``make data``).

``caa.lock`` names every file with its SHA-256 and the commit of nrimsky/CAA it is taken from. A file counts only
when its digest is the known one. What is being fetched lives beside its target as ``.part``, so that an
interrupted download resumes, and a wrong one never touches what was there.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import requests
from tqdm import tqdm

from . import paths
from .packaged import sha256

BASE_URL = "https://raw.githubusercontent.com/nrimsky/CAA"
LOCK = paths.PACKAGE / "caa.lock"
TIMEOUT = 20.0
"""Seconds without a byte after which a connection counts as stalled."""
CHUNK = 1 << 13
"""Bytes; small, since what a stalled connection has sent of an unfinished chunk is lost."""


class DownloadError(RuntimeError):
    """A file could not be fetched; what was there before is untouched."""


@dataclass(frozen=True)
class Remote:
    """One pinned file."""

    sha256: str
    commit: str
    name: str
    """Path below the data folder, e.g. ``test/mmlu/mmlu.json``."""


def pinned() -> list[Remote]:
    """Every CAA file we know.

    >>> len(pinned()), len({file.name for file in pinned()})
    (23, 23)
    """
    return [Remote(*line.split()) for line in LOCK.read_text().splitlines()]


def fetch_all(target: Path, *, base_url: str = BASE_URL, timeout: float = TIMEOUT) -> None:
    """Download every pinned file into ``target``, skipping those that are already right.

    Raises:
        DownloadError: names every file that failed and why; the others are kept.
    """
    faults = []
    for file in tqdm(pinned(), desc="CAA files", unit="file", disable=None):
        url = f"{base_url.rstrip('/')}/{file.commit}/datasets/{file.name}"
        try:
            fetch(url, target / file.name, file.sha256, timeout=timeout)
        except DownloadError as error:
            faults.append(str(error))
    if faults:
        raise DownloadError(f"{len(faults)} file(s) failed; run `make data` again\n  " + "\n  ".join(faults))


def fetch(url: str, target: Path, digest: str, *, timeout: float = TIMEOUT) -> None:
    """Download one file, resuming an earlier attempt, and move it to ``target`` if its digest is right.

    Raises:
        DownloadError: not found, stalled, truncated (kept, to be resumed) or wrong bytes (dropped).
    """
    if target.exists() and sha256(target) == digest:
        return
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        _append(url, part, timeout)
    except requests.RequestException as error:
        raise DownloadError(f"{url}: {_reason(error)}") from error
    if (found := sha256(part)) != digest:
        part.unlink()
        raise DownloadError(f"{url}: SHA-256 is {found}, expected {digest}; refused, {target} is untouched")
    part.replace(target)


def _append(url: str, part: Path, timeout: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # the part is whole already (or wrong, which the digest will tell)
        response.raise_for_status()
        resumed = response.status_code == requests.codes.partial_content
        with part.open("ab" if resumed else "wb") as file:
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answered {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "the connection stalled; what has arrived is kept and will be resumed"
    return f"{type(error).__name__}; what has arrived is kept and will be resumed"


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m psa_utils.download", description="Download the CAA files.")
    parser.add_argument("--target", type=Path, default=paths.cache() / "caa", help="folder to fill")
    parser.add_argument("--base-url", default=os.environ.get("PSA_DATA_URL", BASE_URL), help="where to fetch from")
    args = parser.parse_args()
    try:
        fetch_all(args.target, base_url=args.base_url)
    except DownloadError as error:
        sys.exit(f"make data: {error}")
    print(f"CAA is complete in {args.target}")


if __name__ == "__main__":
    main()
