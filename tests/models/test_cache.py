from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.cache import check_room, grow, make_cache, repeat
from jaxrl_llm.models.families import ModelConfig

CONFIG = ModelConfig("llama", 11, 3, 8, 4, 2, 4, 16)


def numbered():
    cache = make_cache(CONFIG, 2, 5)
    return replace(
        cache,
        k=jnp.arange(cache.k.size, dtype=jnp.float32).reshape(cache.k.shape),
        segments=jnp.array([[1] * 5, [2] * 5]),
        length=jnp.int32(4),
    )


def test_shapes_and_emptiness():
    cache = make_cache(CONFIG, 2, 5, jnp.bfloat16)
    assert cache.k.shape == cache.v.shape == (3, 2, 5, 2, 4)
    assert cache.k.dtype == jnp.bfloat16
    assert cache.segments.dtype == cache.positions.dtype == cache.length.dtype == jnp.int32
    assert not cache.segments.any() and cache.length == 0


def test_repeat_puts_copies_side_by_side():
    cache = numbered()
    many = repeat(cache, 3)
    assert many.k.shape == (3, 6, 5, 2, 4) and many.length == 4
    np.testing.assert_array_equal(many.segments[:, 0], [1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(many.k[:, 2], cache.k[:, 0])
    np.testing.assert_array_equal(many.k[:, 3], cache.k[:, 1])


def test_grow_appends_empty_columns():
    cache = numbered()
    larger = grow(cache, 8)
    assert larger.v.shape == (3, 2, 8, 2, 4) and larger.length == 4
    np.testing.assert_array_equal(larger.k[:, :, :5], cache.k)
    assert not larger.segments[:, 5:].any()
    assert grow(cache, 5).k.shape == cache.k.shape
    with pytest.raises(ConfigError, match="got 4 slots for a cache of 5"):
        grow(cache, 4)


def test_room():
    check_room(5, 3, 2)
    with pytest.raises(ConfigError, match=r"got 5 slots for 4 tokens held and 2 new ones.* 6"):
        check_room(5, 4, 2)
