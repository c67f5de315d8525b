"""Exit codes and the text of refusals."""

import pytest

from jaxrl_llm import errors
from jaxrl_llm.errors import ConfigError, DataError, Interrupted, RunError, TrainingStopped


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 64), (DataError, 65), (TrainingStopped, 70), (RunError, 70), (Interrupted, 75)],
)
def test_exit_codes_are_fixed(kind, code):
    assert kind("x").exit_code == code
    assert issubclass(kind, RunError)


def test_the_named_codes():
    names = ("EXIT_OK", "EXIT_CONFIG", "EXIT_DATA", "EXIT_INTERNAL", "EXIT_INTERRUPTED")
    assert [getattr(errors, name) for name in names] == [0, 64, 65, 70, 75]


def test_one_text_or_many():
    assert ConfigError("one").problems == ("one",)
    assert ConfigError(["a", "b"]).problems == ("a", "b")
    assert str(ConfigError(["a", "b"])) == "a\nb"
    assert ConfigError("one").report() == "Configuration refused (1 problem):\n  - one"
    assert DataError(["a", "b"]).report() == "Data refused (2 problems):\n  - a\n  - b"
    assert Interrupted("x").report().startswith("Interrupted (1 problem)")
