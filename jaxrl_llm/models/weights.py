"""Weights from and to Hugging Face folders: `safetensors` files streamed leaf by leaf into (sharded) arrays.

`tensor_files` knows the bytes; here Hugging Face names and layouts meet the parameters of `families.param_dims`.

Left out on purpose: any random initialisation of what a checkpoint lacks, and guessing at names with another prefix.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import DataError
from jaxrl_llm.models.families import (
    ModelConfig,
    axis_sizes,
    leaves,
    param_dims,
    shape_of,
    to_hf,
)
from jaxrl_llm.models.tensor_files import (
    DTYPES,
    Index,
    TensorSource,
    ignorable,
    open_safetensors,
    read_json,
    sync_folder,
    write_file,
    write_safetensors,
)

__all__ = [
    "TensorSource",
    "expected_shapes",
    "hf_layout",
    "hf_tensors",
    "load_config",
    "load_params",
    "open_safetensors",
    "save_hf",
]

Params = dict[str, Any]
Make = Callable[[], np.ndarray]

SAVED = {"float32": "F32", "bfloat16": "BF16"}

OUTER = {
    ("embed", "kernel"): ("model.embed_tokens.weight", ("V", "D")),
    ("norm", "scale"): ("model.norm.weight", ("D",)),
    ("head", "kernel"): ("lm_head.weight", ("V", "D")),
}
INNER: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "attention_norm": ("input_layernorm", {"scale": ("D",)}),
    "q": ("self_attn.q_proj", {"kernel": ("NH", "D"), "bias": ("NH",)}),
    "k": ("self_attn.k_proj", {"kernel": ("KH", "D"), "bias": ("KH",)}),
    "v": ("self_attn.v_proj", {"kernel": ("KH", "D"), "bias": ("KH",)}),
    "o": ("self_attn.o_proj", {"kernel": ("D", "NH"), "bias": ("D",)}),
    "q_norm": ("self_attn.q_norm", {"scale": ("H",)}),
    "k_norm": ("self_attn.k_norm", {"scale": ("H",)}),
    "mlp_norm": ("post_attention_layernorm", {"scale": ("D",)}),
    "gate": ("mlp.gate_proj", {"kernel": ("F", "D"), "bias": ("F",)}),
    "up": ("mlp.up_proj", {"kernel": ("F", "D"), "bias": ("F",)}),
    "down": ("mlp.down_proj", {"kernel": ("D", "F"), "bias": ("D",)}),
}
"""Our parameter names, the Hugging Face module, and the axes of its tensors; `NH` is one axis of N * H."""


def hf_layout(config: ModelConfig) -> dict[tuple[str, ...], tuple[str, tuple[str, ...]]]:
    """For each parameter path the Hugging Face name, `{layer}` in place of the layer, and that tensor's axes."""
    table = {}
    for path, _ in leaves(param_dims(config)):
        if path[0] == "layers":
            module, axes = INNER[path[1]]
            suffix = "bias" if path[2] == "bias" else "weight"
            table[path] = (f"model.layers.{{layer}}.{module}.{suffix}", axes[path[2]])
        else:
            table[path] = OUTER[(path[0], path[1])]
    return table


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor a checkpoint of this model has, with its shape."""
    sizes = axis_sizes(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for template, axes in hf_layout(config).values():
        shape = tuple(math.prod(sizes[letter] for letter in axis) for axis in axes)
        layers = range(config.num_layers) if "{layer}" in template else range(1)
        shapes |= {template.format(layer=layer): shape for layer in layers}
    return shapes


def _check_names(source: TensorSource, config: ModelConfig) -> None:
    need, have = expected_shapes(config), set(source.names())
    problems = [
        f"{name}: got nothing, need shape {shape}; complete the checkpoint or correct config.json"
        for name, shape in need.items()
        if name not in have
    ]
    tied_head = "lm_head.weight" if config.tie_embeddings else None
    for name in sorted(have):
        if name in need and source.shape(name) != need[name]:
            problems.append(
                f"{name}: got shape {source.shape(name)}, need {need[name]}; correct config.json"
            )
        elif name not in need and name != tied_head and not ignorable(name):
            problems.append(
                f"{name}: got shape {source.shape(name)}, need no such tensor in a {config.family} model; correct config.json"
            )
    if (
        tied_head in have
        and not problems
        and not _same(source, "model.embed_tokens.weight", tied_head)
    ):
        problems.append(
            "lm_head.weight: got a head that differs from the embedding, need tie_word_embeddings false for it; correct "
            "config.json"
        )
    if problems:
        raise DataError(problems)


def _same(source: TensorSource, first: str, second: str, rows: int = 4096) -> bool:
    """Whether two tensors are equal, compared a few rows at a time."""
    shape = source.shape(first)
    if source.shape(second) != shape:
        return False
    blocks = ((slice(start, start + rows),) for start in range(0, shape[0], rows))
    return all(np.array_equal(source.read(first, b), source.read(second, b)) for b in blocks)


def _read_leaf(
    source: TensorSource,
    config: ModelConfig,
    dims: str,
    template: str,
    axes: tuple[str, ...],
    dtype: np.dtype,
    index: Index,
) -> np.ndarray:
    """The part `index` of a leaf with axes `dims`, reading only the rows and columns of the tensors that it needs."""
    sizes = axis_sizes(config)
    parts = {l: slice(*cut.indices(sizes[l])) for l, cut in zip(dims, index, strict=True)}
    rows: list[slice] = []
    opened: list[int] = []
    inner: list[slice] = []
    for axis in axes:
        first, rest = axis[0], axis[1:]
        part, run = parts[first], math.prod(sizes[letter] for letter in rest)
        rows.append(slice(part.start * run, part.stop * run))
        opened += [part.stop - part.start, *(sizes[letter] for letter in rest)]
        inner += [slice(None), *(parts[letter] for letter in rest)]
    order = ["".join(axes).index(letter) for letter in dims if letter != "L"]

    def one(name: str) -> np.ndarray:
        return source.read(name, tuple(rows)).reshape(opened)[tuple(inner)].transpose(order)

    if "L" not in dims:
        return np.asarray(one(template), dtype)
    layers = range(parts["L"].start, parts["L"].stop)
    out = np.empty([parts[letter].stop - parts[letter].start for letter in dims], dtype)
    for place, layer in enumerate(layers):
        out[place] = one(template.format(layer=layer))
    return out


def load_params(
    source: TensorSource,
    config: ModelConfig,
    *,
    shardings: Params | None = None,
    dtypes: Params | None = None,
) -> Params:
    """Parameters of a model from the tensors of `source`, in float32 or in the dtypes of a tree like them.

    With `shardings` (a tree of shardings in the structure of the parameters) each device's part alone is read; without,
    whole leaves go to the default device. Host memory peaks at one leaf. Raises one `DataError` that lists every tensor
    that is missing, unexpected or of the wrong shape. A head is accepted beside tied embeddings only if equal to them.
    """
    _check_names(source, config)
    layout = hf_layout(config)
    params: Params = {}
    for path, dims in leaves(param_dims(config)):
        shape = shape_of(config, dims)
        template, axes = layout[path]
        kind = np.dtype(np.float32 if dtypes is None else _at(dtypes, path))
        read = _remember(partial(_read_leaf, source, config, dims, template, axes, kind))
        if shardings is None:
            leaf = jnp.asarray(read(tuple(slice(0, size) for size in shape)))
        else:
            leaf = jax.make_array_from_callback(shape, _at(shardings, path), read)
        branch = params
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = leaf
    return params


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _remember(read: Callable[[Index], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Read each part of a leaf once, however many devices hold a copy of it."""
    seen: dict[tuple, np.ndarray] = {}

    def once(index: Index) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in seen:
            seen[key] = read(index)
        return seen[key]

    return once


