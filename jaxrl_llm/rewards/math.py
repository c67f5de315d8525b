r"""The mathematics grader: one candidate answer, compared exactly where it is a number and symbolically where it is not.

*The candidate* is the content of the last `\boxed{...}`. Without a box it is what follows the last "answer is",
"answer:" or `####` on its line; without that, the whole response when it is one short expression. There is never a second candidate: what
stands in the reasoning or in earlier boxes does not count, a list such as `\boxed{42, 43}` equals only a list, and a box
followed by `or 43` is no answer.

*The comparison* takes the first of these that applies. (1) Text that is too long, too deep, holds control characters or
looks like program code scores 0. (2) Numbers (sums, products, fractions, integer powers, factorials, binomials) are
worked out as `Fraction`s and compared exactly: `0.333` is not `1/3`, `1/2004!` is not `1/2006!`. Anything whose exact
value would need more than `MAX_BITS` bits scores 0 before it is computed. (3) Plain words are compared as words.
(4) Everything else goes to math-verify's LaTeX parser and comparison (Kydlíček 2025, github.com/huggingface/Math-Verify).

A percent sign, a degree sign and trailing `\text{...}` units are dropped on both sides: `50\%` is 50, never 0.5.

Left out on purpose: math-verify's plain-expression extractor (it evaluates text as Python), its time limits (they are
alarms, which work in the main thread only; the pool's wall clock holds here) and its habit of listing several candidates.
"""

import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

MAX_CHARS = 1000
"""Longest candidate or gold, in characters."""
MAX_DEPTH = 30
"""Deepest nesting of brackets."""
MAX_BITS = 200_000
"""Largest exact numerator or denominator, in bits (about 60,000 digits)."""
MAX_FACTORIAL = 5000
MAX_SYMBOLIC_POWER = 1000

_BOX = re.compile(r"\\f?boxed\s*\{")
_STATEMENT = re.compile(r"(?:\banswer\b[ \t*]*+(?:is\b|[:=])|####)[ \t*:]*+", re.IGNORECASE)
_SECOND_CANDIDATE = re.compile(
    r"[\s$*)\]\\,]*+\bor\s++(?:maybe\s|perhaps\s|possibly\s)?+[$({\\-]*+(?:boxed\{)?+-?[0-9]"
)
_FORBIDDEN = re.compile(
    r"__|[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff`\"]"
    r"|\b(?:import|lambda|eval|exec|compile|getattr|open|system)\s*\("
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_WORD = re.compile(r"[^\W\d_][^\W\d_ .'-]{3,}(?:[ .'-]+[^\W\d_]+)*")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})++(?![0-9,])")
_UNIT = re.compile(r"\s*\\(?:text|textrm|mathrm|mbox)\s*\{([^{}0-9]*)\}\s*$")
_WHOLE_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_JOINS = re.compile(r"\b(?:or|and)\b|,", re.IGNORECASE)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\\(?:left|right|displaystyle|bigg?|Bigg?)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[!,;:]|~|\\\$|\$", ""),
        (r"(?<!\\)\\ ", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\?%|\^\s*\\circ\b|\^\s*\{\s*\\circ\s*\}|\\degree\b|°", ""),
        (r"[−–]", "-"),
        (r"·|\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|×", "*"),
        (r"\\div(?![A-Za-z])|÷", "/"),
        (r"\{,\}", ","),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
)


def score(response: str, answer: str | Sequence[str]) -> float | None:
    """1.0 where the response's one candidate equals the gold answer, else 0.0; `None` (abstain) for an empty gold.

    Args:
        response: the whole text.
        answer: the gold expression (LaTeX or plain, boxed or not); several accepted golds may be given as a sequence.

    Degenerate: no candidate, a candidate over the limits, or a gold over the limits scores 0.0.
    """
    golds = [gold for gold in map(_gold_text, _as_list(answer)) if gold]
    if not golds:
        return None
    candidate = extract(response)
    if candidate is None:
        return 0.0
    return float(any(_equal(candidate, gold) for gold in golds))


def readable_gold(answer: str) -> bool:
    """Whether `score` can compare with this gold: it is not empty and within the limits. Nothing is evaluated."""
    gold = _gold_text(answer)
    return bool(gold) and not _out_of_bounds(gold)


