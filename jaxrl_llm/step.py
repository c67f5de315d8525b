"""One training step and one validation, as chains of pure functions with the host's part in between.

    prompts -> rollout -> rewards -> log-probs, values -> advantages -> updates -> a row of metrics

Left out on purpose: what happens around steps (checkpoints, files, the end of a run); see `trainer`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import evaluation, exchange, fault, metrics, packing, report, runtime, sharding
from jaxrl_llm.assembly import Parts
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.config import needs_reference
from jaxrl_llm.console import Progress
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.layouts import pack_all
from jaxrl_llm.packing import Layout, Packed
from jaxrl_llm.processes import Meetings
from jaxrl_llm.records import Batch, Prompt, Rollout, TrainState
from jaxrl_llm.rewards.grader import Grade, Grader, Sample, broken_batch
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.engine import Stats, generate

Row = dict[str, Any]
Packs = dict[Layout, Packed]

EXAMPLES = 3
"""Responses that an alarm about answers can show."""


@dataclass
class Run:
    """The happenings around a run: folder, signals, sinks, graders, checkpoints, clocks."""

    folder: Path
    signals: runtime.Signals
    grader: Grader
    keys: Iterator[int]
    log: metrics.MetricsLog
    progress: Progress
    saver: Checkpointer
    phases: metrics.Phases
    compilations: metrics.CompileCounter
    history: list[Row]
    samples: list[Row] = field(default_factory=list)
    """Samples of the last step, for the completions file and for alarms; empty after a bad rollout."""
    failure_told: bool = False
    """Whether the first failure of a reward function has been printed."""

    @property
    def meet(self) -> Meetings:
        """Where the processes of the run meet."""
        return self.signals.meet


@dataclass(frozen=True)
class Graded:
    """A finished rollout of all processes with its grades, row by row, and how long the slowest decoded; no grades where logits were not
    finite."""

    rollout: Rollout
    grades: list[Grade]
    stats: Stats
    seconds: float

    def texts(self, parts: Parts, rows: Sequence[int]) -> list[str]:
        """The responses of some rows."""
        ids, lengths = self.rollout.response_tokens, self.rollout.response_lengths
        return [parts.tokenizer.decode(ids[row, : lengths[row]].tolist()) for row in rows]


def train_step(parts: Parts, run: Run, state: TrainState, step: int) -> tuple[TrainState, Row]:
    """One step: sample, grade, score, advantages, update. Returns the new state and the row of metrics.

    A signal before the update abandons the step (`StopRequested`) and leaves the state as it was. A batch with non-finite
    logits or without a valid reward is thrown away: a bad step that moves no parameter and no moment. Every process decides alike,
    on what all have told.
    """
    run.phases.reset()
    run.samples = []
    with run.phases("step"):
        state, row, learned = _attempt(parts, run, state, step)
    skipped = int(row.get("actor/skipped_updates", 0) + row.get("critic/skipped_updates", 0))
    state = _count(parts, state, step, bad=skipped > 0 or learned is None, skipped=skipped)
    return state, row | _common(parts, run, state, step, learned)


def _attempt(
    parts: Parts, run: Run, state: TrainState, step: int
) -> tuple[TrainState, Row, Rollout | None]:
    """The new state, the row so far, and the rollout it learned from: `None` where it was thrown away before the update."""
    config, phases = parts.config, run.phases
    prompts = _draw(parts, run)
    fault.point("after_data", step)
    graded = sample(parts, run, state, prompts, step, "train")
    if graded.rollout.bad:
        return state, {"rollout/non_finite_rows": graded.rollout.bad}, None
    state = _watch_rewards(parts, state, graded.grades)
    _tell_first_failure(run, graded.grades)
    scores = np.array([grade.score for grade in graded.grades], np.float64)
    row = report.rollout_row(parts, graded.rollout, graded.grades, scores)
    row |= report.engine_row(graded.stats, graded.seconds, parts.mesh.size)
    count = min(max(config.trainer.log_completions_count, EXAMPLES), len(prompts))
    shown = graded.texts(parts, range(0, count * config.rollout.n, config.rollout.n))
    run.samples = report.samples(prompts, shown, scores, config.rollout.n)
    if not np.isfinite(scores).any():
        return state, row, None
    batch, packs, packed_as = _score(parts, run, state, graded.rollout, scores, step)
    row |= packed_as
    with phases("adv"):
        batch, algorithm, numbers = parts.prepare(batch, state.algorithm)
        row |= {name: float(value) for name, value in numbers.items()}
        row |= report.batch_row(batch, run.meet)
    fault.point("after_advantage", step)
    run.signals.agree("before the update")
    fault.point("before_update", step)
    state, numbers = _update(parts, run, replace(state, algorithm=algorithm), batch, packs, step)
    return state, row | numbers, graded.rollout


def _draw(parts: Parts, run: Run) -> list[Prompt]:
    """The prompts of the next global batch, in its order: each process draws its own share and tells the others."""
    run.signals.agree("before the step")
    indices = run.meet.gather("prompts", parts.stream.next().tolist())
    drawn = [index for share in indices for index in share]
    if len(set(drawn)) < len(drawn):
        raise RuntimeError("processes drew the same prompts; the data streams have come apart")
    return [parts.train.prompts[index] for index in drawn]


def _score(
    parts: Parts, run: Run, state: TrainState, rollout: Rollout, scores: np.ndarray, step: int
) -> tuple[Batch, Packs, Row]:
    """The batch on the devices with the log-probs and values that the advantages and the loss need, its packed rows, and what
    packing came to."""
    config, phases, layouts = parts.config, run.phases, parts.layouts
    with phases("pack"):
        host = packing.make_batch(
            rollout, scores, np.isfinite(scores), config.data.max_response_length
        )
        batch = sharding.put_rows(parts.mesh, host)
        seed = config.trainer.seed or 0
        packs, row = pack_all(layouts, rollout, parts.mesh, seed=seed, step=step)
    temperature = np.float32(parts.temperature)
    run.signals.poll()
    if parts.old_logprobs_needed:
        with phases("old_log_prob"):
            old = parts.score(state.actor.trainable, packs[layouts.score], temperature).logprobs
            batch = replace(batch, old_logprobs=jax.block_until_ready(old))
        run.signals.poll()
    if needs_reference(config):
        with phases("ref"):
            frozen = parts.score_reference(parts.frozen, packs[layouts.reference], temperature)
            batch = replace(batch, ref_logprobs=jax.block_until_ready(frozen.logprobs))
        run.signals.poll()
    if state.critic is not None and parts.values is not None:
        with phases("values"):
            values = parts.values(state.critic.trainable, packs[layouts.critic])
            batch = replace(batch, values=jax.block_until_ready(values))
        run.signals.poll()
    return batch, packs, row


def _update(
    parts: Parts, run: Run, state: TrainState, batch: Batch, packs: Packs, step: int
) -> tuple[TrainState, Row]:
    """Critic first, then the policy (not during the critic's warm-up); the old state is donated."""
    config, layouts = parts.config, parts.layouts
    row: Row = {}
    if parts.critic is not None and state.critic is not None:
        with run.phases("update_critic"):
            critic, numbers = parts.critic.update(
                state.critic, batch, packs[layouts.critic], state.algorithm
            )
            row |= report.critic_row(jax.device_get(numbers))
        state = replace(state, critic=critic)
    if parts.critic is None or step > config.trainer.critic_warmup:
        with run.phases("update_actor"):
            actor, numbers = parts.actor.update(
                state.actor, batch, packs[layouts.actor], state.algorithm
            )
            row |= report.actor_row(jax.device_get(numbers), gap=not parts.old_logprobs_needed)
        state = replace(state, actor=actor)
    return state, row


# Sampling and grading ------------------------------------------------------------------------------------------------


def sample(
    parts: Parts, run: Run, state: TrainState, prompts: Sequence[Prompt], step: int, kind: str
) -> Graded:
    """Sample responses (`train`, `greedy` or `validate`), grading each from the moment it ends.

    Each process works on its share of `prompts` on its own devices; then all have the rollout and the grades of all. With non-finite
    logits on some process nothing is graded: `rollout.bad` is set and the grades are empty. Raises `StopRequested` on every process
    where a signal came to one.
    """
    rollout, grades, stats, stopped = _sample_share(
        parts, run, state, exchange.share(prompts), step, kind
    )
    with _timed(run, kind)("exchange"):
        return _joined(run, prompts, rollout, grades, stats, stopped)


def _timed(run: Run, kind: str) -> Callable[[str], AbstractContextManager[None]]:
    """The clocks of a step; sampling for a validation is timed as a whole, elsewhere."""
    return run.phases if kind == "train" else lambda name: nullcontext()


def _joined(
    run: Run,
    prompts: Sequence[Prompt],
    rollout: Rollout | None,
    grades: list[Grade],
    stats: Stats | None,
    stopped: bool,
) -> Graded:
    """What all processes have sampled and graded, on each of them; waits for the slowest."""
    failures = [grade.failure for grade in grades if grade.failure]
    told = run.meet.gather(
        "rollout",
        {
            "stopped": stopped or run.signals.requested,
            "bad": rollout.bad if rollout else 0,
            "failure": failures[0] if failures else None,
            "parts": list(dict.fromkeys(name for grade in grades for name in grade.parts)),
            "stats": vars(stats) if stats else {},
            "seconds": run.phases.row().get("timing_s/gen", 0.0),
        },
    )
    if any(said["stopped"] for said in told) or rollout is None:
        raise runtime.StopRequested
    costs = exchange.all_stats([Stats(**said["stats"]) for said in told])
    seconds = max(said["seconds"] for said in told)
    bad = sum(said["bad"] for said in told)
    if bad:
        return Graded(replace(rollout, bad=bad), [], costs, seconds)
    heard = [said["failure"] for said in told]
    names = dict.fromkeys([*run.grader.names, *(name for said in told for name in said["parts"])])
    rollout, grades = exchange.all_rows(rollout, grades, tuple(names), heard, len(prompts))
    return Graded(rollout, grades, costs, seconds)


def _sample_share(
    parts: Parts, run: Run, state: TrainState, prompts: Sequence[Prompt], step: int, kind: str
) -> tuple[Rollout | None, list[Grade], Stats | None, bool]:
    """This process's rollout, grades and costs, and whether a signal cut it short."""
    n = {"train": parts.config.rollout.n, "greedy": 1, "validate": parts.config.validation.n}[kind]
    batch_size = (
        parts.config.data.train_batch_size if kind == "train" else parts.config.data.val_batch_size
    )
    keys = {}

    def hand_over(index: int, ids: list[int]) -> None:
        keys[index] = next(run.keys)
        prompt = prompts[index // n]
        run.grader.submit(
            keys[index],
            Sample(
                prompt=prompt.text,
                response=parts.tokenizer.decode(ids),
                answer=prompt.answer,
                data_source=prompt.data_source,
                extra_info=prompt.extra_info,
                response_length=len(ids),
            ),
        )

    def between_chunks() -> None:
        fault.point("in_rollout" if kind == "train" else "in_eval", step)
        run.signals.poll_apart()

    timed = _timed(run, kind)
    try:
        with timed("gen"):
            rollout, stats = generate(
                parts.engine,
                parts.handover(state.actor.trainable),
                prompts,
                n=n,
                sampling=_sampling(parts, kind),
                seed=parts.config.trainer.seed or 0,
                step=step,
                purpose=sampling.TRAIN if kind == "train" else sampling.VALIDATE,
                slots=exchange.share_size(batch_size or len(prompts)),
                on_finished=hand_over,
                poll=between_chunks,
            )
        with timed("reward"):
            if kind == "train":
                fault.point("in_reward", step)
            run.signals.poll_apart()
            grades = run.grader.collect(keys.values())
    except runtime.StopRequested:
        return None, [], None, True
    if rollout.bad:
        return rollout, [], stats, False
    return rollout, [grades[keys[row]] for row in range(len(prompts) * n)], stats, False


def _sampling(parts: Parts, kind: str) -> sampling.Sampling:
    knobs, val = parts.config.rollout, parts.config.validation
    if kind == "greedy" or (kind == "train" and not knobs.do_sample):
        return sampling.make_sampling(greedy=True)
    if kind == "train":
        return sampling.make_sampling(knobs.temperature, knobs.top_k, knobs.top_p)
    return sampling.make_sampling(val.temperature, val.top_k, val.top_p)


def validate(parts: Parts, run: Run, state: TrainState, step: int) -> Row:
    """Held-out metrics; keeps a table of samples in `completions/`."""
    assert parts.val is not None
    fault.point("in_eval", step)
    config = parts.config

    def graded(prompts: Sequence[Prompt], greedy: bool) -> tuple[Rollout, list[Grade], list[str]]:
        result = sample(parts, run, state, prompts, step, "greedy" if greedy else "validate")
        if result.rollout.bad:
            raise TrainingStopped(
                f"validation at step {step}: {result.rollout.bad} responses had non-finite logits; the weights are broken: "
                "go back to an earlier checkpoint with trainer.resume_from_path"
            )
        return result.rollout, result.grades, result.texts(parts, range(len(result.grades)))

    row, samples = evaluation.evaluate(
        parts.val.prompts,
        batch_size=config.data.val_batch_size or config.data.train_batch_size,
        n=config.validation.n,
        sample=graded,
        vote=report.voter(config.reward),
        correctness=run.grader.names[0],
    )
    run.log.completions(step, [{"split": "validation", **entry} for entry in samples])
    return row


# Counting ------------------------------------------------------------------------------------------------------------


def _tell_first_failure(run: Run, grades: list[Grade]) -> None:
    """Print the first failure of a reward function, once per run, whatever share of the batch failed."""
    failures = [grade.failure for grade in grades if grade.failure]
    if failures and not run.failure_told:
        run.failure_told = True
        run.progress.say(f"the first failed reward call of this run: {failures[0].strip()}")


def _watch_rewards(parts: Parts, state: TrainState, grades: list[Grade]) -> TrainState:
    """Count batches in which too many reward calls fail; three in a row stop the run with the first traceback."""
    first = broken_batch(grades, parts.config.reward.max_failed_share)
    broken = int(state.counters.broken_reward_batches) + 1 if first else 0
    if broken >= 3:
        raise TrainingStopped(
            f"more than {parts.config.reward.max_failed_share:.0%} of the reward calls failed in {broken} batches in a row; "
            f"mend the reward function. The first failure:\n{first}"
        )
    counters = replace(state.counters, broken_reward_batches=scalar(parts, broken))
    return replace(state, counters=counters)


def _count(parts: Parts, state: TrainState, step: int, *, bad: bool, skipped: int) -> TrainState:
    old = state.counters
    counters = replace(
        old,
        bad_steps=scalar(parts, int(old.bad_steps) + bad),
        bad_in_a_row=scalar(parts, int(old.bad_in_a_row) + 1 if bad else 0),
        skipped_updates=scalar(parts, int(old.skipped_updates) + skipped),
    )
    return replace(state, step=scalar(parts, step), counters=counters)


def scalar(parts: Parts, value: int) -> jax.Array:
    """A host count as it lies in the state: int32, replicated."""
    return sharding.put(np.int32(value), sharding.replicated(parts.mesh))


def _common(parts: Parts, run: Run, state: TrainState, step: int, learned: Rollout | None) -> Row:
    """What every row holds: progress, counts of bad steps, times, speed, compilations, memory. The last four are this process's, so
    those of process 0 in the log; `timing_s/exchange` holds its waiting for slower rollouts."""
    times = run.phases.row()
    seconds = times["timing_s/step"]
    tokens = report.tokens(learned, parts.config.rollout.n) if learned else 0
    return {
        "training/global_step": step,
        "training/epoch": parts.stream.epoch,
        "training/bad_steps": int(state.counters.bad_steps),
        "training/skipped_updates": int(state.counters.skipped_updates),
        **times,
        **metrics.throughput(tokens, seconds, parts.mesh.size),
        **(report.speed_row(parts, learned, times, step) if learned else {}),
        **run.compilations.row(),
        **metrics.memory(),
    }
