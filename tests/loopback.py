"""Runs of several processes on this machine, over loopback: the command itself, or a job of `tests/loopback_jobs.py`."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests import rig

LIMIT_SECONDS = 300
HUNG = 124
"""The exit code of a process that was killed after `LIMIT_SECONDS`."""
PORTS = range(20000, 30000)
"""Below those that kernels hand out by themselves: no connection gets one by chance before the run that chose it listens."""
DEVICES = 2
"""Fake devices of each process."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code and both streams."""

    code: int
    out: str


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def start(
    commands: Sequence[Sequence[str]],
    *,
    plans: dict[int, str] | None = None,
    devices: int = DEVICES,
    port: int | None = None,
) -> list[Any]:
    """Start one process per command, numbered in order; `plans` are fault plans by number."""
    address = f"127.0.0.1:{port or free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=rig.ROOT,
            env=rig.environment((plans or {}).get(number, ""), devices)
            | {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(len(commands)),
                "JAX_PROCESS_ID": str(number),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, command in enumerate(commands)
    ]


def end(running: Sequence[Any]) -> list[Ended]:
    """Wait for all of them; what hangs is killed and ends with `HUNG`. All are read at once: a full pipe would hold its process up."""

    def ended(process: Any) -> Ended:
        try:
            out, _ = process.communicate(timeout=LIMIT_SECONDS)
            return Ended(process.returncode, out)
        except subprocess.TimeoutExpired:
            process.kill()
            return Ended(HUNG, process.communicate()[0])

    try:
        with ThreadPoolExecutor(len(running)) as pool:
            return list(pool.map(ended, running))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()


def job(name: str, *arguments: object, count: int = 2, devices: int = DEVICES) -> list[Ended]:
    """Run a job of `tests/loopback_jobs.py` on `count` processes."""
    command = ["tests.loopback_jobs", name, *map(str, arguments)]
    return end(start([command] * count, devices=devices))


def train(
    overrides: dict[str, Any],
    *,
    own: dict[int, dict[str, Any]] | None = None,
    count: int = 2,
    devices: int = DEVICES,
    plans: dict[int, str] | None = None,
) -> list[Ended]:
    """Run the training command on `count` processes; `own` are further settings of single processes."""
    commands = [
        ["tests.loopback_jobs", "train", *rig.words(overrides | (own or {}).get(number, {}))]
        for number in range(count)
    ]
    return end(start(commands, plans=plans, devices=devices))


def codes(ended: Sequence[Ended]) -> list[int]:
    """The exit codes, with what was printed in the failure text."""
    found = [one.code for one in ended]
    print("\n".join(f"--- process {n}\n{one.out}" for n, one in enumerate(ended)), os.linesep)
    return found
