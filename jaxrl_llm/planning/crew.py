"""The parent's side of compiling: at most two child processes that take programs from one queue, each program with a time-out, all of
them with another.

Left out on purpose: what the answers mean.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

Answer = dict[str, Any]
COMMAND = [sys.executable, "-m", "jaxrl_llm.planning.worker"]
START_SECONDS = 120.0
"""A child has so long to build its programs."""
FLAGS = {"gpu": "--xla_gpu_autotune_level=0", "tpu": ""}


@dataclass(frozen=True)
class Limits:
    """Seconds that one program may take and those of the whole plan, which began at `begun` (of `time.monotonic`)."""

    program: float
    plan: float
    begun: float

    @property
    def left(self) -> float:
        """Seconds until the plan's are up; not above zero from then on."""
        return self.begun + self.plan - time.monotonic()

    def late(self, name: str) -> Answer:
        """The answer about a program that the plan's time did not suffice for."""
        return {
            "name": name,
            "error": f"not compiled: the plan's {self.plan:.0f} s were up",
            "late": True,
        }


def environment(platform: str) -> dict[str, str]:
    """The environment of a process that compiles for devices that are not there."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[platform]}".strip()
    ours = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XLA_FLAGS": flags,
    }
    return dict(os.environ) | ours


def compile_all(
    order: dict[str, Any],
    names: Sequence[str],
    platform: str,
    *,
    jobs: int,
    limits: Limits,
    tell: Callable[[Answer], None],
) -> list[Answer]:
    """Compile the named programs in this order, `jobs` at a time, within the limits; `tell` hears every answer at once.

    An answer of a program that failed or took too long has the key `error`; where the plan's time was up, also `late`.
    """
    waiting: queue.Queue[str] = queue.Queue()
    for name in names:
        waiting.put(name)
    answers: list[Answer] = []
    children: list[_Child] = []
    lock, over = threading.Lock(), threading.Event()

    def hear(answer: Answer) -> None:
        with lock:
            if not over.is_set():
                answers.append(answer)
                tell(answer)

    def work() -> None:
        child: _Child | None = None
        try:
            while not over.is_set():
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                if limits.left <= 0:
                    hear(limits.late(name))
                    continue
                if child is None:
                    with lock:
                        if over.is_set():
                            return
                        child = _Child(platform)
                        children.append(child)
                    child.start(order, limits)
                answer = child.ask(name, limits)
                if "error" in answer and not child.alive:
                    child.close()
                    child = None
                hear(answer)
        finally:
            if child is not None:
                child.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(names)))]
    with _terminable():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            over.set()
            with lock:
                for child in children:
                    child.kill()
    return answers


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that its children end with it; only the main thread can see to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Child:
    """A worker process and the line to it; `stopped`: it was still at work when it was given up."""

    def __init__(self, platform: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(platform),
        )
        self.alive, self.stopped = True, False
        self._rest = b""
        self._broken: str | None = None

    def start(self, order: dict[str, Any], limits: Limits) -> None:
        """Hand the settings over and wait until its programs are built."""
        self._send(order)
        ready = self._receive(min(START_SECONDS, limits.left))
        self._broken = None if ready and "ready" in ready else self._failure(ready, START_SECONDS)

    def ask(self, name: str, limits: Limits) -> Answer:
        """The answer about one program; with `error` where there is none."""
        if self._broken is None:
            self._send(name)
            answer = self._receive(min(limits.program, limits.left))
            if answer and answer.get("name") == name:
                return answer
            self._broken = self._failure(answer, limits.program)
        if self.stopped and limits.left <= 0:
            return limits.late(name)
        return {"name": name, "error": self._broken}

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.alive = False

    def _receive(self, limit: float) -> Any:
        """The next line of the child, or `None` where it ended or the time is up."""
        assert self._process.stdout is not None
        line, deadline = self._process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([line], [], [], left)[0]:
                return None
            piece = os.read(line, 1 << 16)
            if not piece:
                return None
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\n")
        return json.loads(text)

    def _failure(self, answer: Any, limit: float) -> str:
        """Why there is no answer; the child is over."""
        self.alive = False
        try:
            code = self._process.wait(0.5 if answer is None else 5)
        except subprocess.TimeoutExpired:
            self.stopped = True
            return f"not finished after {limit:.0f} seconds"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return f"the compiling process ended with code {code}: {last[0][:500]}"

    def kill(self) -> None:
        """End the child; who waits for its answer hears so."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the child and the line to it."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
