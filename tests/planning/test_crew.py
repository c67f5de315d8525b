"""Child processes that compile: a queue, time-outs, deaths; and what a worker answers about a program."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxrl_llm.planning import crew, lower, targets, worker
from tests import rig

CHILD = """
import json, os, sys, time
order = json.loads(sys.stdin.readline())
if order.get("broken"):
    sys.exit("no such compiler")
if "pids" in order:
    open(order["pids"], "a").write(f"{os.getpid()} ")
print(json.dumps({"ready": []}), flush=True)
for line in sys.stdin:
    name = json.loads(line)
    if name.startswith("slow"):
        time.sleep(60)
    if name == "dies":
        print("Fatal: out of luck", file=sys.stderr)
        os._exit(3)
    print(json.dumps({"name": name, "flags": os.environ["XLA_FLAGS"], "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(crew, "COMMAND", [sys.executable, "-c", CHILD])

    def ask(names, order=None, *, jobs=1, limit=20.0, whole=60.0):
        heard = []
        limits = crew.Limits(limit, whole, time.monotonic())
        answers = crew.compile_all(
            order or {}, names, "gpu", jobs=jobs, limits=limits, tell=heard.append
        )
        assert answers == heard
        return {answer["name"]: answer for answer in answers}

    return ask


def test_every_program_is_answered_once_by_at_most_two_children(asked):
    names = [f"program {number}" for number in range(6)]
    found = asked(names, jobs=2)
    assert set(found) == set(names)
    assert len({answer["pid"] for answer in found.values()}) <= 2
    assert all("--xla_gpu_autotune_level=0" in answer["flags"] for answer in found.values())


def test_one_that_takes_too_long_is_given_up_and_the_rest_goes_on(asked):
    begun = time.monotonic()
    found = asked(["a", "slow", "b"], limit=4.0)
    assert found["slow"]["error"] == "not finished after 4 seconds"
    assert found["a"]["pid"] != found["b"]["pid"], "a new child went on"
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("jobs", [1, 2])
def test_when_the_plans_time_is_up_what_runs_is_ended_and_the_rest_is_named(jobs, asked, tmp_path):
    begun, pids = time.monotonic(), tmp_path / "pids"
    names = ["a", *[f"slow {number}" for number in range(jobs)], "b", "c"]
    found = asked(names, {"pids": str(pids)}, jobs=jobs, whole=8.0)
    assert time.monotonic() - begun < 60
    assert "pid" in found.pop("a")
    late = {"error": "not compiled: the plan's 8 s were up", "late": True}
    assert found == {name: {"name": name} | late for name in names[1:]}
    started = pids.read_text().split()
    assert len(started) == jobs, "no child is started anew"
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_program_whose_own_time_is_up_is_not_the_plans_fault(asked):
    assert "late" not in asked(["slow"], limit=1.0)["slow"]


def test_a_child_that_dies_is_named_with_its_last_words(asked):
    found = asked(["dies", "b"])
    assert found["dies"]["error"] == "the compiling process ended with code 3: Fatal: out of luck"
    assert "pid" in found["b"]


def test_a_child_that_cannot_start_fails_every_program(asked):
    found = asked(["a", "b"], {"broken": True})
    assert [answer["error"] for answer in found.values()] == [
        "the compiling process ended with code 1: no such compiler"
    ] * 2


SLEEPS = """
import os, sys, time
sys.stdin.readline()
print('{"ready": []}', flush=True)
open(sys.argv[1], "a").write(f"{os.getpid()} ")
time.sleep(300)
"""
INTERRUPTED = """
import sys, time
from jaxrl_llm.planning import crew
crew.COMMAND = [sys.executable, "-c", *sys.argv[1:]]
try:
    limits = crew.Limits(250.0, 250.0, time.monotonic())
    crew.compile_all({}, ["a", "b", "c"], "gpu", jobs=2, limits=limits, tell=print)
except KeyboardInterrupt:
    sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_children_end_with_a_parent_that_is_asked_to_stop(number, tmp_path):
    pids = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, SLEEPS, str(pids)],
        cwd=rig.ROOT,
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    said, _ = parent.communicate(timeout=30)
    assert parent.returncode == 75 and said == b"", "no failures are told, no child is started anew"
    found = pids.read_text().split()
    assert len(found) == 2
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_the_environment_is_set_for_compilers_that_have_no_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    made = crew.environment("gpu")
    assert made["XLA_FLAGS"] == "--mine --xla_gpu_autotune_level=0"
    assert made["JAX_PLATFORMS"] == "cpu" and made["TPU_SKIP_MDS_QUERY"] == "1"
    assert crew.environment("tpu")["XLA_FLAGS"] == "--mine"


# What a worker answers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def score():
    parts = rig.build(rig.ALGORITHMS["grpo"])
    planned = lower.step_programs(parts, parts.config.data.train_batch_size)
    return next(one for one in planned if one.name == "old log-probs")


def test_a_program_is_measured_once_and_then_remembered(score, tmp_path):
    target = targets.parse("h100:1")
    first = worker.analysis(score, target, tmp_path)
    assert not first["cached"] and first["temporaries"] > 0 and first["sent"] == {}
    assert first["arguments"] == pytest.approx(lower.held(score.args), abs=1024)
    (kept,) = tmp_path.glob("*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"temporaries": 42}))
    again = worker.analysis(score, target, tmp_path)
    assert again["cached"] and again["temporaries"] == 42
    other = worker.analysis(score, targets.parse("a100:1"), tmp_path)
    assert not other["cached"], "another device is another compilation"
    kept.write_text("{")
    assert not worker.analysis(score, target, tmp_path)["cached"], "a torn file is no answer"


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [found],
        lambda found: None,
        lambda found: {"temporaries": 42},
        lambda found: found | {"temporaries": None},
        lambda found: found | {"arguments": float("inf")},
        lambda found: found | {"sent": [1]},
    ],
)
def test_a_file_that_is_no_analysis_is_not_remembered(change, tmp_path):
    sizes = dict.fromkeys(("arguments", "results", "temporaries", "host_arguments"), 1)
    rest = {"sent": {"all-gather": 2.0}, "abroad": 0.0, "seconds": 1.0, "cpu_seconds": 1.0}
    found = {**sizes, **rest, "digest": "d"}
    kept = tmp_path / "one.json"
    kept.write_text(json.dumps(found))
    assert worker._remembered(kept) == found
    kept.write_text(json.dumps(change(found)))
    assert worker._remembered(kept) is None
    assert worker._remembered(tmp_path / "none.json") is None


def test_a_cache_that_cannot_be_written_loses_no_figures(score, tmp_path):
    (tmp_path / "file").write_text("")
    found = worker.analysis(score, targets.parse("h100:1"), tmp_path / "file")
    assert found["temporaries"] > 0 and not found["cached"]


def test_other_flags_are_another_compilation(score, monkeypatch):
    def digest():
        return worker._digest("text", score, targets.parse("v6e:4x4"))

    before = digest()
    assert digest() == before
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--xla_something=1")
        assert digest() != before
        monkeypatch.delenv(name)
