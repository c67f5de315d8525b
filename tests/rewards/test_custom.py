import hashlib
import math
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.rewards import custom

SAMPLE = {
    "prompt": "p", "response": "r", "answer": "a", "data_source": "d", "extra_info": {"k": 1}, "response_length": 3,
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(text, name="fn.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_parameters_are_filled_by_name(write):
    path = write(
        "def f(response_length, answer, prompt='x'): return (response_length, answer, prompt)\n"
    )
    assert custom.load(f"{path}:f")(**SAMPLE) == (3, "a", "p")


def test_verl_names_and_unknown_defaults(write):
    path = write(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=2):\n"
        "    return (data_source, solution_str, ground_truth, extra_info, scale)\n"
    )
    assert custom.load(f"{path}:compute_score")(**SAMPLE) == ("d", "r", "a", {"k": 1}, 2)


def test_kwargs_get_everything(write):
    path = write("def f(response, /, **kw): return response, sorted(kw)\n")
    response, names = custom.load(f"{path}:f")(**SAMPLE)
    assert response == "r" and names == sorted(set(custom.KNOWN) - {"response"})


def test_digest_is_recorded_and_held(write):  # S4
    path = write("def f(response): return 1\n")
    expected = hashlib.sha256(b"def f(response): return 1\n").hexdigest()
    assert custom.load(f"{path}:f").sha256 == custom.digest(f"{path}:f") == expected
    write("def f(response): return 2\n")
    with pytest.raises(ConfigError, match="changed during the run"):
        custom.load(f"{path}:f", expected)


@pytest.mark.parametrize(
    "text", ["def f(completions): pass\n", "def f(response, *, completions): pass\n"]
)
def test_unknown_required_parameter(write, text):
    with pytest.raises(ConfigError, match=r"requires the parameter completions, known are prompt"):
        custom.load(f"{write(text)}:f")


def test_decorated_functions_are_looked_at_when_loaded(write):
    path = write("def d(g): return lambda nope: 1\n@d\ndef f(response): pass\n")
    assert custom.problems(f"{path}:f") == []
    with pytest.raises(ConfigError, match="parameter nope"):
        custom.load(f"{path}:f")


@pytest.mark.parametrize(
    "spec",
    [
        "os:system",
        "os.path:join",
        "http://host/f.py:f",
        "x.py",
        "x.py:f g",
        "x.py:",
        "a\0.py:f",
        "x.txt:f",
    ],
)
def test_only_local_python_files(spec):  # S4
    assert "FILE.py:FUNCTION" in custom.problems(spec)[0]


def test_files_are_not_imported_to_be_checked(write, tmp_path):
    path = write(f"open({str(tmp_path / 'canary')!r}, 'w')\ndef f(response): pass\n")
    assert custom.problems(f"{path}:f") == []
    assert "no function 'g'; it has f" in custom.problems(f"{path}:g")[0]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def f(:\n", "cannot be read"),
        ("async def f(response): pass\n", "coroutine"),
        ("x = 1\n", "it has none"),
    ],
)
def test_problems(write, text, problem):
    assert problem in custom.problems(f"{write(text)}:f")[0]


def test_a_neighbour_can_be_imported(write):
    write("VALUE = 7\n", "neighbour_of_a_reward.py")
    path = write("from neighbour_of_a_reward import VALUE\ndef f(): return VALUE\n")
    assert custom.load(f"{path}:f")(**SAMPLE) == 7


@pytest.mark.parametrize(
    "value",
    [
        1, 1.0, True, np.float32(1), np.bool_(True), np.array(1.0), np.int64(1), ml_dtypes.bfloat16(1), Decimal(1),
        Fraction(1),
    ],
)  # fmt: skip
def test_scalars_are_accepted(value):  # E3
    number, parts, problem = custom.convert(value, "f")
    assert (number, parts, problem) == (1.0, {}, None) and type(number) is float


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([1.0], "a list of length 1"),
        ([[1.0], [2.0]], "a list of length 2"),
        ((1, 2, 3, 4), "a tuple of length 4"),
        (np.ones(1), "a ndarray of shape (1,)"),
        (np.ones((2, 3)), "a ndarray of shape (2, 3)"),
        ("1.0", "the str '1.0'"),
        (b"1", "the bytes b'1'"),
        (1j, "a value of type complex"),
        ({"reward": 1}, "a dict with the keys reward"),
        (object(), "a value of type object"),
    ],
)
def test_other_results_name_function_got_and_expected(value, got):  # E3, D06
    number, _, problem = custom.convert(value, "my_reward")
    assert number is None
    assert problem == f"reward function 'my_reward' returned {got}, expected {custom.EXPECTED}"


def test_none_abstains_and_dicts_give_parts():
    assert custom.convert(None, "f") == (None, {}, None)
    result = {"score": 0.5, "acc": True, "note": "x", "bad": math.nan, "none": None}
    assert custom.convert(result, "f") == (0.5, {"f/acc": 1.0}, None)
    assert custom.convert({"score": None}, "f") == (None, {}, None)
    assert custom.convert({"score": "1"}, "f")[2] is not None


def test_huge_integers_become_infinite():
    assert custom.convert(10**400, "f")[0] == math.inf
