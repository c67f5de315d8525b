"""Prefill and decode as pure functions: prompts into a bank, from there into units, and chunks of decode steps in a `while_loop`.

A unit holds the keys of one prompt for the `c` lanes that sample from it side by side; each lane has keys of its own. A lane
first feeds the last token of its prompt, then every token it samples: the token of response position `i` comes from own column `i`,
whenever and wherever the lane began. So a sample's arithmetic does not depend on its company.

Everything here is one data shard's business: its bank, its units, its lanes, its own number of steps. On several shards the engine
runs these functions side by side; none of them knows of the others, so none waits.

Left out on purpose: what runs where and when (`queue`), stop texts, and anything about hosts and meshes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models import heads, ops, transformer
from jaxrl_llm.models.cache import KV
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.rollout.sampling import Sampling, row_keys, sample, uniforms

Array = jax.Array
Constrain = Callable[[Array, str], Array]

TILE = (8, 128)
"""Rows and width of a tile of a TPU's memory."""


@struct.dataclass
class DecodeState:
    """`U` units of `c` lanes, `B = U * c`: what stays on the device between two chunks.

    `prompt` is `[L U K Tp H]` of which unit `u` sees the first `seen [U]` columns; `own` is `[L B K S H]`. Per lane: the random
    `keys [B]`, `last [B]` the token to be fed next and `lengths [B]` the response tokens sampled so far, which is also the
    own column that `last` goes to.
    """

    prompt: KV
    own: KV
    seen: Array
    keys: Array
    last: Array
    lengths: Array


@struct.dataclass
class Starts:
    """What begins in free lanes; host arrays.

    Units: the first `count [1]` numbers of `moves [U]` are units that receive row `rows [U]` of the bank and see `seen [U]` of its
    columns (both arrays by unit). Units and rows are counted within the shard. Lanes: those of `fresh [B]` begin sample number `samples [B]` of prompt `prompt_ids [B]` after
    the token `last [B]`. `stream [3]` is the seed, the step and the purpose of the random numbers.
    """

    moves: Any
    count: Any
    rows: Any
    seen: Any
    fresh: Any
    prompt_ids: Any
    samples: Any
    last: Any
    stream: Any


@struct.dataclass
class Window:
    """What one chunk sampled, for the host: lane `b` has `counts [B]` new tokens in the first columns of the `[B steps]` arrays.

    `done [B]`: ended in this chunk, `ended [B]`: by a stop id (else by the limit); `finite [B]` is False where logits were not
    numbers; `steps [1]` is how many decode steps ran.
    """

    tokens: Array
    logprobs: Array
    filtered_logprobs: Array
    counts: Array
    done: Array
    ended: Array
    finite: Array
    steps: Array


# Prompts -------------------------------------------------------------------------------------------------------------


def _prefill_mixer(
    q: Array,
    k: Array,
    v: Array,
    view: tuple[Array, Array],
    store: KV,
    layer: Array,
    *,
    keep: bool,
) -> tuple[Array, KV]:
    """Attention inside each row that also keeps keys and values, zeros for padding; `view` is `(mask [P Tp Tp], real [P Tp])`.

    With `keep` a row without tokens leaves what the store has of it.
    """
    mask, real = view
    k, v = (jnp.where(real[..., None, None], x, 0) for x in (k, v))

    def put(stack: Array, new: Array) -> Array:
        rows = jnp.swapaxes(new, 1, 2).astype(stack.dtype)
        if keep:
            old = jax.lax.dynamic_index_in_dim(stack, layer, axis=0, keepdims=False)
            rows = jnp.where(real[:, 0, None, None, None], rows, old)
        return jax.lax.dynamic_update_index_in_dim(stack, rows, layer, axis=0)

    return ops.attend(q, k, v, mask), KV(put(store.k, k), put(store.v, v))


