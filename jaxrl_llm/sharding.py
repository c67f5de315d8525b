"""Device meshes and placement, in dim letters.

Parameters and activations name their axes with the alphabet of `records`; one table maps letters to mesh axes. Training
programs are `jit` + `NamedSharding`: sums over trajectories are global whatever the mesh.

Left out on purpose: more per-shard programs than attention and head (decode loops, vocabulary-parallel log-probs, ring attention), several
processes, and offload of trained state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.checks import MeshShape

Tree = Any

ROWS = ("data", "fsdp")
"""Mesh axes that hold different trajectories."""

PARAM_AXES = {"D": "fsdp", "V": "tensor", "N": "tensor", "K": "tensor", "F": "tensor"}
ACTIVATION_AXES: dict[str, str | tuple[str, ...]] = {
    "B": ROWS,
    "N": "tensor",
    "K": "tensor",
    "F": "tensor",
    "V": "tensor",
}


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `data`, `fsdp`, `tensor` over the given devices (default: all), in their order."""
    used = list(jax.devices() if devices is None else devices)
    grid = np.array(used).reshape(shape.data, shape.fsdp, shape.tensor)
    return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


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
    """Shardings of a parameter tree from its tree of dim letters (`models.families.param_dims`)."""
    return jax.tree.map(
        lambda letters, leaf: NamedSharding(mesh, spec(mesh, letters, leaf.shape, PARAM_AXES)),
        dims,
        shapes,
    )


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


def put_rows(mesh: Mesh, tree: Tree) -> Tree:
    """Host arrays with a leading trajectory axis, placed row-wise on the mesh."""
    return jax.device_put(tree, rows(mesh))
