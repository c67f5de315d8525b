"""The learner: log-probs by hand, gradients that no split changes, skipped steps, donation, schedules, buffers."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import learner, masking, scoring, sharding
from jaxrl_llm import optimizer as optimizer_module
from jaxrl_llm.algorithms import kl as kls
from jaxrl_llm.algorithms import losses
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, CriticKnobs, KLControlKnobs, OptimKnobs
from jaxrl_llm.models import heads, transformer
from tests import tiny

MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
    "prompt-mean",
)


class Kept(NamedTuple):
    """The state of `keep_gradient`: the last gradient, and a count as every optimizer here has."""

    gradient: dict
    count: jax.Array


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer that moves nothing and keeps the gradient: differences of parameters would lose its last digits."""

    def init(params):
        return Kept(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(gradient, state, params=None):
        return jax.tree.map(jnp.zeros_like, gradient), Kept(gradient, state.count + 1)

    return optax.GradientTransformation(init, update)


def plan(**changes):
    base = learner.Plan(prompts=4, epochs=1, mini_prompts=4)
    return replace(base, **changes)


def gradient(mesh, mode: str, critic=False, data=None, loss_fn=None, **rows):
    """The gradient and the metrics of one optimizer step over the whole batch, packed as `rows` say."""
    rollout, batch = data or tiny.ragged()
    network = tiny.network(mesh, **{k: v for k, v in rows.items() if k == "attention"})
    params = tiny.params(mesh)
    if critic:
        head = {"kernel": jnp.linspace(-1.0, 1.0, 16)}
        params = {"trunk": params, "value_head": jax.device_put(head, sharding.replicated(mesh))}
        loss = learner.make_critic_loss(network, CriticKnobs(loss_agg_mode=mode))
    else:
        loss = learner.make_actor_loss(network, actor_knobs(mode), TEMPERATURE, on_policy=False)
    loss = loss_fn(loss) if loss_fn else loss
    optimizer = keep_gradient()
    state = learner.ModelState(trainable=params, frozen={}, opt_state=optimizer.init(params))
    prompts = rollout.prompt_tokens.shape[0]
    steps = plan(prompts=prompts, mini_prompts=prompts)
    update = learner.make_update(loss, optimizer, lambda count: 1.0, steps, mesh)
    packed = tiny.packed(rollout, mesh, **rows)
    state, metrics = update(state, placed(mesh, batch), packed, tiny.algorithm())
    return jax.device_get(state.opt_state.gradient), jax.device_get(metrics)


TEMPERATURE = 0.7


def actor_knobs(mode):
    scale = 7.0 if mode == "seq-mean-token-sum-norm" else None
    return ActorKnobs(
        loss_agg_mode=mode, loss_scale_factor=scale, use_kl_loss=True, entropy_coeff=0.01
    )


def placed(mesh, batch):
    whole = batch.mask.shape[0] % sharding.shards(mesh) == 0
    return sharding.put_rows(mesh, batch) if whole else batch


def plain_forward(params, rollout):
    """Hidden states `[B Tr D]` of unpacked rows, each with a prompt of its own, and full attention."""
    hidden = transformer.apply(tiny.model(), params, *map(jnp.asarray, tiny.padded(rollout)))
    return hidden[:, -rollout.response_tokens.shape[1] - 1 : -1]


def plain_gradient(mode, critic=False):
    """The gradient of the same losses over unpacked rows, in one piece."""
    rollout, batch = tiny.ragged()
    counts = masking.count(batch.mask, batch.group_ids, 4)
    knobs = actor_knobs(mode)
    aggregate = partial(
        masking.aggregate, mask=batch.mask, mode=mode, counts=counts, scale=knobs.loss_scale_factor,
        group_tokens=masking.group_tokens(batch.mask, batch.group_ids, 4),
    )  # fmt: skip

    def actor(params):
        hidden = plain_forward(params, rollout)
        logprobs = jax.nn.log_softmax(heads.logits(tiny.model(), params, hidden) / TEMPERATURE)
        picked = jnp.take_along_axis(logprobs, rollout.response_tokens[..., None], -1)[..., 0]
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
        loss, _ = losses.ppo_clip(
            picked, batch.old_logprobs, batch.advantages, batch.mask, clip_low=0.2, clip_high=0.2,
            clip_c=3.0,
        )  # fmt: skip
        kl = kls.estimate(
            picked, batch.ref_logprobs, "k3", old_logprobs=batch.old_logprobs, mask=batch.mask
        )
        return aggregate(loss) - 0.01 * aggregate(entropy) + 0.1 * aggregate(kl)

    def value(params):
        values = heads.values(params["value_head"], plain_forward(params["trunk"], rollout))
        loss, _ = losses.value_loss(values, batch.values, batch.returns, batch.mask, clip=0.5)
        return aggregate(loss)

    params = tiny.params(tiny.mesh())
    if critic:
        params = {"trunk": params, "value_head": {"kernel": jnp.linspace(-1.0, 1.0, 16)}}
    return jax.device_get(jax.jit(jax.grad(value if critic else actor))(params))


WAYS = {
    "one row": {},
    "rows of a group": {"micro_rows": 3},
    "split groups": {"budget": 16},
    "a token budget": {"budget": 32},
    "own prompts": {"share": False},
    "padded": {"share": False, "pad": True, "micro_rows": 5},
    "whole scores": {"attention": "reference"},
}


@pytest.mark.parametrize("way", WAYS)
def test_packing_changes_no_gradient(way):
    got, _ = gradient(tiny.mesh(), "token-mean", **WAYS[way])
    assert tiny.worst_difference(plain_gradient("token-mean"), got) <= 1e-5


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-mean"])
def test_packing_changes_no_gradient_in_any_mode(mode):
    got, _ = gradient(tiny.mesh(), mode, **WAYS["split groups"])
    assert tiny.worst_difference(plain_gradient(mode), got) <= 1e-5


@pytest.mark.parametrize(
    ("mode", "way"),
    [("token-mean", "one row"), ("seq-mean-token-mean", "split groups"), ("prompt-mean", "padded")],
)
def test_packing_changes_no_critic_gradient(mode, way):
    got, _ = gradient(tiny.mesh(), mode, critic=True, **WAYS[way])
    assert tiny.worst_difference(plain_gradient(mode, critic=True), got) <= 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_gradients_do_not_depend_on_micro_batches_or_devices(mode):
    """In `test_meshes.py` there are more meshes; a mode is a matter of denominators, which one mesh and other rows show."""
    whole, numbers = gradient(tiny.mesh(), mode)
    ways = [(tiny.mesh(fsdp=4, tensor=2), 2), (tiny.mesh(), 5), (tiny.mesh(data=8), 1)]
    for mesh, micro in ways if mode == "prompt-mean" else ways[:1]:
        other, others = gradient(mesh, mode, micro_rows=micro)
        assert tiny.worst_difference(whole, other) <= 1e-5
        for name in ("pg_loss", "kl_loss", "entropy", "ppo_kl", "pg_clipfrac"):
            np.testing.assert_allclose(numbers[name], others[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ("token-mean", "seq-mean-token-mean", "prompt-mean"))
def test_critic_gradients_do_not_depend_on_micro_batches_or_devices(mode):
    whole, _ = gradient(tiny.mesh(), mode, critic=True)
    mesh = tiny.mesh(data=2, fsdp=2, tensor=2)
    other, _ = gradient(mesh, mode, critic=True, micro_rows=2)
    assert tiny.worst_difference(whole, other) <= 1e-5


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-sum"])
def test_denominators_of_a_micro_batch_would_change_the_gradient(mode):
    """The negative test: counting tokens, sequences or prompts per micro-batch is caught by the comparison above."""

    def per_micro_batch(loss):
        def wrong(params, micro, rows, counts, group_tokens, state):
            counts = masking.count(rows.mask, rows.group_ids, 4)
            tokens = masking.group_tokens(rows.mask, rows.group_ids, 4)
            return loss(params, micro, rows, counts, tokens, state)

        return wrong

    whole, _ = gradient(tiny.mesh(), mode)
    split, _ = gradient(tiny.mesh(), mode, micro_rows=2, loss_fn=per_micro_batch)
    assert tiny.worst_difference(whole, split) > 1e-2


def test_means_of_device_means_would_change_the_gradient():
    """The negative test for devices: averaging the shards' own token means is caught as well."""
    rollout, batch = tiny.ragged(groups=8, group=1)
    whole, _ = gradient(tiny.mesh(), "token-mean", data=(rollout, batch))
    parts = []
    for shard in range(4):
        rows = slice(2 * shard, 2 * shard + 2)
        part = replace(
            rollout,
            **{
                name: getattr(rollout, name)[rows]
                for name in (
                    "prompt_tokens",
                    "prompt_lengths",
                    "response_tokens",
                    "response_lengths",
                )
            },
        )
        own = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        own = own.replace(group_ids=own.group_ids - 2 * shard)
        parts.append(gradient(tiny.mesh(), "token-mean", data=(part, own))[0])
    averaged = jax.tree.map(lambda *leaves: sum(leaves) / 4, *parts)
    assert tiny.worst_difference(whole, averaged) > 1e-2


def adam_state(mesh, lr=1e-2, **knobs):
    optim = OptimKnobs(lr=lr, **knobs)
    schedule = optimizer_module.make_schedule(optim, 100)
    optimizer = optimizer_module.make_optimizer(optim, schedule)
    params = tiny.params(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return (
        optimizer_module.init_model_state(
            optimizer, params, optimizer_module.place_state(optimizer, params, shardings, mesh)
        ),
        optimizer,
        schedule,
    )


def run(mesh, batch, knobs=None, steps=None, on_policy=False):
    """One update of Adam over a changed `tiny.ragged_batch`."""
    steps = steps or plan()
    rollout, _ = tiny.ragged()
    packed = tiny.packed(rollout, mesh, mini_prompts=steps.mini_prompts)
    state, optimizer, schedule = adam_state(mesh)
    loss = learner.make_actor_loss(tiny.network(mesh), knobs or ActorKnobs(), 1.0, on_policy)
    update = learner.make_update(loss, optimizer, schedule, steps, mesh)
    before = jax.device_get(jax.tree.map(jnp.copy, state))
    after, metrics = update(state, placed(mesh, batch), packed, tiny.algorithm())
    return before, state, jax.device_get(after), jax.device_get(metrics)


@pytest.mark.parametrize("field", ("advantages", "old_logprobs"))
def test_a_step_with_a_non_finite_loss_changes_no_bit(field):
    batch = tiny.ragged_batch()
    poisoned = np.array(getattr(batch, field))
    poisoned[0, 0] = np.nan
    assert batch.mask[0, 0]
    before, _, after, metrics = run(tiny.mesh(data=4), batch.replace(**{field: poisoned}))
    assert metrics["skipped"].tolist() == [1.0]
    jax.tree.map(np.testing.assert_array_equal, before.trainable, after.trainable)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state, after.opt_state)


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped():  # N4
    def spoiled(loss):
        def wrapped(params, *rest):
            value, aux = loss(params, *rest)
            return value + jnp.sqrt(
                jnp.sum(0.0 * params["embed"]["kernel"])
            ), aux  # d sqrt(0) = inf

        return wrapped

    kept, metrics = gradient(tiny.mesh(), "token-mean", loss_fn=spoiled)
    assert metrics["skipped"].tolist() == [1.0] and np.isfinite(metrics["loss"]).all()
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(kept))


def test_a_batch_without_trained_tokens_is_skipped_and_counted():
    batch = tiny.ragged_batch()
    before, _, after, metrics = run(tiny.mesh(), batch.replace(mask=np.zeros_like(batch.mask)))
    assert metrics["skipped"].tolist() == [1.0] and metrics["loss"].tolist() == [0.0]
    jax.tree.map(np.testing.assert_array_equal, before.trainable, after.trainable)


def test_masked_garbage_changes_nothing():
    batch = tiny.ragged_batch()
    dirty = {
        name: np.where(batch.mask, getattr(batch, name), np.nan)
        for name in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    knobs = ActorKnobs(use_kl_loss=True)
    _, _, clean, numbers = run(tiny.mesh(), batch, knobs)
    _, _, other, others = run(tiny.mesh(), batch.replace(**dirty), knobs)
    jax.tree.map(np.testing.assert_array_equal, clean.trainable, other.trainable)
    assert all(np.isfinite(value).all() for value in others.values())
    jax.tree.map(np.testing.assert_array_equal, numbers, others)


def test_good_steps_move_and_only_they_count():
    batch = tiny.ragged_batch()
    bad = np.array(batch.advantages)
    bad[0, 0] = np.inf
    steps = plan(mini_prompts=2)
    before, _, after, metrics = run(tiny.mesh(), batch.replace(advantages=bad), steps=steps)
    assert metrics["skipped"].tolist() == [1.0, 0.0]
    assert int(optimizer_module.optimizer_count(after.opt_state)) == 1
    assert tiny.worst_difference(before.trainable, after.trainable) > 0


def test_the_old_state_is_donated():
    _, old, _, _ = run(tiny.mesh(data=2), tiny.ragged_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.trainable))


def test_master_weights_and_moments_are_float32():
    _, _, after, _ = run(tiny.mesh(), tiny.ragged_batch())
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(after) if leaf.dtype.kind == "f"}
    assert kinds == {"float32"}