def prefill(
    config: ModelConfig,
    params: Any,
    tokens: Array,
    lengths: Array,
    kept: KV | None = None,
    *,
    dtype: Any,
    constrain: Constrain = transformer.unconstrained,
) -> KV:
    """Keys and values `[L P K Tp H]` of the first `lengths [P]` tokens of each row of `tokens [P Tp]`.

    A row of length 0 is all zeros, or what it was in the bank `kept`.
    """
    prompts, width = tokens.shape
    columns = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    real = columns < lengths[:, None]
    segments = real.astype(jnp.int32)
    mask = ops.attention_mask(columns, segments, columns, segments, config.sliding_window)
    _, kv = transformer.run(
        config, params, tokens, columns, real,
        mixer=partial(_prefill_mixer, keep=kept is not None), view=(mask, real),
        store=caches.make_kv(config, prompts, width, dtype) if kept is None else kept,
        compute_dtype=dtype, constrain=constrain,
    )  # fmt: skip
    return kv


def insert(state: DecodeState, bank: KV, starts: Starts) -> DecodeState:
    """Copy prompts from the bank into units and begin samples in their lanes."""
    count = starts.count[0]

    def move(index: Array, prompt: KV) -> KV:
        unit = starts.moves[index]
        return caches.copy_row(prompt, unit, bank, starts.rows[unit])

    units = jnp.arange(starts.moves.shape[0])
    moved = jnp.any((starts.moves[None] == units[:, None]) & (units[None] < count), axis=1)
    keys = row_keys(
        starts.stream[0], starts.stream[1], starts.stream[2], starts.prompt_ids, starts.samples
    )
    return replace(
        state,
        prompt=jax.lax.fori_loop(0, count, move, state.prompt),
        seen=jnp.where(moved, starts.seen, state.seen),
        keys=jnp.where(starts.fresh, keys, state.keys),
        last=jnp.where(starts.fresh, starts.last, state.last),
        lengths=jnp.where(starts.fresh, 0, state.lengths),
    )


def begin(
    config: ModelConfig, bank: KV, starts: Starts, *, columns: int, dtype: Any
) -> DecodeState:
    """`insert` into lanes that hold nothing yet and have room for `columns` own tokens."""
    units, lanes = starts.moves.shape[0], starts.last.shape[0]
    nothing = jnp.zeros((lanes,), jnp.int32)
    empty = DecodeState(
        prompt=caches.make_kv(config, units, bank.columns, dtype),
        own=caches.make_kv(config, lanes, columns, dtype),
        seen=jnp.zeros((units,), jnp.int32),
        keys=row_keys(starts.stream[0], starts.stream[1], starts.stream[2], nothing, nothing),
        last=nothing,
        lengths=nothing,
    )
    return insert(empty, bank, starts)


def narrow(state: DecodeState, lanes: Array) -> DecodeState:
    """Only these lanes `[W]`, each with a unit of its own."""
    share = state.last.shape[0] // state.seen.shape[0]
    units = lanes // share
    return DecodeState(
        prompt=caches.take(state.prompt, units),
        own=caches.take(state.own, lanes),
        seen=state.seen[units],
        keys=state.keys[lanes],
        last=state.last[lanes],
        lengths=state.lengths[lanes],
    )


# Decoding ------------------------------------------------------------------------------------------------------------


@struct.dataclass
class _View:
    """What one decode step attends to: the prompts, the masks `[U c Tp]` and `[B S]`, and each lane's own column."""

    prompt: KV
    prompt_mask: Array
    own_mask: Array
    column: Array


def _view(config: ModelConfig, state: DecodeState) -> tuple[_View, Array]:
    """The view of a step and the positions `[B]` of the tokens it feeds."""
    units, lanes = state.seen.shape[0], state.last.shape[0]
    lengths = state.lengths.reshape(units, -1)
    position = state.seen[:, None] + lengths
    prompt_columns, own_columns = jnp.arange(state.prompt.columns), jnp.arange(state.own.columns)
    prompt_mask = jnp.broadcast_to(
        prompt_columns < state.seen[:, None, None], (*lengths.shape, state.prompt.columns)
    )
    own_mask = own_columns <= state.lengths[:, None]
    if config.sliding_window is not None:
        prompt_mask &= prompt_columns > position[..., None] - config.sliding_window
        own_mask &= own_columns > state.lengths[:, None] - config.sliding_window
    return _View(state.prompt, prompt_mask, own_mask, state.lengths), position.reshape(lanes)


