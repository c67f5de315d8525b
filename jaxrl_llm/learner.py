"""Updating: losses over the rows of a micro-batch, and pure, jitted functions that take optimizer steps on them.

`make_update` turns a loss into epochs x mini-batches x micro-batches inside one jit, with gradients accumulated over as many
micro-batches as hold tokens. Denominators are counted over the whole optimizer mini-batch, so that neither micro-batches nor
packing nor devices change a gradient.

Left out on purpose: correction weights between sampler and trainer, offload of parts of a state.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import masking, packing, sharding
from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.algorithms import kl as kls
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, CriticKnobs
from jaxrl_llm.models import heads
from jaxrl_llm.optimizer import Placement, optimizer_count
from jaxrl_llm.packing import Packed
from jaxrl_llm.records import AlgorithmState, Batch, ModelState, Params
from jaxrl_llm.scoring import Network, micro_batch, token_scores

Array = jax.Array


# Losses over rows ------------------------------------------------------------------------------------------------------

Sums = dict[str, Array]
LossFn = Callable[
    [Params, Packed, Batch, masking.Counts, Array, AlgorithmState], tuple[Array, tuple[Sums, Sums]]
]
"""`loss(params, micro, rows, counts, group_tokens, state)`: the part that a micro-batch adds to the loss of its mini-batch.

`micro` is what the model reads, `rows` the batch rows `[R*A ...]` of its responses (unused ones masked)."""


def make_actor_loss(
    network: Network, knobs: ActorKnobs, temperature: float, on_policy: bool
) -> LossFn:
    """The policy's loss over rows: clipped surrogate + `kl_loss_coef` KL - `entropy_coeff` entropy, each aggregated alike.

    With `on_policy` (one optimizer step per rollout) the old log-probs are this forward's own, as they would be equal
    anyhow. Returns the partial loss of these rows, sums over trained tokens and maxima, for metrics.
    """
    kind = kls.canonical(knobs.kl_loss_type)

    def loss_fn(
        params: Params,
        micro: Packed,
        rows: Batch,
        counts: masking.Counts,
        group_tokens: Array,
        state: AlgorithmState,
    ) -> tuple[Array, tuple[Sums, Sums]]:
        scores = token_scores(
            network,
            params,
            network.slots(params, micro),
            micro.targets,
            jnp.float32(temperature),
            live=micro.slots,
            entropy="trained" if knobs.entropy_coeff else "reading",
        )
        back = partial(packing.to_rows, micro=micro, width=rows.mask.shape[1])
        assert scores.entropy is not None
        logprobs, entropies = back(scores.logprobs), back(scores.entropy)
        fresh = jax.lax.stop_gradient(logprobs)
        old = fresh if on_policy or rows.old_logprobs is None else rows.old_logprobs
        aggregate = partial(
            masking.aggregate,
            mask=rows.mask,
            mode=knobs.loss_agg_mode,
            counts=counts,
            scale=knobs.loss_scale_factor,
            group_tokens=group_tokens,
        )
        per_token, metrics = losses.POLICY_LOSSES["ppo_clip"](
            logprobs,
            old,
            rows.advantages,
            rows.mask,
            clip_low=knobs.clip_ratio if knobs.clip_ratio_low is None else knobs.clip_ratio_low,
            clip_high=knobs.clip_ratio if knobs.clip_ratio_high is None else knobs.clip_ratio_high,
            clip_c=knobs.clip_ratio_c,
        )
        policy = aggregate(per_token)
        entropy = aggregate(entropies)
        total = policy - knobs.entropy_coeff * entropy
        parts = {"pg_loss": policy, "entropy_loss": entropy}
        if knobs.use_kl_loss:
            kl = kls.estimate(logprobs, rows.ref_logprobs, kind, old_logprobs=old, mask=rows.mask)
            term = aggregate(kl)
            total = total + state.kl_coef_loss * term
            parts["kl_loss"] = term
            metrics |= {
                "kl_k3_saturated": kls.saturated(logprobs, rows.ref_logprobs, mask=rows.mask)
            }
        token_metrics = metrics | {"entropy": entropies}
        sums = {name: masking.masked_sum(value, rows.mask) for name, value in token_metrics.items()}
        gap = jnp.abs(fresh - rows.sampler_logprobs)
        ratio = jnp.abs(jnp.exp(jnp.clip(fresh - old, -20.0, 20.0)) - 1.0)
        sums["logprob_gap"] = masking.masked_sum(gap, rows.mask)
        maxima = {
            "logprob_gap_max": jnp.max(masking.select(gap, rows.mask)),
            "ratio_deviation_max": jnp.max(masking.select(ratio, rows.mask)),
        }
        sums |= {f"part/{name}": value for name, value in parts.items()}
        return total, jax.lax.stop_gradient((sums, maxima))

    return loss_fn


def make_critic_loss(network: Network, knobs: CriticKnobs) -> LossFn:
    """The critic's loss over rows: clipped squared error against the returns."""

    def loss_fn(
        params: Params,
        micro: Packed,
        rows: Batch,
        counts: masking.Counts,
        group_tokens: Array,
        state: AlgorithmState,
    ) -> tuple[Array, tuple[Sums, Sums]]:
        del state
        slots = heads.values(params["value_head"], network.slots(params["trunk"], micro))
        values = packing.to_rows(slots, micro, rows.mask.shape[1])
        per_token, metrics = losses.value_loss(
            values, rows.values, rows.returns, rows.mask, clip=knobs.cliprange_value
        )
        total = masking.aggregate(
            per_token, rows.mask, knobs.loss_agg_mode, counts=counts, group_tokens=group_tokens
        )
        sums = {name: masking.masked_sum(value, rows.mask) for name, value in metrics.items()}
        sums["vpred_mean"] = masking.masked_sum(values, rows.mask)
        sums["part/vf_loss"] = total
        return total, (jax.lax.stop_gradient(sums), {})

    return loss_fn


