"""What is read off the hidden states: logits over the vocabulary, or one value per token.

Left out on purpose: log-probs. They are computed chunk by chunk where they are needed, so that `[B T V]` never exists.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import ops
from jaxrl_llm.models.families import ModelConfig

Array = jax.Array
Params = dict[str, Any]


def logits(
    config: ModelConfig, params: Params, hidden: Array, *, compute_dtype: Any = jnp.float32
) -> Array:
    """Logits `[..., V]` in float32 of hidden states `[..., D]`, with the embedding as head when it is tied.

    Factors are in `compute_dtype`, the sum over `D` in float32.
    """
    if config.tie_embeddings:
        spec, kernel = "...D,VD->...V", params["embed"]["kernel"]
    else:
        spec, kernel = "...D,DV->...V", params["head"]["kernel"]
    return jnp.einsum(
        spec,
        hidden.astype(compute_dtype),
        kernel.astype(compute_dtype),
        precision=ops.precision(compute_dtype),
        preferred_element_type=jnp.float32,
    )


def init_value_head(config: ModelConfig) -> Params:
    """Float32 parameters of a value head, all zero, so that a new critic starts by predicting 0."""
    return {"kernel": jnp.zeros((config.width,), jnp.float32)}


def values(head_params: Params, hidden: Array) -> Array:
    """One value per token, `[..., D] -> [...]`: a float32 inner product with `head_params["kernel"] [D]`."""
    kernel = head_params["kernel"].astype(jnp.float32)
    return jnp.einsum(
        "...D,D->...", hidden.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
    )
