"""Choose layers and multiplier once, on public data: ``python -m psa_utils.calibrate`` (``make calibrate``).

The rule. For every window of five consecutive middle blocks and every multiplier: compute the mean vector of half
of a behaviour's public pairs (their frames, so that the halves share no situation), steer the other half, and
swap. *Gain* is the mean rise of P(matching answer) over behaviours, *loss* the mean drop of the log-probability
per token of ordinary text (``mini/ordinary.txt``), in nats. The largest gain whose loss stays within
:data:`BUDGET` wins. Neither private nor test items are looked at, so the choice costs no privacy.

The budget was set after a first, coarser run on the same public pairs (multipliers 0.5 to 2, a budget of 0.1 nats)
had left only settings that barely steer: on this model alignment is bought with fluency.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from tqdm import tqdm

from . import activations, artifacts, config, data, evaluate, mechanism, paths, stages, steering
from .config import Profile
from .models import LM
from .vectors import SteeringVectors

WIDTH = 5
BUDGET = math.log(4 / 3)
"""Nats per token that steering may cost: the perplexity of ordinary text may rise by a third."""
MULTIPLIERS = (0.25, 0.5, 0.75, 1.0)


def windows(blocks: int) -> list[tuple[int, ...]]:
    """Five consecutive blocks, starting between a third and half of the depth.

    >>> [w[0] for w in windows(30)]
    [10, 12, 14]
    """
    return [tuple(range(start, start + WIDTH)) for start in range(blocks // 3, blocks // 2, 2)]


def ordinary_text() -> list[str]:
    """Sentences about nothing in particular, written for this purpose."""
    return (paths.MINI / "ordinary.txt").read_text().splitlines()


def choose(table: pd.DataFrame) -> pd.Series:
    """Apply the rule: the row of largest gain among those whose loss is within the budget.

    >>> rows = pd.DataFrame({"multiplier": [1.0, 2.0], "gain": [0.1, 0.3], "loss": [0.02, 0.4]})
    >>> float(choose(rows).multiplier)
    1.0
    """
    affordable = table[table.loss <= BUDGET]
    if affordable.empty:
        raise ValueError(f"no setting keeps the loss within {BUDGET:.2f} nats per token; try smaller multipliers")
    return affordable.loc[affordable.gain.idxmax()]


def measure(profile: Profile, lm: LM) -> pd.DataFrame:
    """Gain and loss of every window and multiplier, one row each."""
    rows = []
    for layers in tqdm(windows(len(lm.blocks)), desc="windows", disable=None):
        trial = replace(profile, layers=layers)
        text = evaluate.TextScorer(lm, ordinary_text(), first=layers[0])
        unsteered = text.score().mean()
        cells = [c for b in profile.behaviours for c in _trials(trial, lm, b, text, unsteered)]
        mean = pd.DataFrame(cells).groupby("multiplier", as_index=False)[["gain", "loss"]].mean()
        rows.append(mean.assign(layers=f"{layers[0]}-{layers[-1]}"))
    return pd.concat(rows, ignore_index=True)[["layers", "multiplier", "gain", "loss"]]


def _trials(
    profile: Profile, lm: LM, behaviour: str, text: evaluate.TextScorer, unsteered: float
) -> Iterator[dict[str, float]]:
    pairs = stages.items(profile, behaviour, "public")
    fmt = profile.formats[0]
    found = activations.differences(lm, pairs, layers=profile.layers, fmt=fmt)
    strength = np.linalg.norm(mechanism.mean(found), axis=1)
    for half in halves(pairs):
        vector = SteeringVectors(profile.layers, mechanism.rescale(mechanism.mean(found[half]), strength))
        held_out = [pairs[i] for i in np.flatnonzero(~half)]
        scorer = evaluate.Scorer(lm, held_out, fmt=fmt, first=profile.layers[0])
        before = scorer.score().probability.mean()
        for multiplier in MULTIPLIERS:
            with steering.apply(lm, vector, multiplier=multiplier):
                gain = scorer.score().probability.mean() - before
                loss = unsteered - text.score().mean()
            yield {"multiplier": multiplier, "gain": gain, "loss": loss}


def halves(pairs: Sequence[data.Item]) -> list[np.ndarray]:
    """Two complementary boolean masks that split pairs by frame."""
    frames = sorted({pair.frame for pair in pairs})
    first = np.array([frames.index(pair.frame) < len(frames) / 2 for pair in pairs])
    return [first, ~first]


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m psa_utils.calibrate", description="Choose layers and multiplier.")
    parser.add_argument("--profile", default="laptop", help=f"one of {', '.join(config.available())}")
    profile = config.load_profile(parser.parse_args().profile)
    table = measure(profile, stages.load_model(profile))
    artifacts.write_csv(paths.tables(profile.name) / "calibration.csv", table)
    best = choose(table)
    print(table.round(4).to_string(index=False))
    print(f"chosen: layers {best.layers}, multiplier {best.multiplier} (gain {best.gain:.3f}, loss {best.loss:.3f})")


if __name__ == "__main__":
    main()