def extract(response: str) -> str | None:
    """The one candidate answer of a response, as it was written, or `None` (see the module docstring)."""
    boxes = list(_BOX.finditer(response))
    if boxes:
        return _boxed(response, boxes[-1].end())
    statements = list(_STATEMENT.finditer(response))
    if statements:
        return _stated(response[statements[-1].end() :]) or None
    whole = response.strip()
    if not whole or len(whole) > 200 or "\n" in whole or _PROSE.search(whole):
        return None
    return whole


def prepare() -> None:
    """Load math-verify now, so that the first call in a fresh worker is not the slow one."""
    _math_verify()


def _as_list(answer: str | Sequence[str]) -> list[str]:
    return [answer] if isinstance(answer, str) else list(answer)


def _gold_text(answer: str) -> str:
    boxes = list(_BOX.finditer(answer))
    if boxes:
        return _boxed(answer, boxes[-1].end()) or answer.strip()
    return answer.rsplit("####", 1)[-1].strip()


def _boxed(text: str, start: int) -> str | None:
    """The content of a box that opens at `start`; `None` when it never closes, is empty or a second candidate follows."""
    depth = 1
    for place in range(start, min(len(text), start + MAX_CHARS + 1)):
        if text[place] == "\\" or text[place - 1] == "\\":
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            content = text[start:place].strip()
            return None if _SECOND_CANDIDATE.match(text, place + 1) else content or None
    return None


def _stated(text: str) -> str:
    """The expression at the start of `text`: inside its dollars, or up to the end of the line or sentence."""
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            if end < 0 or _SECOND_CANDIDATE.match(text, end + len(closing)):
                return ""
            return text[len(opening) : end].strip()
    line = text.split("\n", 1)[0]
    return re.split(r"\.(?:\s|$)", line, maxsplit=1)[0].strip(" \t\r*")


def _equal(candidate: str, gold: str) -> bool:
    if _out_of_bounds(candidate) or _out_of_bounds(gold):
        return False
    left, right = _clean(candidate), _clean(gold)
    left_word, right_word = _word(left), _word(right)
    if left_word or right_word:
        return left_word == right_word
    try:
        left_value, right_value = _Reader(left).value(), _Reader(right).value()
    except _TooBig:
        return False
    except _Unreadable:
        if re.search(r"[\^!]|binom", left + right):
            return False
        left_value = right_value = None
    if left_value is not None and right_value is not None:
        return left_value == right_value
    return _symbolically_equal(left, right)


def _out_of_bounds(text: str) -> bool:
    if len(text) > MAX_CHARS or _FORBIDDEN.search(text):
        return True
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > MAX_DEPTH:
            return True
    return False


