from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import families, transformer
from tests.golden.models import tiny

CONFIG = families.from_hf(tiny.CASES["qwen3_biased_tied"])
WINDOWED = families.from_hf(tiny.CASES["mistral_window"])

run = jax.jit(transformer.apply, static_argnums=0, static_argnames=("compute_dtype", "remat"))


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


@pytest.mark.parametrize("pad", [1, 7, 17, 1000])
def test_left_padding_changes_nothing(model, pad):
    config, params = model
    whole = row(9)
    hidden = run(config, params, *whole)
    junk = ((0, 0), (pad, 0))
    tokens, positions, segments = (jnp.pad(x, junk) for x in whole)
    tokens = tokens.at[:, :pad].set(5)
    padded = run(config, params, tokens, positions, segments)
    close(padded[:, pad:], hidden)
    assert not padded[:, :pad].any()


def test_forgetting_the_mask_or_the_positions_is_noticed():
    params = noisy(CONFIG)
    whole = row(9)
    hidden = run(CONFIG, params, *whole)
    tokens, positions, segments = (jnp.pad(x, ((0, 0), (7, 0))) for x in whole)
    unmasked = run(CONFIG, params, tokens, positions, jnp.ones_like(segments))
    assert jnp.abs(unmasked[:, 7:] - hidden).max() > 1e-2
    stretched = run(CONFIG, params, tokens, positions * 2, segments)
    assert jnp.abs(stretched[:, 7:] - hidden).max() > 1e-2


def test_packed_segments_do_not_see_each_other(model):
    config, params = model
    first, second = row(6, 1, seed=1), row(8, 1, seed=2)
    tokens, positions, segments = (
        jnp.concatenate([a, b], axis=1) for a, b in zip(first, second, strict=True)
    )
    segments = segments.at[:, 6:].set(2)
    packed = run(config, params, tokens, positions, segments)
    close(packed[:, :6], run(config, params, *first))
    close(packed[:, 6:], run(config, params, *second))


def test_padding_gives_no_gradient_to_anything():
    params = noisy(CONFIG)
    tokens, positions, segments = row(6)
    segments = segments.at[:, :3].set(0).at[1].set(0)
    tokens = jnp.where(segments == 0, 30, tokens % 30)

    @jax.jit
    @jax.grad
    def gradient(params, segments, counted):
        hidden = transformer.apply(CONFIG, params, tokens, positions, segments)
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
        return jax.grad(lambda p: jnp.sin(run(CONFIG, p, *whole, remat=remat)).sum())(params)

    plain, again = gradient(params, remat="none"), gradient(params, remat="full")
    jax.tree.map(partial(close, atol=1e-4), plain, again)
    text = str(jax.make_jaxpr(lambda p: transformer.apply(CONFIG, p, *whole, remat="full"))(params))
    assert "remat" in text


def test_bfloat16_is_near_and_keeps_its_dtype():
    params, whole = noisy(CONFIG), row(6)
    exact = run(CONFIG, params, *whole)
    rounded = run(CONFIG, params, *whole, compute_dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
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
        "VD": (CONFIG.vocab_size, 24),
        "BTD": (2, 6, 24),
        "BTNH": (2, 6, 4, 8),
        "BTKH": (2, 6, 2, 8),
        "BTF": (2, 6, 40),
    }
