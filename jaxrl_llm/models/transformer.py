"""A decoder-only transformer as a function of its parameters: `run(config, params, ...) -> (hidden, store)`.

Flax linen serves as a thin shell: modules declare the parameters of `families.param_dims` and hand them to pure functions.
Layers are stacked and run by one scan. A cache travels in the scan's carry and is written in place at the layer index; as
scan input and output every step would copy all of it.

Left out on purpose: logits (see `heads`), dropout, mutable collections, and any knowledge of meshes: the caller injects
sharding through `constrain`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxrl_llm.models import ops
from jaxrl_llm.models.families import ModelConfig, param_dims, shape_of

Array = jax.Array
Params = dict[str, Any]
Constrain = Callable[[Array, str], Array]
Mixer = Callable[[Array, Array, Array, Any, Any, Array], tuple[Array, Any]]
"""`mixer(q [B T N H], k [B T K H], v [B T K H], view, store, layer) -> (mixed [B T N H], store)`: how tokens see each other.

`view` is whatever pytree says who sees whom, the same for all layers; `store` travels in the scan's carry (a stacked cache that is
written in place at `layer`, or `None`)."""

REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("attention"),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass finds of a layer: everything; the outputs of projections and of attention; nothing but its input."""

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
    mixer: Mixer
    constrain: Constrain

    def setup(self) -> None:
        for name, dims in param_dims(self.config)["layers"].items():
            unstacked = tuple((key, letters.removeprefix("L")) for key, letters in dims.items())
            setattr(self, name, Weights(self.config, unstacked))

    def __call__(self, carry: Any, index: Array, shared: Any) -> tuple[Any, None]:
        names = param_dims(self.config)["layers"]
        weights = {name: getattr(self, name)() for name in names}
        return block(self.config, weights, carry, index, shared, self.mixer, self.constrain), None


class Trunk(nn.Module):
    """Embedding, stacked layers, final norm; the head's kernel is declared here and used in `heads`."""

    config: ModelConfig
    mixer: Mixer
    remat: str = "none"
    constrain: Constrain = unconstrained

    def setup(self) -> None:
        dims = param_dims(self.config)
        policy = REMAT[self.remat]
        layer = nn.remat(Layer, prevent_cse=False, policy=policy) if policy else Layer
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            length=self.config.num_layers,
        )
        self.embed = Weights(self.config, tuple(dims["embed"].items()))
        self.layers = stack(self.config, self.mixer, self.constrain)
        self.norm = Weights(self.config, tuple(dims["norm"].items()))
        if not self.config.tie_embeddings:
            self.head = Weights(self.config, tuple(dims["head"].items()))

    def __call__(
        self, tokens: Array, positions: Array, real: Array, view: Any, store: Any, dtype: Any
    ) -> tuple[Array, Any]:
        if self.is_initializing() and not self.config.tie_embeddings:
            self.head()
        config = self.config
        # A lookup in a table whose width is split over devices would gather the result of all rows.
        table = self.constrain(self.embed()["kernel"], "VD")
        x = self.constrain(table[tokens].astype(dtype), "BTD")
        frequencies = ops.rope_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        rope = ops.rope_tables(positions, frequencies)
        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, store), _ = self.layers((x, store), indices, (rope, view))
        x = ops.rms_norm(x, self.norm()["scale"], config.rms_norm_eps)
        return self.constrain(jnp.where(real[..., None], x, 0), "BTD"), store


