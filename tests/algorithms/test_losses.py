"""Policy and value losses."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import masking
from jaxrl_llm.algorithms import losses
from tests.algorithms import golden

CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}
RATIOS = [0.0, 1e-4, 0.1, 1.0, 5.0, 20.0, 88.0, 89.0, 100.0, 1e4]
GRID = np.array(RATIOS + [-ratio for ratio in RATIOS])


def reference(d, advantage, clip_c):
    """Loss and derivative by `logprobs`, float64, of PPO's clipped loss with the log-ratio clipped at 20."""
    ratio = np.exp(np.clip(d, -20, 20))
    plain, clipped = -advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2)
    slope = np.where((np.abs(d) < 20) & (plain >= clipped), plain, 0.0)
    loss = np.maximum(plain, clipped)
    if clip_c is not None and advantage < 0:
        slope = np.where(loss > -advantage * clip_c, 0.0, slope)
        loss = np.minimum(loss, -advantage * clip_c)
    return loss, slope


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("clip_c", [3.0, None])
def test_log_ratio_grid(dtype, advantage, clip_c):
    # N8: exponential before clip gives gradient NaN from a log-ratio of 89 on.
    new = jnp.asarray(GRID[None], dtype)
    old, on = jnp.zeros_like(new), jnp.ones(new.shape)
    advantages = jnp.full(new.shape, advantage)

    @jax.jit
    def run(new):
        def loss(new):
            clips = {"clip_low": 0.2, "clip_high": 0.2, "clip_c": clip_c}
            return losses.ppo_clip(new, old, advantages, on, **clips)[0]

        value, pull = jax.vjp(loss, new)
        return value, pull(jnp.ones_like(value))[0]

    value, slope = (np.asarray(out, np.float64)[0] for out in run(new))
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(slope))
    x = np.asarray(new, np.float64)[0]
    small = np.abs(x) <= 5
    want, want_slope = reference(x, advantage, clip_c)
    np.testing.assert_allclose(value[small], want[small], rtol=1e-5, atol=1e-5)
    rounding = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(slope[small], want_slope[small], rtol=rounding, atol=1e-5)