# Update ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How a batch of `prompts` is learned from: passes, and optimizer mini-batches of `mini_prompts`; `shuffle` draws new ones
    in every pass."""

    prompts: int
    epochs: int
    mini_prompts: int
    shuffle: bool = False

    @property
    def mini_batches(self) -> int:
        """Optimizer steps per pass."""
        return self.prompts // self.mini_prompts

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout."""
        return self.epochs * self.mini_batches

    @property
    def passes(self) -> int:
        """Different orders of the prompts."""
        return self.epochs if self.shuffle and self.mini_batches > 1 else 1


def rows_of(batch: Batch, where: Array) -> Batch:
    """The batch rows `where [N]`; indices past the end give rows without a trained token."""
    last = batch.mask.shape[0] - 1
    rows = jax.tree.map(lambda x: x[jnp.minimum(where, last)], batch)
    return replace(rows, mask=rows.mask & (where <= last)[:, None])


def _make_accumulate(
    loss_fn: LossFn, plan: Plan, mesh: Mesh, accumulate_in: str
) -> Callable[..., tuple[Array, Params, dict[str, Array], Array]]:
    """`accumulate(params, mini, batch, packed, algorithm)`: loss, gradient and metrics of a mini-batch, summed over as many
    micro-batches as hold tokens, and whether it has a trained token at all."""
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulate(
        params: Params, mini: Array, batch: Batch, packed: Packed, algorithm: AlgorithmState
    ) -> tuple[Any, Any, Any, Array]:
        members = packed.members[mini]
        mask, groups = batch.mask[members], batch.group_ids[members]
        counts = masking.count(mask, groups, plan.prompts)
        per_row = jnp.zeros(batch.mask.shape[:1]).at[members]
        group_tokens = per_row.set(masking.group_tokens(mask, groups, plan.prompts))

        def one(index: Array) -> Any:
            micro = micro_batch(packed, mini, index, mesh)
            where = micro.rows.reshape(-1)
            rows, tokens = rows_of(batch, where), group_tokens.at[where].get(mode="clip")
            (part, (sums, maxima)), grads = grad_fn(params, micro, rows, counts, tokens, algorithm)
            grads = jax.tree.map(lambda x: x.astype(accumulate_in), grads)
            return (part, grads, sums), maxima

        def more(index: Array, carry: Any) -> Any:
            (added, largest), (more_added, more_largest) = carry, one(index)
            return jax.tree.map(jnp.add, added, more_added), jax.tree.map(
                jnp.maximum, largest, more_largest
            )

        if packed.tokens.shape[1] == 1:
            (loss, grads, sums), maxima = one(jnp.int32(0))
        else:
            shapes = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (loss, grads, sums), maxima = jax.lax.fori_loop(0, packed.micros[mini], more, zeros)
        metrics = {
            name.removeprefix("part/"): value if name.startswith("part/") else value / counts.tokens
            for name, value in sums.items()
        }
        grads = jax.tree.map(lambda x, like: x.astype(like.dtype), grads, params)
        return loss, grads, metrics | maxima, jnp.any(mask)

    return accumulate


