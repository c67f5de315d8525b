"""Decode programs side by side: what is one data shard's business in `decode` runs once per shard of a mesh, without the others.

Rows of every array (lanes, units, rows of the bank) are split over the mesh axes `sharding.ROWS`; what the tensor axis splits is left
to XLA's partitioner inside each shard. A mesh with a single data shard runs the functions as they are.

Left out on purpose: values that pass from shard to shard.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.models import transformer
from jaxrl_llm.models.cache import KV
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.rollout import decode


class Split(NamedTuple):
    """How the arguments and results of the decode programs are split over data shards."""

    alike: Any
    rows: Any
    kv: Any
    state: Any
    starts: Any
    bounds: Any
    window: Any


def _of(kind: type, usual: Any, **others: Any) -> Any:
    return kind(**{field.name: usual for field in fields(kind)} | others)


def _split() -> Split:
    alike, rows = PartitionSpec(), PartitionSpec(sharding.ROWS)
    kv = PartitionSpec(None, sharding.ROWS)
    return Split(
        alike=alike,
        rows=rows,
        kv=kv,
        state=_of(decode.DecodeState, rows, prompt=kv, own=kv),
        starts=_of(decode.Starts, rows, stream=alike),
        bounds=_of(decode.Bounds, rows, limit=alike),
        window=_of(decode.Window, rows),
    )


SPLIT = _split()


def each(mesh: Mesh, function: Callable[..., Any], into: Any, out: Any) -> Callable[..., Any]:
    """`function` on every data shard by itself: `into` and `out` say how its positional arguments and its result are split."""
    if sharding.shards(mesh) == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=into,
        out_specs=out,
        axis_names=set(sharding.ROWS),
        check_vma=False,
    )


def make_constrain(mesh: Mesh) -> decode.Constrain:
    """The `constrain` of a model inside `each`: there rows are a shard's own and have no axis to be split over."""
    if sharding.shards(mesh) == 1:
        return sharding.make_constrain(mesh)
    if mesh.size == sharding.shards(mesh):
        return transformer.unconstrained
    table = {letter: axis for letter, axis in sharding.ACTIVATION_AXES.items() if letter != "B"}

    def constrain(x: jax.Array, dims: str) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding.spec(mesh, dims, x.shape, table))

    return constrain


def placements(config: ModelConfig, mesh: Mesh) -> tuple[KV, decode.DecodeState, decode.Window]:
    """Shardings of keys, state and window: fixed, or the second chunk would meet others than the first and compile anew."""
    row = sharding.rows(mesh)
    shape = (config.num_layers, sharding.shards(mesh), config.num_kv_heads, 1, config.head_size)
    one = NamedSharding(mesh, sharding.spec(mesh, "LBKSH", shape, sharding.ACTIVATION_AXES))
    kv = KV(one, one)
    return kv, _of(decode.DecodeState, row, prompt=kv, own=kv), _of(decode.Window, row)
