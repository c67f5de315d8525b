"""Where numbers of a run go: metrics.jsonl, completions, TensorBoard and W&B; without secrets, and cut back on resume.

`metrics.jsonl` is the record: always written, synchronously, one line per logged step. Everything else is a copy that may
fail or hang without touching training. This module loads no JAX; `metrics` hands its names on.

Left out on purpose: smoothing and rounding (readers can, writers must not), system statistics, rewinding a W&B run (it
refuses steps that it already holds, and after an exact resume they are equal anyway).
"""

import functools
import json
import os
import queue
import re
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

Row = dict[str, Any]
Sink = tuple[Callable[[int, Row], None], Callable[[], None]]

TEXT_BYTES = 20_000
"""Longest text in `completions/`, in UTF-8 bytes."""
QUEUE_ROWS = 1000
"""Rows that wait for a slow sink before rows are dropped there."""
REDACTED = "<redacted>"

NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "length": ("response_length/mean",),
    "kl": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "clip": ("actor/pg_clipfrac",),
    "grad": ("actor/grad_norm",),
    "speed": ("perf/throughput",),
    "seconds": ("timing_s/step", "perf/time_per_step"),
    "compilations": ("perf/compilations",),
}
"""What console, plots and alarms look for: the first metric of the list that a row holds."""


def pick(row: Mapping[str, Any], name: str) -> float | None:
    """The number a row holds for an entry of `NAMES`, or `None` where it logged none of them."""
    for key in NAMES[name]:
        value = row.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


# --- secrets ---------------------------------------------------------------------------------------------------------

_SECRET_KEY = re.compile(
    r"(^|[_\-. ])(api_?keys?|keys?|tokens?|passw(or)?ds?|passphrases?|pwd|secrets?|credentials?|cookies?|auth|authorization)$",
    re.IGNORECASE,
)
_PLAIN_KEY = re.compile(
    r"(prompt|answer|response|question|image|video|data|column|sort|eos|bos|pad)_(key|token)$"
)
_TEXT_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"([a-zA-Z][\w+.\-]*://)[^\s/@]+@"), rf"\1{REDACTED}@"),
    (
        re.compile(
            r"([?&;](?:[\w\-]*(?:key|token|secret|password|signature|credential)|sig|auth)=)[^&;#\s]+",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/\-]{8,}=*"), rf"\1 {REDACTED}"),
    (re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bp]-|AKIA)[\w\-]{16,}"), REDACTED),
)


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A text without credentials in URLs, bearer headers and known key formats.

    With `environment`, every value of 8 or more characters whose variable is named like a secret goes as well.
    """
    for pattern, replacement in _TEXT_SECRETS:
        text = pattern.sub(replacement, text)
    for name, value in (environment or {}).items():
        if len(value) >= 8 and _SECRET_KEY.search(name):
            text = text.replace(value, REDACTED)
    return text


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a nested config in which secrets are replaced by `<redacted>`.

    A value goes when its key ends in a word for a secret (key, token, password, secret, credential, ...) and it is a non-empty
    text or holds one; numbers stay (`length_penalty_per_token`), and so do names of columns (`prompt_key`). Other texts lose
    URL credentials, see `redact_text`.
    """
    return {
        str(key): _redact(
            value, bool(_SECRET_KEY.search(str(key)) and not _PLAIN_KEY.search(str(key)))
        )
        for key, value in config.items()
    }


