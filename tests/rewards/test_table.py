import subprocess
import sys

import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.rewards import table


def test_good_functions_have_no_problems():
    assert table.check_functions(("gsm8k", "math", "format", "length_penalty")) == []


def test_unknown_name_lists_the_known_ones():
    (problem,) = table.check_functions(("gsm9k",))
    assert "'gsm9k'" in problem and "format, gsm8k, length_penalty, math" in problem
    with pytest.raises(ConfigError, match="gsm8k, length_penalty, math"):
        table.lookup("gsm9k")


def test_all_problems_are_reported_together():
    found = table.check_functions(("nope", "gone.py:f", "gsm8k", "gsm8k"))
    assert len(found) == 3
    assert "no file 'gone.py'" in found[1] and "listed twice" in found[2]
    assert len(table.check_functions(())) == 1


def test_settings():
    assert table.check_settings(RewardKnobs()) == []
    bad = RewardKnobs(
        weights=(1.0, 2.0), format_pattern="(", timeout_s=0.0, num_workers=0, clip_min=1.0, clip_max=0.0,
        memory_limit_mb=1,
    )  # fmt: skip
    assert len(table.check_settings(bad)) == 6


def test_gold_answers_that_no_response_can_meet_are_named():  # F10, D12
    golds = [
        ("q:1", "18"),
        ("q:2", "hello"),
        ("q:3", "__import__('os').getpid()"),
        ("q:4", r"\frac{1}{2}"),
    ]
    (gsm8k,) = table.unreadable_golds(("gsm8k", "format", "mine.py:f"), golds)
    assert "gsm8k cannot read the gold answers of 3 of 4 rows" in gsm8k
    assert "q:2 ('hello')" in gsm8k and "q:4" in gsm8k and "q:1" not in gsm8k
    assert "data.exclude_ids" in gsm8k
    assert table.unreadable_golds(("gsm8k",), golds[:1]) == []
    assert table.unreadable_golds(("math",), golds[3:]) == []
    (math,) = table.unreadable_golds(("math",), [("m:7", "((99!)!)!" * 200), ("m:8", "7")])
    assert "math cannot read the gold answers of 1 of 2 rows" in math and "m:7" in math
    many = [(f"q:{line}", "none") for line in range(1, 21)]
    (text,) = table.unreadable_golds(("gsm8k",), many)
    assert "20 of 20" in text and "and 15 more" in text and "q:6" not in text


def test_labels_are_short_and_unique():
    functions = ("gsm8k", "a/x.py:score", "b/y.py:score", "c/y.py:score", "d/z.py:math")
    assert table.labels(functions) == ("gsm8k", "score", "y.score", "c/y.py:score", "z.math")


def test_checking_imports_nothing_heavy():
    code = (
        "import sys\nfrom jaxrl_llm.rewards import table\n"
        "assert table.check_functions(('gsm8k', 'math', 'nope'))\n"
        "print([n for n in ('jax', 'numpy', 'math_verify', 'sympy', 'asyncio') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
