"""One run per folder: a lock file with host, process id and time, that survives SIGKILL as a stale lock.

On one machine the kernel tells whether the holder lives. Of a holder on another machine the file's time does, which its holder
renews: a restart elsewhere takes over what has been silent, and a holder that was only asleep ends when it finds another's name.

Left out on purpose: comparing clocks. Only whether the time changes is looked at.
"""

import atexit
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import EXIT_INTERNAL, ConfigError

LOCK_NAME = "run.lock"
BEAT_SECONDS = 15.0
"""How often a holder renews the file's time."""
SILENCE_SECONDS = 120.0
"""How long a lock of another host must be silent before it is taken over; NFS may show a file's time a minute late."""


class RunLock:
    """Holds a run folder for this process from construction until `release`, the end of a `with` block, or exit.

    The file is locked with `flock`, which the kernel drops when the holder dies, and names the holder. Raises `ConfigError`
    (exit 64) when a living process holds the folder, also of another host. A lock left by a dead process of this host, or by
    one of another host that does not renew it for `silence_seconds`, is taken over with a logged line. A process whose lock was
    taken over (it was stopped for so long) ends with exit 70 as soon as it looks. In a run of several processes only process 0
    takes it: see `together.run_lock`.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        log: Callable[[str], None] = print,
        beat_seconds: float = BEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ):
        self.path = Path(run_dir).absolute() / LOCK_NAME
        self._pid = os.getpid()
        self._file: int | None = None
        self._over = threading.Event()
        self._beat_seconds, self._silence_seconds = beat_seconds, silence_seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open_and_lock()
        except OSError as error:
            raise ConfigError(
                f"run folder {self.path.parent}: got {error.strerror or error}, need a folder that can be written; "
                "choose another trainer.run_dir or fix its permissions"
            ) from error
        try:
            while not self._may_be_taken(log):
                os.close(self._file)
                self._file = self._open_and_lock()
            self._sign()
        except BaseException:
            os.close(self._file)
            self._file = None
            raise
        atexit.register(self.release)
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Give the folder back; does nothing the second time, in a forked child, and to a lock that another process has signed since."""
        if self._file is None or os.getpid() != self._pid:
            return
        self._over.set()
        if _holder(self._file) == self._mine:
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

    def _may_be_taken(self, log: Callable[[str], None]) -> bool:
        """Whether nobody holds what is locked now; false where the file has been replaced meanwhile."""
        assert self._file is not None
        holder = _holder(self._file)
        if not holder:
            return True
        who, host = f"process {holder.get('pid')} on {holder.get('host')}", socket.gethostname()
        if holder.get("host") == host:
            if _same_process_lives(holder):
                raise ConfigError(_refusal(self.path, holder, "wait for it to end, stop it"))
            log(f"taking over the lock of {self.path.parent}: {who} is gone")
            return True
        if not holder.get("beat_seconds"):
            advice = f"if that process is surely dead, delete {self.path}; else stop it"
            raise ConfigError(_refusal(self.path, holder, advice))
        seconds = max(self._silence_seconds, 4 * float(holder["beat_seconds"]))
        log(
            f"{self.path.parent} is locked by {who}: waiting up to {seconds:.0f} s for a sign of life"
        )
        changed = self._changes(seconds)
        if changed == "renewed":
            raise ConfigError(_refusal(self.path, holder, "wait for it to end, stop it"))
        if not changed:
            log(
                f"taking over the lock of {self.path.parent}: {who} has been silent for {seconds:.0f} s"
            )
        return not changed

    def _changes(self, seconds: float) -> str:
        """`renewed` or `replaced`, as soon as the file is; empty where nothing happens to it for so long."""
        assert self._file is not None
        first, deadline = os.fstat(self._file), time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, seconds / 10))
            try:
                now = os.stat(self.path)
            except FileNotFoundError:
                return "replaced"
            if now.st_ino != first.st_ino:
                return "replaced"
            if now.st_mtime_ns != first.st_mtime_ns:
                return "renewed"
        return ""

    def _sign(self) -> None:
        """Write this process's name into the locked file; how often it is renewed only where its time can be set."""
        assert self._file is not None
        mine = {
            "host": socket.gethostname(),
            "pid": self._pid,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "started": start_ticks(self._pid),
        }
        with suppress(OSError):
            os.utime(self.path, ns=(0, 0))
            if os.stat(self.path).st_mtime_ns == 0:
                mine["beat_seconds"] = self._beat_seconds
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(mine).encode(), 0)
        os.fsync(self._file)
        self._mine = mine

    def _renew(self) -> None:
        """Renew the file's time until released; end the process where another one has signed the file."""
        while not self._over.wait(self._beat_seconds):
            with suppress(OSError, ValueError):
                found = json.loads(self.path.read_text())
                if found != self._mine and not self._over.is_set():
                    self._lost(found)
                os.utime(self.path)

    def _lost(self, holder: Any) -> None:
        text = (
            f"run folder {self.path.parent}: taken over by {json.dumps(holder)} while this process stood still, need one run per "
            "folder; this process ends and writes nothing more there\n"
        )
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(EXIT_INTERNAL)


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
