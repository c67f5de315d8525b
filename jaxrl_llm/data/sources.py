"""Where records come from: entries of a file list -> `Source`, and a reader for each kind; standard library at import.

An entry is a path to `.jsonl` or `.parquet`, `arithmetic:SPLIT:COUNT`, or `hub:ID:SPLIT` (`hub:ID:CONFIG:SPLIT`). A reader
yields `(line, record)`, counted from 1, and a `BrokenRow` in the record's place where a line holds none; what a record means is
`jaxrl_llm.data.rows`' affair.

A byte order mark at the head of a `.jsonl` file, CRLF line ends and blank lines carry no text and are passed over (the
first two with a note).

Left out on purpose: compressed files, globs and folders, and code that comes with a data set.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import ConfigError, DataError

MAX_LINE_BYTES = 10_000_000
DEFAULT_VARIABLES = {"JAXRL_GSM8K_DIR": "~/data/gsm8k"}
"""Variables that have a meaning even where the environment does not set them."""

BOM = b"\xef\xbb\xbf"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
HUB = re.compile(r"hub:(?P<id>[^:]+)(?::(?P<name>[^:\[]+))?:(?P<split>[^:\[]+(?:\[[^\]]*\])?)")


@dataclass(frozen=True)
class Source:
    """Where records come from: `stem` names its rows, `label` names it in errors, `kind` is a key of `READERS`."""

    kind: str
    label: str
    stem: str
    path: Path | None = None
    hub: tuple[str, str | None, str] | None = None
    generated: tuple[str, int] | None = None
    notes: list[str] = field(default_factory=list)


class BrokenRow(ValueError):
    """One row cannot be used; the text says why."""


Record = Mapping[str, Any] | BrokenRow


def expand(text: str) -> str:
    """Put environment variables and the home folder into a path; `ConfigError` names a variable that is not set."""
    missing = []

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        found = os.environ.get(name) or DEFAULT_VARIABLES.get(name)
        if found is None:
            missing.append(name)
            return match[0]
        return found

    expanded = VARIABLE.sub(value, text)
    if missing:
        names = ", ".join(f"${name}" for name in missing)
        raise ConfigError(
            f"got the path {text!r}, need {names} in the environment; set it or name a full path"
        )
    return os.path.expanduser(expanded)


def open_sources(files: Sequence[str]) -> list[Source]:
    """Understand every entry of a file list; all entries that cannot be understood or found are reported together."""
    sources: list[Source] = []
    wrong: list[str] = []
    absent: list[str] = []
    for text in files:
        try:
            sources.append(open_source(text))
        except ConfigError as error:
            wrong.extend(error.problems)
        except DataError as error:
            absent.extend(error.problems)
    if wrong:
        raise ConfigError([*wrong, *absent])
    if absent:
        raise DataError(absent)
    return sources


def open_source(text: str) -> Source:
    """One entry of a file list as a `Source`; the file is looked up, not read."""
    if text.startswith("arithmetic:"):
        _, _, rest = text.partition(":")
        split, _, count = rest.partition(":")
        if not split or not re.fullmatch(r"[1-9][0-9]{0,8}", count):
            raise ConfigError(
                f"got {text!r}, need arithmetic:SPLIT:COUNT; for example arithmetic:train:1000"
            )
        return Source("arithmetic", text, f"arithmetic-{split}", generated=(split, int(count)))
    if text.startswith("hub:"):
        match = HUB.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"got {text!r}, need hub:ID:SPLIT or hub:ID:CONFIG:SPLIT; for example hub:openai/gsm8k:main:train"
            )
        stem = f"{match['id'].rsplit('/', 1)[-1]}-{match['split']}"
        return Source("hub", text, stem, hub=(match["id"], match["name"], match["split"]))
    return open_path(text)


def open_path(text: str) -> Source:
    """A `.jsonl` or `.parquet` path; where only the same name with the other ending exists, that one, with a note."""
    path = Path(expand(text))
    if "\0" in text or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise ConfigError(
            f"got the data file {text[:80]!r} ({len(text)} characters), need a path that a file system takes: no NUL, at most "
            "255 bytes per name; correct data.train_files or data.val_files"
        )
    other = {".jsonl": ".parquet", ".parquet": ".jsonl"}.get(path.suffix)
    if other is None:
        raise ConfigError(
            f"got the data file {text!r}, need a name that ends in .jsonl or .parquet, arithmetic:SPLIT:COUNT or "
            "hub:ID:SPLIT; convert or rename it"
        )
    notes = []
    if not path.is_file() and path.with_suffix(other).is_file():
        path = path.with_suffix(other)
        notes.append(f"{text} does not exist; {path} is read instead")
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        hint = next((name for name in DEFAULT_VARIABLES if name in text), None)
        do = (
            f"set {hint} to the folder that holds it"
            if hint
            else "correct data.train_files or data.val_files"
        )
        raise DataError(f"got {text!r} ({path}: {what}), need a readable file; {do}")
    return Source(path.suffix[1:], str(path), path.stem, path=path, notes=notes)


# Readers: a source -> (line from 1, record or the reason why there is none)


def read_all(sources: Iterable[Source]) -> Iterator[tuple[Source, int, Record]]:
    """The records of all sources in order."""
    for source in sources:
        for line, record in READERS[source.kind](source):
            yield source, line, record


def read_jsonl(source: Source) -> Iterator[tuple[int, Record]]:
    """The JSON objects of a file, one a line, a line held in memory at a time and refused above 10 MB."""
    assert source.path is not None
    crlf = False
    with source.path.open("rb") as stream:
        line = 0
        while raw := stream.readline(MAX_LINE_BYTES + 2):
            line += 1
            ended = raw.endswith(b"\n")
            if not ended and len(raw) > MAX_LINE_BYTES:
                while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield line, BrokenRow(f"longer than {MAX_LINE_BYTES:,} bytes")
                continue
            if line == 1 and raw.startswith(BOM):
                raw = raw[len(BOM) :]
                source.notes.append(f"{source.label}: starts with a byte order mark, passed over")
            if raw.endswith(b"\r\n") and not crlf:
                crlf = True
                source.notes.append(f"{source.label}: has CRLF line ends, read as line ends")
            if raw.strip():
                yield line, decode_line(raw, ended)


def decode_line(raw: bytes, ended: bool) -> Record:
    """One line of a `.jsonl` file as an object, or the reason why not."""
    try:
        record = json.loads(raw.rstrip(b"\r\n").decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        wide = " (looks like UTF-16)" if b"\x00" in raw else ""
        return BrokenRow(f"invalid UTF-8 at byte {error.start + 1}{wide}")
    except json.JSONDecodeError as error:
        cut = "" if ended else "; the last line has no line end, the file looks cut off"
        return BrokenRow(f"broken JSON at character {error.pos + 1} ({error.msg}){cut}")
    except RecursionError:
        return BrokenRow("broken JSON (nested too deeply)")
    except ValueError as error:
        return BrokenRow(f"broken JSON ({error})")
    if not isinstance(record, dict):
        return BrokenRow(f"got {kind_of(record)}, need a JSON object")
    return record


def refuse_constant(name: str) -> Any:
    """NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is not a JSON number")


