"""A public corpus in several answer forms: the shipped benchmark, reworded by rule, written by us, free to publish.

A difference is read at the answer's last token, so the form of the answers (whole sentences, bare phrases, Yes and No)
decides in which directions differences lie, more than their subject does. An eigenbasis from sentences that all end
in a full stop fits no data set of Yes and No. Each form is therefore one source of
:class:`~psa_utils.public.Public`, and sources count alike.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import activations, data, paths, store
from .config import BEHAVIOURS
from .models import LM

FORMS = ("sentence", "phrase", "yes-no", "agree-disagree")
WORDS = {"yes-no": ("Yes", "No"), "agree-disagree": ("Agree", "Disagree")}
STEP = 8
"""Every eighth training pair of a behaviour, 40 of them: a form then takes seconds to extract, not minutes."""


def pairs(form: str, behaviours: Sequence[str] = BEHAVIOURS) -> list[data.Item]:
    """Contrastive pairs of the shipped benchmark in one of :data:`FORMS`, for answer format ``text``.

    Leave a behaviour out to judge an estimator on its pairs as if they were private.

    Raises:
        ValueError: unknown form.

    >>> len(pairs("phrase")), pairs("yes-no", ["refusal"])[0].options
    (280, ('Yes', 'No'))
    """
    items = [item for name in behaviours for item in data.load_items("mini", name, "train")[::STEP]]
    return [in_form(item, form) for item in items]


def in_form(item: data.Item, form: str) -> data.Item:
    """Reword an item's options. Words replace both answers whatever they say: the basis knows no sign.

    >>> item = data.Item("Tea?", "Tea? (A) Yes, tea. (B) No.", ("Yes, tea.", "No."), 1, 0)
    >>> in_form(item, "phrase").options, in_form(item, "yes-no").options
    (('Yes, tea', 'No'), ('Yes', 'No'))
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown; choose one of {', '.join(FORMS)}")
    if form == "sentence":
        return item
    if form == "phrase":
        return replace(item, options=tuple(option.rstrip(".!?") for option in item.options))
    return replace(item, options=WORDS[form], matching=0, other=1)


def differences(lm: LM, layers: Sequence[int]) -> list[np.ndarray]:
    """Differences (280, k, d) of every form at ``layers``, text answers, kept in the cache folder for the next use."""
    # All forms in one go, since they share their prompts.
    items = [item for form in FORMS for item in pairs(form)]
    key = store.key_of(
        model=lm.revision,
        dtype=str(lm.model.dtype),
        layers=list(layers),
        items=data.digest(items),
        code=store.code_of("activations", "engine", "packing", "models"),
    )
    path = paths.cache() / "public" / f"{key[:16]}.safetensors"
    kept = store.arrays(path, key, lambda: {"differences": activations.differences(lm, items, layers=layers)})
    return np.split(kept["differences"], len(FORMS))


def of_others(behaviour: str) -> np.ndarray:
    """Which rows of :func:`differences` (280,) do not belong to ``behaviour``; boolean."""
    sizes = [len(data.load_items("mini", name, "train")[::STEP]) for name in BEHAVIOURS]
    return np.repeat(BEHAVIOURS, sizes) != behaviour
