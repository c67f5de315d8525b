"""What the processes of a run do as one: the same result, or the same error, on every process.

Every function here is a collective call in a run of several processes: all of them come, in the same order. With one process nothing
is exchanged. A tag names a meeting point for good, so each is drawn once, by `fresh_tag`, on the main thread: its count is the same
everywhere because the calls are.

Left out on purpose: deciding what to do about a process that is gone (`processes.Missing` names it; the run ends and starts again).
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxrl_llm import processes
from jaxrl_llm.checkpoint.files import Damaged
from jaxrl_llm.checkpoint.lock import LOCK_NAME, RunLock
from jaxrl_llm.errors import ConfigError, DataError

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a process waits to see on its own mount what process 0 has just written: network file systems cache."""

_calls = itertools.count()


class PeerFailed(Exception):
    """Something failed on some process in another way than by a `RunError`; the text says on which, and how."""


_CARRIED: tuple[type[Exception], ...] = (PeerFailed, ConfigError, DataError, Damaged)
"""Errors that keep their class between processes. Where several come together the first in this order is raised."""


def fresh_tag(what: str) -> str:
    """A tag that no earlier call has had in this run."""
    return f"checkpoint/{next(_calls)}/{what}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters."""
    return next(iter(str(error).splitlines()), "")[:300]


def all_do(tag: str, act: Callable[[], T], limit_seconds: float = processes.LIMIT_SECONDS) -> T:
    """Do something on every process and return what it gave here; if it failed anywhere, raise the same error everywhere.

    The text names the processes it comes from. With one process this is `act()`.
    """
    return _exchange(tag, act, lambda value: None, limit_seconds)[0]


def all_tell(
    tag: str, act: Callable[[], T], limit_seconds: float = processes.LIMIT_SECONDS
) -> list[T]:
    """`all_do` for JSON data: what it gave on each process, in process order, on every one."""
    return _exchange(tag, act, lambda value: value, limit_seconds)[1]


def first_does(tag: str, act: Callable[[], T], limit_seconds: float = processes.LIMIT_SECONDS) -> T:
    """Do something on process 0 only; its result (JSON data) or its error comes to every process."""
    mine: Callable[[], Any] = act if jax.process_index() == 0 else lambda: None
    return all_tell(tag, mine, limit_seconds)[0]


def _exchange(
    tag: str, act: Callable[[], T], tell: Callable[[T], Any], limit_seconds: float
) -> tuple[T, list[Any]]:
    """What `act` gave here, and of all processes the part of it that they tell."""
    if jax.process_count() == 1:
        result = act()
        return result, [tell(result)]
    problem = None
    try:
        result = act()
        message = {"value": tell(result)}
    except Exception as error:
        problem = error
        message = {"error": _spelled(error)}
    try:
        found = processes.gather(tag, message, limit_seconds)
        errors = {number: said["error"] for number, said in enumerate(found) if "error" in said}
        if errors:
            raise _joined(errors, len(found)) from problem
    finally:
        # It refers to this frame: a cycle would keep the arrays of a failed restore alive.
        problem = None
    return result, [said["value"] for said in found]


def _spelled(error: Exception) -> dict[str, Any]:
    """An error as JSON data."""
    for rank, kind in enumerate(_CARRIED):
        if isinstance(error, kind):
            return {"rank": rank, "texts": list(getattr(error, "problems", (str(error),)))}
    return {"rank": 0, "texts": [f"{type(error).__name__} ({first_line(error)})"]}


def _joined(errors: dict[int, dict[str, Any]], count: int) -> Exception:
    """One error for what some processes report, the same on all; equal texts are said once, with the processes they come from."""
    rank = min(said["rank"] for said in errors.values())
    where: dict[str, list[int]] = {}
    for number, said in errors.items():
        for text in said["texts"] if said["rank"] == rank else []:
            where.setdefault(text, []).append(number)
    texts = [
        text
        if len(numbers) == count
        else f"on process {', '.join(map(str, numbers))} of {count}: {text}"
        for text, numbers in where.items()
    ]
    kind = _CARRIED[rank]
    return kind(texts) if kind in (ConfigError, DataError) else kind("; ".join(texts))


@contextmanager
def run_lock(
    run_dir: Path,
    *,
    log: Callable[[str], None] = print,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[None]:
    """Hold a run folder for all processes of this run: process 0 makes it and takes its `RunLock`, the others wait until it has.

    Every process raises the same `ConfigError` when process 0 cannot have it, or when some process does not see process 0's lock within
    `patience_seconds`: the folder must be shared. Process 0 gives the folder back at the end of its own block. Collective.
    """
    held: list[RunLock] = []
    path = Path(run_dir).absolute() / LOCK_NAME

    def take() -> str:
        held.append(RunLock(run_dir, log=log))
        return path.read_text()

    try:
        text = first_does(fresh_tag("lock"), take)
        all_do(fresh_tag("see"), lambda: _see(path, text, patience_seconds))
        yield
    finally:
        for lock in held:
            lock.release()


def _see(path: Path, text: str, patience_seconds: float) -> None:
    """Wait until a file reads as process 0 wrote it."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            if path.read_text() == text:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run folder {path.parent}: got one in which process 0's lock does not appear within {patience_seconds:.0f} s, "
                "need a folder that all processes share; choose another trainer.run_dir"
            )
        time.sleep(0.05)
