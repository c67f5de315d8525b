"""Keys and values of tokens already read: an explicit argument and result of the forward pass, never hidden state.

`KVCache` belongs to `transformer.apply`; `KV` is the bare stack that the rollout decodes with.

Left out on purpose: paging, eviction and ring buffers. A sliding window masks old keys, it does not free them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.families import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of all layers, `k` and `v` `[L B S K H]`, and what each column holds.

    `segments [B S]` int32 is 0 on empty columns, `positions [B S]` int32 the position of the token in its sequence;
    `length` (int32 scalar) counts the columns used so far, the same for every row.
    """

    k: jax.Array
    v: jax.Array
    segments: jax.Array
    positions: jax.Array
    length: jax.Array


def make_cache(
    config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype | type = jnp.float32
) -> KVCache:
    """An empty cache for `batch` rows and `slots` columns.

    Bytes: `2 * L * batch * slots * K * H * itemsize`. Columns are never reused: a row of prompt + response needs as many
    slots as tokens that are fed to the model.
    """
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_size)
    return KVCache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        segments=jnp.zeros((batch, slots), jnp.int32),
        positions=jnp.zeros((batch, slots), jnp.int32),
        length=jnp.zeros((), jnp.int32),
    )


def check_room(slots: int, used: int, new: int) -> None:
    """Refuse to write past the last column: a device would clamp the start index and overwrite older keys.

    Raises `ConfigError` when `used + new > slots`. Call it on the host with the largest numbers a program can reach.
    """
    if used + new > slots:
        raise ConfigError(
            f"the key/value cache: got {slots} slots for {used} tokens held and {new} new ones, need at least "
            f"{used + new}; make the cache larger"
        )


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
    """The rows with these numbers `[W]`, in their order."""
    return KV(jnp.take(kv.k, rows, axis=1), jnp.take(kv.v, rows, axis=1))


def copy_row(into: KV, row: jax.Array, source: KV, source_row: jax.Array) -> KV:
    """`into` with one of its rows replaced by a row of `source` of the same width; in place when `into` is donated."""

    def one(to: jax.Array, of: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice_in_dim(of, source_row, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(to, piece, row, axis=1)

    return KV(one(into.k, source.k), one(into.v, source.v))
