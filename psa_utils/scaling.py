"""Figure 4: what private steering keeps, against the size of the model, at one privacy setting."""

from dataclasses import replace

import numpy as np
import pandas as pd

from . import config, paths, scoring, stages
from .config import Profile
from .models import LM

METHODS = ("zero-shot", "Mean", "PSA")


def compared(profile: Profile, seed: int, lm: LM, scored: pd.DataFrame) -> pd.DataFrame:
    """Test items zero-shot, under Mean and under PSA, for the models of ``profile.scaling`` and the profile's own.

    One row per item and variant with ``model`` and ``parameters``; what a model gave is kept on disk.

    Args:
        profile: its data, number of pairs and mu hold for all models; model and layers are each profile's own.
        seed: of the noise.
        lm: the profile's model.
        scored: rows of :func:`psa_utils.scoring.alignment` for the profile itself.
    """
    own = scored[
        (scored.format == profile.formats[0])
        & (scored.multiplier >= 0)
        & scored.recipe.isin(["none", profile.recipe])
        & scored.method.isin(METHODS)
    ]
    others = [_other(like(config.load_profile(name), profile), seed) for name in profile.scaling]
    return pd.concat([*others, _labelled(own, profile, lm)], ignore_index=True)


def like(other: Profile, profile: Profile) -> Profile:
    """The other profile's model, layers and multiplier under this profile's data and privacy.

    With k' layers instead of k, sigma is multiplied by sqrt(k' / k), which leaves mu = sqrt(k) 2 / (n sigma) as it is.

    >>> laptop = config.load_profile("laptop")
    >>> round(like(config.load_profile("smoke"), laptop).sigma, 4), len(laptop.layers)
    (0.0155, 5)
    """
    draws = ("noise_seeds", "few_seeds")  # together: a profile with fewer of one than of the other is refused
    names = ("data", "behaviours", "formats", "recipe", *draws, "n_train", "n_test", "clip_quantile")
    shared = {name: getattr(profile, name) for name in names}
    sigma = profile.sigma * float(np.sqrt(len(other.layers) / len(profile.layers)))
    return replace(other, name=f"{profile.name}/fig4/{other.name}", sigma=sigma, **shared)


def _other(profile: Profile, seed: int) -> pd.DataFrame:
    lm = stages.load_model(profile)
    frames = [_behaviour(profile, seed, lm, behaviour) for behaviour in profile.behaviours]
    return _labelled(pd.concat(frames, ignore_index=True), profile, lm)


def _behaviour(profile: Profile, seed: int, lm: LM, behaviour: str) -> pd.DataFrame:
    fmt = profile.formats[0]
    for split in stages.SPLITS:
        stages.differences(profile, lm, behaviour, split, fmt)
    raw = stages.extracted(profile, behaviour, fmt)
    labels = {"behaviour": behaviour, "format": fmt}
    vectors = stages.vectors(profile, seed, behaviour, raw, fmt, recipe=profile.recipe)
    steered = [scoring.of_vector(v, profile.multiplier, **labels) for v in vectors if v.record["method"] in METHODS]
    path = paths.results(profile.name, "03_eval") / f"{behaviour}-{fmt}.csv"
    items = stages.items(profile, behaviour, "test")
    return scoring.Bench(profile, lm, items, fmt).scored([scoring.zero_shot(**labels), *steered], path)


def _labelled(scored: pd.DataFrame, profile: Profile, lm: LM) -> pd.DataFrame:
    return scored.assign(model=profile.model, parameters=lm.model.num_parameters())
