"""The rollout engine: prompts in, finished responses out, on the host's side of the decode programs.

Prompts go through in waves of at most `max_num_seqs` samples. Each is prefilled once and fanned out to its group; decode
runs in compiled chunks, and between two chunks the host looks for stop texts and hands finished responses on, so that
grading overlaps with decoding.

Left out on purpose: slots refilled while others decode, a cache shared inside a group, and several processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.packing import bucket, buckets
from jaxrl_llm.records import END_LENGTH, END_STOP, Prompt, Rollout
from jaxrl_llm.rollout import decode
from jaxrl_llm.rollout.sampling import Sampling, row_keys

OnFinished = Callable[[int, int, list[int]], None]
"""Called with the first row of a wave, the row within the wave, and the response's ids."""


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
    prompt_buckets: tuple[int, ...]
    response_length: int
    prefill: Callable[..., Any]
    start: Callable[..., Any]
    advance: Callable[..., Any]
    keys: Callable[..., Any]


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
    """Build an engine; programs compile at their first use and are reused for every wave, temperature and evaluation.

    `prompt_length + response_length` must fit the model's positions, else `ConfigError`. `stop_ids` may be empty only when
    every response should run to the limit.
    """
    needed = prompt_length + response_length
    if needed > config.max_position:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {prompt_length} + {response_length} = {needed} tokens, "
            f"but the model reads {config.max_position} positions; shorten one of them"
        )
    constrain = sharding.make_constrain(mesh)
    cache, state = _placements(config, mesh)
    return Engine(
        config=config,
        mesh=mesh,
        stop_ids=tuple(stop_ids),
        stop_texts=tuple(stop_texts),
        decode_text=decode_text,
        chunk=chunk,
        max_num_seqs=max_num_seqs,
        prompt_buckets=buckets(prompt_length),
        response_length=response_length,
        prefill=jax.jit(
            partial(decode.prefill, config, dtype=dtype, constrain=constrain),
            static_argnames="slots",
            out_shardings=(cache, sharding.rows(mesh)),
        ),
        start=jax.jit(
            decode.start,
            static_argnames=("group", "prompt_width", "response_width"),
            out_shardings=state,
        ),
        advance=jax.jit(
            partial(decode.decode_chunk, config, steps=chunk, dtype=dtype, constrain=constrain),
            donate_argnums=1,
            out_shardings=state,
        ),
        keys=jax.jit(row_keys, out_shardings=sharding.rows(mesh)),
    )


def _placements(config: ModelConfig, mesh: Mesh) -> tuple[caches.KVCache, decode.DecodeState]:
    """Shardings of a cache and of a decode state: fixed, or the second chunk would meet others than the first and compile anew."""
    row, whole = sharding.rows(mesh), sharding.replicated(mesh)
    shape = (config.num_layers, sharding.shards(mesh), 1, config.num_kv_heads, config.head_size)
    kv = NamedSharding(mesh, sharding.spec(mesh, "LBSKH", shape, sharding.ACTIVATION_AXES))
    cache = caches.KVCache(k=kv, v=kv, segments=row, positions=row, length=whole)  # type: ignore[arg-type]
    names = {field.name: row for field in fields(decode.DecodeState)}
    return cache, decode.DecodeState(**{**names, "cache": cache, "column": whole})  # type: ignore[arg-type]


