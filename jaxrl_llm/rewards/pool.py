"""A pool of killable reward processes, watched by one thread.

`submit` never blocks and returns a `Future` that always ends in an `Outcome`, never in an exception: whatever a function
does (raise, hang, use up its memory, kill its process), only its own call fails. A call that outlives `timeout_s`, or
kills its worker, is failed and never tried again; the worker's whole process group gets SIGKILL and a new worker takes
its place. After the first such loss as many spare workers as there were losses (at most one per worker) are kept warm,
so that a run of bad calls costs `timeout_s` each and not a process start on top.

All processes are started by the watching thread: the kernel's parent-death signal follows the *thread* that started a
process. `subprocess` is used without `preexec_fn`, so it is safe beside the threads of JAX.

Left out on purpose: priorities, batching of calls, remote workers. A process that a function starts in a session of its
own is outside the group and is not killed.
"""

import collections
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.worker import HEADER, MAX_REPLY, pack

START_TIMEOUT_S = 60.0
"""Seconds a new worker may take to import its functions."""
MAX_START_FAILURES = 3
"""Workers in a row that may die before they are ready; then all waiting calls fail."""
TICK_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How one call ended: a raw value (`None`: abstained or failed), extra parts, whether an answer was found, and the
    text of the failure; `timed_out` marks calls that were killed for their wall clock."""

    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    found: bool | None = None
    failure: str | None = None
    timed_out: bool = False


@dataclass(eq=False)
class _Call:
    function: str
    sample: dict[str, Any]
    future: "Future[Outcome]"


@dataclass(eq=False)
class _Worker:
    process: "subprocess.Popen[bytes]"
    request: int
    reply: int
    deadline: float
    outgoing: bytearray
    incoming: bytearray = field(default_factory=bytearray)
    ready: bool = False
    call: _Call | None = None
    number: int = 0


class WorkerPool:
    """`num_workers` processes that run reward functions.

    Args:
        num_workers: calls that run at the same time.
        setup: `{"functions": {label: entry}}` with entries `{"kind": "builtin", "name", "options"}` or
            `{"kind": "custom", "spec", "sha256"}`.
        timeout_s: wall-clock seconds of one call.
        memory_limit_mb: address space of one process.
    """

    def __init__(
        self, num_workers: int, setup: dict[str, Any], timeout_s: float, memory_limit_mb: int
    ):
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._setup = pack({**setup, "timeout_s": timeout_s, "memory_limit_mb": memory_limit_mb})
        self._lock = threading.Lock()
        self._queue: collections.deque[_Call] = collections.deque()
        self._closing = False
        self._ended = False
        self._broken: str | None = None
        self._workers: list[_Worker] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._lost = 0
        self._start_failures = 0
        self._next_id = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._watch, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, function: str, sample: dict[str, Any]) -> "Future[Outcome]":
        """Queue one call of the function with that label; returns at once, from any thread."""
        future: Future[Outcome] = Future()
        with self._lock:
            refused = "the reward pool is closed" if self._closing or self._ended else self._broken
            if refused is None:
                self._queue.append(_Call(function, sample, future))
                self._wake()
        if refused is not None:
            future.set_result(Outcome(failure=refused))
        return future

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [worker.process.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Kill every worker, fail what is still waiting, and end the thread. May be called twice."""
        with self._lock:
            self._closing = True
            if not self._ended:
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    # Everything below runs in the watching thread.

    def _watch(self) -> None:
        problem = "the reward pool is closed"
        try:
            while not self._closing:
                self._fill()
                self._assign()
                for key, events in self._selector.select(self._patience()):
                    self._handle(key, events)
                self._enforce()
        except BaseException as error:
            problem = f"the reward pool's thread failed: {type(error).__name__}: {error}"
            raise
        finally:
            with self._lock:
                self._ended = True
                waiting = list(self._queue)
                self._queue.clear()
            for worker in list(self._workers):
                self._drop(worker, problem)
            for process in self._dying:
                process.wait()
            for call in waiting:
                call.future.set_result(Outcome(failure=problem))
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _patience(self) -> float | None:
        """How long to sleep: until the next deadline, a tick while processes are being reaped, for ever when idle."""
        deadlines = [w.deadline for w in self._workers if w.call is not None or not w.ready]
        if not deadlines and not self._dying:
            return None
        left = min(deadlines, default=float("inf")) - time.monotonic()
        return min(max(left, 0.0), TICK_S)

    def _fill(self) -> None:
        if self._broken is not None:
            return
        while len(self._workers) < self.num_workers + min(self._lost, self.num_workers):
            self._start()

    def _start(self) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        package_parent = str(Path(__file__).parents[2])
        environment = {
            "OMP_NUM_THREADS": "1",  # thread stacks count against the address space
            "OPENBLAS_NUM_THREADS": "1",
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [package_parent, os.environ.get("PYTHONPATH", "")])
            ),
        }
        arguments = [str(request_read), str(reply_write), str(os.getpid())]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxrl_llm.rewards.worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(request_read, reply_write),
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(request_read)
            os.close(reply_write)
        os.set_blocking(request_write, False)
        os.set_blocking(reply_read, False)
        deadline = time.monotonic() + START_TIMEOUT_S
        worker = _Worker(process, request_write, reply_read, deadline, bytearray(self._setup))
        self._workers.append(worker)
        self._selector.register(reply_read, selectors.EVENT_READ, worker)
        self._selector.register(request_write, selectors.EVENT_WRITE, worker)

    def _assign(self) -> None:
        busy = sum(worker.call is not None for worker in self._workers)
        for worker in list(self._workers):
            if busy >= self.num_workers:
                return
            if not worker.ready or worker.call is not None:
                continue
            if not _alive(worker.process.pid):
                self._lose(worker, "")
                continue
            with self._lock:
                if not self._queue:
                    return
                call = self._queue.popleft()
            self._next_id += 1
            task = {"id": self._next_id, "function": call.function, "sample": call.sample}
            try:
                worker.outgoing += pack(task)
            except (TypeError, ValueError, RecursionError) as error:
                problem = f"the sample cannot be sent to a reward process: {error}"
                call.future.set_result(Outcome(failure=problem))
                continue
            worker.call, worker.number = call, self._next_id
            worker.deadline = time.monotonic() + self.timeout_s
            if worker.request not in self._selector.get_map():
                self._selector.register(worker.request, selectors.EVENT_WRITE, worker)
            busy += 1

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        worker = key.data
        if worker is None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake_read, 4096):
                    pass
        elif worker not in self._workers:
            return
        elif events & selectors.EVENT_WRITE:
            try:
                with contextlib.suppress(BlockingIOError):
                    while worker.outgoing:
                        del worker.outgoing[: os.write(worker.request, worker.outgoing[: 1 << 16])]
            except OSError:
                worker.outgoing.clear()  # its reply pipe tells the rest
            if not worker.outgoing:
                self._selector.unregister(worker.request)
        else:
            self._read(worker)

    def _read(self, worker: _Worker) -> None:
        try:
            data = os.read(worker.reply, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._lose(worker, "its process died")
            return
        worker.incoming += data
        while worker in self._workers and len(worker.incoming) >= HEADER.size:
            size = HEADER.unpack_from(worker.incoming)[0]
            if size > MAX_REPLY:
                self._lose(worker, "it wrote into the pool's pipe")
                return
            if len(worker.incoming) < HEADER.size + size:
                return
            body = bytes(worker.incoming[HEADER.size : HEADER.size + size])
            del worker.incoming[: HEADER.size + size]
            try:
                self._understand(worker, json.loads(body))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._lose(worker, "it wrote into the pool's pipe")

    def _understand(self, worker: _Worker, message: dict[str, Any]) -> None:
        if not worker.ready:
            if message["ready"]:
                worker.ready = True
                self._start_failures = 0
            else:
                self._break(message["error"])
            return
        call = worker.call
        if call is None or message["id"] != worker.number:
            return  # a process that a function forked may answer once more
        failure = message.get("error")
        outcome = Outcome(
            value=None if message["value"] is None else float(message["value"]),
            parts={str(name): float(number) for name, number in message["parts"].items()},
            found=message.get("found"),
            failure=None if failure is None else _told(call.function, failure),
        )
        worker.call = None
        call.future.set_result(outcome)

    def _break(self, error: str) -> None:
        """The functions cannot be loaded: that is the same in every process, so every call fails with the reason."""
        with self._lock:
            self._broken = f"the reward functions could not be loaded:\n{error}"
            waiting = list(self._queue)
            self._queue.clear()
        for worker in list(self._workers):
            self._drop(worker, self._broken)
        for call in waiting:
            call.future.set_result(Outcome(failure=self._broken))

    def _enforce(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            waits = worker.call is not None or not worker.ready
            if waits and now >= worker.deadline:
                limit = self.timeout_s if worker.ready else START_TIMEOUT_S
                self._lose(worker, f"no result within {limit:g} s", timed_out=True)
            elif waits and not _alive(worker.process.pid) and not _readable(worker.reply):
                self._lose(worker, "its process died")  # a grandchild may keep its pipe open
        self._dying = [process for process in self._dying if process.poll() is None]

    def _lose(self, worker: _Worker, reason: str, *, timed_out: bool = False) -> None:
        """A worker is gone or must go: fail its call, count, and after too many failed starts fail all that wait."""
        if worker.ready:
            self._lost += worker.call is not None
        else:
            self._start_failures += 1
        self._drop(worker, reason, timed_out=timed_out)
        if self._start_failures >= MAX_START_FAILURES:
            self._start_failures = 0
            with self._lock:
                waiting = list(self._queue)
                self._queue.clear()
            problem = (
                f"{MAX_START_FAILURES} reward processes in a row ended before they were ready ({reason}); raise"
                " reward.memory_limit_mb, or try the reward file with Python on its own"
            )
            for call in waiting:
                call.future.set_result(Outcome(failure=problem))

    def _drop(self, worker: _Worker, reason: str, *, timed_out: bool = False) -> None:
        """Kill a worker's process group, close its pipes, fail its call."""
        self._workers.remove(worker)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            worker.process.kill()
        with contextlib.suppress(KeyError):  # registered only while something is to be written
            self._selector.unregister(worker.request)
        self._selector.unregister(worker.reply)
        os.close(worker.request)
        os.close(worker.reply)
        self._dying.append(worker.process)
        if worker.call is not None:
            status = "" if timed_out else _status(worker.process)
            failure = _told(worker.call.function, f"{reason}{status}; the process was replaced")
            worker.call.future.set_result(Outcome(failure=failure, timed_out=timed_out))
            worker.call = None


def _told(function: str, text: str) -> str:
    return (
        text
        if "Traceback" not in text and function in text
        else f"reward function {function!r}: {text}"
    )


def _alive(pid: int) -> bool:
    """Whether a child still runs; looks without reaping it, so its process id cannot be reused meanwhile."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is None


def _readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


def _status(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return ""
    if code >= 0:
        return f" (exit status {code})"
    return f" ({signal.Signals(-code).name}: killed, or over its memory limit)"
