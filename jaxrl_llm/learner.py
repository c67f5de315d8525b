"""Scoring and updating: pure, jitted functions over a batch of trajectories.

`make_score` and `make_values` read log-probs, entropies and values off fixed weights; `make_update` turns a loss over rows into
epochs x mini-batches x micro-batches inside one jit, with gradients accumulated in a scan. Denominators are counted over the
whole optimizer mini-batch, so that neither micro-batches nor devices nor padding rows change a gradient.

Left out on purpose: packed rows, correction weights between sampler and trainer, offload.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import masking, sharding
from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.algorithms import kl as kls
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, CriticKnobs
from jaxrl_llm.models import heads, transformer
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.optimizer import optimizer_count
from jaxrl_llm.records import AlgorithmState, Batch, ModelState, Params

Array = jax.Array

HEAD_ELEMENTS = 2**22
"""Logits that exist at once per micro-batch: the head runs over the sequence in chunks of at most this many elements."""


@dataclass(frozen=True)
class Network:
    """A model as the learner sees it: what to run, in which precision, on which mesh."""

    config: ModelConfig
    mesh: Mesh
    dtype: Any
    remat: bool

    def hidden(self, params: Params, rows: Batch) -> Array:
        """Hidden states `[R Tr D]` from which the response tokens are predicted."""
        constrain = sharding.make_constrain(self.mesh)
        out, _ = transformer.apply(
            self.config,
            params,
            rows.tokens,
            rows.positions,
            rows.segments,
            compute_dtype=self.dtype,
            remat=self.remat,
            constrain=constrain,
        )
        width = rows.mask.shape[1]
        return out[:, -width - 1 : -1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Per response token `[B Tr]`: log-prob and entropy at the sampling temperature, and the sum of squared probabilities."""

    logprobs: Array
    entropy: Array
    sum_pi_squared: Array


def head_chunk(rows: int, width: int, vocabulary: int) -> int:
    """Response columns whose logits are made at once."""
    return max(1, min(width, HEAD_ELEMENTS // max(1, rows * vocabulary)))


def token_scores(
    network: Network, params: Params, hidden: Array, targets: Array, temperature: Array
) -> Scores:
    """Log-probs of `targets [R Tr]`, entropies and sums of squared probabilities from `hidden [R Tr D]`.

    `softmax(logits / temperature)` in float32, chunk by chunk over the sequence and recomputed in the backward pass: `[R Tr V]`
    never exists once it is larger than `HEAD_ELEMENTS`.
    """
    rows, width, _ = hidden.shape
    chunk = head_chunk(rows, width, network.config.vocab_size)
    count = -(-width // chunk)
    pad = count * chunk - width

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, count, chunk, *x.shape[2:]), 1, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def one(piece: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        states, chosen = piece
        logits = heads.logits(network.config, params, states, compute_dtype=network.dtype)
        logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
        probs = jnp.exp(logprobs)
        picked = jnp.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
        return picked, -jnp.sum(probs * logprobs, axis=-1), jnp.sum(jnp.square(probs), axis=-1)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, count * chunk)[:, :width]

    pieces = (split(hidden), split(targets))
    if count == 1:
        parts = one(jax.tree.map(lambda x: x[0], pieces))
        return Scores(*(part[:, :width] for part in parts))
    return Scores(*(join(part) for part in jax.lax.map(one, pieces)))


def response_tokens(rows: Batch) -> Array:
    """The response ids `[R Tr]` of training rows."""
    return rows.tokens[:, -rows.mask.shape[1] :]


# Micro-batches -------------------------------------------------------------------------------------------------------


def split_rows(tree: Any, pieces: int, size: int, mesh: Mesh) -> Any:
    """Rows `[B ...]` as `[pieces, size, ...]`, filled up with zero rows, each piece spread over the data shards."""

    def one(x: Array) -> Array:
        missing = pieces * size - x.shape[0]
        x = jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))
        x = x.reshape(pieces, size, *x.shape[1:])
        return jax.lax.with_sharding_constraint(x, sharding.rows(mesh, axis=1))

    return jax.tree.map(one, tree)


