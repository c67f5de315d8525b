"""From samples to grades: run every reward function on every sample, add up, count what went wrong.

The score of a sample is `sum_k weight_k * value_k` over the functions that gave a value, then clipped to
`[clip_min, clip_max]`. The rules, each with a test:

- A function that abstains (`None`) adds nothing. A sample on which *every* function abstains has score NaN: it says
  nothing, so it must not enter group statistics as a 0. That is not a failure, and is counted apart.
- A function that fails (raises, hangs, dies, returns something else than a number) makes the whole sample invalid: score
  NaN, `failure` set. So does NaN. Infinities and magnitudes of `HUGE` and above do as well, unless the clip bound on their
  side is set: then they are clipped like every other value. The same holds for the weighted sum.
- The mean of a function is over the samples it gave a finite value for; `scored` is their share of all samples. So a crash
  shows in `scored` and never as a better mean without a trace.

Cheap built-ins run in the calling thread; `math`, custom files, a `format_pattern` of the user's and texts above
`LONG_TEXT` characters go to killable processes.

Left out on purpose: anything about groups or advantages (`algorithms`), and shaping that needs state.
"""

import math
import os
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.rewards import custom, table
from jaxrl_llm.rewards.pool import Outcome, WorkerPool

HUGE = 1e15
"""Magnitude from which a raw value or a sum counts as invalid where no clip bound holds it."""
LONG_TEXT = 100_000
"""Characters of prompt, response and answer above which no function runs in the calling thread."""


@dataclass(frozen=True)
class Sample:
    """What a reward function may know about one response; `response_length` counts tokens."""

    prompt: str
    response: str
    answer: str
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    response_length: int = 0


@dataclass(frozen=True)
class Grade:
    """The result for one sample: `score` (NaN: invalid), raw values by function name (`None`: abstained or failed),
    whether an answer was found (`None`: no function looks for one), the text of the first failure, and whether that
    was a time-out."""

    score: float
    parts: dict[str, float | None]
    answer_found: bool | None = None
    failure: str | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class FailureStats:
    """Counts since the grader was made: samples collected, failed, timed out; failures per function; the first text."""

    samples: int = 0
    failed: int = 0
    timed_out: int = 0
    by_function: dict[str, int] = field(default_factory=dict)
    first_failure: str | None = None


