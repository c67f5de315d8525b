"""Prefill, insert and decode as pure functions, against the plain forward pass without a cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models import families, heads, transformer
from jaxrl_llm.rollout import decode
from jaxrl_llm.rollout.sampling import TRAIN, make_sampling
from tests import tiny

CONFIG = tiny.model()
PROMPTS = ((5, 0, 6), (0, 9), (3, 4, 5, 6, 7), (8,))
WIDTH, RESPONSE = 5, 6
NEVER = np.int32([-1])
GREEDY, PLAIN = make_sampling(greedy=True), make_sampling(1.0)
NOBODY, EVERYBODY = np.zeros(4, bool), np.ones(4, bool)

prefill = jax.jit(partial(decode.prefill, CONFIG, dtype=jnp.float32))
begin = jax.jit(partial(decode.begin, CONFIG, dtype=jnp.float32), static_argnames="columns")
insert = jax.jit(decode.insert)
grow = jax.jit(caches.grow, static_argnames="columns")
narrow = jax.jit(decode.narrow)
advance = jax.jit(partial(decode.decode_chunk, CONFIG, window=4, dtype=jnp.float32))


@jax.jit
def forward(params, tokens):
    """Logits of whole rows `[B T]` that begin at column 0; what comes behind a column cannot change it."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = transformer.apply(CONFIG, params, tokens, columns, jnp.ones_like(tokens))
    return heads.logits(CONFIG, params, hidden)


@pytest.fixture(scope="module")
def params():
    return tiny.params(tiny.mesh(), 8.0)


def padded(cut=0):
    """Prompts, each without its last `cut` tokens, right-padded, and what is left of their lengths."""
    tokens = np.zeros((len(PROMPTS), WIDTH), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt) - cut] = prompt[: len(prompt) - cut]
    return tokens, np.int32([len(prompt) - cut for prompt in PROMPTS])


def starts(units=4, share=1, only=None):
    """One unit per prompt, `share` samples each; `only` these units begin."""
    chosen = list(range(units)) if only is None else only
    fresh = np.isin(np.repeat(np.arange(units), share), chosen)
    return decode.Starts(
        moves=np.int32(chosen + [0] * (units - len(chosen))),
        count=np.int32([len(chosen)]),
        rows=np.arange(units, dtype=np.int32),
        seen=np.int32([len(prompt) - 1 for prompt in PROMPTS[:units]]),
        fresh=fresh,
        prompt_ids=np.repeat(np.arange(units, dtype=np.int32), share),
        samples=np.tile(np.arange(share, dtype=np.int32), units),
        last=np.int32(np.repeat([prompt[-1] for prompt in PROMPTS[:units]], share)),
        stream=np.uint32([1, 2, TRAIN]),
    )


def bounds(steps=RESPONSE, enough=0, limit=RESPONSE):
    return decode.Bounds(np.int32([steps]), np.int32([enough]), np.int32(limit))


def opened(params, share=1, columns=RESPONSE):
    return begin(prefill(params, *padded(1)), starts(share=share), columns=columns)


def decoded(params, state, active=None, sampling=GREEDY, ends=NEVER, **limits):
    """Chunks until nothing is active: tokens `[B RESPONSE]`, log-probs, lengths and who met a stop id."""
    active = np.ones(len(state.last), bool) if active is None else active
    tokens = np.zeros((len(active), RESPONSE), np.int32)
    logprobs, ended = np.zeros(tokens.shape, np.float32), np.zeros(len(active), bool)
    lengths = np.asarray(state.lengths).copy()
    while active.any():
        state, window = advance(params, state, active, ends, bounds(**limits), sampling)
        for lane, count in enumerate(window.counts.tolist()):
            here = slice(lengths[lane], lengths[lane] + count)
            tokens[lane, here] = window.tokens[lane, :count]
            logprobs[lane, here] = window.logprobs[lane, :count]
        lengths, ended = lengths + np.asarray(window.counts), ended | np.asarray(window.ended)
        active = active & ~np.asarray(window.done)
        assert window.finite.all()
    return tokens, logprobs, lengths, ended


