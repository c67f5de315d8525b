"""The rollout engine: prompts in, finished responses out, on the host's side of the decode programs.

Each prompt is prefilled once, into a bank; its samples begin in whatever lanes are free and decode in compiled chunks. Between two
chunks the host keeps what was sampled, looks for stop texts, hands finished responses on, so that grading overlaps with
decoding, and refills the lanes. What moves is the chunk's new tokens and a few numbers per lane.

The mesh is this process's own. Its data shards run the same programs side by side (`shards`): no device waits for one of another
shard, let alone of another process, before its part of a program is done.

Left out on purpose: other processes, and parameters that change while a rollout runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import sharding
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.records import END_EOS, END_LENGTH, END_STOP, Prompt, Rollout
from jaxrl_llm.rollout import decode, queue, shards
from jaxrl_llm.rollout.sampling import Sampling, filters

OnFinished = Callable[[int, list[int]], None]
"""Called with the row in the result and the response's ids."""


@dataclass(frozen=True)
class Engine:
    """Compiled decode programs and the host facts around them; holds no state of a run."""

    config: ModelConfig
    mesh: Mesh
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    decode_text: Callable[[Sequence[int]], str]
    chunk: int
    max_num_seqs: int | None
    prompt_width: int
    response_length: int
    prefill: Callable[..., Any]
    begin: Callable[..., Any]
    insert: Callable[..., Any]
    advance: Callable[..., Any]
    grow: Callable[..., Any]
    narrow: Callable[..., Any]
    rehearsed: set[Any]
    """Shapes whose narrower programs are compiled; like the programs themselves it only ever grows."""


@dataclass(frozen=True)
class Stats:
    """What a rollout cost: response tokens over slots x decode steps (each shard its own), decode steps (those of the shard that
    ran longest, chunk by chunk), prompt tokens read (all but the last of each prompt, which its samples feed themselves), response
    tokens sampled (those behind a stop text included)."""

    slot_utilisation: float
    decode_steps: int
    prefill_tokens: int
    generated_tokens: int


def make_engine(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: Any,
    stop_ids: Sequence[int],
    decode_text: Callable[[Sequence[int]], str],
    stop_texts: Sequence[str] = (),
    chunk: int = 32,
    max_num_seqs: int | None = None,
    prompt_length: int,
    response_length: int,
) -> Engine:
    """Build an engine; programs compile at their first use and are reused for every batch, temperature and evaluation.

    `prompt_length + response_length` must fit the model's positions, else `ConfigError`. `stop_ids` may be empty only when
    every response should run to the limit. `max_num_seqs` is the number of slots; `None` gives every sample its own.
    """
    needed = prompt_length + response_length
    if needed > config.max_position:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {prompt_length} + {response_length} = {needed} tokens, "
            f"but the model reads {config.max_position} positions; shorten one of them"
        )
    how = {"dtype": dtype, "constrain": shards.make_constrain(mesh)}
    kv, state, window = shards.placements(config, mesh)
    split = shards.SPLIT
    each = partial(shards.each, mesh)

    def begin(bank: Any, starts: decode.Starts, *, columns: int) -> decode.DecodeState:
        one = partial(decode.begin, config, columns=columns, dtype=dtype)
        return each(one, (split.kv, split.starts), split.state)(bank, starts)

    return Engine(
        config=config,
        mesh=mesh,
        stop_ids=tuple(stop_ids),
        stop_texts=tuple(stop_texts),
        decode_text=decode_text,
        chunk=chunk,
        max_num_seqs=max_num_seqs,
        prompt_width=prompt_length,
        response_length=response_length,
        prefill=jax.jit(
            each(
                partial(decode.prefill, config, **how),
                (split.alike, split.rows, split.rows, split.kv),
                split.kv,
            ),
            donate_argnums=3,
            out_shardings=kv,
        ),
        begin=jax.jit(begin, static_argnames="columns", out_shardings=state),
        insert=jax.jit(
            each(decode.insert, (split.state, split.kv, split.starts), split.state),
            donate_argnums=0,
            out_shardings=state,
        ),
        advance=jax.jit(
            each(
                partial(decode.decode_chunk, config, window=min(chunk, response_length), **how),
                (split.alike, split.state, split.rows, split.alike, split.bounds, split.alike),
                (split.state, split.window),
            ),
            donate_argnums=1,
            out_shardings=(state, window),
        ),
        grow=jax.jit(caches.grow, static_argnames="columns", out_shardings=kv),
        narrow=jax.jit(
            each(decode.narrow, (split.state, split.rows), split.state), out_shardings=state
        ),
        rehearsed=set(),
    )


