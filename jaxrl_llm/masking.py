"""Masked reductions, whitening, group sums and the loss-aggregation modes.

A mask is 1 (or true) on trained tokens. Masking is by selection, before any arithmetic: NaN or inf in a masked slot changes
neither a value nor a gradient. Everything is float32 inside, float64 only for float64 inputs.

Global numbers need no special form here: under `jit` with sharded arrays a sum over the batch axis is a sum over the mesh.

Left out on purpose: per-shard versions (a mean of per-device means is a different number), and scatter-adds for group sums:
they add in no fixed order on some accelerators, and a resumed run must repeat its numbers bit for bit. Meshes with explicit axis
types are not served: the compiler places the results (`AxisType.Auto`).
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from jaxrl_llm.errors import ConfigError

VARIANCE_FLOOR = 1e-8


def as_float(x: ArrayLike) -> jax.Array:
    """`x` as float32; float64 stays float64."""
    x = jnp.asarray(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def select(x: ArrayLike, mask: ArrayLike) -> jax.Array:
    """`x` where the mask is set, else exactly 0; shapes broadcast."""
    return jnp.where(jnp.asarray(mask).astype(bool), as_float(x), 0.0)


def masked_sum(x: ArrayLike, mask: ArrayLike, axis: int | None = None) -> jax.Array:
    """Sum of `x` over the mask; 0 where nothing is selected."""
    return jnp.sum(select(x, mask), axis=axis)


def masked_mean(x: ArrayLike, mask: ArrayLike, axis: int | None = None) -> jax.Array:
    """Mean of `x` over the mask; 0 where nothing is selected."""
    x = as_float(x)
    tokens = jnp.sum(jnp.broadcast_to(jnp.asarray(mask).astype(bool), x.shape), axis=axis)
    return masked_sum(x, mask, axis) / jnp.maximum(tokens, 1).astype(x.dtype)


def masked_var(x: ArrayLike, mask: ArrayLike, *, bessel: bool = True) -> jax.Array:
    """Variance of `x` over the mask, in two passes around the mean.

    `bessel` divides by `n - 1` instead of `n`. 0 with fewer than two selected elements.
    """
    deviations, tokens = _deviations(x, mask)
    divisor = jnp.maximum(tokens - 1 if bessel else tokens, 1).astype(deviations.dtype)
    return jnp.sum(jnp.square(deviations)) / divisor


def _deviations(x: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """`x - mean` on the mask and 0 off it, and the number of selected elements.

    The elements are first shifted by their largest one, so that equal elements deviate by exactly 0.
    """
    x, on = as_float(x), jnp.asarray(mask).astype(bool)
    chex.assert_equal_shape([x, on])
    tokens = jnp.sum(on)
    top = jnp.max(jnp.where(on, x, -jnp.inf), initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(tokens > 0, top, 0.0))
    shifted = jnp.where(on, jnp.where(on, x, 0.0) - top, 0.0)
    mean = jnp.sum(shifted) / jnp.maximum(tokens, 1).astype(x.dtype)
    return jnp.where(on, shifted - mean, 0.0), tokens


def whiten(x: ArrayLike, mask: ArrayLike, shift_mean: bool = True) -> jax.Array:
    """`x` scaled to mean 0 and variance 1 over the mask.

    `(x - mean) / sqrt(var + 1e-8)` with the Bessel-corrected variance of all selected elements; `shift_mean=False` adds the mean
    back. Any shape. 0 where masked. With fewer than two selected elements `x` is returned as it is (0 where masked), because a
    variance of one number means nothing.
    """
    x = as_float(x)
    deviations, tokens = _deviations(x, mask)
    scaled = deviations * jax.lax.rsqrt(masked_var(x, mask) + VARIANCE_FLOOR)
    if not shift_mean:
        scaled = scaled + masked_mean(x, mask)
    return select(jnp.where(tokens > 1, scaled, select(x, mask)), mask)


def group_sum(x: ArrayLike, group_ids: ArrayLike, num_groups: int) -> jax.Array:
    """Sum of `x [B]` per group -> `[P]`, in a fixed order; ids outside `0 .. num_groups - 1` belong to no group."""
    x = jnp.asarray(x)
    return jnp.sum(jnp.where(_members(group_ids, num_groups), x[None, :], 0), axis=1)


def group_max(x: ArrayLike, group_ids: ArrayLike, num_groups: int) -> jax.Array:
    """Largest `x [B]` per group -> `[P]`; -inf for a group without rows."""
    x = as_float(x)
    members = _members(group_ids, num_groups)
    return jnp.max(jnp.where(members, x[None, :], -jnp.inf), axis=1, initial=-jnp.inf)


def _members(group_ids: ArrayLike, num_groups: int) -> jax.Array:
    group_ids = jnp.asarray(group_ids)
    chex.assert_rank(group_ids, 1)
    return group_ids[None, :] == jnp.arange(num_groups, dtype=group_ids.dtype)[:, None]


@struct.dataclass
class Counts:
    """Denominators of one optimizer mini-batch: trained tokens, sequences and prompts having any. Float32, at least 1."""

    tokens: jax.Array
    sequences: jax.Array
    prompts: jax.Array


def count(mask: ArrayLike, group_ids: ArrayLike, num_groups: int) -> Counts:
    """`Counts` of a whole optimizer mini-batch, from `mask [B T]` and `group_ids [B]`.

    Count the mini-batch, not a micro-batch: then partial sums of `aggregate` over micro-batches add up to its value.
    """
    on = jnp.asarray(mask).astype(bool)
    chex.assert_rank(on, 2)
    trained = jnp.any(on, axis=1)
    groups = group_sum(trained.astype(jnp.int32), group_ids, num_groups) > 0
    return Counts(*(_floored(jnp.sum(flags)) for flags in (on, trained, groups)))


def _floored(number: jax.Array) -> jax.Array:
    return jnp.maximum(number, 1).astype(jnp.float32)


def group_tokens(mask: ArrayLike, group_ids: ArrayLike, num_groups: int) -> jax.Array:
    """Trained tokens of each row's group `[B]`, for mode `prompt-mean`; `mask [B T]` is the whole mini-batch's."""
    on = jnp.asarray(mask).astype(bool)
    chex.assert_rank(on, 2)
    per_group = group_sum(jnp.sum(on, axis=1, dtype=jnp.int32), group_ids, num_groups)
    return per_group[jnp.asarray(group_ids)].astype(jnp.float32)


def _sums(x: jax.Array, mask: jax.Array) -> jax.Array:
    return masked_sum(x, mask, axis=1)


def _token_mean(x, mask, counts, scale, tokens):
    return masked_sum(x, mask) / counts.tokens


def _seq_mean_token_sum(x, mask, counts, scale, tokens):
    return jnp.sum(_sums(x, mask)) / counts.sequences


def _seq_mean_token_mean(x, mask, counts, scale, tokens):
    return jnp.sum(masked_mean(x, mask, axis=1)) / counts.sequences


def _seq_mean_token_sum_norm(x, mask, counts, scale, tokens):
    if scale is None:
        raise ConfigError(
            "loss_agg_mode 'seq-mean-token-sum-norm' got no scale, needs a positive number: "
            "set loss_scale_factor"
        )
    return _seq_mean_token_sum(x, mask, counts, scale, tokens) / scale


def _token_sum(x, mask, counts, scale, tokens):
    return masked_sum(x, mask)


def _prompt_mean(x, mask, counts, scale, tokens):
    if tokens is None:
        raise ConfigError(
            "loss_agg_mode 'prompt-mean' got no group_tokens, needs one number per row: "
            "pass masking.group_tokens(mask, group_ids, num_groups) of the mini-batch"
        )
    chex.assert_shape(tokens, (x.shape[0],))
    return jnp.sum(_sums(x, mask) / jnp.maximum(tokens, 1.0)) / counts.prompts


AGGREGATIONS: dict[str, Callable[..., jax.Array]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "token-sum": _token_sum,
    "prompt-mean": _prompt_mean,
}


def aggregate(
    x: ArrayLike,
    mask: ArrayLike,
    mode: str,
    *,
    counts: Counts,
    scale: ArrayLike | None = None,
    group_tokens: ArrayLike | None = None,
) -> jax.Array:
    """Per-token `x [B T]` as one number; `S_i` is the masked sum of row `i`, `n_i` its trained tokens.

    ===========================  =========================================  =====================================
    `token-mean`                 `sum_i S_i / tokens`                       every token weighs the same (DAPO)
    `seq-mean-token-sum`         `sum_i S_i / sequences`                    long answers weigh more
    `seq-mean-token-mean`        `sum_i (S_i / n_i) / sequences`            every answer weighs the same (GRPO)
    `seq-mean-token-sum-norm`    `sum_i S_i / sequences / scale`            a constant length (Dr.GRPO)
    `token-sum`                  `sum_i S_i`
    `prompt-mean`                `sum_i S_i / group_tokens_i / prompts`     every prompt weighs the same (ScaleRL)
    ===========================  =========================================  =====================================

    `counts` and `group_tokens [B]` are those of the optimizer mini-batch, so that the values of its micro-batches add up. An
    all-masked batch gives exactly 0. An unknown mode, or one without the number it needs, raises `ConfigError`.
    """
    if mode not in AGGREGATIONS:
        raise ConfigError(
            f"loss_agg_mode got {mode!r}, needs one of {', '.join(AGGREGATIONS)}: choose one of them"
        )
    x, on = as_float(x), jnp.asarray(mask).astype(bool)
    chex.assert_rank(x, 2)
    chex.assert_equal_shape([x, on])
    return AGGREGATIONS[mode](x, on, counts, scale, group_tokens)
