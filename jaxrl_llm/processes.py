"""What the processes of one run tell each other between device programs.

Small things (flags, failures, digests) go through the coordination service of `jax.distributed`: host to host, with a limit, and whoever
does not come is named; a thread may use it while device programs run. Rows of arrays go through one device program.

A process with a problem posts it before it ends, and whoever waits for that process then ends as well, with the same exit code:
process 0 prints what happened, once.

Left out on purpose: starting and joining processes (see `joining`), and anything about devices that one process owns.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrl_llm.errors import EXIT_INTERNAL, RunError

Tree = Any
T = TypeVar("T")

LIMIT_SECONDS = 1800.0
"""How long a process waits for the others before it gives up; grading or a compilation on one host may take minutes."""
LOOK_SECONDS = 1.0
"""How often a waiting process looks for problems that others have posted."""
CLOSING_SECONDS = 15.0
"""How long a process with a problem waits for the others to take note before it ends."""
PIECE_BYTES = 2**26
"""Bytes of rows, over all processes, that one device program moves."""

ROOT = "jaxrl_llm"
PROBLEMS, STOPS = f"{ROOT}/problems", f"{ROOT}/stops"


class Missing(RunError):
    """Some processes did not come to a meeting point: exit 70."""

    exit_code = EXIT_INTERNAL
    heading = "Processes lost each other"


class Elsewhere(RunError):
    """Another process has a problem: this one ends with it, with its exit code."""

    heading = "Ended with the other processes"

    def __init__(self, text: str, exit_code: int):
        super().__init__(text)
        self.exit_code = exit_code

    def report(self) -> str:
        """The problem as the other process worded it."""
        return str(self)


def client() -> Any:
    """The coordination service as this process reaches it; `None` where it has joined no others."""
    from jax._src import distributed

    return distributed.global_state.client


# Meeting -----------------------------------------------------------------------------------------------------------------


def gather(tag: str, value: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Any]:
    """Every process's `value` (JSON data, at most about a megabyte), in process order, on every process.

    All processes call it with the same `tag`, once per tag in the life of a run. Thread-safe, no device is involved. Raises
    `Missing` with the numbers of the processes that did not come within the limit, `Elsewhere` where another process has posted a
    problem instead of coming.
    """
    count, me = jax.process_count(), jax.process_index()
    text = json.dumps(value)
    if count == 1:
        return [json.loads(text)]
    store, folder = client(), f"{ROOT}/{tag}"
    deadline = time.monotonic() + limit_seconds
    try:
        store.key_value_set(f"{folder}/{me}", text)
        while True:
            found = entries(store, folder)
            missing = [process for process in range(count) if process not in found]
            if not missing:
                return [found[process] for process in range(count)]
            problems = entries(store, PROBLEMS)
            if me in problems:
                deadline = min(deadline, time.monotonic() + CLOSING_SECONDS)
            elif problems:
                raise _elsewhere(problems)
            left = deadline - time.monotonic()
            if left <= 0:
                raise Missing(_waited(tag, me, count, limit_seconds, missing))
            _wait(store, f"{folder}/{missing[0]}", min(left, LOOK_SECONDS))
    except jax.errors.JaxRuntimeError as problem:
        raise Missing(
            f"{tag}: process {me} of {count} lost the coordinator, process 0 ({_first_line(problem)}); start the run again: it "
            "continues from its last checkpoint"
        ) from problem


def entries(store: Any, folder: str) -> dict[int, Any]:
    """What stands in a folder of the store, by process."""
    found = store.key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}


def _wait(store: Any, key: str, seconds: float) -> None:
    """Wait for a key, or for some seconds."""
    try:
        store.blocking_key_value_get(key, max(1, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as problem:
        if "DEADLINE_EXCEEDED" not in str(problem):
            raise


def _waited(tag: str, me: int, count: int, seconds: float, missing: list[int]) -> str:
    names = ", ".join(map(str, missing[:20])) + (", …" if len(missing) > 20 else "")
    return (
        f"{tag}: process {me} of {count} waited {seconds:.0f} s for process {names}, need all of them; look at their logs, then start "
        "the run again: it continues from its last checkpoint"
    )


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def barrier(tag: str, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Wait until every process is here."""
    gather(tag, None, limit_seconds)