class Grader:
    """Grades samples in the background; make one with `make_grader`, use it in a `with` block.

    `names` are the function names used in `Grade.parts` and metrics; the first one is the correctness reward.
    `digests` holds the SHA-256 of every custom file, to be recorded with the run.
    """

    def __init__(self, knobs: RewardKnobs):
        self.names = table.labels(knobs.functions)
        self.digests: dict[str, str] = {}
        self._knobs = knobs
        self._weights = knobs.weights or (1.0,) * len(self.names)
        self._entries: dict[str, dict[str, Any]] = {}
        self._inline: dict[str, table.Spec] = {}
        for label, name in zip(self.names, knobs.functions, strict=True):
            if custom.is_custom(name):
                self.digests[label] = custom.digest(name)
                path, _, function = name.rpartition(":")
                spec = f"{os.path.abspath(path)}:{function}"
                self._entries[label] = {
                    "kind": "custom",
                    "spec": spec,
                    "sha256": self.digests[label],
                }
                continue
            built_in = table.lookup(name)
            options = built_in.options(knobs)
            self._entries[label] = {"kind": "builtin", "name": name, "options": options}
            if not built_in.pooled(knobs):
                self._inline[label] = built_in
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._pending: dict[int, list[Future[Outcome]] | None] = {}  # None: being submitted
        self._stats = FailureStats()
        self._closed = False

    def __enter__(self) -> "Grader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prestart(self) -> None:
        """Start the reward processes now where some function needs them, so that their imports overlap with other work."""
        if len(self._inline) < len(self.names):
            self._workers()

    def submit(self, key: int, sample: Sample) -> None:
        """Start grading a sample under a key of the caller's; returns at once, from any thread.

        Raises:
            ValueError: the key waits for `collect` already, or the grader is closed.
        """
        plain = {entry.name: getattr(sample, entry.name) for entry in fields(sample)}
        plain["extra_info"] = dict(sample.extra_info or {})
        size = len(sample.prompt) + len(sample.response) + len(sample.answer)
        with self._lock:
            if self._closed or key in self._pending:
                raise ValueError(
                    f"grader: key {key} " + ("after close" if self._closed else "is in use")
                )
            self._pending[key] = None
        calls = []
        for label in self.names:
            if label in self._inline and size <= LONG_TEXT:
                calls.append(self._call_here(label, plain))
            else:
                calls.append(self._workers().submit(label, plain))
        with self._lock:
            self._pending[key] = calls

    def collect(self, keys: Iterable[int]) -> dict[int, Grade]:
        """Wait for the samples of these keys and hand out their grades; every wait is bounded by the calls' time limits.

        Raises:
            ValueError: a key that was not submitted, or was collected before.
        """
        keys = list(keys)
        with self._lock:
            calls = {key: found for key in keys if (found := self._pending.get(key)) is not None}
            if len(calls) < len(keys):
                unknown = [key for key in keys if key not in calls] or "a key given twice"
                raise ValueError(f"grader: collected twice or never submitted: {unknown}")
            for key in keys:
                del self._pending[key]
        grades = {}
        for key, futures in calls.items():
            grades[key], failed = self._grade([future.result() for future in futures])
            self._count(grades[key], failed)
        return grades

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Grade a list of samples and wait for all of them; keys are negative, so they never meet a caller's own."""
        with self._lock:
            start = min([0, *self._pending]) - 1
        keys = [start - place for place in range(len(samples))]
        for key, sample in zip(keys, samples, strict=True):
            self.submit(key, sample)
        grades = self.collect(keys)
        return [grades[key] for key in keys]

    def failure_stats(self) -> FailureStats:
        """Counts of failures since the grader was made."""
        return self._stats

    def close(self) -> None:
        """Kill the reward processes; samples still waiting end as failed. May be called twice."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _workers(self) -> WorkerPool:
        with self._lock:
            if self._closed:
                raise ValueError("grader: used after close")
            if self._pool is None:
                knobs = self._knobs
                self._pool = WorkerPool(
                    knobs.num_workers or default_workers(),
                    {"functions": self._entries},
                    knobs.timeout_s,
                    knobs.memory_limit_mb,
                )
            return self._pool

    def _call_here(self, label: str, sample: dict[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            result, found = self._inline[label].run(sample, **self._entries[label]["options"])
            value, parts, problem = custom.convert(result, label)
            future.set_result(Outcome(value, parts, found, problem))
        except Exception:
            future.set_result(
                Outcome(failure=f"reward function {label!r}: {traceback.format_exc()}")
            )
        return future

    def _grade(self, outcomes: Sequence[Outcome]) -> tuple[Grade, list[str]]:
        """The grade of one sample and the names of the functions that failed on it."""
        knobs, total, given = self._knobs, 0.0, 0
        parts: dict[str, float | None] = {}
        failures: dict[str, str] = {}
        for label, weight, outcome in zip(self.names, self._weights, outcomes, strict=True):
            parts[label] = outcome.value
            parts.update(outcome.parts)
            if outcome.failure is not None:
                failures[label] = outcome.failure
            elif outcome.value is not None:
                if problem := _invalid(label, outcome.value, weight, knobs):
                    parts[label] = None
                    failures[label] = problem
                elif weight:
                    total += weight * outcome.value
                given += 1
        total = _clip(total, knobs)
        if not failures and not abs(total) < HUGE:  # NaN too
            failures[self.names[0]] = (
                f"reward functions {', '.join(self.names)} with their weights add up to {total:g}, expected a magnitude below"
                f" {HUGE:g}; lower reward.weights or set reward.clip_min and reward.clip_max"
            )
        found = [outcome.found for outcome in outcomes if outcome.found is not None]
        grade = Grade(
            score=total if given and not failures else math.nan,
            parts=parts,
            answer_found=any(found) if found else None,
            failure=next(iter(failures.values()), None),
            timed_out=any(outcome.timed_out for outcome in outcomes),
        )
        return grade, list(failures)

    def _count(self, grade: Grade, failed_functions: Sequence[str]) -> None:
        with self._lock:
            old = self._stats
            by_function = dict(old.by_function)
            for name in failed_functions:
                by_function[name] = by_function.get(name, 0) + 1
            self._stats = FailureStats(
                samples=old.samples + 1,
                failed=old.failed + (grade.failure is not None),
                timed_out=old.timed_out + grade.timed_out,
                by_function=by_function,
                first_failure=old.first_failure or grade.failure,
            )


def make_grader(knobs: RewardKnobs) -> Grader:
    """A grader for these settings; no process starts before the first call that needs one, or `prestart`.

    Raises:
        ConfigError: everything wrong with the settings at once (`table.check_settings`).
    """
    if found := table.check_settings(knobs):
        raise ConfigError(found)
    return Grader(knobs)


def default_workers() -> int:
    """Half of the CPU cores this process may use, at least 1."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, usable // 2)


