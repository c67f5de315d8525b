"""Fault points: silent without a plan, exact with one. Signals go to real child processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxrl_llm import fault
from jaxrl_llm.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(fault.PLAN_VARIABLE, raising=False)
    fault.reset()
    yield
    fault.reset()


def test_without_a_plan_a_point_does_nothing_and_costs_little():
    start = time.process_time()
    for step in range(10_000):
        fault.point("in_save", step)
    assert time.process_time() - start < 1.0


def test_raise_fires_at_its_point_and_step_only_and_once(monkeypatch):
    monkeypatch.setenv(fault.PLAN_VARIABLE, "in_save:7:raise")
    fault.point("in_save", 6)
    fault.point("in_delete", 7)
    fault.point("in_save")
    with pytest.raises(fault.InjectedFault, match="in_save, step 7"):
        fault.point("in_save", 7)
    fault.point("in_save", 7)


def test_star_fires_at_every_call(monkeypatch):
    monkeypatch.setenv(fault.PLAN_VARIABLE, "in_eval:*:raise")
    for step in (1, 2, None, 2):
        with pytest.raises(fault.InjectedFault):
            fault.point("in_eval", step)


def test_sleep_and_several_entries(monkeypatch):
    monkeypatch.setenv(fault.PLAN_VARIABLE, "in_save:1:sleep=0.05, in_save:1:raise")
    start = time.perf_counter()
    with pytest.raises(fault.InjectedFault):
        fault.point("in_save", 1)
    assert time.perf_counter() - start >= 0.05


def test_plan_that_is_not_understood_lists_every_problem():
    with pytest.raises(ConfigError) as caught:
        fault.parse_plan(
            "in_save:1,nowhere:1:kill,in_save:-1:kill,in_save:1:explode,in_save:1:sleep=x"
        )
    assert len(caught.value.problems) == 5
    assert fault.parse_plan("") == []
    assert fault.parse_plan("in_save:*:sleep=2,at_exit:3:kill") == [
        ("in_save", None, "sleep=2"),
        ("at_exit", 3, "kill"),
    ]


@pytest.mark.parametrize("action, code", [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM)])
def test_signals_end_a_process_without_a_handler(action, code):
    program = "from jaxrl_llm import fault; fault.point('in_save', 3); fault.point('in_save', 4); print('alive')"
    environment = {**os.environ, fault.PLAN_VARIABLE: f"in_save:4:{action}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == code
    assert b"alive" not in done.stdout


def test_term_is_sent_once_and_the_process_goes_on():
    program = (
        "import signal; from jaxrl_llm import fault; seen = [];"
        "signal.signal(signal.SIGTERM, lambda *_: seen.append(1));"
        "[fault.point('in_reward', 2) for _ in range(3)]; print(len(seen))"
    )
    environment = {**os.environ, fault.PLAN_VARIABLE: "in_reward:2:term"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60
    )
    assert done.stdout.strip() == b"1"


def test_module_needs_the_standard_library_only():
    program = (
        "import sys, jaxrl_llm.fault;"
        "print([m for m in ('jax', 'numpy', 'orbax', 'flax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout.strip() == b"[]"
