"""Attention of packed rows against the dense rule, and the lists of key blocks against a count by force."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import attention
from tests import tiny

HEADS, KV_HEADS, SIZE = 4, 2, 8


def packed(rows, tokens):
    """Rows of groups `(prompt length, response lengths)` -> segments, prefix, positions `[R T]`."""
    segments = np.zeros((len(rows), tokens), np.int32)
    prefix, positions = segments.copy(), segments.copy()
    for row, groups in enumerate(rows):
        at, name = 0, 0
        for prompt, responses in groups:
            home = name + 1
            for start, length in [(0, prompt), *((prompt, response) for response in responses)]:
                name += 1
                here = slice(at, at + length)
                segments[row, here], prefix[row, here] = name, home
                positions[row, here] = start + np.arange(length)
                at += length
    return segments, prefix, positions


def ragged(seed, tokens, prompt, response, group=4):
    """Groups of random lengths up to the given widths, as many as fit."""
    random, groups, used = np.random.default_rng(seed), [], 0
    while True:
        lengths = (
            int(random.integers(1, prompt + 1)),
            random.integers(1, response + 1, group).tolist(),
        )
        used += lengths[0] + sum(lengths[1])
        if used > tokens:
            return groups
        groups.append(lengths)


def make_view(rows, tokens, block, prompt, response):
    segments, prefix, positions = packed(rows, tokens)
    most = attention.most_blocks(prompt, response, block, tokens)
    lists = attention.block_lists(segments, prefix, block, most)
    return attention.View(segments, prefix, positions, lists)


def sees(segments, prefix, positions, window=None):
    """The rule, read off one row pair by pair."""
    tokens = len(segments)
    out = np.zeros((tokens, tokens), bool)
    for i in range(tokens):
        for j in range(tokens):
            same = segments[i] != 0 and segments[j] in (segments[i], prefix[i])
            near = window is None or positions[j] > positions[i] - window
            out[i, j] = same and positions[j] <= positions[i] and near
    return out


def inputs(rows, tokens, dtype=jnp.float32, size=SIZE):
    random = np.random.default_rng(7)
    shapes = [(rows, tokens, heads, size) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def compare(view, window=None, dtype=jnp.float32, tolerance=1e-5, **how):
    """Output and gradients of `blocked`, held against dense attention in float32: each to `tolerance` of its largest entry."""
    rows, tokens = view.segments.shape
    arrays = inputs(rows, tokens, dtype)
    mixers = (
        lambda *x: attention.blocked(*x, view, window=window, **how),
        lambda *x: attention.reference(*x, view, window),
    )
    got = jax.jit(partial(with_gradients, mixers[0]))(*arrays)
    exact = (x.astype(jnp.float32) for x in arrays)
    wanted = jax.jit(partial(with_gradients, mixers[1]))(*exact)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert a.dtype == dtype
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.isfinite(a).all() and np.abs(b).max() > 0.1
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name
    return got


def with_gradients(mixer, q, k, v, d):
    """Output of a mixer of q, k and v, and the gradients of all three for the cotangent `d`."""
    out, pull = jax.vjp(mixer, q, k, v)
    return (out, *pull(d))


# Lists -------------------------------------------------------------------------------------------------------------------


def test_lists_by_hand():
    """Blocks of 4; prompt of 6 in columns 0-5, responses 6-9, 10-11 and 12-14, padding behind."""
    view = make_view([[(6, [4, 2, 3])]], 20, 4, 6, 4)
    assert attention.most_blocks(6, 4, 4, 20) == 2 + 2 + 1 == view.blocks.shape[2]
    assert view.blocks[0].tolist() == [
        [0, -1, -1, -1, -1],
        [0, 1, -1, -1, -1],
        [0, 1, 2, -1, -1],
        [0, 1, 3, -1, -1],
        [-1, -1, -1, -1, -1],
    ]


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_lists_against_a_count_by_force(block, seed):
    prompt, response = [(20, 30), (1, 1), (40, 3), (3, 40), (2, 9), (16, 16)][seed]
    rows = [ragged(seed, 160, prompt, response), ragged(seed + 50, 100, prompt, response, 1), []]
    view = make_view(rows, 160, block, prompt, response)
    for row in range(3):
        mask = sees(view.segments[row], view.prefix[row], view.positions[row])
        needs = mask.reshape(160 // block, block, -1, block).any(axis=(1, 3))
        got = [[key for key in keys if key >= 0] for keys in view.blocks[row].tolist()]
        assert got == [np.flatnonzero(line).tolist() for line in needs]


@pytest.mark.parametrize(
    ("prompt", "response", "block"), [(6, 5, 4), (8, 8, 4), (1, 9, 4), (9, 1, 4), (64, 64, 64)]
)
def test_the_bound_on_lists_is_reached(prompt, response, block):
    """Some alignment of one group with a filler in front and a response between needs as many blocks as the bound allows."""
    tokens = 16 * block
    bound = attention.most_blocks(prompt, response, block, tokens)
    longest = 0
    for filler in range(1, block + 1):
        for between in range(1, block + 1):
            responses = [between, block, block, response, 1]
            groups = [
                (filler, []),
                (prompt, [length for length in responses if length <= response]),
            ]
            segments, prefix, _ = packed([groups], tokens)
            lists = attention.block_lists(segments, prefix, block, bound)
            longest = max(longest, int((lists >= 0).sum(axis=-1).max()))
    assert longest == bound
    assert attention.most_blocks(1000, 1000, block, 3 * block) == 3


def test_lists_that_do_not_fit_and_lengths_that_do_not_divide_are_refused():
    segments, prefix, _ = packed([[(6, [4, 2, 3])]], 20)
    with pytest.raises(ConfigError, match="needs 3 blocks of keys, room is for 2"):
        attention.block_lists(segments, prefix, 4, 2)
    with pytest.raises(ConfigError, match="20 tokens do not divide into blocks of 8"):
        attention.block_lists(segments, prefix, 8, 2)


def test_a_response_without_its_prompt_is_refused():
    segments, prefix, _ = packed([[(6, [4])], [(6, [4])]], 12)
    prefix[0, 6:10] = 9
    with pytest.raises(ValueError, match="does not follow its own prompt"):
        attention.block_lists(segments, prefix, 4, 3)
    segments, prefix, _ = packed([[(12, [])], [(12, [])]], 12)
    segments[1], prefix[1] = 2, 1
    with pytest.raises(ValueError, match="does not follow its own prompt"):
        attention.block_lists(segments, prefix, 4, 3)


# Attention ---------------------------------------------------------------------------------------------------------------


def test_the_rule_pair_by_pair():
    view = make_view([[(3, [2, 4]), (1, [1])], [(5, [])]], 16, 8, 5, 4)
    for window in (None, 2):
        got = np.asarray(attention.visible(view, view, window))
        for row in range(2):
            wanted = sees(view.segments[row], view.prefix[row], view.positions[row], window)
            np.testing.assert_array_equal(got[row], wanted)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block", [16, 64])
def test_blocked_equals_dense_attention_on_ragged_rows(block, window):
    """Rows: long groups, tiny groups that share a block, one group split over two rows, and padding only."""
    rows = [
        ragged(0, 320, 40, 60),
        ragged(1, 300, 3, 5),
        [(50, [60, 60, 60])],
        [(50, [30, 7])],
        [],
    ]
    compare(make_view(rows, 320, block, 50, 60), window, together=64)


def test_blocked_equals_dense_attention_where_everything_is_aligned():
    """Blocks of one segment each, the last with a short list of its own; all blocks at once and one by one."""
    for together in (10**6, 1):
        groups = [(48, [16] * 3)] * 2 + [(32, [])]
        compare(make_view([groups], 16 * 14, 16, 48, 16), together=together)


def test_half_precision_stays_near_float32_and_keeps_its_dtype():
    compare(make_view([ragged(0, 128, 20, 30)], 128, 16, 20, 30), None, jnp.bfloat16, 6e-3)


def test_padding_gives_zero_and_no_gradient():
    view = make_view([[(5, [6, 3])], []], 32, 8, 5, 6)
    arrays = (x * 1e3 for x in inputs(2, 32))
    for array in with_gradients(lambda *x: attention.blocked(*x, view), *arrays):
        array = np.asarray(array)
        assert np.isfinite(array).all() and array[view.segments != 0].any()
        assert not array[view.segments == 0].any()


def test_scores_far_below_zero_count_as_well():
    """Equal scores of -283, in the own block and in an earlier one: every output is the mean of the values seen."""
    view = make_view([[(8, [8])]], 16, 8, 8, 8)
    q, k = jnp.full((1, 16, 2, 8), -100.0), jnp.ones((1, 16, 1, 8))
    v = jnp.broadcast_to(jnp.arange(16.0)[None, :, None, None], (1, 16, 1, 8))
    out = attention.blocked(q, k, v, view)
    means = np.arange(16) / 2
    np.testing.assert_allclose(
        out, np.broadcast_to(means[None, :, None, None], out.shape), rtol=1e-5
    )


def test_a_scale_of_its_own():
    view = make_view([[(5, [6, 3])]], 16, 8, 5, 6)
    q, k, v, _ = inputs(1, 16)
    got = attention.blocked(q, k, v, view, scale=0.25 / np.sqrt(SIZE))
    np.testing.assert_allclose(got, attention.blocked(q / 4, k, v, view), atol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 9, 38, 72, 37])
def test_chunks_divide_the_blocks(count):
    sizes = {1: 1, 7: 7, 9: 9, 38: 19, 72: 8, 37: 37}
    assert attention._chunk(count, 8) == sizes[count]


def test_no_buffer_is_quadratic_in_the_tokens():
    """Among all values of forward and backward the largest is as long as the queries."""
    tokens, block = 2048, 16
    view = make_view([ragged(0, tokens, 20, 30)], tokens, block, 20, 30)
    q, k, v, d = inputs(1, tokens)
    text = (
        jax.jit(lambda *x: with_gradients(lambda *y: attention.blocked(*y, view), *x))
        .lower(q, k, v, d)
        .compile()
        .as_text()
    )
    shapes = re.findall(r"(?:f32|pred|s32|bf16)\[([\d,]+)\]", text)
    largest = max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)
    assert largest == tokens * HEADS * SIZE < tokens * tokens


def test_the_same_result_on_eight_devices_without_gathering_rows_or_tokens():
    tokens, block = 96, 8
    rows = [ragged(seed, tokens - 10 * seed, 12, 20) for seed in range(4)]
    view = make_view(rows, tokens, block, 12, 20)
    wanted = compare(view)
    mesh = tiny.mesh(2, 2, 2)
    by_row = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    by_head = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    view = jax.device_put(view, by_row)
    arrays = jax.device_put(inputs(4, tokens), by_head)
    program = (
        jax.jit(
            lambda view, *x: with_gradients(lambda *y: attention.blocked(*y, view), *x),
            out_shardings=by_head,
        )
        .lower(view, *arrays)
        .compile()
    )
    for a, b in zip(program(view, *arrays), wanted, strict=True):
        assert a.sharding.shard_shape(a.shape)[0] == 1
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    moved = re.findall(
        r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\(", program.as_text()
    )
    for shapes, kind in moved:  # only the longest list is agreed upon
        assert kind == "all-reduce" and set(re.findall(r"\w+\[[\d,]*\]", shapes)) == {"s32[]"}
