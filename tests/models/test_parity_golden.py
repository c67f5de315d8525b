"""Logits against transformers' own, committed as small files; and mutations that must break the agreement."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import families, heads, transformer, weights
from jaxrl_llm.models.families import ModelConfig
from tests.golden.models import tiny

TOLERANCE = 1e-4


Params = dict[str, Any]
Model = tuple[ModelConfig, Params]


def load(folder: Path, case: str, shards: int = 2) -> Model:
    shapes = weights.expected_shapes(families.from_hf(tiny.CASES[case]))
    tiny.write_folder(folder, case, shapes, shards)
    config = families.from_hf(weights.load_config(folder))
    return config, weights.load_params(weights.open_safetensors(folder), config)


@partial(jax.jit, static_argnums=0)
def all_logits(config, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = transformer.apply(config, params, tokens, positions, jnp.ones_like(tokens))
    return heads.logits(config, params, hidden)


def difference(config: ModelConfig, params: Params, case: str) -> float:
    logits = np.asarray(all_logits(config, params, tiny.tokens(case)))
    return float(np.abs(logits - tiny.golden(case)).max())


@pytest.mark.parametrize("case", tiny.CASES)
def test_logits_agree(case, tmp_path):
    config, params = load(tmp_path, case)
    assert config.num_layers >= 3 and config.num_kv_heads < config.num_heads
    assert config.vocab_size % 8
    assert difference(config, params, case) < TOLERANCE


def test_the_cases_reach_beyond_what_they_test():
    assert tiny.tokens("llama3").shape[1] > tiny.LLAMA3["original_max_position_embeddings"]
    for case in ("qwen2_window", "mistral_window"):
        assert tiny.CASES[case]["sliding_window"] < tiny.tokens(case).shape[1]


def edit(params: Params, *path: str, by: Callable) -> Params:
    """A copy of `params` with one leaf replaced by `by(leaf)`."""
    name, rest = path[0], path[1:]
    return params | {name: edit(params[name], *rest, by=by) if rest else by(params[name])}


def swap_query_heads(config: ModelConfig, params: Params) -> Model:
    """Query head n reads key head `n % K` instead of `n // (N/K)`."""
    order = np.arange(config.num_heads).reshape(-1, config.num_kv_heads).T.reshape(-1)
    assert list(order) != sorted(order)
    params = edit(params, "layers", "q", "kernel", by=lambda q: q[:, :, order])
    return config, edit(params, "layers", "o", "kernel", by=lambda o: o[:, order])


def drop(*path: str) -> Callable[..., Model]:
    return lambda config, params: (config, edit(params, *path, by=jnp.zeros_like))


def set_norm(*path: str) -> Callable[..., Model]:
    return lambda config, params: (config, edit(params, *path, by=jnp.ones_like))


MUTATIONS: dict[str, tuple[str, Callable[..., Model]]] = {
    "rope base": ("llama", lambda c, p: (replace(c, rope_theta=10000.0), p)),
    "rope scaling": ("llama3", lambda c, p: (replace(c, rope_scaling=None), p)),
    "linear scaling": ("llama_biased_linear_tied", lambda c, p: (replace(c, rope_scaling=None), p)),
    "eps": ("llama", lambda c, p: (replace(c, rms_norm_eps=1e-6), p)),
    "order of grouped heads": ("qwen3", swap_query_heads),
    "query bias": ("qwen2_tied", drop("layers", "q", "bias")),
    "value bias": ("qwen2_tied", drop("layers", "v", "bias")),
    "output bias": ("llama_biased_linear_tied", drop("layers", "o", "bias")),
    "mlp bias": ("llama_biased_linear_tied", drop("layers", "gate", "bias")),
    "final norm": ("mistral_window", set_norm("norm", "scale")),
    "layer norm": ("llama", set_norm("layers", "attention_norm", "scale")),
    "mlp norm": ("llama", set_norm("layers", "mlp_norm", "scale")),
    "query norm": ("qwen3", set_norm("layers", "q_norm", "scale")),
    "window": ("mistral_window", lambda c, p: (replace(c, sliding_window=6), p)),
    "no window": ("qwen2_window", lambda c, p: (replace(c, sliding_window=None), p)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name, tmp_path):
    case, mutate = MUTATIONS[name]
    config, params = mutate(*load(tmp_path, case))
    assert difference(config, params, case) > 5 * TOLERANCE
