"""Advantage estimators: pure kernels, and the table `ADVANTAGES` of adapters with one common signature.

Group statistics count a prompt's responses wherever they live on the mesh: kernels see whole arrays, so a group split over
shards gives the same advantages as one device. Rows that are not `valid` are selected out before arithmetic and get 0.

Left out on purpose: judging scores. Which rows are valid is decided once, where rewards are collected; a NaN in a valid row
stays visible. Not yet here: V-trace, length-adaptive lambda, pass@k, REINFORCE and its relatives, OPO, GPG, GDPO, optimal
token baselines.
"""

from typing import Protocol

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrl_llm import masking
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.algorithm import AlgorithmKnobs
from jaxrl_llm.records import AlgorithmState, Array, Batch

SINGLETONS = ("zero", "score")


def token_rewards_from_scores(
    scores: ArrayLike, mask: ArrayLike, *, valid: ArrayLike | None = None
) -> jax.Array:
    """Outcome scores `[B]` as token rewards `[B T]`: the score sits on the last trained token of its row, 0 elsewhere.

    Rows without trained tokens get no reward, and so do invalid rows: those with `valid [B]` false or, where `valid` is not
    given, with a score that is not finite.
    """
    scores, on = masking.as_float(scores), jnp.asarray(mask).astype(bool)
    chex.assert_rank([scores, on], [1, 2])
    chex.assert_equal_shape_prefix([scores, on], 1)
    ok = jnp.isfinite(scores) if valid is None else jnp.asarray(valid).astype(bool)
    columns = jnp.arange(on.shape[1])
    last = jnp.max(jnp.where(on, columns, -1), axis=1, initial=-1)
    return masking.select(scores[:, None], (columns == last[:, None]) & ok[:, None])


def gae(
    token_rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: float,
    lam: ArrayLike,
    bootstrap: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438): `(advantages, returns)`, both `[B T]`.

    Backwards in time `d_t = r_t + gamma V' - V_t`, `A_t = d_t + gamma lam A'`, where `V'` and `A'` are those of the next *trained*
    token: masked positions (padding, tool output) pass them through unchanged, their rewards never count, and both outputs
    are 0 there. After the last token `A' = 0` and `V' = bootstrap [B]`, the value of the state in which a truncated response
    stopped (default 0). `returns = A + V`. `lam` is a number or `[B]`. `lam = 1` without bootstrap is the discounted sum of
    rewards minus the value. Advantages are not whitened here.
    """
    values, on = masking.as_float(values), jnp.asarray(mask).astype(bool)
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([jnp.asarray(token_rewards), values, on])
    rewards, values = masking.select(token_rewards, on), masking.select(values, on)
    rows = values.shape[0]
    lam = jnp.broadcast_to(jnp.asarray(lam, values.dtype), (rows,))
    after = jnp.zeros(rows) if bootstrap is None else jnp.asarray(bootstrap)
    chex.assert_shape(after, (rows,))

    def back(carry, now):
        next_value, next_advantage = carry
        reward, value, trained = now
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        carry = (
            jnp.where(trained, value, next_value),
            jnp.where(trained, advantage, next_advantage),
        )
        return carry, jnp.where(trained, advantage, 0.0)

    start = (after.astype(values.dtype), jnp.zeros(rows, values.dtype))
    _, columns = jax.lax.scan(back, start, (rewards.T, values.T, on.T), reverse=True)
    advantages = columns.T
    return advantages, masking.select(advantages + values, on)


def _centred(
    scores: ArrayLike, group_ids: ArrayLike, num_groups: int, valid: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Scores, `score - group mean`, the group's valid rows (both per row, 0 for invalid rows) and which rows are valid.

    Scores are first shifted by the largest of their group: equal scores are then equal to their mean to the last bit, and
    close scores keep their differences.
    """
    scores, groups = masking.as_float(scores), jnp.asarray(group_ids)
    chex.assert_rank([scores, groups], 1)
    chex.assert_equal_shape([scores, groups])
    ok = jnp.ones(scores.shape, bool) if valid is None else jnp.asarray(valid).astype(bool)
    chex.assert_equal_shape([scores, ok])
    scores = masking.select(scores, ok)
    rows = masking.group_sum(ok.astype(scores.dtype), groups, num_groups)
    top = masking.group_max(jnp.where(ok, scores, -jnp.inf), groups, num_groups)
    top = jax.lax.stop_gradient(jnp.where(rows > 0, top, 0.0))
    shifted = masking.select(scores - top[groups], ok)
    mean = masking.group_sum(shifted, groups, num_groups) / jnp.maximum(rows, 1.0)
    return scores, masking.select(shifted - mean[groups], ok), rows[groups], ok


def _with_singletons(
    several: jax.Array, single: jax.Array, rows: jax.Array, ok: jax.Array, singleton: str
) -> jax.Array:
    """`several` where the group has two valid rows or more; else 0 (`zero`) or `single` (`score`)."""
    if singleton not in SINGLETONS:
        raise ConfigError(f"singleton got {singleton!r}, needs one of {', '.join(SINGLETONS)}")
    alone = single if singleton == "score" else jnp.zeros_like(single)
    return masking.select(jnp.where(rows > 1, several, alone), ok)