@dataclass
class Pulse:
    """How far this process has come: places that every process passes in the same order, and signs of life in between."""

    passed: int = 0
    beats: int = 0
    place: str = "the start"

    def at(self, place: str) -> None:
        """A place that all processes pass."""
        self.place = place
        self.passed += 1

    def beat(self) -> None:
        """A sign of life on the way to the next place."""
        self.beats += 1

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase that all processes go through."""
        self.at(name)
        yield
        self.at(f"the end of {name}")


class Meetings:
    """The meeting points of the host loop, numbered: every process comes to the same ones in the same order, from one thread."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        self.limit_seconds = limit_seconds
        self.pulse = Pulse()
        self._number, self._before = 0, ""

    def gather(self, name: str, value: Any) -> list[Any]:
        """`processes.gather` under the next number. What this process said two meetings ago is forgotten: all have read it."""
        if jax.process_count() == 1:
            return gather(name, value)
        tag = f"loop/{self._number:09d} {name}"
        self._number += 1
        self.pulse.at(f"the meeting {name!r}")
        values = gather(tag, value, self.limit_seconds)
        self.pulse.at(f"the end of the meeting {name!r}")
        if self._before:
            with suppress(jax.errors.JaxRuntimeError):
                client().key_value_delete(f"{ROOT}/{self._before}/{jax.process_index()}")
        self._before = tag
        return values

    def first(self, name: str, make: Callable[[], T]) -> T:
        """What process 0 makes (JSON data), on every process; the others make nothing."""
        values = self.gather(name, make() if jax.process_index() == 0 else None)
        result: T = values[0]
        return result


