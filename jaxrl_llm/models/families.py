"""Which architectures are known: one frozen `ModelConfig`, read from and written to Hugging Face `config.json` fields.

All families are decoder-only transformers with RMS norm before each block, rotary positions, grouped-query attention and a
gated SiLU MLP. They differ in the fields of `ModelConfig` alone, so no code branches on the family name except here.

Left out on purpose: mixture of experts, layers that differ from each other (a window on some layers only), rotary
schemes that depend on the length of the batch (dynamic, yarn, longrope), partial rotary dimensions, quantised weights,
logit soft caps. A `config.json` that asks for one of them is refused, all such fields together, never approximated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.errors import ConfigError, DataError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of pre-training: `linear` or `llama3`.

    `linear` divides every frequency by `factor` (Chen et al. 2023, position interpolation). `llama3` divides only the
    frequencies whose wave length exceeds `original_max_position / low_freq_factor`, keeps those below
    `original_max_position / high_freq_factor`, and blends in between; `linear` does not read the last three fields.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the shape and the arithmetic of a model; hashable, so it can be static under `jit`.

    `qkv_bias`, `output_bias` and `mlp_bias` say which projections carry a bias, `qk_norm` whether queries and keys get an
    RMS norm per head before the rotation. With `sliding_window = w` a query at position p sees keys in (p - w, p], in
    every layer. `eos_ids` are all ids that end a response.
    """

    family: str
    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_position: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads: got {self.num_kv_heads} for {self.num_heads} query heads, need a divisor of the "
                "number of query heads; correct the model's config.json"
            )
        if self.head_size % 2:
            raise ConfigError(
                f"head_dim: got {self.head_size}, need an even number for rotary pairs; correct the model's config.json"
            )


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Size of each axis letter a parameter can have: `V D L N K H F`."""
    return {
        "V": config.vocab_size,
        "D": config.width,
        "L": config.num_layers,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_size,
        "F": config.hidden,
    }


def param_dims(config: ModelConfig) -> dict[str, Any]:
    """One letter per axis for every parameter, in the same nested dict as the parameters themselves.

    This table is the one place where parameters are declared: shapes, initial values, sharding and the Hugging Face
    names all follow from it. Layers are stacked, their first axis is `L`.
    """
    layer: dict[str, dict[str, str]] = {
        "attention_norm": {"scale": "D"},
        "q": {"kernel": "DNH"} | ({"bias": "NH"} if config.qkv_bias else {}),
        "k": {"kernel": "DKH"} | ({"bias": "KH"} if config.qkv_bias else {}),
        "v": {"kernel": "DKH"} | ({"bias": "KH"} if config.qkv_bias else {}),
        "o": {"kernel": "NHD"} | ({"bias": "D"} if config.output_bias else {}),
    }
    if config.qk_norm:
        layer |= {"q_norm": {"scale": "H"}, "k_norm": {"scale": "H"}}
    layer["mlp_norm"] = {"scale": "D"}
    for name, dims in (("gate", "DF"), ("up", "DF"), ("down", "FD")):
        layer[name] = {"kernel": dims} | ({"bias": dims[-1]} if config.mlp_bias else {})
    stacked = {
        group: {name: f"L{dims}" for name, dims in of.items()} for group, of in layer.items()
    }
    head = {} if config.tie_embeddings else {"head": {"kernel": "DV"}}
    return {"embed": {"kernel": "VD"}, "layers": stacked, "norm": {"scale": "D"}, **head}


def leaves(
    tree: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield `(path, leaf)` of a nested dict in its own order."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def shape_of(config: ModelConfig, dims: str) -> tuple[int, ...]:
    """The shape that a string of axis letters stands for: `shape_of(config, "LDF")`."""
    sizes = axis_sizes(config)
    return tuple(sizes[letter] for letter in dims)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, a tied head counted once."""
    return sum(math.prod(shape_of(config, dims)) for _, dims in leaves(param_dims(config)))


def check_tokens(config: ModelConfig, tokens: np.ndarray, what: str = "tokens") -> None:
    """Refuse token ids outside the vocabulary, on the host: indexing on a device would silently use another row.

    Raises `DataError` naming the first bad row and id. An empty array is fine.
    """
    bad = np.argwhere((np.asarray(tokens) < 0) | (np.asarray(tokens) >= config.vocab_size))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        raise DataError(
            f"{what}{list(place)}: got token id {int(np.asarray(tokens)[place])} ({len(bad)} such ids in all), need ids in "
            f"[0, {config.vocab_size}); use the tokenizer that belongs to the model"
        )


