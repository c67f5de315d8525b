"""Sources: what an entry of a file list may be, and files whose bytes are wrong."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data import rows as rows_module
from jaxrl_llm.data import sources
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.errors import ConfigError, DataError
from tests.data.test_rows import FILES, GOOD, write, write_parquet


def test_variables_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_ROWS", str(tmp_path / "deep"))
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "a.jsonl", [GOOD])
    for text in ("~/deep/a.jsonl", "$MY_ROWS/a.jsonl", "${MY_ROWS}/a.jsonl"):
        assert len(load_rows([text]).rows) == 1


def test_unset_variables_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_PLACE", raising=False)
    monkeypatch.delenv("NOR_THIS", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_rows(["$NO_SUCH_PLACE/a.jsonl", "${NOR_THIS}/b.jsonl"])
    assert len(caught.value.problems) == 2
    assert "$NO_SUCH_PLACE" in str(caught.value)
    assert "$NOR_THIS" in str(caught.value)


def test_gsm8k_folder_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXRL_GSM8K_DIR", raising=False)
    with pytest.raises(DataError, match="JAXRL_GSM8K_DIR"):
        load_rows(["$JAXRL_GSM8K_DIR/train.jsonl"])
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    write(tmp_path / "data" / "gsm8k" / "train.jsonl", [GOOD])
    assert len(load_rows(["$JAXRL_GSM8K_DIR/train.jsonl"]).rows) == 1
    monkeypatch.setenv("JAXRL_GSM8K_DIR", str(FILES))
    assert len(load_rows(["$JAXRL_GSM8K_DIR/train.jsonl"]).rows) == 28


def test_the_other_ending_is_found_with_a_note(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [GOOD])
    write_parquet(tmp_path / "b.parquet", [GOOD])
    found = load_rows([str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")])
    assert [row.row_id for row in found.rows] == ["a:1", "b:1"]
    assert len(found.notes) == 2
    assert all("read instead" in note for note in found.notes)
    write_parquet(tmp_path / "a.parquet", [GOOD, GOOD])
    both = load_rows([str(tmp_path / "a.parquet")])
    assert (len(both.rows), both.notes) == (2, ())


@pytest.mark.parametrize(
    "text",
    [
        "rows.csv",
        "rows",
        "arithmetic:train",
        "arithmetic:train:0",
        "arithmetic:train:ten",
        "arithmetic::5",
        "arithmetic:nosuch:5",
        "hub:name",
        "hub::train",
    ],
)
def test_sources_nobody_understands(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text.split(":")[0])):
        load_rows([text])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError) as caught:
        load_rows([str(tmp_path / "none.jsonl"), str(tmp_path / "folder.jsonl")])
    assert len(caught.value.problems) == 2
    assert "no such file" in caught.value.problems[0]
    assert "a folder" in caught.value.problems[1]


@pytest.mark.parametrize(
    ("text", "parts", "stem"),
    [
        ("hub:openai/gsm8k:main:train", ("openai/gsm8k", "main", "train"), "gsm8k-train"),
        ("hub:me/rows:test", ("me/rows", None, "test"), "rows-test"),
        ("hub:me/rows:train[:10]", ("me/rows", None, "train[:10]"), "rows-train[:10]"),
    ],
)
def test_hub_sources(text: str, parts: tuple[str, str | None, str], stem: str) -> None:
    source = sources.open_source(text)
    assert (source.hub, source.stem) == (parts, stem)


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "é" * 130 + ".jsonl", "a\0b.jsonl"])
def test_names_that_no_file_system_takes(name: str) -> None:
    with pytest.raises(ConfigError, match="need a path that a file system takes"):
        load_rows([name])
    with pytest.raises(DataError, match="no such file"):
        load_rows(["-x.jsonl"])


def test_hub_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"jaxrl_llm\[hub\]"):
        load_rows(["hub:me/rows:train"])


def test_hub_with_and_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    calls = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, config, split))
        if name == "me/away":
            raise ConnectionError("no route\nmore lines")
        return [GOOD]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert [row.row_id for row in load_rows(["hub:me/rows:main:train"]).rows] == ["rows-train:1"]
    assert calls == [("me/rows", "main", "train")]
    with pytest.raises(DataError, match=r"hub:me/away:train.*ConnectionError: no route"):
        load_rows(["hub:me/away:train"])


def test_wrong_bytes(tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b'\n{"question": "\xff", "answer": "b"}\n' + good[:-5])
    with pytest.raises(DataError) as caught:
        load_rows([str(path)])
    first, second, _ = caught.value.problems
    assert f"{path}:2: invalid UTF-8 at byte 15" in first
    assert f"{path}:3: broken JSON" in second
    assert "cut off" in second
    path.write_bytes(json.dumps(GOOD).encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        load_rows([str(path)])


def test_byte_order_mark_line_ends_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({**GOOD, "question": "grün"}, ensure_ascii=False).encode()
    path.write_bytes(line + b"\n" + line)
    clean = load_rows([str(path)])
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n\r\n")
    marked = load_rows([str(path)])
    assert marked.rows == clean.rows
    assert marked.digest == clean.digest
    assert len(clean.notes) == 0
    assert ["mark" in marked.notes[0], "CRLF" in marked.notes[1], len(marked.notes)] == [
        True,
        True,
        2,
    ]
    path.write_bytes(line + b"\n\xef\xbb\xbf" + line)
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON"):
        load_rows([str(path)])


def test_long_lines_are_refused_and_the_next_line_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    for extra in (1, 40, 99, 100, 101, 250, 1000):
        long = json.dumps({"question": "q" * (100 + extra), "answer": "a"})
        path = write(tmp_path / "a.jsonl", [GOOD, long, GOOD, long])
        with pytest.raises(DataError) as caught:
            load_rows([path])
        assert [problem.split(": ")[0] for problem in caught.value.problems[:-1]] == [
            f"{path}:2",
            f"{path}:4",
        ]
        assert "longer than 100 bytes" in caught.value.problems[0]
    fits = {"question": "q", "answer": "a" * 69}
    assert len(json.dumps(fits)) == 100
    assert len(load_rows([write(tmp_path / "a.jsonl", [fits])]).rows) == 1
    assert rows_module.MAX_LINE_BYTES == 10_000_000
