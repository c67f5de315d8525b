"""Tiny checkpoints that can fail: what the golden script and the tests must agree on. No JAX, no PyTorch.

Weights depend on the seed and the tensor's name alone, so the script (which asks transformers for names and shapes) and
the tests (which ask `weights.expected_shapes`) build the same checkpoint only if both name and shape it alike.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent

BASE: dict[str, Any] = {
    "vocab_size": 37,
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama", "head_dim": 8, "rope_theta": 500.0},
    "llama_biased_linear_tied": BASE
    | {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama3": BASE
    | {"model_type": "llama", "head_dim": 16, "rope_theta": 100.0, "rope_scaling": LLAMA3},
    "qwen2_tied": BASE
    | {"model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen2_window": BASE
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 0,
    },
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 10},
    "qwen3_biased_tied": BASE
    | {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "mistral_window": BASE | {"model_type": "mistral", "head_dim": 8, "sliding_window": 5},
}
"""Per case the fields of its `config.json`."""

LENGTHS = {"llama3": 96}
"""Tokens per row; `llama3` goes beyond its original length of 64."""


def tokens(case: str) -> np.ndarray:
    """Two rows of token ids for a case, `[2 T]` int32."""
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    return rng.integers(0, BASE["vocab_size"], (2, LENGTHS.get(case, 20))).astype(np.int32)


def values(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of one Hugging Face tensor: norms around 1, biases of size 0.3, small embeddings (so eps counts)."""
    rng = np.random.default_rng([zlib.crc32(case.encode()), zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape)
    if "norm" in name:
        noise = 1 + 0.3 * noise
    elif name.endswith(".bias"):
        noise = 0.3 * noise
    elif "embed_tokens" in name:
        noise = 0.05 * noise
    else:
        noise = noise / np.sqrt(shape[-1])
    return noise.astype(np.float32)


def write_folder(
    folder: Path, case: str, shapes: Mapping[str, tuple[int, ...]], shards: int = 2
) -> Path:
    """Write a case as a Hugging Face folder, tensors dealt in turn to `shards` files, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = CASES[case] | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields))
    files = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    weight_map = {name: files[place % shards] for place, name in enumerate(shapes)}
    for file in files:
        held = {n: values(case, n, shapes[n]) for n in shapes if weight_map[n] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def golden(case: str) -> np.ndarray:
    """The committed float32 logits `[2 T V]` of a case, as transformers computed them."""
    with np.load(HERE / f"{case}.npz") as file:
        return file["logits"]
