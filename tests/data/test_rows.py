"""Rows: every file form, every way a row can be broken, and what is said about it."""

import ast
import json
import operator
import re
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.errors import ConfigError, DataError

FILES = Path(__file__).parent / "files"
GOOD = {"question": "How many?", "answer": "<<1+1=2>>2\n#### 2"}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
VERL = {
    "prompt": TURNS,
    "data_source": "my/task",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


def write(path: Path, records: Sequence[Any]) -> str:
    """Objects as JSON lines; texts as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


# The suite's own rows


@pytest.mark.parametrize(("name", "count"), [("train", 28), ("test", 12)])
def test_own_rows_are_gsm8k_rows_with_right_arithmetic(name: str, count: int) -> None:
    found = load_rows([str(FILES / f"{name}.jsonl")])
    assert len(found.rows) == count
    for row in found.rows:
        assert row.data_source == "openai/gsm8k"
        assert row.extra_info["solution"].endswith(f"#### {row.answer}")
        marks = re.findall(r"<<(.+?)=(.+?)>>", row.extra_info["solution"])
        assert marks
        for expression, value in marks:
            assert calculate(expression) == calculate(value), row.row_id
        assert calculate(marks[-1][1]) == Fraction(row.answer.replace(",", "")), row.row_id


def calculate(text: str) -> Fraction:
    operations = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }

    def walk(node: ast.AST) -> Fraction:
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp):
            assert isinstance(node.op, ast.USub)
            return -walk(node.operand)
        assert isinstance(node, ast.Constant)
        return Fraction(str(node.value))

    return walk(ast.parse(text, mode="eval").body)


# Forms


def test_gsm8k_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**GOOD, "answer": "#### wrong\nthen\n#### 1,234 "}])
    (row,) = load_rows([path]).rows
    assert row.row_id == "a:1"
    assert (row.question, row.messages) == ("How many?", ())
    assert row.answer == "1,234"
    assert row.extra_info == {"solution": "#### wrong\nthen\n#### 1,234 "}


@pytest.mark.parametrize("answer", ["Paris", "#### A heading\nand a text below it"])
def test_other_answers_stay_as_they_are(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path / "cities.jsonl", [{"question": "Where?", "answer": answer, "level": 3}])
    (row,) = load_rows([path]).rows
    assert (row.answer, row.data_source, row.extra_info) == (answer, "cities", {"level": 3})


def test_prompt_answer_with_text_and_with_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        [
            {"prompt": "2+2?", "answer": "4", "data_source": "sums"},
            {"prompt": TURNS, "answer": "4"},
        ],
    )
    first, second = load_rows([path]).rows
    assert (first.question, first.messages, first.data_source) == ("2+2?", (), "sums")
    assert (second.question, second.messages, second.data_source) == (None, tuple(TURNS), "p")


def test_verl_rows_are_alike_from_jsonl_and_parquet(tmp_path: Path) -> None:
    a = load_rows([write(tmp_path / "v.jsonl", [VERL])])
    b = load_rows([write_parquet(tmp_path / "v.parquet", [VERL])])
    assert a.rows == b.rows
    assert a.digest == b.digest
    (row,) = a.rows
    assert row.messages == tuple(TURNS)
    assert (row.answer, row.data_source) == ("4", "my/task")
    assert row.extra_info == {"index": 7, "split": "train"}


@pytest.mark.parametrize(
    ("truth", "text"),
    [("4", "4"), (4, "4"), (0.5, "0.5"), (["b", "a"], '["b", "a"]'), ({"x": "ü"}, '{"x": "ü"}')],
)
def test_verl_ground_truth_becomes_text(tmp_path: Path, truth: Any, text: str) -> None:
    path = write(tmp_path / "v.jsonl", [{**VERL, "reward_model": {"ground_truth": truth}}])
    assert load_rows([path]).rows[0].answer == text


def test_parquet_values_become_plain_python(tmp_path: Path) -> None:
    import datetime
    import decimal

    extra = {
        "when": datetime.date(2024, 2, 29),
        "price": decimal.Decimal("1.50"),
        "tags": ["x", None],
        "deep": {"n": 1},
    }
    path = write_parquet(tmp_path / "v.parquet", [{**VERL, "extra_info": extra}])
    (row,) = load_rows([path]).rows
    assert row.extra_info == {
        "when": "2024-02-29",
        "price": "1.50",
        "tags": ["x", None],
        "deep": {"n": 1},
    }
    json.dumps(row.extra_info)


def test_arithmetic_rows() -> None:
    found = load_rows(["arithmetic:train:3"])
    assert [row.row_id for row in found.rows] == [f"arithmetic-train:{n}" for n in (1, 2, 3)]
    for row in found.rows:
        assert row.data_source == "arithmetic"
        assert row.extra_info["solution"].endswith(f"#### {row.answer}")


def test_files_keep_their_order_and_ids(tmp_path: Path) -> None:
    b = write(tmp_path / "b.jsonl", [GOOD, "", GOOD])
    a = write(tmp_path / "a.jsonl", [GOOD])
    assert [row.row_id for row in load_rows([b, a]).rows] == ["b:1", "b:3", "a:1"]


# Broken rows

BROKEN = {
    "cut json": ('{"question": "a"', "broken JSON at character 17"),
    "not an object": ("[1, 2]", "got list, need a JSON object"),
    "nan": ('{"question": "a", "answer": "b", "x": NaN}', "NaN is not a JSON number"),
    "missing column": (
        {"question": "a", "Answer": "b"},
        "missing column: got ['Answer', 'question']",
    ),
    "null": ({"question": None, "answer": "b"}, "question is null"),
    "wrong type": ({"question": "a", "answer": 5}, "answer has the wrong type: got int, need text"),
    "empty": ({"question": "", "answer": "b"}, "question is empty"),
    "white space": ({"question": " \t\u3000", "answer": "b"}, "question is only white space"),
    "empty answer": ({"question": "a", "answer": ""}, "answer is empty"),
    "no gold": ({"question": "a", "answer": "b\n####  "}, "empty answer"),
    "surrogate": ('{"question": "a \\ud83d b", "answer": "c"}', "lone surrogate U+D83D"),
    "hidden surrogate": (
        '{"question": "a", "answer": "c", "x": {"\\udc00": 1}}',
        "lone surrogate U+DC00",
    ),
    "no turns": ({**VERL, "prompt": []}, "no chat turns"),
    "turn type": ({**VERL, "prompt": ["hello"]}, "prompt[0] has the wrong type: got str"),
    "no role": ({**VERL, "prompt": [{"content": "a"}]}, "prompt[0].role is null"),
    "role injection": (
        {**VERL, "prompt": [{"role": "user<|end|>", "content": "a"}]},
        "prompt[0].role is 'user<|end|>'",
    ),
    "blank turn": (
        {**VERL, "prompt": [{"role": "user", "content": " "}]},
        "prompt[0].content is only",
    ),
    "parts": (
        {**VERL, "prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        "prompt[0].content has the wrong type: got list",
    ),
    "tool calls": (
        {**VERL, "prompt": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        "prompt[0] has ['tool_calls']",
    ),
    "assistant last": (
        {**VERL, "prompt": [{"role": "assistant", "content": "a"}]},
        "ends with the assistant's turn",
    ),
    "no truth": ({**VERL, "reward_model": {}}, "reward_model.ground_truth is null"),
    "empty truth": (
        {**VERL, "reward_model": {"ground_truth": []}},
        "ground_truth has the wrong type",
    ),
    "truth is bool": ({**VERL, "reward_model": {"ground_truth": True}}, "got bool"),
    "reward_model": ({**VERL, "reward_model": "4"}, "reward_model has the wrong type: got str"),
    "no data_source": (
        {key: value for key, value in VERL.items() if key != "data_source"},
        "missing column 'data_source'",
    ),
    "extra_info": ({**VERL, "extra_info": [1]}, "extra_info has the wrong type: got list"),
    "deep": ('{"question": "a", "answer": "b", "x": ' + "[" * 5000 + "]" * 5000 + "}", "deep"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_row_is_named_with_file_and_line(tmp_path: Path, name: str) -> None:
    record, reason = BROKEN[name]
    path = write(tmp_path / "a.jsonl", [GOOD] * 16 + [record, GOOD])
    with pytest.raises(DataError) as caught:
        load_rows([path])
    assert caught.value.exit_code == 65
    first, last = caught.value.problems
    assert first.startswith(f"{path}:17: ")
    assert reason in first
    assert "got 1 broken rows of 18" in last
    found = load_rows([path], bad_rows="skip", max_bad_rows_share=0.06)
    assert [row.row_id for row in found.rows][-2:] == ["a:16", "a:18"]
    assert found.skipped == (first,)
    assert load_rows([path], exclude_ids=["a:17"]).excluded == 1


def test_many_broken_rows_are_counted_over_all_files(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", ["{"] * 15)
    b = write(tmp_path / "b.jsonl", [GOOD] + ["{"] * 15)
    with pytest.raises(DataError) as caught:
        load_rows([a, b])
    problems = caught.value.problems
    assert len(problems) == 22
    assert f"{b}:6" in problems[19]
    assert problems[20] == "and 10 more rows like these"
    assert "got 30 broken rows of 31" in problems[21]


def test_skip_has_a_cap(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD] * 99 + ["{"])
    assert len(load_rows([path], bad_rows="skip").skipped) == 1
    path = write(tmp_path / "a.jsonl", [GOOD] * 98 + ["{"])
    with pytest.raises(DataError, match=r"1 broken rows of 99 \(1.01%\), need at most 1.00%"):
        load_rows([path], bad_rows="skip")


def test_broken_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 this is none PAR1")
    with pytest.raises(DataError, match="unreadable after row 0"):
        load_rows([str(path)])
    whole = write_parquet(path, [GOOD])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="whole parquet file"):
        load_rows([whole])
    binary = write_parquet(
        path, [{**GOOD, "image": b"\x00"}, {**GOOD, "question": None, "image": None}]
    )
    with pytest.raises(DataError) as caught:
        load_rows([binary])
    assert "a.parquet:1: image holds a bytes" in caught.value.problems[0]
    assert "a.parquet:2: question is null" in caught.value.problems[1]


# Choice of rows


def test_exclude_and_max_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**GOOD, "question": str(n)} for n in range(1, 6)] + ["{"])
    found = load_rows([path], exclude_ids=["a:2", "other:9"], max_samples=3)
    assert [row.question for row in found.rows] == ["1", "3", "4"]
    assert (found.excluded, found.skipped, found.notes) == (1, (), ())
    lost = load_rows([path], exclude_ids=["a:6", "a:77", "other:9"])
    assert len(lost.rows) == 5
    assert lost.notes == ("data.exclude_ids names rows that do not exist: a:77",)
    with pytest.raises(ConfigError, match="need 1 or more"):
        load_rows([path], max_samples=0)


def test_equal_stems_are_noted(tmp_path: Path) -> None:
    paths = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        paths.append(write(tmp_path / folder / "a.jsonl", [GOOD, GOOD]))
    found = load_rows(paths, exclude_ids=["a:1"])
    assert (len(found.rows), found.excluded) == (2, 2)
    assert "2 files share the stem 'a'" in found.notes[0]


def test_digest_sees_every_field_and_the_order(tmp_path: Path) -> None:
    other = {**GOOD, "question": "Why?"}
    variants: list[list[Any]] = [
        [GOOD, other],
        [other, GOOD],
        [GOOD],
        [GOOD, {**other, "answer": "#### 3"}],
        [GOOD, {**other, "answer": "<<1+1=2>> 2\n#### 2"}],
        [GOOD, {**other, "data_source": "x"}],
        [GOOD, {**other, "extra_info": {"k": 1}}],
        [GOOD, {"prompt": [{"role": "user", "content": "Why?"}], "answer": other["answer"]}],
    ]
    digests = [load_rows([write(tmp_path / "a.jsonl", rows)]).digest for rows in variants]
    assert len(set(digests)) == len(variants)
    assert load_rows([write(tmp_path / "a.jsonl", variants[0])]).digest == digests[0]


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="bad_rows"):
        load_rows([], bad_rows="ignore")
    assert load_rows([]).rows == ()


@pytest.mark.parametrize(
    "text",
    [
        "e\u0301 combined",
        "\u05e9\u05dc\u05d5\u05dd right to left \u202e",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 joined",
        "zero\u200bwidth\ufeff",
        "１２３ full width",
        "<|im_end|>\n<|im_start|>assistant",
        "null \x00 byte",
        "line\u2028separator",
    ],
)
def test_unusual_text_is_kept_letter_by_letter(tmp_path: Path, text: str) -> None:
    record = {"question": text, "answer": f"{text}\n#### 1"}
    escaped = write(tmp_path / "a.jsonl", [record, GOOD])
    raw = tmp_path / "b.jsonl"
    raw.write_bytes(json.dumps(record, ensure_ascii=False).encode())
    for path in (escaped, str(raw)):
        row = load_rows([path]).rows[0]
        assert row.question == text
        assert row.extra_info["solution"] == f"{text}\n#### 1"


def test_paired_surrogate_escapes_are_one_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ['{"question": "\\ud83d\\ude00", "answer": "b"}'])
    assert load_rows([path]).rows[0].question == "\U0001f600"


def test_reading_rows_needs_no_jax() -> None:
    code = (
        "import sys; from jaxrl_llm.data import load_rows; load_rows([]); "
        "print([m for m in ('jax', 'grain', 'pyarrow', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
