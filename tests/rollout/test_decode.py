"""Prefill, start and decode as pure functions, against the plain forward pass without a cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import heads, transformer
from jaxrl_llm.records import END_EOS, END_LENGTH
from jaxrl_llm.rollout import decode
from jaxrl_llm.rollout.sampling import make_sampling, row_keys
from tests import tiny

CONFIG = tiny.model()
PROMPTS = ((5, 0, 6), (0, 9), (3, 4, 5, 6, 7), (8,))
WIDTH, RESPONSE = 5, 6
NEVER = np.int32([-1])

prefill = jax.jit(partial(decode.prefill, CONFIG, dtype=jnp.float32), static_argnames="slots")
start = jax.jit(decode.start, static_argnames=("group", "prompt_width", "response_width"))
advance = jax.jit(partial(decode.decode_chunk, CONFIG, steps=2, dtype=jnp.float32))


@jax.jit
def forward(params, tokens):
    """Logits of whole rows `[B T]` that begin at column 0; what comes behind a column cannot change it."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = transformer.apply(CONFIG, params, tokens, columns, jnp.ones_like(tokens))
    return heads.logits(CONFIG, params, hidden)


@pytest.fixture(scope="module")
def params():
    return tiny.params(tiny.mesh(), 8.0)


def padded():
    tokens = np.zeros((len(PROMPTS), WIDTH), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, WIDTH - len(prompt) :] = prompt
    return tokens, np.int32([len(prompt) for prompt in PROMPTS])


def begin(
    params, sampling, stop_ids=NEVER, idle=None, slots=WIDTH + RESPONSE - 1, response=RESPONSE
):
    tokens, lengths = padded()
    cache, logits = prefill(params, tokens, lengths, slots=slots)
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    keys = row_keys(np.uint32(1), np.uint32(2), np.uint32(0), rows, 0 * rows)
    idle = np.zeros(len(PROMPTS), bool) if idle is None else idle
    return start(
        cache, logits, lengths, keys, idle, stop_ids, sampling,
        group=1, prompt_width=WIDTH, response_width=response,
    )  # fmt: skip


def finish(params, state, sampling, stop_ids=NEVER):
    nobody = np.zeros(len(PROMPTS), bool)
    for _ in range(RESPONSE):
        state = advance(params, state, nobody, stop_ids, sampling)
    return state


def greedy_by_hand(params):
    rows = np.zeros((len(PROMPTS), WIDTH + RESPONSE), np.int32)
    lengths = padded()[1]
    for row, prompt in enumerate(PROMPTS):
        rows[row, : len(prompt)] = prompt
    every = np.arange(len(PROMPTS))
    for step in range(RESPONSE):
        logits = np.asarray(forward(params, rows))
        rows[every, lengths + step] = logits[every, lengths + step - 1].argmax(axis=-1)
    return np.stack([rows[row, n : n + RESPONSE] for row, n in enumerate(lengths)])


GREEDY = make_sampling(greedy=True)


def test_prefill_reads_left_padded_prompts_as_if_alone(params):
    tokens, lengths = padded()
    cache, logits = prefill(params, tokens, lengths, slots=WIDTH + RESPONSE - 1)
    rows = np.zeros((len(PROMPTS), WIDTH + RESPONSE), np.int32)
    for row, prompt in enumerate(PROMPTS):
        rows[row, : len(prompt)] = prompt
    alone = np.asarray(forward(params, rows))[np.arange(len(PROMPTS)), lengths - 1]
    np.testing.assert_allclose(logits, alone, atol=1e-5, rtol=0)
    held = np.asarray(cache.segments)
    np.testing.assert_array_equal(held[:, :WIDTH].sum(axis=1), lengths)
    assert not held[:, WIDTH:].any()
    np.testing.assert_array_equal(np.asarray(cache.positions)[0, :WIDTH], [0, 0, 0, 1, 2])


