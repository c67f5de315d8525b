"""Held-out accuracy: greedy mean@1, and with several samples mean@n, best@n and maj@n, per data source.

`acc` is the first reward function's value, `reward` the weighted sum, `answer_found` the share of responses in which the grader
saw an answer at all, so that a gain in answers can be told from a gain in format.

Left out on purpose: confidence intervals and pass@k for k below n.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.records import Prompt, Rollout
from jaxrl_llm.rewards.grader import Grade

Sampler = Callable[[Sequence[Prompt], bool], tuple[Rollout, list[Grade], list[str]]]


def majority(votes: Sequence[str | None], right: Sequence[float]) -> float:
    """The correctness of the most frequent answer (first seen wins a tie); 0 when no response holds an answer.

    `votes` are the answers that responses gave, `None` for none; a vote counts as right as its first response.
    """
    counted = Counter(vote for vote in votes if vote is not None)
    if not counted:
        return 0.0
    winner = counted.most_common(1)[0][0]
    return float(right[list(votes).index(winner)])


def group_metrics(right: np.ndarray, votes: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """`acc/mean@n`, `acc/best@n`, `acc/maj@n` from correctness `[P n]` and the answers given."""
    n = right.shape[1]
    major = [majority(vote, row) for vote, row in zip(votes, right, strict=True)]
    return {
        f"acc/mean@{n}": float(right.mean()),
        f"acc/best@{n}": float(right.max(axis=1).mean()),
        f"acc/maj@{n}": float(np.mean(major)),
    }


def evaluate(
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    n: int,
    sample: Sampler,
    vote: Callable[[str], str | None],
    correctness: str,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics `val/<data source>/...` over all prompts, and one greedy sample per prompt for the completions file.

    `sample(prompts, greedy)` gives one graded response per prompt (greedy) or `n`: the rollout, grades and texts. `vote` reads the
    answer out of a response for maj@n; `correctness` names the reward function that is `acc`. A failed grading counts
    as 0, and the share of such rows stands in `reward_failed`, a metric that is there only when some failed.
    """
    by_source: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    samples: list[dict[str, Any]] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        rollout, grades, texts = sample(batch, True)
        for row, prompt in enumerate(batch):
            source, entry = by_source[prompt.data_source], grades[row]
            source["acc"].append(_right(entry, correctness))
            source["reward"].append(entry.score if np.isfinite(entry.score) else 0.0)
            source["length"].append(int(rollout.response_lengths[row]))
            source["failed"].append(entry.failure is not None)
            if entry.answer_found is not None:
                source["answer_found"].append(bool(entry.answer_found))
            samples.append(
                {
                    "row_id": prompt.row_id,
                    "prompt": prompt.text,
                    "response": texts[row],
                    "answer": prompt.answer,
                    "score": source["reward"][-1],
                    "acc": source["acc"][-1],
                }
            )
        if n > 1:
            _, grades, texts = sample(batch, False)
            for row, prompt in enumerate(batch):
                here = slice(row * n, (row + 1) * n)
                source = by_source[prompt.data_source]
                source["group"].append([_right(entry, correctness) for entry in grades[here]])
                source["votes"].append([vote(text) for text in texts[here]])
    metrics: dict[str, float] = {}
    for name, values in sorted(by_source.items()):
        metrics[f"val/{name}/acc/mean@1"] = float(np.mean(values["acc"]))
        metrics[f"val/{name}/reward/mean@1"] = float(np.mean(values["reward"]))
        metrics[f"val/{name}/response_length/mean@1"] = float(np.mean(values["length"]))
        if any(values["failed"]):
            metrics[f"val/{name}/reward_failed/mean@1"] = float(np.mean(values["failed"]))
        if values["answer_found"]:
            metrics[f"val/{name}/answer_found/mean@1"] = float(np.mean(values["answer_found"]))
        if n > 1:
            group = group_metrics(np.array(values["group"], float), values["votes"])
            metrics |= {f"val/{name}/{key}": value for key, value in group.items()}
    return metrics, samples


def _right(grade: Grade, correctness: str) -> float:
    value = grade.parts.get(correctness)
    return float(value) if value is not None and np.isfinite(value) else 0.0
