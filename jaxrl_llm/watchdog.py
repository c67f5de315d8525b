"""Ends a run of several processes in which nothing moves any more: one of them stands still, and all wait for it.

Heartbeats do not show that, because a process that stands still is alive. Here every process counts the places it passes (its
`Pulse`), a thread tells the others, and where no count of any process has changed for the limit, every process prints where all stand
and its own stacks, and ends with exit 70.

Left out on purpose: ending one process alone (the others would only wait for it), and runs of one process.
"""

import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax

from jaxrl_llm import processes
from jaxrl_llm.errors import EXIT_INTERNAL
from jaxrl_llm.processes import Pulse

LOOKS = 4
"""How often per limit a thread looks, at least; and at least every `MOST_SECONDS`."""
MOST_SECONDS = 10.0
FIRST_SECONDS = 600.0
"""The least limit of the first step, which compiles."""
STEPS = 20
"""Steps whose median counts."""
FOLDER = f"{processes.ROOT}/pulses"

Place = tuple[int, int, str]
"""Places passed, signs of life, the last place."""


class Watchdog:
    """Watches from a thread while its `with` block runs; `finished` tells it that a step has ended."""

    def __init__(self, pulse: Pulse, seconds: float | None, end: Callable[[int], Any] = os._exit):
        self._pulse, self._seconds, self._end = pulse, seconds, end
        self._over = threading.Event()
        self._steps: list[float] = []
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None

    def finished(self) -> None:
        """A step has ended: the limit is ten times the median of the last steps, where that is more than the setting."""
        now = time.monotonic()
        self._steps = [*self._steps[1 - STEPS :], now - self._last]
        self._last = now

    def limit(self) -> float:
        """Seconds without any movement after which the run ends."""
        least = 10.0 * statistics.median(self._steps) if self._steps else FIRST_SECONDS
        return max(self._seconds or 0.0, least)

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None and jax.process_count() > 1:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The thread has ended when this returns: the service that it asks may be taken down next."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(MOST_SECONDS)

    def _watch(self) -> None:
        pause = min(MOST_SECONDS, (self._seconds or 0.0) / LOOKS)
        known: dict[int, Place] = {}
        moved = looked = time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            places = self._tell_and_read()
            if places != known or now - looked > 3 * pause:
                moved = now
            known, looked = places, now
            if now - moved > self.limit():
                self._bark(places, now - moved, pause)
                return

    def _tell_and_read(self) -> dict[int, Place]:
        client, me = processes.client(), jax.process_index()
        own = (self._pulse.passed, self._pulse.beats, self._pulse.place)
        with suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{FOLDER}/{me}", json.dumps(own), allow_overwrite=True)
            return {n: tuple(place) for n, place in processes.entries(client, FOLDER).items()}  # type: ignore[misc]
        return {me: own}

    def _bark(self, places: Mapping[int, Place], seconds: float, pause: float) -> None:
        me = jax.process_index()
        print(f"process {me}: {standing(places, jax.process_count(), seconds)}", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        # Whoever ends takes the others down before they have spoken, process 0 above all: it is the coordinator that they read.
        if not self._over.wait((6 if me == 0 else 3) * pause):
            self._end(EXIT_INTERNAL)


def standing(places: Mapping[int, Place], count: int, seconds: float) -> str:
    """Who holds up the run, in words: the process that has passed the fewest places, or none where all have passed equally many."""
    silent = [process for process in range(count) if process not in places]
    least = min((place[0] for place in places.values()), default=0)
    behind = silent or [process for process, place in sorted(places.items()) if place[0] == least]
    where = "; ".join(f"process {process} at {place[2]}" for process, place in sorted(places.items())[:20])  # fmt: skip
    names = ", ".join(map(str, behind[:20]))
    who = f"process {names} holds it up" if len(behind) < count else "all stand at the same place"
    return (
        f"no process has got on for {seconds:.0f} s, and {who} ({where}). The stacks of this process follow. Look at that host, then "
        "start the run again: it continues from its last checkpoint. The limit is distributed.watchdog_seconds"
    )