def _redact(value: Any, secret: bool) -> Any:
    if isinstance(value, str | bytes):
        if secret and value:
            return REDACTED
        return redact_text(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        inner = redact(value)
        return {key: _redact(item, True) for key, item in inner.items()} if secret else inner
    if isinstance(value, list | tuple):
        return [_redact(item, secret) for item in value]
    return value


# --- sinks -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A Python number, text, bool or `None` from what code calls a scalar (NumPy, JAX, 0-d or one-element arrays)."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    shape = getattr(value, "shape", None)
    got = f"an array of shape {tuple(shape)}" if shape is not None else type(value).__name__
    raise TypeError(
        f"a metric is {got}; it must be one number, text, bool or None: reduce it before logging"
    )


def _line(step: int, row: Mapping[str, Any]) -> tuple[str, Row]:
    values: Row = {"step": int(step)}
    for key, value in row.items():
        if key != "step":
            try:
                values[key] = plain(value)
            except TypeError as error:
                raise TypeError(f"{key}: {error}") from None
    return json.dumps(values) + "\n", values


def _cut(value: Any) -> Any:
    """A JSON-able copy in which texts longer than `TEXT_BYTES` are cut and say so."""
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) <= TEXT_BYTES:
            return value
        return f"{raw[:TEXT_BYTES].decode('utf-8', 'ignore')} [cut: {len(value)} characters in all]"
    if isinstance(value, Mapping):
        return {str(key): _cut(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float) else _cut(str(value))


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


class _Worker:
    """A thread that feeds one sink from a bounded queue; failures become one warning per kind, a hang costs nothing."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Sink],
        log: Callable[[str], Any],
        patience: float,
    ):
        self.name, self.log, self.patience = name, log, patience
        self.warned: set[str] = set()
        self.rows: queue.Queue[tuple[int, Row] | None] = queue.Queue(QUEUE_ROWS)
        self.thread = threading.Thread(
            target=self.work, args=(start,), name=f"metrics-{name}", daemon=True
        )
        self.thread.start()

    def warn(self, kind: str, text: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            text = redact_text(text, os.environ).replace("\n", " ")[:300]
            self.log(f"{self.name}: {text}; training goes on and metrics.jsonl is complete")

    def attempt(self, kind: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:  # a client may call sys.exit in its thread
            self.warn(kind, f"{kind} failed ({type(error).__name__}: {error})")
            return None

    def work(self, start: Callable[[], Sink]) -> None:
        sink = self.attempt("init", start)
        while True:
            item = self.rows.get()
            if item is None:
                break
            if sink is not None:
                self.attempt("log", functools.partial(sink[0], *item))
            self.rows.task_done()
        if sink is not None:
            self.attempt("finish", sink[1])

    def put(self, step: int, row: Row) -> None:
        hangs = self.rows.unfinished_tasks > 0
        try:
            self.rows.put_nowait((step, row))
        except queue.Full:
            self.warn("queue", f"{QUEUE_ROWS} rows wait for it and it drops more until it answers")
        with self.rows.all_tasks_done:
            self.rows.all_tasks_done.wait_for(
                lambda: not self.rows.unfinished_tasks, 0.0 if hangs else self.patience
            )

    def close(self, deadline: float) -> None:
        try:
            self.rows.put(None, timeout=max(0.0, deadline - time.monotonic()))
            self.thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self.thread.is_alive():
            self.warn("finish", "it did not finish in time and is left behind")


def _start_tensorboard(folder: Path) -> Sink:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    folder.mkdir(parents=True, exist_ok=True)
    # Two starts within one second would otherwise get the same file name and the second would empty the first.
    events = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")

    def write(step: int, row: Row) -> None:
        values = [
            Summary.Value(tag=key, simple_value=float(value))
            for key, value in row.items()
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        events.flush()

    return write, events.close


def _start_wandb(
    folder: Path,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    note: Callable[[str], None],
) -> Sink:
    import wandb

    identity = folder / "wandb" / "run_id"
    identity.parent.mkdir(parents=True, exist_ok=True)
    if not identity.exists():
        identity.write_text(uuid.uuid4().hex[:12])
    options: dict[str, Any] = {
        "project": project,
        "name": experiment,
        "id": identity.read_text().strip(),
        "resume": "allow",
        "dir": str(folder),
        "config": redact(config),
        # The command line, the repository and the printed text may hold secrets: none of them is sent.
        "settings": {
            "console": "off",
            "disable_git": True,
            "save_code": False,
            "x_disable_meta": True,
            "init_timeout": 20,
            "login_timeout": 10,
        },
    }
    try:
        run = wandb.init(**options)
    except Exception as error:
        try:
            run = wandb.init(**options, mode="offline")
        except Exception:
            raise error from None
        note(f"not reached ({type(error).__name__}: {error}), kept offline for `wandb sync`")

    def write(step: int, row: Row) -> None:
        run.log({key: value for key, value in row.items() if key != "step"}, step=step)

    return write, run.finish


class MetricsLog:
    """The open sinks of a run; made by `open_sinks`, a context manager."""

    def __init__(
        self, run_dir: Path | None, workers: Sequence[_Worker] = (), finish_seconds: float = 8.0
    ):
        self._run_dir, self._workers, self._finish_seconds = run_dir, list(workers), finish_seconds
        self._file = None
        if run_dir is not None:
            path = run_dir / "metrics.jsonl"
            self._file = path.open("ab")
            if path.stat().st_size and _last_byte(path) != b"\n":
                self._file.write(b"\n")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Append one row to every sink; `TypeError` names a metric that is not a scalar.

        In metrics.jsonl `step` comes first, NaN and infinities are written as Python's `json` writes and reads them, and
        nothing is rounded. The line has left the process when this returns.
        """
        line, values = _line(step, row)
        if self._file is None:
            return
        self._file.write(line.encode("ascii"))
        self._file.flush()
        for worker in self._workers:
            worker.put(int(step), values)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append sample rows to `completions/<step, 8 digits>.jsonl`, texts cut at 20 kB, everything but ASCII escaped."""
        if self._run_dir is None or not rows:
            return
        folder = self._run_dir / "completions"
        folder.mkdir(exist_ok=True)
        with (folder / f"{int(step):08d}.jsonl").open("a", encoding="ascii") as file:
            file.writelines(json.dumps(_cut(row)) + "\n" for row in rows)

    def close(self) -> None:
        """Finish every sink, all together within 8 seconds; what hangs is left behind with a warning."""
        if self._file is not None:
            self._file.close()
        deadline = time.monotonic() + self._finish_seconds
        for worker in self._workers:
            worker.close(deadline)
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sinks(
    run_dir: Path,
    loggers: Sequence[str],
    *,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    log: Callable[[str], Any] = print,
    process_index: int = 0,
    finish_seconds: float = 8.0,
) -> MetricsLog:
    """Open metrics.jsonl (always) and the sinks named in `loggers`: `tensorboard`, `wandb`; the rest is not ours.

    A process with another index than 0 gets a log that writes nothing. TensorBoard is waited for up to two seconds per row, so
    that a kill loses no event, unless it is still busy with the row before; W&B never. `log` receives warnings.
    """
    if process_index != 0:
        return MetricsLog(None)
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    workers = []
    if "tensorboard" in loggers:
        start = functools.partial(_start_tensorboard, run_dir / "tensorboard")
        workers.append(_Worker("TensorBoard", start, log, 2.0))
    if "wandb" in loggers:

        def note(text: str) -> None:
            log(f"W&B: {redact_text(text, os.environ)}")

        begin = functools.partial(_start_wandb, run_dir, project, experiment, config, note)
        workers.append(_Worker("W&B", begin, log, 0.0))
    return MetricsLog(run_dir, workers, finish_seconds)


# --- resume ----------------------------------------------------------------------------------------------------------


def read_rows(run_dir: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl in file order; a half-written line is left out, a missing file is no rows."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for row in map(_parse, lines) if row is not None]


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _replace(path: Path, content: bytes) -> None:
    """Write aside and rename. The aside name must not hold `tfevents`, or TensorBoard would read a leftover."""
    aside = path.parent / "rewriting.tmp"
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def truncate(run_dir: Path, after_step: int) -> int:
    """Remove what a run logged after a step, and return how many rows, completion files and TensorBoard events that was.

    Half-written last lines and records go as well (and count). A file that needs no change is not touched; every change is
    written aside and renamed, so that a kill in between leaves the old or the new file. A missing folder is 0.
    """
    run_dir, removed = Path(run_dir), 0
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_bytes().splitlines()
        rows = [(line, _parse(line)) for line in lines if line.strip()]
        kept = [line for line, row in rows if row is not None and row["step"] <= after_step]
        if len(kept) < len(rows):
            _replace(metrics, b"".join(line + b"\n" for line in kept))
            removed += len(rows) - len(kept)
    for path in sorted(run_dir.glob("completions/*.jsonl")):
        if path.stem.isdigit() and int(path.stem) > after_step:
            path.unlink()
            removed += 1
    for path in sorted(run_dir.glob("tensorboard/*tfevents*")):
        removed += _truncate_events(path, after_step)
    return removed


def _truncate_events(path: Path, after_step: int) -> int:
    """Drop later events from one file of records: length, its checksum, data, its checksum (masked CRC-32C)."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content = path.read_bytes()
    kept, start, removed = [], 0, 0
    while start < len(content):
        head = content[start : start + 12]
        size, check = struct.unpack("<QI", head) if len(head) == 12 else (0, -1)
        end = start + 16 + size
        data = content[start + 12 : end - 4]
        whole = check == masked_crc32c(head[:8]) and end <= len(content)
        if not whole or masked_crc32c(data) != struct.unpack("<I", content[end - 4 : end])[0]:
            removed += 1  # TensorBoard reads nothing beyond a broken record either
            break
        event = Event.FromString(data)
        if event.step <= after_step or event.file_version:
            kept.append(content[start:end])
        else:
            removed += 1
        start = end
    if removed:
        _replace(path, b"".join(kept))
    return removed
