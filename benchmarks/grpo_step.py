"""One GRPO step on fixed work, timed phase by phase: python benchmarks/grpo_step.py --steps 8 --variant base.

A random Qwen2 of 4 layers, width 256, 8 prompts x 8 samples, prompts and responses of 64 tokens, float32, KL 0.04 to a separate
reference, AdamW 1e-4, one update over all rows; the reward is the share of even token ids. Variants: `ragged` (prompt
lengths vary and an end token may be sampled), `nokl`, `micro2` (two prompts per micro-batch), `vocab32k`. Prints one JSON line per step; the last line holds medians over the last two thirds:
`step_cpu`, `rollout_cpu`, `ref_cpu`, `update_cpu` in CPU seconds of the process, and the same in wall seconds.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import learner, metrics, optimizer, packing, scoring, sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, OptimKnobs
from jaxrl_llm.models import families, transformer
from jaxrl_llm.records import Prompt
from jaxrl_llm.rollout.engine import generate, make_engine
from jaxrl_llm.rollout.sampling import TRAIN, make_sampling

PROMPTS, GROUP, LENGTH, END = 8, 8, 64, 2


@dataclass(frozen=True)
class Work:
    """What a variant changes."""

    vocabulary: int = 4096
    ragged: bool = False
    kl: bool = True
    micro_prompts: int | None = None


VARIANTS = {
    "base": Work(),
    "ragged": Work(ragged=True),
    "nokl": Work(kl=False),
    "micro2": Work(micro_prompts=2),
    "vocab32k": Work(vocabulary=32768),
}


def model(vocabulary: int) -> families.ModelConfig:
    """The workload's architecture."""
    return families.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": vocabulary,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": END,
        }
    )


def prompts(work: Work, random: np.random.Generator, step: int) -> list[Prompt]:
    """Random prompts of 64 tokens (ragged: 8 to 64)."""
    made = []
    for number in range(PROMPTS):
        length = int(random.integers(8, LENGTH + 1)) if work.ragged else LENGTH
        ids = (1, *random.integers(3, work.vocabulary, length - 1).tolist())
        made.append(Prompt(ids, "", (), "", "bench", {}, step * PROMPTS + number, str(number)))
    return made


class Clock:
    """Wall and process-CPU seconds per phase of one step."""

    def __init__(self) -> None:
        self.row: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action, wait for its arrays, and book its seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(action())
        self.row[f"{name}_wall"] = time.perf_counter() - wall
        self.row[f"{name}_cpu"] = time.process_time() - cpu
        return result


def main(steps: int, variant: str) -> None:
    """Run the workload and print its JSON lines."""
    work, config = VARIANTS[variant], model(VARIANTS[variant].vocabulary)
    compiled = metrics.CompileCounter()
    mesh = sharding.make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    network = scoring.Network(config, mesh, jnp.dtype("float32"))
    params = transformer.init(config, jax.random.key(0))
    reference = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params) if work.kl else None
    optim = OptimKnobs(lr=1e-4)
    schedule = optimizer.make_schedule(optim, steps)
    adamw = optimizer.make_optimizer(optim, schedule)
    shardings = sharding.param_shardings(mesh, families.param_dims(config), params)
    state = optimizer.init_model_state(adamw, jax.device_put(params, shardings), shardings, mesh)
    knobs = ActorKnobs(use_kl_loss=work.kl, kl_loss_coef=0.04, loss_agg_mode="token-mean")
    plan = learner.Plan(PROMPTS, 1, PROMPTS)
    layout = packing.make_layout(
        prompts=PROMPTS,
        group=GROUP,
        mini_prompts=PROMPTS,
        prompt_width=LENGTH,
        response_width=LENGTH,
        shards=1,
        micro_rows=work.micro_prompts and work.micro_prompts * GROUP,
    )
    loss = learner.make_actor_loss(network, knobs, 1.0, on_policy=True)
    update = learner.make_update(loss, adamw, schedule, plan, mesh)
    score = scoring.make_score(network, PROMPTS * GROUP, LENGTH)
    prepare = learner.make_advantages(
        AlgorithmKnobs(adv_estimator="grpo"),
        prompts=PROMPTS,
        kl_loss_type="k3" if work.kl else None,
    )
    algorithm = jax.device_put(
        learner.init_algorithm_state(0.0, 0.04), sharding.replicated(mesh)
    )
    engine = make_engine(
        config,
        mesh,
        dtype=jnp.dtype("float32"),
        stop_ids=(END,) if work.ragged else (),
        decode_text=lambda ids: "",
        chunk=LENGTH,
        prompt_length=LENGTH,
        response_length=LENGTH,
    )
    random, rows = np.random.default_rng(0), []
    for step in range(steps):
        clock, begun, cpu = Clock(), time.perf_counter(), time.process_time()
        batch_prompts = prompts(work, random, step)

        rollout, _ = clock.time(
            "rollout",
            partial(
                generate,
                engine,
                state.trainable,
                batch_prompts,
                n=GROUP,
                sampling=make_sampling(),
                seed=0,
                step=step,
                purpose=TRAIN,
            ),
        )
        even = np.where(rollout.response_mask, rollout.response_tokens % 2 == 0, False)
        scores = even.sum(1) / np.maximum(rollout.response_lengths, 1)
        batch = sharding.put_rows(
            mesh, packing.make_batch(rollout, scores, np.ones(len(scores), bool), LENGTH)
        )
        host, packed_as = packing.pack(layout, rollout)
        packed = scoring.place(host, mesh)
        if reference is not None:
            frozen = clock.time("ref", partial(score, reference, packed, np.float32(1.0)))
            batch = batch.replace(ref_logprobs=frozen.logprobs)
        batch, algorithm, _ = prepare(batch, algorithm)
        arguments = (state, batch, packed, algorithm)
        state, numbers = clock.time("update", partial(update, *arguments))
        gap = jax.device_get(numbers["logprob_gap_max"])
        row = {
            "step": step,
            **clock.row,
            "step_wall": time.perf_counter() - begun,
            "step_cpu": time.process_time() - cpu,
            "generated_tokens": int(rollout.response_lengths.sum()),
            "trained_tokens": packed_as.verl,
            **packed_as.row(),
            "compilations": compiled.delta(),
            "logprob_gap": float(gap[0]),
            "peak_rss_mb": metrics.peak_rss_mb(),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(json.dumps(summary(variant, rows)), flush=True)


def summary(variant: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the last two thirds of the steps, speeds, and what the first step cost."""
    steady = rows[len(rows) // 3 :]
    names = [name for name in rows[-1] if name.endswith(("_cpu", "_wall"))]
    medians = {name: float(np.median([row[name] for row in steady])) for name in names}
    medians.setdefault("ref_cpu", 0.0)
    generated = float(np.median([row["generated_tokens"] for row in steady]))
    trained = float(np.median([row["trained_tokens"] for row in steady]))
    return {
        "variant": variant,
        **medians,
        "generated_tokens_per_cpu_s": generated / medians["rollout_cpu"],
        "trained_tokens_per_cpu_s": trained / medians["update_cpu"],
        "first_step_wall": rows[0]["step_wall"],
        "compilations": int(sum(row["compilations"] for row in rows)),
        "compilations_after_first": int(sum(row["compilations"] for row in rows[1:])),
        "peak_rss_mb": rows[-1]["peak_rss_mb"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.variant)
