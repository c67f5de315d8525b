"""Correction for a sampler whose log-probs differ from the trainer's: weights, rejection, diagnostics.

`q = old_logprobs - sampler_logprobs` per token. Weights multiply the per-token loss (`losses.weigh`), and rejected tokens leave
numerator and denominators: intersect the mask with `keep` before counting. Give whole rollout batches: the normalisation and
the diagnostics are over all trained tokens.

Left out on purpose: perplexities and chi-square numbers, functions of the same differences.
"""

from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrl_llm import masking
from jaxrl_llm.errors import ConfigError

LOG_RATIO_LIMIT = 20.0

Threshold = float | tuple[float, float]


def _log_ratio(old_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: jax.Array) -> jax.Array:
    """`q [B T]`, not clipped, 0 where masked."""
    old, sampler = masking.select(old_logprobs, mask), masking.select(sampler_logprobs, mask)
    chex.assert_rank(mask, 2)
    chex.assert_equal_shape([old, sampler, mask])
    return jax.lax.stop_gradient(old - sampler)


def _bounded(q: jax.Array) -> jax.Array:
    return jnp.clip(q, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


_LEVELS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "token": lambda q, on: q,
    "sequence": lambda q, on: masking.masked_sum(q, on, axis=1)[:, None],
    "geometric": lambda q, on: masking.masked_mean(q, on, axis=1)[:, None],
}


def weights(
    old_logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    level: str,
    high: float,
    low: float | None = None,
    batch_normalize: bool = False,
) -> jax.Array:
    """Importance weights of trainer over sampler, `[B T]`, without gradient, 0 where masked.

    `level`: `token` is `e^q`, `sequence` is `e^{sum q}`, `geometric` is `e^{mean q}` (sum and mean over the row's trained tokens),
    exponents clipped to +-20. With `high` alone weights are truncated at it (TIS); with `low` too they are 0 outside `low ..
    high`, bounds inclusive (MIS, IcePop). `batch_normalize` then divides by the mean weight: over trained tokens for `token`,
    else over rows having any. `geometric` is biased: its expectation is not 1. If every weight is 0 nothing is divided.
    """
    if level not in _LEVELS:
        raise ConfigError(f"correction level got {level!r}, needs one of {', '.join(_LEVELS)}")
    on = jnp.asarray(mask).astype(bool)
    q = _log_ratio(old_logprobs, sampler_logprobs, on)
    weight = jnp.broadcast_to(jnp.exp(_bounded(_LEVELS[level](q, on))), q.shape)
    if low is None:
        weight = jnp.minimum(weight, high)
    else:
        weight = jnp.where((weight >= low) & (weight <= high), weight, 0.0)
    if batch_normalize:
        mean = masking.masked_mean(weight, on)
        if level != "token":
            mean = masking.masked_mean(weight[:, 0], jnp.any(on, axis=1))
        weight = weight / jnp.where(mean > 0, mean, 1.0)
    return masking.select(weight, on)


_STATISTICS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": lambda q: -q,
    "k2": lambda q: 0.5 * jnp.square(q),
    "k3": lambda q: jnp.expm1(q) - q,
}

_SCOPES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "token": lambda stat, on: stat,
    "seq_sum": lambda stat, on: masking.masked_sum(stat, on, axis=1)[:, None],
    "seq_mean": lambda stat, on: masking.masked_mean(stat, on, axis=1)[:, None],
    "seq_max": lambda stat, on: jnp.max(masking.select(stat, on), axis=1, initial=0.0)[:, None],
}


def keep(
    old_logprobs: ArrayLike,
    sampler_logprobs: ArrayLike,
    mask: ArrayLike,
    rules: Sequence[tuple[str, Threshold]],
) -> jax.Array:
    """Trained tokens that every rejection rule keeps, `[B T]` bool; no rule keeps the whole mask.

    A rule is `(SCOPE_STATISTIC, threshold)`. Scopes: `token`, `seq_sum`, `seq_mean`, `seq_max` (a sequence rule keeps or rejects the
    row). Statistics per token, `q` clipped to +-20: `k1 = -q`, kept if `low <= e^stat <= high`, one number `h` meaning `1/h .. h`, no
    `seq_max`; `k2 = q^2 / 2` and `k3 = e^q - q - 1`, kept if `stat <= h`. Raises `ConfigError` with all faulty rules.
    """
    _check(rules)
    on = jnp.asarray(mask).astype(bool)
    q = _bounded(_log_ratio(old_logprobs, sampler_logprobs, on))
    kept = on
    for name, threshold in rules:
        scope, statistic = name.rsplit("_", 1)
        value = _SCOPES[scope](_STATISTICS[statistic](q), on)
        if statistic == "k1":
            value = jnp.exp(_bounded(value))
        low, high = _range(statistic, threshold)
        kept = kept & (value >= low) & (value <= high)
    return kept


