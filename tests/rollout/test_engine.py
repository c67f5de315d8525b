"""The engine on a tiny model: what is sampled, when it ends, what is handed out, and what compiles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.metrics import CompileCounter
from jaxrl_llm.models import families, heads, transformer
from jaxrl_llm.records import END_EOS, END_LENGTH, END_STOP, Prompt
from jaxrl_llm.rollout import queue, sampling
from jaxrl_llm.rollout.engine import generate, make_engine, truncated
from jaxrl_llm.rollout.sampling import make_sampling
from tests import tiny

CONFIG = replace(tiny.model(), vocab_size=150)
WIDTH, RESPONSE, CHUNK, N = 8, 10, 3, 2
NEVER = (-1, -1)
FEW = {"max_num_seqs": 4}
"""Four slots for twelve samples: refilled, and other shapes than the rest, so tokens may differ at near ties."""
GREEDY, PLAIN = make_sampling(greedy=True), make_sampling(1.0)
IDS = ((5, 0, 6), (0, 9), (140, 4, 5, 6, 7), (8,), (3, 3, 3, 3, 3, 3, 3, 3), (149, 0))


def text(ids):
    """One letter per token; id 2 is special and shows nothing."""
    return "".join(chr(0x4E00 + token) for token in ids if token != 2)


def prompt(number, ids):
    return Prompt(tuple(ids), "", (), "", "tiny", {}, number, f"rows:{number + 1}")


PROMPTS = [prompt(10 + number, ids) for number, ids in enumerate(IDS)]


def build(mesh, **changes):
    settings = {
        "dtype": jnp.float32, "stop_ids": NEVER, "decode_text": text, "chunk": CHUNK,
        "prompt_length": WIDTH, "response_length": RESPONSE,
    }  # fmt: skip
    return make_engine(CONFIG, mesh, **(settings | changes))


def weights(mesh):
    """Large enough that neither is the model almost uniform nor a sample almost greedy."""
    values = transformer.init(CONFIG, jax.random.key(3))
    values = jax.tree.map(lambda x: x * 8.0 if x.ndim > 1 else x, values)
    placed = sharding.param_shardings(mesh, families.param_dims(CONFIG), values)
    return jax.device_put(values, placed)


@pytest.fixture(scope="module")
def params():
    return weights(tiny.mesh())


@pytest.fixture(scope="module")
def engine():
    return build(tiny.mesh())


def rollout(engine, params, settings=PLAIN, prompts=PROMPTS, n=N, slots=6, **more):
    return with_stats(engine, params, settings, prompts, n, slots, **more)[0]


def with_stats(engine, params, settings=PLAIN, prompts=PROMPTS, n=N, slots=6, **more):
    stream = {"seed": 1, "step": 7, "purpose": sampling.TRAIN} | more
    return generate(engine, params, prompts, n=n, sampling=settings, slots=slots, **stream)


@pytest.fixture(scope="module")
def free(engine, params):
    """Sampled at temperature 1, every row up to the limit."""
    return rollout(engine, params)


@jax.jit
def forward(params, tokens):
    """Logits of whole rows `[B T]` that begin at column 0; what comes behind a column cannot change it."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = transformer.apply(CONFIG, params, tokens, columns, jnp.ones_like(tokens))
    return heads.logits(CONFIG, params, hidden)


def response_logits(params, result, prompts=PROMPTS):
    """Logits `[B Tr V]` before every response token, from one forward pass over prompt and response."""
    group = len(result.response_tokens) // len(prompts)
    rows = np.zeros((len(prompts) * group, WIDTH + RESPONSE), np.int32)
    starts = np.repeat([len(one.ids) for one in prompts], group)
    for row, first in enumerate(starts):
        rows[row, :first] = prompts[row // group].ids
        rows[row, first : first + RESPONSE] = result.response_tokens[row]
    logits = np.asarray(forward(params, rows), np.float64)
    return np.stack([logits[row, n - 1 : n - 1 + RESPONSE] for row, n in enumerate(starts)])


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def same_up_to_ties(params, one, other, settings=PLAIN, prompts=PROMPTS):
    """Equal tokens up to a position whose uniform number lies within 1e-4 of an edge (greedy: gap of the best two below
    1e-4), fewer than 0.5 % such positions or a single one, log-probs of equal prefixes within 1e-5."""
    logits, group, ties = (
        response_logits(params, one, prompts),
        len(one.response_tokens) // len(prompts),
        0,
    )
    for row in range(len(one.response_tokens)):
        a, b = one.response_tokens[row], other.response_tokens[row]
        equal = np.cumprod(a == b).astype(bool)
        np.testing.assert_allclose(
            one.sampler_logprobs[row][equal], other.sampler_logprobs[row][equal], atol=1e-5, rtol=0
        )
        if equal.all():
            continue
        ties += 1
        at = int(np.argmin(equal))
        if settings.greedy:
            best = np.sort(logits[row, at])[-2:]
            assert best[1] - best[0] < 1e-4
            continue
        key = sampling.row_keys(
            *map(np.uint32, (1, 7, sampling.TRAIN)),
            np.int32([prompts[row // group].prompt_id]),
            np.int32([row % group]),
        )
        first, second = np.asarray(sampling.uniforms(key, jnp.int32(at)))[0]
        probs = np.exp(log_softmax(logits[row, at] / float(settings.temperature)))
        grid = np.pad(probs, (0, 106)).reshape(2, 128)
        edges = np.cumsum(grid.sum(axis=0))
        inner = np.cumsum(grid, axis=0) / grid.sum(axis=0)
        assert min(np.abs(first - edges).min(), np.abs(second - inner).min()) < 1e-4
    assert ties <= max(1, 0.005 * one.response_tokens.size)


def identical(one, other, rows=slice(None), order=slice(None)):
    for name in ("response_tokens", "sampler_logprobs", "response_lengths", "end_reason"):
        np.testing.assert_array_equal(getattr(one, name)[rows], getattr(other, name)[order])


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


def test_every_prompt_is_prefilled_once_whatever_the_group_and_the_slots(engine, params):
    for n, changes in ((2, {}), (2, FEW), (1, FEW), (5, FEW)):
        seen = []

        def prefill(params, tokens, lengths):
            rows = zip(np.asarray(tokens).tolist(), np.asarray(lengths).tolist(), strict=True)
            seen.extend(tuple(ids[:length]) for ids, length in rows if length)
            return engine.prefill(params, tokens, lengths)

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


def test_slots_are_never_more_than_allowed_and_at_least_one_per_shard():
    """8 prompts of 2 on 4 data shards: 16 samples at once, or as many lanes of their own as fit."""
    for allowed, lanes, share in (
        (16, 16, 2), (None, 16, 2), (13, 12, 1), (8, 8, 1), (2, 4, 1), (100, 16, 2),
    ):  # fmt: skip
        layout = queue.make_layout(8, 2, max_num_seqs=allowed, shards=4, prompt_width=8)
        assert (layout.lanes, layout.share) == (lanes, share)
        assert layout.units % 4 == 0 and layout.bank == 8


def test_few_slots_on_eight_devices(params, free):
    mesh = tiny.mesh(2, 2, 2)
    engine = build(mesh, max_num_seqs=4)
    same_up_to_ties(params, free, rollout(engine, weights(mesh)))
    counter = CompileCounter()
    rollout(engine, weights(mesh), make_sampling(0.5, 3, 0.9), prompts=PROMPTS[1:])
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


def test_idle_rows_are_never_handed_out_and_refilled_slots_keep_their_numbers(
    engine, params, free
):
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
