import time
from decimal import Decimal

import pytest

from jaxrl_llm.rewards import gsm8k

STRICT = [  # completion, gold, right (public report D01)
    ("#### 1,234", "1234", 1),
    ("#### $1,234", "1234", 1),
    ("#### -5", "-5", 1),
    ("####-5", "-5", 1),
    ("#### 18.", "18", 1),
    ("#### 18.00", "18", 1),
    ("#### 18 dollars", "18", 1),
    ("#### 18%", "18", 1),
    ("#### 5\n#### 7", "7", 1),
    ("#### 5\n#### 7", "5", 0),
    ("####  42", "42", 1),
    ("#### \\boxed{42}", "42", 1),
    ("#### 3/4", "3", 0),
    ("#### 1e3", "1", 0),
    ("#### 0x10", "0", 0),
    ("#### 72xxx", "72", 0),
    ("#### 72/", "72", 0),
    ("#### ,", "0", 0),
    ("####", "0", 0),
    ("", "0", 0),
    ("no marker 0", "0", 0),
    ("#### .5", "0.5", 1),
    # our own rules
    ("#### **42**", "42", 1),
    ("#### -$5", "-5", 1),
    ("#### $-5", "-5", 1),
    ("#### $42$", "42", 1),
    ("#### 18.Then more", "18", 1),
    ("#### 1{,}234", "1234", 1),
    ("#### 42 or 43", "42", 0),
    ("#### 42 or 43", "43", 0),
    ("#### 42, 43", "42", 0),
    ("#### 5 - 3", "5", 0),
    ("#### 2:30", "2", 0),
    ("#### 1,23", "1", 0),
    ("#### 1.2.3", "1.2", 0),
    ("#### 42\n####", "42", 0),
    ("####\n42", "42", 0),
    ("#### ٤٢", "42", 0),
    ("#### five", "5", 0),
]


@pytest.mark.parametrize(("response", "gold", "right"), STRICT)
def test_strict(response, gold, right):
    assert gsm8k.score(response, gold) == right


@pytest.mark.parametrize("length", [0, 300, 3000, 30000])
def test_text_after_the_answer_does_not_matter(length):  # D02
    response = "2+40=42\n#### 42\n" + ("filler text. " * (length // 13 + 1))[:length]
    assert gsm8k.score(response, "42") == 1.0


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [("1,000", "1000", 1), ("0.0", "0", 1), ("-0", "0", 1), ("2", "2.0", 1), ("7", "0", 0)],
)
def test_equal_numbers_in_another_spelling(answer, gold, right):  # D04
    assert gsm8k.score(f"#### {answer}", gold) == right
    assert gsm8k.score(f"so it is {answer}", gold, method="flexible") == right


def test_the_last_answer_wins():  # D14
    response = "I think the answer: 5 is wrong ... Answer: 10"
    assert gsm8k.score(response, "10", method="flexible") == 1.0
    assert gsm8k.score(response, "5", method="flexible") == 0.0
    assert gsm8k.score(response, "10") == 0.0


def test_several_accepted_golds_give_one_score_each():  # D05
    golds = [["4", "four"], ["5"], ["6", "six"]]
    scores = [
        gsm8k.score(f"#### {answer}", gold) for answer, gold in zip("496", golds, strict=True)
    ]
    assert scores == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("it is 42.", "42"),
        ("-7", "-7"),
        ("costs -$7 in all", "-7"),
        ("10-7", "7"),
        ("the 3rd of x2 and 5 apples, say 1e9", "5"),
        ("3/4", None),
        ("see 2^10", None),
        ("1,234,567.50 dollars", "1234567.50"),
        ("5, 6", "6"),
        ("", None),
    ],
)
def test_flexible_takes_the_last_number_that_stands_alone(response, found):
    assert gsm8k.extract(response, method="flexible") == found


def test_boxed_answers_are_not_found_in_strict_mode():  # D03
    assert gsm8k.extract("\\boxed{42}", method="strict") is None


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("18", Decimal(18)),
        ("Natalia sold 48/2 = 24.\n#### 72", Decimal(72)),
        (" $1,234 ", Decimal(1234)),
        ("__import__('os').getpid()", None),
        ("", None),
    ],
)
def test_gold_number(label, number):
    assert gsm8k.gold_number(label) == number
    assert number is not None or gsm8k.score("#### 0", label) == 0.0


def test_numbers_are_compared_exactly():
    digits = "9" * 5000
    assert gsm8k.score(f"#### {digits}", digits) == 1.0
    assert gsm8k.score(f"#### {digits}", digits[:-1] + "8") == 0.0
    assert gsm8k.score("#### 0.1", "0.10000000000000000001") == 0.0


def test_unknown_method():
    with pytest.raises(ValueError, match=r"'loose'.*'strict' or 'flexible'"):
        gsm8k.extract("#### 1", method="loose")


HARD = [
    "#### " + " " * 10**6 + "x",
    "#### " + "$" * 10**6,
    "#### 1" + " " * 10**6,
    "#### 1" + "$ " * 500_000,
    "#### 1" + "," * 10**6,
    "#### " + "1,234" * 200_000,
    "#" * 10**6,
    "9" * 10**6,
    "-" * 10**6,
    "1,234," * 170_000,
    "\ud800\x00" * 500_000,
]


@pytest.mark.parametrize("place", range(len(HARD)))
def test_a_megabyte_is_read_in_linear_time(place):
    start = time.process_time()
    gsm8k.extract(HARD[place], method="strict")
    gsm8k.extract(HARD[place], method="flexible")
    assert time.process_time() - start < 2.0