def load_config(folder: str | Path) -> dict[str, Any]:
    """The content of a model folder's `config.json`; raises `DataError` when there is none or it is not an object."""
    return read_json(Path(folder) / "config.json")


def hf_tensors(config: ModelConfig, params: Params) -> Iterator[tuple[str, Make]]:
    """Name and a function making each Hugging Face tensor, in the order of the layers, so that one exists at a time."""
    layout, shapes = hf_layout(config), expected_shapes(config)

    def make(path: tuple[str, ...], dims: str, layer: int | None) -> Make:
        template, axes = layout[path]
        leaf: Any = params
        for name in path:
            leaf = leaf[name]
        letters = dims if layer is None else dims[1:]
        order = [letters.index(letter) for letter in "".join(axes)]
        shape = shapes[template.format(layer=layer)]
        return lambda: (
            _on_host(leaf if layer is None else leaf[layer]).transpose(order).reshape(shape)
        )

    every = list(leaves(param_dims(config)))
    inner = [(path, dims) for path, dims in every if path[0] == "layers"]
    outer = {path: dims for path, dims in every if path[0] != "layers"}
    first = ("embed", "kernel")
    yield layout[first][0], make(first, outer.pop(first), None)
    for layer in range(config.num_layers):
        for path, dims in inner:
            yield layout[path][0].format(layer=layer), make(path, dims, layer)
    for path, dims in outer.items():
        yield layout[path][0], make(path, dims, None)