def test_greedy_equals_a_plain_argmax_loop_in_a_cache_without_a_slot_to_spare(params):
    state = finish(params, begin(params, GREEDY), GREEDY)
    np.testing.assert_array_equal(state.tokens, greedy_by_hand(params))
    assert state.cache.length == state.cache.k.shape[2] == WIDTH + RESPONSE - 1
    assert state.column == RESPONSE
    np.testing.assert_array_equal(state.lengths, [RESPONSE] * 4)
    np.testing.assert_array_equal(state.end_reason, [END_LENGTH] * 4)
    assert state.done.all() and state.finite.all()


def test_a_cache_one_slot_short_is_refused(params):
    with pytest.raises(
        ConfigError, match=r"9 slots for 5 tokens held and 5 new ones, need at least 10"
    ):
        begin(params, GREEDY, slots=WIDTH + RESPONSE - 2)
    with pytest.raises(ConfigError, match="4 slots"):
        begin(params, GREEDY, slots=WIDTH - 1)


def test_a_chunk_runs_its_steps_and_no_further_than_the_limit(params):
    nobody = np.zeros(len(PROMPTS), bool)
    state, columns = begin(params, GREEDY), []
    for _ in range(4):
        columns.append(int(state.column))
        state = advance(params, state, nobody, NEVER, GREEDY)
    assert columns == [1, 3, 5, 6]
    assert state.column == 6


def test_one_token_needs_no_decode_step(params):
    state = begin(params, GREEDY, slots=WIDTH, response=1)
    assert state.done.all() and state.column == 1
    np.testing.assert_array_equal(state.tokens[:, 0], greedy_by_hand(params)[:, 0])


def test_stop_ids_end_a_row_after_themselves_and_leave_the_others_alone(params):
    whole = greedy_by_hand(params)
    ends = np.int32([whole[0, 2]])
    state = finish(params, begin(params, GREEDY, ends), GREEDY, ends)
    for row, tokens in enumerate(whole.tolist()):
        length = tokens.index(int(ends[0])) + 1 if ends[0] in tokens else RESPONSE
        assert state.lengths[row] == length
        assert state.end_reason[row] == (END_EOS if ends[0] in tokens else END_LENGTH)
        np.testing.assert_array_equal(
            state.tokens[row], tokens[:length] + [0] * (RESPONSE - length)
        )
        assert not np.asarray(state.logprobs)[row, length:].any()
    assert state.lengths[0] <= 3


def test_idle_and_stopped_rows_stand_still_and_a_finished_batch_ends_the_loop(params):
    idle = np.array([False, True, False, True])
    state = begin(params, GREEDY, idle=idle)
    np.testing.assert_array_equal(state.lengths, [1, 0, 1, 0])
    state = advance(params, state, np.array([True, False, False, False]), NEVER, GREEDY)
    np.testing.assert_array_equal(state.lengths, [1, 0, 3, 0])
    assert not np.asarray(state.tokens)[[1, 3]].any()
    before = int(state.column)
    state = advance(params, state, ~idle, NEVER, GREEDY)
    assert state.column == before


def test_a_row_that_ends_does_not_change_the_others(params):
    sampling = make_sampling(1.0)
    free = finish(params, begin(params, sampling), sampling)
    idle = np.array([True, True, False, True])
    alone = finish(params, begin(params, sampling, idle=idle), sampling)
    np.testing.assert_array_equal(free.tokens[2], alone.tokens[2])
    np.testing.assert_array_equal(free.logprobs[2], alone.logprobs[2])


def test_logits_that_are_not_numbers_mark_their_row(params):
    broken = jax.tree.map(lambda x: x, params)
    broken["embed"]["kernel"] = broken["embed"]["kernel"].at[9, 0].set(jnp.nan)
    state = begin(broken, GREEDY)
    np.testing.assert_array_equal(state.finite, [True, False, True, True])
    idle = np.array([False, True, False, False])
    assert begin(broken, GREEDY, idle=idle).finite.all()


def test_is_stop_knows_every_id_and_its_padding():
    tokens = jnp.int32([0, 5, 7, 5])
    np.testing.assert_array_equal(
        decode.is_stop(tokens, jnp.int32([5, 7])), [False, True, True, True]
    )
    np.testing.assert_array_equal(
        decode.is_stop(tokens, jnp.int32([0, -1])), [True, False, False, False]
    )
    assert not decode.is_stop(tokens, jnp.int32(NEVER)).any()
