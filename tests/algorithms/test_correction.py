"""Sampler/trainer correction."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.algorithms import correction
from jaxrl_llm.errors import ConfigError
from tests.algorithms import golden

(CASE,) = golden.load("compute_rollout_correction_and_rejection_mask")
OPTIONS = CASE.outputs["by_option"]
ARRAYS = (
    CASE.inputs["old_log_prob"],
    CASE.inputs["rollout_log_prob"],
    CASE.inputs["response_mask"],
)


def threshold(text):
    parts = [float(part) for part in str(text).split("_")]
    return tuple(parts) if len(parts) == 2 else parts[0]


def label(option):
    return "-".join(str(value) for value in option["params"].values())


WEIGHTED = [option for option in OPTIONS if "rollout_is" in option["params"]]
REJECTING = [option for option in OPTIONS if "rollout_rs" in option["params"]]


def test_every_golden_option_is_used():
    assert len(WEIGHTED) + len(REJECTING) == len(OPTIONS) == 18


@pytest.mark.parametrize("option", WEIGHTED, ids=label)
def test_golden_weights(option):
    params = option["params"]
    bounds = threshold(params["rollout_is_threshold"])
    low, high = bounds if isinstance(bounds, tuple) else (None, bounds)
    with jax.enable_x64(True):
        got = correction.weights(
            *ARRAYS,
            level=params["rollout_is"],
            high=high,
            low=low,
            batch_normalize=params.get("rollout_is_batch_normalize", False),
        )
        golden.close(got, option["weights"], CASE.tolerance())
        if params["rollout_is"] == "token":
            size = correction.effective_sample_size(got, ARRAYS[2])
            want = option["metrics"]["rollout_is_eff_sample_size"]
            golden.close(size, want, CASE.tolerance(whitened=True))


@pytest.mark.parametrize("option", REJECTING, ids=label)
def test_golden_rejection(option):
    names = option["params"]["rollout_rs"].split(",")
    bounds = str(option["params"]["rollout_rs_threshold"]).split(",")
    rules = [(name, threshold(bound)) for name, bound in zip(names, bounds, strict=True)]
    with jax.enable_x64(True):
        got = correction.keep(*ARRAYS, rules)
    np.testing.assert_array_equal(got, np.asarray(option["response_mask"], bool))


def test_golden_diagnostics():
    want = CASE.outputs["offpolicy_metrics"]
    pairs = {
        "kl": "kl",
        "k3_kl": "k3_kl",
        "seq_diff_mean": "log_ppl_diff",
        "seq_diff_abs_mean": "log_ppl_abs_diff",
        "seq_diff_max": "log_ppl_diff_max",
        "seq_diff_min": "log_ppl_diff_min",
    }
    with jax.enable_x64(True):
        got = correction.diagnostics(*ARRAYS)
        for ours, theirs in pairs.items():
            golden.close(got[ours], want[theirs], CASE.tolerance(whitened=True))


def ratios(*values):
    """Old log-probs for sampler log-probs of 0, so that `e^q` are the given numbers."""
    return np.log(np.array([values], np.float32)), np.zeros((1, len(values)), np.float32)


class Variants(chex.TestCase):
    """Hand-worked numbers, with and without jit."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_weights_by_hand(self):
        old, sampler = ratios(4.0, 0.5, 2.0)
        mask = np.array([[1, 1, 0]])

        def run(**options):
            return self.variant(lambda *a: correction.weights(*a, **options))(old, sampler, mask)

        np.testing.assert_allclose(run(level="token", high=3.0), [[3, 0.5, 0]], rtol=1e-6)
        np.testing.assert_allclose(run(level="token", high=3.0, low=0.5), [[0, 0.5, 0]], rtol=1e-6)
        np.testing.assert_allclose(run(level="sequence", high=9.0), [[2, 2, 0]], rtol=1e-6)
        root = 2**0.5
        np.testing.assert_allclose(run(level="geometric", high=9.0), [[root, root, 0]], rtol=1e-6)
        mean_1 = run(level="token", high=3.0, batch_normalize=True)
        np.testing.assert_allclose(mean_1, [[3 / 1.75, 0.5 / 1.75, 0]], rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_diagnostics_by_hand(self):
        old, sampler = ratios(4.0, 1.0, 9.0)
        got = self.variant(correction.diagnostics)(old, sampler, np.array([[1, 1, 0]]))
        log4 = np.log(4.0)
        want = {
            "abs_mean": log4 / 2,
            "abs_p99": log4,
            "abs_max": log4,
            "ess": 2.5**2 / 8.5,
            "prob_diff_mean": 1.5,
            "prob_diff_max": 3.0,
            "kl": -log4 / 2,
            "k3_kl": (3 - log4) / 2,
            "seq_diff_mean": -log4 / 2,
            "seq_diff_abs_mean": log4 / 2,
            "seq_diff_max": -log4 / 2,
            "seq_diff_min": -log4 / 2,
        }
        assert set(got) == set(want)
        for name, number in want.items():
            np.testing.assert_allclose(got[name], number, rtol=1e-5, err_msg=name)

    @chex.variants(with_jit=True, without_jit=True)
    def test_keep_by_hand(self):
        old, sampler = ratios(4.0, 0.25, 1.0)
        mask = np.array([[1, 1, 1]])

        def run(*rules):
            return self.variant(lambda *a: correction.keep(*a, rules))(old, sampler, mask)[0]

        assert run().tolist() == [True] * 3
        assert run(("token_k1", 5.0)).tolist() == [True] * 3
        assert run(("token_k1", 3.0)).tolist() == [False, False, True]
        # e^stat is the inverse ratio: 1/4 and 4
        assert run(("token_k1", (0.2, 3.0))).tolist() == [True, False, True]
        assert run(("seq_sum_k1", 1.5)).tolist() == [True] * 3
        assert run(("seq_max_k2", 0.9)).tolist() == [False] * 3
        assert run(("seq_max_k2", 1.0), ("token_k1", 3.0)).tolist() == [False, False, True]


def test_equal_log_probs_need_no_correction():
    x, mask = np.full((2, 3), -1.5, np.float32), np.array([[1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(correction.weights(x, x, mask, level="token", high=2.0), mask)
    numbers = {name: float(value) for name, value in correction.diagnostics(x, x, mask).items()}
    assert numbers.pop("ess") == 1.0
    assert set(numbers.values()) == {0.0}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_under_the_mask_changes_nothing(level, bad):
    old, sampler, mask = (np.asarray(array) for array in ARRAYS)

    def run(old, sampler):
        options = {"level": level, "high": 2.0, "batch_normalize": True}
        return (
            correction.weights(old, sampler, mask, **options),
            correction.keep(old, sampler, mask, [("seq_max_k3", 0.8), ("seq_mean_k1", 2.0)]),
            correction.diagnostics(old, sampler, mask),
        )

    dirty = run(np.where(mask, old, bad), np.where(mask, sampler, -bad))
    chex.assert_trees_all_equal(dirty, run(old, sampler))


def test_everything_masked_is_0():
    x = np.full((2, 3), np.nan, np.float32)
    off = np.zeros((2, 3), bool)
    assert {float(v) for v in correction.diagnostics(x, x, off).values()} == {0.0}
    got = correction.weights(x, x, off, level="sequence", high=2.0, batch_normalize=True)
    np.testing.assert_array_equal(got, off)
    assert not np.any(correction.keep(x, x, off, [("seq_sum_k2", 1.0)]))


def test_huge_gaps_stay_finite():
    old = np.array([[1e4, -1e4, 89.0]], np.float32)
    for level in ("token", "sequence", "geometric"):
        got = correction.weights(old, np.zeros_like(old), np.ones((1, 3)), level=level, high=1e30)
        assert np.all(np.isfinite(got))
    numbers = correction.diagnostics(np.zeros_like(old), -old, np.ones((1, 3)))
    assert float(numbers["abs_max"]) == 1e4 and np.isfinite(numbers["ess"])


def test_p99_is_the_nearest_rank():
    q = np.arange(1.0, 201.0, dtype=np.float32)[None]
    numbers = correction.diagnostics(q - 300, np.full_like(q, -300.0), np.ones_like(q))
    assert float(numbers["abs_p99"]) == 198.0


def test_eight_devices_give_the_numbers_of_one():
    old, sampler, mask = (np.asarray(array) for array in ARRAYS)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    sharded = jax.device_put((old, sampler, mask), NamedSharding(mesh, P("data")))
    run = jax.jit(correction.diagnostics)
    chex.assert_trees_all_close(run(*sharded), run(old, sampler, mask), rtol=1e-5)


def test_weights_and_diagnostics_carry_no_gradient():
    old, sampler, mask = ARRAYS

    def total(old):
        w = correction.weights(old, sampler, mask, level="token", high=2.0)
        return jnp.sum(w) + sum(correction.diagnostics(old, sampler, mask).values())

    old = np.asarray(old, np.float32)
    np.testing.assert_array_equal(jax.grad(total)(old), np.zeros(mask.shape))


def test_all_bad_rules_are_reported_together():
    rules = [
        ("seq_max_k1", 2.0),
        ("token_k2", (0.1, 0.2)),
        ("token_k1", 0.5),
        ("seq_sum_k1", (2.0, 1.0)),
    ]
    with pytest.raises(ConfigError) as error:
        correction.keep(*ARRAYS, rules)
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError, match="needs one of token, sequence, geometric"):
        correction.weights(*ARRAYS, level="word", high=2.0)
