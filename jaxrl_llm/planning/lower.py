"""Every program that a step runs, with arguments that have only shapes, dtypes and places: the trainer's own, letter by letter.

Shapes do not depend on lengths; how many micro-batches run does, and is planned for full-length responses.

Left out on purpose: validation (larger where `val_batch_size x validation.n` exceeds a step's rollout), and what the host does between two programs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import networks, packing, scoring, sharding
from jaxrl_llm.packing import Layout, Packed
from jaxrl_llm.programs import Programs
from jaxrl_llm.records import Rollout
from jaxrl_llm.rollout.shapes import engine_shapes

Abstract = Any

PACKED = object()
"""Stands for the packed rows of a program's layout among its arguments."""


@dataclass(frozen=True)
class Lowering:
    """A program of a step: `fn.lower(*args, **kwargs)` is what the trainer compiles in `phase`.

    `largest`: no program of its kind needs more memory. `runs`: of a loop inside whose length the program learns when it runs.
    """

    name: str
    phase: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    largest: bool = True
    runs: int = 1

    def lower(self) -> Any:
        """Traced and lowered, not compiled."""
        return self.fn.lower(*self.args, **self.kwargs)  # type: ignore[attr-defined]


def full_rollout(prompts: int, group: int, width: int, length: int) -> Rollout:
    """A rollout of `group` responses per prompt that all have the full length, as have the prompts."""
    rows = prompts * group
    ones = np.ones((rows, length), bool)
    return Rollout(
        prompt_tokens=np.zeros((prompts, width), np.int32),
        prompt_lengths=np.full((prompts,), width, np.int32),
        response_tokens=np.zeros((rows, length), np.int32),
        response_lengths=np.full((rows,), length, np.int32),
        response_mask=ones,
        loss_mask=ones,
        sampler_logprobs=np.zeros((rows, length), np.float32),
        filtered_logprobs=None,
        end_reason=np.zeros((rows,), np.int32),
        policy_step=np.zeros((rows,), np.int32),
    )


def described(tree: Any, shardings: Any) -> Abstract:
    """Shapes, dtypes and places instead of arrays."""
    if isinstance(shardings, jax.sharding.Sharding):
        where = shardings
        return jax.tree.map(lambda leaf: networks.described(leaf, where), tree)
    return jax.tree.map(networks.described, tree, shardings)


def packed_rows(layout: Layout, mesh: Mesh) -> Abstract:
    """Packed rows of a layout, described as `scoring.place` lays them: those of a single short response, as many times as there are."""
    few = replace(layout, prompts=1, group=1, mini_prompts=1, passes=1, micros=1, shards=1, pad=False)  # fmt: skip
    host, _ = packing.pack(few, full_rollout(1, 1, 1, 1))
    lead = (layout.mini_batches * layout.passes, layout.micros, layout.shards)
    whole = {
        "slots": lead[:2],
        "micros": lead[:1],
        "members": (lead[0], layout.mini_prompts * layout.group),
    }

    def shape(name: str, leaf: Any) -> tuple[int, ...]:
        return whole[name] if name in whole else (*lead, *leaf.shape[3:])

    # The partitions are those of `scoring.place`, which puts arrays and cannot describe them.
    partitions = scoring.row_specs(host, len(lead) - 1)
    found = {}
    for name in (one.name for one in fields(Packed)):
        found[name] = jax.tree.map(
            lambda leaf, partition, name=name: jax.ShapeDtypeStruct(
                shape(name, leaf), leaf.dtype, sharding=NamedSharding(mesh, partition)
            ),
            getattr(host, name),
            getattr(partitions, name),
        )
    return Packed(**found)


