"""Sample answers from a steered model, many vectors at a time.

Every row of a batch carries its own vector, so hundreds of noise draws or attack trials run as one batch. A prompt is
encoded once per vector; its samples branch from the cache of that one pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from . import steering
from .models import LM


@torch.inference_mode()
def sample(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    vectors: steering.PerRow,
    *,
    multiplier: float = 1.0,
    samples: int = 1,
    temperature: float = 0.8,
    max_new_tokens: int = 100,
    generator: torch.Generator | None = None,
) -> list[list[list[int]]]:
    """Generate ``samples`` answers to prompt i under vector i; token ids without the end-of-text token.

    Args:
        lm: the model.
        prompts: token ids of every prompt, as :meth:`psa_utils.models.LM.encode_chat` makes them.
        vectors: one per prompt, or None for an unsteered row.
        multiplier: strength of every vector.
        samples: answers per prompt.
        temperature: 0.8 is the paper's; 0 takes the likeliest token.
        max_new_tokens: longest answer.
        generator: source of randomness, on the model's device; required unless ``temperature`` is 0.

    Raises:
        ValueError: numbers of prompts and vectors differ, nothing to draw from, or logits that are not finite.
    """
    if len(prompts) != len(vectors) or not prompts:
        raise ValueError(f"{len(prompts)} prompts and {len(vectors)} vectors; give one vector (or None) per prompt")
    if temperature > 0 and generator is None:
        raise ValueError(f"temperature={temperature} needs a generator; pass torch.Generator().manual_seed(...)")
    ids, mask = _left_padded(lm, prompts)
    cache = DynamicCache(config=lm.model.config)
    with steering.apply(lm, vectors, multiplier=multiplier):
        logits = _last_logits(lm, ids, mask, cache)
    cache.batch_repeat_interleave(samples)
    per_sample = [vector for vector in vectors for _ in range(samples)]
    logits, mask = (tensor.repeat_interleave(samples, dim=0) for tensor in (logits, mask))
    with steering.apply(lm, per_sample, multiplier=multiplier):
        tokens = _decode(lm, logits, mask, cache, temperature, max_new_tokens, generator)
    answers = [_until_end(lm, row) for row in tokens.tolist()]
    return [answers[i : i + samples] for i in range(0, len(answers), samples)]


def _left_padded(lm: LM, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    return ids.to(lm.device), mask.to(lm.device)


def _last_logits(lm: LM, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Logits (rows, vocab) after the last of ``ids``; ``mask`` (rows, all tokens so far) marks padding."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = lm.model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
    )
    return lm.logits(output.last_hidden_state[:, -1])


def _decode(
    lm: LM,
    logits: Tensor,
    mask: Tensor,
    cache: DynamicCache,
    temperature: float,
    max_new_tokens: int,
    generator: torch.Generator | None,
) -> Tensor:
    ended = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    tokens = []
    while True:
        token = _choose(logits, temperature, generator)
        tokens.append(token)
        ended |= torch.isin(token, _end_tokens(lm).to(token.device))
        if len(tokens) == max_new_tokens or ended.all():
            return torch.stack(tokens, dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = _last_logits(lm, token[:, None], mask, cache)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=1)
    # One uniform number a row, not one exponential a word as `multinomial` draws; double, for 50,000 words add up.
    cumulative = (logits / temperature).softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    if not cumulative[:, -1].isfinite().all():
        raise ValueError("logits are not finite; load the model in float32, or steer with a smaller multiplier")
    drawn = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64, device=logits.device)
    return torch.searchsorted(cumulative, drawn * cumulative[:, -1:])[:, 0]


def _end_tokens(lm: LM) -> Tensor:
    ends = lm.model.generation_config.eos_token_id
    return torch.tensor([] if ends is None else ends, dtype=torch.long).reshape(-1)


def _until_end(lm: LM, tokens: list[int]) -> list[int]:
    ends = set(_end_tokens(lm).tolist())
    return next((tokens[:i] for i, token in enumerate(tokens) if token in ends), tokens)
