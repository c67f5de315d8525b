"""Alarms: what a row of metrics, seen after the rows before it, says about the health of a run.

Pure functions of rows; nothing is remembered here. `check` lists everything that holds now, `news` what holds since this
row, which is what a loop prints.

Left out on purpose: acting on an alarm. It is advice to a person; skipping bad steps and stopping are the trainer's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.sinks import pick

Row = Mapping[str, Any]

NO_SIGNAL_SHARE = 0.8
ADVANTAGE_STD = 1e-3
CLIP_SHARE = 0.3
KL_NATS = 10.0
KL_TARGETS = 10.0
ENTROPY_LEFT = 0.01
LENGTH_FACTOR = 2.0
LOGPROB_GAP = 1e-2
TRUNCATED_SHARE = 0.5
START_ROWS = 3
"""Rows whose mean length counts as the length at the start."""


@dataclass(frozen=True)
class Alarm:
    """Something to look at: a fixed `name`, a `message` with the numbers, and `advice`."""

    name: str
    message: str
    advice: str

    def __str__(self) -> str:
        return f"[{self.name}] {self.message} {self.advice}"


@dataclass(frozen=True)
class Context:
    """What the readings need besides rows: the KL a controller aims at, and raw response texts of the batch."""

    target_kl: float | None = None
    examples: Sequence[str] = ()


def check(
    row: Row,
    history: Sequence[Row],
    *,
    target_kl: float | None = None,
    examples: Sequence[str] = (),
) -> list[Alarm]:
    """Every alarm that holds for `row`, after the training rows `history` (oldest first), in the order of `READINGS`.

    A metric that the row lacks raises no alarm. `examples`: raw responses, shown when no answer is found.
    """
    context = Context(target_kl, examples)
    found = (reading(row, history, context) for reading in READINGS.values())
    return [alarm for alarm in found if alarm is not None]


def news(
    row: Row,
    history: Sequence[Row],
    *,
    target_kl: float | None = None,
    examples: Sequence[str] = (),
) -> list[Alarm]:
    """The alarms of `check` that did not already hold for the last row of `history`."""
    before = check(history[-1], history[:-1], target_kl=target_kl) if history else []
    known = {alarm.name for alarm in before}
    alarms = check(row, history, target_kl=target_kl, examples=examples)
    return [alarm for alarm in alarms if alarm.name not in known]


def _number(row: Row, key: str) -> float | None:
    """A finite number of the row; NaN and infinities have their own alarm."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _picked(row: Row, name: str) -> float | None:
    value = pick(row, name)
    return value if value is not None and math.isfinite(value) else None