def gather_rows(rows: Tree) -> Tree:
    """Host arrays `[rows of one process ...]` of equal shapes on all processes -> `[rows of all ...]`, in process order, on every one.

    Bits move, not values: every dtype comes back as it was, NaN included. Leaves may have different numbers of rows.
    """
    count = jax.process_count()
    if count == 1:
        return rows
    from jax.experimental import multihost_utils

    leaves, structure = jax.tree.flatten(rows)
    arrays = [np.ascontiguousarray(leaf) for leaf in leaves]
    own = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
    piece = max(4, min(PIECE_BYTES // count, -(-own.size // 4) * 4) // 4 * 4)
    pieces = -(-own.size // piece)
    words = np.zeros((pieces * piece,), np.uint8)
    words[: own.size] = own
    sent = words.view(np.uint32).reshape(pieces, 1, piece // 4)
    everyone = np.concatenate(
        [np.asarray(multihost_utils.process_allgather(part, tiled=True)) for part in sent], axis=1
    )
    whole = np.ascontiguousarray(everyone).view(np.uint8)
    results, start = [], 0
    for array in arrays:
        part = np.ascontiguousarray(whole[:, start : start + array.nbytes])
        results.append(part.view(array.dtype).reshape(-1, *array.shape[1:]))
        start += array.nbytes
    return jax.tree.unflatten(structure, results)


def own_rows(arrays: dict[str, Any], like: str) -> dict[str, np.ndarray]:
    """The rows of some arrays that this process counts, in order: over all processes every row is counted once.

    Host arrays and arrays of one process are whole. Else a row belongs to the process that holds its first copy in `arrays[like]`, and
    the others must lie there as well (spread over the same rows, or everywhere).
    """
    first = arrays[like]
    if not isinstance(first, jax.Array) or first.is_fully_addressable:
        return {name: np.asarray(array) for name, array in arrays.items()}
    mine = sorted(_span(shard) for shard in first.addressable_shards if shard.replica_id == 0)

    def cut(array: Any) -> np.ndarray:
        there = {_span(shard): shard.data for shard in array.addressable_shards}
        parts = [np.zeros((0, *array.shape[1:]), array.dtype)]
        for start, stop in mine:
            (low, _), data = next(
                (span, data) for span, data in there.items() if span[0] <= start and stop <= span[1]
            )
            parts.append(np.asarray(data)[start - low : stop - low])
        return np.concatenate(parts)

    return {name: cut(array) for name, array in arrays.items()}


def _span(shard: Any) -> tuple[int, int]:
    """First row of a shard and the row behind its last one."""
    start = shard.index[0].start or 0
    return start, start + shard.data.shape[0]


# Stopping and ending -------------------------------------------------------------------------------------------------------


def post_stop() -> None:
    """Tell the others that a signal asks this run to stop; they see it in `stop_posted`."""
    if jax.process_count() > 1:
        with suppress(jax.errors.JaxRuntimeError):
            client().key_value_set(f"{STOPS}/{jax.process_index()}", "1", allow_overwrite=True)


def stop_posted() -> bool:
    """Whether some process has called `post_stop`."""
    if jax.process_count() == 1:
        return False
    with suppress(jax.errors.JaxRuntimeError):
        return bool(entries(client(), STOPS))
    return False


def heed() -> None:
    """Raise `Elsewhere` where another process has posted a problem: for places where this one works on its own for long."""
    if jax.process_count() == 1:
        return
    problems: dict[int, Any] = {}
    with suppress(jax.errors.JaxRuntimeError):
        problems = entries(client(), PROBLEMS)
    if problems:
        raise _elsewhere(problems)


def tell(problem: BaseException) -> None:
    """Post a problem, so that no process waits in vain for this one; the first one stands."""
    store = client()
    if store is None:
        return
    known = isinstance(problem, RunError)
    said = {
        "code": problem.exit_code if isinstance(problem, RunError) else EXIT_INTERNAL,
        "text": problem.report() if isinstance(problem, RunError) else _traceback(problem),
        "own": not isinstance(problem, Elsewhere),
        "known": known,
    }
    with suppress(jax.errors.JaxRuntimeError):
        store.key_value_set(f"{PROBLEMS}/{_number()}", json.dumps(said))


def _number() -> int:
    from jax._src import distributed

    return int(distributed.global_state.process_id)


def _traceback(problem: BaseException) -> str:
    return "".join(traceback.format_exception(problem)).strip()


def _elsewhere(problems: dict[int, Any]) -> Elsewhere:
    """The problems that processes have of their own, in words: equal ones once."""
    own = {process: said for process, said in sorted(problems.items()) if said["own"]} or problems
    texts: dict[str, list[int]] = {}
    for process, said in own.items():
        texts.setdefault(said["text"], []).append(process)
    lines = [f"process {', '.join(map(str, who))}: {text}" for text, who in texts.items()]
    return Elsewhere("\n".join(lines), next(iter(own.values()))["code"])


def end_together(action: Callable[[], T]) -> T:
    """`action()` on every process; where it fails on one, all end with one exit code, and process 0 says why.

    Raises what `action` raised where that happened everywhere alike (on process 0; the others point to it), else `Elsewhere`. A
    process whose problem the others do not take note of, because they are inside a device program, says so itself and ends
    hard, which ends them too.
    """
    try:
        return action()
    except Exception as problem:
        store = client()
        if store is None or _count() == 1:
            raise
        tell(problem)
        try:
            problems = _everybody(store)
        except jax.errors.JaxRuntimeError:
            problems = {}
        me = _number()
        if len(problems) < _count():
            text = problem.report() if isinstance(problem, RunError) else _traceback(problem)
            print(f"process {me}: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(problem.exit_code if isinstance(problem, RunError) else EXIT_INTERNAL)
        together = _elsewhere(problems)
        if me > 0:
            raise Elsewhere(
                f"process {me}: ended with the others, exit {together.exit_code}; process 0 says why",
                together.exit_code,
            ) from None
        if not isinstance(problem, Elsewhere) and len({said["text"] for said in problems.values() if said["own"]}) == 1:  # fmt: skip
            raise
        raise together from None


def _everybody(store: Any) -> dict[int, Any]:
    """The problems of all processes, or of those that posted one within `CLOSING_SECONDS`."""
    deadline = time.monotonic() + CLOSING_SECONDS
    while True:
        problems = entries(store, PROBLEMS)
        missing = [process for process in range(_count()) if process not in problems]
        left = deadline - time.monotonic()
        if not missing or left <= 0:
            return problems
        _wait(store, f"{PROBLEMS}/{missing[0]}", min(left, LOOK_SECONDS))


def _count() -> int:
    from jax._src import distributed

    return int(distributed.global_state.num_processes)
