"""Which attention runs where: one table of kinds, and adapters to the kernels that ship with JAX.

`blocked` is this package's own (see `attention`) and runs anywhere; `splash` is JAX's sparse attention on TPUs, with the rule
of packed rows as a mask; `flash` is JAX's Triton attention on NVIDIA GPUs, which knows causal rows only: every response gets a
row of its own with a copy of its prompt in front, the mixed tokens are gathered back; `reference` is dense. `ring` (see the module
of that name) is for rows whose columns are split over devices, where no other will do.

A mixer is made by `make_mixer(choose(kind, platform))`, what it reads by `make_view`.

Left out on purpose: tuned tile sizes, cuDNN attention, sliding windows on GPUs, kernels of this package's own.
"""

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import attention, ring
from jaxrl_llm.models.attention import View

Array = jax.Array
Attend = Callable[..., Array]
Mixer = Callable[[Array, Array, Array, Any, Any, Array], tuple[Array, Any]]

TILE = 128
"""The accelerator kernels work on tiles of a multiple of so many tokens."""
SPLASH_TILES = (512, 256, 128)
"""Tile sizes of `splash`, the best first; the first that divides a row is taken."""
AUTO = {"tpu": "splash", "gpu": "flash", "cuda": "flash"}
"""What `auto` stands for by platform; `blocked` elsewhere."""
HOME = {"splash": ("tpu",), "flash": ("gpu", "cuda")}
"""The platforms that a library kernel is written for."""


# Choosing ----------------------------------------------------------------------------------------------------------------


def choose(kind: str, platform: str, window: int | None = None, context: int = 1) -> str:
    """The attention that `model.attention = kind` means on a platform: one of `KINDS`, `auto` resolved.

    `window` is the sliding window of the model: `auto` avoids a kernel that has none. `context` is the number of devices that
    share a row: above 1 it has to be `ring`, which `auto` then means. Raises `ConfigError` for an unknown kind, for a kernel of
    another platform and for rows that a kind cannot split.
    """
    if kind == "auto":
        best = "ring" if context > 1 else AUTO.get(platform, "blocked")
        return "blocked" if best == "flash" and window is not None else best
    _attend(kind)
    homes = HOME.get(kind, (platform,))
    if platform not in homes:
        raise ConfigError(
            f"model.attention: got {kind!r} on {platform}, it needs {' or '.join(homes)}; choose auto or blocked"
        )
    _check_context(kind, context)
    return kind


def _check_context(kind: str, context: int) -> None:
    if context > 1 and kind != "ring":
        raise ConfigError(
            f"model.attention: got {kind!r} with mesh.context = {context}, rows that are split over devices need ring; "
            "choose auto or ring, or set mesh.context to 1"
        )


def _attend(kind: str) -> Attend:
    if kind not in KINDS:
        raise ConfigError(
            f"model.attention: got {kind!r}, need one of auto, {', '.join(KINDS)}; choose one of them"
        )
    return KINDS[kind]


def make_mixer(
    kind: str,
    *,
    window: int | None = None,
    mesh: Mesh | None = None,
    rows: tuple[str, ...] = ("data", "fsdp"),
    columns: str = "context",
    heads: str = "tensor",
    **how: Any,
) -> Mixer:
    """The attention of a kind as a mixer of `transformer.run`; its view comes from `make_view`.

    On a mesh of several devices each works on its own rows and heads, and nothing is moved: kernels cannot be partitioned
    from outside. Axes that do not divide rows or key heads are not used. Where the axis `columns` has several devices each
    holds an equal part of its rows' columns, and only `ring` will do, which moves keys and values along that axis. `how` goes
    to the attention (`interpret=True` runs a kernel on a CPU). Raises `ConfigError` for an unknown kind and for columns that a
    kind cannot split, or while tracing for what a kernel cannot express and for columns that do not divide.
    """
    attend = partial(_attend(kind), window=window, **how)
    context = 1 if mesh is None else mesh.shape[columns]
    _check_context(kind, context)
    if context > 1:
        attend = partial(attend, axis=columns)

    def mix(
        q: Array, k: Array, v: Array, view: View, store: Any, layer: Array
    ) -> tuple[Array, Any]:
        del layer
        if mesh is None or mesh.size == 1:
            return attend(q, k, v, view), store
        across = rows if q.shape[0] % math.prod(mesh.shape[axis] for axis in rows) == 0 else None
        if q.shape[1] % context:
            raise ConfigError(
                f"packed rows of {q.shape[1]} tokens do not divide over mesh.{columns} = {context} devices; "
                f"use a multiple of {context}"
            )
        by_head = PartitionSpec(
            across, columns, heads if k.shape[2] % mesh.shape[heads] == 0 else None
        )
        local = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(*(by_head,) * 3, view_specs(view, rows=across, columns=columns)),
            out_specs=by_head,
            check_vma=False,
        )
        return local(q, k, v, view), store

    return mix


