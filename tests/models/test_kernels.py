"""Choosing an attention, its views, the bins of `flash`, and library kernels in interpret mode against dense attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import attention, kernels
from tests import tiny
from tests.models.test_attention import inputs, packed, ragged, with_gradients

WIDTHS = {"block": 128, "prompt_width": 40, "response_width": 60}
LAYER = jnp.zeros((), jnp.int32)


def view_of(kind, rows, tokens, responses=40, **widths):
    return kernels.make_view(kind, *packed(rows, tokens), **(WIDTHS | widths), responses=responses)


def through(mixer, view, q, k, v, d):
    """Output and gradients of a mixer, jitted; the view is an argument, as it is in training."""

    def run(view, *arrays):
        return with_gradients(lambda *x: mixer(*x, view, None, LAYER)[0], *arrays)

    return jax.jit(run)(view, q, k, v, d)


def compare(kind, view, window=None, dtype=jnp.float32, tolerance=1e-5, **how):
    """Output and gradients held against dense attention in float32; padding exactly zero."""
    arrays = inputs(*view.segments.shape, dtype)
    got = through(kernels.make_mixer(kind, window=window, **how), view, *arrays)
    exact = (x.astype(jnp.float32) for x in arrays)
    wanted = through(kernels.make_mixer("reference", window=window), view, *exact)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert a.dtype == dtype
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.isfinite(a).all() and np.abs(b).max() > 0.1
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name
        assert not a[view.segments == 0].any()


# Choosing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "platform", "chosen"),
    [
        ("auto", "cpu", "blocked"),
        ("auto", "tpu", "splash"),
        ("auto", "gpu", "flash"),
        ("auto", "cuda", "flash"),
        ("auto", "rocm", "blocked"),
        ("blocked", "tpu", "blocked"),
        ("reference", "gpu", "reference"),
        ("splash", "tpu", "splash"),
        ("flash", "cuda", "flash"),
        ("ring", "cpu", "ring"),
    ],
)
def test_auto_follows_the_platform_and_names_stay(kind, platform, chosen):
    assert kernels.choose(kind, platform) == chosen


def test_auto_avoids_a_kernel_without_a_sliding_window():
    assert kernels.choose("auto", "gpu", 4096) == "blocked"
    assert kernels.choose("auto", "tpu", 4096) == "splash"
    assert (
        kernels.choose("flash", "gpu", 4096) == "flash"
    )  # asked for by name: refused where it is used


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_rows_on_several_devices_need_the_ring(platform):
    for window in (None, 4096):
        assert kernels.choose("auto", platform, window, context=2) == "ring"
    assert kernels.choose("ring", platform, context=2) == "ring"
    own = {"tpu": "splash", "gpu": "flash"}.get(platform, "reference")
    for kind in ("blocked", own):
        refused = rf"got '{kind}' with mesh\.context = 4, .* need ring; choose auto or ring"
        with pytest.raises(ConfigError, match=refused):
            kernels.choose(kind, platform, context=4)


@pytest.mark.parametrize("kind", sorted(kernels.KINDS.keys() - {"ring"}))
def test_a_mixer_of_another_kind_does_not_take_split_rows(kind):
    mesh = sharding.make_mesh(MeshShape(data=2, fsdp=1, tensor=1, context=2), jax.devices()[:4])
    with pytest.raises(ConfigError, match=rf"got '{kind}' with mesh\.context = 2"):
        kernels.make_mixer(kind, mesh=mesh)


@pytest.mark.parametrize(
    ("kind", "platform"), [("splash", "gpu"), ("flash", "cpu"), ("flash", "tpu")]
)
def test_kernels_of_another_platform_are_refused(kind, platform):
    with pytest.raises(ConfigError, match=rf"model\.attention: got '{kind}' on {platform}"):
        kernels.choose(kind, platform)


def test_unknown_kinds_list_the_known_ones():
    calls = [
        lambda: kernels.choose("sparse", "cpu"),
        lambda: kernels.make_mixer("sparse"),
        lambda: view_of("sparse", [[]], 128),
        lambda: kernels.make_mixer("auto"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="auto, blocked, flash, splash, ring, reference"):
            call()


# Views -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_shapes_of_views_do_not_depend_on_the_rows(kind):
    few, many = ([[(3, [2])], []], [ragged(0, 256, 40, 60), ragged(1, 256, 5, 9)])
    shapes = [
        jax.tree.map(np.shape, view_of(kind, rows, 256, responses=100)) for rows in (few, many)
    ]
    assert shapes[0] == shapes[1]
    fields = {"blocked": {"blocks"}, "flash": {"expand", "home"}}.get(kind, set())
    filled = view_of(kind, few, 256)
    for name in ("blocks", "expand", "home"):
        assert (getattr(filled, name) is not None) == (name in fields)
    assert {leaf.dtype for leaf in jax.tree.leaves(filled)} == {np.dtype("int32")}


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_specs_split_the_rows_of_every_array_and_the_columns_of_tokens(kind):
    view = view_of(kind, [ragged(0, 128, 20, 30)] * 2, 256)
    specs = kernels.view_specs(view, lead=2)
    assert jax.tree.structure(specs) == jax.tree.structure(view)
    rows = ("data", "fsdp")
    assert specs.segments == specs.prefix == specs.positions
    assert specs.segments == PartitionSpec(None, None, rows, "context")
    for name in ("blocks", "expand", "home"):
        if getattr(view, name) is not None:
            assert getattr(specs, name) == PartitionSpec(None, None, rows)
    assert kernels.view_specs(view, rows=None, columns=None).segments == PartitionSpec(None, None)


def test_lists_of_a_view_have_the_bound_of_its_widths():
    view = view_of(
        "blocked", [ragged(0, 256, 20, 30)], 256, block=16, prompt_width=20, response_width=30
    )
    assert view.blocks.shape == (1, 16, 2 + 2 + 2)
    np.testing.assert_array_equal(
        view.blocks, attention.block_lists(view.segments, view.prefix, 16, 6)
    )


def test_bins_by_hand():
    """Two groups (2 + 1 and 3), (1 without a response), one padded column; the second row is empty."""
    segments, prefix, _ = packed([[(2, [1, 3]), (1, [])], []], 8)
    expand, home = kernels.bins(segments, prefix, 4, 5)
    none = [-1] * 5
    assert expand[0].tolist() == [[0, 1, 2, -1, -1], [0, 1, 3, 4, 5], [6, -1, -1, -1, -1], none]
    assert home[0].tolist() == [0, 1, 2, 7, 8, 9, 10, -1]
    assert expand[1].tolist() == [none] * 4 and home[1].tolist() == [-1] * 8


def test_bins_hold_every_token_once_at_home():
    rows = [ragged(seed, 300, 40, 60, group) for seed, group in enumerate((1, 4, 7))]
    view = view_of("flash", rows, 300)
    assert view.expand.shape == (3, 40, 128)
    for row in range(3):
        real = view.segments[row] != 0
        assert (view.expand[row].ravel()[view.home[row][real]] == np.flatnonzero(real)).all()
        for cells in view.expand[row]:
            columns = cells[cells >= 0]
            assert (view.positions[row, columns] == np.arange(len(columns))).all()
            assert len(set(view.prefix[row, columns].tolist())) <= 1


def test_bins_that_do_not_suffice_are_refused():
    rows = [[(2, [1, 3])]]
    with pytest.raises(ConfigError, match=r"2 responses of up to 5 tokens .* room is for 1 of 128"):
        view_of("flash", rows, 8, responses=1)
    segments, prefix, _ = packed(rows, 8)
    with pytest.raises(ConfigError, match="room is for 2 of 4"):
        kernels.bins(segments, prefix, 2, 4)
    with pytest.raises(ValueError, match="most responses"):
        view_of("flash", rows, 8, responses=None)


# Kernels -----------------------------------------------------------------------------------------------------------------

ROWS = [ragged(0, 370, 40, 60), [(9, [3, 60])], []]


def test_blocked_and_reference_agree_behind_one_signature():
    compare("blocked", view_of("blocked", ROWS, 384))
    compare("blocked", view_of("blocked", ROWS, 384), window=7)


@pytest.mark.parametrize("window", [None, 7])
def test_splash_equals_dense_attention(window):
    """Three tiles of 128 per axis: seen, partly seen and skipped ones; one row of padding."""
    compare("splash", view_of("splash", ROWS, 384), window=window, interpret=True)


def test_splash_in_half_precision():
    compare(
        "splash",
        view_of("splash", ROWS[:1], 384),
        dtype=jnp.bfloat16,
        tolerance=2e-2,
        interpret=True,
    )


def test_splash_needs_rows_of_whole_tiles():
    view = view_of("splash", [[]], 192)
    with pytest.raises(ConfigError, match=r"model\.attention: got splash on rows of 192 tokens"):
        through(kernels.make_mixer("splash"), view, *inputs(1, 192))


def test_flash_equals_dense_attention():
    compare("flash", view_of("flash", ROWS, 384), interpret=True)


def test_flash_in_half_precision():
    """Gradients of 60 copies of a prompt are added up in float32: in bfloat16 they would be off by 1.2e-2."""
    rows = [[(16, [2] * 60)]]
    view = view_of("flash", rows, 256, responses=60)
    compare("flash", view, dtype=jnp.bfloat16, tolerance=9e-3, interpret=True)


def test_flash_refuses_a_sliding_window():
    view = view_of("flash", [[]], 128)
    with pytest.raises(
        ConfigError, match=r"model\.attention: got flash for a model with a sliding"
    ):
        through(kernels.make_mixer("flash", window=4), view, *inputs(1, 128))


@pytest.mark.parametrize("kind", kernels.HOME)
def test_a_jax_without_the_kernel_is_named(kind, monkeypatch):
    def missing(name):
        raise ImportError(name)

    view, arrays = view_of(kind, [[]], 128), inputs(1, 128)
    monkeypatch.setattr(kernels.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=rf"got {kind}, but this JAX has no such kernel \(jax"):
        through(kernels.make_mixer(kind), view, *arrays)


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_the_same_result_on_eight_devices_and_nothing_is_moved(kind):
    rows = [ragged(seed, 120, 20, 30) for seed in range(4)]
    view = view_of(kind, rows, 128, prompt_width=20, response_width=30, block=16)
    arrays = inputs(4, 128)
    how = {"interpret": True} if kind in kernels.HOME else {}
    wanted = through(kernels.make_mixer(kind, **how), view, *arrays)
    mesh = tiny.mesh(2, 2, 2)
    mixer = kernels.make_mixer(kind, mesh=mesh, **how)
    by_row = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    by_head = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    placed = (jax.device_put(view, by_row), *jax.device_put(arrays, by_head))

    def run(view, *arrays):
        return with_gradients(lambda *x: mixer(*x, view, None, LAYER)[0], *arrays)

    program = jax.jit(run).lower(*placed).compile()
    for a, b in zip(program(*placed), wanted, strict=True):
        assert a.sharding.shard_shape(a.shape)[::2] == (1, b.shape[2] // 2)
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    text = program.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_layers_in_a_scan_with_saved_attention_on_a_mesh(kind):
    """As the model runs it: a scan of rematerialised layers, the view broadcast, rows and heads spread."""
    rows = [ragged(seed, 120, 20, 30) for seed in range(2)]
    view = view_of(kind, rows, 128, prompt_width=20, response_width=30, block=16)
    q, k, v, d = inputs(2, 128)
    how = {"interpret": True} if kind in kernels.HOME else {}
    policy = jax.checkpoint_policies.save_only_these_names("attention")

    def loss(mixer, q, k, v, d, view):
        def layer(x, index):
            mixed, _ = mixer(x, k, v, view, None, index)
            return x + mixed, None

        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), q, jnp.arange(2))
        return (x * d).sum()

    results = []
    for name, mesh, extra in (("reference", None, {}), (kind, tiny.mesh(2, 1, 2), how)):
        mixer = kernels.make_mixer(name, mesh=mesh, **extra)
        results.append(jax.jit(jax.grad(partial(loss, mixer), (0, 1, 2)))(q, k, v, d, view))
    assert tiny.worst_difference(*results) < 1e-5


def test_a_mesh_that_divides_neither_rows_nor_heads_gives_the_same():
    view = view_of("blocked", ROWS, 384)
    arrays = inputs(3, 384)
    wanted = through(kernels.make_mixer("blocked"), view, *arrays)
    got = through(kernels.make_mixer("blocked", mesh=tiny.mesh(2, 1, 4)), view, *arrays)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("kind", ["blocked", "splash"])
def test_checkpoint_policies_find_what_the_backward_pass_needs(kind):
    """With the name saved the forward loops run once, with nothing saved twice."""
    view = view_of(kind, [ragged(0, 128, 20, 30)], 128)
    q, k, v, _ = inputs(1, 128)
    how = {"interpret": True} if kind in kernels.HOME else {}
    mixer = kernels.make_mixer(kind, **how)
    policies = jax.checkpoint_policies
    runs = []
    for policy in (policies.save_only_these_names("attention"), policies.nothing_saveable):
        loss = jax.checkpoint(lambda *x: mixer(*x, view, None, LAYER)[0].sum(), policy=policy)
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile()
        runs.append(program.as_text().count(" while("))
    assert runs[0] < runs[1]
