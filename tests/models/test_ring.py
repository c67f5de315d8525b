"""Ring attention on fake devices against dense attention of the unsplit rows, and what its programs move and hold."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import attention, kernels, ring
from tests import tiny
from tests.models.test_attention import HEADS, KV_HEADS, SIZE, inputs, packed, ragged, sees
from tests.models.test_attention import with_gradients as with_gradients_of

TOKENS = 128
ROWS = [
    ragged(0, TOKENS, 20, 30),
    [
        (30, [33, 40, 20])
    ],  # a prompt seen from every shard; its own end and a response lie across borders
    ragged(1, 70, 3, 5),  # tiny groups, then padding: whole shards of it
    [],
]
LAYER = jnp.zeros((), jnp.int32)


def mesh_of(data=1, fsdp=1, context=1, tensor=1):
    shape = MeshShape(data=data, fsdp=fsdp, tensor=tensor, context=context)
    count = data * fsdp * context * tensor
    return sharding.make_mesh(shape, jax.devices()[:count])


def view_of(rows, tokens=TOKENS):
    return kernels.make_view(
        "ring", *packed(rows, tokens), block=16, prompt_width=40, response_width=60
    )


def placed(mesh, view, arrays):
    """Rows over data, columns over context, heads over tensor: as training holds them."""
    specs = kernels.view_specs(view)
    by_head = NamedSharding(mesh, PartitionSpec(sharding.ROWS, "context", "tensor"))
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.device_put(view, shardings), *jax.device_put(arrays, by_head)


def program(mixer):
    """Output and gradients of a mixer, jitted; the view is an argument, as it is in training."""

    def run(view, *arrays):
        return with_gradients_of(lambda *x: mixer(*x, view, None, LAYER)[0], *arrays)

    return jax.jit(run)


def dense(view, arrays, window=None):
    exact = [x.astype(jnp.float32) for x in arrays]
    return program(kernels.make_mixer("reference", window=window))(view, *exact)


def compare(got, wanted, view, tolerance=1e-5):
    """Each array to `tolerance` of the largest entry; padding exactly zero."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.isfinite(a).all() and np.abs(b).max() > 0.1
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name
        assert not a[view.segments == 0].any()


# Values and gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("context", [2, 4])
def test_ring_equals_dense_attention_of_whole_rows(context, window):
    view, arrays = view_of(ROWS), inputs(len(ROWS), TOKENS)
    mixer = kernels.make_mixer("ring", mesh=mesh_of(context=context), window=window, block=16)
    compare(program(mixer)(view, *arrays), dense(view, arrays, window), view)


@pytest.mark.parametrize("shape", [(2, 1, 2, 2), (1, 2, 4, 1)])
def test_ring_beside_split_rows_and_heads(shape):
    """Data x context x tensor: every device has its rows, columns and heads, before and after."""
    mesh = mesh_of(*shape)
    view, arrays = view_of(ROWS), inputs(len(ROWS), TOKENS)
    got = program(kernels.make_mixer("ring", mesh=mesh, block=16))(*placed(mesh, view, arrays))
    compare(got, dense(view, arrays), view)
    data, fsdp, context, tensor = shape
    for array in got:
        assert array.sharding.shard_shape(array.shape) == (
            len(ROWS) // (data * fsdp),
            TOKENS // context,
            array.shape[2] // tensor,
            SIZE,
        )


def test_rows_and_heads_that_do_not_divide_stay_whole():
    view, arrays = view_of(ROWS[:3]), inputs(3, TOKENS)
    mixer = kernels.make_mixer("ring", mesh=mesh_of(data=2, context=2, tensor=1), block=16)
    compare(program(mixer)(view, *arrays), dense(view, arrays), view)
    mixer = kernels.make_mixer("ring", mesh=mesh_of(context=2, tensor=4), block=16)
    compare(program(mixer)(view, *arrays), dense(view, arrays), view)


