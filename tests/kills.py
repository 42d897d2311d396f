"""Runs ``psa`` in child processes that die by SIGKILL at a named point, or wait there for each other.

    python -m tests.kills

Reads lines ``[[point, [argument, ...]], ...]`` of JSON. The commands of a line run at the same time, each in a fork of
this process, so that the imports are paid for once. Answers with their exit codes, -9 for a killed one. The point ""
kills nothing.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psa_utils import activations, cli, paths, safe_noise, target, vectors
from psa_utils import release as _  # noqa: F401  imported here, once for all forks
from psa_utils.ledger import Ledger

FORK = multiprocessing.get_context("fork")


def die(*_args: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_third_private_pair() -> None:
    real, seen = activations.differences, []

    def differences(lm, items, **options):
        if options.get("finite") is False:  # as a release reads private pairs, and nothing else
            seen.append(items)
        return die() if len(seen) == 3 else real(lm, items, **options)

    activations.differences = differences


def before_the_charge() -> None:
    Ledger.charge = die


def after_the_charge() -> None:
    real = Ledger.charge
    Ledger.charge = lambda *args, **options: die(real(*args, **options))


def before_noise() -> None:
    safe_noise.release_mean = die


def half_written() -> None:
    real = vectors.save_file

    def save_file(tensors, path, **options):
        real(tensors, path, **options)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        die()

    vectors.save_file = save_file


def whole_but_unnamed() -> None:
    paths._claim = die


def named() -> None:
    real = paths._claim
    paths._claim = lambda temporary, target: die(real(temporary, target))


def together_at_the_charge(barrier: Any) -> None:
    real = Ledger.charge

    def charge(*args, **options):
        barrier.wait(timeout=60)
        return real(*args, **options)

    Ledger.charge = charge


def together_at_the_write(barrier: Any) -> None:
    real = target.save

    def save(*args):
        barrier.wait(timeout=60)
        real(*args)

    target.save = save


def by_name(*points: Callable[..., None]) -> dict[str, Callable[..., None]]:
    return {point.__name__: point for point in points}


KILLS = by_name(at_third_private_pair, before_the_charge, after_the_charge, before_noise)
KILLS |= by_name(half_written, whole_but_unnamed, named)
MEETINGS = by_name(together_at_the_charge, together_at_the_write)


def run(point: str, argv: list[str], barrier: Any) -> None:
    sys.stdout = sys.stderr  # standard output is for exit codes
    if point in MEETINGS:
        MEETINGS[point](barrier)
    elif point:
        KILLS[point]()
    sys.exit(cli.main(argv))


def main() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        barrier = FORK.Barrier(len(wanted))
        children = [FORK.Process(target=run, args=(point, argv, barrier)) for point, argv in wanted]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print(json.dumps([child.exitcode for child in children]), flush=True)


if __name__ == "__main__":
    main()
