"""Prefill and decode as pure functions: prompts once, then chunks of decode steps in one `while_loop`.

`prefill` reads every prompt once; `start` gives each of its samples a copy of the cache and the first token; `decode_chunk`
runs steps until the chunk ends or every row is done. All rows write the same cache column, because prompts are padded on
the left.

Left out on purpose: refilled slots and a prompt cache shared inside a group.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models import heads, transformer
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.records import END_EOS, END_LENGTH
from jaxrl_llm.rollout.sampling import Sampling, sample, uniforms

Array = jax.Array
Constrain = Callable[[Array, str], Array]


@struct.dataclass
class DecodeState:
    """A batch of responses in progress.

    `tokens`, `logprobs`, `filtered_logprobs` are `[B Tr]`, filled up to column `column`; `last [B]` is the newest token,
    `positions [B]` where it stands in its sequence; `lengths [B]` counts response tokens; `done [B]`, `end_reason [B]`;
    `finite [B]` is False once a row's logits were not numbers.
    """

    cache: caches.KVCache
    keys: Array
    tokens: Array
    logprobs: Array
    filtered_logprobs: Array
    last: Array
    positions: Array
    lengths: Array
    done: Array
    end_reason: Array
    finite: Array
    column: Array


def prefill(
    config: ModelConfig,
    params: Any,
    tokens: Array,
    lengths: Array,
    *,
    slots: int,
    dtype: Any,
    constrain: Constrain = transformer.unconstrained,
) -> tuple[caches.KVCache, Array]:
    """Read left-padded prompts `tokens [P Tp]` of `lengths [P]`; returns their cache and the last logits `[P V]`."""
    prompts, width = tokens.shape
    columns = jnp.arange(width)
    first = width - lengths[:, None]
    segments = (columns >= first).astype(jnp.int32)
    positions = jnp.maximum(columns - first, 0)
    empty = caches.make_cache(config, prompts, slots, dtype)
    hidden, cache = transformer.apply(
        config,
        params,
        tokens,
        positions,
        segments,
        empty,
        compute_dtype=dtype,
        constrain=constrain,
    )
    assert cache is not None
    return cache, heads.logits(config, params, hidden[:, -1], compute_dtype=dtype)


def is_stop(tokens: Array, stop_ids: Array) -> Array:
    """Which tokens `[B]` are among the stop ids `[E]` (padded with -1)."""
    return jnp.any(tokens[:, None] == stop_ids[None, :], axis=-1)


def _record(state: DecodeState, logits: Array, stop_ids: Array, sampling: Sampling) -> DecodeState:
    """Sample the token of column `state.column` for every row that is not done."""
    column = state.column
    drawn = sample(logits, uniforms(state.keys, column), sampling)
    active = ~state.done
    write = lambda buffer, value: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
        buffer, jnp.where(active, value, 0).astype(buffer.dtype)[:, None], column, axis=1
    )
    ended = active & is_stop(drawn.tokens, stop_ids)
    full = active & ~ended & (column + 1 >= state.tokens.shape[1])
    return replace(
        state,
        tokens=write(state.tokens, drawn.tokens),
        logprobs=write(state.logprobs, drawn.logprobs),
        filtered_logprobs=write(state.filtered_logprobs, drawn.filtered_logprobs),
        last=jnp.where(active, drawn.tokens, 0),
        lengths=state.lengths + active,
        done=state.done | ended | full,
        end_reason=jnp.where(ended, END_EOS, state.end_reason),
        finite=state.finite & (drawn.finite | ~active),
        column=column + 1,
    )


def start(
    cache: caches.KVCache,
    logits: Array,
    prompt_lengths: Array,
    keys: Array,
    idle: Array,
    stop_ids: Array,
    sampling: Sampling,
    *,
    group: int,
    prompt_width: int,
    response_width: int,
) -> DecodeState:
    """Fan prefilled prompts out to `group` samples each and sample their first tokens.

    `cache`, `logits [P V]`, `prompt_lengths [P]` are of prompts; `keys [B]`, `idle [B]` (rows that only fill the batch) of
    samples, members of a group adjacent. Raises `ConfigError` when the cache has fewer than
    `prompt_width + response_width - 1` slots: a device would overwrite the last one without a word.
    """
    caches.check_room(cache.k.shape[2], prompt_width, response_width - 1)
    batch = logits.shape[0] * group
    state = DecodeState(
        cache=caches.repeat(cache, group),
        keys=keys,
        tokens=jnp.zeros((batch, response_width), jnp.int32),
        logprobs=jnp.zeros((batch, response_width), jnp.float32),
        filtered_logprobs=jnp.zeros((batch, response_width), jnp.float32),
        last=jnp.zeros((batch,), jnp.int32),
        positions=jnp.repeat(prompt_lengths, group).astype(jnp.int32),
        lengths=jnp.zeros((batch,), jnp.int32),
        done=idle,
        end_reason=jnp.full((batch,), END_LENGTH, jnp.int32),
        finite=jnp.ones((batch,), bool),
        column=jnp.zeros((), jnp.int32),
    )
    return _record(state, jnp.repeat(logits, group, axis=0), stop_ids, sampling)


def decode_chunk(
    config: ModelConfig,
    params: Any,
    state: DecodeState,
    stopped: Array,
    stop_ids: Array,
    sampling: Sampling,
    *,
    steps: int,
    dtype: Any,
    constrain: Constrain = transformer.unconstrained,
) -> DecodeState:
    """Run up to `steps` decode steps; ends early when every row is done.

    `stopped [B]` marks rows that the host ended (stop texts). The newest token of a row is fed first, so the cache holds
    everything but the last sampled token: `Tp + Tr - 1` slots suffice.
    """
    state = replace(state, done=state.done | stopped)
    limit = jnp.minimum(state.column + steps, state.tokens.shape[1])

    def proceed(state: DecodeState) -> Array:
        return (state.column < limit) & ~jnp.all(state.done)

    def step(state: DecodeState) -> DecodeState:
        segments = jnp.where(state.done, 0, 1).astype(jnp.int32)
        hidden, cache = transformer.apply(
            config,
            params,
            state.last[:, None],
            state.positions[:, None],
            segments[:, None],
            state.cache,
            compute_dtype=dtype,
            constrain=constrain,
        )
        assert cache is not None
        assert cache is not None
        logits = heads.logits(config, params, hidden[:, 0], compute_dtype=dtype)
        state = replace(state, cache=cache, positions=state.positions + 1)
        return _record(state, logits, stop_ids, sampling)

    return jax.lax.while_loop(proceed, step, state)
