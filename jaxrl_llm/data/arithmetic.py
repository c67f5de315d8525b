"""A generated task: small numbers added to and taken from a larger one, worked out line by line and ended as in GSM8K.

A question is `58+7-9=?`, its worked answer

    58+7=65
    65-9=56
    #### 56

so answers differ in length with the number of terms. Every number and every running total lies in 0 to 99. The task is
an endless-looking but finite stream of draws; a row belongs to the split that a hash of its question names, so no two
splits can ever share a question, however many rows are taken.

Left out on purpose: text around the numbers, multiplication, and any setting for difficulty. The task exists to show within
minutes that a training loop learns, not to measure a model.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

from jaxrl_llm.errors import ConfigError, DataError

SPLITS: dict[str, range] = {"warm": range(8), "train": range(8, 14), "heldout": range(14, 16)}
"""Which of 16 hash buckets belong to a split: half of the stream to warm starts, 6/16 to training, 2/16 to evaluation."""

DRAWS = 1 << 17
"""Length of the stream, repeated questions included; what lies behind it does not exist."""

LARGEST = 99
"""Largest first number and largest running total."""

LENGTHS = (2, 3, 3, 4)
"""Numbers of terms a draw picks from, all entries alike."""

LARGEST_CHANGE = 9
"""Largest size of the numbers after the first."""


def generate(split: str, count: int) -> list[dict[str, str]]:
    """The first `count` rows of a split: `question`, `answer` (the number as text) and `solution` (the worked answer).

    Rows are distinct, the same on every machine, and a longer list begins with the shorter one. Errors: `ConfigError` for an unknown
    split or a negative count, `DataError` where the split holds fewer than `count` rows. `count=0` gives an empty list.
    """
    if split not in SPLITS:
        raise ConfigError(
            f"got the arithmetic split {split!r}, need one of {', '.join(SPLITS)}; "
            f"write for example arithmetic:train:{max(count, 1)}"
        )
    if count < 0:
        raise ConfigError(f"got {count} arithmetic rows, need 0 or more; name a positive count")
    rows: list[dict[str, str]] = []
    for terms in stream():
        if len(rows) == count:
            return rows
        question = ask(terms)
        if bucket(question) in SPLITS[split]:
            solution, answer = work(terms)
            rows.append({"question": question, "answer": str(answer), "solution": solution})
    if len(rows) < count:
        raise DataError(
            f"got a request for {count} rows of the arithmetic split {split!r}, which holds {len(rows)}; "
            f"ask for {len(rows)} or fewer"
        )
    return rows


def stream() -> Iterator[tuple[int, ...]]:
    """All questions of all splits as signed terms, each once, in a fixed order: `(58, 7, -9)` is `58+7-9`."""
    seen = set()
    for index in range(DRAWS):
        terms = draw(index)
        if terms not in seen:
            seen.add(terms)
            yield terms


def draw(index: int) -> tuple[int, ...]:
    """The terms of one draw: length, first number, then signed numbers that keep the total within 0 to `LARGEST`.

    Randomness is the SHA-256 digest of the index, four bytes per choice, so it depends neither on `PYTHONHASHSEED` nor on the
    version of a random number generator.
    """
    digest = hashlib.sha256(f"arithmetic {index}".encode()).digest()
    choices = iter([int.from_bytes(digest[at : at + 4], "big") for at in range(0, 32, 4)])
    length = LENGTHS[next(choices) % len(LENGTHS)]
    terms = [1 + next(choices) % LARGEST]
    while len(terms) < length:
        total, choice = sum(terms), next(choices)
        size = 1 + choice // 2 % LARGEST_CHANGE
        up = total < size or (total + size <= LARGEST and choice % 2 == 0)
        terms.append(size if up else -size)
    return tuple(terms)


def bucket(question: str) -> int:
    """The hash bucket of a question, 0 to 15: the low four bits of the first byte of its SHA-256 digest."""
    return hashlib.sha256(question.encode()).digest()[0] % 16


def ask(terms: Sequence[int]) -> str:
    """The question of signed terms: `(58, 7, -9)` gives `58+7-9=?`."""
    return str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:]) + "=?"


def parse(question: str) -> list[int]:
    """The signed terms of a question, the inverse of `ask`."""
    return [int(term) for term in re.findall(r"[+-]?\d+", question)]


def add(total: int, term: int) -> int:
    """One step of a worked answer, without a slip."""
    return total + term


def work(terms: Sequence[int], step: Callable[[int, int], int] = add) -> tuple[str, int]:
    """The worked answer of signed terms and its final number, with `step` doing the arithmetic of every line.

    A `step` that errs gives a worked answer that goes on from the wrong total, as a person would.
    """
    total, lines = terms[0], []
    for term in terms[1:]:
        result = step(total, term)
        lines.append(f"{total}{term:+d}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"]), total
