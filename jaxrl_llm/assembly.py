"""From a checked configuration to the parts of a run: tokenizer, prompts, mesh, engine, compiled functions.

Left out on purpose: the loop (see `trainer`) and anything that changes after the first step.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import processes, programs, sharding, summary, tokenizer
from jaxrl_llm.checks import mesh_shape
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
from jaxrl_llm.models import families, weights
from jaxrl_llm.networks import compute_dtype, models_of, open_model, read_tokenizer
from jaxrl_llm.programs import Programs
from jaxrl_llm.records import Params
from jaxrl_llm.rewards.table import unreadable_golds

Say = Callable[[str], None]


@dataclass(frozen=True)
class Parts(Programs):
    """A run's programs and what they work on, besides its `TrainState`; nothing in here changes while it trains."""

    tokenizer: tokenizer.Tokenizer
    train: PromptSet
    val: PromptSet | None
    stream: PromptStream
    frozen: Params | None
    total_steps: int
    fingerprint: dict[str, str]
    """Digests of data, tokenizer and reference."""


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
    asked = config.rollout.max_num_seqs
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return asked
    prompts = config.data.train_batch_size // jax.process_count()
    try:
        fitting = programs.fitting_slots(config, model, dtype, mesh, limit, prompts)
    except ConfigError:
        if asked is None:
            raise
        fitting = 0
    slots = min(processes.gather("fitting slots", fitting))
    if asked is not None:
        if asked > slots:
            say(
                f"warning: rollout.max_num_seqs = {asked:,} (per process), but {slots:,} fit the memory that gpu_memory_utilization leaves"
            )
        return asked
    say(
        f"rollout.max_num_seqs: {slots:,} sequences fit the memory that gpu_memory_utilization leaves"
    )
    return slots


def build(config: Config, say: Say) -> Parts:
    """Open and compile-ready everything; reads the tokenizer, the prompts and the reference, but no weights of trained
    networks yet."""
    shape = mesh_shape(config, jax.device_count())
    mesh = sharding.make_mesh(shape)
    rollout_mesh = programs.rollout_mesh_of(config, mesh, jax.local_devices())
    policy, valuer = models_of(config)
    reader = read_tokenizer(config)
    train, val = _prompt_sets(config, reader, policy.vocab_size, say)
    stream = make_stream(
        len(train.prompts),
        batch_size=config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=config.data.seed or 0,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
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
    dtype = compute_dtype(config.model.compute_dtype, sharding.platform(mesh))
    slots = slots_for(config, policy, dtype, rollout_mesh, say)
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=slots))
    longest = max(len(prompt.ids) for some in (train, val) if some for prompt in some.prompts)
    made = programs.build(
        config,
        policy,
        valuer,
        mesh,
        rollout_mesh,
        programs.Reader(reader.stop_ids, reader.decode, longest),
        total_steps=total,
    )
    lines = summary.start_lines(
        config,
        shape,
        steps_per_epoch=stream.steps_per_epoch,
        total_steps=total,
        parameters=families.parameter_count(policy),
        row_tokens=made.layouts.actor.tokens,
    )
    say(start_table(f"{config.trainer.experiment_name} -> {config.trainer.run_dir}", lines))
    frozen, digest = _reference(made, say) if needs_reference(config) else (None, "")
    return Parts(
        **vars(made),
        tokenizer=reader,
        train=train,
        val=val,
        stream=stream,
        frozen=frozen,
        total_steps=total,
        fingerprint={"train": train.fingerprint, "tokenizer": reader.digest, "reference": digest},
    )


def same_everywhere(parts: Parts) -> dict[str, str]:
    """Digests that all processes of a run must share: the fingerprint and the held-out prompts."""
    return parts.fingerprint | {"validation": parts.val.fingerprint if parts.val else ""}


def _reference(made: Programs, say: Say) -> tuple[Params, str]:
    """The frozen reference and a digest of it, with the type it is of in front; in host memory with `ref.param_offload`."""
    from jaxrl_llm.checkpoint import tree_digests

    config = made.config
    path = config.ref.path or config.model.path
    model, source = open_model(path)
    if model != made.actor.network.config:
        raise ConfigError(
            f"ref.path: the reference in {path} is another architecture than the policy in {made.actor.path}; need the same"
        )
    params = weights.load_params(
        source,
        model,
        shardings=jax.tree.map(lambda leaf: leaf.sharding, made.reference),
        dtypes=jax.tree.map(lambda leaf: leaf.dtype, made.reference),
    )
    digest = hashlib.sha256(json.dumps(tree_digests(params), sort_keys=True).encode()).hexdigest()
    if config.ref.param_offload:
        say("reference: kept in host memory between uses")
    return params, f"{made.actor.network.dtype.name}:{digest}"
