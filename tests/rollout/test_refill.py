"""Slots, refills and growing keys through the whole engine; the scheduler alone is tested in `test_queue`."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.metrics import CompileCounter
from jaxrl_llm.rollout import queue
from jaxrl_llm.rollout.engine import make_engine
from jaxrl_llm.rollout.sampling import make_sampling
from tests import tiny
from tests.rollout.rig import (
    CHUNK,
    CONFIG,
    FEW,
    IDS,
    NEVER,
    PROMPTS,
    RESPONSE,
    WIDTH,
    build,
    identical,
    prompt,
    rollout,
    same_up_to_ties,
    text,
    weights,
    with_stats,
)
from tests.rollout.test_queue import drive, make


def test_refilled_slots_give_the_same_bits_in_any_order_and_company(engine, params, free):
    """Stop ids make lengths uneven, so that slots are refilled one by one, in another order when the queue is turned round."""
    ends = tuple(int(token) for token in free.response_tokens[[0, 3, 5, 8], [2, 4, 1, 6]])
    few = replace(engine, stop_ids=ends, **FEW)
    result, stats = with_stats(few, params)
    assert len(set(result.response_lengths.tolist())) > 3
    assert stats.decode_steps < 3 * RESPONSE
    order = np.arange(12).reshape(6, 2)[::-1].ravel()
    identical(result, rollout(few, params, prompts=PROMPTS[::-1]), order=order)
    identical(result, rollout(few, params, prompts=PROMPTS[2:5]), rows=slice(4, 10))
    identical(result, rollout(replace(few, chunk=1), params))


def test_own_keys_grow_when_a_response_needs_it_and_change_no_token(params, free, monkeypatch):
    monkeypatch.setattr(queue, "FIRST_COLUMNS", 4)
    engine, grown = build(tiny.mesh()), []
    counting = replace(
        engine, grow=lambda own, columns: grown.append(columns) or engine.grow(own, columns=columns)
    )
    same_up_to_ties(params, free, rollout(counting, params))
    assert grown == [8, 10]
    grown.clear()
    ends = tuple(set(free.response_tokens[:, :4].ravel().tolist()))
    short = rollout(replace(counting, stop_ids=ends), params)
    assert short.response_lengths.max() <= 4 and grown == []


def test_a_room_too_large_is_not_used(params, free):
    """Responses that end within the first bucket run the programs of a small limit: keys of 64 columns, not of 48 * 8."""
    config, shapes = replace(CONFIG, max_position=1024), []
    engine = make_engine(
        config, tiny.mesh(), dtype=jnp.float32, stop_ids=tuple(range(0, 150, 2)), decode_text=text,
        chunk=CHUNK, prompt_length=WIDTH, response_length=512,
    )  # fmt: skip

    def advance(params, state, *rest):
        shapes.append(state.own.k.shape)
        return engine.advance(params, state, *rest)

    result = rollout(replace(engine, advance=advance), params)
    assert result.response_tokens.shape == (12, 512) and result.response_lengths.max() < 60
    assert {shape[3] for shape in shapes} == {64}


@pytest.mark.parametrize(("n", "changes"), [(2, {}), (2, FEW), (1, FEW), (5, FEW)])
def test_every_prompt_is_prefilled_once_whatever_the_group_and_the_slots(
    engine, params, n, changes
):
    seen = []

    def prefill(params, tokens, lengths, kept):
        rows = zip(np.asarray(tokens).tolist(), np.asarray(lengths).tolist(), strict=True)
        seen.extend(tuple(ids[:length]) for ids, length in rows if length)
        return engine.prefill(params, tokens, lengths, kept)

    _, stats = with_stats(replace(engine, prefill=prefill, **changes), params, n=n)
    assert sorted(seen) == sorted(ids[:-1] for ids in IDS if len(ids) > 1)
    assert stats.prefill_tokens == sum(len(ids) - 1 for ids in IDS)


def test_stats_count_steps_slots_and_tokens(engine, params, free):
    _, stats = with_stats(engine, params)
    assert stats.decode_steps == RESPONSE and stats.generated_tokens == 12 * RESPONSE
    assert stats.slot_utilisation == 1.0
    ends = (int(free.response_tokens[0, 2]), -1)
    result, stats = with_stats(replace(engine, stop_ids=ends), params)
    tokens = int(result.response_lengths.sum())
    assert stats.generated_tokens == tokens < 12 * RESPONSE
    assert stats.slot_utilisation == pytest.approx(tokens / (12 * RESPONSE))
    _, stats = with_stats(engine, params, prompts=PROMPTS[:3])
    assert stats.slot_utilisation == 0.5


def test_uneven_responses_use_the_slots_as_the_scheduler_alone_predicts(params):
    """128 samples in 16 slots, ended by one token in six: drained at the end in 8, otherwise refilled."""
    engine = build(
        tiny.mesh(), stop_ids=tuple(range(0, 150, 6)), response_length=40, max_num_seqs=16, chunk=8
    )
    prompts = [prompt(100 + number, (3 + number, 7)) for number in range(32)]
    result, stats = with_stats(engine, params, prompts=prompts, n=4, slots=None)
    lengths = result.response_lengths
    assert lengths.min() == 1 and lengths.max() > 15
    slot_steps, _, _ = drive(make(32, 4, 16), lengths, chunk=8)
    assert stats.generated_tokens == lengths.sum()
    assert stats.slot_utilisation == pytest.approx(lengths.sum() / slot_steps)
    assert stats.slot_utilisation > 0.8


def test_slots_are_never_more_than_allowed_and_at_least_one_per_shard():
    """8 prompts of 2 on 4 data shards: 16 samples at once, or as many lanes of their own as fit."""
    for allowed, lanes, share, bank in (
        (16, 16, 2, 8), (None, 16, 2, 8), (13, 12, 1, 4), (8, 8, 1, 4), (2, 4, 1, 4), (100, 16, 2, 8),
    ):  # fmt: skip
        layout = queue.make_layout(8, 2, max_num_seqs=allowed, shards=4, prompt_width=8)
        assert (layout.lanes, layout.share, layout.bank) == (lanes, share, bank)
        assert layout.units % 4 == 0


def test_few_slots_on_eight_devices(params, free):
    mesh = tiny.mesh(2, 2, 2)
    engine = build(mesh, max_num_seqs=4)
    same_up_to_ties(params, free, rollout(engine, weights(mesh)))
    counter = CompileCounter()
    rollout(engine, weights(mesh), make_sampling(0.5, 3, 0.9), prompts=PROMPTS[1:])
    assert counter.delta() == 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_going_on_in_fewer_slots_changes_no_sample_and_compiles_once(
    params, free, monkeypatch, shape
):
    """12 lanes (16 on four data shards) shrink to 6 or 2 (8 or 4) while the longest responses go on."""
    monkeypatch.setattr(queue, "FEWEST", 1)
    ends = tuple(int(token) for token in set(free.response_tokens[:9, 2:5].ravel().tolist()))
    mesh, widths = tiny.mesh(*shape), []
    engine = build(mesh, stop_ids=ends)

    def advance(params, state, active, *rest):
        if np.any(active):  # not the idle lanes on which narrower programs are rehearsed
            widths.append((len(state.last), len(state.seen)))
        return engine.advance(params, state, active, *rest)

    placed = weights(mesh)
    result = rollout(replace(engine, advance=advance), placed)
    wide = rollout(replace(engine, stop_ids=NEVER), placed)
    hit = np.isin(wide.response_tokens, ends)
    lengths = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, RESPONSE)
    np.testing.assert_array_equal(result.response_lengths, lengths)
    np.testing.assert_array_equal(
        result.response_tokens, np.where(result.response_mask, wide.response_tokens, 0)
    )
    full, half, few = ((12, 6), (6, 6), (2, 2)) if shape == (1, 1, 1) else ((16, 8), (8, 8), (4, 4))
    assert {full, few} <= set(widths) <= {full, half, few}
    assert widths == sorted(widths, reverse=True)
    counter = CompileCounter()
    rollout(engine, placed)
    assert counter.delta() == 0
