import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.rewards.pool import WorkerPool

FUNCTIONS = """
import ctypes, os, signal, subprocess, sys, time

def f(response, answer):
    if response == "busy":
        while True:
            pass
    if response == "sleep":
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(10)
    if response == "c":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        return pow(7, 10**9) % 2
    if response == "exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "memory":
        return len(bytearray(4 << 30))
    if response == "print":
        for _ in range(100):
            print("x" * 1_000_000)
            sys.stderr.write("y" * 1_000_000)
    if response == "close":
        sys.stdout.close(); sys.stderr.close(); os.close(0); os.close(1); os.close(2)
    if response == "closeall":
        os.closerange(0, 100)
    if response == "garbage":
        for number in range(3, 200):
            try:
                os.write(number, b"garbage that is no message at all" * 10)
            except OSError:
                pass
    if response == "fork" and os.fork() == 0:
        return 0.5
    if response == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(answer, "w").write(str(child.pid))
        time.sleep(60)
    if response == "pid":
        return os.getpid()
    if response == "env":
        os.chdir("/"); os.environ["JAXRL_CANARY"] = "1"
    if response == "raise":
        raise ValueError("boom")
    return 1.0
"""
LIMIT = 1.0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "fn.py"
    path.write_text(FUNCTIONS)
    return path


def setup(path):
    return {"functions": {"f": {"kind": "custom", "spec": f"{path}:f", "sha256": None}}}


@pytest.fixture
def pool(source):
    pool = WorkerPool(2, setup(source), 20.0, 1024)
    yield pool
    pool.close()


@pytest.fixture
def quick(source):
    pool = WorkerPool(2, setup(source), LIMIT, 1024)
    yield pool
    pool.close()


def sample(response, answer=""):
    return {
        "prompt": "", "response": response, "answer": answer, "data_source": "", "extra_info": {}, "response_length": 1,
    }  # fmt: skip


def run(pool, responses):
    futures = [pool.submit("f", sample(response)) for response in responses]
    return [future.result(timeout=60) for future in futures]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_hanging_calls_fail_alone_and_in_time(quick):  # E2, D09
    bad = ["busy", "sleep", "c", "sleep", "busy"]
    run(quick, ["warm", "warm"])
    start = time.monotonic()
    outcomes = run(quick, [*bad, *(["good"] * 60)])
    assert time.monotonic() - start <= LIMIT * math.ceil(len(bad) / 2) + 5
    assert [outcome.timed_out for outcome in outcomes] == [True] * 5 + [False] * 60
    assert all("no result within 1 s" in outcome.failure for outcome in outcomes[:5])
    assert [outcome.value for outcome in outcomes[5:]] == [1.0] * 60


@pytest.mark.parametrize(
    ("response", "told"),
    [
        ("exit", "exit status 3"),
        ("segfault", "SIGSEGV"),
        ("memory", "MemoryError"),
        ("closeall", "died"),
        ("garbage", "pipe"),
        ("raise", "boom"),
    ],
)
def test_only_the_bad_call_fails(pool, response, told):  # E4, A8
    outcomes = run(pool, [response, "good", "good"])
    assert told in outcomes[0].failure and "'f'" in outcomes[0].failure
    assert not outcomes[0].timed_out
    assert [outcome.value for outcome in outcomes[1:]] == [1.0, 1.0]


@pytest.mark.parametrize("response", ["print", "close", "fork", "env"])
def test_streams_forks_and_surroundings_stay_in_the_child(source, response):  # E4
    pool = WorkerPool(1, setup(source), 20.0, 1024)
    before = (os.getcwd(), dict(os.environ))
    assert [outcome.value for outcome in run(pool, [response, "good", "good"])] == [1.0] * 3
    assert (os.getcwd(), dict(os.environ)) == before
    pool.close()


