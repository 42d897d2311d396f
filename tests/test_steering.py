import numpy as np
import pytest
import torch

from psa_utils import steering
from psa_utils.vectors import SteeringVectors

LAYERS = (1, 2)


@pytest.fixture
def vectors(lm):
    return SteeringVectors(LAYERS, np.random.default_rng(0).normal(size=(2, lm.width)))


@pytest.fixture
def prompt(lm):
    return torch.tensor([lm.encode_chat("Which way to the harbour?")])


def manual(lm, ids, shift):
    """Steered logits with the blocks' own weights edited by hand: the vector added to each block's output."""
    handles = [
        lm.blocks[layer].register_forward_hook(
            lambda _m, _i, out, row=row: (out[0] + row, *out[1:]) if isinstance(out, tuple) else out + row
        )
        for layer, row in zip(LAYERS, torch.tensor(shift, dtype=torch.float32), strict=True)
    ]
    logits = lm.model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


def test_forward_adds_at_every_token(lm, vectors, prompt):
    with steering.apply(lm, vectors, multiplier=2.0):
        steered = lm.model(prompt).logits
    torch.testing.assert_close(steered, manual(lm, prompt, 2 * vectors.values))
    assert (steered - lm.model(prompt).logits).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_is_exact_from_the_first_token(lm, vectors, prompt, use_cache):
    """Greedy generation equals choosing each token by hand from a steered forward pass over the whole text."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
    mask = torch.ones_like(prompt)
    with steering.apply(lm, vectors, multiplier=3.0):
        out = lm.model.generate(
            prompt, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
        )
    for step, logits in enumerate(out.logits):
        expected = manual(lm, out.sequences[:, : prompt.shape[1] + step], 3 * vectors.values)[:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    plain = lm.model.generate(prompt, attention_mask=mask, **options)
    assert not torch.equal(plain, out.sequences)


def test_multiplier_zero_is_the_model_bit_for_bit(lm, vectors, prompt):
    with steering.apply(lm, vectors, multiplier=0):
        inside = lm.model(prompt).logits
    assert torch.equal(inside, lm.model(prompt).logits)


def test_nested_uses_add_up(lm, vectors, prompt):
    with steering.apply(lm, vectors, multiplier=1.0), steering.apply(lm, vectors, multiplier=0.5):
        nested = lm.model(prompt).logits
    torch.testing.assert_close(nested, manual(lm, prompt, 1.5 * vectors.values))


def test_restored_after_an_exception(lm, vectors, prompt):
    before = lm.model(prompt).logits
    with pytest.raises(KeyError), steering.apply(lm, vectors):
        raise KeyError
    assert torch.equal(lm.model(prompt).logits, before)


def test_wrong_model_or_layer(llama):
    with (
        pytest.raises(ValueError, match="hidden size 7, tiny-llama has 32"),
        steering.apply(llama, SteeringVectors((1,), np.ones((1, 7)))),
    ):
        pass
    with (
        pytest.raises(ValueError, match="from 0 to 3"),
        steering.apply(llama, SteeringVectors((4,), np.ones((1, 32)))),
    ):
        pass


@pytest.mark.parametrize("shape", ["tensor", "tuple"])
def test_the_shift_follows_the_activations_device_and_type(shape):
    """Not the weights': here they lie on one device, the activations arrive on another ("meta" stands in for a GPU)."""
    block, shift = torch.nn.Identity(), torch.arange(4.0)
    wrapped = block if shape == "tensor" else torch.nn.Sequential(block)
    if shape == "tuple":
        wrapped.forward = lambda hidden: (hidden, "cache")
    handle = steering._add(wrapped, shift)
    for hidden in (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, device="meta"), torch.ones(1, 2, 4)):
        out = wrapped(hidden)
        steered = out if shape == "tensor" else out[0]
        assert (steered.device, steered.dtype, steered.shape) == (hidden.device, hidden.dtype, hidden.shape)
        if hidden.device.type == "cpu":
            assert torch.equal(steered, hidden + torch.arange(4.0))
    assert wrapped(torch.zeros(1, 1, 4))[1:] == ("cache",) if shape == "tuple" else True
    handle.remove()
    half = steering._add(block, shift)
    assert block(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    half.remove()