def _on_host(array: Any) -> np.ndarray:
    """The whole array here, gathered from the other processes if they hold parts of it (they must call this too)."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: str = "float32",
    extra_files: Mapping[str, bytes | str | Path] | None = None,
) -> None:
    """Write `config.json` and safetensors shards that transformers loads, all of it or nothing.

    `dtype` is `"float32"` or `"bfloat16"`; `extra_files` maps file names (tokenizer, generation settings) to contents or to
    files to copy. Everything is written and synced in a sibling folder, which then takes the name `folder`; an older folder
    of that name is removed after. In a run of several processes all of them call this and the first one writes.
    """
    if dtype not in SAVED:
        raise DataError(f"dtype: got {dtype!r}, need one of {', '.join(SAVED)}")
    taken = ("config.json", "model.safetensors.index.json")
    for name in extra_files or {}:
        if Path(name).name != name or name in taken or name.endswith(".safetensors"):
            raise DataError(
                f"extra_files: got the name {name!r}, need a plain file name that is not taken"
            )
    target = Path(folder).absolute()
    fields = to_hf(config) | {"dtype": dtype, "torch_dtype": dtype}
    writes = jax.process_index() == 0
    fresh = target.with_name(f".{target.name}.new-{os.getpid()}")
    if writes:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
    try:
        _write_shards(fresh, config, params, max_shard_bytes, dtype, writes)
        if not writes:
            return
        write_file(fresh / "config.json", json.dumps(fields, indent=2) + "\n")
        for name, content in (extra_files or {}).items():
            write_file(fresh / name, content.read_bytes() if isinstance(content, Path) else content)
        sync_folder(fresh)
        _swap(fresh, target)
    finally:
        if writes:
            shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, target: Path) -> None:
    """Give `fresh` the name `target`; what had the name before is set aside first and removed last."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        os.rename(target, old)
    os.rename(fresh, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_shards(
    folder: Path, config: ModelConfig, params: Params, limit: int, dtype: str, writes: bool
) -> None:
    """Stream the tensors into shards of at most `limit` bytes (or one tensor), with an index when there are several."""
    width, shapes = DTYPES[SAVED[dtype]].itemsize, expected_shapes(config)
    sizes = {name: math.prod(shape) * width for name, shape in shapes.items()}
    shards: list[dict[str, Make]] = [{}]
    held = 0
    for name, make in hf_tensors(config, params):
        if shards[-1] and held + sizes[name] > limit:
            shards.append({})
            held = 0
        shards[-1][name] = make
        held += sizes[name]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else several
        weight_map |= dict.fromkeys(shard, file)
        if writes:
            write_safetensors(
                folder / file, {n: (shapes[n], shard[n]) for n in shard}, SAVED[dtype]
            )
        else:
            for make in shard.values():
                make()
    if writes and len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_file(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