def greedy_by_hand(params):
    tokens, lengths = padded()
    rows, every = np.pad(tokens, ((0, 0), (0, RESPONSE))), np.arange(len(PROMPTS))
    for step in range(RESPONSE):
        logits = np.asarray(forward(params, rows))
        rows[every, lengths + step] = logits[every, lengths + step - 1].argmax(axis=-1)
    return np.stack([rows[row, n : n + RESPONSE] for row, n in enumerate(lengths)])


@pytest.mark.parametrize("share", [1, 3])
def test_greedy_equals_a_plain_argmax_loop_in_keys_without_a_column_to_spare(params, share):
    tokens, _, lengths, ended = decoded(params, opened(params, share))
    np.testing.assert_array_equal(tokens, np.repeat(greedy_by_hand(params), share, axis=0))
    np.testing.assert_array_equal(lengths, [RESPONSE] * 4 * share)
    assert not ended.any()


def test_a_sliding_window_hides_the_same_keys_as_in_the_plain_forward(params):
    config = families.from_hf(tiny.HF | {"model_type": "mistral", "sliding_window": 3})
    assert config.sliding_window == 3
    bank = jax.jit(partial(decode.prefill, config, dtype=jnp.float32))(params, *padded(1))
    state = begin(bank, starts(), columns=RESPONSE)
    step = jax.jit(partial(decode.decode_chunk, config, window=RESPONSE, dtype=jnp.float32))
    _, window = step(params, state, EVERYBODY, NEVER, bounds(), GREEDY)
    for row, prompt in enumerate(PROMPTS):
        ids = np.int32([[*prompt, *window.tokens[row].tolist()]])
        columns = np.arange(ids.shape[1])[None]
        hidden = transformer.apply(config, params, ids, columns, np.ones_like(ids))
        best = np.asarray(heads.logits(config, params, hidden))[0].argmax(axis=-1)
        np.testing.assert_array_equal(window.tokens[row], best[len(prompt) - 1 : -1])


def test_a_chunk_ends_at_its_steps_its_window_or_when_few_enough_are_active(params):
    state = opened(params)
    run = lambda **limits: advance(params, state, EVERYBODY, NEVER, bounds(**limits), GREEDY)[1]  # noqa: E731
    assert run(steps=3).steps == 3 and run().steps == 4
    assert run(enough=3).steps == 4 and run(enough=4).steps == 0
    short = run(limit=2)
    assert short.steps == 2 and short.done.all() and not short.ended.any()
    whole = greedy_by_hand(params)
    ends = np.int32([whole[0, 1]])
    first = min(row.tolist().index(int(ends[0])) for row in whole if int(ends[0]) in row.tolist())
    window = advance(params, state, EVERYBODY, ends, bounds(enough=3), GREEDY)[1]
    assert window.steps == first + 1 and window.done.any()


def test_stop_ids_end_a_row_after_themselves_and_leave_the_others_alone(params):
    whole = greedy_by_hand(params)
    ends = np.int32([whole[0, 2]])
    got, logprobs, lengths, ended = decoded(params, opened(params), ends=ends)
    for row, tokens in enumerate(whole.tolist()):
        length = tokens.index(int(ends[0])) + 1 if ends[0] in tokens else RESPONSE
        assert lengths[row] == length and ended[row] == (ends[0] in tokens)
        np.testing.assert_array_equal(got[row], tokens[:length] + [0] * (RESPONSE - length))
        assert not logprobs[row, length:].any()
    assert lengths[0] <= 3


def test_lanes_that_are_not_active_stand_still(params):
    active = np.array([True, False, True, False])
    state, window = advance(params, opened(params), active, NEVER, bounds(), GREEDY)
    np.testing.assert_array_equal(window.counts, [4, 0, 4, 0])
    np.testing.assert_array_equal(state.lengths, [4, 0, 4, 0])
    assert not np.asarray(window.tokens)[[1, 3]].any()
    again, window = advance(params, state, NOBODY, NEVER, bounds(), GREEDY)
    assert window.steps == 0 and not window.counts.any()
    np.testing.assert_array_equal(again.own.k, state.own.k)