def summarize(grades: Iterable[Grade]) -> dict[str, float]:
    """Metrics of a batch.

    `reward/<name>/mean` is over the samples with a finite value of that function, `reward/<name>/scored` their share of
    all samples (8 samples, 2 failed, others 1 1 1 0 0 0: mean 0.5, scored 0.75); a function without any value has no mean.
    `reward/failed`, `reward/timeout` and `reward/abstained` (every function abstained) count samples;
    `reward/answer_found` is a share over the samples in which a function looked for an answer. Empty batch: `{}`.
    """
    grades = list(grades)
    if not grades:
        return {}
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for grade in grades for name in grade.parts):
        values = [grade.parts.get(name) for grade in grades]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if finite:
            metrics[f"reward/{name}/mean"] = math.fsum(finite) / len(finite)
        metrics[f"reward/{name}/scored"] = len(finite) / len(grades)
    metrics["reward/failed"] = float(sum(grade.failure is not None for grade in grades))
    metrics["reward/timeout"] = float(sum(grade.timed_out for grade in grades))
    metrics["reward/abstained"] = float(
        sum(grade.failure is None and math.isnan(grade.score) for grade in grades)
    )
    found = [grade.answer_found for grade in grades if grade.answer_found is not None]
    if found:
        metrics["reward/answer_found"] = sum(found) / len(found)
    return metrics


def broken_batch(grades: Iterable[Grade], max_failed_share: float) -> str | None:
    """The first failure of a batch in which more than `max_failed_share` of the samples failed, else `None`.

    Samples on which every function abstained are no failures. Empty batch: `None`.
    """
    grades = list(grades)
    failures = [grade.failure for grade in grades if grade.failure is not None]
    return failures[0] if grades and len(failures) > max_failed_share * len(grades) else None


def no_answers(grades: Sequence[Grade], samples: Sequence[Sample]) -> str | None:
    """A warning with up to three raw responses where not one response of a batch held an answer, else `None`.

    The usual cause is a format mismatch, such as `gsm8k` in strict mode and a model that writes `\\boxed{}`.
    """
    looked = [grade.answer_found for grade in grades if grade.answer_found is not None]
    if not looked or any(looked):
        return None
    shown = "; ".join(repr(sample.response[-200:]) for sample in samples[:3])
    return (
        f"no answer was found in any of {len(looked)} responses; check that the prompt asks for the format the reward"
        f" function reads (gsm8k strict: '#### NUMBER'). Responses end in: {shown}"
    )


def _invalid(label: str, value: float, weight: float, knobs: RewardKnobs) -> str | None:
    if math.isnan(value):
        return f"reward function {label!r} returned NaN, expected a finite number or None"
    if abs(value) < HUGE:
        return None
    bound = knobs.clip_max if value * weight > 0 else knobs.clip_min
    if bound is not None or not weight:
        return None
    return (
        f"reward function {label!r} returned {value:g}, expected a magnitude below {HUGE:g};"
        " set reward.clip_min and reward.clip_max to clip such values"
    )


def _clip(total: float, knobs: RewardKnobs) -> float:
    if knobs.clip_min is not None:
        total = max(total, knobs.clip_min)
    if knobs.clip_max is not None:
        total = min(total, knobs.clip_max)
    return total
