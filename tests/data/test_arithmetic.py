"""The generated task: right arithmetic, fixed rows, splits without a common question, clear refusals."""

import subprocess
import sys

import pytest

from jaxrl_llm.data import arithmetic
from jaxrl_llm.errors import ConfigError, DataError

# Rows written down once: a change of the stream silently makes the shipped model's splits meaningless.
FIRST = {
    "warm": ["21+1+2=?", "16+1-1=?", "99-2-4=?", "27+6+3=?"],
    "train": ["47+9-2-5=?", "83+2-5=?", "20-2-3+2=?", "59+1+9+4=?"],
    "heldout": ["96-8-8=?", "55-2+9=?", "84-5+6-9=?", "33-9-8=?"],
}


def test_worked_answer_by_hand() -> None:
    assert arithmetic.work([58, 7, -9]) == ("58+7=65\n65-9=56\n#### 56", 56)
    assert arithmetic.work([9, -9]) == ("9-9=0\n#### 0", 0)
    assert arithmetic.ask([58, 7, -9]) == "58+7-9=?"
    assert arithmetic.parse("58+7-9=?") == [58, 7, -9]


def test_a_wrong_step_is_carried_on() -> None:
    def wrong(total: int, term: int) -> int:
        return total + term - 10

    assert arithmetic.work([58, 7, -9], wrong) == ("58+7=55\n55-9=36\n#### 36", 36)


@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_rows_are_right_and_within_bounds(split: str) -> None:
    rows = arithmetic.generate(split, 300)
    assert len(rows) == 300
    assert len({row["question"] for row in rows}) == 300
    lengths = set()
    for row in rows:
        assert set(row) == {"question", "answer", "solution"}
        terms = arithmetic.parse(row["question"])
        lengths.add(len(terms))
        assert arithmetic.ask(terms) == row["question"]
        assert row["answer"] == str(sum(terms))
        assert row["solution"].splitlines()[-1] == f"#### {row['answer']}"
        *lines, _ = row["solution"].splitlines()
        assert len(lines) == len(terms) - 1
        assert all(0 <= sum(terms[:n]) <= arithmetic.LARGEST for n in range(1, len(terms) + 1))
        assert all(1 <= abs(term) <= arithmetic.LARGEST_CHANGE for term in terms[1:])
        for line, term in zip(lines, terms[1:], strict=True):
            left, _, result = line.partition("=")
            assert sum(arithmetic.parse(left)) == int(result)
            assert arithmetic.parse(left)[1] == term
    assert lengths == {2, 3, 4}


@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_the_stream_stays_as_it_was(split: str) -> None:
    assert [row["question"] for row in arithmetic.generate(split, 4)] == FIRST[split]


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert arithmetic.generate("train", 50)[:20] == arithmetic.generate("train", 20)
    assert arithmetic.generate("train", 0) == []


def test_rows_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from jaxrl_llm.data.arithmetic import generate; import sys;"
        "print(generate('heldout', 40)); assert 'jax' not in sys.modules"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {f"{arithmetic.generate('heldout', 40)}\n"}


def test_splits_share_no_question_and_together_are_the_stream() -> None:
    questions = [arithmetic.ask(terms) for terms in arithmetic.stream()]
    assert len(set(questions)) == len(questions)
    owners = [
        [split for split, buckets in arithmetic.SPLITS.items() if arithmetic.bucket(q) in buckets]
        for q in questions
    ]
    assert all(len(owner) == 1 for owner in owners)


def test_unknown_split_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'test'.*warm, train, heldout"):
        arithmetic.generate("test", 5)
    with pytest.raises(ConfigError, match="-1"):
        arithmetic.generate("train", -1)


def test_more_rows_than_exist_are_refused_with_the_number_there_is() -> None:
    with pytest.raises(DataError, match=r"1000000 rows.*holds (\d+)") as caught:
        arithmetic.generate("heldout", 1_000_000)
    holds = int(str(caught.value).split("holds ")[1].split(";")[0])
    assert len(arithmetic.generate("heldout", holds)) == holds
    with pytest.raises(DataError):
        arithmetic.generate("heldout", holds + 1)
