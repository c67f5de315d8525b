"""The engine on a tiny model: what is sampled, when it ends, what is handed out, and what compiles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.metrics import CompileCounter
from jaxrl_llm.records import END_EOS, END_LENGTH, END_STOP
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.engine import truncated
from jaxrl_llm.rollout.sampling import make_sampling
from tests import tiny
from tests.rollout.rig import (
    CHUNK,
    FEW,
    GREEDY,
    PLAIN,
    PROMPTS,
    RESPONSE,
    WIDTH,
    build,
    identical,
    log_softmax,
    prompt,
    response_logits,
    rollout,
    same_up_to_ties,
    text,
    weights,
)

# What is sampled --------------------------------------------------------------------------------------------------


def test_the_result_has_the_shapes_and_masks_it_promises(free):
    assert free.response_tokens.shape == (12, RESPONSE) and free.prompt_tokens.shape == (6, WIDTH)
    np.testing.assert_array_equal(free.prompt_lengths, [3, 2, 5, 1, 8, 2])
    np.testing.assert_array_equal(free.prompt_tokens[0], [0, 0, 0, 0, 0, 5, 0, 6])
    assert free.response_mask.all() and free.loss_mask.all() and free.bad == 0
    assert free.filtered_logprobs is None
    assert truncated(free).all()
    np.testing.assert_array_equal(free.policy_step, [7] * 12)
    assert len(np.unique(free.response_tokens)) > 60


def test_greedy_equals_a_plain_argmax_loop(engine, params):
    result = rollout(engine, params, GREEDY)
    np.testing.assert_array_equal(result.response_tokens[::2], result.response_tokens[1::2])
    best = response_logits(params, result)
    ordered = np.sort(best, axis=-1)
    assert (ordered[..., -1] - ordered[..., -2]).min() > 1e-4, (
        "a tie: choose another seed for the weights"
    )
    np.testing.assert_array_equal(result.response_tokens, best.argmax(axis=-1))


def test_samples_differ_inside_a_group_and_depend_on_seed_step_and_purpose(engine, params, free):
    assert len({tuple(row) for row in free.response_tokens.tolist()}) == 12
    identical(free, rollout(engine, params))
    for change in ({"seed": 2}, {"step": 8}, {"purpose": sampling.VALIDATE}):
        assert (
            (rollout(engine, params, **change).response_tokens != free.response_tokens)
            .any(axis=1)
            .all()
        )


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampler_logprobs_are_those_of_a_full_forward_at_the_temperature(
    engine, params, temperature
):
    result = rollout(engine, params, make_sampling(temperature))
    full = log_softmax(response_logits(params, result) / temperature)
    chosen = np.take_along_axis(full, result.response_tokens[..., None], axis=-1)[..., 0]
    gap = np.abs(result.sampler_logprobs - chosen)
    assert gap.max() < 1e-4
    assert chosen.min() < -3


def test_filters_keep_both_log_probs(engine, params):
    result = rollout(engine, params, make_sampling(0.8, 4, 1.0))
    full = log_softmax(response_logits(params, result) / 0.8)
    chosen = np.take_along_axis(full, result.response_tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(result.sampler_logprobs, chosen, atol=1e-4)
    top = np.sort(full, axis=-1)[..., -4:]
    assert (chosen >= top[..., 0] - 1e-5).all()
    mass = np.log(np.exp(top).sum(axis=-1))
    np.testing.assert_allclose(result.filtered_logprobs, chosen - mass, atol=1e-4)


def test_order_and_company_do_not_change_a_sample(engine, params, free):
    backwards = rollout(engine, params, prompts=PROMPTS[::-1])
    order = np.arange(12).reshape(6, 2)[::-1].ravel()
    identical(free, backwards, order=order)
    identical(free, rollout(engine, params, prompts=PROMPTS[2:5]), rows=slice(4, 10))


def test_few_slots_another_prompt_width_and_a_batch_of_one_give_the_same_samples(
    engine, params, free
):
    wide = rollout(build(tiny.mesh(), prompt_length=12), params)
    assert wide.prompt_tokens.shape == (6, 12)
    same_up_to_ties(params, free, wide)
    same_up_to_ties(params, free, rollout(replace(engine, **FEW), params))
    greedy = rollout(engine, params, GREEDY)
    alone = rollout(engine, params, GREEDY, prompts=PROMPTS[2:3], n=1, slots=None)
    assert alone.response_tokens.shape == (1, RESPONSE)
    np.testing.assert_array_equal(alone.response_tokens[0], greedy.response_tokens[4])


def test_eight_devices_give_the_samples_of_one(params, free):
    mesh, counter = tiny.mesh(2, 2, 2), CompileCounter()
    engine = build(mesh)
    old, placed = [], []
    many = rollout(watched(engine, old, placed), weights(mesh))
    same_up_to_ties(params, free, many)
    kv = placed[0].own.k.spec
    assert (kv[1], kv[2]) == (("data", "fsdp"), "tensor")
    assert all(one == placed[0] for one in placed)
    assert all(leaf.is_deleted() for leaf in old)
    counter.delta()
    rollout(engine, weights(mesh), make_sampling(0.5, 3, 0.9))
    assert counter.delta() == 0


# When it ends ------------------------------------------------------------------------------------------------------


def cut(free, ends):
    """What a rollout with these stop ids must look like: the free one, cut after the first of them."""
    hit = np.isin(free.response_tokens, ends)
    length = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, RESPONSE)
    mask = np.arange(RESPONSE) < length[:, None]
    return length, mask, np.where(hit.any(axis=1), END_EOS, END_LENGTH)


def check_cut(result, free, ends):
    length, mask, reason = cut(free, ends)
    np.testing.assert_array_equal(result.response_lengths, length)
    np.testing.assert_array_equal(result.response_mask, mask)
    np.testing.assert_array_equal(result.loss_mask, mask)
    np.testing.assert_array_equal(result.end_reason, reason)
    np.testing.assert_array_equal(result.response_tokens, np.where(mask, free.response_tokens, 0))
    np.testing.assert_array_equal(result.sampler_logprobs, np.where(mask, free.sampler_logprobs, 0))


def test_an_end_id_as_first_token_is_a_response_of_one(engine, params, free):
    ends = (int(free.response_tokens[0, 0]), -1)
    result = rollout(replace(engine, stop_ids=ends), params)
    assert result.response_lengths[0] == 1 and result.end_reason[0] == END_EOS
    check_cut(result, free, ends)


def test_every_end_id_counts_and_without_one_a_response_is_truncated(engine, params, free):
    ends = (int(free.response_tokens[0, 3]), int(free.response_tokens[5, 6]))
    result = rollout(replace(engine, stop_ids=ends), params)
    check_cut(result, free, ends)
    assert result.end_reason[0] == result.end_reason[5] == END_EOS
    assert truncated(result).any()
    assert (result.response_lengths[truncated(result)] == RESPONSE).all()


def test_an_end_id_that_is_also_the_padding_stays_in_the_mask(engine, params):
    """Id 0 fills the columns behind a response and stands inside prompts; masks come from lengths alone."""
    for seed in range(40):
        free = rollout(engine, params, seed=seed)
        row, column = (int(x[0]) if len(x) else -1 for x in np.nonzero(free.response_tokens == 0))
        if 0 < column < RESPONSE - 1:
            break
    else:
        pytest.fail("no seed samples id 0")
    result = rollout(replace(engine, stop_ids=(0, -1)), params, seed=seed)
    check_cut(result, free, (0, -1))
    np.testing.assert_array_equal(result.response_mask[row].sum(), column + 1)


@pytest.mark.parametrize("limit", [1, 2])
def test_short_limits_are_met_exactly(engine, params, free, limit):
    calls = []
    short = replace(engine, response_length=limit)
    result = rollout(short, params, on_finished=lambda *call: calls.append(call))
    assert result.response_tokens.shape == (12, limit)
    np.testing.assert_array_equal(result.response_lengths, [limit] * 12)
    assert truncated(result).all()
    np.testing.assert_array_equal(result.response_tokens, free.response_tokens[:, :limit])
    assert sorted(call[0] for call in calls) == list(range(12))


# What is handed out ------------------------------------------------------------------------------------------------


def collect(engine, params, **more):
    """A rollout with its calls in order: `("row", row, ids)` and `("poll",)`."""
    events = []
    more["on_finished"] = lambda row, ids: events.append(("row", row, ids))
    more["poll"] = lambda: events.append(("poll",))
    return rollout(engine, params, **more), events


def check_handed(result, events):
    handed = {event[1]: event[2] for event in events if event[0] == "row"}
    assert sum(event[0] == "row" for event in events) == len(handed) == len(result.response_tokens)
    for row, ids in handed.items():
        assert ids == result.response_tokens[row, : result.response_lengths[row]].tolist()
        assert all(isinstance(token, int) for token in ids)


def test_each_response_is_handed_out_once_and_short_ones_early(engine, params, free):
    """Columns 3, 6, 9, 10: four looks of the host, each after its rows followed by a poll."""
    ends = (int(free.response_tokens[0, 2]), int(free.response_tokens[3, 4]))
    result, events = collect(replace(engine, stop_ids=ends), params)
    check_handed(result, events)
    looks, seen = 0, {}
    for event in events:
        looks += event[0] == "poll"
        if event[0] == "row":
            seen[event[1]] = looks
    assert looks == 4
    expected = [(length - 1) // CHUNK for length in result.response_lengths.tolist()]
    assert [seen[row] for row in range(12)] == expected
    assert seen[0] <= 1


def test_idle_rows_are_never_handed_out_and_refilled_slots_keep_their_numbers(engine, params, free):
    ends = (int(free.response_tokens[0, 2]), int(free.response_tokens[8, 4]))
    stopping = replace(engine, stop_ids=ends, **FEW)
    result, events = collect(stopping, params, prompts=PROMPTS[:5])
    assert len(result.response_tokens) == 10
    check_handed(result, events)
    idle, handed = collect(replace(engine, stop_ids=ends), params, prompts=PROMPTS[:5])
    check_handed(idle, handed)
    same_up_to_ties(params, idle, result, prompts=PROMPTS[:5])


def test_a_stop_text_cuts_at_the_token_that_completes_it(engine, params, free):
    """The pair ends at column 4, within the chunk of columns 3 to 5: the chunk runs on, the response does not."""
    pair = text(free.response_tokens[0, 3:5])
    assert len(pair) == 2
    result, events = collect(replace(engine, stop_texts=("never", pair)), params)
    check_handed(result, events)
    assert result.response_lengths[0] == 5 and result.end_reason[0] == END_STOP
    np.testing.assert_array_equal(
        result.response_tokens[0], [*free.response_tokens[0, :5], 0, 0, 0, 0, 0]
    )
    np.testing.assert_array_equal(result.response_mask[0], [True] * 5 + [False] * 5)
    assert result.sampler_logprobs[0, 4] != 0 and not result.sampler_logprobs[0, 5:].any()
    others = [row for row in range(1, 12) if pair not in text(free.response_tokens[row])]
    assert len(others) > 8
    identical(result, free, others, others)


def test_a_stop_text_across_a_chunk_border_or_before_an_end_id_or_at_the_limit(
    engine, params, free
):
    across = text(free.response_tokens[2, 2:4])
    result = rollout(replace(engine, stop_texts=(across,)), params)
    assert (result.response_lengths[2], result.end_reason[2]) == (4, END_STOP)
    ends = (int(free.response_tokens[4, 6]), -1)
    assert ends[0] not in free.response_tokens[4, :6]
    before = text(free.response_tokens[4, 4:6])
    result = rollout(replace(engine, stop_ids=ends, stop_texts=(before,)), params)
    assert (result.response_lengths[4], result.end_reason[4]) == (6, END_STOP)
    last = text(free.response_tokens[6, 8:10])
    result = rollout(replace(engine, stop_texts=(last,)), params)
    assert (result.response_lengths[6], result.end_reason[6]) == (RESPONSE, END_STOP)


def test_when_stop_texts_end_every_row_decoding_ends(engine, params, free):
    firsts = tuple({text(row[:1]) for row in free.response_tokens})
    result, events = collect(replace(engine, stop_texts=firsts), params)
    np.testing.assert_array_equal(result.response_lengths, [1] * 12)
    assert sum(event[0] == "poll" for event in events) == 1
    check_handed(result, events)


def test_rows_already_handed_out_are_not_decoded_again(engine, params, free):
    seen = []
    counting = lambda ids: seen.append(tuple(ids)) or text(ids)  # noqa: E731
    ends = (int(free.response_tokens[0, 0]), -1)
    rollout(replace(engine, stop_ids=ends, stop_texts=("never",), decode_text=counting), params)
    starting = sum(ids[0] == ends[0] for ids in seen)
    assert starting == (free.response_tokens[:, 0] == ends[0]).sum()
    assert len(seen) < 4 * 12


# What is refused ---------------------------------------------------------------------------------------------------


def test_weights_that_are_not_numbers_are_reported_and_nothing_is_handed_out(engine, params):
    broken = jax.tree.map(lambda x: x, params)
    broken["layers"]["up"]["kernel"] = broken["layers"]["up"]["kernel"].at[1, 0, 0].set(jnp.nan)
    for settings in (PLAIN, GREEDY):
        result, events = collect(engine, broken, settings=settings)
        assert result.bad == 12
        assert events == []
    few, events = collect(replace(engine, **FEW), broken)
    assert few.bad == 4 and few.response_tokens.shape == (12, RESPONSE) and events == []


def test_one_broken_row_is_counted_and_idle_rows_are_not(engine, params):
    broken = jax.tree.map(lambda x: x, params)
    broken["embed"]["kernel"] = broken["embed"]["kernel"].at[140].set(jnp.inf)
    result, events = collect(engine, broken, settings=GREEDY, prompts=PROMPTS[2:5])
    assert result.bad == 2
    assert not [event for event in events if event[0] == "row"]
    broken["embed"]["kernel"] = params["embed"]["kernel"].at[0].set(jnp.nan)
    full = PROMPTS[4:5]
    assert rollout(replace(engine, response_length=1), broken, prompts=full).bad == 0


@pytest.mark.parametrize("wrong", [150, -1])
def test_ids_outside_the_vocabulary_are_refused_with_row_and_id(engine, params, wrong):
    bad = [*PROMPTS[:2], prompt(40, (3, wrong, 4)), prompt(41, ())]
    with pytest.raises(DataError) as refusal:
        rollout(engine, params, prompts=bad)
    first, second = refusal.value.problems
    assert "rows:41" in first and f"id {wrong}," in first and "0 to 149" in first
    assert "rows:42" in second and "empty" in second


def test_what_does_not_fit_is_refused(engine, params):
    with pytest.raises(DataError, match="rows:2: a prompt of 9 tokens, need at most 8"):
        rollout(engine, params, prompts=[prompt(1, [3] * 9)])
    with pytest.raises(ConfigError, match=r"55 \+ 10 = 65 tokens, but the model reads 64"):
        build(tiny.mesh(), prompt_length=55)
    assert build(tiny.mesh(), prompt_length=54).prompt_width == 54


# What compiles and what is freed -----------------------------------------------------------------------------------


def test_nothing_compiles_after_the_first_rollout(engine, params, free):
    counter = CompileCounter()
    rollout(engine, params)
    rollout(engine, params, make_sampling(0.6), seed=3)
    rollout(engine, params, make_sampling(1.3, 5, 0.9), step=9)
    rollout(engine, params, GREEDY, purpose=sampling.VALIDATE)
    rollout(engine, params, prompts=[prompt(3, [4] * 7)])
    rollout(engine, params, prompts=[prompt(3, [4])], settings=make_sampling(1.0, None, 0.5))
    rollout(replace(engine, stop_ids=(3, 4), stop_texts=("never",)), params, prompts=PROMPTS[1:4])
    assert counter.delta() == 0


def test_a_rollout_needs_three_programs_and_a_refilled_one_a_fourth(params):
    """Prefill, begin and advance; no operation of the host loop is a program of its own."""
    engine, counter = build(tiny.mesh(), response_length=7), CompileCounter()
    rollout(engine, params)
    assert counter.delta() == 3
    few = replace(engine, **FEW, stop_ids=tuple(range(0, 150, 3)))
    rollout(few, params)
    assert counter.delta() == 3, "begin, insert and advance for four lanes"
    rollout(few, params, make_sampling(0.7, 9, 0.9), prompts=PROMPTS[:4], seed=4)
    assert counter.delta() == 0


def watched(engine, old, placed):
    """The engine, leaving the states that went into its chunks and how all states are placed."""

    def advance(params, state, *rest):
        new = engine.advance(params, state, *rest)
        old.extend([state.own.k, state.own.v, state.prompt.k, state.lengths])
        placed.extend(jax.tree.map(lambda x: x.sharding, one) for one in (state, new[0]))
        return new

    return replace(engine, advance=advance)


def test_decode_state_is_donated_and_stays_where_it_is(engine, params):
    """A chunk that got its state placed otherwise than the first one would compile a second time."""
    old, placed = [], []
    rollout(watched(engine, old, placed), params)
    assert len(old) == 16
    assert all(leaf.is_deleted() for leaf in old)
    assert all(one == placed[0] for one in placed)


def test_a_poll_that_raises_ends_the_rollout(engine, params):
    calls = []

    def poll():
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        rollout(engine, params, poll=poll)
    assert len(calls) == 2
