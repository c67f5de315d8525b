"""Architectures of well-known models by hub id, as their `config.json` states them: enough to plan a run before anything is fetched.

Left out on purpose: weights, tokenizers, and any model that is not listed; a folder on disk always wins.
"""

from typing import Any

from jaxrl_llm.models.families import ModelConfig, from_hf

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


def _model(family: str, *values: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **dict(zip(FIELDS, values, strict=True)), **more}


def _deepseek() -> dict[str, Any]:
    return _model("llama", 4096, 11008, 30, 32, 32, 102400, 4096, False, 1e-6, 1e4, bos_token_id=100000, eos_token_id=100001)  # fmt: skip


def _qwen2(*sizes: Any, chat: bool) -> dict[str, Any]:
    ids = {"bos_token_id": 151643, "eos_token_id": [151645, 151643] if chat else 151643}
    return _model("qwen2", *sizes, 1e6, use_sliding_window=False, **ids)


def _qwen3(*sizes: Any, chat: bool) -> dict[str, Any]:
    ids = {"bos_token_id": 151643, "eos_token_id": [151645, 151643] if chat else 151643}
    reach = 40960 if chat else 32768
    return _model("qwen3", *sizes[:-1], reach, sizes[-1], 1e-6, 1e6, head_dim=128, **ids)


def _llama3(*sizes: Any, chat: bool, factor: float | None = None, **more: Any) -> dict[str, Any]:
    stretched = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if factor is not None:
        ends: Any = [128001, 128008, 128009] if chat else 128001
        more |= {"rope_scaling": stretched}
    else:
        ends = [128001, 128009] if chat else 128001
    return _model("llama", *sizes, 1e-5, 5e5, bos_token_id=128000, eos_token_id=ends, **more)


def _mistral(vocab: int, theta: float, window: int | None) -> dict[str, Any]:
    return _model("mistral", 4096, 14336, 32, 32, 8, vocab, 32768, False, 1e-5, theta, sliding_window=window)  # fmt: skip


def _smollm2(*sizes: Any, theta: float, chat: bool) -> dict[str, Any]:
    ids = {"bos_token_id": 1, "eos_token_id": 2} if chat else {"bos_token_id": 0, "eos_token_id": 0}
    return _model("llama", *sizes, 49152, 8192, True, 1e-5, theta, **ids)


QWEN2 = {
    # width, hidden, layers, heads, key heads, vocabulary, then positions (base, chat), tied, epsilon (base, chat)
    "0.5B": ((896, 4864, 24, 14, 2, 151936), (32768, 32768), True, (1e-6, 1e-6)),
    "1.5B": ((1536, 8960, 28, 12, 2, 151936), (131072, 32768), True, (1e-6, 1e-6)),
    "3B": ((2048, 11008, 36, 16, 2, 151936), (32768, 32768), True, (1e-6, 1e-6)),
    "7B": ((3584, 18944, 28, 28, 4, 152064), (131072, 32768), False, (1e-6, 1e-6)),
    "14B": ((5120, 13824, 48, 40, 8, 152064), (131072, 32768), False, (1e-5, 1e-6)),
    "32B": ((5120, 27648, 64, 40, 8, 152064), (131072, 32768), False, (1e-5, 1e-6)),
    "72B": ((8192, 29568, 80, 64, 8, 152064), (131072, 32768), False, (1e-5, 1e-6)),
}
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 151936, True),
    "4B": (2560, 9728, 36, 32, 8, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 151936, False),
    "14B": (5120, 17408, 40, 40, 8, 151936, False),
    "32B": (5120, 25600, 64, 64, 8, 151936, False),
}
LLAMA_8B, LLAMA_70B = (4096, 14336, 32, 32, 8, 128256), (8192, 28672, 80, 64, 8, 128256)
LLAMA = {
    "Meta-Llama-3-8B": ((*LLAMA_8B, 8192, False), None),
    "Meta-Llama-3-70B": ((*LLAMA_70B, 8192, False), None),
    "Llama-3.1-8B": ((*LLAMA_8B, 131072, False), 8.0),
    "Llama-3.1-70B": ((*LLAMA_70B, 131072, False), 8.0),
    "Llama-3.2-1B": ((2048, 8192, 16, 32, 8, 128256, 131072, True), 32.0),
    "Llama-3.2-3B": ((3072, 8192, 28, 24, 8, 128256, 131072, True), 32.0),
    "Llama-3.3-70B": ((*LLAMA_70B, 131072, False), 8.0),
}
SMOLLM2 = {
    "135M": ((576, 1536, 30, 9, 3), 1e5),
    "360M": ((960, 2560, 32, 15, 5), 1e5),
    "1.7B": ((2048, 8192, 24, 32, 32), 1.3e5),
}


def _table() -> dict[str, dict[str, Any]]:
    table = {f"deepseek-ai/deepseek-llm-7b-{kind}": _deepseek() for kind in ("base", "chat")}
    for size, (sizes, reach, tied, eps) in QWEN2.items():
        table[f"Qwen/Qwen2.5-{size}"] = _qwen2(*sizes, reach[0], tied, eps[0], chat=False)
        chat = _qwen2(*sizes, reach[1], tied, eps[1], chat=True)
        table[f"Qwen/Qwen2.5-{size}-Instruct"] = chat
    for size, widths in QWEN3.items():
        table[f"Qwen/Qwen3-{size}"] = _qwen3(*widths, chat=True)
        if size != "32B":
            table[f"Qwen/Qwen3-{size}-Base"] = _qwen3(*widths, chat=False)
    for name, (shape, factor) in LLAMA.items():
        if name != "Llama-3.3-70B":
            table[f"meta-llama/{name}"] = _llama3(*shape, chat=False, factor=factor)
        table[f"meta-llama/{name}-Instruct"] = _llama3(*shape, chat=True, factor=factor)
    for name in ("Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.1"):
        table[f"mistralai/{name}"] = _mistral(32000, 1e4, 4096)
    table["mistralai/Mistral-7B-Instruct-v0.2"] = _mistral(32000, 1e6, None)
    for name in ("Mistral-7B-v0.3", "Mistral-7B-Instruct-v0.3"):
        table[f"mistralai/{name}"] = _mistral(32768, 1e6, None)
    for size, (narrow, theta) in SMOLLM2.items():
        table[f"HuggingFaceTB/SmolLM2-{size}"] = _smollm2(*narrow, theta=theta, chat=False)
        name = f"HuggingFaceTB/SmolLM2-{size}-Instruct"
        table[name] = _smollm2(*narrow, theta=theta, chat=True)
    return table


KNOWN = _table()
"""Fields of `config.json` by hub id."""


def known_model(path: str) -> ModelConfig | None:
    """The architecture of a hub id, or `None` where it is not listed."""
    fields = KNOWN.get(path)
    return None if fields is None else from_hf(fields)