def test_a_killed_worker_is_replaced(pool):  # A8
    run(pool, ["good"])
    assert wait_until(lambda: len(pool.pids()) == 2, 60)
    victims = pool.pids()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: len(pool.pids()) == 2 and not set(victims) & set(pool.pids()), 60)
    assert [outcome.value for outcome in run(pool, ["good"] * 4)] == [1.0] * 4


def test_children_of_a_function_die_with_it(quick, tmp_path):
    note = tmp_path / "pid"
    outcome = quick.submit("f", sample("child", str(note))).result(timeout=60)
    assert outcome.timed_out
    assert wait_until(lambda: gone(int(note.read_text())), 60)


def test_submitting_from_many_threads(pool):  # E5
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(run(pool, ["good"] * 10))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [outcome.value for outcome in results] == [1.0] * 80


def test_large_samples_do_not_block(source):
    """The workers do not read: whoever waits for them does so until their calls are too old."""
    texts, limit = ["x" * 1_000_000 + "\ud800\x00"] * 6, 60.0
    pool = WorkerPool(2, setup(source), limit, 1024)
    run(pool, ["good"] * 2)
    stopped = pool.pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    futures = [pool.submit("f", sample(text)) for text in texts]
    assert time.monotonic() - start < limit / 2
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert [future.result(timeout=60).value for future in futures] == [1.0] * 6
    pool.close()


def test_close_fails_what_waits_and_kills_everything(source):
    pool = WorkerPool(1, setup(source), 30.0, 1024)
    futures = [pool.submit("f", sample(text)) for text in ("busy", "good")]
    assert wait_until(lambda: len(pool.pids()) == 1, 60)
    pids = pool.pids()
    time.sleep(0.2)
    pool.close()
    pool.close()
    assert all("closed" in future.result(timeout=60).failure for future in futures)
    assert all(gone(pid) for pid in pids)
    assert "closed" in pool.submit("f", sample("good")).result(timeout=60).failure


def test_no_descriptors_leak(source):
    def count():
        return len(os.listdir("/dev/fd"))

    before = count()
    pool = WorkerPool(1, setup(source), 20.0, 1024)
    run(pool, ["exit"] * 5)
    during = count()
    run(pool, ["exit"] * 5 + ["good"])
    deadline = time.monotonic() + 60
    while count() - during > 4 and time.monotonic() < deadline:  # a worker may just be starting
        time.sleep(0.02)
    assert count() - during <= 4  # one worker more or less; a leak would be at least six
    pool.close()
    assert count() == before


def test_a_broken_file_fails_every_call_with_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module_here\ndef f(response): return 1\n")
    pool = WorkerPool(2, setup(path), LIMIT, 1024)
    assert all("no_such_module_here" in outcome.failure for outcome in run(pool, ["a", "b", "c"]))
    assert "no_such_module_here" in run(pool, ["later"])[0].failure
    pool.close()


def test_a_file_that_kills_its_process_while_it_loads(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os\nos._exit(9)\ndef f(response): return 1\n")
    pool = WorkerPool(1, setup(path), LIMIT, 1024)
    assert "before they were ready" in run(pool, ["a", "b"])[0].failure
    pool.close()


def test_a_sample_that_cannot_be_sent_fails(pool):
    loop = {}
    loop["self"] = loop
    bad = {**sample("good"), "extra_info": loop}
    assert "cannot be sent" in pool.submit("f", bad).result(timeout=60).failure
    assert run(pool, ["good"])[0].value == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are a Linux feature")
def test_workers_die_with_their_parent(source):
    code = (
        "import sys, time\nfrom jaxrl_llm.rewards.pool import WorkerPool\n"
        f"pool = WorkerPool(2, {setup(source)!r}, 60.0, 1024)\n"
        f"[pool.submit('f', {sample('busy')!r}) for _ in range(2)]\n"
        "while len(pool.pids()) < 2:\n    time.sleep(0.01)\n"
        "print(*pool.pids(), flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(gone(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: all(gone(pid) for pid in pids), 60)
