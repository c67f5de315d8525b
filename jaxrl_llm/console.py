"""What a person reads while a run trains: one line per step, time left, sample tables.

Model text is never trusted: control characters, direction marks and markup come out as visible escapes.

Left out on purpose: colours in the tables (they are also written to logs) and live dashboards.
"""

import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TextIO

from jaxrl_llm.sinks import pick

LINE = 160
"""Longest step line, in characters."""

_PARTS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", ".3f"),
    ("length", "len", ".0f"),
    ("kl", "kl", ".2g"),
    ("entropy", "ent", ".3g"),
    ("clip", "clip", ".2g"),
    ("grad", "grad", ".3g"),
)
_SHORT = {
    "update_actor": "upd",
    "update_critic": "critic",
    "old_log_prob": "old",
    "save_checkpoint": "save",
    "testing": "val",
}
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def step_line(step: int, total: int, row: Mapping[str, Any], *, eta: float | None = None) -> str:
    """One line of at most 160 characters for a step: reward, length, KL, entropy, clip share, gradient norm, speed, time.

    `eta` is the time left in seconds. What the row lacks is left out; the shortest phases go first where room is short.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for name, label, form in _PARTS:
        value = pick(row, name)
        if value is not None:
            parts.append(f"{label} {value:{form}}")
    accuracy = [v for key, v in row.items() if key.startswith("val/") and "/acc/mean@" in key]
    if accuracy:
        parts.append(f"val acc {sum(map(float, accuracy)) / len(accuracy):.3f}")
    speed, seconds, compiled = (pick(row, name) for name in ("speed", "seconds", "compilations"))
    if speed is not None:
        parts.append(f"{speed:,.0f} tok/s")
    tail = [f"{compiled:.0f} compiled"] if compiled else []
    if eta is not None:
        tail.append(f"eta {clock(eta)}")
    phases = {
        key.removeprefix("timing_s/"): value
        for key, value in row.items()
        if key.startswith("timing_s/") and key != "timing_s/step" and value >= 0.05
    }
    ranked = sorted(phases, key=lambda name: -phases[name])
    for shown in range(len(ranked), -1, -1):
        inner = " ".join(f"{_SHORT.get(name, name)} {phases[name]:.1f}" for name in ranked[:shown])
        total_text = f"{seconds:.1f}s" if seconds is not None else ""
        timing = f"{total_text} ({inner})".strip() if inner else total_text
        line = " | ".join([*parts, *([timing] if timing else []), *tail])
        if len(line) <= LINE:
            return line
    return line[:LINE]


def clock(seconds: float) -> str:
    """Seconds as `1:23` (minutes) or `2:01:23` (hours)."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def visible(text: str, limit: int | None = None) -> str:
    """A text on one line: control, format, private and surrogate characters as escapes, cut at `limit` characters."""
    rest = 0 if limit is None else max(0, len(text) - limit)
    shown = text[:limit]
    escaped = "".join(
        _NAMED.get(char) or (_escape(char) if unicodedata.category(char) in _HIDDEN else char)
        for char in shown
    )
    return f"{escaped}... (+{rest} characters)" if rest else escaped


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line at once; characters that the stream's encoding lacks come out as escapes instead of an exception."""
    stream = sys.stdout if file is None else file
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def say_apart(process: int, text: str, file: TextIO | None = None) -> None:
    """What another process than the first prints: warnings, with its number in front; the rest is process 0's to say."""
    if text.lower().startswith("warning"):
        say(f"process {process}: {text}", file)


def completions_table(
    rows: Sequence[Mapping[str, Any]], *, title: str = "Samples", width: int = 120, limit: int = 400
) -> str:
    """A table of prompt, response, answer and score, one sample a row; texts are escaped and cut at `limit` characters.

    A missing value is an empty cell. A prompt is cut at its start: its end is what the response follows.
    """

    def cells(row: Mapping[str, Any]) -> list[str]:
        prompt, score = str(row.get("prompt", "")), row.get("score", "")
        begin = max(0, len(prompt) - limit // 2)
        head = f"(+{begin} characters) ..." if begin else ""
        number = isinstance(score, float) or hasattr(score, "item")
        return [
            head + visible(prompt[begin:]),
            visible(str(row.get("response", "")), limit),
            visible(str(row.get("answer", "")), limit // 4),
            visible(f"{float(score):.3g}" if number else str(score), 12),
        ]

    return _table(
        title, ("prompt", "response", "answer", "score"), map(cells, rows), (4, 6, 2, 1), width
    )


def start_table(title: str, rows: Sequence[tuple[str, str, str]], *, width: int = 120) -> str:
    """A table of (name, value, note) under a title, for the start of a run."""
    return _table(title, None, ([visible(cell) for cell in row] for row in rows), (2, 3, 4), width)


def _table(
    title: str,
    columns: Sequence[str] | None,
    rows: Any,
    ratios: Sequence[int],
    width: int,
) -> str:
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(visible(title)),
        box=box.ASCII2 if columns else None,
        show_header=columns is not None,
        show_lines=columns is not None,
        title_justify="left",
        pad_edge=False,
    )
    for index, ratio in enumerate(ratios):
        name = columns[index] if columns else ""
        table.add_column(name, ratio=ratio if columns else None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    Console(
        file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False
    ).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


class Progress:
    """Prints step lines with the time left; on a terminal under a bar, elsewhere as plain lines. A context manager.

    Another process than the first prints warnings only. The time left is the mean of the last 20 steps, without the first one, which compiles.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        *,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        process: int = 0,
    ):
        self._process = process
        self._total, self._file, self._now = total, file or sys.stdout, now
        self._times: list[float] = [now()]
        self._bar: Any = None
        if self._file.isatty() and not process:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
            self._bar = Bar(
                *columns,
                console=Console(file=self._file),
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=total, completed=start, left="")
            self._bar.start()

    def eta(self, step: int) -> float | None:
        """Seconds left after `step`, or `None` before the second step of this process."""
        times = self._times[1:][-21:]
        if len(times) < 2:
            return None
        return (times[-1] - times[0]) / (len(times) - 1) * max(0, self._total - step)

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Report a finished step."""
        self._times.append(self._now())
        del self._times[1:-21]
        left = self.eta(step)
        if self._bar is None:
            self.say(step_line(step, self._total, row, eta=left))
            return
        self.say(step_line(step, self._total, row))
        text = f"eta {clock(left)}" if left is not None else ""
        self._bar.update(self._task, completed=step, left=text)

    def say(self, text: str) -> None:
        """Print any text (a table, an alarm) without disturbing the bar and without reading it as markup."""
        if self._process:
            say_apart(self._process, text, self._file)
        elif self._bar is None:
            say(text, self._file)
        else:
            self._bar.console.print(
                text, markup=False, highlight=False, emoji=False, soft_wrap=True
            )

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
