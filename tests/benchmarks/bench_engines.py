"""How much faster the engines are than the published way of working, in one run: ``make bench``.

Model SmolLM2-135M, CAA refusal (``PSA_DATA_DIR``), text answers, the laptop profile's layers. Peers: steering-vectors
0.12.2 (its own extraction, at batch 1 and its best batch) and the published sequence, spelled out below: every prompt
through the whole model with its head, twice per pair, once per method, every variant from the first layer, one
sequence at a time. Sides alternate A B A B; the table shows medians. The published sequence would take half an hour:
its two unit costs (one pair, one item) are measured on a sample in every round and multiplied by how often it pays
them; ours is measured whole.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from psa_utils import activations, config, data, evaluate, generate, mechanism, models, packing, steering
from psa_utils.engine import Prompts
from psa_utils.models import LM
from psa_utils.vectors import SteeringVectors
from tests import reference

PROFILE = config.load_profile("laptop")
LAYERS = PROFILE.layers
ROUNDS = 2
SAMPLE = 32
TARGETS = {
    "extraction_vs_batch1": 6.0,
    "extraction_vs_best_batch": 4.5,
    "pipeline_1_seed": 10.0,
    "pipeline_5_seeds": 25.0,
    "generation_per_row": 8.0,
    "matmul_share": 0.55,
    "memory_n500_over_n50": 1.10,
}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(*sides: Callable[[], object]) -> list[float]:
    """Median seconds of every side, run in turn."""
    times = [[seconds(side) for side in sides] for _ in range(ROUNDS)]
    return [median(column) for column in zip(*times, strict=True)]


def peer_vectors(lm: LM, pairs: list[data.Item], batch: int) -> np.ndarray:
    """steering-vectors' mean difference over the same token sequences, (k, d)."""
    from steering_vectors import train_steering_vector

    def text(item: data.Item, option: int) -> str:
        ids = lm.encode_chat(item.prompt("text")) + lm.encode_answer(item.completion(option, "text"))
        return lm.tokenizer.decode(ids)

    samples = [(text(item, item.matching), text(item, item.other)) for item in pairs]
    options = {"layers": list(LAYERS), "read_token_index": -1, "batch_size": batch}
    found = train_steering_vector(lm.model, lm.tokenizer, samples, **options).layer_activations
    return np.stack([found[layer].numpy() for layer in LAYERS])


def extraction(lm: LM, pairs: list[data.Item]) -> dict[str, float]:
    """Pairs per second against steering-vectors; the vectors must agree to 1e-3."""
    few = pairs[:SAMPLE]
    ours, theirs = mechanism.mean(activations.differences(lm, few, layers=LAYERS)), peer_vectors(lm, few, 1)
    off = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert off <= 1e-3, f"the peer computes another vector: relative difference {off:.1e}"
    batches = {batch: seconds(lambda b=batch: peer_vectors(lm, few, b)) for batch in (1, 4, 8, 16)}
    best = min(batches, key=batches.get)
    one, many, fast = alternate(
        lambda: peer_vectors(lm, few, 1),
        lambda: peer_vectors(lm, few, best),
        lambda: activations.differences(lm, pairs, layers=LAYERS),
    )
    single, batched, engine = len(few) / one, len(few) / many, len(pairs) / fast
    print(f"pairs per second: batch 1 {single:.2f}, best batch ({best}) {batched:.2f}, ours {engine:.2f}")
    return {
        "extraction_vs_batch1": engine / single,
        "extraction_vs_best_batch": engine / max(single, batched),
        "matmul_share": matmul_share(lm, pairs, fast),
    }


def matmul_share(lm: LM, pairs: list[data.Item], taken: float) -> float:
    """Useful float32 operations of extraction per second, over what a large matrix product reaches here."""
    a = torch.randn(2048, 2048)
    peak = 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(10))
    tokens = sum(map(len, Prompts.of(packing.rows_of(lm, pairs, "text")).rows))
    weights = sum(p.numel() for block in lm.blocks[: max(LAYERS) + 1] for p in block.parameters())
    return 2 * weights * tokens / taken / peak


def random_vectors(lm: LM, count: int) -> list[SteeringVectors]:
    values = np.random.default_rng(0).normal(size=(count, len(LAYERS), lm.width))
    return [SteeringVectors(LAYERS, v) for v in values]