def test_a_sample_is_the_same_bits_alone_late_in_another_lane_and_behind_another(params):
    """Lane 1 begins prompt 2 while the others are in the middle, then lane 3 does so behind a finished sample."""
    free, logprobs, _, _ = decoded(params, opened(params), sampling=PLAIN)
    bank = prefill(params, *padded(1))
    state = begin(bank, starts(only=[0, 3]), columns=RESPONSE)
    active = np.array([True, False, False, True])
    state, _ = advance(params, state, active, NEVER, bounds(steps=3), PLAIN)
    for lane in (1, 3):
        late = starts(only=[lane])
        for name in ("rows", "seen", "prompt_ids", "last"):
            getattr(late, name)[lane] = getattr(late, name)[2]
        state = insert(state, bank, late)
        here = np.arange(4) == lane
        tokens, scores, _, _ = decoded(params, state, active=here, sampling=PLAIN)
        np.testing.assert_array_equal(tokens[lane], free[2])
        np.testing.assert_array_equal(scores[lane], logprobs[2])


def test_a_bank_in_use_keeps_the_rows_that_get_no_prompt(params):
    tokens, lengths = padded(1)
    old = prefill(params, tokens, lengths)
    turned, fewer = tokens[::-1], np.int32([0, *lengths[1::-1], 0])
    fresh, mixed = prefill(params, turned, fewer), prefill(params, turned, fewer, old)
    for kept, new, before in zip(*map(jax.tree.leaves, (mixed, fresh, old)), strict=True):
        np.testing.assert_array_equal(kept[:, 1:3], new[:, 1:3])
        np.testing.assert_array_equal(kept[:, ::3], before[:, ::3])
        assert not np.asarray(new)[:, ::3].any() and np.asarray(before)[:, 0].any()


def test_growing_and_narrowing_change_no_sample(params):
    free, _, _, _ = decoded(params, opened(params, share=2, columns=RESPONSE), sampling=PLAIN)
    state = opened(params, share=2, columns=3)
    state, window = advance(params, state, np.ones(8, bool), NEVER, bounds(steps=3), PLAIN)
    np.testing.assert_array_equal(window.tokens[:, :3], free[:, :3])
    state = state.replace(own=grow(state.own, columns=RESPONSE))
    assert state.own.columns == RESPONSE
    lanes = np.int32([7, 2, 5])
    few = narrow(state, lanes)
    assert len(few.seen) == len(few.last) == 3
    tokens, _, _, _ = decoded(params, few, sampling=PLAIN)
    np.testing.assert_array_equal(tokens[:, 3:], free[lanes, 3:])
    tokens, _, _, _ = decoded(params, state, sampling=PLAIN)
    np.testing.assert_array_equal(tokens[:, 3:], free[:, 3:])


def test_logits_that_are_not_numbers_mark_their_row_and_end_the_chunk(params):
    broken = jax.tree.map(lambda x: x, params)
    broken["embed"]["kernel"] = broken["embed"]["kernel"].at[9, 0].set(jnp.nan)
    state = opened(broken)
    window = advance(broken, state, EVERYBODY, NEVER, bounds(), GREEDY)[1]
    np.testing.assert_array_equal(window.finite, [True, False, True, True])
    assert window.steps == 1
    idle = np.array([True, False, True, True])
    window = advance(broken, state, idle, NEVER, bounds(steps=1), GREEDY)[1]
    assert window.finite.all()


