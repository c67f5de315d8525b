"""A decoder-only transformer as a function of its parameters: `apply(config, params, ...) -> (hidden, cache)`.

Flax linen serves as a thin shell: modules declare the parameters of `families.param_dims` and hand them to pure functions.
Layers are stacked and run by one scan. A cache travels in the scan's carry and is written in place at the layer index; as
scan input and output every step would copy all of it.

Left out on purpose: logits (see `heads`), dropout, mutable collections, and any knowledge of meshes: the caller injects
sharding through `constrain`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxrl_llm.models import ops
from jaxrl_llm.models.cache import KVCache, check_room
from jaxrl_llm.models.families import ModelConfig, param_dims, shape_of

Array = jax.Array
Params = dict[str, Any]
Constrain = Callable[[Array, str], Array]

INIT_SCALE = 0.02
INITIALIZERS = {
    "kernel": nn.initializers.normal(INIT_SCALE),
    "bias": nn.initializers.zeros,
    "scale": nn.initializers.ones,
}


def unconstrained(x: Array, dims: str) -> Array:
    """The `constrain` of a single device: nothing to do."""
    del dims
    return x


class Weights(nn.Module):
    """The parameters of one projection or norm, by name: `dims` are pairs such as `("kernel", "DNH")`."""

    config: ModelConfig
    dims: tuple[tuple[str, str], ...]

    def setup(self) -> None:
        for name, dims in self.dims:
            values = self.param(name, INITIALIZERS[name], shape_of(self.config, dims), jnp.float32)
            setattr(self, name, values)

    def __call__(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name, _ in self.dims}


class Layer(nn.Module):
    """One transformer block; the scan stacks its parameters along `L`."""

    config: ModelConfig
    constrain: Constrain

    def setup(self) -> None:
        for name, dims in param_dims(self.config)["layers"].items():
            unstacked = tuple((key, letters.removeprefix("L")) for key, letters in dims.items())
            setattr(self, name, Weights(self.config, unstacked))

    def __call__(self, carry: Any, index: Array, shared: Any) -> tuple[Any, None]:
        names = param_dims(self.config)["layers"]
        weights = {name: getattr(self, name)() for name in names}
        return block(self.config, weights, carry, index, shared, self.constrain), None


class Trunk(nn.Module):
    """Embedding, stacked layers, final norm; the head's kernel is declared here and used in `heads`."""

    config: ModelConfig
    remat: bool = False
    constrain: Constrain = unconstrained

    def setup(self) -> None:
        dims = param_dims(self.config)
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            length=self.config.num_layers,
        )
        self.embed = Weights(self.config, tuple(dims["embed"].items()))
        self.layers = stack(self.config, self.constrain)
        self.norm = Weights(self.config, tuple(dims["norm"].items()))
        if not self.config.tie_embeddings:
            self.head = Weights(self.config, tuple(dims["head"].items()))

    def __call__(
        self, tokens: Array, positions: Array, segments: Array, cache: KVCache | None, dtype: Any
    ) -> tuple[Array, KVCache | None]:
        if self.is_initializing() and not self.config.tie_embeddings:
            self.head()
        config = self.config
        x = self.constrain(self.embed()["kernel"][tokens].astype(dtype), "BTD")
        frequencies = ops.rope_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        rope = ops.rope_tables(positions, frequencies)
        key_positions, key_segments, start, store = positions, segments, None, None
        if cache is not None:
            cache = mark(cache, positions, segments)
            key_positions, key_segments = cache.positions, cache.segments
            start, store = cache.length, (cache.k, cache.v)
        mask = ops.attention_mask(
            positions, segments, key_positions, key_segments, config.sliding_window
        )
        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, store), _ = self.layers((x, store), indices, (rope, mask, start))
        x = ops.rms_norm(x, self.norm()["scale"], config.rms_norm_eps)
        x = self.constrain(jnp.where(segments[..., None] != 0, x, 0), "BTD")
        if cache is None or store is None:
            return x, None
        return x, replace(cache, k=store[0], v=store[1], length=cache.length + tokens.shape[1])


def mark(cache: KVCache, positions: Array, segments: Array) -> KVCache:
    """Enter the new tokens' segments and positions `[B T]` at column `length`; keys, values and `length` stay."""
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=cache.length, axis=1)
    return replace(
        cache,
        segments=write(cache.segments, segments.astype(jnp.int32)),
        positions=write(cache.positions, positions.astype(jnp.int32)),
    )