def check_prompts(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Refuse empty prompts and ids outside the vocabulary, which a device would clamp without a word."""
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
    if problems:
        raise DataError(problems[:20])


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
) -> Rollout:
    """Sample `n` responses per prompt with the given weights; members of a group are adjacent in the result.

    The random numbers of a response depend on `(seed, step, purpose, prompt_id, sample number, position)` only.
    `on_finished(first, row, ids)` is called once per response, as it ends: it is row `first + row` of the result. Rows with
    non-finite logits are counted in `Rollout.bad`; decoding then stops at once, nothing more is handed out, and the result
    ends with that wave. A wave holds at least one prompt per data shard, whatever `max_num_seqs` says. `slots` is the number of prompts that a wave is filled up to (default: all
    of them), so that a smaller last batch needs no programs of its own. `poll` is called between chunks.
    """
    check_prompts(engine, prompts)
    width = bucket(max(len(prompt.ids) for prompt in prompts), engine.prompt_buckets)
    shards = sharding.shards(engine.mesh)
    per_shard = -(-(slots or len(prompts)) // shards)
    if engine.max_num_seqs is not None:
        per_shard = min(per_shard, max(1, engine.max_num_seqs // n // shards))
    at_once = per_shard * shards
    waves = []
    for first in range(0, len(prompts), at_once):
        here = prompts[first : first + at_once]
        forward = partial(on_finished, first * n) if on_finished else None
        waves.append(
            _wave(
                engine,
                params,
                here,
                at_once,
                width,
                n,
                sampling,
                (seed, step, purpose),
                forward,
                poll,
            )
        )
        if waves[-1]["bad"]:
            break
    return _assemble(
        prompts,
        waves,
        n,
        width,
        step,
        filtered=bool(np.any(sampling.top_k > 0) | (sampling.top_p < 1)),
    )


def _wave(
    engine: Engine,
    params: Any,
    prompts: Sequence[Prompt],
    slots: int,
    width: int,
    n: int,
    sampling: Sampling,
    stream: tuple[int, int, int],
    on_finished: Callable[..., None] | None,
    poll: Callable[[], None],
) -> dict[str, Any]:
    """Decode one wave of `slots` prompts (missing ones are idle rows) and return its host arrays."""
    tokens = np.zeros((slots, width), np.int32)
    lengths = np.ones((slots,), np.int32)
    ids = np.zeros((slots,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt.ids) :] = prompt.ids
        lengths[row], ids[row] = len(prompt.ids), prompt.prompt_id
    idle = np.repeat(np.arange(slots) >= len(prompts), n)
    placed = partial(sharding.put_rows, engine.mesh)
    stop_ids = np.array(engine.stop_ids or (-1,), np.int32)
    keys = engine.keys(
        *(np.uint32(value) for value in stream),
        placed(np.repeat(ids, n)),
        placed(np.tile(np.arange(n, dtype=np.int32), slots)),
    )
    cache, logits = engine.prefill(
        params, placed(tokens), placed(lengths), slots=width + engine.response_length - 1
    )
    state = engine.start(
        cache,
        logits,
        placed(lengths),
        keys,
        placed(idle),
        stop_ids,
        sampling,
        group=n,
        prompt_width=width,
        response_width=engine.response_length,
    )
    stopped_at: dict[int, int] = {}
    handed = set(np.flatnonzero(idle).tolist())
    while True:
        done, finite, length, column = jax.device_get(
            (state.done, state.finite, state.lengths, state.column)
        )
        bad = int(np.sum(~finite & ~idle))
        if bad:
            break
        stopped = _find_stop_texts(engine, state, length, handed, stopped_at)
        finished = [row for row in np.flatnonzero(done | stopped).tolist() if row not in handed]
        if on_finished and finished:
            sampled = jax.device_get(state.tokens)
            for row in finished:
                on_finished(row, sampled[row, : stopped_at.get(row, int(length[row]))].tolist())
        handed.update(finished)
        poll()
        if np.all(done | stopped) or column >= engine.response_length:
            break
        state = engine.advance(params, state, placed(stopped), stop_ids, sampling)
    names = ("tokens", "logprobs", "filtered_logprobs", "lengths", "end_reason")
    host = {
        name: np.array(value)
        for name, value in zip(
            names, jax.device_get(tuple(getattr(state, name) for name in names)), strict=True
        )
    }
    for row, end in stopped_at.items():
        host["lengths"][row], host["end_reason"][row] = end, END_STOP
    real = len(prompts) * n
    return {"bad": bad} | {name: value[:real] for name, value in host.items()}


def _find_stop_texts(
    engine: Engine,
    state: decode.DecodeState,
    lengths: np.ndarray,
    handed: set[int],
    stopped_at: dict[int, int],
) -> np.ndarray:
    """Rows whose response contains a stop text; `stopped_at` receives the length up to the token that completes it.

    Rows already `handed` out are not read again.
    """
    stopped = np.zeros(lengths.shape, bool)
    stopped[list(stopped_at)] = True
    if not engine.stop_texts:
        return stopped
    tokens = jax.device_get(state.tokens)
    reach = engine.chunk + 8 * max(len(text) for text in engine.stop_texts)
    for row in sorted(set(range(len(lengths))) - handed):
        length = int(lengths[row])
        first = max(0, length - reach)
        ids = tokens[row, first:length].tolist()
        if not _has_stop(engine, ids):
            continue
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _has_stop(engine, ids[:middle]) else (middle + 1, high)
        stopped_at[row], stopped[row] = first + low, True
    return stopped


def _has_stop(engine: Engine, ids: Sequence[int]) -> bool:
    text = engine.decode_text(ids)
    return any(stop in text for stop in engine.stop_texts)


def _assemble(
    prompts: Sequence[Prompt],
    waves: list[dict[str, Any]],
    n: int,
    width: int,
    step: int,
    filtered: bool,
) -> Rollout:
    bad = sum(wave["bad"] for wave in waves)
    host = {
        name: np.concatenate([wave[name] for wave in waves]) for name in waves[0] if name != "bad"
    }
    rows = host["lengths"].shape[0]
    prompt_tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        prompt_tokens[row, width - len(prompt.ids) :] = prompt.ids
    mask = np.arange(host["tokens"].shape[1]) < host["lengths"][:, None]
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_lengths=np.array([len(prompt.ids) for prompt in prompts], np.int32),
        response_tokens=np.where(mask, host["tokens"], 0),
        response_lengths=host["lengths"],
        response_mask=mask,
        loss_mask=mask.copy(),
        sampler_logprobs=np.where(mask, host["logprobs"], 0.0),
        filtered_logprobs=np.where(mask, host["filtered_logprobs"], 0.0) if filtered else None,
        end_reason=host["end_reason"],
        policy_step=np.full((rows,), step, np.int32),
        bad=bad,
    )


def truncated(rollout: Rollout) -> np.ndarray:
    """Which responses `[B]` ran into the length limit."""
    return rollout.end_reason == END_LENGTH