def not_finite(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """NaN or infinity in any metric."""
    bad = [
        key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    if not bad:
        return None
    more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
    return Alarm(
        "not_finite",
        f"{', '.join(f'{key} = {row[key]}' for key in bad[:4])}{more}.",
        "Look for NaN or infinite rewards first, then lower actor.optim.lr or actor.optim.clip_grad, and prefer actor.kl_loss_type=k3 "
        "to k1; if it stays, go back to the last checkpoint with another data seed.",
    )


def reward_failures(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """A reward function failed on some sample: it raised, timed out, died, or returned no finite number."""
    failed = _number(row, "reward/failed")
    if not failed:
        return None
    late = _number(row, "reward/timeout") or 0.0
    return Alarm(
        "reward_failures",
        f"{failed:.0f} samples could not be graded ({late:.0f} of them ran out of time) and were left out of the update.",
        "Run the reward function by itself on a few lines of completions/; reward.timeout_s and reward.memory_limit_mb bound a "
        "call, reward.clip_min and reward.clip_max hold huge values.",
    )


def no_signal(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """More than 80 % of the groups have equal rewards, so nearly the whole batch gives no gradient."""
    share = _number(row, "groups/no_signal")
    if share is None or share <= NO_SIGNAL_SHARE:
        return None
    right, wrong = _number(row, "groups/all_right") or 0.0, _number(row, "groups/all_wrong") or 0.0
    if right > share / 2:
        advice = "The prompts are too easy by now: give harder ones, or stop here."
    elif wrong > share / 2:
        advice = (
            "Most groups are never right: check the grader and the answer format on a few samples, start with easier prompts, "
            "or raise rollout.n."
        )
    else:
        advice = "Samples of a prompt hardly differ: raise rollout.temperature or rollout.n, or use a finer reward."
    return Alarm(
        "no_signal",
        f"{share:.0%} of the groups have equal rewards (all right {right:.0%}, all wrong {wrong:.0%}) and teach nothing.",
        advice,
    )


def flat_advantages(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """The standard deviation of the advantages is below 1e-3."""
    std = _number(row, "critic/advantages/std")
    if std is None or std >= ADVANTAGE_STD:
        return None
    return Alarm(
        "flat_advantages",
        f"The advantages have a standard deviation of {std:.1g}: good and bad samples look the same.",
        "Raise rollout.temperature or rollout.n, use prompts of mixed difficulty, and score a clearly good and a clearly bad "
        "answer by hand to see that the reward tells them apart.",
    )


def clipping(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """More than 30 % of the tokens are clipped."""
    share = _picked(row, "clip")
    if share is None or share <= CLIP_SHARE:
        return None
    return Alarm(
        "clipping",
        f"{share:.0%} of the tokens are clipped: the updates are too large.",
        "Lower actor.optim.lr, take fewer ppo_epochs or larger mini-batches, or widen actor.clip_ratio.",
    )


def divergence(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """KL above 10 nats, or above ten times the controller's target."""
    kl = _picked(row, "kl")
    target = context.target_kl
    if kl is None or not (kl > KL_NATS or (target is not None and kl > KL_TARGETS * target)):
        return None
    against = f", {kl / target:.0f} times the target of {target:g}" if target else ""
    return Alarm(
        "divergence",
        f"KL is {kl:.3g} nats per token{against}: the policy runs away from where it started.",
        "Raise the KL coefficient and lower actor.optim.lr; read samples for a reward that is being gamed.",
    )


def entropy_collapse(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """Entropy below 1 % of its first positive value."""
    entropy = _picked(row, "entropy")
    starts = (
        value for value in (_picked(old, "entropy") for old in history) if value and value > 0
    )
    start = next(starts, None)
    if entropy is None or start is None or entropy >= ENTROPY_LEFT * start:
        return None
    return Alarm(
        "entropy_collapse",
        f"Entropy fell from {start:.3g} to {entropy:.2g} nats per token: the policy repeats itself and explores no more.",
        "Raise rollout.temperature, widen actor.clip_ratio_high, add a small actor.entropy_coeff or a KL term, or lower the "
        "learning rate.",
    )


def no_answer(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """The grader found no answer in any response of two batches in a row."""
    key = "reward/answer_found"
    if not history or _number(row, key) != 0 or _number(history[-1], key) != 0:
        return None
    shown = "".join(
        f"\n  {index}: {text[-200:]!r}" for index, text in enumerate(context.examples[:3], 1)
    )
    return Alarm(
        "no_answer",
        "No answer was found in any response of two batches: format and grader do not fit.",
        "Say in the prompt how to write the answer, or use a grader that reads what the model writes (such as "
        f"reward.gsm8k_method=flexible).{' Ends of responses:' if shown else ''}{shown}",
    )


def length_drift(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """Mean response length more than twice, or less than half, the mean of the first three rows."""
    length = _picked(row, "length")
    lengths = [value for value in (_picked(old, "length") for old in history) if value is not None]
    if length is None or len(lengths) < START_ROWS:
        return None
    start = sum(lengths[:START_ROWS]) / START_ROWS
    if length > LENGTH_FACTOR * start:
        return Alarm(
            "length_growth",
            f"Responses grew from {start:.0f} to {length:.0f} tokens.",
            "Fine where longer reasoning pays; otherwise the reward likes length: correct it, or add length_penalty (about "
            "0.001 per token) to reward.functions.",
        )
    if length < start / LENGTH_FACTOR:
        return Alarm(
            "length_shrink",
            f"Responses shrank from {start:.0f} to {length:.0f} tokens.",
            "The loss may favour short answers: compare actor.loss_agg_mode (token-mean, seq-mean-token-sum-norm) and look "
            "whether a length penalty outweighs the reward.",
        )
    return None


def logprob_gap(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """Sampler and trainer disagree by more than 1e-2 nats per token on average."""
    gap = _number(row, "rollout/logprob_gap/mean")
    if gap is None or gap <= LOGPROB_GAP:
        return None
    return Alarm(
        "logprob_gap",
        f"Sampler and trainer differ by {gap:.2g} nats per token (at most {LOGPROB_GAP:g} is rounding): the update is off-policy.",
        "Use one dtype for both (float32 settles whether it is rounding); a gap that stays is a bug in cache, positions or "
        "temperature, please report it.",
    )


def truncation(row: Row, history: Sequence[Row], context: Context) -> Alarm | None:
    """More than half of the responses end at the length limit."""
    share = _number(row, "response_length/clip_ratio")
    if share is None or share <= TRUNCATED_SHARE:
        return None
    return Alarm(
        "truncation",
        f"{share:.0%} of the responses hit the length limit, so their answers are never seen.",
        "Raise data.max_response_length, or look at samples: a model that never ends needs its chat template and end token "
        "checked.",
    )


READINGS: dict[str, Callable[[Row, Sequence[Row], Context], Alarm | None]] = {
    "not_finite": not_finite,
    "reward_failures": reward_failures,
    "no_signal": no_signal,
    "flat_advantages": flat_advantages,
    "clipping": clipping,
    "divergence": divergence,
    "entropy_collapse": entropy_collapse,
    "no_answer": no_answer,
    "length_drift": length_drift,
    "logprob_gap": logprob_gap,
    "truncation": truncation,
}
"""All readings, in the order of their alarms."""
