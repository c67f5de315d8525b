"""KL estimators: golden values, finite everywhere, the right expected gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import kl
from jaxrl_llm.errors import ConfigError
from tests.algorithms import golden

KINDS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
RATIOS = [0.0, 1e-4, 0.1, 1.0, 5.0, 20.0, 88.0, 89.0, 100.0, 1e4]
GRID = np.array(RATIOS + [-ratio for ratio in RATIOS])


def reference(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative by `logprobs`, float64, of the formulas with the clip before the exponential."""
    y = np.clip(-x, -20, 20)
    k3 = np.exp(y) - y - 1
    inside = (np.abs(x) < 20) & (k3 < 10)
    table = {
        "k1": (x, np.ones_like(x)),
        "k2": (x**2 / 2, x),
        "abs": (np.abs(x), np.sign(x)),
        "k3": (np.clip(k3, -10, 10), np.where(inside, 1 - np.exp(y), 0.0)),
    }
    value, slope = table[kind.removesuffix("+")]
    return value, x if kind.endswith("+") else slope


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_log_ratio_grid(kind, dtype):
    # N8, D18: a clip after the exponential has gradient NaN from a log-ratio of 89 on.
    new = jnp.asarray(GRID[None], dtype)
    ref = jnp.zeros_like(new)

    @jax.jit
    def run(new):
        value, pull = jax.vjp(lambda new: kl.estimate(new, ref, kind), new)
        return value, pull(jnp.ones_like(value))[0]

    value, slope = (np.asarray(out, np.float64)[0] for out in run(new))
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(slope))
    x = np.asarray(new, np.float64)[0]
    small = np.abs(x) <= 5
    want, want_slope = reference(x, kind)
    np.testing.assert_allclose(value[small], want[small], rtol=1e-5, atol=1e-5)
    # The gradient comes back in the input's dtype.
    rounding = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(slope[small], want_slope[small], rtol=rounding, atol=1e-5)


def test_the_naive_k3_is_not_finite_where_ours_is():
    def naive(x):
        return jnp.clip(jnp.exp(-x) + x - 1, -10, 10)

    assert np.isnan(jax.grad(naive)(-100.0))
    ours = jax.grad(lambda x: kl.estimate(x[None, None], jnp.zeros((1, 1)), "k3")[0, 0])
    assert float(ours(jnp.float32(-100.0))) == 0.0