def _write(stack: Array, new: Array, layer: Array, column: Array) -> Array:
    """`stack [L B K S H]` with `new [B K H]` at each lane's column; a column past the end is dropped.

    TPUs write whole tiles where columns and heads are made of such: what is written column by column XLA lays out anew, columns
    before heads, when a chunk begins, and back when it ends.
    """
    given = (stack, new.astype(stack.dtype), layer, column)
    if stack.shape[3] % TILE[0] or stack.shape[4] % TILE[1]:
        return _write_column(*given)
    return jax.lax.platform_dependent(*given, tpu=_write_tile, default=_write_column)


def _write_column(stack: Array, new: Array, layer: Array, column: Array) -> Array:
    lanes = jnp.arange(new.shape[0])
    return stack.at[layer, lanes, :, column].set(new, mode="drop")


def _write_tile(stack: Array, new: Array, layer: Array, column: Array) -> Array:
    """What `_write_column` writes, with the columns around it as they are."""
    rows, lanes = TILE[0], jnp.arange(new.shape[0])
    tiles = stack.reshape(*stack.shape[:3], -1, rows, stack.shape[4])
    tile = jnp.minimum(column // rows, tiles.shape[3] - 1)
    here = tile[:, None] * rows + jnp.arange(rows) == column[:, None]
    old = tiles[layer, lanes, :, tile]
    changed = jnp.where(here[:, None, :, None], new[:, :, None], old)
    return tiles.at[layer, lanes, :, tile].set(changed).reshape(stack.shape)


def _decode_mixer(
    q: Array, k: Array, v: Array, view: _View, store: KV, layer: Array
) -> tuple[Array, KV]:
    """One token per lane: a softmax over the columns of its unit's prompt and of its own.

    The scores of a unit's lanes are one product with one copy of the prompt's keys.
    """
    lanes, _, query_heads, size = q.shape
    units, share = view.prompt_mask.shape[:2]
    kv_heads, exact = k.shape[2], ops.precision(q.dtype)
    store = KV(
        _write(store.k, k[:, 0], layer, view.column), _write(store.v, v[:, 0], layer, view.column)
    )
    layer_of = partial(jax.lax.dynamic_index_in_dim, index=layer, axis=0, keepdims=False)
    prompt_k, prompt_v, own_k, own_v = (
        layer_of(x).astype(q.dtype) for x in (view.prompt.k, view.prompt.v, store.k, store.v)
    )
    product = partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    group, scale, low = query_heads // kv_heads, 1.0 / math.sqrt(size), jnp.finfo(jnp.float32).min
    grouped = q.reshape(lanes, kv_heads, group, size)

    def by_unit(x: Array) -> Array:
        apart = x.reshape(units, share, kv_heads, group, x.shape[-1])
        return jnp.swapaxes(apart, 1, 2).reshape(units, kv_heads, share * group, x.shape[-1])

    def by_lane(x: Array) -> Array:
        apart = x.reshape(units, kv_heads, share, group, x.shape[-1])
        return jnp.swapaxes(apart, 1, 2).reshape(lanes, kv_heads, group, x.shape[-1])

    sees = jnp.repeat(view.prompt_mask, group, axis=1)[:, None]
    prompt_scores = product("UKQH,UKTH->UKQT", by_unit(grouped), prompt_k) * scale
    prompt_scores = jnp.where(sees, prompt_scores, low)
    own_scores = product("BKgH,BKSH->BKgS", grouped, own_k) * scale
    own_scores = jnp.where(view.own_mask[:, None, None], own_scores, low)
    prompt_top = by_lane(prompt_scores.max(-1, keepdims=True))
    top = jnp.maximum(prompt_top, own_scores.max(-1, keepdims=True))
    prompt_weights = jnp.exp(prompt_scores - by_unit(top))
    own_weights = jnp.exp(own_scores - top)
    total = by_lane(prompt_weights.sum(-1, keepdims=True)) + own_weights.sum(-1, keepdims=True)

    from_prompt = product("UKQT,UKTH->UKQH", prompt_weights.astype(q.dtype), prompt_v)
    from_own = product("BKgS,BKSH->BKgH", own_weights.astype(q.dtype), own_v)
    mixed = (by_lane(from_prompt) + from_own) / total
    return mixed.reshape(q.shape).astype(q.dtype), store


def is_stop(tokens: Array, stop_ids: Array) -> Array:
    """Which tokens `[B]` are among the stop ids `[E]` (padded with -1)."""
    return jnp.any(tokens[:, None] == stop_ids[None, :], axis=-1)


@struct.dataclass
class Bounds:
    """How far a chunk may go: `steps [1]` decode steps; it ends when no more than `enough [1]` lanes are active; a response has at
    most `limit` tokens."""

    steps: Any
    enough: Any
    limit: Any


def decode_chunk(
    config: ModelConfig,
    params: Any,
    state: DecodeState,
    active: Array,
    stop_ids: Array,
    bounds: Bounds,
    sampling: Sampling,
    *,
    window: int,
    dtype: Any,
    constrain: Constrain = transformer.unconstrained,
) -> tuple[DecodeState, Window]:
    """Run decode steps on the `active [B]` lanes until the bounds are met, at most `window`, or logits are not finite.

    The host keeps `steps` within the room that the longest active lane has left in `own`.
    """
    lanes = state.last.shape[0]

    def proceed(carry: tuple[DecodeState, Array, Window]) -> Array:
        _, active, out = carry
        more = (out.steps < jnp.minimum(bounds.steps[0], window)) & jnp.all(out.finite)
        return more & (jnp.sum(active) > bounds.enough[0])

    def step(
        carry: tuple[DecodeState, Array, Window],
    ) -> tuple[DecodeState, Array, Window]:
        state, active, out = carry
        view, positions = _view(config, state)
        hidden, own = transformer.run(
            config, params, state.last[:, None], positions[:, None], active[:, None],
            mixer=_decode_mixer, view=view, store=state.own,
            compute_dtype=dtype, constrain=constrain,
        )  # fmt: skip
        # Whole on every device of a tensor group. Sampled in parts, a token would cost a dozen exchanges, among them shifts
        # along the vocabulary, which wait for the devices of all shards. First in parts, or XLA may gather the head instead.
        logits = heads.logits(config, params, hidden[:, 0], compute_dtype=dtype)
        logits = constrain(constrain(logits, "BV"), "BD")
        drawn = sample(logits, uniforms(state.keys, state.lengths), sampling)
        lengths = state.lengths + active
        ended = active & is_stop(drawn.tokens, stop_ids)
        done = active & (ended | (lengths >= bounds.limit))
        put = partial(_put_column, column=out.steps, active=active)
        out = Window(
            tokens=put(out.tokens, drawn.tokens),
            logprobs=put(out.logprobs, drawn.logprobs),
            filtered_logprobs=put(out.filtered_logprobs, drawn.filtered_logprobs),
            counts=out.counts + active,
            done=out.done | done,
            ended=out.ended | ended,
            finite=out.finite & (drawn.finite | ~active),
            steps=out.steps + 1,
        )
        last = jnp.where(active, drawn.tokens, state.last)
        return replace(state, own=own, last=last, lengths=lengths), active & ~done, out

    nothing, no = jnp.zeros((lanes,), jnp.int32), jnp.zeros((lanes,), bool)
    blank = jnp.zeros((lanes, window), jnp.float32)
    out = Window(
        blank.astype(jnp.int32), blank, blank, nothing, no, no, ~no, jnp.zeros((), jnp.int32)
    )
    state, _, out = jax.lax.while_loop(proceed, step, (state, active, out))
    return state, replace(out, steps=out.steps[None])


def _put_column(buffer: Array, values: Array, column: Array, active: Array) -> Array:
    kept = jnp.where(active, values, 0).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice_in_dim(buffer, kept[:, None], column, axis=1)
