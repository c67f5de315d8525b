"""Every program that a rollout can run, with arguments that are only described: what a planner compiles for devices nobody owns.

Shapes, types and places are those that `engine.generate` passes, so that a program lowered here is, letter by letter, the one that runs.

Left out on purpose: how often each program runs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.rollout import decode, queue, shards
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import make_sampling

Tree = Any


class Program(NamedTuple):
    """`jitted.lower(*args, **kwargs)` is the program; `name` says which, with slots and own columns where they differ."""

    name: str
    jitted: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def engine_shapes(
    engine: Engine, params: Tree, prompts: int, n: int, slots: int | None = None
) -> list[Program]:
    """The programs of a rollout of `n` samples for each of `prompts` prompts, those of the full width and the first columns first.

    `params` are the weights as decoding gets them: `ShapeDtypeStruct`s with shardings (`Handover.result`). `slots` as in
    `generate`. A rollout runs no other program; it need not run all of them.
    """
    layout = queue.make_layout(
        max(slots or 0, prompts),
        n,
        max_num_seqs=engine.max_num_seqs,
        shards=sharding.shards(engine.mesh),
        prompt_width=engine.prompt_width,
    )
    return list(_programs(_Arguments(engine, params, layout), prompts, n))


class _Arguments(NamedTuple):
    """Descriptions of what the engine's host loop passes."""

    engine: Engine
    params: Tree
    layout: queue.Layout

    def rows(self, kind: Any, *shape: int) -> jax.ShapeDtypeStruct:
        """A host array that is placed row by row."""
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding.rows(self.engine.mesh))

    def result(self, place: Tree, jitted: Any, *args: Any, **kwargs: Any) -> Tree:
        """What a program returns, at its place."""
        shapes = jax.eval_shape(jitted, *args, **kwargs)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            place,
        )

    def starts(self) -> decode.Starts:
        units, lanes = self.layout.units, self.layout.lanes
        by_unit, by_lane = self.rows(np.int32, units), self.rows(np.int32, lanes)
        return decode.Starts(
            moves=by_unit,
            count=self.rows(np.int32, self.layout.shards),
            rows=by_unit,
            seen=by_unit,
            fresh=self.rows(np.bool_, lanes),
            prompt_ids=by_lane,
            samples=by_lane,
            last=by_lane,
            stream=jax.ShapeDtypeStruct((3,), np.uint32),
        )

    def chunk(self, state: decode.DecodeState) -> tuple[Any, ...]:
        """All arguments of `advance`."""
        by_shard = self.rows(np.int32, self.layout.shards)
        return (
            self.params,
            state,
            self.rows(np.bool_, state.last.shape[0]),
            jax.ShapeDtypeStruct((len(self.engine.stop_ids) or 1,), np.int32),
            decode.Bounds(by_shard, by_shard, jax.ShapeDtypeStruct((), np.int32)),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_sampling()),
        )


def _buckets(engine: Engine) -> list[int]:
    """Numbers of own columns, ascending."""
    found = [queue.columns(1, engine.response_length)]
    while found[-1] < engine.response_length:
        found.append(queue.columns(found[-1] + 1, engine.response_length))
    return found


def _programs(given: _Arguments, prompts: int, n: int) -> Iterator[Program]:
    engine, layout, params = given.engine, given.layout, given.params
    kv, placed, _ = shards.placements(engine.config, engine.mesh)
    width, parts, buckets = engine.prompt_width, layout.shards, _buckets(engine)
    most = -(-prompts // parts) * n
    refilled = most * parts > layout.lanes
    widths = queue.widths(layout)
    at_once = most * parts <= max(widths[1:], default=0)
    if not (engine.stop_ids or engine.stop_texts or refilled or at_once):
        widths = widths[:1]

    read = (params, given.rows(np.int32, layout.bank, width), given.rows(np.int32, layout.bank))
    yield Program("prefill", engine.prefill, (*read, None), {})
    bank = given.result(kv, engine.prefill, *read, None)
    if parts > 1 and prompts > layout.bank:
        yield Program("prefill into a bank in use", engine.prefill, (*read, bank), {})
    first = {"columns": buckets[0]}
    yield Program("begin", engine.begin, (bank, given.starts()), first)
    full = given.result(placed, engine.begin, bank, given.starts(), **first)
    states = {layout.lanes: full}
    for lanes in widths[1:]:
        states[lanes] = given.result(placed, engine.narrow, full, given.rows(np.int32, lanes))

    for columns, wider in zip(buckets, [*buckets[1:], None], strict=True):
        if refilled or (columns == buckets[0] and prompts > layout.bank):
            begun = (states[layout.lanes], bank, given.starts())
            yield Program(f"insert, {columns} columns", engine.insert, begun, {})
        for lanes, state in states.items():
            where = f"{lanes} slots, {columns} columns"
            yield Program(f"advance, {where}", engine.advance, given.chunk(state), {})
            for fewer in [one for one in widths if one < lanes]:
                kept = (state, given.rows(np.int32, fewer))
                yield Program(f"narrow to {fewer}, {where}", engine.narrow, kept, {})
            if wider is not None:
                grown = {"columns": wider}
                yield Program(f"grow to {wider}, {where}", engine.grow, (state.own,), grown)
                own = given.result(kv, engine.grow, state.own, **grown)
                states[lanes] = state.replace(own=own)