def ours_pipeline(lm: LM, pairs: list[data.Item], items: list[data.Item], seeds: int) -> None:
    """Vectors of all methods from one extraction, then every variant resumed: what notebooks 01 to 03 do."""
    found = activations.differences(lm, pairs, layers=LAYERS)
    clip = mechanism.public_clip(found)
    mechanism.pca(found)
    mechanism.max_norm_mean(found)
    for seed in range(seeds):
        mechanism.psa(found, clip=clip, sigma=PROFILE.sigma, rng=np.random.default_rng(seed))
    scorer = evaluate.Scorer(lm, items, first=min(LAYERS))
    scorer.score()
    for vector in random_vectors(lm, 2 + seeds):
        for multiplier in (1.0, -1.0):
            with steering.apply(lm, vector, multiplier=multiplier):
                scorer.score()


def pipeline(lm: LM, pairs: list[data.Item], items: list[data.Item]) -> dict[str, float]:
    """The whole published sequence for one behaviour, with 1 and with 5 noise seeds.

    The published script knows one seed: five seeds are five runs of it, three extractions and seven evaluations each.
    A thriftier user would repeat only what the seed changes; that ratio is printed beside it.
    """
    few = items[: SAMPLE // 2]

    def pair_cost() -> None:
        for item in pairs[:SAMPLE]:
            reference.difference(lm, item, list(LAYERS), "text")

    def item_cost() -> None:
        with steering.apply(lm, random_vectors(lm, 1)[0]):
            for item in few:
                reference.log_probability(lm, item, item.matching, "text")
                reference.log_probability(lm, item, item.other, "text")

    per_pair, per_item, one, five = alternate(
        pair_cost, item_cost, lambda: ours_pipeline(lm, pairs, items, 1), lambda: ours_pipeline(lm, pairs, items, 5)
    )
    extraction, evaluation = len(pairs) * per_pair / SAMPLE, len(items) * per_item / len(few)
    once = 3 * extraction + 7 * evaluation
    print(
        f"published sequence: {once:.0f} s a run (from unit costs); ours {one:.0f} s with 1 seed, {five:.0f} s with 5"
    )
    print(f"5 seeds, PCA and Mean not repeated: {(7 * extraction + 15 * evaluation) / five:.2f} times as fast")
    return {"pipeline_1_seed": once / one, "pipeline_5_seeds": 5 * once / five}


def generation(lm: LM, count: int = 64, length: int = 24) -> dict[str, float]:
    """64 short answers under 64 different vectors, in one batch against one by one (a quarter of them, scaled)."""
    vectors, prompt = random_vectors(lm, count), lm.encode_chat("Where is the harbour located?")
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "temperature": 0.8}

    def one_by_one() -> None:
        for vector in vectors[: count // 4]:
            with steering.apply(lm, vector):
                lm.model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    def together() -> None:
        generator = torch.Generator().manual_seed(0)
        generate.sample(lm, [prompt] * count, vectors, max_new_tokens=length, generator=generator)

    single, batch = alternate(one_by_one, together)
    print(f"answers per second: one by one {count / 4 / single:.2f}, per-row vectors {count / batch:.2f}")
    return {"generation_per_row": 4 * single / batch}


def peak_memory(n: int) -> float:
    """Peak resident memory (MiB) of a fresh process that extracts n pairs."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_engines", "--memory", str(n)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of the engines against the published way of working.")
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lm = models.load(PROFILE.model)
    pairs, items = (data.load_items("caa", "refusal", split) for split in ("train", "test"))
    if args.memory:
        # No pair twice: those that ask the same would share a pass.
        more = data.load_items("caa", "coordinate-other-ais", "train")
        activations.differences(lm, [*pairs, *more][: args.memory], layers=LAYERS)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    ratios = extraction(lm, pairs) | generation(lm) | pipeline(lm, pairs, items)
    ratios["memory_n500_over_n50"] = peak_memory(500) / peak_memory(50)
    print(f"\n{'':28}{'measured':>10}{'target':>10}")
    for name, target in TARGETS.items():
        print(f"{name:28}{ratios[name]:10.2f}{target:10.2f}")
    if args.json:
        args.json.write_text(json.dumps({name: ratios[name] for name in TARGETS}, indent=1))


if __name__ == "__main__":
    main()