@pytest.mark.parametrize("block", [None, 50])
def test_a_device_alone_is_a_ring_too(block):
    """One block of all columns, and the largest divisor of 128 up to 50."""
    view, arrays = view_of(ROWS), inputs(len(ROWS), TOKENS)
    got = program(kernels.make_mixer("ring", block=block))(view, *arrays)
    compare(got, dense(view, arrays), view)


def test_layers_in_a_scan_with_saved_attention():
    """As the model runs it: a scan of rematerialised layers, the view broadcast."""
    view, (q, k, v, d) = view_of(ROWS[:2]), inputs(2, TOKENS)
    policy = jax.checkpoint_policies.save_only_these_names("attention")

    def loss(mixer, q, k, v):
        def layer(x, index):
            return x + mixer(x, k, v, view, None, index)[0], None

        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), q, jnp.arange(2))
        return (x * d).sum()

    mixers = (
        kernels.make_mixer("reference"),
        kernels.make_mixer("ring", mesh=mesh_of(2, context=2), block=16),
    )
    results = [jax.jit(jax.grad(partial(loss, mixer), (0, 1, 2)))(q, k, v) for mixer in mixers]
    assert tiny.worst_difference(*results) < 1e-5


def test_half_precision_stays_near_float32_and_keeps_its_dtype():
    view, arrays = view_of(ROWS[:2]), inputs(2, TOKENS, jnp.bfloat16)
    got = program(kernels.make_mixer("ring", mesh=mesh_of(context=4), block=16))(view, *arrays)
    assert {array.dtype for array in got} == {np.dtype(jnp.bfloat16)}
    compare(got, dense(view, arrays), view, tolerance=8e-3)


