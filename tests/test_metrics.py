import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.metrics import (
    CompileCounter,
    Phases,
    merge_rows,
    peak_rss_mb,
    summarize_batch,
    summarize_rollout,
    throughput,
)
from jaxrl_llm.records import END_EOS, END_LENGTH, END_STOP


def test_compile_counter_counts_new_programs_only():
    counter = CompileCounter()
    x = jnp.ones(3)
    counter.delta()
    f = jax.jit(lambda y: y * 3 + 1)
    f(x)
    assert counter.delta() == 1
    f(x)
    assert counter.delta() == 0
    other = CompileCounter()
    f(jnp.ones(4))
    row = other.row()
    assert row["perf/compilations"] == counter.delta() >= 1 and row["perf/compile_s"] > 0


def test_phases_add_up_and_reset():
    times = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0, 23.0, 24.0])
    phases = Phases(clock=lambda: next(times))
    with phases("gen"):
        pass
    with pytest.raises(KeyError), phases("gen"):
        raise KeyError
    with phases("step"), phases("update"):
        pass
    assert phases.row() == {"timing_s/gen": 2.5, "timing_s/update": 2.0, "timing_s/step": 4.0}
    phases.reset()
    assert phases.row() == {}


def test_peak_memory_is_in_megabytes():
    assert 20 < peak_rss_mb() < 200_000


def test_throughput_by_hand():
    assert throughput(1000, 4.0, 5) == {
        "perf/total_num_tokens": 1000,
        "perf/time_per_step": 4.0,
        "perf/throughput": 50.0,
    }
    assert "perf/throughput" not in throughput(1000, 0.0, 5)


def test_parts_are_merged_by_weight_not_as_a_mean_of_means():
    rows = [
        {"kl": 1.0, "x/max": 3.0, "x/min": 1.0},
        {"kl": 0.0, "x/max": 2.0, "x/min": -1.0, "only": 4.0},
    ]
    merged = merge_rows(rows, [10, 990])
    assert merged == {"kl": pytest.approx(0.01), "x/max": 3.0, "x/min": -1.0, "only": 4.0}
    assert merge_rows([{"kl": math.nan}, {"kl": 2.0}], [0, 3]) == {"kl": 2.0}
    assert merge_rows([{"kl": math.nan}], [0]) == {}


def rollout(scores, **changes):
    count = len(scores)
    base: dict[str, Any] = {
        "scores": np.asarray(scores, np.float32),
        "response_lengths": np.arange(1, count + 1),
        "prompt_lengths": np.full(count, 5),
        "end_reason": np.full(count, END_EOS),
        "group_size": 2,
    }
    return summarize_rollout(**(base | changes))


def test_rollout_by_hand():
    row = rollout(
        [1, 1, 0, 0, 0, 1, 0.5, 0.5],
        response_lengths=np.array([0, 2, 4, 6, 8, 10, 12, 14]),
        prompt_lengths=np.array([3, 5, 7, 9]),
        end_reason=np.array([END_EOS, END_LENGTH, END_STOP, END_EOS] * 2),
        max_prompt_length=9,
        answer_found=np.array([1, 1, 1, 1, 1, 1, 0, 0]),
    )
    assert row == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "response_length/mean": 7.0,
        "response_length/max": 14.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 6.0,
        "prompt_length/max": 9.0,
        "prompt_length/min": 3.0,
        "prompt_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.125,
        "reward/not_finite": 0.0,
        "reward/answer_found": 0.75,
        "groups/no_signal": 0.75,
        "groups/all_right": 0.25,
        "groups/all_wrong": 0.25,
    }


def test_rows_that_do_not_count_change_nothing():
    clean = rollout([1, 0, 0, 0])
    noisy = rollout(
        [1, 0, 0, 0, 7, np.nan],
        response_lengths=np.array([1, 2, 3, 4, 999, 999]),
        prompt_lengths=np.array([5, 5, 5, 5, 77, 77]),
        end_reason=np.array([END_EOS] * 4 + [END_LENGTH] * 2),
        valid=np.array([1, 1, 1, 1, 0, 0]),
    )
    assert clean == noisy
    assert clean["groups/no_signal"] == 0.5 and clean["groups/all_wrong"] == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_never_counts_as_a_score(bad):
    row = rollout([1, bad, 1, 0])
    assert row["critic/score/mean"] == pytest.approx(2 / 3) and row["critic/score/max"] == 1
    assert row["reward/not_finite"] == 0.25 and row["response_length/mean"] == 2.5
    assert row["groups/no_signal"] == 0.5 and row["groups/all_right"] == 0.5