def view_specs(
    view: View,
    *,
    lead: int = 0,
    rows: str | tuple[str, ...] | None = ("data", "fsdp"),
    columns: str | None = "context",
) -> View:
    """A `PartitionSpec` for every array of a view, behind `lead` axes that no device splits.

    Rows are spread over the axes `rows`, the columns of segments, prefix and positions over `columns`; lists of blocks and bins,
    which no kind for split rows has, stay whole along their row.
    """
    whole = (None,) * lead
    tokens = dict.fromkeys(
        ("segments", "prefix", "positions"), PartitionSpec(*whole, rows, columns)
    )
    by_row = jax.tree.map(lambda _: PartitionSpec(*whole, rows), view)
    return replace(by_row, **tokens)


def make_view(
    kind: str,
    segments: np.ndarray,
    prefix: np.ndarray,
    positions: np.ndarray,
    *,
    block: int,
    prompt_width: int,
    response_width: int,
    responses: int | None = None,
) -> View:
    """What the attention of a kind reads about packed rows `[R T]`; host arrays.

    Shapes follow from the arguments' shapes and numbers alone. `responses` is the most responses that a row may hold; only
    `flash` asks for it. Raises `ConfigError` for an unknown kind and for rows that break the widths.
    """
    _attend(kind)
    view = View(*(np.asarray(x, np.int32) for x in (segments, prefix, positions)))
    if kind == "blocked":
        most = attention.most_blocks(prompt_width, response_width, block, segments.shape[1])
        return replace(view, blocks=attention.block_lists(view.segments, view.prefix, block, most))
    if kind == "flash":
        if responses is None:
            raise ValueError("flash needs the most responses that a row may hold")
        length = -(-(prompt_width + response_width) // TILE) * TILE
        expand, home = bins(view.segments, view.prefix, responses, length)
        return replace(view, expand=expand, home=home)
    return view


# TPU ---------------------------------------------------------------------------------------------------------------------


def splash(
    q: Array,
    k: Array,
    v: Array,
    view: View,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Packed rows through JAX's splash attention, q `[R T N H]`, k and v `[R T K H]` -> `[R T N H]`.

    The rule of `attention` is handed over as a mask made on the device, `[T T]` bytes per row (and three copies in tiles);
    tiles that nothing is seen of are skipped. Padding gives zero and no gradient. Raises `ConfigError` for rows that do not
    divide into tiles of 128.
    """
    tokens, size = q.shape[1], q.shape[3]
    tile = next((tile for tile in SPLASH_TILES if tokens % tile == 0), None)
    if tile is None:
        raise ConfigError(
            f"model.attention: got splash on rows of {tokens} tokens, need a multiple of {TILE}; choose such rows or blocked"
        )
    library = _library("splash", "tpu.splash_attention.splash_attention_kernel")
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": tile for name in names}
    tiles = library.BlockSizes(**sizes)
    scaled = (q.astype(jnp.float32) * (1.0 / math.sqrt(size))).astype(q.dtype)

    def row(inputs: tuple[Array, Array, Array, View]) -> Array:
        *arrays, own = inputs
        kernel = library.make_splash_mha(
            attention.visible(own, own, window)[None],
            block_sizes=tiles,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=attention.SAVED,
            interpret=interpret,
        )
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            # Under jit the library turns this flag into a traced array and then asks Python for its truth.
            info = getattr(kernel, name)._replace(is_dynamic_mask=True)
            setattr(kernel, name, info)
        out = kernel(*(x.swapaxes(0, 1) for x in arrays)).swapaxes(0, 1)
        return jnp.where((own.segments != 0)[:, None, None], out, 0)

    tokens_of = View(view.segments, view.prefix, view.positions)
    return jax.lax.map(row, (scaled, k, v, tokens_of))


# GPU ---------------------------------------------------------------------------------------------------------------------


def bins(
    segments: np.ndarray, prefix: np.ndarray, count: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows `[R T]` cut into `count` bins of `length` cells, one per response with its prompt in front.

    Returns `expand [R count length]`, the column in every cell (-1 = none, behind the tokens of its bin), and `home [R T]`,
    the cell (of `count * length`) that holds a column (-1 = padding); of a prompt's copies it is the first. A prompt without
    a response has a bin of its own. Raises `ConfigError` where a row needs more bins, or a bin more cells.
    """
    run, start, end, prompt = attention.runs(segments, prefix)
    number = np.arange(len(start))
    row = np.searchsorted(run[:, -1], number)
    real = segments[row, start] != 0
    alone = real & (prompt == number) & (np.bincount(prompt[real], minlength=len(start)) == 1)
    item = number[real & (prompt != number) | alone]
    owner = row[item]
    place = np.arange(len(item)) - np.searchsorted(owner, owner)
    head = np.where(alone[item], 0, (end - start)[prompt[item]])
    size = head + (end - start)[item]
    if place.max(initial=-1) >= count or size.max(initial=0) > length:
        raise ConfigError(
            f"a packed row has {place.max(initial=-1) + 1} responses of up to {size.max(initial=0)} tokens with their prompt, "
            f"room is for {count} of {length}; they must not exceed the widths the rows were made for"
        )
    cell = np.arange(length)
    column = np.where(
        cell < head[:, None],
        start[prompt[item]][:, None] + cell,
        start[item][:, None] + cell - head[:, None],
    )
    expand = np.full((len(segments), count, length), -1, np.int32)
    expand[owner, place] = np.where(cell < size[:, None], column, -1)
    begin = np.full(len(start), -1)
    begin[prompt[item][::-1]] = (place * length)[::-1]
    begin[item] = place * length + head
    home = begin[run] + np.arange(segments.shape[1]) - start[run]
    return expand, np.where(segments != 0, home, -1).astype(np.int32)


def flash(
    q: Array,
    k: Array,
    v: Array,
    view: View,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Packed rows through JAX's Triton attention, q `[R T N H]`, k and v `[R T K H]` -> `[R T N H]`.

    Tokens are copied into the causal bins of the view and back, keys once per query head, and the gradients of the copies are
    added up in float32. Padding gives zero and no gradient. Raises `ConfigError` for a sliding window, and where JAX has no
    such kernel.
    """
    if window is not None:
        raise ConfigError(
            "model.attention: got flash for a model with a sliding window, which the kernel cannot express; choose blocked"
        )
    rows, count, length = view.expand.shape
    group = q.shape[2] // k.shape[2]
    cells = jnp.maximum(view.expand, 0).reshape(rows, count * length)

    def spread(x: Array) -> Array:
        return _gather(x, cells).reshape(rows * count, length, *x.shape[2:])

    def copies(x: Array) -> Array:
        return jnp.repeat(spread(x.astype(jnp.float32)).astype(x.dtype), group, axis=2)

    keys, values = copies(k), copies(v)
    mixed = _library("flash", "gpu.attention").mha(
        spread(q),
        keys,
        values,
        None,
        sm_scale=1.0 / math.sqrt(q.shape[3]),
        causal=True,
        interpret=interpret,
    )
    mixed = mixed.reshape(rows, count * length, *q.shape[2:])
    back = _gather(mixed, jnp.maximum(view.home, 0))
    return jnp.where((view.home >= 0)[..., None, None], back, 0)


def _gather(x: Array, index: Array) -> Array:
    """Tokens `index [R C]` of `x [R T ...]`."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="promise_in_bounds"))(x, index)


def _library(kind: str, name: str) -> Any:
    """A module of JAX's kernels, imported where it is used: newer versions warn that some will go."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"jax.experimental.pallas.ops.{name}")
    except ImportError as problem:
        raise ConfigError(
            f"model.attention: got {kind}, but this JAX has no such kernel ({problem}); choose blocked"
        ) from problem


KINDS: dict[str, Attend] = {
    "blocked": attention.blocked,
    "flash": flash,
    "splash": splash,
    "ring": ring.ring,
    "reference": attention.reference,
}
"""Attention by name; `auto` is resolved by `choose`."""
