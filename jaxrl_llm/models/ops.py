"""The arithmetic of a transformer block: pure functions of arrays.

Matrix products run in the dtype of their input; norms, rotations, softmax and the reduction to logits run in float32.
float32 inputs are multiplied in full float32 (accelerators would otherwise round them to a shorter format).

Left out on purpose: fused attention kernels, dropout, and any `[B N T S]` mask addition: masks select.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.families import RopeScaling

Array = jax.Array


def precision(dtype: Any) -> jax.lax.Precision:
    """Full float32 products when float32 was asked for, the hardware's way otherwise."""
    return (
        jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT
    )


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Divide by the root mean square of the last axis and scale (Zhang & Sennrich 2019).

    `x / sqrt(mean(x^2) + eps) * scale` in float32, returned in the dtype of `x`. An all-zero row stays zero.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def project(spec: str, x: Array, kernel: Array, bias: Array | None = None) -> Array:
    """`einsum(spec, x, kernel) + bias` in the dtype of `x`, for a contraction over the last axes of `x` and the first of `kernel`.

    `bias` is aligned to the last axes of the result. The product is written as one of two matrices: with two batch axes XLA's CPU
    compiler transposes activations element by element for the kernel's gradient, which costs the MLP half as much again.
    """
    left, right = spec.split("->")[0].split(",")
    shared = len(set(left) & set(right))
    rows, columns = x.shape[: x.ndim - shared], kernel.shape[shared:]
    inner = math.prod(kernel.shape[:shared])
    flat = jnp.matmul(
        x.reshape(-1, inner),
        kernel.astype(x.dtype).reshape(inner, -1),
        precision=precision(x.dtype),
    )
    out = flat.reshape(*rows, *columns)
    return out if bias is None else out + bias.astype(x.dtype)


def rope_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angular frequency of each rotary pair, `[H/2]` float32, in radians per position (Su et al. 2021).

    `theta^(-2i/H)`, then stretched as `RopeScaling` says. For `llama3` with wave length w, original length O, low and
    high factors a and b: kept for w < O/b, divided by `factor` for w > O/a, otherwise blended with weight
    `(O/w - a) / (b - a)` on the unscaled frequency.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = np.float32(1.0) / np.power(np.float32(theta), exponents)
    if scaling is None:
        return frequencies
    slow = frequencies / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * slow + keep * frequencies).astype(np.float32)


def rope_tables(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """Cosine and sine of every rotary angle: positions `[B T]` -> two `[B T H/2]` float32 tables."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate pairs (i, i + H/2) of `x [B T N H]` by the tables `[B T H/2]`; float32 inside, dtype of `x` outside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention_mask(
    query_positions: Array,
    query_segments: Array,
    key_positions: Array,
    key_segments: Array,
    window: int | None = None,
) -> Array:
    """Which keys a query sees, `[B T S]` bool, from positions and segments `[B T]` and `[B S]`.

    Query i sees key j iff both have the same non-zero segment and `position_j <= position_i`, and with a window w also
    `position_j > position_i - w`. Padding (segment 0) sees nothing and is seen by nothing.
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    segment = query_segments[:, :, None]
    sees = (segment == key_segments[:, None, :]) & (segment != 0) & (key <= query)
    return sees if window is None else sees & (key > query - window)


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Grouped-query attention (Ainslie et al. 2023): q `[B T N H]`, k and v `[B S K H]`, mask `[B T S]` -> `[B T N H]`.

    Query head n reads key head `n // (N/K)`; keys are never repeated in memory. Scores `q.k / sqrt(H)` and their softmax
    are float32. A query that sees no key gets exactly zero, and no gradient.
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    exact = precision(q.dtype)
    scores = jnp.einsum(
        "BTKgH,BSKH->BKgTS", grouped, k, precision=exact, preferred_element_type=jnp.float32
    )
    sees = mask[:, None, None, :, :]
    scores = jnp.where(sees, scores * (1.0 / math.sqrt(size)), jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(sees, jnp.exp(scores - top), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum(
        "BKgTS,BSKH->BTKgH",
        weights.astype(v.dtype),
        v,
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(batch, length, heads, size).astype(q.dtype)


def gated_mlp(gate: Array, up: Array) -> Array:
    """`silu(gate) * up` (Shazeer 2020, SwiGLU), SiLU in float32."""
    return jax.nn.silu(gate.astype(jnp.float32)).astype(up.dtype) * up
