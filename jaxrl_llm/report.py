"""From arrays and grades of a step to the rows and tables that a person reads; names are verl's where verl has them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import flops, hardware, metrics
from jaxrl_llm.assembly import Parts
from jaxrl_llm.config import needs_reference
from jaxrl_llm.console import completions_table
from jaxrl_llm.knobs import RewardKnobs
from jaxrl_llm.networks import critic_plan
from jaxrl_llm.processes import Meetings, own_rows
from jaxrl_llm.records import Batch, Prompt, Rollout
from jaxrl_llm.rewards.grader import Grade, summarize
from jaxrl_llm.rollout.engine import Stats

Row = dict[str, Any]


def rollout_row(parts: Parts, rollout: Rollout, grades: Sequence[Grade], scores: np.ndarray) -> Row:
    """Scores, lengths, groups and reward functions of a rollout."""
    found = [grade.answer_found for grade in grades]
    return summarize(grades) | metrics.summarize_rollout(
        scores=scores,
        response_lengths=rollout.response_lengths,
        prompt_lengths=rollout.prompt_lengths,
        end_reason=rollout.end_reason,
        group_size=parts.config.rollout.n,
        max_prompt_length=parts.config.data.max_prompt_length,
        answer_found=None if None in found else np.array(found, bool),
    )


def engine_row(stats: Stats, seconds: float, devices: int) -> Row:
    """What a rollout cost: share of slots in use, decode steps, prompt tokens read, response tokens per second (and per device)."""
    row: Row = {
        "rollout/slot_utilisation": stats.slot_utilisation,
        "rollout/decode_steps": stats.decode_steps,
        "rollout/prefill_tokens": stats.prefill_tokens,
        "rollout/generated_tokens": stats.generated_tokens,
    }
    if seconds > 0:
        row["perf/rollout_tokens_per_s"] = stats.generated_tokens / seconds
        row["perf/rollout_tokens_per_s_per_device"] = stats.generated_tokens / seconds / devices
    return row


def speed_row(parts: Parts, rollout: Rollout, times: Row, step: int) -> Row:
    """Model FLOPs over the seconds of a step and of its updates, and as a share of what the devices can do where that is known."""
    config, network, critic = parts.config, parts.actor.network, parts.critic
    learns = critic is None or step > config.trainer.critic_warmup
    work = flops.step(
        network.config,
        rollout.prompt_lengths,
        rollout.response_lengths,
        share=parts.layouts.actor.share,
        log_probs=parts.old_logprobs_needed + needs_reference(config),
        epochs=config.actor.ppo_epochs if learns else 0,
        critic=None if critic is None else critic.network.config,
        critic_epochs=critic_plan(config).epochs,
    )
    updates = ("timing_s/update_actor", "timing_s/update_critic")
    kind = parts.mesh.devices.flat[0].device_kind
    return metrics.speed(
        step_flops=work.total,
        step_seconds=times["timing_s/step"],
        update_flops=work.trained,
        update_seconds=sum(times.get(name, 0.0) for name in updates),
        devices=parts.mesh.size,
        peak=hardware.peak_flops(kind, network.dtype),
    )


def batch_row(batch: Batch, meet: Meetings) -> Row:
    """Advantages, rewards after KL, returns and values of the batch of all processes, and the sampler/trainer log-prob gap.

    Each process reduces the rows it holds, and the reduced parts meet.
    """
    names = (
        "mask",
        "advantages",
        "returns",
        "values",
        "token_rewards",
        "old_logprobs",
        "sampler_logprobs",
        "valid",
    )
    arrays = {name: getattr(batch, name) for name in names}
    there = {name: array for name, array in arrays.items() if array is not None}
    own: dict[str, Any] = own_rows(there, "mask")
    return metrics.join_batch(meet.gather("batch", metrics.batch_part(**own)))


ACTOR_NAMES = {
    "pg_loss": "actor/pg_loss",
    "loss": "actor/loss",
    "kl_loss": "actor/kl_loss",
    "kl_k3_saturated": "actor/kl_k3_saturated",
    "entropy": "actor/entropy",
    "entropy_loss": "actor/entropy_loss",
    "ppo_kl": "actor/ppo_kl",
    "pg_clipfrac": "actor/pg_clipfrac",
    "pg_clipfrac_lower": "actor/pg_clipfrac_lower",
    "grad_norm": "actor/grad_norm",
}
CRITIC_NAMES = {
    "vf_loss": "critic/vf_loss",
    "vf_clipfrac": "critic/vf_clipfrac",
    "vpred_mean": "critic/vpred_mean",
    "grad_norm": "critic/grad_norm",
}


def _means(numbers: dict[str, np.ndarray], names: dict[str, str]) -> Row:
    return {new: float(np.mean(numbers[old])) for old, new in names.items() if old in numbers}


def actor_row(numbers: dict[str, np.ndarray], *, gap: bool) -> Row:
    """Means over the optimizer steps of a policy update (`[steps]` each), the largest ratios, and the last learning rate.

    With `gap` the log-prob gap is that of the first optimizer step's own forward, taken before anything moved.
    """
    row = _means(numbers, ACTOR_NAMES) | {
        "actor/lr": float(numbers["lr"][-1]),
        "actor/skipped_updates": int(numbers["skipped"].sum()),
        "actor/ratio_deviation/first": float(numbers["ratio_deviation_max"][0]),
        "actor/ratio_deviation/max": float(numbers["ratio_deviation_max"].max()),
    }
    if gap:
        row["rollout/logprob_gap/mean"] = float(numbers["logprob_gap"][0])
        row["rollout/logprob_gap/max"] = float(numbers["logprob_gap_max"][0])
    return row


def critic_row(numbers: dict[str, np.ndarray]) -> Row:
    """Means over the optimizer steps of a critic update, and the last learning rate."""
    return _means(numbers, CRITIC_NAMES) | {
        "critic/lr": float(numbers["lr"][-1]),
        "critic/skipped_updates": int(numbers["skipped"].sum()),
    }


def tokens(rollout: Rollout, n: int) -> int:
    """Prompt and response tokens of all trajectories."""
    return int(rollout.prompt_lengths.sum()) * n + int(rollout.response_lengths.sum())


def samples(
    prompts: Sequence[Prompt], texts: Sequence[str], scores: np.ndarray, n: int
) -> list[dict[str, Any]]:
    """The first sample of the first groups, for the completions file and the console; `texts` has one for each of them."""
    return [
        {
            "split": "train",
            "row_id": prompt.row_id,
            "prompt": prompt.text,
            "response": text,
            "answer": prompt.answer,
            "score": float(scores[index * n]),
        }
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=False))
    ]


def table(rows: Sequence[dict[str, Any]], step: int) -> str:
    """A printable table of samples."""
    return completions_table(rows, title=f"Samples of step {step}")


def voter(knobs: RewardKnobs) -> Callable[[str], str | None]:
    """How maj@n reads the answer out of a response: as the first reward function would."""
    from jaxrl_llm.rewards import gsm8k, math

    if knobs.functions[0] == "math":
        return math.extract
    method = knobs.gsm8k_method if knobs.functions[0] == "gsm8k" else "flexible"
    return lambda text: gsm8k.extract(text, method=method)
