"""Attention of rows whose columns lie on several devices: keys and values travel round a ring of them.

Every device keeps the queries of its own columns. Keys, values and what the rule of `attention` asks of them go from neighbour
to neighbour until everyone has met them (Liu, Zaharia & Abbeel 2023, arXiv:2310.01889); softmaxes are merged as they come
(Milakov & Gimelshein 2018) and recomputed in the backward pass from the log-sum-exp (Dao et al. 2022), where the gradients of
keys and values travel with them and end at home. Nothing on a device grows faster than its own columns.

Left out on purpose: an order of columns that gives every device as much to see as the last one has, rings that stop early
where no trajectory reaches further, and kernels of this package's own.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.models import attention, ops
from jaxrl_llm.models.attention import View

Array = jax.Array
Tree = Any
Work = Callable[[Array, Array, Array, Tree], Tree]
Visit = Callable[[Tree, Tree], tuple[Tree, Tree]]

BLOCKS = (512, 256, 128)
"""Sizes of a block of queries and of keys, the best first; the first that divides a device's columns is taken."""


def ring(
    q: Array,
    k: Array,
    v: Array,
    view: View,
    *,
    window: int | None = None,
    axis: str | None = None,
    block: int | None = None,
) -> Array:
    """Exact attention of this device's columns to all columns of their rows, q `[R t N H]`, k and v `[R t K H]` -> `[R t N H]`.

    Runs inside `shard_map`: `axis` is the mesh axis whose devices hold the equal parts of the rows, in order (`None`: this
    device holds all of them), `view` the segments, prefix and positions `[R t]` of the same columns. Who sees whom is
    `attention.visible`, whatever the order of the columns. Blocks of about `block` queries and keys (default: by `BLOCKS`) are
    worked on one pair at a time, and only pairs of which some tokens see each other; scores are `[R N block block]` float32,
    as are the softmax and all sums. Every device sends and receives each time, whether it has work or not. Padding gives zero
    and no gradient, and what lies in it is not read.
    """
    tokens = View(view.segments, view.prefix, view.positions)
    return _ring(q, k, v, tokens, _How(window, axis, block_size(q.shape[1], block)))


def block_size(columns: int, wanted: int | None = None) -> int:
    """Tokens of a block: the first of `BLOCKS` that divides the columns, else their largest divisor up to `wanted`."""
    if wanted is None:
        best = next((size for size in BLOCKS if columns % size == 0), None)
        return block_size(columns, BLOCKS[0]) if best is None else best
    return next(size for size in range(min(wanted, columns), 0, -1) if columns % size == 0)


class _How(NamedTuple):
    """What `ring` fixes while tracing."""

    window: int | None
    axis: str | None
    block: int


# Blocks ------------------------------------------------------------------------------------------------------------------


def _cut(x: Array, how: _How, kv_heads: int) -> Array:
    """`[R t N H]` -> `[R t/block K g*block H]`: one matrix per block and key head."""
    rows, columns, heads, size = x.shape
    x = x.reshape(rows, columns // how.block, how.block, kv_heads, heads // kv_heads, size)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(rows, columns // how.block, kv_heads, -1, size)


def _join(x: Array, how: _How) -> Array:
    """The inverse of `_cut`."""
    rows, count, kv_heads, length, size = x.shape
    x = x.reshape(rows, count, kv_heads, length // how.block, how.block, size)
    return x.transpose(0, 1, 4, 2, 3, 5).reshape(rows, count * how.block, -1, size)


def _real(x: Array, view: View) -> Array:
    """Tokens, zero where a row is padded: products with what may lie there would be no numbers."""
    return jnp.where((view.segments != 0)[..., None, None], x, 0)


def _at(tree: Tree, block: Array) -> Tree:
    """One block of arrays `[R n ...]`."""
    take = partial(jax.lax.dynamic_index_in_dim, index=block, axis=1, keepdims=False)
    return jax.tree.map(take, tree)


def _put(tree: Tree, block: Array, new: Tree) -> Tree:
    put = partial(jax.lax.dynamic_update_index_in_dim, index=block, axis=1)
    return jax.tree.map(lambda x, part: put(x, part), tree, new)


def _add(tree: Tree, block: Array, part: Tree) -> Tree:
    return _put(tree, block, jax.tree.map(jnp.add, _at(tree, block), part))


def _seen(mine: View, there: View, window: int | None) -> Array:
    """Which blocks of keys some token of a block of queries sees, `[n m]` bool."""
    rows, count, _ = there.segments.shape
    keys = jax.tree.map(lambda x: x.reshape(rows, -1), there)

    def one(block: Array) -> Array:
        sees = attention.visible(_at(mine, block), keys, window)
        return sees.any(axis=(0, 1)).reshape(count, -1).any(axis=1)

    return jax.lax.map(one, jnp.arange(mine.segments.shape[1]))


def _pairs(mine: View, there: View, window: int | None, work: Work, state: Tree) -> Tree:
    """`state = work(i, j, sees, state)` for every block i of queries and j of keys that see each other, and for no other."""
    seen = _seen(mine, there, window)
    order = jnp.argsort(~seen.ravel())

    def one(step: Array, state: Tree) -> Tree:
        i, j = jnp.divmod(order[step], seen.shape[1])
        return work(i, j, attention.visible(_at(mine, i), _at(there, j), window), state)

    return jax.lax.fori_loop(0, seen.sum(), one, state)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        spec, a, b, precision=ops.precision(a.dtype), preferred_element_type=jnp.float32
    )


def _scores(q: Array, k: Array, sees: Array) -> Array:
    """`q.k / sqrt(H)` `[R K g*block block]` float32, -inf where not seen."""
    scores = _dot("RKtH,RKsH->RKts", q, k) * (1.0 / math.sqrt(q.shape[-1]))
    shape = (*scores.shape[:2], -1, *sees.shape[-2:])
    return jnp.where(sees[:, None, None], scores.reshape(shape), -jnp.inf).reshape(scores.shape)


# Round the ring ----------------------------------------------------------------------------------------------------------


def _pass(tree: Tree, axis: str | None) -> Tree:
    """What the device in front holds; a device alone keeps its own."""
    if axis is None:
        return tree
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(i, (i + 1) % size) for i in range(size)])


