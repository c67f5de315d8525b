"""Weights from where they are trained to where they decode: one program that casts and reshards, no copy on a host.

The training mesh spans the devices of all processes; a process decodes on its own. So the program runs on all devices, arranged
anew as data x tensor: parameters are split over the tensor axis only, and each process ends up with complete copies. What its own
devices hold is then taken as arrays of its rollout mesh, which moves nothing.

Left out on purpose: weights of other architectures than the policy's, and the way back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.errors import ConfigError

Tree = Any

BITS = {2: np.uint16, 4: np.uint32}
"""Unsigned integers by bytes."""


@dataclass(frozen=True)
class Handover:
    """`handover(params)` is the copy to decode with; all processes call it together.

    `program` is the jitted move, `None` where nothing has to change. `source` describes what it reads and `result` what comes out
    (trees of `ShapeDtypeStruct` with shardings).
    """

    program: Callable[..., Any] | None
    source: Tree
    result: Tree

    def __call__(self, params: Tree) -> Tree:
        moved = params if self.program is None else self.program(params)
        return jax.tree.map(_own, moved, self.result)


def make_handover(
    dims: Tree, abstract: Tree, mesh: Mesh, rollout_mesh: Mesh, dtype: Any, *, source: Tree
) -> Handover:
    """The move of parameters with the shapes and types of `abstract` from their `source` shardings on `mesh` to `rollout_mesh`.

    Kernels and biases come out in `dtype`, as the forward pass reads them (norm scales stay as they are): log-probs are those of the
    originals, bit for bit. They are cast before they travel. Where both meshes are one, weights stay split as they are trained.
    Sources in pinned host memory pass through the devices. Raises `ConfigError` where the rollout mesh is no block of `mesh`.
    """
    there = mesh if rollout_mesh is mesh else _arranged(mesh, rollout_mesh)
    result = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, _read_as(path, leaf, dtype)), abstract
    )
    try:
        target = sharding.param_shardings(there, dims, result)
        own = sharding.param_shardings(rollout_mesh, dims, result)
    except ConfigError as problem:
        name = "rollout.tensor_model_parallel_size"
        raise ConfigError(
            [text.replace("mesh.tensor", name) for text in problem.problems]
        ) from None
    stays = jax.tree.map(
        lambda old, new, here, where: old.dtype == new.dtype and here.is_equivalent_to(where, old.ndim),
        abstract, result, source, target,
    )  # fmt: skip
    program = None
    if not all(jax.tree.leaves(stays)):
        halfway = target if there is mesh else _halfway(dims, result, mesh, there)
        program = _program(result, source, halfway, target)
    return Handover(
        program=program,
        source=jax.tree.map(_placed, abstract, source),
        result=jax.tree.map(_placed, result, own),
    )


def _placed(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _read_as(path: tuple[Any, ...], leaf: Any, dtype: Any) -> Any:
    """The type in which the forward pass reads a parameter."""
    return leaf.dtype if path[-1].key == "scale" else np.dtype(dtype)


def _arranged(mesh: Mesh, rollout_mesh: Mesh) -> Mesh:
    """The devices of the training mesh, in their order, as copies of the rollout mesh side by side."""
    every, own = list(mesh.devices.flat), list(rollout_mesh.devices.flat)
    blocks = [every[first : first + len(own)] for first in range(0, len(every), len(own))]
    if own not in blocks or len(every) % len(own):
        raise ConfigError(
            f"rollout: the {len(own)} devices to decode on are no block of the {len(every)} devices to train on, need the same "
            "devices in the same order; build both meshes from jax.devices()"
        )
    shape = (mesh.size // rollout_mesh.shape["tensor"], 1, 1, rollout_mesh.shape["tensor"])
    return Mesh(mesh.devices.reshape(shape), sharding.AXES, axis_types=rollout_mesh.axis_types)


def _halfway(dims: Tree, result: Tree, mesh: Mesh, there: Mesh) -> Tree:
    """Where leaves pass by: split over the target's tensor axis and, as finely as they were, along `D`.

    From there a gather along `D` remains. Straight to the target XLA would gather leaves whole on every device first.
    """
    tensor = there.shape["tensor"]
    rest, odd = divmod(mesh.size, mesh.shape["data"] * tensor)
    rest = 1 if odd else rest
    between = Mesh(
        mesh.devices.reshape(-1, rest, 1, tensor), sharding.AXES, axis_types=mesh.axis_types
    )

    def one(letters: str, leaf: Any) -> NamedSharding:
        spec = sharding.spec(between, letters, leaf.shape, sharding.PARAM_AXES)
        return NamedSharding(between, spec)

    return jax.tree.map(one, dims, result)


def _program(result: Tree, source: Tree, halfway: Tree, target: Tree) -> Callable[..., Any]:
    """Onto the device, cast, and only then to another place: what travels is narrow, and no whole leaf exists in the wide type."""

    def one(leaf: jax.Array, wanted: Any, *places: Any) -> jax.Array:
        first = places[0].with_memory_kind("device")
        if places[0] != first:
            leaf = jax.device_put(leaf, first)
        moving = leaf.astype(wanted.dtype)
        if narrow := leaf.dtype != wanted.dtype:
            # As bits, or XLA may widen them again before they travel.
            moving = jax.lax.bitcast_convert_type(moving, BITS[wanted.dtype.itemsize])
        for place in (first, *places[1:]):
            moving = jax.lax.with_sharding_constraint(moving, place)
        return jax.lax.bitcast_convert_type(moving, wanted.dtype) if narrow else moving

    def hand_over(params: Tree) -> Tree:
        return jax.tree.map(one, params, result, source, halfway, target)

    return jax.jit(hand_over, out_shardings=target)


def _own(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """What this process's devices hold of an array, as an array of their own mesh; nothing moves."""
    where: Any = wanted.sharding
    if leaf.sharding == where:
        return leaf
    held = {shard.device: shard.data for shard in leaf.addressable_shards}
    pieces = [held[device] for device in where.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(wanted.shape, where, pieces)
