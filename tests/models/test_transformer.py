from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import families, heads, transformer
from jaxrl_llm.models.cache import grow, make_cache, repeat
from jaxrl_llm.models.families import ModelConfig
from tests.golden.models import tiny

CONFIG = families.from_hf(tiny.CASES["qwen3_biased_tied"])
WINDOWED = families.from_hf(tiny.CASES["mistral_window"])

run = jax.jit(transformer.apply, static_argnums=0, static_argnames=("compute_dtype", "remat"))
step = jax.jit(transformer.apply, static_argnums=0, donate_argnums=5)


@pytest.fixture(scope="module", params=[CONFIG, WINDOWED], ids=["qwen3", "mistral"])
def model(request):
    return request.param, noisy(request.param)


def noisy(config):
    """Parameters far from their initial values, so that norms and biases take part."""
    params = transformer.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: p + 0.2 * rng.standard_normal(p.shape).astype(p.dtype), params)


def row(length: int, rows: int = 2, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens = jax.random.randint(jax.random.key(seed), (rows, length), 0, CONFIG.vocab_size)
    return tokens, jnp.tile(jnp.arange(length), (rows, 1)), jnp.ones((rows, length), jnp.int32)


def close(a, b, atol=1e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=0)


def test_init_has_the_declared_structure_and_scales():
    params = transformer.init(CONFIG, jax.random.key(0))
    abstract = transformer.abstract_params(CONFIG)
    dims = transformer.param_dims(CONFIG)
    for other in (abstract, dims):
        assert list(families.leaves(jax.tree.map(lambda _: 0, params))) == sorted(
            families.leaves(jax.tree.map(lambda _: 0, other))
        )
    for leaf, plan in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (plan.shape, plan.dtype) == (plan.shape, jnp.float32)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == families.parameter_count(CONFIG)
    assert float(params["layers"]["up"]["kernel"].std()) == pytest.approx(0.02, rel=0.1)
    assert (params["layers"]["q_norm"]["scale"] == 1).all()
    assert not params["layers"]["q"]["bias"].any()
    assert not np.array_equal(*params["layers"]["up"]["kernel"][:2])
    untied = transformer.init(replace(CONFIG, tie_embeddings=False), jax.random.key(0))
    assert untied["head"]["kernel"].shape == (CONFIG.width, CONFIG.vocab_size)


def test_decoding_with_a_cache_equals_the_full_forward(model):
    config, params = model
    whole = row(12)
    hidden, none = run(config, params, *whole)
    assert none is None
    cache, outputs = make_cache(config, 2, 16), []
    for start, stop in ((0, 5), (5, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
        out, cache = step(config, params, *(x[:, start:stop] for x in whole), cache)
        outputs.append(out)
    close(jnp.concatenate(outputs, axis=1), hidden)
    assert cache.length == 12
    np.testing.assert_array_equal(cache.segments[0], [1] * 12 + [0] * 4)
    np.testing.assert_array_equal(cache.positions[0, :12], np.arange(12))


def test_a_prefilled_prompt_repeated_and_grown_serves_its_group():
    params = noisy(CONFIG)
    whole = row(8)
    hidden, _ = run(CONFIG, params, *whole)
    _, cache = run(CONFIG, params, *(x[:, :6] for x in whole), make_cache(CONFIG, 2, 6))
    cache = grow(repeat(cache, 2), 9)
    out, _ = run(CONFIG, params, *(jnp.repeat(x[:, 6:], 2, axis=0) for x in whole), cache)
    close(out, jnp.repeat(hidden[:, 6:], 2, axis=0))


@pytest.mark.parametrize("pad", [1, 7, 17, 1000])
def test_left_padding_changes_nothing(model, pad):
    config, params = model
    whole = row(9)
    hidden, _ = run(config, params, *whole)
    junk = ((0, 0), (pad, 0))
    tokens, positions, segments = (jnp.pad(x, junk) for x in whole)
    tokens = tokens.at[:, :pad].set(5)
    padded, _ = run(config, params, tokens, positions, segments)
    close(padded[:, pad:], hidden)
    assert not padded[:, :pad].any()
    _, cache = run(
        config,
        params,
        *(x[:, :-1] for x in (tokens, positions, segments)),
        make_cache(config, 2, pad + 9),
    )
    last, _ = run(config, params, *(x[:, -1:] for x in (tokens, positions, segments)), cache)
    close(last[:, 0], hidden[:, -1])


def test_forgetting_the_mask_or_the_positions_is_noticed():
    params = noisy(CONFIG)
    whole = row(9)
    hidden, _ = run(CONFIG, params, *whole)
    tokens, positions, segments = (jnp.pad(x, ((0, 0), (7, 0))) for x in whole)
    unmasked, _ = run(CONFIG, params, tokens, positions, jnp.ones_like(segments))
    assert jnp.abs(unmasked[:, 7:] - hidden).max() > 1e-2
    stretched, _ = run(CONFIG, params, tokens, positions * 2, segments)
    assert jnp.abs(stretched[:, 7:] - hidden).max() > 1e-2


def test_packed_segments_do_not_see_each_other(model):
    config, params = model
    first, second = row(6, 1, seed=1), row(8, 1, seed=2)
    tokens, positions, segments = (
        jnp.concatenate([a, b], axis=1) for a, b in zip(first, second, strict=True)
    )
    segments = segments.at[:, 6:].set(2)
    packed, _ = run(config, params, tokens, positions, segments)
    close(packed[:, :6], run(config, params, *first)[0])
    close(packed[:, 6:], run(config, params, *second)[0])


def test_padding_gives_no_gradient_to_anything():
    params = noisy(CONFIG)
    tokens, positions, segments = row(6)
    segments = segments.at[:, :3].set(0).at[1].set(0)
    tokens = jnp.where(segments == 0, 30, tokens % 30)

    @jax.jit
    @jax.grad
    def gradient(params, segments, counted):
        hidden, _ = transformer.apply(CONFIG, params, tokens, positions, segments)
        return jnp.where(counted[..., None], 3 * hidden, 0.0).sum()

    everything = jnp.ones_like(segments, bool)
    of_padding = gradient(params, segments, segments == 0)
    assert all(not leaf.any() for leaf in jax.tree.leaves(of_padding))
    of_all = gradient(params, segments, everything)
    assert not of_all["embed"]["kernel"][30].any() and of_all["embed"]["kernel"].any()
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(of_all))
    only_padding = gradient(params, jnp.zeros_like(segments), everything)
    assert all(not leaf.any() for leaf in jax.tree.leaves(only_padding))


def test_rematerialisation_changes_no_gradient():
    params, whole = noisy(CONFIG), row(6)

    @partial(jax.jit, static_argnames="remat")
    def gradient(params, remat):
        return jax.grad(lambda p: jnp.sin(run(CONFIG, p, *whole, remat=remat)[0]).sum())(params)

    plain, again = gradient(params, remat=False), gradient(params, remat=True)
    jax.tree.map(partial(close, atol=1e-4), plain, again)
    text = str(
        jax.make_jaxpr(lambda p: transformer.apply(CONFIG, p, *whole, remat=True)[0])(params)
    )
    assert "remat" in text


def test_bfloat16_is_near_and_keeps_its_dtype():
    params, whole = noisy(CONFIG), row(6)
    exact, _ = run(CONFIG, params, *whole)
    cache = make_cache(CONFIG, 2, 6, jnp.bfloat16)
    rounded, cache = run(CONFIG, params, *whole, cache, compute_dtype=jnp.bfloat16)
    assert rounded.dtype == cache.k.dtype == jnp.bfloat16
    error = jnp.abs(rounded.astype(jnp.float32) - exact)
    assert 0 < float(error.mean()) < 0.05 * float(jnp.abs(exact).mean())


def test_constrain_sees_the_main_activations():
    seen: dict[str, tuple[int, ...]] = {}

    def constrain(x, dims):
        assert len(dims) == x.ndim
        seen.setdefault(dims, x.shape)
        return x

    transformer.apply(CONFIG, noisy(CONFIG), *row(6), constrain=constrain)
    assert seen == {
        "BTD": (2, 6, 24),
        "BTNH": (2, 6, 4, 8),
        "BTKH": (2, 6, 2, 8),
        "BTF": (2, 6, 40),
    }


def test_a_cache_that_is_too_small_is_refused_while_building():
    params, whole = noisy(CONFIG), row(4)
    with pytest.raises(ConfigError, match="need at least 4"):
        run(CONFIG, params, *whole, make_cache(CONFIG, 2, 3))
    full = replace(make_cache(CONFIG, 2, 4), length=jnp.int32(3))
    with pytest.raises(ConfigError, match="need at least 7"):
        transformer.apply(CONFIG, params, whole[0], whole[1], whole[2], full)


def size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_compiled_decode_step_copies_neither_cache_nor_weights(dtype):
    config = ModelConfig("llama", 512, 8, 128, 8, 4, 16, 256)
    params = transformer.abstract_params(config)
    cache = jax.eval_shape(lambda: make_cache(config, 4, 256, dtype))
    one = jax.ShapeDtypeStruct((4, 1), jnp.int32)

    def decode(params, tokens, positions, cache):
        hidden, cache = transformer.apply(
            config, params, tokens, positions, jnp.ones_like(tokens), cache, compute_dtype=dtype
        )
        return heads.logits(config, params, hidden[:, 0], compute_dtype=dtype), cache

    compiled = jax.jit(decode, donate_argnums=3).lower(params, one, one, cache).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == size(cache)
    assert memory.temp_size_in_bytes < size(cache) + 0.1 * size(params)
    layer, casts = size(cache) / config.num_layers, size(params) / config.num_layers
    assert memory.temp_size_in_bytes < 2 * layer + 1.5 * casts
