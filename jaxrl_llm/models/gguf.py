"""GGUF files of the Llama family, read as if they were a Hugging Face folder: config, tensors and tokenizer.

Left out on purpose: writing GGUF, architectures other than `llama`, mixtures of experts, rope scalings that the metadata
does not spell out, and SentencePiece vocabularies. NumPy only; values are dequantised row by row, on request.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxrl_llm.errors import ConfigError, DataError

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Token types of the format that matter here; 1 is ordinary text, 5 unused, 6 a raw byte."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
}
"""How text is split before merging, by `tokenizer.ggml.pre`: a pattern, or `None` for GPT-2's own."""


@dataclass(frozen=True)
class GGUFSource:
    """The tensors of one open GGUF file under Hugging Face Llama names (a `TensorSource`)."""

    path: Path
    hf_config: dict[str, Any]
    """What the model's `config.json` would say."""
    tensors: dict[str, Any]
    """Memory-mapped, still quantised tensors by Hugging Face name."""
    row_orders: dict[str, np.ndarray]
    """For query and key projections: which stored row holds row `i` of the Hugging Face tensor."""

    def names(self) -> list[str]:
        """All tensor names, sorted; `lm_head.weight` is absent when the embedding is shared."""
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outer dimension first: `[out, in]` for projections."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """One tensor, or a block of it, dequantised to float32; only the asked rows are touched on disk.

        llama.cpp stores query and key rows so that the two halves of a rotary pair are neighbours; the order is undone here.
        """
        tensor = self._tensor(name)
        index = index or ()
        rows: Any = index[0] if index else slice(None)
        if name in self.row_orders:
            rows = self.row_orders[name][rows]
        try:
            values = _library().quants.dequantize(np.asarray(tensor.data[rows]), tensor.tensor_type)
        except NotImplementedError as error:
            raise DataError(
                f"{self.path}: tensor {name} is stored as {tensor.tensor_type.name}, which the gguf package cannot "
                "dequantise; need F32, F16, BF16, Q8_0, Q4_1 or another known type; convert the file"
            ) from error
        return np.ascontiguousarray(values[(slice(None), *index[1:])], dtype=np.float32)

    def _tensor(self, name: str) -> Any:
        if name not in self.tensors:
            raise DataError(
                f"{self.path}: has no tensor {name!r}; it holds {len(self.tensors)} tensors; check the config"
            )
        return self.tensors[name]


def open_gguf(path: str | os.PathLike[str]) -> GGUFSource:
    """Open a GGUF file of the Llama family for reading.

    Raises `ConfigError` for another architecture or an unsupported feature (named), `DataError` for a broken file or
    tensors with unknown names. Reads headers only.
    """
    path = Path(path)
    reader = _reader(path)
    meta = _metadata(reader)
    _require_llama(path, meta)
    tensors = _hf_tensors(path, reader.tensors)
    config = _hf_config(path, meta, tensors)
    return GGUFSource(path, config, tensors, _row_orders(config, tensors))


def tokenizer_files(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """The fast tokenizer described by a GGUF file's metadata, and what its `tokenizer_config.json` would say.

    The dictionary has `bos_token`, `eos_token`, `unk_token`, `pad_token` (texts or `None`), `add_bos_token`,
    `chat_template`, `stop_ids` (end of text, of turn and of message) and `digest` (SHA-256 of the vocabulary, its types,
    the merges and the split rule).

    Raises `ConfigError` for a vocabulary or split rule that is not known, `DataError` for one that is broken.
    """
    path = Path(path)
    meta = _metadata(_reader(path))
    kind, rule = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in SPLITS:
        raise ConfigError(
            f"{path}: tokenizer model {kind!r} with split rule {rule!r} is not supported; need 'gpt2' with one of "
            f"{', '.join(SPLITS)}; set model.tokenizer_path to the folder of the original tokenizer"
        )
    tokens, merges = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.merges")
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens or ())
    if not tokens or merges is None or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise DataError(
            f"{path}: tokenizer has {len(tokens or ())} tokens ({len(set(tokens or ()))} different), {len(types)} types and "
            f"{'no' if merges is None else len(merges)} merges; need as many types as different tokens; convert the file again"
        )
    kept = json.dumps([tokens, list(types), merges, rule]).encode()
    special = {
        name: _token(path, tokens, meta.get(f"tokenizer.ggml.{key}_token_id"))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config: dict[str, Any] = {f"{name}_token": text for name, text in special.items()}
    config["add_bos_token"] = bool(meta.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe"))
    config["chat_template"] = meta.get("tokenizer.chat_template")
    config["stop_ids"] = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
    config["digest"] = hashlib.sha256(kept).hexdigest()
    return _byte_level(tokens, types, merges, rule), config


def _byte_level(tokens: list[str], types: list[int], merges: list[str], rule: str) -> Any:
    """Byte-level BPE with the special tokens that the types declare; ids are positions in `tokens`."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 takes a whole word that is in the vocabulary even where the merges would not build it.
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule == "llama-bpe")
    )
    pattern = SPLITS[rule]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if rule == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        AddedToken(t, normalized=False)
        for t, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL)
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED
        ]
    )
    return tokenizer


