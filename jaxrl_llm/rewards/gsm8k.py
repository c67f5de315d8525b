"""The GSM8K grader: find one number in a response and compare it with the gold number, exactly.

Two ways of finding it. `strict` reads what follows the *last* `####` of the whole response, on the same line: blanks,
currency signs, `**`, quotes and `\\boxed{` before the number are skipped; the number must end there. A letter, digit, `/`
or `^` glued to it, an operator with another operand (`3/4`, `5 - 3`) or a second candidate (`42 or 43`, `5, 6`) means that
no number was given. `flexible` takes the last number of the response that stands on its own.

A percent sign and units after a blank are ignored: `18%` and `18 dollars` are 18. Numbers are `Decimal`s, so `18.00` equals
18 and no tolerance is needed.

Left out on purpose: a search window (a right answer followed by much text is right), scientific notation, fractions
and arithmetic. Every pattern is linear in the length of the text (possessive quantifiers).
"""

import re
from collections.abc import Sequence
from decimal import Decimal

MARKER = "####"

_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)"
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_OPENING = rf"(?:[ \t\xa0*\"'`~:=]|{_CURRENCY}|\\boxed\{{|\\\(|\{{)*+"
_AFTER_MARKER = re.compile(rf"{_OPENING}(?P<sign>[-+−]?){_CURRENCY}?+[ \t]*+(?P<number>{_NUMBER})")
_ANYWHERE = re.compile(_NUMBER)
_NOT_A_NUMBER = re.compile(
    r"\w|[/^]|[.,][0-9]|\\(?:times|cdot|div|frac)"  # glued on: 72xxx, 3/4, 2^3, 1.2.3
    r"|[ \t]*+(?:[-+*/×÷=:−–]|\\times|\\cdot|\\div)[ \t]*+[-$(]?+\.?[0-9]"  # 5 - 3, 2:30
    r"|\([ \t]*+[0-9]"
    r"|[ \t$}*)\\]*+(?:[,;|&]|or\b|and\b)[ \t$*{(\\]*+(?:boxed\{)?+-?\.?[0-9]"  # 42 or 43
)


def extract(response: str, *, method: str = "strict") -> str | None:
    """The number a response gives as its answer, in plain digits (`"-1234.5"`), or `None`.

    Args:
        response: the whole text.
        method: `"strict"` or `"flexible"`, see the module docstring.

    Raises:
        ValueError: another method. Degenerate: an empty text gives `None`.
    """
    if method == "strict":
        return _after_last_marker(response)
    if method == "flexible":
        return _last_number(response)
    raise ValueError(f"gsm8k method: got {method!r}, need 'strict' or 'flexible'")


def score(response: str, answer: str | Sequence[str], *, method: str = "strict") -> float:
    """1.0 where the response's number equals the gold number (Cobbe et al. 2021, arXiv:2110.14168), else 0.0.

    Args:
        response: the whole text.
        answer: the gold number, or the worked GSM8K solution that ends in `#### NUMBER`; several accepted golds may be
            given as a sequence.
        method: see `extract`.

    Degenerate: no number in the response, or none in the gold, scores 0.0.
    """
    found = extract(response, method=method)
    if found is None:
        return 0.0
    golds = (answer,) if isinstance(answer, str) else answer
    values = (gold_number(gold) for gold in golds)
    return float(any(value == Decimal(found) for value in values if value is not None))


def gold_number(answer: str) -> Decimal | None:
    """The gold number of a label (a bare number, or text ending in `#### NUMBER`); `None` where it has none."""
    found = _after_last_marker(answer if MARKER in answer else f"{MARKER} {answer.strip()}")
    return None if found is None else Decimal(found)


def _after_last_marker(text: str) -> str | None:
    start = text.rfind(MARKER)
    if start < 0:
        return None
    line = re.split(r"[\r\n]", text[start + len(MARKER) :], maxsplit=1)[0].replace("{,}", ",")
    match = _AFTER_MARKER.match(line)
    if match is None or _NOT_A_NUMBER.match(line, match.end()):
        return None
    return _plain(match["number"], negative=match["sign"] in ("-", "−"))


def _last_number(text: str) -> str | None:
    last = None
    for match in _ANYWHERE.finditer(text):
        if _stands_alone(text, match.start(), match.end()):
            last = match
    if last is None:
        return None
    before = text[max(0, last.start() - 4) : last.start()].rstrip("$\\€£¥₹")
    negative = before[-1:] in ("-", "−") and not re.match(r"[\w)]", before[-2:-1])
    return _plain(last[0], negative=negative)


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after, second = text[start - 1 : start], text[end : end + 1], text[end + 1 : end + 2]
    if (
        before.isalnum()
        or before in ("_", "^")
        or (before == "/" and text[start - 2 : start - 1].isdigit())
    ):
        return False
    if (before == "." or text[start] == ".") and text[start - 2 : start].strip(".").isdigit():
        return False
    return not (
        after.isalnum() or after in ("_", "^") or (after in (".", "/") and second.isdigit())
    )


def _plain(digits: str, *, negative: bool) -> str:
    return ("-" if negative else "") + digits.replace(",", "")