def _range(statistic: str, threshold: Threshold) -> tuple[float, float]:
    if isinstance(threshold, tuple):
        return threshold
    return (1 / threshold if statistic == "k1" else float("-inf"), threshold)


def _check(rules: Sequence[tuple[str, Threshold]]) -> None:
    known = [f"{a}_{b}" for a in _SCOPES for b in _STATISTICS if (a, b) != ("seq_max", "k1")]
    problems = []
    for name, threshold in rules:
        ratio = name.endswith("_k1")
        if name not in known:
            problems.append(f"rejection rule got {name!r}, needs one of {', '.join(known)}")
        elif isinstance(threshold, tuple):
            if not ratio:
                problems.append(f"rejection rule {name} got {threshold}, needs one upper bound")
            elif not 0 < threshold[0] <= threshold[1]:
                problems.append(f"rejection rule {name} got {threshold}, needs 0 < low <= high")
        elif ratio and not threshold >= 1:
            problems.append(f"rejection rule {name} got {threshold}, needs a number of 1 or more")
    if problems:
        raise ConfigError(problems)


def effective_sample_size(weights: ArrayLike, mask: ArrayLike) -> jax.Array:
    """`mean(w)^2 / mean(w^2)` over trained tokens: 1 for equal weights, near 0 when few tokens carry all; 0 if there are none."""
    second = masking.masked_mean(jnp.square(masking.select(weights, mask)), mask)
    first = jnp.square(masking.masked_mean(weights, mask))
    return jnp.where(second > 0, first / jnp.where(second > 0, second, 1.0), 0.0)


def diagnostics(
    old_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike
) -> dict[str, jax.Array]:
    """How far the sampler is from the trainer, as scalars over all trained tokens; all 0 for an all-masked batch.

    `abs_mean`, `abs_p99` (nearest rank), `abs_max`: of `|q|`, in nats, not clipped. `ess`: effective sample size of the token weights `e^q`.
    `prob_diff_mean`, `prob_diff_max`: of `|e^old - e^sampler|`. `kl = mean(-q)` and `k3_kl = mean(e^q - q - 1)`: estimates of `KL(sampler ||
    trainer)`. `seq_diff_mean`, `seq_diff_abs_mean`, `seq_diff_max`, `seq_diff_min`: of the rows' mean of `-q`.
    """
    on = jnp.asarray(mask).astype(bool)
    q = _log_ratio(old_logprobs, sampler_logprobs, on)
    size = jnp.abs(q)
    tokens, rows = jnp.sum(on), jnp.any(on, axis=1)
    ranked = jnp.sort(jnp.where(on, size, jnp.inf), axis=None)
    p99 = ranked[jnp.maximum(tokens - tokens // 100 - 1, 0)]
    old, sampler = masking.select(old_logprobs, on), masking.select(sampler_logprobs, on)
    gap = masking.select(jnp.abs(jnp.exp(old) - jnp.exp(sampler)), on)
    row = masking.masked_mean(-q, on, axis=1)
    some = jnp.any(rows)
    numbers = {
        "abs_mean": masking.masked_mean(size, on),
        "abs_p99": jnp.where(some, p99, 0.0),
        "abs_max": jnp.max(size),
        "ess": effective_sample_size(jnp.exp(_bounded(q)), on),
        "prob_diff_mean": masking.masked_mean(gap, on),
        "prob_diff_max": jnp.max(gap),
        "kl": masking.masked_mean(-q, on),
        "k3_kl": masking.masked_mean(_STATISTICS["k3"](_bounded(q)), on),
        "seq_diff_mean": masking.masked_mean(row, rows),
        "seq_diff_abs_mean": masking.masked_mean(jnp.abs(row), rows),
        "seq_diff_max": jnp.where(some, jnp.max(jnp.where(rows, row, -jnp.inf)), 0.0),
        "seq_diff_min": jnp.where(some, jnp.min(jnp.where(rows, row, jnp.inf)), 0.0),
    }
    return jax.lax.stop_gradient(numbers)
