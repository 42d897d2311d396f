"""Answers to prompts without choices, zero-shot and steered (Tables 3, 4 and 21), sampled in batches and kept."""

from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm

from . import data, generate, paths, quality, scoring, seeding, store
from .config import Profile
from .judge import Judge
from .models import LM
from .scoring import Variant

ROWS = 60
"""Answers sampled at once, each under its own vector."""
CODE = ("generate", "steering", "models")


def answers(profile: Profile, lm: LM, behaviour: str, seed: int) -> pd.DataFrame:
    """One answer per prompt and variant: zero-shot and the main recipe's vectors at both signs; kept on disk.

    Of PSA the first ``few_seeds`` noise draws. Columns: the variant's labels, ``item``, ``question``, ``answer``.
    """
    prompts = data.load_open_ended(profile.data, behaviour)[: profile.n_open]
    variants = [scoring.zero_shot(behaviour=behaviour), *scoring.both_signs(profile, behaviour)]
    key = store.key_of(
        model=lm.revision,
        dtype=profile.dtype,
        prompts=[prompt.question for prompt in prompts],
        variants=[v.content() for v in variants],
        sampling=(profile.temperature, profile.answer_tokens, seed, ROWS),
        template=profile.template,
        code=store.code_of(*CODE),
    )
    path = paths.results(profile.name, "03_eval") / f"open-ended-{behaviour}.csv"
    questions = [prompt.question for prompt in prompts]
    return store.frame(
        path,
        key,
        lambda: _sample(profile, lm, questions, variants, behaviour, seed),
        texts=("question", "answer"),
    )


def _sample(
    profile: Profile, lm: LM, questions: Sequence[str], variants: Sequence[Variant], behaviour: str, seed: int
) -> pd.DataFrame:
    """Sample in batches; a multiplier is folded into each row's vector, so that signs mix in one batch."""
    rows = [(v, i, question) for v in variants for i, question in enumerate(questions)]
    generator = torch.Generator(lm.device).manual_seed(seeding.derive_seed(seed, "open-ended", behaviour))
    records = []
    for start in tqdm(range(0, len(rows), ROWS), desc=behaviour, disable=None, leave=False):
        part = rows[start : start + ROWS]
        found = generate.sample(
            lm,
            [lm.encode_chat(question, template=profile.template) for _, _, question in part],
            [v.vector and v.vector.scaled(v.multiplier) for v, _, _ in part],
            temperature=profile.temperature,
            max_new_tokens=profile.answer_tokens,
            generator=generator,
        )
        records += [
            {**variant.labels, "item": i, "question": question, "answer": lm.tokenizer.decode(tokens).strip()}
            for (variant, i, question), (tokens,) in zip(part, found, strict=True)
        ]
    return pd.DataFrame(records)


def judged(profile: Profile, lm: LM, judge: Judge, written: pd.DataFrame) -> pd.DataFrame:
    """Add the judge's ``score`` and the text's own quality (:func:`psa_utils.quality.measure`) to answers."""
    parts = []
    for behaviour, part in written.groupby("behaviour", sort=False):
        prompts = [lm.encode_chat(question, template=profile.template) for question in part.question]
        tokens = [lm.encode_answer(answer) for answer in part.answer]
        text = quality.measure(lm, prompts, tokens, batch_tokens=profile.batch_tokens)
        scores = judge.scores(behaviour, part.question.tolist(), part.answer.tolist())
        parts.append(part.assign(score=scores, **{name: text[name].to_numpy() for name in text}))
    return pd.concat(parts, ignore_index=True)
