"""Device meshes and placement, in dim letters.

Parameters and activations name their axes with the alphabet of `records`; one table maps letters to mesh axes. Training
programs are `jit` + `NamedSharding`: sums over trajectories are global whatever the mesh.

Left out on purpose: pipeline stages, experts, and device orders other than JAX's own (processes own contiguous blocks of it).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import ConfigError

Tree = Any

AXES = ("data", "fsdp", "context", "tensor")
"""Mesh axes, outermost first: devices of one tensor group are neighbours, processes are blocks of the first axes."""
ROWS = ("data", "fsdp")
"""Mesh axes that hold different trajectories."""

PARAM_AXES = {"D": "fsdp", "V": "tensor", "N": "tensor", "K": "tensor", "F": "tensor"}
WHOLE = frozenset("LH")
"""Letters of parameter axes that no device splits."""
SILENT_BYTES = 2**20
"""A parameter of up to so many bytes may stay whole where its axis does not divide; a larger one is an error."""
ACTIVATION_AXES: dict[str, str | tuple[str, ...]] = {
    "B": ROWS,
    "T": "context",
    "N": "tensor",
    "K": "tensor",
    "F": "tensor",
    "V": "tensor",
}


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `AXES` over the given devices (default: all), in their order."""
    used = list(jax.devices() if devices is None else devices)
    grid = np.array(used).reshape(shape.data, shape.fsdp, shape.context, shape.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform(mesh: Mesh) -> str:
    """What the mesh's devices are: `cpu`, `gpu` or `tpu`; the same for devices that are only described."""
    name = str(mesh.devices.flat[0].platform)
    return "gpu" if name in ("cuda", "rocm") else name


def shards(mesh: Mesh) -> int:
    """Devices that hold different trajectories."""
    return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def _fits(mesh: Mesh, axis: str | tuple[str, ...] | None, size: int) -> bool:
    axes = (axis,) if isinstance(axis, str) else axis or ()
    return size % int(np.prod([mesh.shape[name] for name in axes], dtype=int)) == 0


def spec(mesh: Mesh, dims: str, shape: Sequence[int], table: dict[str, Any]) -> PartitionSpec:
    """Partition of an array whose axes are named by `dims`; an axis that does not divide stays whole."""
    axes = [table.get(letter) for letter in dims]
    return PartitionSpec(
        *(axis if _fits(mesh, axis, size) else None for axis, size in zip(axes, shape, strict=True))
    )


def param_shardings(mesh: Mesh, dims: Tree, shapes: Tree) -> Tree:
    """Shardings of a parameter tree from its tree of dim letters (`models.families.param_dims`).

    Strict: raises `ConfigError` for a parameter without letters or with a letter that no rule knows, for a rule that no parameter
    uses, and for a parameter above `SILENT_BYTES` that would lie whole on every device because its axis does not divide.
    """
    named = dict(_paths(shapes))
    letters = dict(_paths(dims))
    problems = [
        f"sharding: parameter {name} has {'a shape' if name in named else 'dim letters'} only, need both; name its axes in param_dims"
        for name in sorted(named.keys() ^ letters.keys())
    ]
    used = {letter for value in letters.values() for letter in value}
    problems += [
        f"sharding: letter {letter} of a parameter axis has no rule; add it to PARAM_AXES or WHOLE"
        for letter in sorted(used - PARAM_AXES.keys() - WHOLE)
    ]
    problems += [
        f"sharding: the rule {letter} -> {axis} matches no parameter; remove it or name the axis"
        for letter, axis in PARAM_AXES.items()
        if letter not in used
    ]
    if not problems:
        for name, leaf in named.items():
            problems += _silently_whole(mesh, name, letters[name], leaf)
    if problems:
        raise ConfigError(problems)
    return jax.tree.map(
        lambda letters, leaf: NamedSharding(mesh, spec(mesh, letters, leaf.shape, PARAM_AXES)),
        dims,
        shapes,
    )


def _paths(tree: Tree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _silently_whole(mesh: Mesh, name: str, letters: str, leaf: Any) -> list[str]:
    """What is wrong with a large parameter one of whose axes should be split and cannot be."""
    size = int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
    return [
        f"mesh.{axis} = {mesh.shape[axis]}: parameter {name} has {length} along {letter}, which does not divide, so its "
        f"{size / 2**20:,.0f} MB would lie whole on every device; set mesh.{axis} to a divisor of {length}"
        for letter, length in zip(letters, leaf.shape, strict=True)
        if (axis := PARAM_AXES.get(letter))
        and not _fits(mesh, axis, length)
        and size > SILENT_BYTES
    ]


def make_constrain(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """The function that models call on their main activations with one dim letter per axis."""
    if mesh.size == 1:
        return lambda x, dims: x

    def constrain(x: jax.Array, dims: str) -> jax.Array:
        partition = spec(mesh, dims, x.shape, ACTIVATION_AXES)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))

    return constrain


def replicated(mesh: Mesh) -> NamedSharding:
    """The same values on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Trajectories spread over the data axes along the given array axis."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, ROWS))


def on_host(shardings: Tree) -> Tree:
    """The same shardings in the pinned memory of the devices' hosts."""
    return jax.tree.map(lambda where: where.with_memory_kind("pinned_host"), shardings)


def move(tree: Tree, shardings: Tree | None) -> Tree:
    """Inside a program: leaves that are kept in host memory on their way to the devices, or back; `None` leaves all as they are."""
    return tree if shardings is None else jax.device_put(tree, shardings)


def put(tree: Tree, sharding: Any) -> Tree:
    """Host arrays (the same on every process) or device arrays, placed; every process keeps what its own devices hold.

    `sharding` is one for all leaves or a tree of them.
    """

    def one(leaf: Any, where: Any) -> Any:
        if where.is_fully_addressable or isinstance(leaf, jax.Array):
            return jax.device_put(leaf, where)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: one(leaf, sharding), tree)
    return jax.tree.map(one, tree, sharding)


def put_rows(mesh: Mesh, tree: Tree) -> Tree:
    """Host arrays with a leading trajectory axis (all trajectories, on every process), placed row-wise on the mesh."""
    return put(tree, rows(mesh))