def test_shifted_scores_shift_means_and_leave_the_signal():
    a, b = rollout([1, 0, 0.3, 0.3]), rollout([11, 10, 10.3, 10.3])
    assert b["critic/score/mean"] == pytest.approx(a["critic/score/mean"] + 10)
    assert a["groups/no_signal"] == b["groups/no_signal"] == 0.5


def test_degenerate_rollouts():
    nothing = rollout([1.0, 0.0], valid=np.zeros(2))
    assert nothing == {}
    single = rollout([1.0, 0.0], group_size=1)
    assert not any(key.startswith("groups/") for key in single)
    without = rollout([1.0, 1.0], max_score=None, min_score=None)
    assert without["groups/no_signal"] == 1 and "groups/all_right" not in without
    all_nan = rollout([np.nan, np.nan])
    assert "critic/score/mean" not in all_nan and all_nan["reward/not_finite"] == 1.0


MASK = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
VALID = np.array([1, 1, 1, 0])
POISON = np.array([[0, 0, np.nan], [0, np.nan, np.inf], [np.nan] * 3, [np.nan] * 3])


def test_batch_by_hand_with_poison_in_masked_places():
    row = summarize_batch(
        mask=MASK,
        valid=VALID,
        advantages=POISON + np.array([[1, -2, 0], [4, 0, 0], [0] * 3, [0] * 3]),
        returns=POISON + np.array([[1, 2, 0], [3, 0, 0], [0] * 3, [0] * 3]),
        values=POISON + np.array([[1, 2, 0], [0, 0, 0], [0] * 3, [0] * 3]),
        token_rewards=POISON + np.array([[0.5, 1, 0], [-1, 0, 0], [0] * 3, [0] * 3]),
        old_logprobs=POISON + np.array([[-1, -2, 0], [-3, 0, 0], [0] * 3, [0] * 3]),
        sampler_logprobs=POISON + np.array([[-1, -2.5, 0], [-2, 0, 0], [0] * 3, [0] * 3]),
    )
    expected = {
        "critic/advantages/mean": 1.0,
        "critic/advantages/max": 4.0,
        "critic/advantages/min": -2.0,
        "critic/advantages/std": math.sqrt(6),
        "critic/rewards/mean": 0.25,
        "critic/rewards/max": 1.5,
        "critic/rewards/min": -1.0,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 3.0,
        "critic/returns/min": 1.0,
        "critic/values/mean": 1.0,
        "critic/values/max": 2.0,
        "critic/values/min": 0.0,
        "critic/vf_explained_var": 1 - 2 / (2 / 3 + 1e-5),
        "rollout/logprob_gap/mean": 0.5,
        "rollout/logprob_gap/max": 1.0,
    }
    assert row == pytest.approx(expected)


def test_a_perfect_critic_explains_everything():
    returns = np.array([[1.0, 5.0, 2.0]])
    row = summarize_batch(mask=np.ones((1, 3)), advantages=returns, returns=returns, values=returns)
    assert row["critic/vf_explained_var"] == 1.0


def test_nothing_trained_is_an_empty_row_and_nan_in_a_trained_token_shows():
    assert summarize_batch(mask=np.zeros((2, 3)), advantages=np.ones((2, 3))) == {}
    row = summarize_batch(mask=np.ones((1, 2)), advantages=np.array([[np.inf, np.nan]]))
    assert math.isnan(row["critic/advantages/mean"]) and math.isnan(row["critic/advantages/std"])


def test_bfloat16_arrays_are_reduced_in_float64():
    advantages = jnp.full((1, 1000), 0.1, jnp.bfloat16)
    row = summarize_batch(mask=np.ones((1, 1000)), advantages=advantages)
    assert row["critic/advantages/mean"] == pytest.approx(float(jnp.bfloat16(0.1)), rel=1e-12)