def test_bfloat16_decodes_with_keys_of_its_own_type(params):
    """Groups that share a unit: the first token's log-prob is that of float32 up to the shorter format."""
    half = jax.jit(partial(decode.prefill, CONFIG, dtype=jnp.bfloat16))(params, *padded(1))
    room = partial(decode.begin, CONFIG, columns=RESPONSE, dtype=jnp.bfloat16)
    state = jax.jit(room)(half, starts(share=3))
    assert state.own.k.dtype == state.prompt.v.dtype == jnp.bfloat16
    chunk = jax.jit(partial(decode.decode_chunk, CONFIG, window=4, dtype=jnp.bfloat16))
    _, window = chunk(params, state, np.ones(12, bool), NEVER, bounds(), GREEDY)
    assert window.finite.all() and (window.counts == 4).all()
    full = advance(params, opened(params, 3), np.ones(12, bool), NEVER, bounds(), GREEDY)[1]
    assert (window.tokens[:, 0] == full.tokens[:, 0]).all()
    np.testing.assert_allclose(window.logprobs[:, 0], full.logprobs[:, 0], atol=0.1)


def test_is_stop_knows_every_id_and_its_padding():
    tokens = jnp.int32([0, 5, 7, 5])
    np.testing.assert_array_equal(
        decode.is_stop(tokens, jnp.int32([5, 7])), [False, True, True, True]
    )
    np.testing.assert_array_equal(
        decode.is_stop(tokens, jnp.int32([0, -1])), [True, False, False, False]
    )
    assert not decode.is_stop(tokens, jnp.int32(NEVER)).any()


def test_decoding_writes_keys_in_place_and_copies_no_weights():
    """Temporaries of a chunk stay below its keys plus a tenth of the weights, whatever the number of layers."""
    config = families.from_hf(
        tiny.HF | {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 256}
    )
    weights = transformer.abstract_params(config)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    bank = jax.eval_shape(partial(decode.prefill, config, dtype=jnp.float32), weights, *padded(1))
    state = jax.eval_shape(
        partial(decode.begin, config, columns=256, dtype=jnp.float32), bank, starts(share=4)
    )
    chunk = partial(decode.decode_chunk, config, window=4, dtype=jnp.float32)
    lowered = jax.jit(chunk, donate_argnums=1).lower(
        weights, state, np.ones(16, bool), NEVER, bounds(), GREEDY
    )
    memory = lowered.compile().memory_analysis()
    assert size(weights) > 2e6
    assert memory.temp_size_in_bytes <= size((state.own, state.prompt)) + size(weights) / 10
    assert memory.alias_size_in_bytes >= size((state.own, state.prompt))


@pytest.mark.parametrize("columns", [8, 24])
def test_whole_tiles_and_single_columns_write_the_same(columns):
    """Whatever the lane's column: the first, the last, one past the end."""
    shape, layer = (2, 5, 3, columns, 4), jnp.int32(1)
    stack = jax.random.normal(jax.random.key(0), shape)
    new = jax.random.normal(jax.random.key(1), (5, 3, 4))
    column = jnp.int32([0, columns - 1, columns, 5, columns + 9])
    by_hand = np.array(stack)
    for lane in (0, 1, 3):
        by_hand[1, lane, :, column[lane]] = new[lane]
    for write in (decode._write_tile, decode._write_column, decode._write):
        np.testing.assert_array_equal(jax.jit(write)(stack, new, layer, column), by_hand)


def test_keys_of_whole_tiles_are_written_by_tiles_on_tpus_alone():
    def text(columns: int, size: int, platform: str) -> str:
        stack = jax.ShapeDtypeStruct((2, 5, 3, columns, size), jnp.bfloat16)
        new = jax.ShapeDtypeStruct((5, 3, size), jnp.bfloat16)
        args = (stack, new, jnp.int32(1), jnp.zeros(5, jnp.int32))
        return jax.jit(decode._write).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    whole = "2x5x3x2x8x128"
    assert whole in text(16, 128, "tpu")
    assert whole not in text(16, 128, "cpu") and whole not in text(16, 128, "cuda")
    assert "x8x" not in text(20, 128, "tpu") and "x8x" not in text(16, 64, "tpu")
