"""Records of every supported schema -> rows of one: `load_rows`; standard library only (pyarrow and datasets on demand).

A record is recognised by its columns:

====================================================  ===========================================================
`prompt`, `data_source`, `reward_model.ground_truth`  verl's schema, `extra_info` optional
`question`, `answer`                                  a plain question; `#### N` in the answer makes it GSM8K
`prompt`, `answer`                                    `prompt` is a plain question or a list of chat turns
====================================================  ===========================================================

In the last two, `data_source` may be a column of its own, else it is the file's stem (GSM8K: `openai/gsm8k`), and all
further columns are kept in `extra_info`, where graders find them.

Everything that is not a complete record is a broken row. A lone surrogate (JSON `"\\ud800"` without its partner) is no
Unicode text and no tokenizer can encode it, so such a row is broken too. Text that looks like a control token is ordinary
text here; that it stays ordinary is the tokenizer's duty.

Left out on purpose: images and other binary columns, tool calls in prompts, and any repair of a broken row: a guess about
what a row meant would be a wrong label nobody sees.
"""

import datetime
import decimal
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.sources import (
    MAX_LINE_BYTES,
    BrokenRow,
    Record,
    Source,
    kind_of,
    open_sources,
    read_all,
)
from jaxrl_llm.errors import ConfigError, DataError

SHOWN = 20
"""Problems printed one by one; more are counted."""
ROLES = ("system", "developer", "user", "assistant", "tool")
GSM8K_SOURCE = "openai/gsm8k"

SCHEMAS = "question + answer, prompt + answer, or prompt + data_source + reward_model.ground_truth"


@dataclass(frozen=True)
class Row:
    """One usable row: chat `messages`, or a plain `question` with no messages, and what the graders are told.

    `row_id` is `FILE_STEM:LINE`, counted from 1 (parquet, generated and hub rows: the row number); generated rows have the
    stem `arithmetic-SPLIT`, hub rows `NAME-SPLIT` with the last part of the id as name.
    """

    row_id: str
    question: str | None
    messages: tuple[dict[str, str], ...]
    answer: str
    data_source: str
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class RowSet:
    """The rows of a list of files in load order, and what was left out.

    `skipped` holds one text per broken row (empty unless `bad_rows="skip"`), `excluded` counts rows left out by id, `notes`
    are lines worth printing. `digest` is a sha256 over every field of the rows in use, so a file that changed in a row that
    is used has another digest, and one that changed only its line ends has not.
    """

    rows: tuple[Row, ...]
    skipped: tuple[str, ...]
    excluded: int
    digest: str
    notes: tuple[str, ...] = ()


def load_rows(
    files: Sequence[str],
    *,
    bad_rows: str = "error",
    max_bad_rows_share: float = 0.01,
    exclude_ids: Sequence[str] = (),
    max_samples: int | None = None,
) -> RowSet:
    """Read `files` in order into one `RowSet`.

    Rows named in `exclude_ids` are left out before they are looked at, so a broken row can be excluded too. With
    `max_samples` reading ends at the first so many usable rows; what lies behind them is not checked. The share of broken
    rows is counted over the rows that were read. No files or empty files give 0 rows: `build_prompts` refuses those.

    Raises `DataError` for a missing file and for broken rows (the first 20 with file and line, then a count), `ConfigError`
    for a source that cannot be understood or a variable that is not set.
    """
    if bad_rows not in ("error", "skip"):
        raise ConfigError(f'got bad_rows={bad_rows!r}, need "error" or "skip"; set data.bad_rows')
    if max_samples is not None and max_samples < 1:
        raise ConfigError(
            f"got {max_samples} as the most rows to read, need 1 or more, or None for all; set it so"
        )
    sources = open_sources(files)
    unwanted, met = set(exclude_ids), set()
    rows: list[Row] = []
    broken: list[str] = []
    excluded = 0
    for source, line, record in read_all(sources):
        row_id = f"{source.stem}:{line}"
        if row_id in unwanted:
            excluded += 1
            met.add(row_id)
            continue
        try:
            rows.append(parse_record(record, row_id=row_id, stem=source.stem))
        except BrokenRow as problem:
            broken.append(f"{source.label}:{line}: {problem}")
        except RecursionError:
            broken.append(f"{source.label}:{line}: nested too deeply")
        if len(rows) == max_samples:
            break
    if broken:
        refuse_broken(broken, len(rows), bad_rows, max_bad_rows_share)
    return RowSet(
        rows=tuple(rows),
        skipped=tuple(broken),
        excluded=excluded,
        digest=digest(rows),
        notes=tuple(gather_notes(sources, unwanted - met, complete=len(rows) != max_samples)),
    )


