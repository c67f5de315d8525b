"""Runs of several processes on this machine, over loopback: the command itself, or a job of `tests/loopback_jobs.py`."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests import rig

LIMIT_SECONDS = 300
DEVICES = 2
"""Fake devices of each process."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code and both streams."""

    code: int
    out: str


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """Wait for all of them; what hangs is killed and fails the test."""
    ended = []
    try:
        for process in running:
            out, _ = process.communicate(timeout=LIMIT_SECONDS)
            ended.append(Ended(process.returncode, out))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    return ended


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
