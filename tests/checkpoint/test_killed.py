"""Processes killed in the middle of saves and deletions."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import fault
from tests.checkpoint.rig import (
    abstract,
    bits,
    saver_for,
)

WORKER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.compilation_cache import write_whole_entries

write_whole_entries()

def say(*words):
    # one write per line: two threads speak
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

directory, keep, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rows = 4096
like = {"w": jax.ShapeDtypeStruct((rows, 64), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
noise = jax.random.normal(jax.random.key(0), (rows, 64))
checkpointer = Checkpointer(directory, keep=keep, log=lambda line: say("log", line))
found = checkpointer.restore(like)
start = found[0] if found else 0
say("start", start)
for step in range(start + 1, last + 1):
    checkpointer.check()
    checkpointer.save(step, {"w": noise * step, "n": jnp.int32(step)}, {"row": step})
    say("saved", step)
checkpointer.wait()
say("finished")
"""


def worker(directory, keep, last, plan=None):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment.pop(fault.PLAN_VARIABLE, None)
    if plan:
        environment[fault.PLAN_VARIABLE] = plan
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(directory), str(keep), str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def newest_whole(directory, keep):
    """Restore in this process and compare every bit with what the worker must have saved."""
    checkpointer, log = saver_for(directory, keep)
    noise = jax.random.normal(jax.random.key(0), (4096, 64))
    step, back, run = checkpointer.restore(abstract({"w": noise, "n": jnp.int32(0)}))
    assert bits(back) == bits({"w": noise * step, "n": jnp.int32(step)})
    assert run == {"row": step} and step == checkpointer.steps()[-1]
    return step, log


def test_killed_during_a_save_then_during_a_deletion_then_finished(tmp_path):
    process = worker(tmp_path, 2, 9, "in_save:3:kill")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    names = {path.name for path in tmp_path.iterdir()}
    assert f"00000003.saving-{process.pid}" in names and "00000003" not in names
    assert newest_whole(tmp_path, 2)[0] == 2

    process = worker(tmp_path, 2, 9, "in_delete:3:kill")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL and "start 2" in out
    assert "removing" in out and ".saving-" in out
    names = {path.name for path in tmp_path.iterdir()}
    assert "00000003.deleting" in names and "00000003" not in names
    step, log = newest_whole(tmp_path, 2)
    assert step == 5 and any("00000003.deleting" in line for line in log)

    process = worker(tmp_path, 2, 7)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "finished" in out, error
    assert newest_whole(tmp_path, 2)[0] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000006",
        "00000007",
        "owner.json",
    ]


def kill_at_random(directory, draw, last):
    """Kill a worker a moment after some save began; return the newest step whose `save` had returned."""
    process = worker(directory, 2, last)
    assert process.stdout is not None
    seen, wanted = 0, draw.randint(2, 6)
    try:
        for line in process.stdout:
            if line.startswith("saved"):
                seen, wanted = int(line.split()[1]), wanted - 1
                if wanted == 0:
                    time.sleep(draw.uniform(0.0, 0.15))
                    break
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=60)
    later = [int(line.split()[1]) for line in rest.splitlines() if line.startswith("saved")]
    return max([seen, *later])


@pytest.mark.slow
def test_twelve_kills_at_random_moments(tmp_path):
    draw = random.Random(7)
    for _ in range(12):
        begun = kill_at_random(tmp_path, draw, 10_000)
        step, _ = newest_whole(tmp_path, 2)
        assert begun - 2 <= step <= begun + 1
