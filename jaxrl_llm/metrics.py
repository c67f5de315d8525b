"""Numbers of a step: reduce them, count compilations, time phases; the sinks they go to are those of `sinks`.

Names follow verl where verl has the number. The reductions take host arrays of the whole batch, so a mean is over all
processes' rows or tokens; `merge_rows` is for parts that were reduced apart.

Left out on purpose: means of means, histograms.
"""

import functools
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
    "Row",
    "merge_rows",
    "open_sinks",
    "peak_rss_mb",
    "pick",
    "read_rows",
    "redact",
    "redact_text",
    "summarize_batch",
    "summarize_rollout",
    "throughput",
    "truncate",
]


# --- counting and timing ---------------------------------------------------------------------------------------------


@functools.cache
def _compile_seconds() -> list[float]:
    """One entry per compilation of this process since the first call; the listener is registered once."""
    import jax

    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


class CompileCounter:
    """Counts XLA compilations of this process, loads from the persistent cache included, from its creation on."""

    def __init__(self) -> None:
        self._seen = len(_compile_seconds())

    def delta(self) -> int:
        """Compilations since the last call of `delta` or `row` (first call: since creation)."""
        return int(self.row()["perf/compilations"])

    def row(self) -> Row:
        """`perf/compilations` and the seconds they took, `perf/compile_s`, since the last call."""
        fresh = _compile_seconds()[self._seen :]
        self._seen += len(fresh)
        return {"perf/compilations": len(fresh), "perf/compile_s": sum(fresh)}


class Phases:
    """Wall-clock seconds per phase: `with phases("gen"): ...` adds to `timing_s/gen`; a nested phase counts in both."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._seconds = clock, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def row(self) -> Row:
        """`timing_s/<phase>` of every phase since the last `reset`."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Start again from no phases."""
        self._seconds.clear()


def peak_rss_mb() -> float:
    """The largest resident memory of this process so far, in MB (2^20 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def throughput(tokens: int, seconds: float, devices: int) -> Row:
    """Tokens per second and device of a step, `tokens` counted over all devices; no speed where no time passed."""
    row: Row = {"perf/total_num_tokens": int(tokens), "perf/time_per_step": float(seconds)}
    return row | ({"perf/throughput": tokens / seconds / devices} if seconds > 0 else {})


# --- reductions ------------------------------------------------------------------------------------------------------


def merge_rows(rows: Sequence[Mapping[str, float]], weights: Sequence[float]) -> Row:
    """One row from the rows of several processes or mini-batches: means weighted by tokens, `*/max` and `*/min` as such.

    A metric that some rows lack is averaged over those that have it; rows of weight 0 never count (their mean is undefined).
    """
    merged: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        pairs = [
            (row[key], w) for row, w in zip(rows, weights, strict=True) if key in row and w > 0
        ]
        if pairs:
            extreme = {"max": max, "min": min}.get(key.rpartition("/")[2])
            total = sum(w for _, w in pairs)
            merged[key] = (
                extreme(v for v, _ in pairs) if extreme else sum(v * w for v, w in pairs) / total
            )
    return merged


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


def summarize_batch(
    *,
    mask: Array,
    advantages: Array,
    returns: Array | None = None,
    values: Array | None = None,
    token_rewards: Array | None = None,
    old_logprobs: Array | None = None,
    sampler_logprobs: Array | None = None,
    valid: Array | None = None,
) -> Row:
    """What the update is about to see, over trained tokens (`mask [B T]`) of valid rows (`valid [B]`); all others `[B T]`.

    `critic/advantages|returns|values/mean|max|min`, `critic/advantages/std` (ddof 0), `critic/rewards/...` per row: the sum of
    its token rewards, after the KL penalty. `critic/vf_explained_var = 1 - var(returns - values) / (var(returns) + 1e-5)`.
    `rollout/logprob_gap/mean|max` of `|old - sampler|`. NaN in a trained token shows as NaN; without a trained token the row
    is empty.
    """
    trained = np.asarray(mask).astype(bool)
    if valid is not None:
        trained = trained & np.asarray(valid, bool)[:, None]
    if not trained.any():
        return {}

    def tokens(array: Array) -> np.ndarray:
        return np.asarray(array)[trained].astype(np.float64)

    row = _spread("critic/advantages", tokens(advantages))
    with np.errstate(invalid="ignore"):
        row["critic/advantages/std"] = float(tokens(advantages).std())
        if token_rewards is not None:
            per_row = np.where(trained, np.asarray(token_rewards, np.float64), 0.0).sum(1)
            row |= _spread("critic/rewards", per_row[trained.any(1)])
        if returns is not None:
            row |= _spread("critic/returns", tokens(returns))
        if values is not None:
            row |= _spread("critic/values", tokens(values))
        if returns is not None and values is not None:
            error = (tokens(returns) - tokens(values)).var()
            row["critic/vf_explained_var"] = float(1.0 - error / (tokens(returns).var() + 1e-5))
        if old_logprobs is not None and sampler_logprobs is not None:
            gap = _spread(
                "rollout/logprob_gap", np.abs(tokens(old_logprobs) - tokens(sampler_logprobs))
            )
            row |= {key: value for key, value in gap.items() if not key.endswith("/min")}
    return row
