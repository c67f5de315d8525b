"""Advantage estimators: kernels and the table's adapters."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import masking
from jaxrl_llm.algorithms import advantages as adv
from jaxrl_llm.algorithms.advantages import (
    ADVANTAGES,
    gae,
    group_relative,
    leave_one_out,
    token_rewards_from_scores,
)
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.algorithm import AlgorithmKnobs
from jaxrl_llm.records import AlgorithmState, Batch
from tests.algorithms import golden

NAN = np.nan
KNOBS = AlgorithmKnobs()
STATE = AlgorithmState(
    kl_coef_reward=jnp.float32(0.1), kl_coef_loss=jnp.float32(0.2), baseline=jnp.float32(0.3)
)
GROUP_KERNELS = {
    "group_relative": group_relative,
    "centred": partial(group_relative, normalize_by_std=False),
    "leave_one_out": leave_one_out,
}


def one_group(kernel, scores, **options):
    scores = jnp.asarray(scores, jnp.float32)
    return kernel(scores, np.zeros(len(scores), np.int32), num_groups=1, **options)


def make_batch(token_rewards, mask, group_ids, *, valid=None, values=None, bootstrap=None):
    """A `Batch` with what estimators read; the rest is empty."""
    mask = np.asarray(mask, bool)
    valid = np.ones(len(mask), bool) if valid is None else np.asarray(valid)
    none = np.zeros((len(mask), 0))
    return Batch(
        mask=mask, sampler_logprobs=none,
        scores=np.zeros(len(mask)), group_ids=np.asarray(group_ids), valid=valid,
        values=values, token_rewards=token_rewards, bootstrap=bootstrap,
    )  # fmt: skip


class Variants(chex.TestCase):
    """Hand-worked numbers, with and without jit."""

    def near(self, kernel, scores, want, *, rtol=1e-4):
        got = self.variant(partial(one_group, kernel))(np.asarray(scores, np.float32))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-7)

    @chex.variants(with_jit=True, without_jit=True)
    def test_three_of_eight_right(self):
        # D27: which normalisation is meant
        scores = [1, 1, 1, 0, 0, 0, 0, 0]
        for kernel, right, wrong in (
            (group_relative, 1.2076, -0.7246),
            (GROUP_KERNELS["centred"], 0.625, -0.375),
            (leave_one_out, 0.714286, -0.428571),
        ):
            self.near(kernel, scores, [right] * 3 + [wrong] * 5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_close_scores_keep_their_spread(self):
        # D21: E[x^2] - E[x]^2 in float32 gives 0.005 here
        for low in (1.0, 2.0):
            scores = np.array([low, low + 1e-5], np.float32)
            self.near(group_relative, scores, [-0.6196, 0.6196], rtol=0.02)
            gap = float(scores[1]) - float(scores[0])
            exact = (gap / 2) / (gap / 2**0.5 + 1e-6)
            self.near(group_relative, scores, [-exact, exact], rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_equal_scores_give_exactly_0(self):
        # N10, D22: the plain two-pass form gives 0.03 for six scores of 0.3
        for kernel in GROUP_KERNELS.values():
            for score in (0.3, 1.0, -7.7, 1e30):
                got = self.variant(partial(one_group, kernel))(np.full(6, score, np.float32))
                np.testing.assert_array_equal(got, np.zeros(6))

    @chex.variants(with_jit=True, without_jit=True)
    def test_missing_rewards(self):
        # D20, N1
        root = 0.5**0.5
        for scores, want in (
            ([1] + [NAN] * 7, [0] * 8),
            ([1, 0, NAN, NAN], [root, -root, 0, 0]),
            ([NAN] * 4, [0] * 4),
        ):
            valid = np.isfinite(scores)
            got = self.variant(partial(one_group, group_relative))(np.array(scores), valid=valid)
            np.testing.assert_allclose(got, want, rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_gae_by_hand(self):
        # gamma 1/2, lam 1/2; d2 = 1 - 2, d1 = 0 + 1 - 1, d0 = 0 + 1/2 - 0
        # A2 = -1, A1 = 0 - 1/4, A0 = 1/2 - 1/16
        rewards, values = np.array([[0.0, 0.0, 1.0]]), np.array([[0.0, 1.0, 2.0]])
        run = self.variant(lambda *a: gae(*a, gamma=0.5, lam=0.5))
        advantage, returns = run(rewards, values, np.ones((1, 3)))
        np.testing.assert_array_equal(advantage, [[0.4375, -0.25, -1.0]])
        np.testing.assert_array_equal(returns, [[0.4375, 0.75, 1.0]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_gae_passes_through_holes_and_counts_no_reward_there(self):
        rewards, values = np.array([[0.0, 9.0, 1.0, 9.0]]), np.array([[3.0, NAN, 2.0, NAN]])
        run = self.variant(lambda *a: gae(*a, gamma=0.5, lam=0.5))
        advantage, returns = run(rewards, values, np.array([[1, 0, 1, 0]]))
        # A2 = 1 - 2; A0 = 0 + 1 - 3 + 1/4 A2
        np.testing.assert_array_equal(advantage, [[-2.25, 0, -1, 0]])
        np.testing.assert_array_equal(returns, [[0.75, 0, 1, 0]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_gae_bootstrap_is_the_value_after_the_last_token(self):
        rewards, values = np.zeros((2, 2)), np.ones((2, 2))
        run = self.variant(lambda *a: gae(*a[:3], gamma=0.5, lam=1.0, bootstrap=a[3]))
        mask = np.array([[1, 1], [1, 0]])
        _, returns = run(rewards, values, mask, np.array([8.0, 0.0]))
        np.testing.assert_array_equal(returns, [[2.0, 4.0], [0.0, 0.0]])
        _, returns = run(rewards, values, mask, np.array([0.0, 8.0]))
        np.testing.assert_array_equal(returns, [[0.0, 0.0], [4.0, 0.0]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_gae_takes_one_lambda_per_row(self):
        rng = np.random.default_rng(0)
        rewards, values = rng.normal(size=(2, 2, 5)).astype(np.float32)
        on = np.ones((2, 5))
        run = self.variant(lambda lam: gae(rewards, values, on, gamma=0.9, lam=lam)[0])
        both = run(np.array([0.5, 1.0]))
        np.testing.assert_allclose(both[0], run(np.array([0.5, 0.5]))[0], rtol=1e-6)
        np.testing.assert_allclose(both[1], run(np.array([1.0, 1.0]))[1], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_scores_sit_on_the_last_trained_token(self):
        mask = np.array([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]])
        scores = np.array([1.0, 2.0, 3.0, NAN, np.inf], np.float32)
        got = self.variant(token_rewards_from_scores)(scores, mask)
        np.testing.assert_array_equal(got, [[0, 1, 0], [0, 0, 2], [0] * 3, [0] * 3, [0] * 3])


def float64_loop(scores, ids, valid, kind, eps=1e-6):
    """The definitions, one row after the other, in float64."""
    out = np.zeros(len(scores))
    for i in range(len(scores)):
        others = [j for j in range(len(scores)) if valid[j] and ids[j] == ids[i]]
        if not valid[i] or len(others) < 2:
            continue
        group = np.asarray([scores[j] for j in others], np.float64)
        if kind == "leave_one_out":
            rest = [float(scores[j]) for j in others if j != i]
            out[i] = float(scores[i]) - np.mean(rest)
        else:
            out[i] = float(scores[i]) - group.mean()
            if kind == "group_relative":
                out[i] /= group.std(ddof=1) + eps
    return out


@pytest.mark.parametrize("kind", GROUP_KERNELS)
def test_group_shapes_match_a_float64_loop(kind):
    # N10: a group of one, all equal, two values, one NaN, values differing by 1e-5, negative, an empty group
    rows = [(0, 5.0), *[(1, 0.3)] * 6, (2, 0.0), (2, 1.0), (3, 1.0), (3, NAN), (3, 0.0), (3, 0.5)]
    rows += [(4, 1.0), (4, 1.00001), (4, 1.00002), (6, -3.0), (6, -5.0), (6, 100.0)]
    order = np.random.default_rng(0).permutation(len(rows))
    ids = np.array([rows[i][0] for i in order])
    scores = np.array([rows[i][1] for i in order], np.float32)
    valid = np.isfinite(scores)
    got = GROUP_KERNELS[kind](scores, ids, num_groups=7, valid=valid)
    np.testing.assert_allclose(got, float64_loop(scores, ids, valid, kind), rtol=2e-5, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(got)[(ids == 1) | (ids == 0)], 0)


@pytest.mark.parametrize("kind", GROUP_KERNELS)
def test_one_invalid_row_leaves_a_group_of_seven(kind):
    # N1
    kernel = GROUP_KERNELS[kind]
    scores = np.array([1, 0, 1, 1, 0, NAN, 0.5, 0.25], np.float32)
    got = np.asarray(one_group(kernel, scores, valid=np.isfinite(scores)))
    seven = np.asarray(one_group(kernel, scores[np.isfinite(scores)]))
    np.testing.assert_array_equal(np.delete(got, 5), seven)
    assert got[5] == 0


@pytest.mark.parametrize("kind", GROUP_KERNELS)
@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf, 1e30])
def test_invalid_rows_change_neither_value_nor_gradient(kind, bad):
    # N2, N9
    ids, valid = np.array([0, 0, 0, 1, 1]), np.array([1, 1, 0, 1, 0])
    clean = np.array([1, 3, 0, 2, 0], np.float32)

    def run(scores):
        def total(scores):
            out = GROUP_KERNELS[kind](scores, ids, num_groups=2, valid=valid)
            return jnp.sum(out * np.arange(5)), out

        return jax.value_and_grad(total, has_aux=True)(scores)

    chex.assert_trees_all_equal(run(np.where(valid, clean, np.float32(bad))), run(clean))
    assert np.all(np.isfinite(run(np.ones(5, np.float32))[1]))  # the root of variance 0


def test_a_nan_in_a_valid_row_stays_visible():
    assert np.any(np.isnan(one_group(group_relative, [1, NAN, 0])))


@pytest.mark.parametrize("kind", GROUP_KERNELS)
def test_shifting_and_permuting(kind):
    rng = np.random.default_rng(4)
    scores, ids = rng.integers(0, 5, 12).astype(np.float32), np.repeat([0, 1, 2], 4)
    run = jax.jit(lambda s, i: GROUP_KERNELS[kind](s, i, num_groups=3))
    plain = np.asarray(run(scores, ids))
    np.testing.assert_allclose(run(scores + 100, ids), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.bincount(ids, plain), np.zeros(3), atol=1e-5)
    order = rng.permutation(12)
    np.testing.assert_allclose(run(scores[order], ids[order]), plain[order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(scores, 2 - ids), plain, rtol=1e-6)


def test_scaling_scores_leaves_normalised_advantages():
    scores = [0, 1, 1, 5]
    got = one_group(group_relative, np.multiply(scores, 64.0))
    np.testing.assert_allclose(got, one_group(group_relative, scores), rtol=1e-5)


def test_singleton_score_is_for_parity():
    assert float(one_group(group_relative, [3])[0]) == 0.0
    assert float(one_group(leave_one_out, [3], singleton="score")[0]) == 3.0
    with pytest.raises(ConfigError, match="needs one of zero, score"):
        one_group(leave_one_out, [3], singleton="keep")


def test_scores_with_valid_given_follow_it():
    mask = np.ones((3, 2))
    got = token_rewards_from_scores(np.array([1.0, 2.0, NAN]), mask, valid=np.array([1, 0, 0]))
    np.testing.assert_array_equal(got, [[0, 1], [0, 0], [0, 0]])
    visible = token_rewards_from_scores(np.array([NAN]), np.ones((1, 1)), valid=np.array([1]))
    assert np.isnan(visible[0, 0])


def test_gae_with_lambda_1_is_reward_to_go_minus_value():
    rng = np.random.default_rng(5)
    rewards, values = rng.normal(size=(2, 3, 6)).astype(np.float32)
    mask = np.arange(6) < np.array([[6], [3], [0]])
    advantage, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = np.where(mask, np.cumsum(np.where(mask, rewards, 0)[:, ::-1], 1)[:, ::-1], 0)
    np.testing.assert_allclose(returns, to_go, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantage, np.where(mask, to_go - values, 0), rtol=1e-5, atol=1e-6)


def make_inputs(seed=6, rows=8, columns=5):
    rng = np.random.default_rng(seed)
    mask = np.arange(columns) < rng.integers(1, columns + 1, (rows, 1))
    scores = rng.integers(0, 3, rows).astype(np.float32)
    return make_batch(
        np.asarray(token_rewards_from_scores(scores, mask)),
        mask,
        np.arange(rows) % (rows // 4),
        values=rng.normal(size=(rows, columns)).astype(np.float32),
        bootstrap=np.zeros(rows, np.float32),
    )


def run(name, batch, *, num_groups=2, knobs=KNOBS):
    fn = jax.jit(lambda batch: ADVANTAGES[name](batch, knobs, STATE, num_groups=num_groups))
    return fn(batch)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_adapters_give_advantages_on_trained_tokens_only(name):
    batch = make_inputs()
    got, returns, state = run(name, batch)
    assert got.shape == batch.mask.shape and got.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(got)[~batch.mask], 0)
    assert np.any(np.asarray(got)[batch.mask] != 0)
    assert (returns is not None) == (name == "gae")
    chex.assert_trees_all_equal(state, STATE)


def test_adapters_match_their_kernels():
    batch = make_inputs()
    scores = np.sum(batch.token_rewards, axis=1)
    for name, rows in (
        ("grpo", group_relative(scores, batch.group_ids, num_groups=2)),
        ("rloo", leave_one_out(scores, batch.group_ids, num_groups=2)),
    ):
        want = np.where(batch.mask, np.asarray(rows)[:, None], 0)
        np.testing.assert_allclose(run(name, batch)[0], want, rtol=1e-6)
    plain, returns = gae(batch.token_rewards, batch.values, batch.mask, gamma=1.0, lam=1.0)
    got, got_returns, _ = run("gae", batch)
    np.testing.assert_allclose(got, masking.whiten(plain, batch.mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_returns, returns, rtol=1e-6)


def test_settings_reach_the_kernels():
    batch = make_inputs()
    base = {name: run(name, batch)[0] for name in ADVANTAGES}
    for name, change in (
        ("gae", {"gamma": 0.5}),
        ("gae", {"lam": 0.5}),
        ("grpo", {"norm_adv_by_std_in_grpo": False}),
        ("grpo", {"group_eps": 1.0}),
    ):
        assert not np.allclose(run(name, batch, knobs=replace(KNOBS, **change))[0], base[name])
    bootstrapped = run("gae", batch.replace(bootstrap=np.arange(8, dtype=np.float32)))[0]
    assert not np.allclose(bootstrapped, base["gae"])


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf])
def test_adapters_ignore_garbage_under_the_mask_and_in_invalid_rows(name, bad):
    batch = make_inputs()
    valid = np.arange(8) != 3
    batch = batch.replace(valid=valid)
    on = batch.mask & valid[:, None]
    dirty = batch.replace(
        token_rewards=np.where(on, batch.token_rewards, np.float32(bad)),
        values=np.where(batch.mask, batch.values, np.float32(bad)),
    )
    chex.assert_trees_all_equal(run(name, dirty), run(name, batch))
    got, returns, _ = run(name, dirty)
    np.testing.assert_array_equal(got[3], np.zeros(5))
    if returns is not None:
        np.testing.assert_array_equal(returns[3], np.where(batch.mask[3], batch.values[3], 0))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_adapters_with_nothing_to_train_on(name):
    # N3, N11
    batch = make_inputs()
    for empty in (
        batch.replace(mask=np.zeros_like(batch.mask)),
        batch.replace(valid=np.zeros(8, bool), token_rewards=np.full((8, 5), NAN, np.float32)),
    ):
        got, _, _ = run(name, empty)
        np.testing.assert_array_equal(got, np.zeros((8, 5)))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_groups_without_spread_do_not_move_the_policy(name):
    # D22
    batch = make_inputs()
    same = token_rewards_from_scores(np.full(8, 0.3, np.float32), batch.mask)
    got, _, _ = run(name, batch.replace(token_rewards=same))
    np.testing.assert_array_equal(got, np.zeros((8, 5)))


def test_missing_fields_say_what_to_do():
    batch = make_inputs()
    with pytest.raises(ConfigError, match="run the critic first"):
        run("gae", batch.replace(values=None))
    with pytest.raises(ConfigError, match="got no token_rewards"):
        run("grpo", batch.replace(token_rewards=None))


@pytest.fixture
def mesh():
    devices = jax.devices()
    assert len(devices) == 8, "the test set-up asks for 8 CPU devices"
    return Mesh(np.array(devices), ("data",))


def on_mesh(batch, mesh):
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_eight_devices_give_the_numbers_of_one(name, mesh):
    # Group g has rows g, g + 4, g + 8, ...: every group is split over shards of two rows.
    batch = make_inputs(rows=16)
    sharded = on_mesh(batch, mesh)
    assert len(sharded.mask.sharding.device_set) == 8
    fn = jax.jit(lambda batch: ADVANTAGES[name](batch, KNOBS, STATE, num_groups=4))
    one, eight = fn(batch), fn(sharded)
    assert len(eight[0].sharding.device_set) == 8
    chex.assert_trees_all_close(eight, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_statistics_per_device_would_be_different_numbers(name, mesh):
    # The bug that the test above guards against must be visible in it.
    batch = make_inputs(rows=16)
    per_device = jax.shard_map(
        lambda batch: ADVANTAGES[name](batch, KNOBS, STATE, num_groups=4)[0],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    wrong = jax.jit(per_device)(on_mesh(batch, mesh))
    right = run(name, batch, num_groups=4)[0]
    assert not np.allclose(wrong, right, atol=1e-2)


@pytest.mark.parametrize("case", golden.load("compute_gae_advantage_return"), ids=golden.by_id)
def test_golden_gae(case):
    inputs, params = case.inputs, case.params
    mask = inputs["response_mask"]
    batch = make_batch(
        inputs["token_level_rewards"], mask, np.zeros(len(mask), int), values=inputs["values"]
    )
    knobs = replace(KNOBS, gamma=params["gamma"], lam=params["lam"])
    with case.precision():
        got, returns, _ = ADVANTAGES["gae"](batch, knobs, STATE, num_groups=1)
        golden.close(got, case.array("advantages"), case.tolerance(whitened=True), mask)
        golden.close(returns, case.array("returns"), case.tolerance(), mask)
        np.testing.assert_array_equal(np.asarray(got)[~mask], 0)
        np.testing.assert_array_equal(np.asarray(returns)[~mask], 0)


GROUP_FILES = {
    "compute_grpo_outcome_advantage": (group_relative, "score"),
    "compute_grpo_vectorized_outcome_advantage": (group_relative, "score"),
    "compute_rloo_outcome_advantage": (leave_one_out, "score"),
    "compute_rloo_vectorized_outcome_advantage": (leave_one_out, "zero"),
}
GROUP_CASES = [case for file in GROUP_FILES for case in golden.load(file)]


def options(case):
    if "grpo" not in case.file:
        return {}
    params = case.params
    return {"normalize_by_std": params["norm_adv_by_std_in_grpo"], "eps": params["epsilon"]}


@pytest.mark.parametrize("case", GROUP_CASES, ids=golden.by_id)
def test_golden_group_kernels(case):
    # The original sums scores over masked tokens too.
    kernel, singleton = GROUP_FILES[case.file]
    mask, (ids, groups) = case.inputs["response_mask"], case.groups()
    with case.precision():
        scores = case.inputs["token_level_rewards"].sum(-1)
        rows = kernel(scores, ids, num_groups=groups, singleton=singleton, **options(case))
        tolerance = case.tolerance(whitened="vectorized" in case.file)
        golden.close(np.asarray(rows)[:, None] * mask, case.array("advantages"), tolerance, mask)


SINGLE = "a group of one has advantage 0 here, its raw score there"
MASKED = "rewards at masked positions never count here"
EXCLUDED = {
    "compute_grpo_outcome_advantage/outcome_ragged_zero_var_and_singleton": SINGLE,
    "compute_grpo_outcome_advantage/outcome_ragged_zero_var_and_singleton_drgrpo": SINGLE,
    "compute_grpo_vectorized_outcome_advantage/outcome_ragged_zero_var_and_singleton": SINGLE,
    "compute_rloo_outcome_advantage/outcome_ragged_zero_var_and_singleton": SINGLE,
    "compute_grpo_outcome_advantage/dense_rewards_interior_holes_reward_on_masked_tokens": MASKED,
    "compute_grpo_outcome_advantage/dense_rewards_interior_holes_reward_on_masked_tokens_drgrpo": MASKED,
    "compute_grpo_vectorized_outcome_advantage/dense_rewards_interior_holes_reward_on_masked_tokens": MASKED,
    "compute_rloo_outcome_advantage/dense_rewards_interior_holes_reward_on_masked_tokens": MASKED,
    "compute_rloo_vectorized_outcome_advantage/dense_rewards_interior_holes_reward_on_masked_tokens": MASKED,
}


def test_exclusions_name_existing_cases():
    assert set(EXCLUDED) < {case.id for case in GROUP_CASES}


@pytest.mark.parametrize("case", GROUP_CASES, ids=golden.by_id)
def test_golden_product_equals_the_original_but_for_named_differences(case):
    name = "grpo" if "grpo" in case.file else "rloo"
    mask, (ids, groups) = case.inputs["response_mask"], case.groups()
    changes = {"norm_adv_by_std_in_grpo": case.params.get("norm_adv_by_std_in_grpo", True)}
    batch = make_batch(case.inputs["token_level_rewards"], mask, ids)
    with case.precision():
        got = ADVANTAGES[name](batch, replace(KNOBS, **changes), STATE, num_groups=groups)[0]
    tolerance = case.tolerance(whitened="vectorized" in case.file)
    same = np.allclose(np.asarray(got)[mask], case.array("advantages")[mask], **tolerance)
    assert same == (case.id not in EXCLUDED)


def test_what_is_static_is_refused_when_it_cannot_work():
    with pytest.raises(AssertionError):
        group_relative(np.zeros((2, 2)), np.zeros(2, int), num_groups=1)
    with pytest.raises(AssertionError):
        gae(np.zeros((2, 3)), np.zeros((2, 2)), np.ones((2, 3)), gamma=1.0, lam=1.0)
    assert adv.SINGLETONS == ("zero", "score")