def _clean(text: str) -> str:
    """One spelling for what is typeset alike; see `_REWRITES`."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;").strip()
    unit = _UNIT.search(text)
    if unit and unit.start() > 0 and not _JOINS.search(unit[1]):
        text = text[: unit.start()]
    if not re.search(r"[(\[{]", text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return text


def _word(text: str) -> str | None:
    whole = _WHOLE_TEXT.fullmatch(text)
    text = (whole[1] if whole else text).strip()
    return " ".join(text.casefold().split()) if _WORD.fullmatch(text) else None


class _TooBig(Exception):
    """A number whose exact value is over the limits."""


class _Unreadable(Exception):
    """Text that is no well-formed expression for `_Reader`."""


_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(\\[A-Za-z]+|\\.|\S))")


class _Reader:
    """Recursive descent over an expression; every sub-expression is a `Fraction`, or `None` where it holds a symbol.

    Symbolic parts are walked as well, so that a huge numeric power inside them is found before anything computes it.
    """

    def __init__(self, text: str):
        self.tokens = [number or other for number, other in _TOKEN.findall(text)]
        self.place = 0

    def value(self) -> Fraction | None:
        """The exact value of the whole text, `None` when it is symbolic or a list."""
        result = self._list(end=())
        if self.place < len(self.tokens):
            raise _Unreadable
        return result

    def _peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        if not token:
            raise _Unreadable
        self.place += 1
        return token

    def _list(self, end: tuple[str, ...]) -> Fraction | None:
        result = self._sum()
        while self._peek() and self._peek() not in end:
            if self._take() not in (",", ";", "=", "<", ">", ":", "|", "&", "\\\\"):
                raise _Unreadable
            result = None
            if self._peek() and self._peek() not in end:
                self._sum()
        return result

    def _sum(self) -> Fraction | None:
        total = self._product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            term = self._product()
            total = None if total is None or term is None else _bounded(total + sign * term)
        return total

    def _product(self) -> Fraction | None:
        first = self.place
        total = self._factor()
        divided = False
        while True:
            token = self._peek()
            if token in ("*", "/"):
                self._take()
                term = self._factor()
                if token == "/":
                    divided = True
                    term = Fraction(1) / term if term else None
                total = None if total is None or term is None else _bounded(total * term)
            elif token and token not in "+-,;=<>:|&)]}!^" and token != "\\\\":
                before, start = self.tokens[self.place - 1], self.place
                term = self._factor()
                if total is None or term is None or divided or _is_number(token):
                    total = None
                elif token == "\\frac" and _is_number(before) and start - first <= 2:
                    mixed = before.isdigit() and 0 <= term < 1
                    total = total + (term if total >= 0 else -term) if mixed else total * term
                else:
                    total = _bounded(total * term)
            else:
                return total

    def _factor(self) -> Fraction | None:
        if self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = self._factor()
            return None if value is None else sign * value
        value = self._atom()
        while self._peek() in ("^", "!"):
            value = _factorial(value) if self._take() == "!" else _power(value, self._exponent())
        return value

    def _exponent(self) -> Fraction | None:
        if self._peek() in ("+", "-"):
            return self._factor()
        value = self._atom()
        return _power(value, self._exponent()) if self._peek() == "^" and self._take() else value

    def _atom(self) -> Fraction | None:
        token = self._take()
        if _is_number(token):
            return Fraction(token)
        if token in ("(", "[", "{"):
            end = ("}",) if token == "{" else (")", "]")
            value = None if self._peek() in end else self._list(end)
            if self._take() not in end:
                raise _Unreadable
            return value
        if token in ("\\frac", "\\binom"):
            top, bottom = self._argument(), self._argument()
            if token == "\\binom":
                return _binomial(top, bottom)
            return None if top is None or not bottom else _bounded(top / bottom)
        if token in ")]}!^*/":
            raise _Unreadable
        if token == "_":
            self._argument()
        return None

    def _argument(self) -> Fraction | None:
        token = self._peek()
        if token.isdigit() and len(token) > 1:  # \frac12 is 1/2
            self.tokens[self.place : self.place + 1] = [token[0], token[1:]]
        return self._atom()


def _is_number(token: str) -> bool:
    return token[:1] in "0123456789" or (token[:1] == "." and len(token) > 1)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _TooBig
    return value


def _power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if exponent is None:
        return None
    if base is None or exponent.denominator != 1:
        if abs(exponent) > MAX_SYMBOLIC_POWER:
            raise _TooBig
        return None
    if base == 0:
        return Fraction(0) if exponent > 0 else None
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
    if bits > MAX_BITS:
        raise _TooBig
    return base ** int(exponent)


def _factorial(value: Fraction | None) -> Fraction | None:
    if value is None or value.denominator != 1 or value < 0:
        return None
    if value > MAX_FACTORIAL:
        raise _TooBig
    return Fraction(math.factorial(int(value)))


def _binomial(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    if top is None or bottom is None or top.denominator != 1 or bottom.denominator != 1:
        return None
    if max(abs(top), abs(bottom)) > MAX_FACTORIAL:
        raise _TooBig
    return Fraction(math.comb(int(top), int(bottom))) if min(top, bottom) >= 0 else None


def _symbolically_equal(left: str, right: str) -> bool:
    parse, verify, config = _math_verify()
    sides = []
    for text in (right, left):
        text = re.sub(r"\^\s*([0-9]{2,})", r"^{\1}", text)  # 2^10 is not 2^1 times 0
        parsed = parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
        if not parsed:
            return False
        sides.append(parsed)
    return bool(verify(*sides, timeout_seconds=None))


def _math_verify() -> tuple[Any, Any, list[Any]]:
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    return parse, verify, [LatexExtractionConfig(boxed_match_priority=-1)]