def refuse_broken(broken: Sequence[str], good: int, bad_rows: str, share: float) -> None:
    """Raise `DataError` unless broken rows are to be skipped and are at most `share` of the rows read."""
    seen = good + len(broken)
    if bad_rows == "error":
        need = 'need 0; correct them, name them in data.exclude_ids or set data.bad_rows="skip"'
    elif len(broken) > share * seen:
        need = (
            f"need at most {share:.2%} (data.max_bad_rows_share); correct them or raise the share"
        )
    else:
        return
    raise DataError(
        [
            *shorten(broken),
            f"got {len(broken)} broken rows of {seen} ({len(broken) / seen:.2%}), {need}",
        ]
    )


def shorten(problems: Sequence[str]) -> list[str]:
    """The first 20 problems and, where there are more, a line with the count of the rest."""
    shown = list(problems[:SHOWN])
    if len(problems) > SHOWN:
        shown.append(f"and {len(problems) - SHOWN} more rows like these")
    return shown


def gather_notes(sources: Sequence[Source], unused: set[str], *, complete: bool) -> Iterator[str]:
    """Lines worth printing: what the sources noted, stems that name two files, excluded ids that named no row."""
    for source in sources:
        yield from source.notes
    stems = [source.stem for source in sources]
    for stem in sorted({stem for stem in stems if stems.count(stem) > 1}):
        yield f"{stems.count(stem)} files share the stem {stem!r}; data.exclude_ids applies to all of them"
    lost = sorted(name for name in unused if name.rpartition(":")[0] in stems)
    if lost and complete:
        yield f"data.exclude_ids names rows that do not exist: {', '.join(lost)}"


def digest(rows: Iterable[Row]) -> str:
    """sha256 over all fields of all rows, in order."""
    total = hashlib.sha256()
    for row in rows:
        fields = [
            row.row_id,
            row.question,
            row.messages,
            row.answer,
            row.data_source,
            row.extra_info,
        ]
        total.update(json.dumps(fields, sort_keys=True).encode())
        total.update(b"\n")
    return total.hexdigest()


def parse_record(record: Record, *, row_id: str, stem: str) -> Row:
    """A record of any schema as a `Row`; raises `BrokenRow`."""
    if isinstance(record, BrokenRow):
        raise record
    columns = set(record)
    if {"prompt", "reward_model"} <= columns:
        question, messages = parse_prompt(record["prompt"])
        answer = parse_truth(record["reward_model"])
        source = text_of(record, "data_source")
        extra = parse_extra(record)
    elif {"question", "answer"} <= columns or {"prompt", "answer"} <= columns:
        name = "question" if "question" in columns else "prompt"
        if name == "question":
            question, messages = text_of(record, name), ()
        else:
            question, messages = parse_prompt(record[name])
        solution = text_of(record, "answer")
        gold = gsm8k_gold(solution)
        others = columns - {name, "answer", "data_source", "extra_info"}
        extra = {key: plain(record[key], key) for key in sorted(others)} | parse_extra(record)
        source = text_of(record, "data_source") if "data_source" in columns else stem
        answer = solution if gold is None else gold
        if gold is not None:
            extra["solution"] = solution
            source = source if "data_source" in columns else GSM8K_SOURCE
    else:
        raise BrokenRow(f"missing column: got {sorted(map(str, columns))}, need {SCHEMAS}")
    check_unicode(question, messages, answer, source, extra)
    return Row(row_id, question, messages, answer, source, extra)


