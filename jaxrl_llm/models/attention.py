"""Attention of packed rows: whole groups one after another, each a prompt once and then its responses.

Query i sees key j iff `q.segment != 0` and (`k.segment == q.segment` or `k.segment == q.prefix`) and
`k.position <= q.position`, with a sliding window w also `k.position > q.position - w`. Every segment and every group is
contiguous, so a block of queries needs few blocks of keys: lists of them are made on the host, and `blocked` walks the lists.

Left out on purpose: library kernels (see `kernels`), dropout, and lists made on the device.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import ops

Array = jax.Array
State = tuple[Array, Array, Array]

SAVED = "attention"
"""The name under which checkpoint policies find what a backward pass needs besides q, k and v."""
TOGETHER = 512
"""Queries that `blocked` works on together: few enough for their scores to stay in a CPU's cache."""
LOWEST = -1e30
"""Where a running maximum starts: below every score, and finite, so that `-inf - LOWEST` is no NaN."""


@struct.dataclass
class View:
    """Who sees whom in packed rows: host or device arrays, filled by `kernels.make_view`.

    A response token has the segment id of its prompt as `prefix`, a prompt token its own, padding 0. `blocks` holds for every
    block of queries the blocks of keys it needs, ascending, then -1. `expand` and `home` are the bins of `kernels.flash`:
    the column of the packed token in every cell (-1 = none), and the cell that holds every packed token (-1 = padding).
    """

    segments: Any  # [R T] int32, 0 = padding
    prefix: Any  # [R T] int32
    positions: Any  # [R T] int32
    blocks: Any = None  # [R nq most] int32
    expand: Any = None  # [R A S] int32
    home: Any = None  # [R T] int32


# Lists of key blocks, on the host ----------------------------------------------------------------------------------------


def most_blocks(prompt_width: int, response_width: int, block: int, tokens: int) -> int:
    """The longest list that any row of `tokens` tokens can need: `2 + ceil((P-1)/block) + ceil((R-1)/block)`, or all blocks.

    Proof. Queries of a group that starts inside the block see only keys of their own group that are not behind them, hence
    keys of this very block: 1. At most one group started earlier. Of its segments in the block all but the first start
    inside it, and that first one has at most R - 1 tokens before the block, adjacent to it: `ceil((R-1)/block)` blocks. Its
    prompt has P tokens at any alignment: they touch at most `ceil((P-1)/block) + 1` blocks. Where the first segment is the
    prompt itself these two are one and the list is shorter.
    """
    longest = 2 + math.ceil((prompt_width - 1) / block) + math.ceil((response_width - 1) / block)
    return min(longest, math.ceil(tokens / block))


