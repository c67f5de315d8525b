"""Rows and tables from a made-up rollout, batch and update: which names, which number under each."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_llm import report
from jaxrl_llm.knobs import RewardKnobs
from jaxrl_llm.processes import Meetings
from jaxrl_llm.records import END_EOS, END_LENGTH, Batch, Prompt, Rollout
from jaxrl_llm.rewards.grader import Grade

PARTS: Any = SimpleNamespace(
    config=SimpleNamespace(rollout=SimpleNamespace(n=2), data=SimpleNamespace(max_prompt_length=3))
)


def prompt(number):
    return Prompt(
        ids=(1, 2),
        text=f"{number}+1=?",
        messages=(),
        answer=str(number + 1),
        data_source="sums",
        extra_info={},
        prompt_id=number,
        row_id=f"sums:{number}",
    )


def rollout():
    """Two prompts of 3 and 1 tokens, responses of 2, 4, 1 and 1 tokens."""
    lengths = np.array([2, 4, 1, 1], np.int32)
    mask = np.arange(4) < lengths[:, None]
    return Rollout(
        prompt_tokens=np.zeros((2, 3), np.int32),
        prompt_lengths=np.array([3, 1], np.int32),
        response_tokens=np.zeros((4, 4), np.int32),
        response_lengths=lengths,
        response_mask=mask,
        loss_mask=mask,
        sampler_logprobs=np.zeros((4, 4), np.float32),
        filtered_logprobs=None,
        end_reason=np.array([END_EOS, END_LENGTH, END_EOS, END_EOS], np.int32),
        policy_step=np.zeros((4,), np.int32),
    )


def grades(*found):
    return [
        Grade(float(index % 2), {"f": float(index % 2)}, look) for index, look in enumerate(found)
    ]


def test_tokens_count_a_prompt_once_for_each_sample():
    assert report.tokens(rollout(), 2) == (3 + 1) * 2 + (2 + 4 + 1 + 1)


def test_the_row_of_a_rollout():
    scores = np.array([0.0, 1.0, 1.0, 1.0])
    row = report.rollout_row(PARTS, rollout(), grades(True, True, False, True), scores)
    assert row["critic/score/mean"] == 0.75 and row["reward/f/mean"] == 0.5
    assert row["response_length/mean"] == 2.0 and row["response_length/clip_ratio"] == 0.25
    assert row["prompt_length/mean"] == 2.0 and row["prompt_length/clip_ratio"] == 0.5
    assert row["groups/no_signal"] == row["groups/all_right"] == 0.5
    assert row["groups/all_wrong"] == 0.0 and row["reward/answer_found"] == 0.75


def test_a_grader_that_looks_for_no_answer_reports_none():
    row = report.rollout_row(PARTS, rollout(), grades(None, None, None, None), np.zeros(4))
    assert "reward/answer_found" not in row


def test_the_row_of_a_batch_reads_trained_tokens_of_valid_rows_only():
    mask = np.array([[True, True], [True, False], [True, True]])
    wild = np.full((3, 2), np.nan, np.float32)
    row = report.batch_row(
        Batch(
            mask=mask,
            sampler_logprobs=np.where(mask, -1.0, wild),
            scores=np.zeros(3, np.float32),
            group_ids=np.zeros(3, np.int32),
            valid=np.array([True, True, False]),
            old_logprobs=np.where(mask, -1.5, wild),
            advantages=np.array([[1.0, 2.0], [3.0, np.nan], [np.nan, np.nan]]),
            returns=np.array([[1.0, 1.0], [4.0, np.nan], [np.nan, np.nan]]),
            token_rewards=np.array([[0.5, 0.5], [0.0, np.nan], [np.nan, np.nan]]),
        ),
        Meetings(),
    )
    assert row["critic/advantages/mean"] == 2.0 and row["critic/advantages/max"] == 3.0
    assert row["critic/returns/mean"] == 2.0 and row["critic/rewards/mean"] == 0.5
    assert row["rollout/logprob_gap/mean"] == row["rollout/logprob_gap/max"] == 0.5
    assert "critic/values/mean" not in row


def update(**changes):
    """Numbers of two optimizer steps."""
    two = {name: np.array([1.0, 3.0], np.float32) for name in ("pg_loss", "loss", "grad_norm")}
    return two | {
        "lr": np.array([1e-3, 5e-4], np.float32),
        "skipped": np.array([0.0, 1.0], np.float32),
        "ratio_deviation_max": np.array([0.0, 0.25], np.float32),
        "logprob_gap": np.array([1e-7, 0.5], np.float32),
        "logprob_gap_max": np.array([1e-6, 0.75], np.float32),
        **changes,
    }


def test_the_row_of_a_policy_update():
    row = report.actor_row(update(), gap=True)
    assert row["actor/pg_loss"] == row["actor/grad_norm"] == 2.0
    assert row["actor/lr"] == np.float32(5e-4) and row["actor/skipped_updates"] == 1
    assert row["actor/ratio_deviation/first"] == 0.0 and row["actor/ratio_deviation/max"] == 0.25
    assert row["rollout/logprob_gap/mean"] == pytest.approx(1e-7)
    assert row["rollout/logprob_gap/max"] == pytest.approx(1e-6)
    assert "actor/kl_loss" not in row
    assert not any(name.startswith("rollout/") for name in report.actor_row(update(), gap=False))


def test_every_number_of_a_row_can_be_saved_as_json():
    for row in (
        report.actor_row(update(), gap=True),
        report.critic_row(update(vf_loss=np.ones(2))),
    ):
        assert {type(value) for value in row.values()} <= {float, int}


def test_the_row_of_a_critic_update():
    row = report.critic_row(update(vf_loss=np.array([2.0, 4.0])))
    assert row["critic/vf_loss"] == 3.0 and row["critic/skipped_updates"] == 1
    assert row["critic/lr"] == np.float32(5e-4)


def test_samples_are_the_first_of_the_first_groups():
    texts = ["a", "c\x1b[2J"]
    shown = report.samples([prompt(1), prompt(2)], texts, np.array([0.0, 1.0, np.nan, 1.0]), 2)
    assert [(row["row_id"], row["response"], row["answer"]) for row in shown] == [
        ("sums:1", "a", "2"),
        ("sums:2", "c\x1b[2J", "3"),
    ]
    assert shown[0]["score"] == 0.0 and np.isnan(shown[1]["score"])
    assert len(report.samples([prompt(1), prompt(2)], texts[:1], np.zeros(4), 2)) == 1
    table = report.table(shown, 7)
    assert "Samples of step 7" in table and "\x1b" not in table and "\\x1b" in table


def test_votes_are_read_as_the_first_reward_function_would():
    text = "It is 3, or 5.\n#### 4"
    votes = {
        "math": report.voter(RewardKnobs(functions=("math", "gsm8k")))("So \\boxed{3}"),
        "strict": report.voter(RewardKnobs(functions=("gsm8k",)))(text),
        "flexible": report.voter(RewardKnobs(functions=("gsm8k",), gsm8k_method="flexible"))(
            "or 5"
        ),
        "none": report.voter(RewardKnobs(functions=("gsm8k",)))("or 5"),
        "other": report.voter(RewardKnobs(functions=("format",)))("or 5"),
    }
    assert votes["strict"] == "4" and votes["flexible"] == "5" == votes["other"]
    assert votes["none"] is None and votes["math"] == "3"
