"""The plain path: one sequence at a time through the whole model, no packing, no masks, no shortcuts."""

import numpy as np
import torch

from psa_utils.data import Item
from psa_utils.models import LM


def encode(lm: LM, item: Item, option: int, fmt: str) -> tuple[list[int], list[int]]:
    return lm.encode_chat(item.prompt(fmt)), lm.encode_answer(item.completion(option, fmt))


@torch.inference_mode()
def hidden_states(lm: LM, ids: list[int]) -> tuple[torch.Tensor, ...]:
    """Outputs of every block, by hooks on the whole model."""
    outputs = []
    take = lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
    handles = [block.register_forward_hook(take) for block in lm.blocks]
    lm.model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return tuple(outputs)


def difference(lm: LM, item: Item, layers: list[int], fmt: str) -> np.ndarray:
    sides = []
    for option in (item.matching, item.other):
        prompt, answer = encode(lm, item, option, fmt)
        if fmt == "letter":
            letter = next(i for i, t in enumerate(answer) if lm.tokenizer.decode([t]).strip("() ").isalpha())
            answer = answer[: letter + 1]
        states = hidden_states(lm, prompt + answer)
        sides.append(torch.stack([states[layer][0, -1] for layer in layers]))
    return (sides[0] - sides[1]).numpy()


@torch.inference_mode()
def log_probability(lm: LM, item: Item, option: int, fmt: str) -> float:
    prompt, answer = encode(lm, item, option, fmt)
    logits = lm.model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).double().sum().item()
