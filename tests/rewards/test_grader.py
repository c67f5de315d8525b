import asyncio
import math
import random
import sys
import threading
import time

import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.rewards.grader import (
    Grade,
    Sample,
    broken_batch,
    default_workers,
    make_grader,
    no_answers,
    summarize,
)


def sample(response, answer="5", **fields):
    return Sample(prompt="p", response=response, answer=answer, **fields)


def grades_of(functions, samples, **knobs):
    settings = RewardKnobs(functions=functions, num_workers=2, timeout_s=1.0, **knobs)
    with make_grader(settings) as grader:
        return grader.grade(samples)


@pytest.fixture
def returns(tmp_path):
    """A reward function that returns what a Python expression in `response` stands for, from a fixed table."""
    path = tmp_path / "fn.py"
    path.write_text(
        "import math\n"
        "RESULTS = {'none': None, 'nan': math.nan, 'inf': math.inf, '-inf': -math.inf, 'huge': 1e30, 'one': 1,\n"
        "           'list': [1.0], 'text': 'good', 'half': {'score': 0.5, 'acc': True}}\n"
        "def f(solution_str):\n"
        "    if solution_str == 'raise':\n"
        "        raise ValueError('boom')\n"
        "    return RESULTS[solution_str]\n"
        "def g(response_length): return response_length\n"
    )
    return f"{path}:f"


def test_built_ins_need_no_process():
    with make_grader(RewardKnobs(functions=("gsm8k", "format", "length_penalty"))) as grader:
        grader.prestart()
        (grade,) = grader.grade([sample("#### 5", response_length=100)])
        assert grader._pool is None
    assert grade == Grade(1.9, {"gsm8k": 1.0, "format": 1.0, "length_penalty": -0.1}, True)


def test_weights_and_clip():
    functions, samples = ("gsm8k", "format"), [sample("#### 5"), sample("#### 6"), sample("")]
    grades = grades_of(functions, samples, weights=(2.0, 0.5), clip_max=2.25, clip_min=0.1)
    assert [grade.score for grade in grades] == [2.25, 0.5, 0.1]


def test_abstaining_adds_nothing(returns):  # E6
    grades = grades_of(("gsm8k", returns), [sample("none"), sample("half")])
    assert [grade.score for grade in grades] == [0.0, 0.5]
    assert grades[0].parts == {"gsm8k": 0.0, "f": None} and grades[0].failure is None
    assert grades[1].parts == {"gsm8k": 0.0, "f": 0.5, "f/acc": 1.0}


def test_all_abstain_is_invalid_but_no_failure(returns):
    (grade,) = grades_of((returns,), [sample("none")])
    assert math.isnan(grade.score) and grade.failure is None
    assert summarize([grade])["reward/abstained"] == 1.0
    assert broken_batch([grade], 0.0) is None


@pytest.mark.parametrize("response", ["nan", "inf", "-inf", "huge", "list", "text", "raise"])
def test_invalid_values_make_the_sample_invalid(returns, response):  # N1, N2, E1, E3
    bad, good = grades_of((returns,), [sample(response), sample("one")])
    assert math.isnan(bad.score) and "'f'" in bad.failure and bad.parts == {"f": None}
    assert good.score == 1.0


@pytest.mark.parametrize(
    ("response", "score"), [("nan", None), ("inf", 3.0), ("-inf", -2.0), ("huge", 3.0)]
)
def test_clip_bounds_hold_large_values(returns, response, score):  # N2
    (grade,) = grades_of((returns,), [sample(response)], clip_min=-2.0, clip_max=3.0)
    assert math.isnan(grade.score) if score is None else grade.score == score


def test_a_clip_on_the_other_side_does_not_help(returns):
    grades = grades_of((returns,), [sample("inf"), sample("-inf")], clip_max=3.0)
    assert math.isnan(grades[1].score) and grades[0].score == 3.0


@pytest.mark.parametrize("weights", [(1e15, 1.0), (1e25, 1.0), (1e300, 1e300), (-1e200, 1.0)])
def test_a_weighted_sum_beyond_float32_is_invalid(returns, weights):  # N2
    functions, samples = (returns, "gsm8k"), [sample("one"), sample("none")]
    bad, fine = grades_of(functions, samples, weights=weights)
    assert math.isnan(bad.score) and "reward.weights" in bad.failure and fine.score == 0.0
    bad, fine = grades_of(functions, samples, weights=weights, clip_min=-1.0, clip_max=1.0)
    assert (bad.score, bad.failure) == (math.copysign(1.0, weights[0]), None)
    (unheld,) = grades_of(functions, samples[:1], weights=(1e30, 1.0), clip_max=1e25)
    assert math.isnan(unheld.score)


def test_failures_are_counted(returns):  # E1
    knobs = RewardKnobs(functions=("gsm8k", returns), num_workers=1, timeout_s=5.0)
    with make_grader(knobs) as grader:
        grader.grade([sample(text) for text in ("raise", "nan", "one", "none")])
        stats = grader.failure_stats()
        assert len(grader.digests["f"]) == 64
    assert (stats.samples, stats.failed, stats.timed_out) == (4, 2, 0)
    assert stats.by_function == {"f": 2} and "ValueError: boom" in stats.first_failure