def block(
    config: ModelConfig,
    w: Params,
    carry: Any,
    layer: Array,
    shared: Any,
    mixer: Mixer,
    constrain: Constrain,
) -> Any:
    """Attention and MLP of one layer on the residual stream, each behind its norm.

    `carry` is `(x [B T D], store)`; `shared` is `(rope tables, view)`; `mixer` is the attention (see `Mixer`).
    """
    x, store = carry
    rope, view = shared
    eps = config.rms_norm_eps
    y = ops.rms_norm(x, w["attention_norm"]["scale"], eps)
    q = constrain(ops.project("BTD,DNH->BTNH", y, **w["q"]), "BTNH")
    k = constrain(ops.project("BTD,DKH->BTKH", y, **w["k"]), "BTKH")
    v = constrain(ops.project("BTD,DKH->BTKH", y, **w["v"]), "BTKH")
    if config.qk_norm:
        q = ops.rms_norm(q, w["q_norm"]["scale"], eps)
        k = ops.rms_norm(k, w["k_norm"]["scale"], eps)
    q, k = ops.rotate(q, *rope), ops.rotate(k, *rope)
    mixed, store = mixer(q, k, v, view, store, layer)
    mixed = constrain(mixed, "BTNH")
    x = constrain(x + ops.project("BTNH,NHD->BTD", mixed, **w["o"]), "BTD")
    y = ops.rms_norm(x, w["mlp_norm"]["scale"], eps)
    gate = constrain(ops.project("BTD,DF->BTF", y, **w["gate"]), "BTF")
    up = constrain(ops.project("BTD,DF->BTF", y, **w["up"]), "BTF")
    x = constrain(x + ops.project("BTF,FD->BTD", ops.gated_mlp(gate, up), **w["down"]), "BTD")
    return x, store


def run(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    real: Array,
    *,
    mixer: Mixer,
    view: Any = None,
    store: Any = None,
    compute_dtype: Any = jnp.float32,
    remat: str = "none",
    constrain: Constrain = unconstrained,
) -> tuple[Array, Any]:
    """The one forward function: `tokens`, `positions`, `real [B T]` -> `(hidden [B T D] after the final norm, store)`.

    Who sees whom is the `mixer`'s business. Tokens that are not `real` give hidden 0 and no gradient. Kernels are cast to
    `compute_dtype` layer by layer; `remat` (a name in `REMAT`) says what the backward pass recomputes; `constrain(x, dims)` is
    called on the main activations with one letter per axis.
    """
    trunk: Any = Trunk(config, mixer, remat=remat, constrain=constrain)
    return trunk.apply({"params": params}, tokens, positions, real, view, store, compute_dtype)


# Rows by themselves ------------------------------------------------------------------------------------------------------


def plain_mixer(
    q: Array, k: Array, v: Array, view: Array, store: None, layer: Array
) -> tuple[Array, None]:
    """Attention inside each row; `view` is the mask `[B T T]`."""
    del layer
    return ops.attend(q, k, v, view), store


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    segments: Array,
    **how: Any,
) -> Array:
    """`run` on rows with segments: `tokens`, `positions`, `segments` `[B T]` -> `hidden [B T D]`.

    Query i sees key j iff their segments are equal and non-zero and `positions[j] <= positions[i]` (and within the sliding
    window). Padding (segment 0) gives hidden 0 and no gradient. `how` goes to `run`.
    """
    mask = ops.attention_mask(positions, segments, positions, segments, config.sliding_window)
    real = segments != 0
    return run(
        config, params, tokens, positions, real, mixer=plain_mixer, view=mask, store=None, **how
    )[0]


def init(config: ModelConfig, key: Array) -> Params:
    """Random float32 parameters: kernels normal with standard deviation 0.02, norms one, biases zero."""
    return _init(config, key)


@partial(jax.jit, static_argnums=0)
def _init(config: ModelConfig, key: Array) -> Params:
    nothing, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool)
    trunk: Any = Trunk(config, plain_mixer)
    return trunk.init(key, nothing, nothing, nothing == 0, mask, None, jnp.float32)["params"]


def abstract_params(config: ModelConfig) -> Params:
    """Shape and dtype of every parameter without making one: a tree of `ShapeDtypeStruct`, float32."""
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(shape_of(config, dims), jnp.float32), param_dims(config)
    )


def compute_copy(config: ModelConfig, dtype: Any) -> Params:
    """The parameters as the forward pass reads them at this precision: kernels and biases in `dtype`, norm scales in float32.

    A copy in these formats gives the same results, bit for bit, as the float32 parameters.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        narrow = path[-1].key != "scale"
        return jax.ShapeDtypeStruct(leaf.shape, dtype if narrow else leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, abstract_params(config))
