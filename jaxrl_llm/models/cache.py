"""Keys and values of tokens already read: an explicit argument and result of the forward pass, never hidden state.

Left out on purpose: paging, eviction and ring buffers. A sliding window masks old keys, it does not free them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.families import ModelConfig


@struct.dataclass
class KV:
    """Keys and values of all layers, `[L B K S H]`: heads before columns, so that one row and head is one matrix of a product."""

    k: Any
    v: Any

    @property
    def columns(self) -> int:
        """Columns per row."""
        return int(self.k.shape[3])


def make_kv(config: ModelConfig, rows: int, columns: int, dtype: Any) -> KV:
    """Zeros for `rows` rows; bytes: `2 * L * rows * K * columns * H * itemsize`."""
    shape = (config.num_layers, rows, config.num_kv_heads, columns, config.head_size)
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def grow(kv: KV, columns: int) -> KV:
    """The same rows with empty columns appended up to `columns`.

    Raises `ConfigError` when `columns` is smaller than what is there; equal is a no-op.
    """
    have = kv.columns
    if columns < have:
        raise ConfigError(
            f"grow: got {columns} columns for keys of {have}, need at least {have}; ask for more columns"
        )
    more = ((0, 0), (0, 0), (0, 0), (0, columns - have), (0, 0))
    return KV(jnp.pad(kv.k, more), jnp.pad(kv.v, more))


def take(kv: KV, rows: jax.Array) -> KV:
    """The rows with these numbers `[W]`, in their order, copied one by one: XLA's gather of rows this long needs room for
    another copy on TPUs."""

    def put(place: jax.Array, into: KV) -> KV:
        return copy_row(into, place, kv, rows[place])

    shape = (kv.k.shape[0], rows.shape[0], *kv.k.shape[2:])
    empty = KV(jnp.zeros(shape, kv.k.dtype), jnp.zeros(shape, kv.v.dtype))
    return jax.lax.fori_loop(0, rows.shape[0], put, empty)


def copy_row(into: KV, row: jax.Array, source: KV, source_row: jax.Array) -> KV:
    """`into` with one of its rows replaced by a row of `source` of the same width; in place when `into` is donated."""

    def one(to: jax.Array, of: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice_in_dim(of, source_row, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(to, piece, row, axis=1)

    return KV(one(into.k, source.k), one(into.v, source.v))