def pieces_of(rows: int, per_device: int | None, mesh: Mesh) -> tuple[int, int]:
    """(number, size) of the micro-batches of `rows` trajectories; a size is a multiple of the data shards."""
    shards = sharding.shards(mesh)
    whole = -(-rows // shards)
    share = min(per_device or whole, whole)
    return -(-rows // (share * shards)), share * shards


def _over_pieces(
    fn: Callable[[Batch], Any], batch: Batch, per_device: int | None, mesh: Mesh
) -> Any:
    total = batch.tokens.shape[0]
    count, size = pieces_of(total, per_device, mesh)
    outputs = jax.lax.map(fn, split_rows(batch, count, size, mesh))

    def join(x: Array) -> Array:
        flat = x.reshape(count * size, *x.shape[2:])[:total]
        return jax.lax.with_sharding_constraint(flat, sharding.rows(mesh))

    return jax.tree.map(join, outputs)


def make_score(
    network: Network, micro_rows: int | None
) -> Callable[[Params, Batch, Array], Scores]:
    """A jitted `score(params, batch, temperature) -> Scores [B Tr]`, `micro_rows` trajectories per device at a time."""

    def score(params: Params, batch: Batch, temperature: Array) -> Scores:
        def one(rows: Batch) -> Scores:
            hidden = network.hidden(params, rows)
            return token_scores(network, params, hidden, response_tokens(rows), temperature)

        return _over_pieces(one, batch, micro_rows, network.mesh)

    return jax.jit(score)


def make_values(network: Network, micro_rows: int | None) -> Callable[[Params, Batch], Array]:
    """A jitted `values(critic_params, batch) -> [B Tr]`: the value before each response token."""

    def values(params: Params, batch: Batch) -> Array:
        def one(rows: Batch) -> Array:
            return heads.values(params["value_head"], network.hidden(params["trunk"], rows))

        return _over_pieces(one, batch, micro_rows, network.mesh)

    return jax.jit(values)


# Losses over rows ------------------------------------------------------------------------------------------------------

Sums = dict[str, Array]
LossFn = Callable[
    [Params, Batch, masking.Counts, Array, AlgorithmState], tuple[Array, tuple[Sums, Sums]]
]


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
        rows: Batch,
        counts: masking.Counts,
        group_tokens: Array,
        state: AlgorithmState,
    ) -> tuple[Array, tuple[Sums, Sums]]:
        hidden = network.hidden(params, rows)
        scores = token_scores(
            network, params, hidden, response_tokens(rows), jnp.float32(temperature)
        )
        fresh = jax.lax.stop_gradient(scores.logprobs)
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
            scores.logprobs,
            old,
            rows.advantages,
            rows.mask,
            clip_low=knobs.clip_ratio if knobs.clip_ratio_low is None else knobs.clip_ratio_low,
            clip_high=knobs.clip_ratio if knobs.clip_ratio_high is None else knobs.clip_ratio_high,
            clip_c=knobs.clip_ratio_c,
        )
        policy = aggregate(per_token)
        entropy = aggregate(scores.entropy)
        total = policy - knobs.entropy_coeff * entropy
        parts = {"pg_loss": policy, "entropy_loss": entropy}
        if knobs.use_kl_loss:
            kl = kls.estimate(
                scores.logprobs, rows.ref_logprobs, kind, old_logprobs=old, mask=rows.mask
            )
            term = aggregate(kl)
            total = total + state.kl_coef_loss * term
            parts["kl_loss"] = term
            metrics |= {
                "kl_k3_saturated": kls.saturated(scores.logprobs, rows.ref_logprobs, mask=rows.mask)
            }
        token_metrics = metrics | {"entropy": scores.entropy}
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
        rows: Batch,
        counts: masking.Counts,
        group_tokens: Array,
        state: AlgorithmState,
    ) -> tuple[Array, tuple[Sums, Sums]]:
        del state
        values = heads.values(params["value_head"], network.hidden(params["trunk"], rows))
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
    """How a batch of `prompts` x `group` trajectories is cut: passes, mini-batches of prompts, trajectories per device."""

    prompts: int
    group: int
    epochs: int
    mini_prompts: int
    micro_rows: int | None
    shuffle: bool = False

    @property
    def mini_batches(self) -> int:
        """Optimizer steps per pass."""
        return self.prompts // self.mini_prompts

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout."""
        return self.epochs * self.mini_batches


def make_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    plan: Plan,
    mesh: Mesh,
) -> Callable[[ModelState, Batch, AlgorithmState, Array], tuple[ModelState, dict[str, Array]]]:
    """A jitted `update(state, batch, algorithm, key) -> (state, metrics)`; `state` is donated.

    Runs `plan.epochs` passes of `plan.mini_batches` optimizer steps, each accumulating gradients over micro-batches. A step whose
    loss or gradient is not finite, or that has no trained token, is skipped by selection: parameters, moments and schedule stay bit for bit. Metrics are
    `[steps]` arrays in the order of the optimizer steps; means are over trained tokens of the mini-batch.
    """
    rows = plan.mini_prompts * plan.group
    count, size = pieces_of(rows, plan.micro_rows, mesh)

    def accumulate(params: Params, mini: Batch, algorithm: AlgorithmState) -> tuple[Any, Any, Any]:
        counts = masking.count(mini.mask, mini.group_ids, plan.prompts)
        per_group = masking.group_tokens(mini.mask, mini.group_ids, plan.prompts)
        micros, tokens = split_rows((mini, per_group), count, size, mesh)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

        def one(carry: Any, piece: tuple[Batch, Array]) -> tuple[Any, Any]:
            loss, grads = carry
            (part, (sums, maxima)), new = grad_fn(params, piece[0], counts, piece[1], algorithm)
            return (loss + part, jax.tree.map(jnp.add, grads, new)), (sums, maxima)

        start = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), (sums, maxima) = jax.lax.scan(one, start, (micros, tokens))
        totals = {name: jnp.sum(value) for name, value in sums.items()}
        metrics = {
            name.removeprefix("part/"): value if name.startswith("part/") else value / counts.tokens
            for name, value in totals.items()
        }
        metrics |= {name: jnp.max(value) for name, value in maxima.items()}
        return loss, grads, metrics

    def optimizer_step(carry: Any, mini: Batch) -> tuple[Any, dict[str, Array]]:
        state, algorithm = carry
        loss, grads, metrics = accumulate(state.trainable, mini, algorithm)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.any(mini.mask)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        moved = optax.apply_updates(state.trainable, updates)
        choose = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
        state = replace(
            state,
            trainable=choose(moved, state.trainable),
            opt_state=choose(opt_state, state.opt_state),
        )
        return (state, algorithm), metrics | {
            "loss": loss,
            "grad_norm": norm,
            "skipped": (~good).astype(jnp.float32),
            "lr": schedule(optimizer_count(carry[0].opt_state)),
        }

    def one_pass(carry: Any, key: Array) -> tuple[Any, dict[str, Array]]:
        state, algorithm, batch = carry
        minis = _mini_batches(batch, plan, key, mesh)
        (state, algorithm), metrics = jax.lax.scan(optimizer_step, (state, algorithm), minis)
        return (state, algorithm, batch), metrics

    def update(
        state: ModelState, batch: Batch, algorithm: AlgorithmState, key: Array
    ) -> tuple[ModelState, dict[str, Array]]:
        keys = jax.random.split(key, plan.epochs)
        (state, _, _), metrics = jax.lax.scan(one_pass, (state, algorithm, batch), keys)
        return state, jax.tree.map(lambda x: x.reshape(-1), metrics)

    return jax.jit(update, donate_argnums=0)


def _mini_batches(batch: Batch, plan: Plan, key: Array, mesh: Mesh) -> Batch:
    """`[B ...]` as `[mini-batches, rows, ...]`: prompts in order, or whole groups in a drawn order."""

    def one(x: Array, order: Array | None) -> Array:
        grouped = x.reshape(plan.prompts, plan.group, *x.shape[1:])
        if order is not None:
            grouped = grouped[order]
        minis = grouped.reshape(plan.mini_batches, plan.mini_prompts * plan.group, *x.shape[1:])
        whole = minis.shape[1] % sharding.shards(mesh) == 0
        placed = sharding.rows(mesh, axis=1) if whole else NamedSharding(mesh, PartitionSpec())
        return jax.lax.with_sharding_constraint(minis, placed)

    order = jax.random.permutation(key, plan.prompts) if plan.shuffle else None
    return jax.tree.map(partial(one, order=order), batch)


# Advantages ------------------------------------------------------------------------------------------------------------


def init_algorithm_state(reward_coef: float, loss_coef: float) -> AlgorithmState:
    """First KL coefficients of the two places, and an empty baseline."""
    return AlgorithmState(
        kl_coef_reward=jnp.float32(reward_coef),
        kl_coef_loss=jnp.float32(loss_coef),
        baseline=jnp.float32(0.0),
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