ABSENT: dict[str, dict[str, Any]] = {
    "llama": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "mistral": {
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""What transformers assumes when a family's `config.json` lacks a field (null is not absent)."""

COMMON = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, 1.0),
    "attention_dropout": (0, 0.0),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "kv_lora_rank": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
}
"""Fields that change the arithmetic, and the values (besides null) under which they do not."""

LARGEST_SIZE = 2**31

SIZES = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "width",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "hidden",
    "max_position_embeddings": "max_position",
}


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Read the fields of a Hugging Face `config.json`, of either generation of rotary fields.

    Raises one `ConfigError` that lists every field that is missing, malformed or asks for something not implemented. Fields
    that do not touch the arithmetic are ignored.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"config.json: got a {type(config).__name__}, need an object of fields")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"model_type: got {family!r}, need one of {', '.join(FAMILIES)}; choose a model of these families"
        )
    given = COMMON | ABSENT[family] | config
    problems = [
        f"{field}: got {given[field]!r}, need "
        f"{' or '.join(map(repr, allowed)) or 'null'}: anything else is not implemented; choose another model"
        for field, allowed in NEUTRAL.items()
        if given.get(field) is not None and given[field] not in allowed
    ]
    sizes = _sizes(given, problems)
    eps = given["rms_norm_eps"]
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        problems.append(f"rms_norm_eps: got {eps!r}, need a number in [0, 1); correct config.json")
    theta, scaling = _rope(given, problems)
    window = _window(family, given, problems)
    attention_bias, mlp_bias = bool(given.get("attention_bias")), bool(given.get("mlp_bias"))
    if attention_bias and family == "mistral":
        problems.append("attention_bias: got true, need false: the mistral family has no biases")
    if mlp_bias and family != "llama":
        problems.append(f"mlp_bias: got true, need false: the {family} family has no MLP biases")
    eos = given.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for field, ids in (
        ("eos_token_id", eos_ids),
        ("bos_token_id", [0 if given["bos_token_id"] is None else given["bos_token_id"]]),
    ):
        if not all(type(number) is int and number >= 0 for number in ids):
            problems.append(f"{field}: got {given[field]!r}, need token ids; correct config.json")
    model: ModelConfig | None = None
    if len(sizes) == len(SIZES):
        try:
            model = ModelConfig(
                family=family,
                **sizes,
                rope_theta=theta,
                rope_scaling=scaling,
                rms_norm_eps=eps,
                tie_embeddings=bool(given["tie_word_embeddings"]),
                qkv_bias=family == "qwen2" or attention_bias,
                output_bias=family != "qwen2" and attention_bias,
                mlp_bias=mlp_bias,
                qk_norm=family == "qwen3",
                sliding_window=window,
                bos_id=given["bos_token_id"],
                eos_ids=tuple(eos_ids),
            )
        except ConfigError as error:
            problems.extend(error.problems)
    if problems or model is None:
        raise ConfigError(problems)
    return model


def _sizes(given: dict[str, Any], problems: list[str]) -> dict[str, int]:
    """The integer fields under our names, with the two that may be null filled in."""
    filled = dict(given)
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    if filled.get("num_key_value_heads", 0) is None:
        filled["num_key_value_heads"] = heads
    if filled["head_dim"] is None and isinstance(heads, int) and isinstance(width, int) and heads:
        if width % heads:
            problems.append(
                f"head_dim: got null with hidden_size {width} and {heads} heads, need a whole quotient; set head_dim"
            )
        filled["head_dim"] = width // heads
    sizes = {}
    for field, name in SIZES.items():
        value = filled.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST_SIZE:
            sizes[name] = value
        else:
            got = repr(value) if field in filled else "nothing"
            problems.append(
                f"{field}: got {got}, need a positive integer below 2**31; correct config.json"
            )
    return sizes


