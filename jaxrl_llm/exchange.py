"""What each process sampled and graded becomes the batch of all: rows travel between hosts, so that packing, statistics and updates are
those of one process.

Left out on purpose: texts (`step` decodes the few that are shown) and the texts of failures but the first of each process.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrl_llm import processes
from jaxrl_llm.records import Rollout
from jaxrl_llm.rewards.grader import Grade
from jaxrl_llm.rollout.engine import Stats

T = TypeVar("T")

PROMPT_FIELDS = ("prompt_tokens", "prompt_lengths")
ROW_FIELDS = (
    "response_tokens", "response_lengths", "response_mask", "loss_mask", "sampler_logprobs", "filtered_logprobs", "end_reason",
    "policy_step",
)  # fmt: skip


def share_size(total: int) -> int:
    """Prompts of a process where `total` are shared out: the last processes may have fewer."""
    return -(-total // jax.process_count())


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's block of `items`, in order. A process for which none is left works on the first one, which nobody counts twice."""
    size = share_size(len(items))
    first = jax.process_index() * size
    return items[first : first + size] or items[:1]


def all_rows(
    rollout: Rollout,
    grades: Sequence[Grade],
    names: Sequence[str],
    failures: Sequence[str | None],
    prompts: int,
) -> tuple[Rollout, list[Grade]]:
    """The rollouts and grades of all processes, of `prompts` prompts in their order, on every process.

    This process's rollout is over its `share` of the prompts; `failures` are the first failed grading of each process, in words. Shorter
    shares are filled up for the journey.
    """
    if jax.process_count() == 1:
        return rollout, list(grades)
    size = share_size(prompts)
    n = len(rollout.response_lengths) // len(rollout.prompt_lengths)
    arrays = {name: getattr(rollout, name) for name in PROMPT_FIELDS}
    arrays |= {name: getattr(rollout, name) for name in ROW_FIELDS}
    arrays |= _spelled(grades, names)
    filled = {
        name: _filled(array, size if name in PROMPT_FIELDS else size * n)
        for name, array in arrays.items()
        if array is not None
    }
    found: dict[str, np.ndarray] = processes.gather_rows(filled)
    found = {
        name: array[: prompts if name in PROMPT_FIELDS else prompts * n]
        for name, array in found.items()
    }
    fields: dict[str, Any] = {name: found[name] for name in (*PROMPT_FIELDS, *ROW_FIELDS) if name in found}  # fmt: skip
    return replace(rollout, **fields), _read(found, names, failures, size * n)


def _filled(array: np.ndarray, rows: int) -> np.ndarray:
    """An array of so many rows: cut, or filled with zeros."""
    missing = rows - len(array)
    if missing <= 0:
        return array[:rows]
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])


def _spelled(grades: Sequence[Grade], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Grades as arrays: an abstention is its own flag, because NaN is a value that a function may give."""
    parts = [[grade.parts.get(name) for name in names] for grade in grades]
    found = {None: -1, False: 0, True: 1}
    return {
        "score": np.array([grade.score for grade in grades], np.float64),
        "parts": np.array(
            [[0.0 if value is None else value for value in row] for row in parts], np.float64
        ),
        "given": np.array([[value is not None for value in row] for row in parts], bool),
        "found": np.array([found[grade.answer_found] for grade in grades], np.int8),
        "failed": np.array([grade.failure is not None for grade in grades], bool),
        "timed_out": np.array([grade.timed_out for grade in grades], bool),
    }


def _read(
    found: dict[str, np.ndarray],
    names: Sequence[str],
    failures: Sequence[str | None],
    rows_each: int,
) -> list[Grade]:
    grades, told = [], set[int]()
    for row, score in enumerate(found["score"].tolist()):
        process, failure = row // rows_each, None
        if found["failed"][row]:
            failure = f"a failure on process {process}"
            if process not in told:
                failure = failures[process] or failure
            told.add(process)
        values = zip(names, found["parts"][row].tolist(), found["given"][row], strict=True)
        grades.append(
            Grade(
                score=score,
                parts={name: value if given else None for name, value, given in values},
                answer_found=(None, False, True)[int(found["found"][row]) + 1],
                failure=failure,
                timed_out=bool(found["timed_out"][row]),
            )
        )
    return grades


def all_stats(stats: Sequence[Stats]) -> Stats:
    """What the rollouts of all processes cost together: sums, the most decode steps, and the share of all slots in use."""
    if len(stats) == 1:
        return stats[0]
    slots = sum(
        one.generated_tokens / one.slot_utilisation for one in stats if one.slot_utilisation
    )
    generated = sum(one.generated_tokens for one in stats)
    return Stats(
        slot_utilisation=generated / slots if slots else 0.0,
        decode_steps=max(one.decode_steps for one in stats),
        prefill_tokens=sum(one.prefill_tokens for one in stats),
        generated_tokens=generated,
    )
