"""From a checked configuration to the parts of a run: tokenizer, prompts, mesh, engine, compiled functions.

Left out on purpose: the loop (see `trainer`) and anything that changes after the first step.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import learner, scoring, sharding, summary, tokenizer
from jaxrl_llm.checks import MeshShape, mesh_shape
from jaxrl_llm.config import Config, needs_reference
from jaxrl_llm.console import start_table
from jaxrl_llm.data import (
    PromptSet,
    PromptStream,
    build_prompts,
    load_rows,
    make_stream,
    shared_rows,
)
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs import DataKnobs
from jaxrl_llm.layouts import Layouts, layouts_of
from jaxrl_llm.models import families, weights
from jaxrl_llm.networks import (
    Trained,
    open_model,
    plan_of,
    read_tokenizer,
    scoring_temperature,
    trained_networks,
)
from jaxrl_llm.records import Params
from jaxrl_llm.rewards.table import unreadable_golds
from jaxrl_llm.rollout.engine import Engine, make_engine
from jaxrl_llm.rollout.queue import PREFILL_TOKENS

Say = Callable[[str], None]

PROMPT_STEP = 16
"""Prompt widths of the engine are multiples of this."""


@dataclass(frozen=True)
class Parts:
    """Everything a run keeps besides its `TrainState`; nothing in here changes while it trains."""

    config: Config
    tokenizer: tokenizer.Tokenizer
    train: PromptSet
    val: PromptSet | None
    stream: PromptStream
    mesh: Mesh
    rollout_mesh: Mesh
    rollout_shardings: Params
    engine: Engine
    actor: Trained
    critic: Trained | None
    reference: Params | None
    layouts: Layouts
    score: Callable[..., scoring.Scores]
    values: Callable[..., jax.Array] | None
    prepare: Callable[..., Any]
    temperature: float
    old_logprobs_needed: bool
    total_steps: int
    fingerprint: dict[str, str]


def load_prompts(
    config: Config,
    files: tuple[str, ...],
    limit: int | None,
    reader: tokenizer.Tokenizer,
    vocabulary: int,
    say: Say,
    what: str,
) -> PromptSet:
    """Read, render and measure prompts, and say what was left out."""
    knobs: DataKnobs = config.data
    rows = load_rows(
        files,
        bad_rows=knobs.bad_rows,
        max_bad_rows_share=knobs.max_bad_rows_share,
        exclude_ids=knobs.exclude_ids,
        max_samples=limit,
    )
    for note in rows.notes:
        say(note)
    prompts = build_prompts(rows, reader, knobs, vocab_size=vocabulary)
    left_out = {
        "longer than the limit, dropped": prompts.filtered,
        "longer than the limit, cut": prompts.truncated,
        "broken, skipped": prompts.skipped,
        "excluded": rows.excluded,
    }
    golds = [(prompt.row_id, prompt.answer) for prompt in prompts.prompts]
    for warning in unreadable_golds(config.reward.functions, golds):
        say(warning)
    details = "; ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    say(f"{what}: {len(prompts.prompts):,} prompts" + (f" ({details})" if details else ""))
    return prompts


def _prompt_sets(
    config: Config, reader: tokenizer.Tokenizer, vocabulary: int, say: Say
) -> tuple[PromptSet, PromptSet | None]:
    """Training and validation prompts, with a warning where they share rows."""
    knobs = config.data
    train = load_prompts(
        config, knobs.train_files, knobs.train_max_samples, reader, vocabulary, say, "training"
    )
    if not knobs.val_files:
        _unknown_exclusions(knobs, (train,), say)
        return train, None
    val = load_prompts(
        config, knobs.val_files, knobs.val_max_samples, reader, vocabulary, say, "validation"
    )
    _unknown_exclusions(knobs, (train, val), say)
    if shared := shared_rows(train, val):
        say(
            f"warning: {shared} validation prompts are training prompts too; held-out accuracy will flatter"
        )
    return train, val


def _unknown_exclusions(knobs: DataKnobs, sets: tuple[PromptSet, ...], say: Say) -> None:
    """Say which `data.exclude_ids` name a file that was not read: a misspelt id would leave its row in, silently."""
    stems = {prompt.row_id.rpartition(":")[0] for prompts in sets for prompt in prompts.prompts}
    unknown = [name for name in knobs.exclude_ids if name.rpartition(":")[0] not in stems]
    if unknown:
        say(
            f"warning: data.exclude_ids {', '.join(unknown[:5])} name no file that was read (there are "
            f"{', '.join(sorted(stems))}); write FILE_STEM:LINE"
        )


def slots_for(
    config: Config, model: families.ModelConfig, dtype: Any, mesh: Mesh, say: Say
) -> int | None:
    """Sequences decoded at once: the setting, or what the device memory leaves after the weights; `None` is the whole batch."""
    if config.rollout.max_num_seqs is not None:
        return config.rollout.max_num_seqs
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return None
    columns = config.data.max_prompt_length + config.data.max_response_length
    tensor = mesh.shape["tensor"]
    per_sequence = (
        2 * model.num_layers * columns * model.num_kv_heads * model.head_size * dtype.itemsize
    )
    weights_bytes = 4 * families.parameter_count(model) // tensor
    longest = config.data.max_prompt_length
    prompts = -(-config.data.train_batch_size // sharding.shards(mesh)) * longest
    bank = per_sequence / tensor / columns * min(max(PREFILL_TOKENS, longest), prompts)
    room = limit * config.rollout.gpu_memory_utilization - weights_bytes - bank
    per_shard = int(room // (per_sequence / tensor))
    if per_shard < 1:
        raise ConfigError(
            f"rollout: {room / 2**30:.1f} GiB of a device are left for key/value caches, but one sequence needs "
            f"{per_sequence / tensor / 2**30:.1f} GiB; raise rollout.gpu_memory_utilization or "
            "tensor_model_parallel_size, or shorten the responses"
        )
    slots = per_shard * sharding.shards(mesh)
    say(
        f"rollout.max_num_seqs: {slots:,} sequences fit the memory that gpu_memory_utilization leaves"
    )
    return slots


def build(config: Config, say: Say) -> Parts:
    """Open and compile-ready everything; reads the tokenizer, the prompts and the weights' headers, but no weights of trained
    networks yet."""
    shape = mesh_shape(config, jax.device_count())
    mesh = sharding.make_mesh(shape)
    tensor = config.rollout.tensor_model_parallel_size
    decode_shape = MeshShape(jax.device_count() // tensor, 1, tensor)
    opened = open_model(config.model.path)
    model = opened[0]
    reader = read_tokenizer(config)
    train, val = _prompt_sets(config, reader, model.vocab_size, say)
    stream = make_stream(
        len(train.prompts),
        batch_size=config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=config.data.seed or 0,
        num_workers=config.data.num_workers,
    )
    if stream.dropped_per_epoch:
        say(
            f"training: {stream.dropped_per_epoch} prompts do not fill a batch of {config.data.train_batch_size} and are left "
            "out of every epoch (other ones each time where data.shuffle is on)"
        )
    total = (
        config.trainer.total_training_steps or config.trainer.total_epochs * stream.steps_per_epoch
    )
    actor, critic = trained_networks(config, mesh, opened, total)
    rows = layouts_of(config, mesh, actor.network.attention)
    lines = summary.start_lines(
        config,
        shape,
        steps_per_epoch=stream.steps_per_epoch,
        total_steps=total,
        parameters=families.parameter_count(model),
        row_tokens=rows.actor.tokens,
    )
    say(start_table(f"{config.trainer.experiment_name} -> {config.trainer.run_dir}", lines))
    decode_mesh = mesh if decode_shape == shape else sharding.make_mesh(decode_shape)
    slots = slots_for(config, model, actor.network.dtype, decode_mesh, say)
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=slots))
    longest = max(len(prompt.ids) for some in (train, val) if some for prompt in some.prompts)
    engine = _engine(config, model, decode_mesh, actor.network.dtype, reader, longest)
    reference, digest = _reference(config, actor, say) if needs_reference(config) else (None, "")
    widths = (config.data.train_batch_size * config.rollout.n, config.data.max_response_length)
    fingerprint = {"train": train.fingerprint, "tokenizer": reader.digest, "reference": digest}
    return Parts(
        config=config,
        tokenizer=reader,
        train=train,
        val=val,
        stream=stream,
        mesh=mesh,
        rollout_mesh=decode_mesh,
        rollout_shardings=sharding.param_shardings(
            decode_mesh, families.param_dims(model), actor.abstract
        ),
        engine=engine,
        actor=actor,
        critic=critic,
        reference=reference,
        layouts=rows,
        score=scoring.make_score(actor.network, *widths),
        values=scoring.make_values(critic.network, *widths) if critic else None,
        prepare=learner.make_advantages(
            config.algorithm,
            prompts=config.data.train_batch_size,
            kl_loss_type=config.actor.kl_loss_type if config.actor.use_kl_loss else None,
        ),
        temperature=scoring_temperature(config),
        old_logprobs_needed=plan_of(config).optimizer_steps > 1
        or config.algorithm.use_kl_in_reward,
        total_steps=total,
        fingerprint=fingerprint,
    )


def _engine(
    config: Config,
    model: families.ModelConfig,
    mesh: Mesh,
    dtype: Any,
    reader: tokenizer.Tokenizer,
    longest_prompt: int,
) -> Engine:
    """The engine, with room for the longest prompt there is, in steps of `PROMPT_STEP`, rather than the longest allowed."""
    width = -(-longest_prompt // PROMPT_STEP) * PROMPT_STEP
    return make_engine(
        model,
        mesh,
        dtype=dtype,
        stop_ids=() if config.rollout.ignore_eos else reader.stop_ids,
        decode_text=reader.decode,
        stop_texts=config.rollout.stop,
        chunk=config.rollout.decode_chunk,
        max_num_seqs=config.rollout.max_num_seqs,
        prompt_length=min(width, config.data.max_prompt_length),
        response_length=config.data.max_response_length,
    )


def _reference(config: Config, actor: Trained, say: Say) -> tuple[Params, str]:
    """The frozen reference and a digest of it; in host memory with `ref.param_offload`."""
    from jaxrl_llm.checkpoint import tree_digests

    path = config.ref.path or config.model.path
    model, source = open_model(path)
    if model != actor.network.config:
        raise ConfigError(
            f"ref.path: the reference in {path} is another architecture than the policy in {actor.path}; need the same"
        )
    params = weights.load_params(source, model, shardings=actor.shardings)
    digest = hashlib.sha256(json.dumps(tree_digests(params), sort_keys=True).encode()).hexdigest()
    if config.ref.param_offload:
        host = jax.tree.map(lambda leaf: np.array(leaf), params)
        say("reference: kept in host memory between uses")
        return host, digest
    return params, digest


def reference_on_device(parts: Parts) -> Params:
    """The reference where it can score: moved there if it is offloaded."""
    if parts.config.ref.param_offload:
        return jax.device_put(parts.reference, parts.actor.shardings)
    assert parts.reference is not None
    return parts.reference


def rollout_params(parts: Parts, params: Params) -> Params:
    """The policy's weights on the rollout mesh; the same arrays where both meshes are one."""
    if parts.rollout_mesh is parts.mesh:
        return params
    return jax.device_put(params, parts.rollout_shardings)
