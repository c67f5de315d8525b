"""Shares of prompts and the journey of rollouts and grades; other processes are played by made-up gathers."""

import jax
import numpy as np
import pytest

from jaxrl_llm import exchange, processes
from jaxrl_llm.records import END_EOS, Rollout
from jaxrl_llm.rewards.grader import Grade
from jaxrl_llm.rollout.engine import Stats


@pytest.fixture
def playing(monkeypatch):
    """Be process `number` of `count`."""

    def play(number, count):
        monkeypatch.setattr(jax, "process_index", lambda: number)
        monkeypatch.setattr(jax, "process_count", lambda: count)

    return play


@pytest.mark.parametrize(
    ("total", "count", "shares"),
    [
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (5, 4, [[0, 1], [2, 3], [4], [0]]),
        (1, 2, [[0], [0]]),
        (4, 1, [[0, 1, 2, 3]]),
    ],
)
def test_shares_are_blocks_in_order(playing, total, count, shares):
    """A process for which no item is left works on the first one."""
    found = []
    for number in range(count):
        playing(number, count)
        found.append(list(exchange.share(list(range(total)))))
    assert found == shares


def rollout(prompts, n=2, first=0):
    """Rows that can be told apart: row r of prompt p holds 10 p + r."""
    rows = prompts * n
    numbers = np.array([10 * (first + row // n) + row % n for row in range(rows)], np.int32)
    return Rollout(
        prompt_tokens=np.arange(first, first + prompts, dtype=np.int32)[:, None].repeat(3, 1),
        prompt_lengths=np.full((prompts,), 3, np.int32),
        response_tokens=numbers[:, None].repeat(2, 1),
        response_lengths=np.full((rows,), 2, np.int32),
        response_mask=np.ones((rows, 2), bool),
        loss_mask=np.ones((rows, 2), bool),
        sampler_logprobs=-numbers[:, None].repeat(2, 1).astype(np.float32),
        filtered_logprobs=None,
        end_reason=np.full((rows,), END_EOS, np.int32),
        policy_step=np.ones((rows,), np.int32),
    )


GRADES = [
    Grade(1.5, {"a": 1.0, "b": 0.5}, True),
    Grade(float("nan"), {"a": None, "b": None}, None, "boom", True),
    Grade(float("nan"), {"a": None, "b": 0.0}, False),
    Grade(0.1, {"a": float("nan"), "b": -0.0}, None),
    Grade(float("nan"), {"a": None, "b": 1.0}, None, "boom again"),
    Grade(0.0, {"a": 0.0, "b": 0.0}, False),
]
"""Of three prompts with two samples each."""


def test_one_process_keeps_what_it_has():
    mine = rollout(3)
    found, grades = exchange.all_rows(mine, GRADES, ("a", "b"), ["boom"], 3)
    assert found is mine and grades == GRADES


def test_rows_and_grades_of_two_processes_in_the_order_of_the_prompts(playing, monkeypatch):
    """Process 0 has two of three prompts, process 1 the last one, filled up with zeros; abstentions, NaN and flags stay what they are."""
    sent = []
    monkeypatch.setattr(processes, "gather_rows", lambda rows: sent.append(rows) or rows)
    for number, (mine, grades) in enumerate(
        [(rollout(2), GRADES[:4]), (rollout(1, first=2), GRADES[4:])]
    ):
        playing(number, 2)
        exchange.all_rows(mine, grades, ("a", "b"), ["boom", "boom again"], 3)
    assert [len(rows["prompt_tokens"]) for rows in sent] == [2, 2]
    assert [len(rows["score"]) for rows in sent] == [4, 4]
    both = {name: np.concatenate([rows[name] for rows in sent]) for name in sent[0]}
    monkeypatch.setattr(processes, "gather_rows", lambda rows: both)
    for number, mine in enumerate([rollout(2), rollout(1, first=2)]):
        playing(number, 2)
        share = GRADES[:4] if number == 0 else GRADES[4:]
        found, grades = exchange.all_rows(mine, share, ("a", "b"), ["boom", "boom again"], 3)
        assert found.response_tokens[:, 0].tolist() == [0, 1, 10, 11, 20, 21]
        assert found.prompt_tokens[:, 0].tolist() == [0, 1, 2]
        assert found.filtered_logprobs is None and found.response_mask.dtype == bool
        assert repr(grades) == repr(GRADES)


def test_later_failures_of_a_process_are_told_by_their_place(playing, monkeypatch):
    playing(0, 2)
    failed = [Grade(float("nan"), {"a": None}, None, text) for text in ("first", "second")]
    both = exchange._spelled(failed + failed, ["a"])
    rows = {**{name: np.zeros((4, 1)) for name in exchange.ROW_FIELDS}, **both}
    monkeypatch.setattr(
        processes,
        "gather_rows",
        lambda _: rows | {name: np.zeros((2, 1)) for name in exchange.PROMPT_FIELDS},
    )
    _, grades = exchange.all_rows(rollout(1), failed, ("a",), ["first", "other"], 2)
    assert [grade.failure for grade in grades] == [
        "first",
        "a failure on process 0",
        "other",
        "a failure on process 1",
    ]


def test_costs_add_up():
    """60 of 120 slot steps and 30 of 40."""
    one, two = Stats(0.5, 12, 7, 60), Stats(0.75, 9, 5, 30)
    assert exchange.all_stats([one]) is one
    assert exchange.all_stats([one, two]) == Stats(90 / 160, 12, 12, 90)
    assert exchange.all_stats([Stats(0.0, 0, 0, 0), one]).slot_utilisation == 0.5
