"""KL estimators from log-probs of sampled tokens, the penalty inside the reward, and the adaptive coefficient.

Which one where (Schulman 2020, "Approximating KL divergence"; Tang and Munos 2025, arXiv:2506.09477). As a *number*, k1 and k3
are unbiased for `KL(policy || ref)` on samples of the policy. As a *loss* they differ: on-policy, the expected gradient of k1
is 0, that of k3 is the gradient of `KL(ref || policy)`, and k2's is the gradient of `KL(policy || ref)`. Hence the `+` forms: the
forward value of one with the gradient of k2.

Left out on purpose: `full`, the sum over the vocabulary; it needs logits, which never exist as one array, and belongs where
they are made, chunk by chunk.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrl_llm import masking
from jaxrl_llm.algorithms.names import canonical
from jaxrl_llm.errors import ConfigError

__all__ = ["adapt", "canonical", "estimate", "mean_sequence_kl", "penalize", "saturated"]

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def _k1(x: jax.Array) -> jax.Array:
    return x


def _abs(x: jax.Array) -> jax.Array:
    # `jnp.abs` has slope 1 at 0, where policy and reference agree and nothing should move.
    return x * jax.lax.stop_gradient(jnp.sign(x))


def _k2(x: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(x)


def _k3_unclipped(x: jax.Array) -> jax.Array:
    y = jnp.clip(-x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.expm1(y) - y


def _k3(x: jax.Array) -> jax.Array:
    return jnp.clip(_k3_unclipped(x), -K3_LIMIT, K3_LIMIT)


_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": _abs,
}


def estimate(
    logprobs: ArrayLike,
    ref_logprobs: ArrayLike,
    kind: str,
    *,
    old_logprobs: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Estimate per token of `KL(policy || ref)` from sampled tokens, in nats, `[B T]`.

    With `x = logprobs - ref_logprobs`: `k1` is `x`; `abs` is `|x|`; `k2` is `x^2 / 2`; `k3` is `clip(e^y - y - 1, -10, 10)` with `y =
    clip(-x, -20, 20)`, clipped before the exponential, so value and gradient are finite for any ratio (its gradient is 0 once
    saturated, see `saturated`). A trailing `+` keeps the value and takes the gradient of k2. `k3_unbiased` needs `old_logprobs`:
    value `r k3` (k3 without the limit of 10) with `r = exp(clip(logprobs - old_logprobs, -20, 20))`, gradient `r x grad(logprobs)`, the
    unbiased gradient of the KL. verl's names are accepted.

    With `mask [B T]` masked slots are selected out first and give 0: pass it wherever a gradient is taken, because a NaN in a
    masked slot otherwise meets the derivative of the square. An unknown kind raises `ConfigError`.
    """
    name = canonical(kind)
    new, ref = _selected(mask, logprobs, ref_logprobs)
    x = new - ref
    if name == "k3_unbiased":
        if old_logprobs is None:
            raise ConfigError(
                "KL estimator 'k3_unbiased' got no old_logprobs, needs them per token: pass them"
            )
        (old,) = _selected(mask, old_logprobs)
        return _k3_unbiased(new, x, new - old)
    value = _ESTIMATORS[name.removesuffix("+")](x)
    return _straight(value, _k2(x)) if name.endswith("+") else value


def _straight(value: jax.Array, gradient_of: jax.Array) -> jax.Array:
    """The value of the first with the gradient of the second; the difference added is exactly 0."""
    return jax.lax.stop_gradient(value) + (gradient_of - jax.lax.stop_gradient(gradient_of))


def _k3_unbiased(logprobs: jax.Array, x: jax.Array, log_ratio: jax.Array) -> jax.Array:
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return _straight(ratio * _k3_unclipped(x), jax.lax.stop_gradient(ratio * x) * logprobs)


def _selected(mask: ArrayLike | None, *arrays: ArrayLike) -> list[jax.Array]:
    floats = [masking.as_float(array) for array in arrays]
    chex.assert_equal_shape(floats)
    if mask is None:
        return floats
    chex.assert_equal_shape([floats[0], jnp.asarray(mask)])
    return [masking.select(array, mask) for array in floats]


def saturated(
    logprobs: ArrayLike, ref_logprobs: ArrayLike, *, mask: ArrayLike | None = None
) -> jax.Array:
    """1 where k3 is at its limit and so pulls no more, else 0, `[B T]`; its masked mean is worth a metric."""
    new, ref = _selected(mask, logprobs, ref_logprobs)
    return jax.lax.stop_gradient(masking.as_float(_k3_unclipped(new - ref) >= K3_LIMIT))


def penalize(
    token_rewards: ArrayLike,
    old_logprobs: ArrayLike,
    ref_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    coef: ArrayLike,
    kind: str,
) -> tuple[jax.Array, jax.Array]:
    """`token_rewards - coef kl` and `kl`, both `[B T]` and 0 where masked (Ziegler et al. 2019, arXiv:1909.08593).

    The KL place *inside the reward*, before advantages; the other place, a loss term, is `estimate`. No gradient flows.
    """
    kl = estimate(old_logprobs, ref_logprobs, kind, old_logprobs=old_logprobs, mask=mask)
    kl = jax.lax.stop_gradient(masking.select(kl, mask))
    rewards = masking.select(token_rewards, mask)
    chex.assert_equal_shape([rewards, kl])
    return rewards - coef * kl, kl


def mean_sequence_kl(kl: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Mean over sequences of the sequence's mean KL over its trained tokens; sequences without any do not count."""
    trained = jnp.any(jnp.asarray(mask).astype(bool), axis=1)
    return masking.masked_mean(masking.masked_mean(kl, mask, axis=1), trained)


def adapt(
    coef: ArrayLike, kl: ArrayLike, n: ArrayLike, *, target: float, horizon: float
) -> jax.Array:
    """The next KL coefficient of the proportional controller (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    `coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)`; `kl` in nats per token (`mean_sequence_kl`), `n` the number of responses
    it was measured on. A step uses the coefficient from before its own update.
    """
    coef, kl = masking.as_float(coef), masking.as_float(kl)
    error = jnp.clip(kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * n / horizon)