def own_logprobs(mesh):
    rollout, _ = tiny.ragged()
    score = scoring.make_score(tiny.network(mesh), 12, 7)
    return np.asarray(
        score(tiny.params(mesh), tiny.packed(rollout, mesh), np.float32(1.0)).logprobs
    )


def test_the_first_mini_batch_of_an_on_policy_update_has_ratio_one():
    mesh, batch = tiny.mesh(), tiny.ragged_batch()
    fresh = own_logprobs(mesh)
    batch = batch.replace(old_logprobs=fresh, sampler_logprobs=fresh)
    _, _, _, metrics = run(mesh, batch, steps=plan(epochs=2, mini_prompts=2))
    assert metrics["ratio_deviation_max"][0] < 1e-5
    assert metrics["ratio_deviation_max"][2:].max() > 1e-3
    assert metrics["pg_clipfrac"][2:].max() > 0
    assert metrics["logprob_gap_max"][0] < 1e-5


def test_skipping_the_old_forward_on_policy_gives_the_same_update():
    mesh, batch = tiny.mesh(), tiny.ragged_batch()
    scored = batch.replace(old_logprobs=own_logprobs(mesh))
    _, _, with_old, _ = run(mesh, scored)
    _, _, without, _ = run(mesh, batch.replace(old_logprobs=None), on_policy=True)
    assert tiny.worst_difference(with_old.trainable, without.trainable) < 1e-5


