import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import ops
from jaxrl_llm.models.families import RopeScaling


def test_rms_norm_by_hand():
    x, scale = jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])
    np.testing.assert_allclose(
        ops.rms_norm(x, scale, 0.0), [3 / math.sqrt(12.5), 8 / math.sqrt(12.5)], rtol=1e-6
    )
    np.testing.assert_allclose(ops.rms_norm(x, scale, 12.5), [3 / 5, 8 / 5], rtol=1e-6)
    assert not ops.rms_norm(jnp.zeros(2), scale, 1e-6).any()
    half = ops.rms_norm(jnp.full(2, 300.0, jnp.float16), scale, 1e-6)
    np.testing.assert_allclose(half, [1, 2])


def test_rope_frequencies_by_hand():
    plain = ops.rope_frequencies(4, 100.0, None)
    np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-6)
    linear = ops.rope_frequencies(4, 100.0, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(linear, [0.25, 0.025], rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between():
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    plain = ops.rope_frequencies(16, 100.0, None)
    ratio = ops.rope_frequencies(16, 100.0, scaling) / plain
    waves = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[waves < 16], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[waves > 64], 1 / 8, rtol=1e-6)
    between = (waves >= 16) & (waves <= 64)
    keep = (64 / waves[between] - 1) / 3
    np.testing.assert_allclose(ratio[between], (1 - keep) / 8 + keep, rtol=1e-5)
    assert between.sum() >= 2 and (waves < 16).any() and (waves > 64).any()


def test_rotation_by_a_quarter_and_relative_positions():
    x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    turned = ops.rotate(x, *(jnp.full((1, 1, 1), value) for value in (0.0, 1.0)))
    np.testing.assert_allclose(turned.ravel(), [0.0, 1.0])
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    frequencies = ops.rope_frequencies(8, 10000.0, None)

    def score(at_q, at_k):
        tables = (ops.rope_tables(jnp.array([[at]]), frequencies) for at in (at_q, at_k))
        return sum((ops.rotate(q, *next(tables)) * ops.rotate(k, *next(tables))).ravel())

    np.testing.assert_allclose(score(3, 1), score(103, 101), rtol=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_mask_by_hand():
    positions = jnp.array([[0, 0, 1, 2, 0, 1]])
    segments = jnp.array([[0, 1, 1, 1, 2, 2]])
    mask = ops.attention_mask(positions, segments, positions, segments)[0].astype(int)
    by_hand = [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(mask, by_hand)
    near = ops.attention_mask(positions, segments, positions, segments, 2)[0].astype(int)
    by_hand[3] = [0, 0, 1, 1, 0, 0]
    np.testing.assert_array_equal(near, by_hand)


def test_attention_by_hand_with_grouped_heads():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 3, 4, 2)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, 3, 2, 2)).astype(np.float32)
    mask = np.tril(np.ones((1, 3, 3), bool))
    out = np.asarray(ops.attend(*map(jnp.asarray, (q, k, v, mask))))
    for head in range(4):
        for row in range(3):
            keys, values = k[0, : row + 1, head // 2], v[0, : row + 1, head // 2]
            weight = np.exp(keys @ q[0, row, head] / math.sqrt(2))
            np.testing.assert_allclose(
                out[0, row, head], (weight / weight.sum()) @ values, rtol=1e-5
            )


def test_a_query_without_keys_gives_zero_and_no_gradient():
    q = jax.random.normal(jax.random.key(0), (1, 2, 2, 4)) * 1e4
    mask = jnp.array([[[False, False], [True, True]]])

    def total(q, k, v):
        return ops.attend(q, k, v, mask)[:, 0].sum()

    assert total(q, q, q) == 0
    for gradient in jax.grad(total, argnums=(0, 1, 2))(q, q, q):
        assert not gradient.any()
    everything = jax.grad(lambda q: ops.attend(q, q, q, mask).sum())(q)
    assert jnp.isfinite(everything).all()


def test_mlp_and_projection_by_hand():
    np.testing.assert_allclose(
        ops.gated_mlp(jnp.array([0.0, 1.0]), jnp.array([5.0, 2.0])),
        [0.0, 2 / (1 + math.exp(-1))],
        rtol=1e-6,
    )
    x, kernel = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0], [0.0, 3.0]])
    np.testing.assert_allclose(ops.project("BD,DF->BF", x, kernel, jnp.array([1.0, 1])), [[2, 7]])
    assert ops.project("BD,DF->BF", x.astype(jnp.bfloat16), kernel).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["float32", jnp.float32, np.dtype("float32")])
def test_precision(name):
    assert ops.precision(name) == jax.lax.Precision.HIGHEST
    assert ops.precision(jnp.bfloat16) == jax.lax.Precision.DEFAULT
