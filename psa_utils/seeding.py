"""Seeds that depend on what they are for, never on the order of the calls."""

import hashlib

import numpy as np


def derive_seed(base: int, *labels: str | int) -> int:
    """Hash ``base`` and ``labels`` to a seed in [0, 2**63).

    >>> derive_seed(0, "psa", "refusal", 1) == derive_seed(0, "psa", "refusal", 1)
    True
    >>> len({derive_seed(0, "psa", s) for s in range(100)} | {derive_seed(1, "psa", 0)})
    101
    """
    text = "\x1f".join(map(str, (base, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def rng(base: int, *labels: str | int) -> np.random.Generator:
    """Return a NumPy generator seeded by :func:`derive_seed`: for demonstrations, never for a release."""
    return np.random.default_rng(derive_seed(base, *labels))