def _token(path: Path, tokens: list[str], number: int | None) -> str | None:
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise DataError(
            f"{path}: special token id {number} is outside the {len(tokens)} tokens; convert the file again"
        )
    return tokens[number]


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "reading a .gguf file needs the package gguf, which is not installed; pip install 'jaxrl_llm[smollm2]'"
        ) from error
    return gguf


def _reader(path: Path) -> Any:
    library = _library()
    try:
        return library.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        size = path.stat().st_size if path.exists() else None
        raise DataError(
            f"{path} cannot be read as GGUF ({type(error).__name__}: {error}); its size is {size} bytes; need a complete "
            "GGUF file of version 2 or 3; copy or download it again"
        ) from error


def _metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _require_llama(path: Path, meta: dict[str, Any]) -> None:
    """Refuse by name what the Llama forward pass here would compute wrongly."""
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(
            f"{path}: general.architecture is {architecture!r}; only 'llama' is read from GGUF; use the safetensors folder"
        )
    problems = []
    if meta.get("llama.expert_count"):
        problems.append(
            f"{path}: llama.expert_count is {meta['llama.expert_count']}; need a dense model"
        )
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        problems.append(
            f"{path}: llama.rope.scaling.type is {scaling!r}; need none or linear; use the safetensors folder"
        )
    for key in ("head_count", "head_count_kv"):
        if isinstance(meta.get(f"llama.attention.{key}"), list):
            problems.append(
                f"{path}: llama.attention.{key} differs per layer; need one number for all layers"
            )
    if problems:
        raise ConfigError(problems)


def _hf_tensors(path: Path, tensors: list[Any]) -> dict[str, Any]:
    renamed, unknown = {}, []
    for tensor in tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        top = re.fullmatch(r"(\w+)\.(weight|bias)", tensor.name)
        if tensor.name == "rope_freqs.weight":
            raise ConfigError(
                f"{path}: has rope_freqs.weight (Llama 3.1 rope scaling), whose settings the file does not spell out; "
                "use the safetensors folder"
            )
        if layer and layer[2] in LAYER_NAMES:
            renamed[f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"] = tensor
        elif top and top[1] in TOP_NAMES:
            renamed[f"{TOP_NAMES[top[1]]}.{top[2]}"] = tensor
        else:
            unknown.append(tensor.name)
    if unknown:
        raise DataError(
            f"{path}: {len(unknown)} tensors have no place in a Llama model ({', '.join(unknown[:5])}); need the "
            "names that llama.cpp writes; convert the file again"
        )
    return renamed


def _hf_config(path: Path, meta: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    def need(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise DataError(
                f"{path}: metadata has no llama.{key}; need it to build the model; convert the file again"
            )
        return meta[f"llama.{key}"]

    heads, width = int(need("attention.head_count")), int(need("embedding_length"))
    head_size = int(meta.get("llama.attention.key_length", width // heads))
    rotated = int(meta.get("llama.rope.dimension_count", head_size))
    if rotated != head_size:
        raise ConfigError(
            f"{path}: llama.rope.dimension_count is {rotated}, heads have {head_size}; need them equal"
        )
    if "model.embed_tokens.weight" not in tensors:
        raise DataError(
            f"{path}: has no token_embd.weight; need the input embedding; convert the file again"
        )
    rows = int(tensors["model.embed_tokens.weight"].shape[1])
    if int(meta.get("llama.vocab_size", rows)) != rows:
        raise DataError(
            f"{path}: llama.vocab_size is {meta['llama.vocab_size']}, the embedding has {rows} rows; convert again"
        )
    linear = meta.get("llama.rope.scaling.type", "none") == "linear"
    scaling = (
        {"rope_type": "linear", "factor": _decimal(need("rope.scaling.factor"))} if linear else None
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_size,
        "rms_norm_eps": _decimal(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(meta.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": scaling,
        "max_position_embeddings": int(need("context_length")),
        "vocab_size": rows,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": _has_bias(tensors, ATTENTION),
        "mlp_bias": _has_bias(tensors, FEED_FORWARD),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _has_bias(tensors: dict[str, Any], parts: tuple[str, ...]) -> bool:
    return any(f"model.layers.0.{LAYER_NAMES[part]}.bias" in tensors for part in parts)


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _row_orders(config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Row orders of the query and key projections: stored `[heads, H/2, 2]`, wanted `[heads, 2, H/2]`."""
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    orders = {}
    for name, tensor in tensors.items():
        heads = counts.get(name.split(".")[-2])
        if heads:
            rows = int(tensor.shape[-1])
            if rows != heads * config["head_dim"]:
                raise DataError(
                    f"{name} has {rows} rows; need {heads} heads of {config['head_dim']}; convert the file again"
                )
            stored = np.arange(rows).reshape(heads, config["head_dim"] // 2, 2)
            orders[name] = stored.swapaxes(1, 2).reshape(rows)
    return orders
