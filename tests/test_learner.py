"""The learner: log-probs by hand, gradients that no split changes, skipped steps, donation, schedules, buffers."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import learner, masking, packing, sharding
from jaxrl_llm import optimizer as optimizer_module
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, CriticKnobs, KLControlKnobs, OptimKnobs
from jaxrl_llm.models import heads, transformer
from jaxrl_llm.records import Prompt
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.engine import generate, make_engine
from tests import tiny
from tests.algorithms.golden import load

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
    base = learner.Plan(prompts=4, group=3, epochs=1, mini_prompts=4, micro_rows=None)
    return replace(base, **changes)


def gradient(mesh, mode: str, micro_rows=None, critic=False, batch=None, loss_fn=None):
    """The gradient and the metrics of one optimizer step over the whole batch."""
    batch = tiny.ragged_batch() if batch is None else batch
    network = tiny.network(mesh)
    params = tiny.params(mesh)
    scale = 7.0 if mode == "seq-mean-token-sum-norm" else None
    if critic:
        head = {"kernel": jnp.linspace(-1.0, 1.0, 16)}
        params = {"trunk": params, "value_head": jax.device_put(head, sharding.replicated(mesh))}
        loss = learner.make_critic_loss(network, CriticKnobs(loss_agg_mode=mode))
    else:
        knobs = ActorKnobs(
            loss_agg_mode=mode, loss_scale_factor=scale, use_kl_loss=True, entropy_coeff=0.01
        )
        loss = learner.make_actor_loss(network, knobs, 0.7, on_policy=False)
    loss = loss_fn(loss) if loss_fn else loss
    optimizer = keep_gradient()
    state = learner.ModelState(trainable=params, frozen={}, opt_state=optimizer.init(params))
    update = learner.make_update(
        loss, optimizer, lambda count: 1.0, plan(micro_rows=micro_rows), mesh
    )
    rows = (
        sharding.put_rows(mesh, batch)
        if batch.tokens.shape[0] % sharding.shards(mesh) == 0
        else batch
    )
    state, metrics = update(state, rows, tiny.algorithm(), jax.random.key(0))
    return jax.device_get(state.opt_state.gradient), jax.device_get(metrics)


def test_logprobs_entropy_and_squares_equal_a_plain_softmax():
    mesh, batch = tiny.mesh(), tiny.ragged_batch()
    network, params = tiny.network(mesh), tiny.params(mesh)
    scores = learner.make_score(network, 5)(params, batch, jnp.float32(0.7))
    hidden, _ = transformer.apply(
        tiny.model(), params, batch.tokens, batch.positions, batch.segments
    )
    logits = np.asarray(heads.logits(tiny.model(), params, hidden), np.float64)[:, 4:-1] / 0.7
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logprobs, batch.tokens[:, 5:, None], -1)[..., 0]
    probs = np.exp(logprobs)
    mask = batch.mask
    for got, want in (
        (scores.logprobs, picked),
        (scores.entropy, -(probs * logprobs).sum(-1)),
        (scores.sum_pi_squared, (probs**2).sum(-1)),
    ):
        np.testing.assert_allclose(np.asarray(got)[mask], want[mask], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "case", load("entropy_and_logprobs_from_logits"), ids=lambda case: case.name
)
def test_golden_logprobs_and_entropy(case):
    """With an identity head the hidden states are the logits; float64 inputs are computed in float32 here."""
    logits = jnp.asarray(case.inputs["logits"], jnp.float32)
    size = logits.shape[-1]
    config = replace(tiny.model(), vocab_size=size, width=size)
    network = replace(tiny.network(tiny.mesh()), config=config)
    head = {"head": {"kernel": jnp.eye(size)}}
    labels = jnp.asarray(case.inputs["labels"], jnp.int32)

    def entropy_sum(states):
        scores = learner.token_scores(network, head, states, labels, jnp.float32(1.0))
        return jnp.sum(scores.entropy), scores

    gradient, scores = jax.grad(entropy_sum, has_aux=True)(logits)
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(scores.logprobs, case.array("logprobs"), **close)
    np.testing.assert_allclose(scores.entropy, case.array("entropy"), **close)
    np.testing.assert_allclose(gradient, case.array("grad_logits_of_entropy_sum"), **close)


def test_chunked_head_equals_the_whole_one_and_its_buffer_never_exists(monkeypatch):
    mesh, batch = tiny.mesh(), tiny.ragged_batch()
    network, params = tiny.network(mesh), tiny.params(mesh)
    rows, width, vocabulary = batch.mask.shape[0], batch.mask.shape[1], tiny.model().vocab_size

    def grads(limit: int):
        monkeypatch.setattr(learner, "HEAD_ELEMENTS", limit)

        def loss(params):
            hidden = network.hidden(params, batch)
            targets = learner.response_tokens(batch)
            scores = learner.token_scores(network, params, hidden, targets, jnp.float32(1.0))
            return jnp.sum(jnp.where(batch.mask, scores.logprobs + 0.1 * scores.entropy, 0.0))

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        return compiled(params), compiled.as_text()

    whole, text_whole = grads(2**22)
    chunked, text = grads(rows * 2 * vocabulary)
    assert tiny.worst_difference(whole, chunked) < 1e-5
    full = [f"f32[{rows},{width},{vocabulary}]", f"f32[{width},{rows},{vocabulary}]"]
    assert any(shape in text_whole for shape in full)
    assert not any(shape in text for shape in full)
    assert f"[4,{rows},2,{vocabulary}]" not in text


@pytest.mark.parametrize("mode", MODES)
def test_gradients_do_not_depend_on_micro_batches_or_devices(mode):
    whole, numbers = gradient(tiny.mesh(), mode)
    for mesh, micro in ((tiny.mesh(), 5), (tiny.mesh(data=8), 1), (tiny.mesh(fsdp=4, tensor=2), 2)):
        other, others = gradient(mesh, mode, micro)
        assert tiny.worst_difference(whole, other) <= 1e-5
        for name in ("pg_loss", "kl_loss", "entropy", "ppo_kl", "pg_clipfrac"):
            np.testing.assert_allclose(numbers[name], others[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ("token-mean", "seq-mean-token-mean", "prompt-mean"))
def test_critic_gradients_do_not_depend_on_micro_batches_or_devices(mode):
    whole, _ = gradient(tiny.mesh(), mode, critic=True)
    for mesh, micro in ((tiny.mesh(), 5), (tiny.mesh(data=2, fsdp=2, tensor=2), 2)):
        other, _ = gradient(mesh, mode, micro, critic=True)
        assert tiny.worst_difference(whole, other) <= 1e-5


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-sum"])
def test_denominators_of_a_micro_batch_would_change_the_gradient(mode):
    """The negative test: counting tokens, sequences or prompts per micro-batch is caught by the comparison above."""

    def per_micro_batch(loss):
        def wrong(params, rows, counts, group_tokens, state):
            counts = masking.count(rows.mask, rows.group_ids, 4)
            tokens = masking.group_tokens(rows.mask, rows.group_ids, 4)
            return loss(params, rows, counts, tokens, state)

        return wrong

    whole, _ = gradient(tiny.mesh(), mode)
    split, _ = gradient(tiny.mesh(), mode, 5, loss_fn=per_micro_batch)
    assert tiny.worst_difference(whole, split) > 1e-2


def test_means_of_device_means_would_change_the_gradient():
    """The negative test for devices: averaging the shards' own token means is caught as well."""
    batch = tiny.ragged_batch(groups=8, group=1)
    whole, _ = gradient_of_rows(batch)
    shards = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for i in range(4)]
    parts = [gradient_of_rows(shard)[0] for shard in shards]
    averaged = jax.tree.map(lambda *leaves: sum(leaves) / 4, *parts)
    assert tiny.worst_difference(whole, averaged) > 1e-2


