"""Mechanisms that look like PSA and are not as private: one planted fault each, and neighbours that show it."""

import numpy as np
import torch

from psa_utils import audit, mechanism

N, LAYERS, WIDTH, SIGMA, CLIP = 320, 5, 8, 0.02, 1.0
BENIGN = np.random.default_rng(0).normal(size=(N, LAYERS, WIDTH))
SHAPE = (LAYERS, WIDTH)


def noisy(signal: np.ndarray, rng: np.random.Generator, trials: int) -> np.ndarray:
    return signal + SIGMA * rng.standard_normal((trials, *SHAPE))


right = audit.psa_draws(clip=CLIP, sigma=SIGMA)
half_noise = audit.psa_draws(clip=CLIP, sigma=SIGMA / 2)


def one_draw_for_all_layers(differences, rng, trials):
    return mechanism.clipped_mean(differences, clip=CLIP) + SIGMA * rng.standard_normal((trials, 1, WIDTH))


def clip_after_averaging(differences, rng, trials):
    mean = differences.mean(axis=0, keepdims=True)
    return noisy(mechanism.clipped_mean(mean, clip=CLIP), rng, trials)


def one_draw_for_all_trials(differences, rng, trials):
    return np.stack([right(differences, np.random.default_rng(0), 1)[0]] * trials)


def clip_from_the_data(differences, rng, trials):
    return audit.psa_draws(clip=mechanism.public_clip(differences), sigma=SIGMA)(differences, rng, trials)


def bfloat16_sum(differences, rng, trials):
    rows = torch.from_numpy(
        differences / np.maximum(CLIP, np.linalg.norm(differences, axis=2, keepdims=True))
    ).bfloat16()
    total = torch.zeros(SHAPE, dtype=torch.bfloat16)
    for row in rows:
        total += row
    return noisy(total.double().numpy() / len(rows), rng, trials)


def half_the_pairs(differences, rng, trials):
    """Pairs that were counted, but filtered out before the mean was taken: half the n of the claim."""
    return right(differences[N // 2 :], rng, trials)


def usual(copies: int = 1) -> audit.Worlds:
    return audit.worst_case(BENIGN, clip=CLIP, seed=0, copies=copies)


def median_on_the_edge() -> audit.Worlds:
    """Half the norms tiny, half large, all rows along one axis: the record decides which of the two the median is."""
    axis = np.zeros(SHAPE)
    axis[:, 0] = 1.0
    benign = axis * np.repeat([1.0, 1e-6], N // 2)[:, None, None]
    return audit.neighbours(benign, 1e-6 * axis, -axis, clip=CLIP)


def sums_between_two_bfloat16() -> audit.Worlds:
    """Four sums of 129, where bfloat16 holds whole numbers only: plus and minus 1/2 both round away from 129."""
    benign = np.zeros((N, *SHAPE))
    benign[-260:-4, :, :4] = 0.5
    benign[-4:, :, :4] = 0.75 * np.eye(4)[:, None]
    record = np.zeros(SHAPE)
    record[:, :4] = 0.5
    return audit.neighbours(benign, -record, record, clip=CLIP)


FAULTS = {
    "noise halved": (half_noise, usual),
    "one noise draw for all layers": (one_draw_for_all_layers, usual),
    "clipped after averaging": (clip_after_averaging, usual),
    "one noise draw for all trials": (one_draw_for_all_trials, usual),
    "clip taken from the data": (clip_from_the_data, median_on_the_edge),
    "summed in bfloat16": (bfloat16_sum, sums_between_two_bfloat16),
    "n overstated by a factor of two": (half_the_pairs, usual),
}