def test_softmaxes_merge_whatever_their_scale():
    """Keys of norm e^0, e^4, ... from shard to shard and back: each shard in turn has nearly all of the weight."""
    view = view_of([[(TOKENS, [])]])
    q, k, v, d = inputs(1, TOKENS)
    growth = jnp.exp(jnp.array([0.0, 4.0, 2.0, 5.0])).repeat(TOKENS // 4)[None, :, None, None]
    arrays = q, k * growth, v, d
    got = program(kernels.make_mixer("ring", mesh=mesh_of(context=4), block=16))(view, *arrays)
    compare(got, dense(view, arrays), view)


def test_scores_far_below_zero_count_as_well():
    """Equal scores of -283 on every shard: every output is the mean of the values seen."""
    view = view_of([[(16, [])]], 16)
    q, k = jnp.full((1, 16, 2, 8), -100.0), jnp.ones((1, 16, 1, 8))
    v = jnp.broadcast_to(jnp.arange(16.0)[None, :, None, None], (1, 16, 1, 8))
    mixer = kernels.make_mixer("ring", mesh=mesh_of(context=4), block=2)
    out, _ = jax.jit(lambda *x: mixer(*x, view, None, LAYER))(q, k, v)
    wanted = (np.arange(16) / 2)[None, :, None, None]
    np.testing.assert_allclose(out, np.broadcast_to(wanted, out.shape), rtol=1e-5)


@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_padding_is_not_read(what):
    view, arrays = view_of(ROWS), inputs(len(ROWS), TOKENS)
    padding = (view.segments == 0)[..., None, None]
    dirty = [jnp.where(padding, what, x) for x in arrays]
    got = program(kernels.make_mixer("ring", mesh=mesh_of(context=4), block=16))(view, *dirty)
    compare(got, dense(view, arrays), view)


# What is worked on, moved and held ---------------------------------------------------------------------------------------


def blocks_seen(view, block, window=None):
    """Pairs of blocks of which some tokens see each other in some row, token by token."""
    count = view.segments.shape[1] // block
    tokens = zip(view.segments, view.prefix, view.positions, strict=True)
    masks = np.stack([sees(*row, window) for row in tokens])
    return masks.reshape(-1, count, block, count, block).any(axis=(0, 2, 4))


@pytest.mark.parametrize("window", [None, 7])
def test_pairs_of_blocks_against_a_count_by_force(window):
    view = view_of(ROWS)
    tiles = jax.tree.map(lambda x: jnp.reshape(x, (len(ROWS), -1, 16)), view)
    seen = ring._seen(tiles, tiles, window)
    np.testing.assert_array_equal(seen, blocks_seen(view, 16, window))
    worked = ring._pairs(
        tiles, tiles, window, lambda i, j, sees, done: done.at[i, j].add(1), jnp.zeros((8, 8), int)
    )
    np.testing.assert_array_equal(worked, blocks_seen(view, 16, window))


def test_what_nobody_sees_is_skipped():
    """Two groups, each a shard and a block further: the values of one are no numbers, the other's results do not know."""
    view = view_of([[(48, [16]), (48, [16])]])
    arrays = inputs(1, TOKENS)
    q, k, v, d = arrays
    for half in (slice(0, 64), slice(64, 128)):
        other = slice(64 - half.start, 128 - half.start)
        spoilt = q, k.at[:, half].set(np.nan), v.at[:, half].set(np.nan), d
        mixer = kernels.make_mixer("ring", mesh=mesh_of(context=4), block=16)
        got = program(mixer)(view, *spoilt)
        for a, b in zip(got, dense(view, arrays), strict=True):
            assert np.abs(a - b)[:, other].max() <= 1e-5 * np.abs(b).max()
        assert np.isnan(got[0][:, half]).all()


def compiled(tokens, context, block):
    mesh = mesh_of(2, context=context)
    view = view_of([ragged(seed, tokens, 40, 60) for seed in range(2)], tokens)
    arguments = placed(mesh, view, inputs(2, tokens))
    run = program(kernels.make_mixer("ring", mesh=mesh, block=block))
    return run.lower(*arguments).compile().as_text()


def test_only_neighbours_talk_and_nothing_is_quadratic():
    """Keys and values are sent, never gathered; the largest buffer of a device is as long as its queries."""
    tokens, context = 4096, 4
    text = compiled(tokens, context, 16)
    kinds = set(re.findall(r" ([a-z-]+?)(?:-start|-done)?\(", text))
    assert "collective-permute" in kinds
    assert kinds.isdisjoint({"all-gather", "all-to-all", "all-reduce", "reduce-scatter"})
    local = tokens // context
    shapes = re.findall(r"(?:f32|pred|s32|bf16)\[([\d,]+)\]", text)
    largest = max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)
    assert largest == local * HEADS * SIZE < local * local
    sent = set(re.findall(r"= (\w+)\[([\d,]*)\]\S* collective-permute\(", text))
    sizes = {(dtype, np.prod([int(size) for size in shape.split(",")])) for dtype, shape in sent}
    assert sizes == {("f32", local * KV_HEADS * SIZE), ("s32", local)}


def test_the_backward_pass_keeps_nothing_but_its_inputs_and_two_results():
    view, (q, k, v, _) = view_of(ROWS[:2]), inputs(2, TOKENS)
    _, pull = jax.vjp(lambda *x: ring.ring(*x, view, block=16), q, k, v)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    lse = q.size // SIZE
    assert kept == q.size + k.size + v.size + q.size + lse + 3 * view.segments.size


# Blocks, specs, errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "wanted", "size"),
    [
        (8192, None, 512),
        (768, None, 256),
        (1408, None, 128),
        (96, None, 96),
        (1000, None, 500),
        (128, 50, 32),
        (7, 3, 1),
    ],
)
def test_block_sizes_divide_the_columns(columns, wanted, size):
    assert ring.block_size(columns, wanted) == size


def test_columns_that_do_not_divide_are_refused():
    view, arrays = view_of(ROWS[:1]), inputs(1, TOKENS)
    short = jax.tree.map(lambda x: x[:, :126], (view, *arrays))
    with pytest.raises(ConfigError, match=r"126 tokens do not divide over mesh\.context = 4"):
        program(kernels.make_mixer("ring", mesh=mesh_of(context=4)))(*short)


def test_a_view_of_split_rows_holds_tokens_alone():
    view = view_of(ROWS)
    assert isinstance(view, attention.View)
    assert view.blocks is None and view.expand is None and view.home is None