def block_lists(segments: np.ndarray, prefix: np.ndarray, block: int, most: int) -> np.ndarray:
    """Key blocks that each block of queries needs, `[R T]` twice -> `[R T/block most]` int32, ascending, -1 behind the last.

    A block is listed iff some query of the row's block sees some key of it (a sliding window is not looked at). By the proof
    above the first token of a block decides: the blocks of its prompt, those from the start of its segment to its own, and
    nothing else. Padding lies at the end of a row. Raises `ConfigError` for a length that is no multiple of `block` and for
    a list longer than `most`.
    """
    tokens = segments.shape[1]
    if tokens % block:
        raise ConfigError(
            f"packed rows of {tokens} tokens do not divide into blocks of {block}; use a multiple of {block}"
        )
    run, start, end, prompt = runs(segments, prefix)
    first = run[:, ::block]
    own = np.broadcast_to(np.arange(tokens // block), first.shape)
    since, head = start[first] // block, start[prompt[first]] // block
    before = np.maximum(np.minimum((end[prompt[first]] - 1) // block, since - 1) - head + 1, 0)
    length = np.where(segments[:, ::block] != 0, before + own - since + 1, 0)
    if length.max(initial=0) > most:
        raise ConfigError(
            f"a block of queries needs {length.max()} blocks of keys, room is for {most}; "
            "prompts and responses must not be longer than the widths the lists were made for"
        )
    place = np.arange(most)
    before, length = before[..., None], length[..., None]
    lists = np.where(place < before, head[..., None] + place, since[..., None] + place - before)
    return np.where(place < length, lists, -1).astype(np.int32)


def runs(
    segments: np.ndarray, prefix: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Segments of packed rows, numbered through all rows in order: the number of every token `[R T]`, and per number the
    first column, the column behind the last, and the number of its prompt. Padding counts as a segment.

    Raises `ValueError` where a response does not follow its own prompt.
    """
    opens = np.ones(segments.shape, bool)
    opens[:, 1:] = segments[:, 1:] != segments[:, :-1]
    row, start = np.nonzero(opens)
    end = np.append(start[1:], 0)
    end[np.append(row[1:] != row[:-1], True)] = segments.shape[1]
    own, parent = segments[row, start], prefix[row, start]
    prompt = np.maximum.accumulate(np.where(own == parent, np.arange(len(own)), 0))
    if (own[prompt] != parent).any() or (row[prompt] != row).any():
        raise ValueError("a response in a packed row does not follow its own prompt")
    return (opens.ravel().cumsum() - 1).reshape(segments.shape), start, end, prompt


# Attention ---------------------------------------------------------------------------------------------------------------


def visible(query: View, key: View, window: int | None) -> Array:
    """The rule of the module on arrays `[... T]` and `[... S]` -> `[... T S]` bool."""
    segment, position = query.segments[..., :, None], query.positions[..., :, None]
    keys, places = key.segments[..., None, :], key.positions[..., None, :]
    sees = (keys == segment) | (keys == query.prefix[..., :, None])
    sees = sees & (segment != 0) & (places <= position)
    return sees if window is None else sees & (places > position - window)


def reference(q: Array, k: Array, v: Array, view: View, window: int | None = None) -> Array:
    """Dense attention by the rule of the module, `[R T T]` in memory: for tests and tiny rows."""
    return ops.attend(q, k, v, visible(view, view, window))


def blocked(
    q: Array,
    k: Array,
    v: Array,
    view: View,
    *,
    window: int | None = None,
    scale: float | None = None,
    together: int = TOGETHER,
) -> Array:
    """Exact attention over lists of key blocks, q `[R T N H]`, k and v `[R T K H]` -> `[R T N H]` in the dtype of `q`.

    Online softmax (Milakov & Gimelshein 2018), recomputed in the backward pass from the saved log-sum-exp (Dao et al. 2022).
    About `together` queries at a time walk the lists of their blocks, as many steps as the longest of these has entries, so no
    buffer of scores is larger than `[R N together block]`; accelerators want more than the default, and rows of many divisors
    hit it best. Scores are `q.k * scale` (default `1/sqrt(H)`); they, the softmax and all sums are float32. Query head n reads
    key head `n // (N/K)`. A query that sees no key gets exactly zero, and no gradient. A sliding window is applied, but saves
    no work.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _blocked(q, k, v, view, _How(window, scale, together))


class _How(NamedTuple):
    """What `blocked` fixes while tracing."""

    window: int | None
    scale: float
    together: int


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(q: Array, k: Array, v: Array, view: View, how: _How) -> Array:
    return _forward(q, k, v, view, how)[0]


def _heads_first(x: Array, block: int, kv_heads: int) -> Array:
    """`[R T N H]` -> `[R T/block K g*block H]`: one matrix per block and key head."""
    rows, tokens, heads, size = x.shape
    x = x.reshape(rows, tokens // block, block, kv_heads, heads // kv_heads, size)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(rows, tokens // block, kv_heads, -1, size)


def _heads_last(x: Array, block: int) -> Array:
    """The inverse of `_heads_first`."""
    rows, count, kv_heads, length, size = x.shape
    x = x.reshape(rows, count, kv_heads, length // block, block, size).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(rows, count * block, -1, size)


def _tiles(view: View) -> View:
    """The tokens of a view cut into blocks, `[R nq block]`."""
    shape = (*view.blocks.shape[:2], -1)
    segments, prefix, positions = view.segments, view.prefix, view.positions
    return View(
        segments.reshape(shape), prefix.reshape(shape), positions.reshape(shape), view.blocks
    )


def _chunk(count: int, wanted: float) -> int:
    """How many of `count` blocks are worked on together: the divisor of `count` nearest to `wanted`, by ratio."""
    divisors = (size for size in range(1, count + 1) if count % size == 0)
    return min(divisors, key=lambda size: abs(math.log(size / wanted)))


def _slice(x: Array, chunk: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, chunk * size, size, axis=1)


def _put(x: Array, part: Array, chunk: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, chunk * part.shape[1], axis=1)


def _take(x: Array, index: Array) -> Array:
    """Blocks `index [R c]` of `x [R nk ...]`."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="promise_in_bounds"))(x, index)


def _add(total: Array, index: Array, part: Array) -> Array:
    add = jax.vmap(lambda x, index, part: x.at[index].add(part, mode="promise_in_bounds"))
    return add(total, index, part)


def _part(tiles: View, chunk: Array, size: int) -> tuple[Array, View]:
    """Indices `[R c]` of a chunk's own blocks, and the tokens there.

    Gathered: XLA fuses a slice into the loops over the scores, which then run at half their speed on CPUs.
    """
    own = jnp.broadcast_to(chunk * size + jnp.arange(size), (tiles.blocks.shape[0], size))
    return own, jax.tree.map(lambda x: _take(x, own), tiles)


def _steps(tiles: View) -> Array:
    """Entries of the longest list, the own block not counted."""
    return jnp.maximum((tiles.blocks >= 0).sum(axis=-1).max() - 1, 0)


def _entry(mine: View, tiles: View, own: Array, step: Array) -> tuple[Array, View]:
    """Entry `step` of every list: block indices `[R c]` and the tokens there; index 0, segment -1 at the list's end or own block."""
    index = jax.lax.dynamic_index_in_dim(mine.blocks, step, axis=2, keepdims=False)
    none = (index < 0) | (index == own)
    index = jnp.where(none, 0, index)
    segments = jnp.where(none[..., None], -1, _take(tiles.segments, index))
    return index, View(segments, segments, _take(tiles.positions, index))


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        spec, a, b, precision=ops.precision(a.dtype), preferred_element_type=jnp.float32
    )


def _scores(q: Array, k: Array, sees: Array, scale: float) -> Array:
    """`q.k * scale` `[R c K g*block block]` float32, -inf where not seen."""
    scores = _dot("RnKtH,RnKsH->RnKts", q, k) * scale
    shape = (*scores.shape[:3], -1, *sees.shape[-2:])
    return jnp.where(sees[:, :, None, None], scores.reshape(shape), -jnp.inf).reshape(scores.shape)


def _forward(q: Array, k: Array, v: Array, view: View, how: _How) -> tuple[Array, Any]:
    (rows, count, _), kv_heads = view.blocks.shape, k.shape[2]
    block = q.shape[1] // count
    size = _chunk(count, how.together / block)
    keys, values = (_heads_first(x, block, kv_heads) for x in (k, v))
    tiles = _tiles(view)

    def chunk(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        own, mine = _part(tiles, i, size)
        queries = _heads_first(_slice(q, i, size * block), block, kv_heads)

        def attend(state: State, k: Array, v: Array, sees: Array) -> State:
            scores = _scores(queries, k, sees, how.scale)
            top = jnp.maximum(scores.max(axis=-1), state[0])
            weights = jnp.exp(scores - top[..., None])
            new = _dot("RnKts,RnKsH->RnKtH", weights.astype(v.dtype), v)
            fade = jnp.exp(state[0] - top)
            return top, state[1] * fade + weights.sum(axis=-1), state[2] * fade[..., None] + new

        def step(j: Array, state: State) -> State:
            index, there = _entry(mine, tiles, own, j)
            return attend(
                state, _take(keys, index), _take(values, index), visible(mine, there, how.window)
            )

        nothing = jnp.zeros(queries.shape, jnp.float32)
        start = (jnp.full(queries.shape[:-1], LOWEST), nothing[..., 0], nothing)
        start = attend(start, _take(keys, own), _take(values, own), visible(mine, mine, how.window))
        top, total, out = jax.lax.fori_loop(0, _steps(mine), step, start)
        total = jnp.where(total > 0, total, 1.0)
        out = _heads_last(out / total[..., None], block).astype(q.dtype)
        return _put(done[0], out, i), _put(done[1], top + jnp.log(total), i)

    nothing = jnp.zeros((rows, count, kv_heads, q.shape[2] // kv_heads * block), jnp.float32)
    out, lse = jax.lax.fori_loop(0, count // size, chunk, (jnp.zeros_like(q), nothing))
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, view, out, lse)


def _backward(how: _How, saved: Any, d_out: Array) -> tuple[Any, ...]:
    q, k, v, view, out, lse = saved
    (_, count, _), kv_heads = view.blocks.shape, k.shape[2]
    block = q.shape[1] // count
    size = _chunk(count, how.together / block)
    keys, values = (_heads_first(x, block, kv_heads) for x in (k, v))
    tiles = _tiles(view)
    deltas = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    deltas = _heads_first(deltas, block, kv_heads)

    def chunk(i: Array, sums: State) -> State:
        own, mine = _part(tiles, i, size)
        queries, d_outs = (
            _heads_first(_slice(x, i, size * block), block, kv_heads) for x in (q, d_out)
        )
        top, delta = (_slice(x, i, size) for x in (lse, deltas))

        def attend(k: Array, v: Array, sees: Array) -> State:
            weights = jnp.exp(_scores(queries, k, sees, how.scale) - top[..., None])
            d_scores = weights * (_dot("RnKtH,RnKsH->RnKts", d_outs, v) - delta) * how.scale
            d_scores = d_scores.astype(q.dtype)
            return (
                _dot("RnKts,RnKsH->RnKtH", d_scores, k),
                _dot("RnKts,RnKtH->RnKsH", d_scores, queries),
                _dot("RnKts,RnKtH->RnKsH", weights.astype(q.dtype), d_outs),
            )

        def step(j: Array, sums: State) -> State:
            index, there = _entry(mine, tiles, own, j)
            dq, dk, dv = attend(
                _take(keys, index), _take(values, index), visible(mine, there, how.window)
            )
            return sums[0] + dq, _add(sums[1], index, dk), _add(sums[2], index, dv)

        dq, dk, dv = attend(_take(keys, own), _take(values, own), visible(mine, mine, how.window))
        dk, dv = _put(sums[1], dk, i), _put(sums[2], dv, i)  # no earlier block saw these keys
        dq, dk, dv = jax.lax.fori_loop(0, _steps(mine), step, (dq, dk, dv))
        return _put(sums[0], _heads_last(dq, block).astype(q.dtype), i), dk, dv

    nothing = jnp.zeros(keys.shape, jnp.float32)
    dq, dk, dv = jax.lax.fori_loop(0, count // size, chunk, (jnp.zeros_like(q), nothing, nothing))
    return dq, _heads_last(dk, block).astype(k.dtype), _heads_last(dv, block).astype(v.dtype), None


_blocked.defvjp(_forward, _backward)
