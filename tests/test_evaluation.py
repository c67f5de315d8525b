"""Majority votes, group metrics by hand, and an evaluation over two data sources with a fake sampler."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.evaluation import evaluate, group_metrics, majority
from jaxrl_llm.records import Prompt
from jaxrl_llm.rewards.grader import Grade


@pytest.mark.parametrize(
    ("votes", "right", "expected"),
    [
        (["4", "5", "4"], [1, 0, 1], 1.0),
        (["4", "5", "5"], [1, 0, 0], 0.0),
        (["5", "4", "4", "5"], [0, 1, 1, 0], 0.0),
        (["4", "5", "5", "4"], [1, 0, 0, 1], 1.0),
        ([None, None, "4"], [0, 0, 1], 1.0),
        ([None, None], [1, 1], 0.0),
        ([], [], 0.0),
        (["", None], [1, 0], 1.0),
        (["7"], [0.5], 0.5),
    ],
)
def test_majority(votes, right, expected):
    """The first seen wins a tie; responses without an answer do not vote, however many they are."""
    assert majority(votes, right) == expected


def test_group_metrics_worked_by_hand():
    """Means 4/6; best 1 and 1; the vote of the second group goes to the wrong answer."""
    right = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    votes = [["4", "4", "4"], ["9", "8", "9"]]
    assert group_metrics(right, votes) == pytest.approx(
        {"acc/mean@3": 4 / 6, "acc/best@3": 1.0, "acc/maj@3": 0.5}
    )


PROMPTS = [
    Prompt((1,), f"q{i}", (), str(i), "even" if i % 2 == 0 else "odd", {}, i, f"f:{i + 1}")
    for i in range(5)
]


def grade(acc, score=None, found: bool | None = True):
    return Grade(
        score=acc if score is None else score,
        parts={"right": acc, "extra": 0.25},
        answer_found=found,
    )


class Fake:
    """Greedy answers are right for prompts 0, 1, 4; the grader failed on 3; samples: prompt i answers i, then twice i + 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __call__(self, prompts, greedy):
        self.calls.append((len(prompts), greedy))
        numbers = [prompt.prompt_id for prompt in prompts]
        if greedy:
            grades = [
                Grade(float("nan"), {"right": None, "extra": None}, None, failure="boom") if i == 3
                else grade(float(i in (0, 1, 4)), score=2.0 * (i in (0, 1, 4)), found=i != 2)
                for i in numbers
            ]  # fmt: skip
            rollout = SimpleNamespace(response_lengths=np.array([10 + i for i in numbers]))
            return rollout, grades, [f"greedy {i}" for i in numbers]
        grades = [grade(float(k == 0)) for _ in numbers for k in range(3)]
        texts = [str(i + (k > 0)) for i in numbers for k in range(3)]
        return SimpleNamespace(response_lengths=None), grades, texts


def run(n):
    fake = Fake()
    metrics, samples = evaluate(
        PROMPTS, batch_size=2, n=n, sample=fake, vote=lambda text: text, correctness="right"
    )
    return fake, metrics, samples


def test_greedy_metrics_per_data_source():
    """even: prompts 0, 2, 4 (right, wrong, right; one without an answer); odd: 1, 3 (right, failed)."""
    fake, metrics, samples = run(1)
    assert fake.calls == [(2, True), (2, True), (1, True)]
    assert metrics == pytest.approx(
        {
            "val/even/acc/mean@1": 2 / 3,
            "val/even/reward/mean@1": 4 / 3,
            "val/even/response_length/mean@1": 12.0,
            "val/even/answer_found/mean@1": 2 / 3,
            "val/odd/acc/mean@1": 0.5,
            "val/odd/reward/mean@1": 1.0,
            "val/odd/response_length/mean@1": 12.0,
            "val/odd/answer_found/mean@1": 1.0,
            "val/odd/reward_failed/mean@1": 0.5,
        }
    )
    assert [sample["row_id"] for sample in samples] == [f"f:{i + 1}" for i in range(5)]
    assert samples[0] == {
        "row_id": "f:1", "prompt": "q0", "response": "greedy 0", "answer": "0", "score": 2.0, "acc": 1.0,
    }  # fmt: skip
    assert (samples[3]["score"], samples[3]["acc"]) == (0.0, 0.0)


def test_sampled_metrics_come_on_top():
    """One of three samples is right, and it is outvoted by the two wrong ones that agree."""
    fake, metrics, samples = run(3)
    assert fake.calls == [(2, True), (2, False), (2, True), (2, False), (1, True), (1, False)]
    for source in ("even", "odd"):
        assert metrics[f"val/{source}/acc/mean@3"] == pytest.approx(1 / 3)
        assert metrics[f"val/{source}/acc/best@3"] == 1.0
        assert metrics[f"val/{source}/acc/maj@3"] == 0.0
    assert metrics["val/even/acc/mean@1"] == pytest.approx(2 / 3)
    assert len(samples) == 5
    assert run(1)[1].items() <= metrics.items()


def test_no_answer_column_where_no_function_looks_for_one_and_nothing_without_prompts():
    sample = lambda prompts, greedy: (  # noqa: E731
        SimpleNamespace(response_lengths=np.array([1])), [grade(1.0, found=None)], ["x"],
    )  # fmt: skip
    rest = {
        "batch_size": 4,
        "n": 1,
        "sample": sample,
        "vote": lambda text: text,
        "correctness": "right",
    }
    metrics, _ = evaluate(PROMPTS[:1], **rest)
    assert set(metrics) == {
        f"val/even/{name}/mean@1" for name in ("acc", "reward", "response_length")
    }
    assert evaluate([], **rest) == ({}, [])
