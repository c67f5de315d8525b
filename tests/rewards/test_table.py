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
