import pytest

from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.rewards import format


@pytest.mark.parametrize(
    ("response", "right"),
    [("so\n#### 42", 1.0), ("#### ", 0.0), ("42", 0.0), ("", 0.0), ("####\n\n7", 1.0)],
)
def test_default_pattern(response, right):
    assert format.score(response, pattern=RewardKnobs.format_pattern) == right


def test_a_dot_matches_newlines():
    assert format.score("<think>a\nb</think>7", pattern=r"^<think>.*</think>") == 1.0