def test_batch_with_bombs_and_normal_samples():  # D07, E9
    bombs = [
        r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}}",
        "9**9**9**9",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{(10^9)!}",
        "((99!)!)!",
        r"\boxed{\sum_{k=1}^{99999999} \frac{1}{k^k}}",
        "\x00\ud800" * 300_000,
    ]
    samples = [sample(text) for text in bombs] + [sample(r"\boxed{\frac{10}{2}}")] * 60
    knobs = RewardKnobs(functions=("math",), num_workers=2, timeout_s=2.0)
    with make_grader(knobs) as grader:
        grader.grade([sample("5")])
        start = time.monotonic()
        grades = grader.grade(samples)
        assert time.monotonic() - start <= 2.0 * math.ceil(len(bombs) / 2) + 5
    assert [grade.score for grade in grades[len(bombs) :]] == [1.0] * 60
    assert all(grade.score == 0.0 or grade.timed_out for grade in grades[: len(bombs)])
    assert [grade.score for grade in grades[:5]] == [0.0] * 5


def test_long_text_goes_to_a_process():
    with make_grader(RewardKnobs(num_workers=1)) as grader:
        (grade,) = grader.grade([sample("#### 5\n" + "x" * 200_000)])
        assert grader._pool is not None and grade.score == 1.0 and grade.answer_found


def test_a_pattern_of_the_user_can_be_killed():
    knobs = RewardKnobs(
        functions=("format",), format_pattern="^(a+)+$", num_workers=1, timeout_s=2.0
    )
    with make_grader(knobs) as grader:
        grades = grader.grade([sample("a" * 60 + "b"), sample("aaa")])
    assert grades[0].timed_out and grades[1].score == 1.0


def test_same_result_from_threads_and_tasks():  # E5, D08
    results = []
    with make_grader(RewardKnobs(functions=("math",), num_workers=2)) as grader:

        def work(offset):
            for key in range(offset, offset + 10):
                grader.submit(key, sample(r"\boxed{\sqrt{25}}"))
            results.extend(grader.collect(range(offset, offset + 10)).values())

        threads = [threading.Thread(target=work, args=(100 * place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        async def task():
            return await asyncio.to_thread(grader.grade, [sample(r"\boxed{5}")])

        results.extend(asyncio.run(task()))
    assert [grade.score for grade in results] == [1.0] * 41


def test_keys_are_given_once():
    with make_grader(RewardKnobs()) as grader:
        grader.submit(3, sample("#### 5"))
        with pytest.raises(ValueError, match="key 3 is in use"):
            grader.submit(3, sample("#### 5"))
        assert grader.collect([3])[3].score == 1.0
        for keys in ([3], [4]):
            with pytest.raises(ValueError, match="never submitted"):
                grader.collect(keys)
    with pytest.raises(ValueError, match="after close"):
        grader.submit(9, sample(""))


def test_the_parent_keeps_its_random_state(tmp_path):  # E4
    path = tmp_path / "seeds.py"
    path.write_text(
        "import random, numpy\ndef f(response):\n    random.seed(0); numpy.random.seed(0); return 1\n"
    )
    random.seed(7)
    np.random.seed(7)
    expected = (random.getstate(), np.random.get_state()[1].tolist())
    assert grades_of((f"{path}:f",), [sample("")])[0].score == 1.0
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected
    assert "seeds" not in sys.modules


def test_bad_settings_are_refused_together():
    with pytest.raises(ConfigError) as caught:
        make_grader(RewardKnobs(functions=("nope", "math"), weights=(1.0,), format_pattern="("))
    assert len(caught.value.problems) == 3


def test_mean_is_over_scored_samples():  # D17
    grades = [Grade(value, {"f": value}) for value in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)]
    grades += [Grade(math.nan, {"f": None}, None, "boom", timed_out) for timed_out in (True, False)]
    assert summarize(grades) == {
        "reward/f/mean": 0.5,
        "reward/f/scored": 0.75,
        "reward/failed": 2.0,
        "reward/timeout": 1.0,
        "reward/abstained": 0.0,
    }


def test_nothing_scored_has_no_mean():
    metrics = summarize([Grade(math.nan, {"f": None}, None, "boom")])
    assert "reward/f/mean" not in metrics and metrics["reward/f/scored"] == 0.0
    assert summarize([]) == {}


def test_answer_found_and_its_warning():  # D03, E7
    samples = [sample(rf"step by step \boxed{{{n}}}", str(n)) for n in range(64)]
    grades = grades_of(("gsm8k",), samples)
    assert summarize(grades)["reward/answer_found"] == 0.0
    warning = no_answers(grades, samples)
    assert "any of 64 responses" in warning and warning.count("boxed") == 3
    assert no_answers([Grade(0.0, {}, True), *grades], samples) is None
    assert no_answers([Grade(0.0, {}, None)], samples) is None


def test_broken_batch():  # E1
    good, bad = Grade(1.0, {}), Grade(math.nan, {}, None, "first")
    assert broken_batch([good, bad], 0.5) is None
    assert broken_batch([good, bad, Grade(math.nan, {}, None, "second")], 0.5) == "first"
    assert broken_batch([], 0.5) is None


def test_default_workers():
    assert default_workers() >= 1
