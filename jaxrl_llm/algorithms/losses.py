"""Policy and value losses per token, and the table `POLICY_LOSSES`.

A loss takes log-probs `[B T]`, one response per row, and returns `(loss [B T], metrics)`, both 0 where masked. The metrics are
per-token arrays whose masked mean is the number to log: sums over micro-batches and devices then add up exactly, which a
mean of means does not. No gradient flows through metrics.

Left out on purpose: aggregation (`masking.aggregate`), models, entropy. Not yet here: gspo, cispo, sapo, gmpo, reinforce,
clip_cov, kl_cov, dppo_tv, dppo_kl, dro.
"""

from collections.abc import Callable, Mapping

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrl_llm import masking

LOG_RATIO_LIMIT = 20.0

Metrics = dict[str, jax.Array]


def mean_metrics(metrics: Mapping[str, ArrayLike], mask: ArrayLike) -> Metrics:
    """Masked mean of every per-token metric `[B T]`; 0 for a batch without trained tokens."""
    return {name: masking.masked_mean(value, mask) for name, value in metrics.items()}


def weigh(loss: ArrayLike, weights: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Per-token loss times correction weights `[B T]`, which get no gradient; 0 where masked."""
    weights = jax.lax.stop_gradient(masking.select(weights, mask))
    return masking.select(loss, mask) * weights


def _trained(mask: jax.Array, *arrays: ArrayLike) -> list[jax.Array]:
    chex.assert_rank(mask, 2)
    chex.assert_equal_shape([mask, *(jnp.asarray(array) for array in arrays)])
    return [masking.select(array, mask) for array in arrays]


def ppo_clip(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: ArrayLike,
    clip_high: ArrayLike,
    clip_c: ArrayLike | None,
) -> tuple[jax.Array, Metrics]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with dual clip (Ye et al. 2020, arXiv:1912.09729).

    `d = logprobs - old_logprobs`, `r = exp(clip(d, -20, 20))`; `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`; where `A < 0` at
    most `-A clip_c` (`None`: no such bound). The log-ratio is clipped before the exponential, so value and gradient are finite
    for any ratio; beyond 20 nats the gradient is 0. Metrics: `ppo_kl = -clip(d, -20, 20)`; `pg_clipfrac`, the clipped branch is
    strictly larger; `pg_clipfrac_lower`, the dual clip acts.
    """
    on = jnp.asarray(mask).astype(bool)
    new, old, advantages = _trained(on, logprobs, old_logprobs, advantages)
    log_ratio = jnp.clip(new - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(plain, clipped)
    lower = jnp.zeros(on.shape, bool)
    if clip_c is not None:
        bound = -advantages * clip_c
        lower = (advantages < 0) & (loss > bound)
        loss = jnp.where(lower, bound, loss)
    metrics = {"ppo_kl": -log_ratio, "pg_clipfrac": clipped > plain, "pg_clipfrac_lower": lower}
    return masking.select(loss, on), _detached(metrics, on)


def value_loss(
    values: ArrayLike,
    old_values: ArrayLike,
    returns: ArrayLike,
    mask: ArrayLike,
    *,
    clip: ArrayLike | None,
) -> tuple[jax.Array, Metrics]:
    """The critic's squared error, the worse of unclipped and clipped values (arXiv:1707.06347, and PPO's reference code).

    `0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2)`; `clip=None` is `0.5 (v - R)^2`. Metric `vf_clipfrac`: the
    clipped error is strictly larger.
    """
    on = jnp.asarray(mask).astype(bool)
    values, old_values, returns = _trained(on, values, old_values, returns)
    error = jnp.square(values - returns)
    if clip is None:
        return masking.select(0.5 * error, on), {"vf_clipfrac": jnp.zeros_like(error)}
    near = jnp.clip(values, old_values - clip, old_values + clip)
    clipped_error = jnp.square(near - returns)
    loss = 0.5 * jnp.maximum(error, clipped_error)
    return masking.select(loss, on), _detached({"vf_clipfrac": clipped_error > error}, on)


def _detached(metrics: Metrics, mask: jax.Array) -> Metrics:
    return {
        name: jax.lax.stop_gradient(masking.select(value, mask)) for name, value in metrics.items()
    }


POLICY_LOSSES: dict[str, Callable[..., tuple[jax.Array, Metrics]]] = {"ppo_clip": ppo_clip}
"""Policy losses by name."""
