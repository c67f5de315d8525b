"""Numbers of a step: reduce them, watch compilations, time and trace phases; the sinks they go to are those of `sinks`.

Names follow verl where verl has the number. The reductions take host arrays of the whole batch, so a mean is over all
processes' rows or tokens; what lies spread over them is reduced in parts, `batch_part`, and joined by `join_batch`.

Left out on purpose: means of means, histograms.
"""

import functools
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.records import END_LENGTH, Array
from jaxrl_llm.sinks import (
    MetricsLog,
    Row,
    open_sinks,
    pick,
    read_rows,
    redact,
    redact_text,
    truncate,
)

__all__ = [
    "CompileCounter",
    "MetricsLog",
    "Phases",
    "Profiler",
    "Row",
    "batch_part",
    "join_batch",
    "memory",
    "open_sinks",
    "peak_rss_mb",
    "pick",
    "read_rows",
    "redact",
    "redact_text",
    "speed",
    "summarize_batch",
    "summarize_rollout",
    "throughput",
    "truncate",
]


# --- counting and timing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """A program that was compiled or loaded from the persistent cache: its name, its arguments (`float32[64,80]`), seconds."""

    name: str
    shapes: tuple[str, ...]
    seconds: float


class _Lowered(logging.Filter):
    """Remembers the arguments of every program that JAX says it lowers; what was not to be printed before is still not."""

    def __init__(self, own_level: int) -> None:
        super().__init__()
        self.own_level = own_level
        self.shapes: dict[str, tuple[str, ...]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if str(record.msg).startswith("Compiling") and isinstance(args, tuple) and len(args) > 1:
            arrays = args[1] if isinstance(args[1], Sequence) else ()
            self.shapes[str(args[0])] = tuple(str(array) for array in arrays)
        return record.levelno >= (self.own_level or logging.getLogger("jax").getEffectiveLevel())


@functools.cache
def _compilations() -> list[Compilation]:
    """One entry per compilation of this process since the first call; filter and listener are registered once.

    JAX reports shapes on a logger of its own, at DEBUG level, when it lowers a program, and name and seconds as an event when it
    has compiled it. Both happen per compilation, so a step without one costs nothing.
    """
    import jax

    logger = logging.getLogger("jax._src.interpreters.pxla")
    lowered, compiled = _Lowered(logger.level), list[Compilation]()
    logger.addFilter(lowered)
    logger.setLevel(logging.DEBUG)

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            name = str(about.get("fun_name", "a program"))
            shapes = lowered.shapes.pop(name, ())
            compiled.append(Compilation(name, shapes, duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return compiled


NAMED = 3
"""Recompilations named per step, and differences per recompilation; the others are counted."""
TOLD = 10
"""Steps of a run whose recompilations are named; later ones only count in `perf/recompilations`."""


class CompileCounter:
    """Counts XLA compilations of this process, loads from the persistent cache included, from its creation on.

    What compiles while a `phase` runs for the first time is expected; what compiles in a later run of it is a recompilation and
    is named by `news`. Outside of phases everything is expected.
    """

    def __init__(self) -> None:
        self._log = _compilations()
        self._seen = self._booked = len(self._log)
        self._open, self._warm = list[str](), set[str]()
        self._late = list[int]()
        self._late_seen = self._late_told = self._told = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Compilations in here belong to this phase, those in a phase inside it to that one."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()
            self._warm.add(name)

    def _book(self) -> None:
        fresh = range(self._booked, len(self._log))
        self._booked += len(fresh)
        if self._open and self._open[-1] in self._warm:
            self._late += fresh

    def delta(self) -> int:
        """Compilations since the last call of `delta` or `row` (first call: since creation)."""
        return int(self.row()["perf/compilations"])

    def row(self) -> Row:
        """`perf/compilations`, the seconds they took, `perf/compile_s`, and `perf/recompilations` since the last call."""
        fresh = self._log[self._seen :]
        late = len(self._late) - self._late_seen
        self._seen += len(fresh)
        self._late_seen += late
        return {
            "perf/compilations": len(fresh),
            "perf/compile_s": sum(one.seconds for one in fresh),
            "perf/recompilations": late,
        }

    def news(self, step: int) -> list[str]:
        """A line for each recompilation since the last call, what changed included: at most `NAMED`, then a count of the rest."""
        late = self._late[self._late_told :]
        self._late_told += len(late)
        if not late or self._told > TOLD:
            return []
        self._told += 1
        if self._told > TOLD:
            return [
                "warning: more recompilations; from now on they only count in perf/recompilations"
            ]
        lines = [_name(self._log[at], self._log[:at], step) for at in late[:NAMED]]
        if len(late) > NAMED:
            lines.append(f"warning: and {len(late) - NAMED} more recompilations at step {step}")
        return lines


def _name(one: Compilation, earlier: Sequence[Compilation], step: int) -> str:
    """Which program was compiled, and how its arguments differ from the most similar ones it was compiled for before."""
    before = [other.shapes for other in earlier if other.name == one.name]
    if not before:
        return f"warning: compiled {one.name} at step {step}, after warm-up ({one.seconds:.1f} s)"

    def changes(old: tuple[str, ...]) -> list[str]:
        if len(old) != len(one.shapes):
            return [f"{len(one.shapes)} arrays instead of {len(old)}"] * (1 + len(one.shapes))
        pairs = zip(one.shapes, old, strict=True)
        return [f"{new} instead of {was}" for new, was in pairs if new != was]

    found = list(dict.fromkeys(sorted((changes(old) for old in reversed(before)), key=len)[0]))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    why = ", ".join(found[:NAMED]) + more if found else "equal shapes; something static is new"
    return (
        f"warning: recompiled {one.name} at step {step} ({one.seconds:.1f} s): {why}; lengths or batch sizes that vary cost a "
        "compilation each"
    )


class Phases:
    """Wall-clock seconds per phase: `with phases("gen"): ...` adds to `timing_s/gen`; a nested phase counts in both.

    `around(name)` is entered with every phase, for instance `CompileCounter.phase`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        around: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ):
        self._clock, self._around, self._seconds = clock, around, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            with self._around(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def row(self) -> Row:
        """`timing_s/<phase>` of every phase since the last `reset`."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Start again from no phases."""
        self._seconds.clear()


class Profiler:
    """JAX traces of chosen steps: `with profiler(step): ...` leaves one in `<folder>/step_<N>` and says where it lies.

    A profiler that fails is said once and never ends a run.
    """

    def __init__(self, folder: Path, steps: Collection[int], say: Callable[[str], None]):
        self._folder, self._steps, self._say = folder, frozenset(steps), say
        self._complained = False

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        import jax

        target = self._folder / f"step_{step}"
        begun = step in self._steps and self._done(
            step, lambda: jax.profiler.start_trace(str(target))
        )
        try:
            yield
        finally:
            if begun and self._done(step, jax.profiler.stop_trace):
                self._say(f"trace of step {step}: {target} (tensorboard --logdir shows it)")

    def _done(self, step: int, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as problem:
            if not self._complained:
                about = f"{type(problem).__name__}: {problem}"
                self._say(f"warning: no trace of step {step} ({about}); the run goes on")
            self._complained = True
            return False
        return True


def peak_rss_mb() -> float:
    """The largest resident memory of this process so far, in MB (2^20 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def memory() -> Row:
    """`perf/peak_rss_mb` and, where the system tells (Linux), the resident memory of this moment, `perf/rss_mb`."""
    row: Row = {"perf/peak_rss_mb": peak_rss_mb()}
    pages = Path("/proc/self/statm")
    if pages.exists():
        row["perf/rss_mb"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    return row


def throughput(tokens: int, seconds: float, devices: int) -> Row:
    """Tokens per second and device of a step, `tokens` counted over all devices; no speed where no time passed."""
    row: Row = {"perf/total_num_tokens": int(tokens), "perf/time_per_step": float(seconds)}
    return row | ({"perf/throughput": tokens / seconds / devices} if seconds > 0 else {})


def speed(
    *,
    step_flops: float,
    step_seconds: float,
    update_flops: float,
    update_seconds: float,
    devices: int,
    peak: float | None,
) -> Row:
    """FLOPs over time, of the whole step and of its updates alone (`.../update`); FLOPs as in `flops.step`, over all devices.

    `perf/tflops_per_device = flops / seconds / devices / 1e12`, and `perf/mfu = flops / (seconds * devices * peak)`, which is
    absent where the `peak` FLOP/s of a device is unknown (`None`). Where no time passed there is no speed.
    """
    row: Row = {}
    for name, flops, seconds in (
        ("", step_flops, step_seconds),
        ("/update", update_flops, update_seconds),
    ):
        if seconds > 0:
            rate = flops / seconds / devices
            row[f"perf/tflops_per_device{name}"] = rate / 1e12
            if peak is not None:
                row[f"perf/mfu{name}"] = rate / peak
    return row


# --- reductions ------------------------------------------------------------------------------------------------------


def _spread(name: str, values: np.ndarray) -> Row:
    """`name/mean|max|min` in float64; nothing for no values."""
    if values.size == 0:
        return {}
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        stats = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{key}": float(value) for key, value in stats.items()}


def summarize_rollout(
    *,
    scores: Array,
    response_lengths: Array,
    prompt_lengths: Array,
    end_reason: Array,
    group_size: int,
    max_prompt_length: int | None = None,
    valid: Array | None = None,
    max_score: float | None = 1.0,
    min_score: float | None = 0.0,
    answer_found: Array | None = None,
) -> Row:
    """Scores, lengths and groups of a rollout, `B = P * G` rows with the members of a group adjacent.

    `scores [B]` before any KL penalty; `response_lengths [B]`, `prompt_lengths [P or B]` in tokens; `end_reason [B]` as in
    `records`; `answer_found [B]` whether the grader saw an answer. Rows outside `valid [B]` count nowhere; rows with a score
    that is not finite count in the lengths and in `reward/not_finite` only.

    Shares are 0 to 1: `response_length/clip_ratio` (ended by the length limit), `prompt_length/clip_ratio` (as long as
    allowed), `response/aborted_ratio` (no token at all), `groups/no_signal` (all scores of a group equal up to 1e-6, so no
    gradient), `groups/all_right` and `groups/all_wrong` (every score >= `max_score`, <= `min_score`; `None` leaves them out).
    Group shares are over groups with at least one counted score; groups of one are not reported, and neither is a mean of
    nothing.
    """
    scores = np.asarray(scores, np.float64)
    keep = np.ones(scores.shape, bool) if valid is None else np.asarray(valid, bool)
    finite = keep & np.isfinite(scores)
    lengths = np.asarray(response_lengths)[keep]
    prompts = np.asarray(prompt_lengths)
    if prompts.shape != scores.shape:
        prompts = np.repeat(prompts, group_size)
    row = _spread("critic/score", scores[finite]) | _spread("response_length", lengths)
    row |= _spread("prompt_length", prompts[keep])
    if keep.any():
        row["response_length/clip_ratio"] = float(
            (np.asarray(end_reason)[keep] == END_LENGTH).mean()
        )
        row["response/aborted_ratio"] = float((lengths == 0).mean())
        row["reward/not_finite"] = float((keep & ~finite).sum() / keep.sum())
        if max_prompt_length is not None:
            row["prompt_length/clip_ratio"] = float((prompts[keep] >= max_prompt_length).mean())
        if answer_found is not None:
            row["reward/answer_found"] = float(np.asarray(answer_found, bool)[keep].mean())
    if group_size > 1 and finite.any():
        grouped, counted = scores.reshape(-1, group_size), finite.reshape(-1, group_size)
        some = counted.any(1)
        best = np.where(counted, grouped, -np.inf).max(1)[some]
        worst = np.where(counted, grouped, np.inf).min(1)[some]
        row["groups/no_signal"] = float(
            (best - worst <= 1e-6 * np.maximum(1.0, np.abs(best))).mean()
        )
        if max_score is not None:
            row["groups/all_right"] = float((worst >= max_score).mean())
        if min_score is not None:
            row["groups/all_wrong"] = float((best <= min_score).mean())
    return row


Moments = tuple[int, float, float, float, float]
"""Count, mean, sum of squared deviations from it, maximum, minimum."""


def _moments(values: np.ndarray) -> Moments:
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        mean = float(values.mean())
        spread = float(np.square(values - mean).sum())
        return values.size, mean, spread, float(values.max()), float(values.min())


def _joined(parts: Sequence[Moments]) -> Moments:
    """Moments of all values from those of parts (Chan, Golub and LeVeque, 1983)."""
    if len(parts) == 1:
        return parts[0]
    counts, means, spreads, most, least = np.array(parts, np.float64).T
    mean = float((counts * means).sum() / counts.sum())
    spread = float(spreads.sum() + (counts * np.square(means - mean)).sum())
    return int(counts.sum()), mean, spread, float(most.max()), float(least.min())


def batch_part(
    *,
    mask: Array,
    advantages: Array,
    returns: Array | None = None,
    values: Array | None = None,
    token_rewards: Array | None = None,
    old_logprobs: Array | None = None,
    sampler_logprobs: Array | None = None,
    valid: Array | None = None,
) -> dict[str, Moments]:
    """What `summarize_batch` has to know of some rows of a batch (its arguments); nothing without a trained token."""
    trained = np.asarray(mask).astype(bool)
    if valid is not None:
        trained = trained & np.asarray(valid, bool)[:, None]
    if not trained.any():
        return {}

    def tokens(array: Array) -> np.ndarray:
        return np.asarray(array)[trained].astype(np.float64)

    part = {"critic/advantages": tokens(advantages)}
    with np.errstate(invalid="ignore"):
        if token_rewards is not None:
            per_row = np.where(trained, np.asarray(token_rewards, np.float64), 0.0).sum(1)
            part["critic/rewards"] = per_row[trained.any(1)]
        if returns is not None:
            part["critic/returns"] = tokens(returns)
        if values is not None:
            part["critic/values"] = tokens(values)
        if returns is not None and values is not None:
            part["error"] = tokens(returns) - tokens(values)
        if old_logprobs is not None and sampler_logprobs is not None:
            part["rollout/logprob_gap"] = np.abs(tokens(old_logprobs) - tokens(sampler_logprobs))
    return {name: _moments(array) for name, array in part.items()}


def join_batch(parts: Sequence[Mapping[str, Moments]]) -> Row:
    """The row of a batch from the `batch_part` of each process; parts without a trained token count nothing."""
    found = [part for part in parts if part]
    if not found:
        return {}
    row: Row = {}
    whole = {name: _joined([part[name] for part in found]) for name in found[0]}
    with np.errstate(invalid="ignore"):
        for name, (count, mean, spread, most, least) in whole.items():
            if name == "error":
                returns = whole["critic/returns"]
                share = spread / count / (returns[2] / returns[0] + 1e-5)
                row["critic/vf_explained_var"] = 1.0 - share
                continue
            row |= {f"{name}/mean": mean, f"{name}/max": most}
            if name != "rollout/logprob_gap":
                row[f"{name}/min"] = least
            if name == "critic/advantages":
                row[f"{name}/std"] = float(np.sqrt(spread / count))
    return row


def summarize_batch(**arrays: Any) -> Row:
    """What the update is about to see, over trained tokens (`mask [B T]`) of valid rows (`valid [B]`); all others `[B T]`.

    `critic/advantages|returns|values/mean|max|min`, `critic/advantages/std` (ddof 0), `critic/rewards/...` per row: the sum of
    its token rewards, after the KL penalty. `critic/vf_explained_var = 1 - var(returns - values) / (var(returns) + 1e-5)`.
    `rollout/logprob_gap/mean|max` of `|old - sampler|`. NaN in a trained token shows as NaN; without a trained token the row
    is empty. Arguments as of `batch_part`.
    """
    return join_batch([batch_part(**arrays)])
