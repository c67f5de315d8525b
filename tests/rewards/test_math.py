import threading
import time

import pytest

from jaxrl_llm.rewards import math

EQUAL = [
    ("42", "42"),
    (r"\boxed{42}", "42"),
    (r"$\boxed{\frac{1}{2}}$", "0.5"),
    (r"\boxed{\frac12}", r"\dfrac{1}{2}"),
    (r"\boxed{1\frac12}", "1.5"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{\$1{,}234.50}", "1234.5"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{2^10}", "1024"),
    (r"\boxed{2 \times 10^{5}}", "200000"),
    (r"\boxed{-5}", "-5"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{x=42}", "42"),
    (r"\boxed{x^{2}+1}", "1+x^2"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{\pi/2}", r"\frac{\pi}{2}"),
    (r"\boxed{[0,\infty)}", r"[0, \infty)"),
    (r"\boxed{\{1,2\}}", "1,2"),
    (
        r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    ),
    (r"\boxed{\text{Monday}}", "monday"),
    (r"\boxed{\boxed{3}}", "3"),
    (r"\boxed{41}, no: \boxed{42}", "42"),
    (r"\boxed{\frac{1}{2004!}}", r"$\frac{1}{2004!}$"),
    ("The final answer is $\\frac{3}{4}$. I hope it is correct.", "0.75"),
    ("I think the answer: 5 is wrong ... Answer: 10", "10"),
    ("So 6 * 7 = 42\n#### 42", "42"),
    (r"\boxed{7}" * 20_000, "7"),
]
DIFFERENT = [
    (r"\boxed{42} or 43", "42"),
    (r"\boxed{42} or 43", "43"),
    (r"$\boxed{42}$ or $43$", "42"),
    (r"\boxed{42, 43}", "42"),
    (r"\boxed{42 \text{ or } 43}", "42"),
    ("Answer: 42 or 43", "42"),
    (r"\boxed{41}, no: \boxed{42}", "41"),
    (r"It is 42, so \boxed{41}", "42"),
    ("The result of all this is 42 I think", "42"),
    ("I think the answer: 5 is wrong ... Answer: 10", "5"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{0.333333}", r"\frac{1}{3}"),
    (r"$\boxed{\frac{1}{2006!}}$", r"$\frac{1}{2004!}$"),
    (r"\boxed{\frac{1}{2^{98}}}", r"$\frac{1}{2^{99}}$"),
    (r"\boxed{Mondya}", "Monday"),
    (r"\boxed{A}", "B"),
    (r"\boxed{}", "0"),
    (r"\boxed{42", "42"),
    ("", "0"),
    ("\\boxed{4\x002}", "42"),
    ("\\boxed{\ud800}", "1"),
]
BOMBS = [
    r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}}",
    "9**9**9**9",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{(10^9)!}",
    "((99!)!)!",
    r"\boxed{x + \sqrt{9^{9^{9^9}}}}",
    r"\boxed{\binom{1000000000}{500000000}}",
    r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    r"\boxed{" + r"\frac{1}{" * 2000 + "1" + "}" * 2000 + "}",
    r"\boxed{" + "1" * 100_000 + "}",
    "a" * 1_000_000,
    "answer " * 140_000,
    r"\boxed{" * 140_000,
    r"\boxed{1}" + " or" * 300_000,
]


@pytest.mark.parametrize(("response", "gold"), EQUAL)
def test_equal(response, gold):
    assert math.score(response, gold) == 1.0


@pytest.mark.parametrize(("response", "gold"), DIFFERENT)
def test_different(response, gold):
    assert math.score(response, gold) == 0.0


@pytest.mark.parametrize("place", range(len(BOMBS)))
def test_bombs_are_refused_before_they_are_computed(place):  # D07, D13
    math.prepare()
    start = time.process_time()
    assert math.score(BOMBS[place], "7") == 0.0
    assert math.score(r"\boxed{7}", BOMBS[place]) == 0.0
    assert time.process_time() - start < 2.0


def test_no_gold_abstains():
    assert math.score(r"\boxed{1}", "") is None
    assert math.score(r"\boxed{1}", []) is None


@pytest.mark.parametrize(
    ("gold", "readable"),
    [
        ("7", True),
        (r"x \boxed{\frac{1}{2}}", True),
        ("#### 7", True),
        ("", False),
        ("#### ", False),
        ("(" * 5000 + "1" + ")" * 5000, False),
        ("1" * 100_000, False),
    ],
)
def test_readable_gold(gold, readable):  # F10
    assert math.readable_gold(gold) is readable


def test_several_accepted_golds():  # D05
    golds = [["4", "four"], ["5"], ["6", "six"]]
    answers = ["4", "9", "six"]
    scores = [math.score(rf"\boxed{{{a}}}", gold) for a, gold in zip(answers, golds, strict=True)]
    assert scores == [1.0, 0.0, 1.0]


def test_works_in_a_thread():  # D08
    results = []
    work = [(r"\boxed{42}", "42"), (r"\boxed{2\sqrt2}", r"\sqrt8")]
    thread = threading.Thread(target=lambda: results.extend(math.score(*pair) for pair in work))
    thread.start()
    thread.join()
    assert results == [1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (r"so \boxed{x_{1}}.", "x_{1}"),
        ("answer is **12**\nbye", "12"),
        (" 3/4 ", "3/4"),
        ("I do not know", None),
        ("answer:", None),
    ],
)
def test_extract(response, found):
    assert math.extract(response) == found