def full_rows(layout: Layout) -> tuple[int, int]:
    """Rows of a mini-batch in which all prompts and responses have full length, and the tokens of the fullest."""
    group, pieces = (layout.group, 1) if layout.share else (1, layout.group)
    stored = layout.prompt_width + group * layout.response_width
    together = min(layout.tokens // stored, layout.responses // group)
    if together:
        return -(-layout.mini_prompts * pieces // together), together * stored
    fitting = min((layout.tokens - layout.prompt_width) // layout.response_width, layout.responses)
    rows = layout.mini_prompts * pieces * -(-group // fitting)
    return rows, layout.prompt_width + fitting * layout.response_width


def full_micro_batches(layout: Layout) -> int:
    """Micro-batches of a mini-batch of full length."""
    return -(-full_rows(layout)[0] // layout.shards)


def busiest(layout: Layout) -> float:
    """How much more than its even share of a mini-batch of full length the busiest data shard works on."""
    groups = layout.mini_prompts * (1 if layout.share else layout.group)
    responses = layout.mini_prompts * layout.group * layout.response_width
    even = (groups * layout.prompt_width + responses) / layout.shards
    return full_micro_batches(layout) * full_rows(layout)[1] / even


def scored_batch(programs: Programs) -> Abstract:
    """The batch as it goes into the advantages: rows over the data shards."""
    data, n = programs.config.data, programs.config.rollout.n
    length = data.max_response_length
    rollout = full_rollout(data.train_batch_size, n, 1, length)
    scores = np.zeros((len(rollout.response_lengths),), np.float32)
    host = packing.make_batch(rollout, scores, scores == 0, length)
    zero = np.zeros(host.mask.shape, np.float32)
    present = {
        "old_logprobs": programs.old_logprobs_needed,
        "ref_logprobs": programs.reference is not None,
        "values": programs.critic is not None,
    }
    host = replace(host, **{name: zero for name, needed in present.items() if needed})
    return described(host, sharding.rows(programs.mesh))


def learner_programs(programs: Programs) -> list[Lowering]:
    """Scoring, advantages and updates, in the order of a step."""
    layouts, mesh = programs.layouts, programs.mesh
    used = (layouts.actor, layouts.critic, layouts.score, layouts.reference)
    rows = {layout: packed_rows(layout, mesh) for layout in dict.fromkeys(used)}
    state: Any = networks.abstract_state(programs)
    batch, temperature = scored_batch(programs), np.float32(programs.temperature)
    found = []

    def add(name: str, phase: str, fn: Any, layout: Layout | None, *args: Any) -> None:
        runs = 1
        if layout is not None:
            args = tuple(rows[layout] if one is PACKED else one for one in args)
            runs = full_micro_batches(layout)
        found.append(Lowering(name, phase, fn, args, runs=runs))

    actor, critic = programs.actor, programs.critic
    if programs.old_logprobs_needed:
        add("old log-probs", "old_log_prob", programs.score, layouts.score, state.actor.trainable, PACKED, temperature)  # fmt: skip
    if programs.reference is not None:
        add("reference log-probs", "ref", programs.score_reference, layouts.reference, programs.reference, PACKED, temperature)  # fmt: skip
    if critic is not None:
        add("values", "values", programs.values, layouts.critic, state.critic.trainable, PACKED)
    add("advantages", "adv", programs.prepare, None, batch, state.algorithm)
    made, algorithm, _ = jax.eval_shape(programs.prepare, batch, state.algorithm)
    where, whole = sharding.rows(mesh), sharding.replicated(mesh)
    made, algorithm = described(made, where), described(algorithm, whole)
    if critic is not None:
        add("critic update", "update_critic", critic.update, layouts.critic, state.critic, made, PACKED, algorithm)  # fmt: skip
    add("actor update", "update_actor", actor.update, layouts.actor, state.actor, made, PACKED, algorithm)  # fmt: skip
    return found


def rollout_programs(programs: Programs, prompts: int) -> list[Lowering]:
    """The weight hand-over and every program of the engine, for a process that samples from `prompts` prompts."""
    handover = programs.handover
    moves = (
        [Lowering("weight hand-over", "gen", handover.program, (handover.source,))]
        if handover.program
        else []
    )
    return moves + engine_programs(programs, prompts)


def engine_programs(programs: Programs, prompts: int) -> list[Lowering]:
    """Every program of the engine; of each kind the one with all slots and the most columns is the largest."""
    found = []
    made = engine_shapes(
        programs.engine, programs.handover.result, prompts, programs.config.rollout.n
    )
    largest: dict[str, Any] = {}
    for program in made:
        kind = program.name.split()[0].strip(",")
        if kind not in largest or held(program.args) > held(largest[kind].args):
            largest[kind] = program
    for program in made:
        kind = program.name.split()[0].strip(",")
        runs = programs.engine.chunk if kind == "advance" else 1
        found.append(
            Lowering(
                program.name,
                "gen",
                program.jitted,
                program.args,
                program.kwargs,
                largest=program is largest[kind] and kind != "begin",
                runs=runs,
            )
        )
    return found


def held(tree: Abstract, host: bool = False) -> int:
    """Bytes that described arrays take of one device's memory (with `host`, of its host's); what has no place lies whole."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        where = getattr(leaf, "sharding", None)
        shape = where.shard_shape(leaf.shape) if where is not None else np.shape(leaf)
        if (getattr(where, "memory_kind", None) == "pinned_host") == host:
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def step_programs(programs: Programs, prompts: int) -> list[Lowering]:
    """All programs of a step, in its order; `prompts` are those that one process samples from."""
    return [*rollout_programs(programs, prompts), *learner_programs(programs)]
