"""Keys and values of tokens already read: an explicit argument and result of the forward pass, never hidden state.

Left out on purpose: paging, eviction and ring buffers. A sliding window masks old keys, it does not free them.
"""

from dataclasses import replace

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


def repeat(cache: KVCache, n: int) -> KVCache:
    """Repeat every row `n` times, copies adjacent: one prefilled prompt becomes a group of `n`."""
    return replace(
        cache,
        k=jnp.repeat(cache.k, n, axis=1),
        v=jnp.repeat(cache.v, n, axis=1),
        segments=jnp.repeat(cache.segments, n, axis=0),
        positions=jnp.repeat(cache.positions, n, axis=0),
    )


def grow(cache: KVCache, slots: int) -> KVCache:
    """The same cache with empty columns appended up to `slots`.

    Raises `ConfigError` when `slots` is smaller than the cache already is; equal is a no-op.
    """
    have = cache.k.shape[2]
    if slots < have:
        raise ConfigError(
            f"grow: got {slots} slots for a cache of {have}, need at least {have}; ask for more slots"
        )
    more = slots - have
    wide, flat = ((0, 0), (0, 0), (0, more), (0, 0), (0, 0)), ((0, 0), (0, more))
    return replace(
        cache,
        k=jnp.pad(cache.k, wide),
        v=jnp.pad(cache.v, wide),
        segments=jnp.pad(cache.segments, flat),
        positions=jnp.pad(cache.positions, flat),
    )
