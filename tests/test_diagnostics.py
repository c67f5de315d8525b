import copy
import math

import pytest

from jaxrl_llm.diagnostics import READINGS, check, news

HEALTHY = {
    "step": 5,
    "groups/no_signal": 0.4,
    "groups/all_right": 0.2,
    "groups/all_wrong": 0.2,
    "critic/advantages/std": 0.9,
    "critic/score/mean": 0.5,
    "actor/pg_clipfrac": 0.05,
    "actor/kl_loss": 0.01,
    "actor/entropy": 0.8,
    "reward/answer_found": 0.9,
    "response_length/mean": 100.0,
    "response_length/clip_ratio": 0.1,
    "rollout/logprob_gap/mean": 1e-6,
    "data/source": "gsm8k",
}
HISTORY = [HEALTHY] * 4


def names(changes, history=HISTORY, **options):
    return [alarm.name for alarm in check(HEALTHY | changes, history, **options)]


def test_a_healthy_row_and_an_empty_one_raise_nothing():
    assert (
        names({}) == []
        and check({}, []) == []
        and check(HEALTHY, []) == []
        and check({}, [{}] * 5) == []
    )


@pytest.mark.parametrize(
    "key, quiet, loud, name",
    [
        ("reward/failed", 0.0, 1.0, "reward_failures"),
        ("groups/no_signal", 0.8, 0.81, "no_signal"),
        ("critic/advantages/std", 1e-3, 0.9e-3, "flat_advantages"),
        ("critic/advantages/std", 1e-3, 0.0, "flat_advantages"),
        ("actor/pg_clipfrac", 0.3, 0.31, "clipping"),
        ("actor/kl_loss", 10.0, 10.1, "divergence"),
        ("actor/entropy", 0.0081, 0.0079, "entropy_collapse"),
        ("response_length/mean", 200.0, 201.0, "length_growth"),
        ("response_length/mean", 50.0, 49.0, "length_shrink"),
        ("rollout/logprob_gap/mean", 1e-2, 1.1e-2, "logprob_gap"),
        ("response_length/clip_ratio", 0.5, 0.51, "truncation"),
        ("actor/grad_norm", 1e30, math.nan, "not_finite"),
        ("actor/grad_norm", 1e30, -math.inf, "not_finite"),
    ],
)
def test_thresholds(key, quiet, loud, name):
    assert names({key: quiet}) == []
    assert names({key: loud}) == [name]


def test_kl_against_its_target():
    assert names({"actor/kl_loss": 1.0}, target_kl=0.1) == []
    assert names({"actor/kl_loss": 1.01}, target_kl=0.1) == ["divergence"]
    (alarm,) = check(HEALTHY | {"actor/kl_loss": 3.0}, HISTORY, target_kl=0.1)
    assert "30 times the target of 0.1" in alarm.message


def test_reward_failures_count_samples_and_time_outs():  # E1, E2
    (alarm,) = check(HEALTHY | {"reward/failed": 3.0, "reward/timeout": 2.0}, HISTORY)
    assert alarm.message.startswith("3 samples could not be graded (2 of them ran out of time)")


def test_no_answer_needs_two_batches_and_shows_three_raw_ends():
    silent = {"reward/answer_found": 0.0}
    assert names(silent) == []
    history = [*HISTORY, HEALTHY | silent]
    examples = ["x" * 500 + f"\n end {i}\x1b[0m" for i in range(5)]
    (alarm,) = check(HEALTHY | silent, history, examples=examples)
    assert alarm.name == "no_answer"
    assert (
        alarm.advice.count("end ") == 3 and "end 2" in alarm.advice and "end 3" not in alarm.advice
    )
    assert "\x1b" not in str(alarm) and len(str(alarm)) < 1500
    assert names(silent, history=[*history, HEALTHY]) == []


def test_no_signal_advice_depends_on_which_groups_are_silent():
    def advice(right, wrong):
        row = HEALTHY | {
            "groups/no_signal": 0.9,
            "groups/all_right": right,
            "groups/all_wrong": wrong,
        }
        return check(row, HISTORY)[0].advice

    assert "harder" in advice(0.8, 0.1)
    assert "grader" in advice(0.1, 0.8)
    assert "temperature" in advice(0.1, 0.1)


def test_entropy_is_measured_against_the_first_one_logged():
    history = [{"actor/entropy": math.nan}, {}, {"actor/entropy": 2.0}, {"actor/entropy": 0.5}]
    assert names({"actor/entropy": 0.019, "response_length/mean": 1.0}, history) == [
        "entropy_collapse"
    ]
    assert names({"actor/entropy": 0.021}, history) == []
    assert names({"actor/entropy": 0.0}, []) == []


def test_length_waits_for_three_rows():
    assert names({"response_length/mean": 900.0}, HISTORY[:2]) == []
    drifting = [HEALTHY | {"response_length/mean": v} for v in (90.0, 100.0, 110.0, 5000.0)]
    assert names({"response_length/mean": 150.0}, drifting) == []


def test_nan_raises_its_own_alarm_and_no_other():
    row = {key: math.nan if isinstance(value, float) else value for key, value in HEALTHY.items()}
    (alarm,) = check(row, HISTORY, target_kl=0.1)
    assert alarm.name == "not_finite" and "more" in alarm.message


def test_news_tells_only_what_begins():
    bad = HEALTHY | {"actor/pg_clipfrac": 0.5}
    worse = bad | {"rollout/logprob_gap/mean": 0.1}
    assert [a.name for a in news(bad, HISTORY)] == ["clipping"]
    assert news(bad, [*HISTORY, bad]) == []
    assert [a.name for a in news(worse, [*HISTORY, bad])] == ["logprob_gap"]
    assert [a.name for a in news(bad, [*HISTORY, bad, HEALTHY])] == ["clipping"]


def test_readings_are_pure_and_every_alarm_says_something():
    row, history = HEALTHY | {"actor/pg_clipfrac": 0.9, "response_length/mean": 1.0}, list(HISTORY)
    before = copy.deepcopy((row, history))
    first = check(row, history)
    assert first == check(row, history) and (row, history) == before
    assert [alarm.name for alarm in first] == ["clipping", "length_shrink"]
    assert all(alarm.message.endswith(".") and alarm.advice for alarm in first)
    assert all(reading.__doc__ for reading in READINGS.values())
