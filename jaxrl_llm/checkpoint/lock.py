"""One run per folder: a lock file with host, process id and time, that survives SIGKILL as a stale lock.

Left out on purpose: leases with a heartbeat. On one machine the kernel tells whether the holder lives; for a lock of
another machine nobody can, so a person decides.
"""

import atexit
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import ConfigError

LOCK_NAME = "run.lock"


class RunLock:
    """Holds a run folder for this process from construction until `release`, the end of a `with` block, or exit.

    The file is locked with `flock`, which the kernel drops when the holder dies, and names the holder. Raises `ConfigError`
    (exit 64) when a living process, or a process of another host, holds the folder. A lock left by a dead process of this host
    is taken over with one logged line. In a run of several processes only process 0 takes it: see `together.run_lock`.
    """

    def __init__(self, run_dir: Path, *, log: Callable[[str], None] = print):
        self.path = Path(run_dir).absolute() / LOCK_NAME
        self._pid = os.getpid()
        self._file: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open_and_lock()
        except OSError as error:
            raise ConfigError(
                f"run folder {self.path.parent}: got {error.strerror or error}, need a folder that can be written; "
                "choose another trainer.run_dir or fix its permissions"
            ) from error
        try:
            self._take_over(log)
        except BaseException:
            os.close(self._file)
            self._file = None
            raise
        atexit.register(self.release)

    def release(self) -> None:
        """Give the folder back; does nothing the second time, and nothing in a forked child."""
        if self._file is None or os.getpid() != self._pid:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None
        atexit.unregister(self.release)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _open_and_lock(self) -> int:
        """Lock the file that the path names now: a holder that just left may have removed the one we opened."""
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(handle)
                os.close(handle)
                raise ConfigError(
                    _refusal(self.path, holder, "wait for it to end, stop it")
                ) from None
            try:
                if os.fstat(handle).st_ino == os.stat(self.path).st_ino:
                    return handle
            except FileNotFoundError:
                pass
            os.close(handle)

    def _take_over(self, log: Callable[[str], None]) -> None:
        assert self._file is not None
        holder = _holder(self._file)
        host = socket.gethostname()
        if holder:
            if holder.get("host") != host:
                advice = f"if that process is surely dead, delete {self.path}; else stop it"
                raise ConfigError(_refusal(self.path, holder, advice))
            if _same_process_lives(holder):
                raise ConfigError(_refusal(self.path, holder, "wait for it to end, stop it"))
            log(
                f"taking over the lock of {self.path.parent}: process {holder.get('pid')} on {host} is gone"
            )
        mine = {
            "host": host,
            "pid": self._pid,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "started": start_ticks(self._pid),
        }
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(mine).encode(), 0)
        os.fsync(self._file)


def _refusal(path: Path, holder: dict[str, Any], advice: str) -> str:
    who = (
        f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('time')}"
        if holder
        else "another process"
    )
    return (
        f"run folder {path.parent}: got a folder in use by {who}, need one that no run holds; "
        f"{advice}, or choose another trainer.run_dir"
    )


def _holder(handle: int) -> dict[str, Any]:
    """What the lock file says; empty for a new file and for one cut short by a crash."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _same_process_lives(holder: dict[str, Any]) -> bool:
    """Whether the named process of this host still runs; a process id used again has another start time."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid == os.getpid() or not process_lives(pid):
        return False
    return holder.get("started") == start_ticks(pid)


def process_lives(pid: int) -> bool:
    """Whether a process of this host has this id and has not ended; a zombie nobody has reaped counts as ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    fields = _stat_fields(pid)
    return not fields or fields[0] not in "ZX"


def start_ticks(pid: int) -> str | None:
    """Start time of a process in clock ticks after boot; `None` where there is no /proc."""
    fields = _stat_fields(pid)
    return fields[19] if fields else None


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