def gradient_of_rows(batch):
    mesh = tiny.mesh()
    network, params = tiny.network(mesh), tiny.params(mesh)
    loss = learner.make_actor_loss(network, ActorKnobs(), 1.0, on_policy=False)
    counts = masking.count(batch.mask, batch.group_ids, 8)
    tokens = masking.group_tokens(batch.mask, batch.group_ids, 8)
    grads, aux = jax.jit(
        jax.grad(lambda p: loss(p, batch, counts, tokens, tiny.algorithm()), has_aux=True)
    )(params)
    return jax.device_get(grads), aux


def adam_state(mesh, lr=1e-2, **knobs):
    optim = OptimKnobs(lr=lr, **knobs)
    schedule = optimizer_module.make_schedule(optim, 100)
    optimizer = optimizer_module.make_optimizer(optim, schedule)
    params = tiny.params(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return (
        optimizer_module.init_model_state(optimizer, params, shardings, mesh),
        optimizer,
        schedule,
    )


def run(mesh, batch, knobs=None, steps=None, on_policy=False):
    steps = steps or plan()
    state, optimizer, schedule = adam_state(mesh)
    loss = learner.make_actor_loss(tiny.network(mesh), knobs or ActorKnobs(), 1.0, on_policy)
    update = learner.make_update(loss, optimizer, schedule, steps, mesh)
    before = jax.device_get(jax.tree.map(jnp.copy, state))
    after, metrics = update(
        state, sharding.put_rows(mesh, batch), tiny.algorithm(), jax.random.key(1)
    )
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


def test_the_first_mini_batch_of_an_on_policy_update_has_ratio_one():
    mesh, batch = tiny.mesh(), tiny.ragged_batch()
    fresh = learner.make_score(tiny.network(mesh), None)(tiny.params(mesh), batch, jnp.float32(1.0))
    batch = batch.replace(
        old_logprobs=np.asarray(fresh.logprobs), sampler_logprobs=np.asarray(fresh.logprobs)
    )
    _, _, _, metrics = run(mesh, batch, steps=plan(epochs=2, mini_prompts=2))
    assert metrics["ratio_deviation_max"][0] < 1e-5
    assert metrics["ratio_deviation_max"][2:].max() > 1e-3
    assert metrics["pg_clipfrac"][2:].max() > 0
    assert metrics["logprob_gap_max"][0] < 1e-5


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(
    ("dtype", "most", "mean"), [("float32", 1e-4, 1e-5), ("bfloat16", 1, 1e-2)]
)
def test_sampler_and_training_forward_agree(dtype, most, mean, temperature):  # R6
    mesh = tiny.mesh()
    params = tiny.params(mesh, scale=2.0)
    engine = make_engine(
        tiny.model(), mesh, dtype=jnp.dtype(dtype), stop_ids=(2,), decode_text=str, chunk=8,
        prompt_length=6, response_length=16,
    )  # fmt: skip
    prompts = [
        Prompt(ids, "", (), "", "tiny", {}, n, f"rows:{n}")
        for n, ids in enumerate([(3, 4, 5), (9, 2, 8, 7, 6), (11,), (3, 4, 5)])
    ]
    drawn = generate(
        engine, params, prompts, n=8, sampling=sampling.make_sampling(temperature), seed=1, step=1,
        purpose=sampling.TRAIN,
    )  # fmt: skip
    rows = packing.make_rows(drawn, np.zeros(32), np.ones(32, bool), 6, 16)
    network = learner.Network(tiny.model(), mesh, jnp.dtype(dtype), False)
    scores = learner.make_score(network, None)(params, rows, jnp.float32(temperature))
    gap = np.abs(np.asarray(scores.logprobs) - rows.sampler_logprobs)[rows.mask]
    assert gap.size > 200 and gap.max() < most and gap.mean() < mean
    texts = {
        group: {tuple(row) for row in drawn.response_tokens[rows.group_ids == group]}
        for group in (0, 3)
    }
    assert len(texts[0]) > 1 and texts[0] != texts[3], (
        "equal prompts are two groups with their own draws"
    )  # R7, F5


def test_skipping_the_old_forward_on_policy_gives_the_same_update():
    mesh, batch = tiny.mesh(), tiny.ragged_batch()
    fresh = learner.make_score(tiny.network(mesh), None)(tiny.params(mesh), batch, jnp.float32(1.0))
    scored = batch.replace(old_logprobs=np.asarray(fresh.logprobs))
    _, _, with_old, _ = run(mesh, scored)
    _, _, without, _ = run(mesh, batch.replace(old_logprobs=None), on_policy=True)
    assert tiny.worst_difference(with_old.trainable, without.trainable) < 1e-5


def test_shuffled_mini_batches_keep_groups_whole_and_cover_the_batch():
    batch = tiny.ragged_batch()
    mesh = tiny.mesh()
    cut = partial(learner._mini_batches, batch, mesh=mesh)
    drawn = cut(plan(mini_prompts=2, shuffle=True), jax.random.key(5))
    ids = np.asarray(drawn.group_ids)
    assert ids.shape == (2, 6)
    assert sorted(ids[:, ::3].ravel().tolist()) == [0, 1, 2, 3]
    assert (ids.reshape(2, 2, 3) == ids.reshape(2, 2, 3)[:, :, :1]).all()
    orders = {
        tuple(
            np.asarray(cut(plan(mini_prompts=2, shuffle=True), jax.random.key(k)).group_ids)[
                :, ::3
            ].ravel()
        )
        for k in range(6)
    }
    assert len(orders) > 1
    in_order = cut(plan(mini_prompts=2), jax.random.key(5))
    assert np.asarray(in_order.group_ids).ravel().tolist() == sorted(batch.group_ids.tolist())


def test_pieces_fill_devices():
    mesh = tiny.mesh(data=4)
    assert learner.pieces_of(12, None, mesh) == (1, 12)
    assert learner.pieces_of(12, 2, mesh) == (2, 8)
    assert learner.pieces_of(12, 80, mesh) == (1, 12)
    assert learner.pieces_of(10, None, mesh) == (1, 12)


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


@pytest.mark.parametrize("estimator", ("gae", "grpo", "rloo"))
def test_advantages_do_not_depend_on_devices(estimator):
    knobs = AlgorithmKnobs(adv_estimator=estimator, gamma=0.99, lam=0.95)
    prepare = learner.make_advantages(knobs, prompts=8, kl_loss_type=None)
    batch = tiny.ragged_batch(groups=8)
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
