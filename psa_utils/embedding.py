"""Sentence embeddings: all-MiniLM-L6-v2, as published (mean over the tokens, unit norm)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import packaged
from .models import quiet

LONGEST = 256
"""Tokens of a text that count; the published model was made for no more."""


@dataclass(frozen=True, eq=False)
class Embedder:
    """The embedding model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls) -> "Embedder":
        """Load the packaged model on the CPU; the first call fetches it."""
        folder = packaged.minilm()
        with quiet():
            return cls(AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder))

    def __call__(self, texts: Sequence[str], *, batch: int = 64) -> np.ndarray:
        """Embeddings (texts, 384) of unit norm; cosines are their dot products."""
        result = np.empty((len(texts), self.model.config.hidden_size))
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(texts), batch):
            index = by_length[start : start + batch]
            result[index] = self._embed([texts[i] for i in index]).numpy()
        return result

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str]) -> Tensor:
        # The tokenizer's own file pads and cuts everything to 128 tokens.
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        real = inputs["attention_mask"][:, :, None]
        hidden = self.model(**inputs).last_hidden_state
        return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1))
