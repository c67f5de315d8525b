"""Masked reductions, whitening, counts and loss aggregation."""

import itertools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_llm
from jaxrl_llm import masking
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.masking import Counts, aggregate, count, group_tokens
from tests.algorithms import golden

MODES = tuple(masking.AGGREGATIONS)
SEQUENCE_MODES = [mode for mode in MODES if mode.startswith("seq-")]


def numbers(tokens: float, sequences: float, prompts: float = 1.0) -> Counts:
    return Counts(*(jnp.float32(number) for number in (tokens, sequences, prompts)))


def own(x, mask, mode, *, scale=10.0):
    """`aggregate` with the counts of the batch itself, every row its own prompt."""
    ids = np.arange(len(mask))
    return aggregate(
        x,
        mask,
        mode,
        counts=count(mask, ids, len(mask)),
        scale=scale,
        group_tokens=group_tokens(mask, ids, len(mask)),
    )


class Variants(chex.TestCase):
    """Hand-worked numbers, with and without jit."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_lengths_2_and_8_with_loss_1_and_horizon_10(self):
        # D28: four different readings of "the mean".
        mask = np.arange(8) < np.array([[2], [8]])
        x = np.ones((2, 8), np.float32)
        want = {
            "token-mean": 1.0,
            "seq-mean-token-mean": 1.0,
            "seq-mean-token-sum": 5.0,
            "seq-mean-token-sum-norm": 0.5,
            "token-sum": 10.0,
            "prompt-mean": 1.0,
        }
        assert set(want) == set(MODES)
        for mode, value in want.items():
            got = self.variant(lambda x, mask, mode=mode: own(x, mask, mode))(x, mask)
            assert float(got) == value, mode

    @chex.variants(with_jit=True, without_jit=True)
    def test_a_masked_sample_leaves_numerator_and_denominator(self):
        # D23: two samples of 10 tokens with loss 1, one masked, then both.
        x = np.ones((2, 10), np.float32)
        mean = self.variant(lambda mask: own(x, mask, "token-mean"))
        one = np.repeat([[True], [False]], 10, axis=1)
        assert float(mean(one)) == 1.0
        assert float(mean(np.zeros((2, 10), bool))) == 0.0

    @chex.variants(with_jit=True, without_jit=True)
    def test_count_counts_what_has_trained_tokens(self):
        mask = np.array([[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]])
        got = self.variant(lambda m, g: count(m, g, 3))(mask, np.array([0, 0, 0, 2]))
        assert [float(v) for v in (got.tokens, got.sequences, got.prompts)] == [3.0, 2.0, 1.0]
        assert got.tokens.dtype == jnp.float32
        tokens = self.variant(lambda m, g: group_tokens(m, g, 3))(mask, np.array([0, 0, 0, 2]))
        np.testing.assert_array_equal(tokens, [3, 3, 3, 0])

    @chex.variants(with_jit=True, without_jit=True)
    def test_whiten_by_hand(self):
        # mean 2, deviations -1 0 1, variance 1 with ddof 1
        x, mask = np.array([1.0, 2.0, 3.0, 99.0], np.float32), np.array([1, 1, 1, 0])
        np.testing.assert_allclose(self.variant(masking.whiten)(x, mask), [-1, 0, 1, 0], rtol=1e-6)
        kept = self.variant(lambda x, m: masking.whiten(x, m, shift_mean=False))(x, mask)
        np.testing.assert_allclose(kept, [1, 2, 3, 0], rtol=1e-6)


def test_prompt_mean_weighs_every_prompt_the_same():
    # prompt 0: tokens 1 1 1 1 (two rows); prompt 1: one token of 3 -> (4/4 + 3/1) / 2
    x = np.array([[1, 1, 1], [1, 0, 0], [3, 0, 0]], np.float32)
    mask, ids = np.array([[1, 1, 1], [1, 0, 0], [1, 0, 0]]), np.array([0, 0, 1])
    counts, tokens = count(mask, ids, 2), group_tokens(mask, ids, 2)
    got = aggregate(x, mask, "prompt-mean", counts=counts, group_tokens=tokens)
    assert float(got) == 2.0


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up_to_the_mini_batch(mode):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 6)).astype(np.float32)
    mask = np.arange(6) < rng.integers(0, 7, size=(8, 1))
    ids = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    counts, tokens = count(mask, ids, 4), group_tokens(mask, ids, 4)

    def loss(x, rows):
        part = {"counts": counts, "scale": 7.0, "group_tokens": tokens[rows]}
        return aggregate(x[rows], mask[rows], mode, **part)

    whole, slope = jax.value_and_grad(lambda x: loss(x, slice(0, 8)))(x)
    for cuts in ([0, 4, 8], [0, 1, 2, 7, 8]):
        parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        got, grad = jax.value_and_grad(lambda x, p=parts: sum(loss(x, rows) for rows in p))(x)
        np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_everything_masked_gives_exactly_0(mode):
    x = jnp.full((3, 4), jnp.nan)
    value, slope = jax.value_and_grad(lambda x: own(x, np.zeros((3, 4)), mode))(x)
    assert float(value) == 0.0
    np.testing.assert_array_equal(slope, np.zeros((3, 4)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_garbage_under_the_mask_changes_nothing(mode, bad):
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    mask = np.array([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], bool)
    run = jax.value_and_grad(lambda x: own(x, mask, mode))
    for got, want in zip(run(np.where(mask, x, np.float32(bad))), run(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_garbage_under_the_mask_changes_no_reduction():
    x, mask = np.array([1.0, np.nan, 4.0, np.inf], np.float32), np.array([1, 0, 1, 0])
    assert float(masking.masked_sum(x, mask)) == 5.0
    assert float(masking.masked_mean(x, mask)) == 2.5
    assert float(masking.masked_var(x, mask)) == 4.5
    assert float(masking.masked_var(x, mask, bessel=False)) == 2.25
    np.testing.assert_allclose(masking.whiten(x, mask), [-(0.5**0.5), 0, 0.5**0.5, 0], rtol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(jnp.square(masking.whiten(x, mask)) * np.arange(4)))(x)
    assert np.all(np.isfinite(slope))
    np.testing.assert_array_equal(np.asarray(slope)[[1, 3]], [0, 0])


def test_a_nan_on_a_trained_token_stays_visible():
    x = np.array([[1.0, np.nan]], np.float32)
    assert np.isnan(own(x, np.ones((1, 2)), "token-mean"))


def test_whiten_degenerate_cases():
    x = np.array([[5.0, 7.0]], np.float32)
    np.testing.assert_array_equal(masking.whiten(x, np.array([[0, 1]])), [[0, 7]])
    np.testing.assert_array_equal(masking.whiten(x, np.array([[0, 0]])), [[0, 0]])
    equal = np.full((4, 7), 0.3, np.float32)
    np.testing.assert_array_equal(masking.whiten(equal, np.ones((4, 7))), np.zeros((4, 7)))


def test_empty_arrays_reduce_to_0():
    x = np.zeros((0, 4), np.float32)
    assert float(masking.masked_mean(x, x)) == 0.0
    assert float(masking.masked_var(x, x)) == 0.0
    assert float(count(x, np.zeros(0, np.int32), 2).tokens) == 1.0


def test_metrics_of_10_and_990_tokens_are_weighted_by_tokens():
    # D24 / N13: 10 tokens with KL 1 and 990 with KL 0, in two halves.
    mask = np.arange(990) < np.array([[10], [990]])
    kl = np.where(np.array([[True], [False]]), 1.0, 0.0) * np.ones((2, 990))
    counts = count(mask, np.arange(2), 2)
    parts = [aggregate(kl[i : i + 1], mask[i : i + 1], "token-mean", counts=counts) for i in (0, 1)]
    assert float(sum(parts)) == pytest.approx(0.01)
    means = [masking.masked_mean(kl[i], mask[i]) for i in (0, 1)]
    assert float(sum(means)) / 2 == 0.5  # the bug this guards against


@pytest.mark.parametrize("mode", MODES)
def test_eight_devices_give_the_number_of_one(mode):
    # The longest row lives on one shard alone: a mean of per-device means would differ.
    x = np.arange(80.0, dtype=np.float32).reshape(8, 10)
    mask = np.arange(10) < np.array([[10], [1], [0], [2], [1], [1], [3], [1]])
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    sharded = jax.device_put((x, mask), NamedSharding(mesh, P("data")))
    run = jax.jit(lambda x, mask: own(x, mask, mode))
    np.testing.assert_allclose(run(*sharded), run(x, mask), rtol=1e-6)


def test_bad_modes_are_refused_with_what_to_do():
    x, counts = np.ones((1, 1)), numbers(1, 1)
    with pytest.raises(ConfigError, match=r"token-average.*needs one of token-mean"):
        aggregate(x, x, "token-average", counts=counts)
    with pytest.raises(ConfigError, match="set loss_scale_factor"):
        aggregate(x, x, "seq-mean-token-sum-norm", counts=counts)
    with pytest.raises(ConfigError, match="no group_tokens"):
        aggregate(x, x, "prompt-mean", counts=counts)


def test_modes_are_those_of_the_settings():
    from typing import get_args

    from jaxrl_llm.knobs.actor import LossAggregation

    assert set(get_args(LossAggregation)) == set(MODES)


@pytest.mark.parametrize("case", golden.load("agg_loss"), ids=golden.by_id)
def test_golden_agg_loss(case):
    x, mask = case.inputs["loss_mat"], case.inputs["loss_mask"]
    params = case.params
    tokens, sequences = params["batch_num_tokens_for_split"], params["global_batch_size_for_split"]
    with case.precision():
        for mode, want in case.outputs.items():
            tolerance = case.tolerance()
            width = x.shape[1]
            golden.close(own(x, mask, mode, scale=width), want["local"], tolerance)
            golden.close(own(x, mask, mode, scale=16.0), want["loss_scale_factor16"], tolerance)
            # The factor dp_size of the original cancels its mean over devices; ours sums and has none.
            wide = numbers(50, 32) if mode == "token-mean" else count(mask, range_ids(mask), 1)
            sharded = aggregate(x, mask, mode, counts=wide, scale=width)
            if mode in ("token-mean", "token-sum"):
                golden.close(
                    4 * sharded, want["dp_size4_batch_num_tokens50_global_batch_size32"], tolerance
                )
            cut = params["micro_split"][0]
            parts = [
                aggregate(
                    x[rows],
                    mask[rows],
                    mode,
                    counts=numbers(tokens, sequences),
                    scale=params["loss_scale_factor_for_split"],
                )
                for rows in (slice(0, cut), slice(cut, None))
            ]
            golden.close(parts, want["two_microbatches_with_global_counts"], tolerance)
            golden.close(sum(parts), want["sum_of_microbatches"], tolerance)


def range_ids(mask):
    return np.zeros(len(mask), np.int32)


EXCLUDED_SPLITS = {
    "agg_loss/one_fully_masked_row": "counts 9 sequences; ours counts the 8 with a trained token",
}


@pytest.mark.parametrize("case", golden.load("agg_loss"), ids=golden.by_id)
@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_golden_splits_with_our_own_counts(case, mode):
    x, mask = case.inputs["loss_mat"], case.inputs["loss_mask"]
    with case.precision():
        got = own(x, mask, mode, scale=case.params["loss_scale_factor_for_split"])
        want = case.outputs[mode]["sum_of_microbatches"]
        same = np.allclose(got, want, **case.tolerance())
    assert same == (case.id not in EXCLUDED_SPLITS)


@pytest.mark.parametrize("case", golden.load("masked_whiten"), ids=golden.by_id)
def test_golden_masked_whiten(case):
    x, mask = case.inputs["values"], case.inputs["mask"]
    tolerance = case.tolerance(whitened=True)
    if np.abs(x).max() > 500:
        tolerance = {"rtol": 1e-5, "atol": 1e-4}
    with case.precision():
        whitened = masking.whiten(x, mask, case.params["shift_mean"])
        golden.close(whitened, case.array("whitened"), tolerance, mask)
        np.testing.assert_array_equal(np.asarray(whitened)[~mask], 0)
        golden.close(masking.masked_mean(x, mask), case.outputs["masked_mean"], tolerance)
        golden.close(masking.masked_var(x, mask), case.outputs["masked_var_unbiased"], tolerance)
        biased = masking.masked_var(x, mask, bessel=False)
        golden.close(biased, case.outputs["masked_var_biased"], tolerance)


def test_nothing_in_the_package_hides_a_nan():
    # N14: one place may refuse a number; nothing may replace it in silence.
    word = "nan_to" + "_num"
    files = sorted(Path(jaxrl_llm.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    assert [str(file) for file in files if word in file.read_text()] == []
