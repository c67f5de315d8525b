"""One reward process: read a task, run one function on one sample, send the result, for ever.

Started by `pool` as `python -m jaxrl_llm.rewards.worker REQUEST_FD REPLY_FD PARENT_PID`. Messages are JSON behind a
four-byte length, on two pipes of their own; standard input, output and error are the null device, so nothing that a
function prints or closes there can disturb them. The first message is the set-up; the reply to it says `ready`, or
holds the traceback of the custom file that could not be imported.

What bounds a function: the wall clock (the parent kills the whole process group), an address-space limit, a CPU-time
limit as a second clock, no core files, its own session, and no descriptors but the two pipes. A process ends itself
when its parent is gone: end of file on the request pipe, and on Linux a kill signal from the kernel.

`random` (and NumPy where it is loaded) is seeded before every call from the function and the sample, and hashing is
fixed by the parent, so a function that draws random numbers gives the same reward in any process and order.

Left out on purpose: undoing what a function does to its own process (working directory, environment, globals); a
function that leans on those is not a function. No sandbox either: a custom file is trusted, the text it grades is not.
"""

import json
import os
import struct
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct(">I")
MAX_REPLY = 1 << 20
"""Longest reply in bytes; the parent kills a worker that announces more."""
MAX_TRACEBACK = 8000

Runner = Callable[[dict[str, Any]], dict[str, Any]]


def pack(message: dict[str, Any]) -> bytes:
    """A message as it goes through a pipe. Lone surrogates survive (they are escaped); arrays become lists, sets and
    other strangers text."""
    body = json.dumps(message, ensure_ascii=True, default=_plain).encode("ascii")
    return HEADER.pack(len(body)) + body


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def main(request_fd: int, reply_fd: int, parent: int) -> int:
    """Serve tasks until the request pipe ends; returns the exit status."""
    die_with(parent)
    for descriptor in (request_fd, reply_fd):
        os.set_inheritable(descriptor, False)
    setup = _receive(request_fd)
    if setup is None:
        return 0
    limit_resources(setup["memory_limit_mb"])
    try:
        runners = {label: _runner(label, entry) for label, entry in setup["functions"].items()}
    except BaseException:
        _send(reply_fd, {"ready": False, "error": _traceback()})
        return 1
    _send(reply_fd, {"ready": True})
    me = os.getpid()
    while (task := _receive(request_fd)) is not None:
        limit_cpu(setup["timeout_s"])
        _seed(task)
        reply = _run(runners[task["function"]], task["sample"])
        if os.getpid() != me:  # a fork that came back from the function
            os._exit(1)
        _send(reply_fd, {"id": task["id"], **reply})
    return 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux), and leave at once if that already happened."""
    if sys.platform == "linux":
        import ctypes
        import signal

        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def limit_resources(memory_limit_mb: int) -> None:
    """Cap the address space and switch core files off."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = memory_limit_mb << 20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_cpu(timeout_s: float) -> None:
    """Move the CPU-time limit to what is used by now plus twice the wall-clock limit and a little."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + 2 * timeout_s) + 5
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _runner(label: str, entry: dict[str, Any]) -> Runner:
    from jaxrl_llm.rewards import custom, table

    if entry["kind"] == "custom":
        loaded = custom.load(entry["spec"], entry["sha256"])
        return lambda sample: _reply(label, loaded(**sample), None)
    spec = table.lookup(entry["name"])
    spec.prepare()
    return lambda sample: _reply(label, *spec.run(sample, **entry["options"]))


def _reply(label: str, result: Any, found: bool | None) -> dict[str, Any]:
    from jaxrl_llm.rewards import custom

    value, parts, problem = custom.convert(result, label)
    return {"value": value, "parts": parts, "found": found, "error": problem}


def _run(runner: Runner, sample: dict[str, Any]) -> dict[str, Any]:
    try:
        return runner(sample)
    except BaseException:  # SystemExit and KeyboardInterrupt end a call, not the worker
        return {"value": None, "parts": {}, "found": None, "error": _traceback()}


def _traceback() -> str:
    try:
        text = traceback.format_exc()
    except BaseException:
        text = f"{sys.exc_info()[0]} (its traceback could not be written)"
    return (
        text
        if len(text) <= MAX_TRACEBACK
        else f"{text[:2000]}\n...\n{text[2000 - MAX_TRACEBACK :]}"
    )


def _seed(task: dict[str, Any]) -> None:
    import random

    seed = zlib.crc32(pack({"function": task["function"], "sample": task["sample"]}))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _receive(descriptor: int) -> dict[str, Any] | None:
    header = _read(descriptor, HEADER.size)
    body = header and _read(descriptor, HEADER.unpack(header)[0])
    return json.loads(body) if body else None


def _read(descriptor: int, size: int) -> bytes | None:
    chunks = []
    while size:
        chunk = os.read(descriptor, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = pack(message)
    if len(data) > MAX_REPLY:
        problem = (
            f"the reward function's result takes {len(data)} bytes, at most {MAX_REPLY} are sent"
        )
        data = pack({"id": message.get("id"), "value": None, "parts": {}, "error": problem})
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:4])))