# Advantages around the kernels ---------------------------------------------------------------------------------------


def test_kl_in_the_reward_pays_per_token_before_advantages():
    batch = tiny.ragged_batch()
    knobs = AlgorithmKnobs(adv_estimator="rloo", use_kl_in_reward=True, kl_penalty="k1")
    prepare = learner.make_advantages(knobs, prompts=4, kl_loss_type=None)
    out, state, numbers = prepare(batch, tiny.algorithm())
    kl = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0.0)
    last = np.array([row.nonzero()[0].max() if row.any() else -1 for row in batch.mask])
    want = -0.1 * kl
    for row, column in enumerate(last):
        if column >= 0:
            want[row, column] += batch.scores[row]
    np.testing.assert_allclose(np.asarray(out.token_rewards), want, atol=1e-6)
    lengths = batch.mask.sum(1)
    per_row = kl.sum(1)[lengths > 0] / lengths[lengths > 0]
    np.testing.assert_allclose(numbers["actor/reward_kl_penalty"], per_row.mean(), rtol=1e-5)
    assert float(state.kl_coef_reward) == pytest.approx(0.1)


def test_adaptive_controllers_move_each_their_own_coefficient():
    batch = tiny.ragged_batch()
    control = KLControlKnobs(type="adaptive", target_kl=1e-4, horizon=100)
    knobs = AlgorithmKnobs(adv_estimator="grpo", kl_ctrl=control)
    _, state, numbers = learner.make_advantages(knobs, prompts=4, kl_loss_type="k3")(
        batch, tiny.algorithm()
    )
    assert float(numbers["actor/kl_coef"]) == pytest.approx(0.1)
    assert float(state.kl_coef_loss) == pytest.approx(0.1 * (1 + 0.2 * 11 / 100), rel=1e-5)
    assert float(state.kl_coef_reward) == pytest.approx(0.1)
    both = replace(knobs, use_kl_in_reward=True)
    _, state, _ = learner.make_advantages(both, prompts=4, kl_loss_type=None)(
        batch, tiny.algorithm()
    )
    assert float(state.kl_coef_reward) != pytest.approx(0.1)
    assert float(state.kl_coef_loss) == pytest.approx(0.1)