class Variants(chex.TestCase):
    """Hand-worked numbers, with and without jit."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_ppo_clip_by_hand(self):
        # ratios 2, 1/2, 2, 1/2, 4 with advantages 1, 1, -1, -1, -1
        new = np.log(np.array([[2.0, 0.5, 2.0, 0.5, 4.0]], np.float32))
        advantages = np.array([[1.0, 1.0, -1.0, -1.0, -1.0]], np.float32)
        on = np.ones((1, 5))
        run = self.variant(lambda *a: losses.ppo_clip(*a, **CLIPS))
        loss, metrics = run(new, np.zeros((1, 5), np.float32), advantages, on)
        np.testing.assert_allclose(loss, [[-1.2, -0.5, 2.0, 0.8, 3.0]], rtol=1e-6)
        np.testing.assert_array_equal(metrics["pg_clipfrac"], [[1, 0, 0, 1, 0]])
        np.testing.assert_array_equal(metrics["pg_clipfrac_lower"], [[0, 0, 0, 0, 1]])
        np.testing.assert_allclose(metrics["ppo_kl"], -new, rtol=1e-6)
        mean = losses.mean_metrics(metrics, on)
        assert float(mean["pg_clipfrac"]) == pytest.approx(0.4)

    @chex.variants(with_jit=True, without_jit=True)
    def test_value_loss_by_hand(self):
        # squared errors 4 and 1; the second value is clipped to 2.5, error 2.25; the third is masked
        run = self.variant(lambda *a: losses.value_loss(*a, clip=0.5))
        inputs = [np.array([row], np.float32) for row in ([2, 3, 9], [2, 2, 9], [0, 4, 9])]
        loss, metrics = run(*inputs, np.array([[1, 1, 0]]))
        np.testing.assert_allclose(loss, [[2.0, 1.125, 0.0]])
        np.testing.assert_array_equal(metrics["vf_clipfrac"], [[0, 1, 0]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_value_loss_without_clip(self):
        run = self.variant(lambda *a: losses.value_loss(*a, clip=None))
        loss, metrics = run(
            np.array([[3.0]]), np.array([[0.0]]), np.array([[1.0]]), np.ones((1, 1))
        )
        assert float(loss[0, 0]) == 2.0 and float(metrics["vf_clipfrac"][0, 0]) == 0.0


def batch(seed=0, shape=(4, 6)):
    rng = np.random.default_rng(seed)
    new, old, advantages = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    return new, old, advantages, rng.integers(0, 2, shape).astype(bool)


def policy(new, old, advantages, mask):
    return losses.ppo_clip(new, old, advantages, mask, **CLIPS)


def value(new, old, returns, mask):
    return losses.value_loss(new, old, returns, mask, clip=0.5)


@pytest.mark.parametrize("loss", [policy, value])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_garbage_under_the_mask_changes_nothing(loss, bad):
    *arrays, mask = batch()
    dirty = [np.where(mask, array, np.float32(bad)) for array in arrays]

    def run(new, *rest):
        def total(new):
            per_token, metrics = loss(new, *rest, mask)
            return jnp.sum(per_token), (per_token, metrics)

        return jax.value_and_grad(total, has_aux=True)(new)

    chex.assert_trees_all_equal(run(*dirty), run(*arrays))


@pytest.mark.parametrize("loss", [policy, value])
def test_everything_masked_is_exactly_0(loss):
    # N11, D29
    *arrays, mask = batch()
    off = np.zeros_like(mask)
    per_token, metrics = loss(*arrays, off)
    np.testing.assert_array_equal(per_token, np.zeros(off.shape))
    assert all(float(v) == 0.0 for v in losses.mean_metrics(metrics, off).values())


@pytest.mark.parametrize("loss", [policy, value])
def test_losses_are_float32_for_bf16_and_carry_no_gradient_in_metrics(loss):
    *arrays, mask = batch()
    low = [jnp.asarray(array, jnp.bfloat16) for array in arrays]
    per_token, metrics = loss(*low, mask)
    assert {v.dtype for v in [per_token, *metrics.values()]} == {jnp.dtype("float32")}

    def through_metrics(new):
        return sum(jnp.sum(v) for v in loss(new, *arrays[1:], mask)[1].values())

    np.testing.assert_array_equal(jax.grad(through_metrics)(arrays[0]), np.zeros(mask.shape))


def test_ratio_is_1_and_gradient_is_the_policy_gradient_before_any_update():
    # D25, D26: same log-probs, so no clipping, loss -A and gradient -A.
    new, _, advantages, mask = batch()
    on = np.ones_like(mask)
    loss, metrics = policy(new, new, advantages, on)
    np.testing.assert_allclose(loss, -advantages, rtol=1e-6)
    assert all(float(jnp.max(jnp.abs(v))) == 0.0 for v in metrics.values())
    slope = jax.grad(lambda x: jnp.sum(policy(x, new, advantages, on)[0]))(new)
    np.testing.assert_allclose(slope, -advantages, rtol=1e-6)
    _, moved = policy(new + 0.5, new, advantages, on)
    assert float(jnp.mean(moved["pg_clipfrac"])) > 0


def test_permuting_rows_permutes_the_loss():
    *arrays, mask = batch()
    order = np.array([2, 0, 3, 1])
    shuffled = policy(*(array[order] for array in arrays), mask[order])
    straight = policy(*arrays, mask)
    chex.assert_trees_all_equal(shuffled, jax.tree.map(lambda v: v[order], straight))


def test_weights_select_and_get_no_gradient():
    loss, mask = np.array([[2.0, np.nan]], np.float32), np.array([[1, 0]])
    weights = np.array([[0.5, np.inf]], np.float32)
    np.testing.assert_array_equal(losses.weigh(loss, weights, mask), [[1, 0]])
    slope = jax.grad(lambda w: jnp.sum(losses.weigh(loss, w, mask)))(weights)
    np.testing.assert_array_equal(slope, [[0, 0]])


def test_shapes_are_checked():
    with pytest.raises(AssertionError):
        policy(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 1)), np.ones((2, 3)))


@pytest.mark.parametrize("case", golden.load("compute_policy_loss_vanilla"), ids=golden.by_id)
def test_golden_ppo_clip(case):
    inputs, params = case.inputs, case.params
    mask = inputs["response_mask"]
    info = params.get("global_batch_info")
    clips = {
        "clip_low": params["clip_ratio_low"],
        "clip_high": params["clip_ratio_high"],
        "clip_c": params["clip_ratio_c"],
    }

    def run(new):
        per_token, metrics = losses.ppo_clip(
            new, inputs["old_log_prob"], inputs["advantages"], mask, **clips
        )
        if "rollout_is_weights" in inputs:
            per_token = losses.weigh(per_token, inputs["rollout_is_weights"], mask)
        return aggregate(per_token, mask, params["loss_agg_mode"], info), metrics

    with case.precision():
        (loss, metrics), slope = jax.value_and_grad(run, has_aux=True)(inputs["log_prob"])
        golden.close(loss, case.outputs["loss"], case.tolerance())
        golden.close(slope, case.array("grad_log_prob"), case.tolerance())
        got = losses.mean_metrics(metrics, mask)
        want = {name.removeprefix("actor/"): v for name, v in case.outputs["metrics"].items()}
        assert set(got) == set(want)
        for name, number in want.items():
            golden.close(got[name], number, case.tolerance(whitened=True))


def aggregate(per_token, mask, mode, info):
    """Our aggregation, times the number of devices by which the original's mean over devices divides again."""
    counts = masking.count(mask, np.arange(len(mask)), len(mask))
    if info is None:
        return masking.aggregate(per_token, mask, mode, counts=counts)
    counts = counts.replace(tokens=jnp.float32(info["batch_num_tokens"]))
    return info["dp_size"] * masking.aggregate(per_token, mask, mode, counts=counts)


@pytest.mark.parametrize("case", golden.load("compute_value_loss"), ids=golden.by_id)
def test_golden_value_loss(case):
    inputs, params = case.inputs, case.params
    mask = inputs["response_mask"]
    info = params if "dp_size" in params else None

    def run(values):
        per_token, metrics = losses.value_loss(
            values, inputs["values"], inputs["returns"], mask, clip=params["cliprange_value"]
        )
        return aggregate(per_token, mask, params["loss_agg_mode"], info), metrics

    with case.precision():
        (loss, metrics), slope = jax.value_and_grad(run, has_aux=True)(inputs["vpreds"])
        golden.close(loss, case.outputs["vf_loss"], case.tolerance())
        golden.close(slope, case.array("grad_vpreds"), case.tolerance())
        share = losses.mean_metrics(metrics, mask)["vf_clipfrac"]
        golden.close(share, case.outputs["vf_clipfrac"], case.tolerance(whitened=True))