class Variants(chex.TestCase):
    """Hand-worked numbers, with and without jit."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_by_hand(self):
        # policy 1/2, reference 1/4: x = ln 2; k3 = 1/2 + ln 2 - 1
        new, ref = jnp.log(jnp.full((1, 1), 0.5)), jnp.log(jnp.full((1, 1), 0.25))
        want = {"k1": 0.693147, "k2": 0.240227, "abs": 0.693147, "k3": 0.193147}
        for kind, value in want.items():
            got = self.variant(lambda a, b, kind=kind: kl.estimate(a, b, kind))(new, ref)
            np.testing.assert_allclose(got, [[value]], rtol=1e-5)
        np.testing.assert_array_equal(kl.saturated(new, ref), [[0]])

    @chex.variants(with_jit=True, without_jit=True)
    def test_k3_saturates_at_10_with_gradient_0(self):
        # D18: log-ratio 5 is 142.4 unclipped
        run = self.variant(
            jax.value_and_grad(lambda x: kl.estimate(x, jnp.zeros((1, 1)), "low_var_kl")[0, 0])
        )
        value, slope = run(jnp.full((1, 1), -5.0))
        assert float(value) == 10.0 and float(slope[0, 0]) == 0.0
        np.testing.assert_array_equal(
            kl.saturated(jnp.full((1, 1), -5.0), jnp.zeros((1, 1))), [[1]]
        )

    @chex.variants(with_jit=True, without_jit=True)
    def test_penalize_by_hand(self):
        rewards = np.array([[0.0, 1.0, np.nan]], np.float32)
        old = np.array([[-1.0, -2.0, np.nan]], np.float32)
        ref = np.array([[-1.5, -1.0, np.inf]], np.float32)
        mask = np.array([[1, 1, 0]])
        run = self.variant(lambda *a: kl.penalize(*a, coef=0.1, kind="k1"))
        got, penalty = run(rewards, old, ref, mask)
        np.testing.assert_allclose(got, [[-0.05, 1.1, 0]], rtol=1e-6)
        np.testing.assert_allclose(penalty, [[0.5, -1, 0]], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_adapt_by_hand(self):
        # 20 % above the target is the limit: 0.1 (1 + 0.2 * 50 / 1000)
        run = self.variant(lambda coef, value: kl.adapt(coef, value, 50, target=1.0, horizon=1000))
        np.testing.assert_allclose(run(0.1, 7.0), 0.101, rtol=1e-6)
        np.testing.assert_allclose(run(0.1, 1.1), 0.1005, rtol=1e-6)
        np.testing.assert_allclose(run(0.1, 0.0), 0.099, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_mean_sequence_kl_by_hand(self):
        # rows of means 2 and 5; the third has no trained token
        values = np.array([[1.0, 3.0], [5.0, np.nan], [np.nan, np.nan]], np.float32)
        mask = np.array([[1, 1], [1, 0], [0, 0]])
        assert float(self.variant(kl.mean_sequence_kl)(values, mask)) == 3.5


@pytest.mark.parametrize("kind", [*KINDS, "k3_unbiased"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_garbage_under_the_mask_changes_nothing(kind, bad):
    rng = np.random.default_rng(1)
    mask = rng.integers(0, 2, (3, 5)).astype(bool)
    new, ref, old = (rng.normal(size=(3, 5)).astype(np.float32) for _ in range(3))

    def run(new, ref, old):
        def loss(new):
            return jnp.sum(kl.estimate(new, ref, kind, old_logprobs=old, mask=mask))

        return jax.value_and_grad(loss)(new)

    dirty = [np.where(mask, array, np.float32(bad)) for array in (new, ref, old)]
    for got, want in zip(run(*dirty), run(new, ref, old), strict=True):
        np.testing.assert_array_equal(got, want)


def exact_kl(logits, ref):
    logp = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logp) * (logp - ref))


def expected_gradient(logits, ref, kind):
    """Mean over the policy's own samples of the estimator's gradient, by enumeration of the vocabulary."""
    p = jax.nn.softmax(logits)
    old = jax.nn.log_softmax(logits)

    def loss(logits):
        new = jax.nn.log_softmax(logits)[None]
        per_token = kl.estimate(new, ref[None], kind, old_logprobs=old[None])[0]
        return jnp.sum(jax.lax.stop_gradient(p) * per_token)

    return jax.grad(loss)(logits)


def test_expected_gradients_are_what_the_module_says():
    rng = np.random.default_rng(2)
    # Close distributions: no token saturates k3.
    logits = jnp.asarray(0.5 * rng.normal(size=5), jnp.float32)
    ref = jax.nn.log_softmax(jnp.asarray(0.5 * rng.normal(size=5), jnp.float32))
    right = jax.grad(exact_kl)(logits, ref)
    for kind in ("k2", "k1+", "k3+", "abs+", "k3_unbiased"):
        np.testing.assert_allclose(expected_gradient(logits, ref, kind), right, atol=1e-6)
    np.testing.assert_allclose(expected_gradient(logits, ref, "k1"), np.zeros(5), atol=1e-6)
    reverse = jax.grad(lambda x: -jnp.sum(jnp.exp(ref) * jax.nn.log_softmax(x)))(logits)
    np.testing.assert_allclose(expected_gradient(logits, ref, "k3"), reverse, atol=1e-6)


def test_k3_unbiased_stays_unbiased_off_policy():
    rng = np.random.default_rng(3)
    logits, behaviour = (jnp.asarray(rng.normal(size=5), jnp.float32) for _ in range(2))
    ref = jax.nn.log_softmax(jnp.asarray(rng.normal(size=5), jnp.float32))
    old = jax.nn.log_softmax(behaviour)

    def loss(logits):
        new = jax.nn.log_softmax(logits)
        per_token = kl.estimate(new[None], ref[None], "k3_unbiased", old_logprobs=old[None])[0]
        return jnp.sum(jnp.exp(old) * per_token)

    value, slope = jax.value_and_grad(loss)(logits)
    np.testing.assert_allclose(value, exact_kl(logits, ref), rtol=1e-5)
    np.testing.assert_allclose(slope, jax.grad(exact_kl)(logits, ref), atol=1e-6)


def test_k3_unbiased_is_finite_on_the_grid():
    new, zero = jnp.asarray(GRID[None], jnp.float32), jnp.zeros((1, len(GRID)))
    for ref, old in ((zero, zero), (zero, new), (new, zero)):
        run = jax.value_and_grad(
            lambda x, ref=ref, old=old: jnp.sum(
                kl.estimate(x, ref, "k3_unbiased", old_logprobs=old)
            )
        )
        assert all(np.all(np.isfinite(out)) for out in run(new))


def test_k3_unbiased_needs_old_logprobs():
    with pytest.raises(ConfigError, match="no old_logprobs"):
        kl.estimate(np.zeros((1, 1)), np.zeros((1, 1)), "k3_unbiased")


@pytest.mark.parametrize("case", golden.load("kl_penalty"), ids=golden.by_id)
def test_golden_kl_penalty(case):
    new, ref = case.inputs["logprob"], case.inputs["ref_logprob"]
    with case.precision():
        for kind, want in case.outputs.items():
            golden.close(kl.estimate(new, ref, kind), want["value"], case.tolerance())
            slope = jax.grad(lambda new, kind=kind: jnp.sum(kl.estimate(new, ref, kind)))(new)
            golden.close(slope, want["grad_logprob_of_sum"], case.tolerance())


@pytest.mark.parametrize("case", golden.load("apply_kl_penalty"), ids=golden.by_id)
def test_golden_apply_kl_penalty(case):
    inputs, params, want = case.inputs, case.params, case.outputs
    mask = inputs["response_mask"]
    rewards, value = kl.penalize(
        inputs["token_level_scores"],
        inputs["old_log_probs"],
        inputs["ref_log_prob"],
        mask,
        coef=params["kl_coef"],
        kind=params["kl_penalty"],
    )
    golden.close(rewards, want["token_level_rewards"], case.tolerance(), mask)
    mean = kl.mean_sequence_kl(value, mask)
    golden.close(mean, want["metrics"]["actor/reward_kl_penalty"], case.tolerance())
    if params["controller"] == "adaptive":
        coef = kl.adapt(
            params["kl_coef"],
            mean,
            len(mask),
            target=params["target_kl"],
            horizon=params["horizon"],
        )
        golden.close(coef, want["coef_after_update"], case.tolerance())


@pytest.mark.parametrize(
    "case",
    [case for case in golden.load("kl_controllers") if "adaptive" in case.name],
    ids=golden.by_id,
)
def test_golden_adaptive_controller(case):
    params = case.params
    with case.precision():
        coef, got = np.float64(params["init_kl_coef"]), []
        for value in case.inputs["current_kl"]:
            coef = kl.adapt(
                coef,
                value,
                params["n_steps"],
                target=params["target_kl"],
                horizon=params["horizon"],
            )
            got.append(float(coef))
        golden.close(got, case.array("value_after_each_update"), case.tolerance())