def _round(visit: Visit, axis: str | None, guest: Tree, luggage: Tree, state: Tree) -> Any:
    """`gift, state = visit(guest, state)` for the guests of all devices, one's own first; gifts are added to their luggage.

    Luggage travels behind its guest and is at home in the end. Whatever is sent does not wait for the visit that goes on
    meanwhile: guests leave before it, and luggage catches up after it. A loop, not its copies: the compiler would be free to
    receive all guests at once.
    """

    def stay(guest: Tree, luggage: Tree, state: Tree) -> tuple[Tree, Tree]:
        luggage = _pass(luggage, axis)
        gift, state = visit(guest, state)
        return jax.tree.map(jnp.add, luggage, gift), state

    def hop(_: Array, carry: Tree) -> Tree:
        guest, luggage, state = carry
        following = _pass(guest, axis)
        return following, *stay(guest, luggage, state)

    hops = 0 if axis is None else jax.lax.axis_size(axis) - 1
    luggage, state = stay(*jax.lax.fori_loop(0, hops, hop, (guest, luggage, state)))
    return _pass(luggage, axis), state


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q: Array, k: Array, v: Array, view: View, how: _How) -> Array:
    return _forward(q, k, v, view, how)[0]


def _prepare(how: _How, view: View, kv_heads: int, *arrays: Array) -> tuple[Any, ...]:
    """The tokens of a view as queries and as keys in blocks `[R n block]`, and arrays in blocks, padding zero."""
    tiles = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, how.block), view)
    blocks = (_cut(_real(x, view), how, kv_heads) for x in arrays)
    return tiles, tiles.replace(prefix=None), *blocks


def _forward(q: Array, k: Array, v: Array, view: View, how: _How) -> tuple[Array, Any]:
    mine, own, queries, keys, values = _prepare(how, view, k.shape[2], q, k, v)

    def visit(guest: Tree, state: Tree) -> tuple[Tree, Tree]:
        there, keys, values = guest

        def attend(i: Array, j: Array, sees: Array, state: Tree) -> Tree:
            top, total, out = _at(state, i)
            scores = _scores(_at(queries, i), _at(keys, j), sees)
            higher = jnp.maximum(scores.max(axis=-1), top)
            weights = jnp.exp(scores - higher[..., None])
            fade = jnp.exp(top - higher)
            new = _dot("RKts,RKsH->RKtH", weights.astype(v.dtype), _at(values, j))
            total = total * fade + weights.sum(axis=-1)
            return _put(state, i, (higher, total, out * fade[..., None] + new))

        return (), _pairs(mine, there, how.window, attend, state)

    nothing = jnp.zeros(queries.shape, jnp.float32)
    state = (jnp.full(queries.shape[:-1], attention.LOWEST), nothing[..., 0], nothing)
    _, (top, total, out) = _round(visit, how.axis, (own, keys, values), (), state)
    total = jnp.where(total > 0, total, 1.0)
    out = _join(out / total[..., None], how).astype(q.dtype)
    out, lse = (checkpoint_name(x, attention.SAVED) for x in (out, top + jnp.log(total)))
    return out, (q, k, v, view, out, lse)


def _backward(how: _How, saved: Any, d_out: Array) -> tuple[Any, ...]:
    q, k, v, view, out, lse = saved
    deltas = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    mine, own, queries, keys, values, d_outs, deltas = _prepare(
        how, view, k.shape[2], q, k, v, d_out, deltas
    )
    scale = 1.0 / math.sqrt(q.shape[-1])

    def visit(guest: Tree, dq: Array) -> tuple[Tree, Tree]:
        there, keys, values = guest

        def attend(i: Array, j: Array, sees: Array, sums: Tree) -> Tree:
            query, d_out, top, delta = _at((queries, d_outs, lse, deltas), i)
            key, value = _at((keys, values), j)
            weights = jnp.exp(_scores(query, key, sees) - top[..., None])
            d_scores = weights * (_dot("RKtH,RKsH->RKts", d_out, value) - delta) * scale
            d_scores = d_scores.astype(q.dtype)
            dq = _dot("RKts,RKsH->RKtH", d_scores, key)
            dk = _dot("RKts,RKtH->RKsH", d_scores, query)
            dv = _dot("RKts,RKtH->RKsH", weights.astype(q.dtype), d_out)
            return _add(sums[0], i, dq), _add(sums[1], j, (dk, dv))

        dq, gift = _pairs(mine, there, how.window, attend, (dq, nothing))
        return gift, dq

    nothing = (jnp.zeros(keys.shape, jnp.float32),) * 2
    start = jnp.zeros(queries.shape, jnp.float32)
    (dk, dv), dq = _round(visit, how.axis, (own, keys, values), nothing, start)
    dq, dk, dv = (_join(x, how) for x in (dq, dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_forward, _backward)