@pytest.mark.parametrize("groups", (8, 4), ids=["whole groups", "split groups"])
@pytest.mark.parametrize("estimator", ("gae", "grpo", "rloo"))
def test_advantages_do_not_depend_on_devices(estimator, groups):
    """Three rows per device: a group each, or half a group."""
    knobs = AlgorithmKnobs(adv_estimator=estimator, gamma=0.99, lam=0.95)
    prepare = learner.make_advantages(knobs, prompts=groups, kl_loss_type=None)
    batch = tiny.ragged_batch(groups=groups, group=24 // groups)
    alone, _, _ = prepare(batch, tiny.algorithm())
    spread, _, _ = prepare(sharding.put_rows(tiny.mesh(data=8), batch), tiny.algorithm())
    np.testing.assert_allclose(
        np.asarray(alone.advantages), np.asarray(spread.advantages), atol=2e-6
    )
    assert not np.asarray(alone.advantages)[~batch.mask].any()
    assert (alone.returns is None) == (estimator != "gae")


def test_invalid_rows_train_nothing():
    batch = tiny.ragged_batch()
    valid = batch.valid.copy()
    valid[0] = False
    dropped = batch.replace(valid=valid, mask=batch.mask & valid[:, None])
    prepare = learner.make_advantages(
        AlgorithmKnobs(adv_estimator="grpo"), prompts=4, kl_loss_type=None
    )
    out, _, _ = prepare(dropped, tiny.algorithm())
    assert not np.asarray(out.advantages)[0].any()
    pair = batch.scores[1:3]
    expected = (pair - pair.mean()) / (pair.std(ddof=1) + 1e-6)
    got = np.array([np.asarray(out.advantages)[row][batch.mask[row]][0] for row in (1, 2)])
    np.testing.assert_allclose(got, expected, atol=1e-5)