def check_prompts(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Refuse empty prompts and ids outside the vocabulary, which a device would clamp without a word, and prompts that are too long."""
    problems = []
    for prompt in prompts:
        outside = [token for token in prompt.ids if not 0 <= token < engine.config.vocab_size]
        if outside:
            problems.append(
                f"{prompt.row_id}: token id {outside[0]}, need ids from 0 to {engine.config.vocab_size - 1}; "
                "the tokenizer and the model do not belong together"
            )
        if not prompt.ids:
            problems.append(f"{prompt.row_id}: an empty prompt, need at least one token")
        if len(prompt.ids) > engine.prompt_width:
            problems.append(
                f"{prompt.row_id}: a prompt of {len(prompt.ids)} tokens, need at most {engine.prompt_width}; "
                "raise data.max_prompt_length or filter long prompts"
            )
    if problems:
        raise DataError(problems[:20])


# One rollout ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A rollout in progress on the host. Per row of the result `[B Tr]` and `[B]`; `active` lanes are the schedule's."""

    engine: Engine
    prompts: Sequence[Prompt]
    schedule: queue.Schedule
    tokens: np.ndarray
    logprobs: np.ndarray
    filtered_logprobs: np.ndarray
    lengths: np.ndarray
    end_reason: np.ndarray
    bad: int = 0
    finished: int = 0
    steps: int = 0
    slot_steps: int = 0
    prefilled: int = 0
    generated: int = 0


def generate(
    engine: Engine,
    params: Any,
    prompts: Sequence[Prompt],
    *,
    n: int,
    sampling: Sampling,
    seed: int,
    step: int,
    purpose: int,
    slots: int | None = None,
    on_finished: OnFinished | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[Rollout, Stats]:
    """Sample `n` responses per prompt with the given weights; members of a group are adjacent in the result.

    The random numbers of a response depend on `(seed, step, purpose, prompt_id, sample number, position)` only.
    `on_finished(row, ids)` is called once per response, as it ends. Rows with non-finite logits are counted in
    `Rollout.bad`; decoding then stops at once, nothing more is handed out, and unfinished rows hold what they have. `slots` is
    the number of prompts that shapes are made for (default: all of them), so that a smaller last batch needs no programs of its
    own. `poll` is called between chunks.
    """
    check_prompts(engine, prompts)
    run = _open(engine, prompts, max(slots or 0, len(prompts)), n)
    start = partial(_starts, run, np.array([seed, step, purpose], np.uint32))
    schedule = run.schedule
    state: Any = None
    bank: Any = None
    stop_ids = np.array(engine.stop_ids or (-1,), np.int32)
    rehearse = partial(_rehearse, engine, params, schedule.layout, stop_ids, sampling)
    while True:
        for fresh, units in schedule.fill():
            if fresh:
                kept = bank if schedule.layout.shards > 1 else None
                bank = engine.prefill(params, *_bank(run, fresh), kept)
            if state is None:
                state = engine.begin(bank, start(units), columns=_columns(engine, 1))
                rehearse(state, state.own.columns)
            else:
                state = engine.insert(state, bank, start(units))
        lanes = schedule.narrower()
        if lanes is not None:
            schedule.narrow(lanes)
            state = engine.narrow(state, sharding.put_rows(engine.mesh, lanes))
        longest = _longest(run)
        if longest.max() >= state.own.columns:
            wide = _columns(engine, int(longest.max()) + 1)
            rehearse(state, wide)
            state = state.replace(own=engine.grow(state.own, columns=wide))
        active = sharding.put_rows(engine.mesh, schedule.active)
        bounds = _bounds(run, state.own.columns - longest)
        state, window = engine.advance(params, state, active, stop_ids, bounds, sampling)
        finished = _collect(run, jax.device_get(window))
        if run.bad:
            break
        if on_finished:
            for row in finished:
                on_finished(row, run.tokens[row, : run.lengths[row]].tolist())
        poll()
        if not schedule.active.any() and not schedule.waiting:
            break
    return _result(run, step, bool(filters(sampling))), _stats(run)


def _rehearse(
    engine: Engine,
    params: Any,
    layout: queue.Layout,
    stop_ids: np.ndarray,
    sampling: Sampling,
    state: decode.DecodeState,
    columns: int,
) -> None:
    """Compile what fewer lanes will need at this number of columns, when it is first reached: every program runs on idle lanes.

    Otherwise a batch that ends unevenly would compile in the middle of a run. Nothing to do where all rows end together.
    """
    lanes = state.last.shape[0]
    shapes = (layout, lanes, columns)
    if shapes in engine.rehearsed or not (engine.stop_ids or engine.stop_texts):
        return
    engine.rehearsed.add(shapes)
    for width in [width for width in queue.widths(layout) if width < lanes]:
        parts = layout.shards
        first = np.tile(np.arange(width // parts, dtype=np.int32), parts)
        fewer = engine.narrow(state, sharding.put_rows(engine.mesh, first))
        if columns > fewer.own.columns:
            fewer = fewer.replace(own=engine.grow(fewer.own, columns=columns))
        _rehearse(engine, params, layout, stop_ids, sampling, fewer, columns)
        idle = sharding.put_rows(engine.mesh, np.zeros((width,), bool))
        none = sharding.put_rows(engine.mesh, np.zeros((parts,), np.int32))
        bounds = decode.Bounds(none, none, np.int32(0))
        engine.advance(params, fewer, idle, stop_ids, bounds, sampling)


def _columns(engine: Engine, needed: int) -> int:
    return queue.columns(needed, engine.response_length)


def _longest(run: _Run) -> np.ndarray:
    """Tokens of the longest response that runs in each shard, `[shards]`, 0 where none does."""
    schedule = run.schedule
    lengths = np.where(schedule.active, run.lengths[schedule.rows], 0)
    longest: np.ndarray = schedule.by_shard(lengths).max(axis=1)
    return longest


def _bounds(run: _Run, room: np.ndarray) -> decode.Bounds:
    """How far the next chunk goes, in shards whose longest lanes have `room` for so many tokens."""
    patience = run.schedule.patience(run.finished, run.generated)
    steps = room if patience is None else np.minimum(room, patience)
    by_shard = (steps.astype(np.int32), run.schedule.enough())
    steps, enough = sharding.put_rows(run.engine.mesh, by_shard)
    return decode.Bounds(steps, enough, limit=np.int32(run.engine.response_length))


def _open(engine: Engine, prompts: Sequence[Prompt], slots: int, n: int) -> _Run:
    layout = queue.make_layout(
        slots,
        n,
        max_num_seqs=engine.max_num_seqs,
        shards=sharding.shards(engine.mesh),
        prompt_width=engine.prompt_width,
    )
    rows = len(prompts) * n
    shape = (rows, engine.response_length)
    return _Run(
        engine=engine,
        prompts=prompts,
        schedule=queue.Schedule(layout, len(prompts), n),
        tokens=np.zeros(shape, np.int32),
        logprobs=np.zeros(shape, np.float32),
        filtered_logprobs=np.zeros(shape, np.float32),
        lengths=np.zeros((rows,), np.int32),
        end_reason=np.full((rows,), END_LENGTH, np.int32),
    )


def _bank(run: _Run, prompts: Sequence[int]) -> tuple[Any, Any]:
    """Tokens and lengths of what enters the bank: all but the last token of each prompt, which its samples feed themselves."""
    bank = run.schedule.layout.bank
    tokens = np.zeros((bank, run.engine.prompt_width), np.int32)
    lengths = np.zeros((bank,), np.int32)
    for prompt in prompts:
        row, ids = run.schedule.places[prompt], run.prompts[prompt].ids[:-1]
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    run.prefilled += int(lengths.sum())
    placed = sharding.put_rows(run.engine.mesh, (tokens, lengths))
    return placed[0], placed[1]


def _starts(run: _Run, stream: np.ndarray, units: Sequence[int]) -> decode.Starts:
    """What the schedule has just put into these units, as arrays for the device."""
    schedule, layout = run.schedule, run.schedule.layout
    per_shard, rows = layout.units // layout.shards, schedule.rows
    moves = np.zeros((layout.shards, per_shard), np.int32)
    count = np.zeros((layout.shards,), np.int32)
    bank_rows, seen = np.zeros((2, layout.units), np.int32)
    fresh = np.zeros((layout.lanes,), bool)
    prompt_ids, samples, last = np.zeros((3, layout.lanes), np.int32)
    for unit in units:
        shard = schedule.shard_of(unit)
        moves[shard, count[shard]] = unit % per_shard
        count[shard] += 1
        lanes = slice(unit * layout.share, (unit + 1) * layout.share)
        number = int(rows[lanes][0]) // schedule.n
        prompt = run.prompts[number]
        bank_rows[unit] = schedule.places[number] % (layout.bank // layout.shards)
        seen[unit] = len(prompt.ids) - 1
        fresh[lanes], samples[lanes] = True, rows[lanes] % schedule.n
        prompt_ids[lanes], last[lanes] = prompt.prompt_id, prompt.ids[-1]
    by_row = {
        "moves": moves.ravel(),
        "count": count,
        "rows": bank_rows,
        "seen": seen,
        "fresh": fresh,
        "prompt_ids": prompt_ids,
        "samples": samples,
        "last": last,
    }
    return decode.Starts(stream=stream, **sharding.put_rows(run.engine.mesh, by_row))


# What comes back from a chunk ----------------------------------------------------------------------------------------


def _collect(run: _Run, window: Any) -> list[int]:
    """Enter a chunk into the run; returns the rows that it finished, unless some logits were not finite (`run.bad`)."""
    schedule, engine = run.schedule, run.engine
    run.bad = int(np.sum(~window.finite & schedule.active))
    run.steps += int(window.steps.max())
    run.slot_steps += int(window.steps.sum()) * len(schedule.rows) // len(window.steps)
    run.generated += int(window.counts.sum())
    over = window.done.copy()
    for lane in np.flatnonzero(schedule.active).tolist():
        row, count = int(schedule.rows[lane]), int(window.counts[lane])
        before = int(run.lengths[row])
        here = slice(before, before + count)
        run.tokens[row, here] = window.tokens[lane, :count]
        run.logprobs[row, here] = window.logprobs[lane, :count]
        run.filtered_logprobs[row, here] = window.filtered_logprobs[lane, :count]
        run.lengths[row] = before + count
        if window.ended[lane]:
            run.end_reason[row] = END_EOS
        stop = _find_stop_text(engine, run.tokens[row, : before + count], count)
        if stop is not None:
            run.lengths[row], run.end_reason[row], over[lane] = stop, END_STOP, True
    if run.bad:
        return []
    finished = sorted(schedule.rows[over].tolist())
    run.finished += len(finished)
    schedule.finish(over)
    return finished


def _find_stop_text(engine: Engine, tokens: np.ndarray, new: int) -> int | None:
    """The length up to the token that completes a stop text, of which at least one of the `new` last tokens is part."""
    if not engine.stop_texts or not new:
        return None
    first = max(0, len(tokens) - new - 8 * max(len(text) for text in engine.stop_texts))
    ids = tokens[first:].tolist()
    if not _has_stop(engine, ids):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _has_stop(engine, ids[:middle]) else (middle + 1, high)
    return first + low


def _has_stop(engine: Engine, ids: Sequence[int]) -> bool:
    text = engine.decode_text(ids)
    return any(stop in text for stop in engine.stop_texts)


def _result(run: _Run, step: int, filtered: bool) -> Rollout:
    width, count = run.engine.prompt_width, len(run.prompts)
    prompt_tokens = np.zeros((count, width), np.int32)
    for row, prompt in enumerate(run.prompts):
        prompt_tokens[row, width - len(prompt.ids) :] = prompt.ids
    mask = np.arange(run.tokens.shape[1]) < run.lengths[:, None]
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=np.array([len(prompt.ids) for prompt in run.prompts], np.int32),
        response_tokens=np.where(mask, run.tokens, 0),
        response_lengths=run.lengths,
        response_mask=mask,
        loss_mask=mask.copy(),
        sampler_logprobs=np.where(mask, run.logprobs, 0.0),
        filtered_logprobs=np.where(mask, run.filtered_logprobs, 0.0) if filtered else None,
        end_reason=run.end_reason,
        policy_step=np.full(run.lengths.shape, step, np.int32),
        bad=run.bad,
    )


def _stats(run: _Run) -> Stats:
    return Stats(run.generated / run.slot_steps, run.steps, run.prefilled, run.generated)


def truncated(rollout: Rollout) -> np.ndarray:
    """Which responses `[B]` ran into the length limit."""
    return rollout.end_reason == END_LENGTH
