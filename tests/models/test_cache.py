import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.cache import KV, copy_row, grow, make_kv, take
from jaxrl_llm.models.families import ModelConfig

CONFIG = ModelConfig("llama", 11, 3, 8, 4, 2, 4, 16)


def numbered(rows=2, columns=5):
    empty = make_kv(CONFIG, rows, columns, jnp.float32)
    values = jnp.arange(empty.k.size, dtype=jnp.float32).reshape(empty.k.shape)
    return KV(values, -values)


def test_shapes_and_emptiness():
    kv = make_kv(CONFIG, 2, 5, jnp.bfloat16)
    assert kv.k.shape == kv.v.shape == (3, 2, 2, 5, 4) and kv.columns == 5
    assert kv.v.dtype == jnp.bfloat16 and not kv.v.any()


def test_take_gives_rows_in_their_order_and_as_often_as_named():
    kv = numbered(4)
    some = take(kv, jnp.int32([2, 0, 2]))
    np.testing.assert_array_equal(some.k, np.asarray(kv.k)[:, [2, 0, 2]])
    np.testing.assert_array_equal(some.v, -some.k)


def test_copy_row_replaces_one_row_of_every_layer():
    into, source = numbered(3), KV(jnp.full((3, 2, 2, 5, 4), 7.0), jnp.full((3, 2, 2, 5, 4), 8.0))
    source = KV(source.k.at[:, 0].set(0), source.v.at[:, 0].set(0))
    kv = jax.jit(copy_row)(into, jnp.int32(1), source, jnp.int32(1))
    expected = np.asarray(into.k).copy()
    expected[:, 1] = 7
    np.testing.assert_array_equal(kv.k, expected)
    assert (np.asarray(kv.v)[:, 1] == 8).all()
    np.testing.assert_array_equal(kv.v[:, [0, 2]], into.v[:, [0, 2]])


def test_grow_appends_empty_columns():
    kv = numbered()
    larger = grow(kv, 8)
    assert larger.v.shape == (3, 2, 2, 8, 4) and larger.columns == 8
    np.testing.assert_array_equal(larger.k[:, :, :, :5], kv.k)
    np.testing.assert_array_equal(larger.v[:, :, :, :5], kv.v)
    assert not larger.k[:, :, :, 5:].any() and not larger.v[:, :, :, 5:].any()
    assert grow(kv, 5).k.shape == kv.k.shape
    with pytest.raises(ConfigError, match="got 4 columns for keys of 5"):
        grow(kv, 4)
