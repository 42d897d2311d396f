"""Profiles: every difference between a smoke test, a laptop run and the paper's scale is one TOML file."""

import dataclasses
import tomllib
from dataclasses import dataclass
from typing import Any

from . import paths

BEHAVIOURS = (
    "sycophancy",
    "hallucination",
    "refusal",
    "survival-instinct",
    "myopic-reward",
    "coordinate-other-ais",
    "corrigible-neutral-HHH",
)
FORMATS = ("text", "letter")
RECIPES = ("matched", "paper")
KNOWLEDGE = ("mmlu", "truthfulqa", "general-knowledge")


@dataclass(frozen=True)
class Profile:
    """What one run computes. Field by field, as in ``psa_utils/profiles/<name>.toml``."""

    name: str
    title: str
    """One line for the notebooks."""
    model: str
    """Anything :func:`psa_utils.models.load` takes."""
    data: str
    """``mini`` (shipped) or ``caa`` (downloaded)."""
    layers: tuple[int, ...]
    """0-based decoder blocks that are read and steered."""
    multiplier: float
    """Steering strength in the units of ``recipe``."""
    revision: str | None = None
    """Commit of a hub model."""
    formats: tuple[str, ...] = ("text",)
    """Answer formats, the first one is the main one."""
    behaviours: tuple[str, ...] = BEHAVIOURS
    recipe: str = "matched"
    """What the main figures show. ``matched``: every vector has the same public norm per layer; ``paper``: as
    published. Both are always computed."""
    template: str = "chat"
    """``chat``: the tokenizer's own; ``llama2``: the paper's hand-written prompt."""
    sigma: float = 0.02
    """Noise standard deviation of PSA, in units of the clip (Algorithm 1)."""
    clip_quantile: float = 0.5
    """The clip C_l is this quantile of the norms of the public pairs' differences."""
    noise_seeds: int = 5
    few_seeds: int = 2
    """Noise draws where every one costs much: sweeps, knowledge questions, open-ended answers."""
    few_items: int | None = None
    """Test items per behaviour in notebook 03's checks: vectors subtracted, and those of the other recipe."""
    n_train: int | None = None
    """Use the first so many training pairs (all if None)."""
    n_test: int | None = None
    n_sweep: int | None = None
    """Test items per behaviour in the sweeps of notebook 04."""
    n_estimators: int | None = None
    """Test items per behaviour on which notebook 04 steers with estimators."""
    n_open: int | None = None
    """Open-ended prompts per behaviour."""
    n_knowledge: int | None = None
    """Questions drawn from each knowledge set."""
    knowledge: tuple[str, ...] = ("general-knowledge",)
    """Sets of Table 5, from :data:`KNOWLEDGE`; see :mod:`psa_utils.knowledge`."""
    temperature: float = 0.8
    """Of open-ended answers (the paper's); 0: the likeliest token."""
    answer_tokens: int = 100
    """Longest open-ended answer."""
    clips: tuple[float, ...] = (10.0, 15.0, 20.0, 25.0)
    """Constant clips of the clip sweep (the paper's), beside quantiles of public norms."""
    canaries: int = 24
    """Canaries of the membership attack."""
    white_trials: int = 20_000
    grey_trials: int = 1000
    black_trials: int = 200
    """Counted trials of the attack: per world for the white box, in all for the others."""
    black_samples: int = 10
    """Answers sampled in a trial of the black box."""
    scaling: tuple[str, ...] = ()
    """Profiles whose models Figure 4 compares, smallest first; this profile itself is always among them."""
    dtype: str = "float32"
    device: str = "cpu"
    batch_tokens: int = 1024
    """Tokens in one forward pass, padding included."""
    bootstrap: int = 2000

    def __post_init__(self) -> None:
        _check(self)


def available() -> list[str]:
    """Names of the shipped profiles.

    >>> "laptop" in available()
    True
    """
    return sorted(p.stem for p in paths.SHARED_PROFILES.glob("*.toml"))


def load_profile(name: str, **overrides: Any) -> Profile:
    """Read a shipped profile; keyword arguments replace single fields.

    Raises:
        ValueError: unknown profile, unknown field or impossible value; the message names the choices.

    >>> load_profile("laptop", sigma=0.01).sigma
    0.01
    """
    if name not in available():
        raise ValueError(f"profile={name!r} is unknown; choose one of {', '.join(available())}")
    with (paths.SHARED_PROFILES / f"{name}.toml").open("rb") as file:
        values = {"name": name, **tomllib.load(file), **overrides}
    known = {field.name for field in dataclasses.fields(Profile)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"profile {name!r} has unknown field(s) {unknown}; known are {sorted(known)}")
    return Profile(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _check(p: Profile) -> None:
    rules = {
        "data": p.data in ("mini", "caa"),
        "recipe": p.recipe in RECIPES,
        "knowledge": set(p.knowledge) <= set(KNOWLEDGE),
        "scaling": set(p.scaling) <= set(available()),
        "formats": bool(p.formats) and set(p.formats) <= set(FORMATS),
        "behaviours": bool(p.behaviours) and set(p.behaviours) <= set(BEHAVIOURS),
        "layers": bool(p.layers) and len(set(p.layers)) == len(p.layers) and min(p.layers) >= 0,
        "multiplier": p.multiplier > 0,
        "template": p.template in ("chat", "llama2"),
        "sigma": p.sigma > 0,
        "clip_quantile": 0 < p.clip_quantile <= 1,
        "noise_seeds": p.noise_seeds >= 1,
        "batch_tokens": p.batch_tokens >= 1,
        **{
            name: _at_least_two(getattr(p, name))
            for name in ("n_train", "n_test", "n_sweep", "n_open", "n_knowledge", "few_items", "n_estimators")
        },
        "few_seeds": 1 <= p.few_seeds <= p.noise_seeds,
        "temperature": p.temperature >= 0,
        "answer_tokens": p.answer_tokens >= 1,
        "canaries": p.canaries >= 2,
        "white_trials": p.white_trials >= 10,
        "grey_trials": p.grey_trials >= 10,
        "black_trials": p.black_trials >= 10,
        "black_samples": p.black_samples >= 1,
        "clips": min(p.clips, default=1) > 0,
    }
    for field, good in rules.items():
        if not good:
            raise ValueError(
                f"profile {p.name!r}: {field}={getattr(p, field)!r} is not possible; see psa_utils/config.py"
            )


def _at_least_two(n: int | None) -> bool:
    return n is None or n >= 2