def read_parquet(source: Source) -> Iterator[tuple[int, Record]]:
    """The rows of a parquet file as plain dicts, a thousand decoded at a time."""
    import pyarrow
    import pyarrow.parquet

    line = 0
    try:
        with pyarrow.parquet.ParquetFile(source.path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    line += 1
                    yield line, record
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(
            f"got {source.label}, unreadable after row {line} ({first_line(error)}), need a whole parquet file; "
            "copy or write it again"
        ) from error


def read_arithmetic(source: Source) -> Iterator[tuple[int, Record]]:
    """The generated task's rows."""
    from jaxrl_llm.data.arithmetic import generate

    assert source.generated is not None
    for line, record in enumerate(generate(*source.generated), 1):
        yield line, {**record, "data_source": "arithmetic"}


def read_hub(source: Source) -> Iterator[tuple[int, Record]]:
    """The rows of a Hugging Face data set; its code is never run. Needs the extra `hub` and a network or a cache."""
    assert source.hub is not None
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f'got {source.label!r}, need the package datasets; install "jaxrl_llm[hub]" or name a local file'
        ) from error
    name, config, split = source.hub
    try:
        table = load_dataset(name, config, split=split)
    except Exception as error:  # the client raises its own, httpx's and the file system's errors
        raise DataError(
            f"got no data from {source.label!r} ({type(error).__name__}: {first_line(error)}), need a data set that is "
            "cached or a network that reaches it; check id and split, or download the files and name them by path"
        ) from error
    yield from enumerate(table, 1)


READERS = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "arithmetic": read_arithmetic,
    "hub": read_hub,
}


def kind_of(value: Any) -> str:
    """The type of a value in the words of its file."""
    return type(value).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:200]
