"""Texts and Python values against declared types."""

from typing import Literal

import pytest

from jaxrl_llm.values import describe_type, normal_value, parse, type_problem

STRINGS = tuple[str, ...]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (bool, "true", True),
        (bool, "True", True),
        (bool, "false", False),
        (bool, " False ", False),
        (int, "8", 8),
        (int, "-3", -3),
        (int, "+3", 3),
        (int, "0", 0),
        (float, "1e-6", 1e-6),
        (float, "1", 1.0),
        (float, "-0.5", -0.5),
        (float, ".5", 0.5),
        (float, "5.", 5.0),
        (float, "2E+3", 2000.0),
        (str, "none", "none"),
        (str, "a,b", "a,b"),
        (str, "", ""),
        (int | None, "none", None),
        (int | None, "None", None),
        (float | None, "null", None),
        (int | None, "7", 7),
        (STRINGS | None, "none", None),
        (STRINGS, "[a,b]", ("a", "b")),
        (STRINGS, "(a, b)", ("a", "b")),
        (STRINGS, "a,b", ("a", "b")),
        (STRINGS, "a", ("a",)),
        (STRINGS, "[a]", ("a",)),
        (STRINGS, "[a,b,]", ("a", "b")),
        (STRINGS, "[]", ()),
        (STRINGS, "", ()),
        (STRINGS, '["a,b", \'c"d\']', ("a,b", 'c"d')),
        (STRINGS, r'["\n\n", "say \"x\""]', ("\n\n", 'say "x"')),
        (STRINGS, '"[a,b]"', ("[a,b]",)),
        (STRINGS, "['']", ("",)),
        (STRINGS, "data[1].jsonl", ("data[1].jsonl",)),
        (STRINGS, "a,data[1]", ("a", "data[1]")),
        (tuple[float, float], "[0.9, 0.95]", (0.9, 0.95)),
        (tuple[float, ...], "1,2", (1.0, 2.0)),
        (tuple[int, ...], "[3]", (3,)),
        (Literal["auto", "path"], "auto", "auto"),
    ],
)
def test_a_text_becomes_the_value_of_its_type(kind, text, value):
    got = parse(kind, text)
    assert got == value
    assert type(got) is type(value)
    assert type_problem(kind, got) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((bool, text) for text in ("yes", "no", "1", "0", "TRUE", "on", "")),
        *(
            (int, text)
            for text in ("010", "1.0", "1e3", "1_000", "0x10", "four", "", "none", "9" * 5000)
        ),
        *(
            (float, text)
            for text in (
                "nan",
                "NaN",
                "inf",
                "-inf",
                "Infinity",
                "1e999",
                "010",
                "00.5",
                "1_0",
                "",
                ".",
                "1,5",
            )
        ),
        *((int | None, text) for text in ("nil", "1.5", "")),
        (Literal["auto", "path"], "Auto"),
        (tuple[float, float], "0.9"),
        (tuple[float, float], "0.9,0.95,0.99"),
        (tuple[float, ...], "1,nan"),
        *(
            (STRINGS, text)
            for text in (
                "[a,b",
                "a,b]",
                "[a,b)",
                "[[a,b]]",
                "[[a],b]",
                "(a),(b)",
                "[",
                "[a,,b]",
                "[,]",
                ",a",
            )
        ),
        *((STRINGS, text) for text in ('["a', "'a", 'a"b', '["a"b]', "none", "null")),
    ],
)
def test_a_text_of_another_type_is_refused_with_got_and_need(kind, text):
    with pytest.raises(ValueError, match=r"got .*need"):
        parse(kind, text)


@pytest.mark.parametrize("text", ["[a,b]", "[a,b", "a,b]", "(a,b)", "[a,b)", "[[a,b]]", "[a,[b]]"])
def test_bracketed_text_never_becomes_one_item(text):
    try:
        value = parse(STRINGS, text)
    except ValueError:
        return
    assert value == ("a", "b")


def test_a_near_choice_is_suggested_and_an_unknown_type_is_a_bug():
    with pytest.raises(ValueError, match="did you mean token-mean"):
        parse(Literal["token-mean", "token-sum"], "token_mean")
    with pytest.raises(TypeError, match="no parser"):
        parse(dict, "{}")


def test_types_in_words():
    assert describe_type(int | None) == "int or none"
    assert describe_type(STRINGS) == "a list of str"
    assert describe_type(tuple[float, float]).startswith("a list of 2 values")
    assert describe_type(Literal["a", "b"]) == "one of a, b"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, "1"),
        (float, float("nan")),
        (float, float("inf")),
        (float, 10**400),
        (float, True),
        (float, "1"),
        (float, None),
        (bool, 1),
        (str, None),
        (STRINGS, "abc"),
        (STRINGS, ("a", 1)),
        (tuple[float, float], (0.9,)),
        (Literal["a"], "b"),
        (Literal["a"], ["a"]),
        (int | None, "none"),
    ],
)
def test_python_values_of_another_type_are_named(kind, value):
    assert "need" in (type_problem(kind, value) or "")


def test_lists_and_whole_numbers_get_one_spelling():
    assert normal_value(STRINGS, ["a"]) == ("a",)
    assert normal_value(tuple[float, ...] | None, [1, 2]) == (1.0, 2.0)
    assert type(normal_value(float, 1)) is float
    assert type(normal_value(float | None, 1)) is float
    assert normal_value(float | None, None) is None
    assert normal_value(int, 1) == 1
    assert normal_value(float, True) is True
    assert normal_value(float, 10**400) == 10**400
    assert normal_value(STRINGS, "abc") == "abc"
