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


def hold_lock(directory, more=""):
    program = (
        "import sys, time; from jaxrl_llm.checkpoint.lock import RunLock;"
        f"lock = RunLock({str(directory)!r}, {more}); print('held', flush=True); time.sleep(60)"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True)
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


# Other hosts --------------------------------------------------------------------------------------------------------------


ELSEWHERE = {"host": "elsewhere", "pid": 1, "time": "then", "started": "1", "beat_seconds": 0.01}


@pytest.fixture
def foreign(tmp_path):
    """A lock that a process of another host left, which said that it renews it."""
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(ELSEWHERE))
    return path


def test_a_silent_lock_of_another_host_is_taken_over(foreign):
    log: list[str] = []
    begun = time.monotonic()
    with RunLock(foreign.parent, log=log.append, silence_seconds=0.5) as lock:
        assert time.monotonic() - begun >= 0.5
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert "for a sign of life" in log[0]
    assert "process 1 on elsewhere has been silent" in log[1]


def test_a_lock_that_is_renewed_is_respected_at_once(foreign):
    over = threading.Event()

    def renew():
        while not over.wait(0.1):
            os.utime(foreign)

    thread = threading.Thread(target=renew)
    thread.start()
    begun = time.monotonic()
    try:
        with pytest.raises(ConfigError, match=r"process 1 on elsewhere.*stop it"):
            RunLock(foreign.parent, log=lambda text: None, silence_seconds=60)
    finally:
        over.set()
        thread.join()
    assert time.monotonic() - begun < 30
    assert json.loads(foreign.read_text()) == ELSEWHERE


def test_a_lock_that_is_given_back_while_one_waits_is_free(foreign):
    threading.Timer(0.3, foreign.unlink).start()
    begun = time.monotonic()
    RunLock(foreign.parent, log=lambda text: None, silence_seconds=60).release()
    assert time.monotonic() - begun < 30


def test_a_holder_renews_its_lock(tmp_path):
    with RunLock(tmp_path, beat_seconds=0.05) as lock:
        assert json.loads(lock.path.read_text())["beat_seconds"] == 0.05
        first = lock.path.stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while lock.path.stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_holder_whose_lock_was_taken_over_ends(tmp_path):
    holder = hold_lock(tmp_path, "beat_seconds=0.05")
    (tmp_path / "run.lock").write_text(json.dumps(ELSEWHERE))
    try:
        assert holder.wait(30) == 70
    finally:
        holder.kill()
    said = holder.communicate()[1]
    assert "taken over by" in said and "elsewhere" in said
    assert json.loads((tmp_path / "run.lock").read_text()) == ELSEWHERE


def test_a_lock_that_was_taken_over_is_not_given_back_by_its_former_holder(tmp_path):
    """It wakes up, ends at once and must leave the new holder's lock alone."""
    with RunLock(tmp_path, beat_seconds=600) as lock:
        lock.path.write_text(json.dumps(ELSEWHERE))
    assert json.loads(lock.path.read_text()) == ELSEWHERE
