"""One run per folder, with real processes that are killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from jaxrl_llm.checkpoint import (
    RunLock,
)
from jaxrl_llm.errors import ConfigError


def hold_lock(directory):
    program = (
        "import sys, time; from jaxrl_llm.checkpoint.lock import RunLock;"
        f"lock = RunLock({str(directory)!r}); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "held"
    return process


def test_second_run_is_refused_and_a_killed_one_leaves_a_stale_lock(tmp_path):
    holder = hold_lock(tmp_path)
    try:
        with pytest.raises(ConfigError) as caught:
            RunLock(tmp_path)
        assert str(holder.pid) in str(caught.value) and socket.gethostname() in str(caught.value)
        assert caught.value.exit_code == 64
    finally:
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    log: list[str] = []
    while True:  # not waited for: a killed holder nobody has reaped is dead all the same
        try:
            lock = RunLock(tmp_path, log=log.append)
            break
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert len(log) == 1 and str(holder.pid) in log[0]
    mine = json.loads(lock.path.read_text())
    assert mine["pid"] == os.getpid() and mine["host"] == socket.gethostname() and mine["time"]
    lock.release()
    holder.communicate()


def test_lock_is_released_and_of_other_hosts_respected(tmp_path):
    with RunLock(tmp_path / "run") as lock, pytest.raises(ConfigError):
        RunLock(tmp_path / "run")
    assert not lock.path.exists()
    lock.release()
    with RunLock(tmp_path / "run"):
        pass
    lock.path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": "then"}))
    with pytest.raises(ConfigError, match=r"elsewhere.*delete"):
        RunLock(tmp_path / "run")
    lock.path.write_text('{"host": ')
    RunLock(tmp_path / "run").release()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="need a folder"):
        RunLock(tmp_path / "file")


def test_lock_of_a_process_number_used_again_is_stale(tmp_path):
    held = {"host": socket.gethostname(), "pid": os.getppid(), "time": "then", "started": "1"}
    (tmp_path / "run.lock").write_text(json.dumps(held))
    log: list[str] = []
    RunLock(tmp_path, log=log.append).release()
    assert "taking over" in log[0]


def test_many_that_race_for_one_folder_get_exactly_one_lock(tmp_path):
    won, gate = [], threading.Barrier(8)

    def race():
        gate.wait()
        with suppress(ConfigError):
            won.append(RunLock(tmp_path / "deep" / "run"))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].release()
