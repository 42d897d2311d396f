import dataclasses

import numpy as np
import pytest
import torch

from psa_utils import activations, packing
from psa_utils.data import DataError
from tests import reference

LAYERS = [1, 3]


@pytest.mark.parametrize("fmt", ["text", "letter"])
def test_equal_to_plain_path(any_lm, items, fmt):
    ours = activations.differences(any_lm, items, layers=LAYERS, fmt=fmt)
    plain = np.stack([reference.difference(any_lm, item, LAYERS, fmt) for item in items])
    assert np.abs(plain).max() > 0.1
    np.testing.assert_allclose(ours, plain, atol=1e-4, rtol=1e-4)


def test_batch_composition_does_not_matter(lm, items):
    together = activations.differences(lm, items, layers=LAYERS)
    reverse = activations.differences(lm, items[::-1], layers=LAYERS)[::-1]
    single = activations.differences(lm, items, layers=LAYERS, batch_tokens=1)
    np.testing.assert_allclose(together, single, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(together, reverse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_tokens", [90, 1024])
def test_pairs_that_ask_the_same_share_its_pass(lm, items, batch_tokens):
    """Among others, in rows of one, two and, where the budget ends a row, again one."""
    reworded = [dataclasses.replace(item, options=("Yes", "No", "Why not?")) for item in items]
    pairs = [
        *reworded,
        *items,
        *(dataclasses.replace(item, options=("Agreed.", "Never!", "So?")) for item in items[:2]),
    ]
    together = activations.differences(lm, pairs, layers=LAYERS, batch_tokens=batch_tokens)
    plain = [reference.difference(lm, pair, LAYERS, "text") for pair in pairs]
    np.testing.assert_allclose(together, plain, atol=1e-4, rtol=1e-4)
    rows, _ = packing.branching(packing.rows_of(lm, pairs, "text"), batch_tokens)
    assert len(items) <= len(rows) < len(pairs)


def test_layer_is_the_block_output(llama, items):
    """Block l's output is hidden_states[l + 1] of transformers."""
    prompt, answer = reference.encode(llama, items[0], 0, "text")
    states = llama.model(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states
    ours = reference.hidden_states(llama, prompt + answer)
    torch.testing.assert_close(states[2], ours[1])


def test_read_tokens_show_the_end_of_text_and_the_letter(llama, items):
    text = activations.read_tokens(llama, items, fmt="text")
    assert [row["read"] for row in text] == ["."] * len(items)
    letters = activations.read_tokens(llama, items, fmt="letter")
    read = [(row["read"].strip("() "), row["read (other)"].strip("() ")) for row in letters]
    assert read == [("ABC"[i.matching], "ABC"[i.other]) for i in items]


def test_hooks_are_gone_afterwards(llama, items):
    before = [len(block._forward_hooks) for block in llama.blocks]
    activations.differences(llama, items, layers=LAYERS)
    assert [len(block._forward_hooks) for block in llama.blocks] == before


@pytest.mark.parametrize("layers", [[], [-1], [4], [1, 1]])
def test_layers_out_of_range(llama, items, layers):
    with pytest.raises(ValueError, match=r"layers=.* from 0 to 3"):
        activations.differences(llama, items, layers=layers)


def test_too_long_for_the_context(llama, items):
    long = dataclasses.replace(items[0], question="very " * 600)
    with pytest.raises(DataError, match=r"2 item\(s\) too long.*\n.*item 1: .*\n.*item 3: "):
        activations.differences(llama, [long, items[0], long], layers=LAYERS)


def test_activations_that_are_not_finite(tokenizer, items):
    from tests.conftest import tiny

    broken = tiny("llama", tokenizer)
    first, second = (set(broken.encode_chat(item.question)) for item in items[:2])
    broken.model.get_input_embeddings().weight.data[min(second - first)] = float("nan")
    with pytest.raises(DataError, match=r"not finite for item\(s\) \[2\]"):
        activations.differences(broken, items[:2], layers=LAYERS)


def test_no_pairs(llama):
    with pytest.raises(ValueError, match="pairs is empty"):
        activations.differences(llama, [], layers=LAYERS)


def test_padding_and_the_other_answer_are_invisible():
    row = packing.Row((5, 6), ((7, 8), (9,)))
    batch = packing.pack([row, packing.Row((1,) * 4, ((2,) * 4, (3,)))])
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 0, 0, 0, 0]
    sees = [batch.allowed[0, q].nonzero()[:, 0].tolist() for q in range(6)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 5]]
