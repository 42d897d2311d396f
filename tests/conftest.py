"""Four (and more) tiny random models, one per family, made on the fly; items to feed them."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from psa_utils import config, data, packaged, stages
from psa_utils.models import LM

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
# A window much shorter than the prompts, so that a mask that forgets it fails.
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "mistral": MistralConfig(**GROUPED, sliding_window=16),
    "gemma2": Gemma2Config(**GROUPED, sliding_window=16, query_pre_attn_scalar=8),
}
MORE_FAMILIES: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=512),
    "neox": GPTNeoXConfig(**SHAPE, max_position_embeddings=512),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=16, query_pre_attn_scalar=8),
    "qwen3": Qwen3Config(**GROUPED),
}
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}<|user|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    return packaged.train_tokenizer()


def tiny(family: str, tokenizer, blocks: int = 4) -> LM:
    config = copy.deepcopy({**FAMILIES, **MORE_FAMILIES}[family])
    if blocks != config.num_hidden_layers:
        config = type(config)(**{**config.to_dict(), "num_hidden_layers": blocks, "layer_types": None})
    config.vocab_size = len(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    torch.manual_seed(1)
    model = Auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large weights, so that an error of attention or position is not lost in fp32
            torch.nn.init.normal_(parameter, std=0.2)
    return LM(model.eval().requires_grad_(False), tokenizer, f"tiny-{family}", "0")


@pytest.fixture(scope="session", params=FAMILIES)
def lm(request, tokenizer) -> LM:
    """One tiny model of each of the four main families."""
    return tiny(request.param, tokenizer)


@pytest.fixture(scope="session", params=[*FAMILIES, *MORE_FAMILIES])
def any_lm(request, tokenizer) -> LM:
    """One tiny model of every supported family."""
    return tiny(request.param, tokenizer)


@pytest.fixture(scope="session")
def llama(tokenizer) -> LM:
    return tiny("llama", tokenizer)


@pytest.fixture(scope="session")
def items() -> list[data.Item]:
    """Items of very unequal lengths, two and three options."""
    short = data.Item("Tea?", "Tea?\n\nChoices:\n (A) Yes, tea.\n (B) No.", ("Yes, tea.", "No."), 0, 1)
    several = data.Item(
        "Which day suits you best for the long walk around the lake?",
        "Which day suits you best for the long walk around the lake?\n (A) Monday\n (B) Friday\n (C) Never",
        ("On Monday, I suppose.", "On Friday, after the rain has gone and the paths are dry.", "Never."),
        2,
        1,
    )
    return [short, several, *data.load_items("mini", "survival-instinct", "test", 4)]


@dataclass(frozen=True)
class Smoke:
    """What notebooks 01 and 02 leave behind for two behaviours of a very short smoke run."""

    profile: config.Profile
    lm: LM
    folder: Path

    def raw(self, behaviour: str = "refusal") -> stages.Extracted:
        return stages.extracted(self.profile, behaviour, "text")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Smoke:
    behaviours, formats = ("refusal", "survival-instinct"), ("text", "letter")
    options = {
        "n_train": 8,
        "n_test": 4,
        "n_sweep": 3,
        "few_items": 3,
        "n_open": 2,
        "n_knowledge": 4,
        "answer_tokens": 6,
    }
    profile = config.load_profile("smoke", behaviours=behaviours, formats=formats, **options)
    run = Smoke(profile, stages.load_model(profile), tmp_path_factory.mktemp("out"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PSA_OUT", str(run.folder))
        for behaviour in behaviours:
            for fmt in formats:
                _extract_and_save(run, behaviour, fmt)
    return run


def _extract_and_save(run: Smoke, behaviour: str, fmt: str) -> None:
    for split in stages.SPLITS:
        stages.differences(run.profile, run.lm, behaviour, split, fmt)
    raw = stages.extracted(run.profile, behaviour, fmt)
    for recipe in config.RECIPES:
        for vector in stages.vectors(run.profile, 0, behaviour, raw, fmt, recipe=recipe):
            stages.save_vector(run.profile, vector)


@pytest.fixture
def smoke(finished, monkeypatch) -> Smoke:
    """The finished run, with its folder as the output of this test; what is scored there is kept for the next."""
    monkeypatch.setenv("PSA_OUT", str(finished.folder))
    return finished