def store_at(stack: Array, new: Array, layer: Array, start: Array) -> tuple[Array, Array]:
    """Write `new [B T K H]` into `stack [L B S K H]` at `(layer, start)`; returns the stack and that layer `[B S K H]`."""
    zero = jnp.zeros((), jnp.int32)
    stack = jax.lax.dynamic_update_slice(
        stack, new[None].astype(stack.dtype), (layer, zero, start, zero, zero)
    )
    return stack, jax.lax.dynamic_index_in_dim(stack, layer, axis=0, keepdims=False)


def block(
    config: ModelConfig, w: Params, carry: Any, layer: Array, shared: Any, constrain: Constrain
) -> Any:
    """Attention and MLP of one layer on the residual stream, each behind its norm.

    `carry` is `(x [B T D], None | (k, v) of all layers)`; `shared` is `(rope tables, mask [B T S], first free
    cache column)`.
    """
    x, store = carry
    rope, mask, start = shared
    eps = config.rms_norm_eps
    y = ops.rms_norm(x, w["attention_norm"]["scale"], eps)
    q = constrain(ops.project("BTD,DNH->BTNH", y, **w["q"]), "BTNH")
    k = constrain(ops.project("BTD,DKH->BTKH", y, **w["k"]), "BTKH")
    v = constrain(ops.project("BTD,DKH->BTKH", y, **w["v"]), "BTKH")
    if config.qk_norm:
        q = ops.rms_norm(q, w["q_norm"]["scale"], eps)
        k = ops.rms_norm(k, w["k_norm"]["scale"], eps)
    q, k = ops.rotate(q, *rope), ops.rotate(k, *rope)
    if store is not None:
        keys, k = store_at(store[0], k, layer, start)
        values, v = store_at(store[1], v, layer, start)
        store = (keys, values)
        k, v = k.astype(x.dtype), v.astype(x.dtype)
    mixed = constrain(ops.attend(q, k, v, mask), "BTNH")
    x = constrain(x + ops.project("BTNH,NHD->BTD", mixed, **w["o"]), "BTD")
    y = ops.rms_norm(x, w["mlp_norm"]["scale"], eps)
    gate = constrain(ops.project("BTD,DF->BTF", y, **w["gate"]), "BTF")
    up = constrain(ops.project("BTD,DF->BTF", y, **w["up"]), "BTF")
    x = constrain(x + ops.project("BTF,FD->BTD", ops.gated_mlp(gate, up), **w["down"]), "BTD")
    return x, store


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    segments: Array,
    cache: KVCache | None = None,
    *,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    constrain: Constrain = unconstrained,
) -> tuple[Array, KVCache | None]:
    """Run the model on `tokens`, `positions`, `segments` `[B T]`; returns `hidden [B T D]` after the final norm.

    Query i sees key j iff their segments are equal and non-zero and `positions[j] <= positions[i]` (and within the sliding
    window). With a cache the new keys enter at column `cache.length` and queries see all columns by the same rule; the
    returned cache is `T` longer. **The caller guarantees room** (`cache.length + T <= S`): on a device a start index past
    the end is clamped and overwrites older keys, which nothing can report. What can be seen while tracing is checked and
    raises `ConfigError`. Padding (segment 0) gives hidden 0 and no gradient.

    Kernels are cast to `compute_dtype` layer by layer; `remat` recomputes each layer in the backward pass;
    `constrain(x, dims)` is called on the main activations with one letter per axis.
    """
    if cache is not None:
        used = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
        check_room(cache.k.shape[2], used, tokens.shape[1])
    trunk: Any = Trunk(config, remat=remat, constrain=constrain)
    return trunk.apply({"params": params}, tokens, positions, segments, cache, compute_dtype)


def init(config: ModelConfig, key: Array) -> Params:
    """Random float32 parameters: kernels normal with standard deviation 0.02, norms one, biases zero."""
    return _init(config, key)


@partial(jax.jit, static_argnums=0)
def _init(config: ModelConfig, key: Array) -> Params:
    nothing = jnp.zeros((1, 1), jnp.int32)
    return Trunk(config).init(key, nothing, nothing, nothing, None, jnp.float32)["params"]


def abstract_params(config: ModelConfig) -> Params:
    """Shape and dtype of every parameter without making one: a tree of `ShapeDtypeStruct`, float32."""
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(shape_of(config, dims), jnp.float32), param_dims(config)
    )