def group_relative(
    scores: ArrayLike,
    group_ids: ArrayLike,
    *,
    num_groups: int,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
    valid: ArrayLike | None = None,
    singleton: str = "zero",
) -> jax.Array:
    """GRPO's advantage `[B]` (Shao et al. 2024, arXiv:2402.03300): `(score - mean) / (std + eps)` within the group.

    `std` has ddof 1 and takes a second pass. `normalize_by_std=False` is Dr.GRPO (Liu et al. 2025, arXiv:2503.20783). `group_ids
    [B]` lie in `0 .. num_groups - 1`, in any order. Only `valid` rows enter; others get 0. Equal scores give exactly 0. A group of
    one gives 0, or with `singleton="score"` its score over `1 + eps` (baseline 0, std 1: parity tests only).
    """
    scores, deviations, rows, ok = _centred(scores, group_ids, num_groups, valid)
    if not normalize_by_std:
        return _with_singletons(deviations, scores, rows, ok, singleton)
    squares = masking.group_sum(jnp.square(deviations), group_ids, num_groups)[group_ids]
    variance = squares / jnp.maximum(rows - 1.0, 1.0)
    # The root of 0 has an infinite slope, which would turn a gradient of 0 into NaN.
    spread = variance > 0
    std = jnp.where(spread, jnp.sqrt(jnp.where(spread, variance, 1.0)), 0.0)
    return _with_singletons(deviations / (std + eps), scores / (1.0 + eps), rows, ok, singleton)


def leave_one_out(
    scores: ArrayLike,
    group_ids: ArrayLike,
    *,
    num_groups: int,
    valid: ArrayLike | None = None,
    singleton: str = "zero",
) -> jax.Array:
    """RLOO's advantage `[B]` (Ahmadian et al. 2024, arXiv:2402.14740): score minus the mean of the group's other samples.

    Computed as `n / (n - 1) (score - mean)`. Only `valid` rows enter; others get 0. Equal scores give exactly 0. A group of one
    gives 0, or with `singleton="score"` its score (parity tests only).
    """
    scores, deviations, rows, ok = _centred(scores, group_ids, num_groups, valid)
    several = deviations * (rows / jnp.maximum(rows - 1.0, 1.0))
    return _with_singletons(several, scores, rows, ok, singleton)


class AdvantageFn(Protocol):
    """One entry of `ADVANTAGES`.

    `batch` needs `token_rewards`, `mask`, `valid` and `group_ids` (`gae`: `values` too, and `bootstrap` where responses are
    truncated). `token_rewards` already carry the reward-side KL penalty. `num_groups` is static. Returns `(advantages [B T],
    returns [B T] | None, state)`.
    """

    def __call__(
        self, batch: Batch, knobs: AlgorithmKnobs, state: AlgorithmState, *, num_groups: int
    ) -> tuple[jax.Array, jax.Array | None, AlgorithmState]: ...


def _need(batch: Batch, field: str, estimator: str, do: str) -> Array:
    value = getattr(batch, field)
    if value is None:
        raise ConfigError(f"adv_estimator {estimator!r} got no {field}, needs them per token: {do}")
    return value


def _gae(
    batch: Batch, knobs: AlgorithmKnobs, state: AlgorithmState, *, num_groups: int
) -> tuple[jax.Array, jax.Array, AlgorithmState]:
    """`gae`, advantages whitened over the global batch, returns as they are.

    Invalid rows stay out of the whitening; their advantages are 0 and their returns the old values: no pull on either network.
    """
    del num_groups
    rewards = _need(batch, "token_rewards", "gae", "fill them from the scores")
    values = _need(batch, "values", "gae", "run the critic first")
    trained = jnp.asarray(batch.mask).astype(bool)
    usable = trained & jnp.asarray(batch.valid).astype(bool)[:, None]
    advantages, returns = gae(
        rewards, values, usable, gamma=knobs.gamma, lam=knobs.lam, bootstrap=batch.bootstrap
    )
    returns = jnp.where(usable, returns, masking.select(values, trained))
    return masking.whiten(advantages, usable), returns, state


def _on_tokens(rows: jax.Array, mask: ArrayLike) -> jax.Array:
    return masking.select(rows[:, None], mask)


def _grpo(
    batch: Batch, knobs: AlgorithmKnobs, state: AlgorithmState, *, num_groups: int
) -> tuple[jax.Array, None, AlgorithmState]:
    """`group_relative` of the rows' summed rewards, on every trained token."""
    rewards = _need(batch, "token_rewards", "grpo", "fill them from the scores")
    rows = group_relative(
        masking.masked_sum(rewards, batch.mask, axis=1),
        batch.group_ids,
        num_groups=num_groups,
        normalize_by_std=knobs.norm_adv_by_std_in_grpo,
        eps=knobs.group_eps,
        valid=batch.valid,
    )
    return _on_tokens(rows, batch.mask), None, state


def _rloo(
    batch: Batch, knobs: AlgorithmKnobs, state: AlgorithmState, *, num_groups: int
) -> tuple[jax.Array, None, AlgorithmState]:
    """`leave_one_out` of the rows' summed rewards, on every trained token."""
    del knobs
    rewards = _need(batch, "token_rewards", "rloo", "fill them from the scores")
    rows = leave_one_out(
        masking.masked_sum(rewards, batch.mask, axis=1),
        batch.group_ids,
        num_groups=num_groups,
        valid=batch.valid,
    )
    return _on_tokens(rows, batch.mask), None, state


ADVANTAGES: dict[str, AdvantageFn] = {"gae": _gae, "grpo": _grpo, "rloo": _rloo}
"""Advantage estimators by `algorithm.adv_estimator`."""