def make_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    plan: Plan,
    mesh: Mesh,
    *,
    accumulate_in: str = "float32",
    placement: Placement | None = None,
) -> Callable[[ModelState, Batch, Packed, AlgorithmState], tuple[ModelState, dict[str, Array]]]:
    """A jitted `update(state, batch, packed, algorithm) -> (state, metrics)`; `state` is donated.

    Runs `plan.epochs` passes of `plan.mini_batches` optimizer steps, each accumulating gradients over its micro-batches. A step
    whose loss or gradient is not finite, or that has no trained token, is skipped by selection: parameters, moments and
    schedule stay bit for bit. Metrics are `[steps]` arrays in the order of the optimizer steps; means are over trained tokens of
    the mini-batch. Gradients are summed over micro-batches in the format `accumulate_in`. With `placement`, what is kept in host
    memory comes to the devices for the update and goes back.
    """
    accumulate = _make_accumulate(loss_fn, plan, mesh, accumulate_in)

    def optimizer_step(
        state: ModelState, mini: Array, batch: Batch, packed: Packed, algorithm: AlgorithmState
    ) -> tuple[ModelState, dict[str, Array]]:
        loss, grads, metrics, some = accumulate(state.trainable, mini, batch, packed, algorithm)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & some
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        moved = optax.apply_updates(state.trainable, updates)
        choose = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
        moved, opt_state = choose((moved, opt_state), (state.trainable, state.opt_state))
        return replace(state, trainable=moved, opt_state=opt_state), metrics | {
            "loss": loss,
            "grad_norm": norm,
            "skipped": (~good).astype(jnp.float32),
            "lr": schedule(optimizer_count(state.opt_state)),
        }

    def update(
        state: ModelState, batch: Batch, packed: Packed, algorithm: AlgorithmState
    ) -> tuple[ModelState, dict[str, Array]]:
        def step(state: ModelState, number: Array) -> tuple[ModelState, dict[str, Array]]:
            mini = number % packed.members.shape[0]
            return optimizer_step(state, mini, batch, packed, algorithm)

        if placement is None:
            return jax.lax.scan(step, state, jnp.arange(plan.optimizer_steps))
        state, metrics = jax.lax.scan(
            step, sharding.move(state, placement.work), jnp.arange(plan.optimizer_steps)
        )
        return sharding.move(state, placement.home), metrics

    if placement is None:
        return jax.jit(update, donate_argnums=0)
    return jax.jit(
        update, donate_argnums=0, out_shardings=(placement.home, sharding.replicated(mesh))
    )


# Advantages ------------------------------------------------------------------------------------------------------------


def init_algorithm_state(reward_coef: float, loss_coef: float) -> AlgorithmState:
    """First KL coefficients of the two places, and an empty baseline; host numbers."""
    return AlgorithmState(
        kl_coef_reward=np.float32(reward_coef),
        kl_coef_loss=np.float32(loss_coef),
        baseline=np.float32(0.0),
    )


def make_advantages(
    knobs: AlgorithmKnobs, *, prompts: int, kl_loss_type: str | None
) -> Callable[[Batch, AlgorithmState], tuple[Batch, AlgorithmState, dict[str, Array]]]:
    """A jitted `prepare(batch, algorithm) -> (batch, algorithm, metrics)`: rewards, KL penalty, advantages, controllers.

    The reward of a response sits on its last trained token; with `use_kl_in_reward` every trained token pays the KL penalty
    first. Statistics are over the whole batch, whatever the mesh. Adaptive controllers move after their coefficient has been
    used. `kl_loss_type` names the loss-side estimator, `None` when there is no KL loss.
    """

    def prepare(
        batch: Batch, state: AlgorithmState
    ) -> tuple[Batch, AlgorithmState, dict[str, Array]]:
        metrics: dict[str, Array] = {}
        rewards = advantages.token_rewards_from_scores(batch.scores, batch.mask, valid=batch.valid)
        old = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        responses = jnp.sum(jnp.any(batch.mask, axis=1))
        adapt = partial(
            kls.adapt,
            n=responses,
            target=knobs.kl_ctrl.target_kl,
            horizon=knobs.kl_ctrl.horizon,
        )
        coef_reward, coef_loss = state.kl_coef_reward, state.kl_coef_loss
        if knobs.use_kl_in_reward:
            kind = kls.canonical(knobs.kl_penalty)
            rewards, kl = kls.penalize(
                rewards, old, batch.ref_logprobs, batch.mask, coef=coef_reward, kind=kind
            )
            measured = kls.mean_sequence_kl(kl, batch.mask)
            metrics |= {
                "actor/reward_kl_penalty": measured,
                "actor/reward_kl_penalty_coeff": coef_reward,
            }
            if knobs.kl_ctrl.type == "adaptive":
                coef_reward = adapt(coef_reward, measured)
        if kl_loss_type is not None:
            metrics["actor/kl_coef"] = coef_loss
            if knobs.kl_ctrl.type == "adaptive":
                kl = kls.estimate(
                    old,
                    batch.ref_logprobs,
                    kls.canonical(kl_loss_type),
                    old_logprobs=old,
                    mask=batch.mask,
                )
                coef_loss = adapt(coef_loss, kls.mean_sequence_kl(kl, batch.mask))
        batch = replace(batch, token_rewards=rewards)
        values, returns, state = advantages.ADVANTAGES[knobs.adv_estimator](
            batch, knobs, state, num_groups=prompts
        )
        state = replace(state, kl_coef_reward=coef_reward, kl_coef_loss=coef_loss)
        return replace(batch, advantages=values, returns=returns), state, metrics

    return jax.jit(prepare)