def _rope(given: dict[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """Base and stretching from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    fields = given.get(name) or {}
    if not isinstance(fields, dict):
        problems.append(f"{name}: got {fields!r}, need an object of fields; correct config.json")
        return 10000.0, None
    if any(isinstance(value, dict) for value in fields.values()):
        problems.append(f"{name}: got one entry per layer type, need the same for all layers")
        return 0.0, None
    theta = fields.get("rope_theta", given.get("rope_theta", 10000.0))
    if not _is_number(theta) or not theta > 1:
        problems.append(f"rope_theta: got {theta!r}, need a number above 1; correct config.json")
        theta = 10000.0
    if fields.get("partial_rotary_factor", 1) not in (1, None):
        problems.append(
            f"partial_rotary_factor: got {fields['partial_rotary_factor']!r}, need 1: rotation of a part is not implemented"
        )
    kind = fields.get("rope_type", fields.get("type")) or "default"
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3"):
        problems.append(
            f"rope_type: got {kind!r} in {name}, need default, linear or llama3; choose another model"
        )
        return float(theta), None
    needed = ["factor"] + (["low_freq_factor", "high_freq_factor"] if kind == "llama3" else [])
    wrong = [key for key in needed if not _is_number(fields.get(key))]
    if wrong:
        problems.append(
            f"{name}: got no number for {', '.join(wrong)}, need it for rope_type {kind}; correct config.json"
        )
        return float(theta), None
    if not fields["factor"] > 0:
        problems.append(f"{name}: got factor {fields['factor']}, need a positive number")
    if kind == "linear":
        return float(theta), RopeScaling("linear", float(fields["factor"]))
    original = given.get("original_max_position_embeddings") or fields.get(
        "original_max_position_embeddings", given.get("max_position_embeddings")
    )
    original = original if isinstance(original, int) else 0
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    if not high > low:
        problems.append(f"{name}: got high_freq_factor {high} and low {low}, need high above low")
    if original < 1:
        problems.append(
            f"{name}: got no original_max_position_embeddings, need the length of pre-training"
        )
    return float(theta), RopeScaling("llama3", float(fields["factor"]), low, high, original)


def _is_number(value: Any) -> bool:
    """Whether a field is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _window(family: str, given: dict[str, Any], problems: list[str]) -> int | None:
    """The sliding window of all layers, or None; a window on some of the layers is refused."""
    layers = given.get("num_hidden_layers") or 0
    listed = given.get("layer_types") or ()
    if not isinstance(listed, list | tuple) or not all(isinstance(kind, str) for kind in listed):
        problems.append(f"layer_types: got {listed!r}, need a list of names; correct config.json")
        listed = ()
    kinds = set(listed)
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        problems.append(f"layer_types: got {unknown}, need full_attention or sliding_attention")
    window = given.get("sliding_window")
    if family == "llama":
        if "sliding_attention" in kinds:
            problems.append("layer_types: got sliding_attention, need full_attention in llama")
        return None
    if family != "mistral":
        if not given.get("use_sliding_window", False):
            window = None
        elif not kinds and isinstance(layers, int) and window is not None:
            first = given.get("max_window_layers", 28)
            window = None if first >= layers else window
            kinds = {"full_attention", "sliding_attention"} if 0 < first < layers else set()
    if len(kinds) > 1:
        problems.append(
            "layer_types (or max_window_layers): got a sliding window on some layers only, need the same attention in "
            "all layers; set use_sliding_window to false if sequences stay shorter than sliding_window"
        )
    if kinds == {"full_attention"}:
        return None
    if window is not None and (not isinstance(window, int) or window < 1):
        problems.append(f"sliding_window: got {window!r}, need a positive integer or null")
    return window


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, readable by transformers and by `from_hf` (which gives `config` back).

    Raises `ConfigError` naming the fields that the family's Hugging Face class cannot express.
    """
    eos = config.eos_ids
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{field: getattr(config, name) for field, name in SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
    if config.rope_scaling is not None:
        rope = config.rope_scaling
        fields["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            fields["rope_scaling"] |= {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_position,
            }
    if config.family in ("llama", "qwen3"):
        fields["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        fields["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        on = config.sliding_window is not None
        fields |= {"use_sliding_window": on, "sliding_window": config.sliding_window}
        fields["max_window_layers"] = 0 if on else config.num_layers
    back = from_hf(fields)
    if back != config:
        lost = [
            f"{name}: got {getattr(config, name)!r}, need {getattr(back, name)!r}: the {config.family} family of "
            "transformers has no field for it"
            for name in config.__dataclass_fields__
            if getattr(config, name) != getattr(back, name)
        ]
        raise ConfigError(lost)
    return fields