def gsm8k_gold(solution: str) -> str | None:
    """The text after the last `####` where it is one line, as GSM8K writes it; `None` for any other answer."""
    _, marks, rest = solution.rpartition("####")
    gold = rest.strip()
    if not marks or "\n" in gold:
        return None
    if not gold:
        raise BrokenRow("empty answer: nothing follows the last ####")
    return gold


def text_of(record: Mapping[str, Any], name: str) -> str:
    """A required text column; null, another type, an empty or a blank text are broken rows."""
    if name not in record:
        raise BrokenRow(f"missing column {name!r}: got {sorted(map(str, record))}")
    return text(record[name], name)


def text(value: Any, name: str) -> str:
    """`value` if it is text with something in it; raises `BrokenRow`."""
    if value is None:
        raise BrokenRow(f"{name} is null")
    if not isinstance(value, str):
        raise BrokenRow(f"{name} has the wrong type: got {kind_of(value)}, need text")
    if not value:
        raise BrokenRow(f"{name} is empty")
    if not value.strip():
        raise BrokenRow(f"{name} is only white space")
    if len(value) > MAX_LINE_BYTES:
        raise BrokenRow(f"{name} is longer than {MAX_LINE_BYTES:,} characters")
    return value


def parse_prompt(value: Any) -> tuple[str | None, tuple[dict[str, str], ...]]:
    """`(question, messages)` of a `prompt` column: a text, or a list of chat turns that ends before the assistant's."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return text(value, "prompt"), ()
    turns = []
    for index, turn in enumerate(value):
        where = f"prompt[{index}]"
        if not isinstance(turn, Mapping):
            raise BrokenRow(f"{where} has the wrong type: got {kind_of(turn)}, need a chat turn")
        more = sorted(
            str(k) for k, v in turn.items() if k not in ("role", "content") and v is not None
        )
        if more:
            raise BrokenRow(f"{where} has {more}, need role and content alone")
        role = text(turn.get("role"), f"{where}.role")
        if role not in ROLES:
            raise BrokenRow(f"{where}.role is {role[:40]!r}, need one of {', '.join(ROLES)}")
        turns.append({"role": role, "content": text(turn.get("content"), f"{where}.content")})
    if not turns:
        raise BrokenRow("prompt is empty: no chat turns")
    if turns[-1]["role"] not in ("user", "tool"):
        raise BrokenRow(f"prompt ends with the {turns[-1]['role']}'s turn, need the user's")
    return None, tuple(turns)


def parse_truth(value: Any) -> str:
    """`reward_model.ground_truth` as text: numbers as written by Python, lists and dicts as JSON."""
    if not isinstance(value, Mapping):
        raise BrokenRow(f"reward_model has the wrong type: got {kind_of(value)}, need an object")
    truth = plain(value.get("ground_truth"), "reward_model.ground_truth")
    if isinstance(truth, (int, float)) and not isinstance(truth, bool):
        truth = repr(truth)
    if isinstance(truth, (list, dict)) and truth:
        truth = json.dumps(truth, ensure_ascii=False, sort_keys=True)
    return text(truth, "reward_model.ground_truth")


def parse_extra(record: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra_info` column as plain Python; a missing or null one is empty."""
    extra = record.get("extra_info")
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise BrokenRow(f"extra_info has the wrong type: got {kind_of(extra)}, need an object")
    result = plain(extra, "extra_info")
    assert isinstance(result, dict)
    return result


def plain(value: Any, where: str) -> Any:
    """Nested values as what JSON knows: arrays as lists, numpy numbers as numbers, dates and decimals as text.

    `where` names the value in the `BrokenRow` of a number that is not finite or of a type that has no such form.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BrokenRow(f"{where} holds the number {value}, need a finite one")
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where)
    raise BrokenRow(f"{where} holds a {kind_of(value)}, need text, numbers, lists or objects")


def check_unicode(*values: Any) -> None:
    """Raise `BrokenRow` where a text anywhere in `values` holds a lone surrogate."""
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise BrokenRow(
            f"lone surrogate U+{code:04X}: not Unicode text, no tokenizer can encode it"
        ) from error
