"""Whether devices that must hold the same parameters do, and processes the same step and data: checksums on the devices, compared
between them on the hosts.

A device or a host that computes or remembers wrongly does not say so; copies of a parameter then drift apart, and every step trains
on a mixture. Compared are the trained parameters at the start, every `trainer.check_replicas_freq` steps and before every
checkpoint, so that no checkpoint is written of parameters that differ.

Left out on purpose: optimizer moments (what is wrong there reaches the parameters with the next step), the frozen reference, and parts
that only one device holds: there is nothing to compare them with.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.networks import Holder, Trained
from jaxrl_llm.processes import Meetings
from jaxrl_llm.records import Params, TrainState

Array = jax.Array
MOST_NAMED = 8
"""Parameters and devices that a message names."""


def checksum(x: Array) -> Array:
    """A `uint32` of an array's bits and their places: any change of a single element changes it.

    Sum over elements of `bits x (2 place + 1)` modulo 2^32: a change of one element adds a multiple of an odd number by less than
    2^32, which is never 0. Accidents in several elements cancel with chance 2^-32.
    """
    width = 8 * x.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, length in enumerate(x.shape):
        place = place * np.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def make_checksums(trained: Trained, mesh: Mesh) -> Callable[[Params], Array]:
    """A jitted `checksums(params) -> [data fsdp context tensor P] uint32`: what every device holds of each of P parameters, in
    the order of the tree's leaves."""

    def each(params: Params) -> Array:
        sums = jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(params)])
        return sums.reshape(*(1 for _ in sharding.AXES), -1)

    specs = jax.tree.map(lambda where: where.spec, trained.shardings)
    whole = PartitionSpec(*sharding.AXES)
    local = jax.shard_map(each, mesh=mesh, in_specs=(specs,), out_specs=whole, check_vma=False)

    @jax.jit
    def checksums(params: Params) -> Array:
        return local(sharding.move(params, trained.fetched))

    return checksums


def copies(where: Any, shape: Sequence[int]) -> list[list[jax.Device]]:
    """The devices that hold the same part of an array, for each part that more than one of them holds."""
    parts: dict[Any, list[jax.Device]] = {}
    for device, index in where.devices_indices_map(tuple(shape)).items():
        part = tuple(one.indices(length) for one, length in zip(index, shape, strict=True))
        parts.setdefault(part, []).append(device)
    return [sorted(devices, key=lambda one: one.id) for devices in parts.values() if len(devices) > 1]  # fmt: skip


class ReplicaCheck:
    """The comparison for one run; `every` is `trainer.check_replicas_freq`, `None` compares nothing."""

    def __init__(self, parts: Holder, meet: Meetings, every: int | None) -> None:
        self.every, self.meet = every, meet
        self.networks: dict[str, tuple[dict[str, list[list[jax.Device]]], Any]] = {}
        self.last: int | None = None
        for name, trained in (("actor", parts.actor), ("critic", parts.critic)):
            if trained is None or every is None:
                continue
            found = {
                jax.tree_util.keystr(path, simple=True, separator="."): copies(leaf.sharding, leaf.shape)
                for path, leaf in jax.tree_util.tree_leaves_with_path(trained.state.trainable)
            }  # fmt: skip
            if any(found.values()):
                self.networks[name] = (found, make_checksums(trained, parts.mesh))

    def due(self, step: int) -> bool:
        """Whether the comparison is due after this step, checkpoints apart."""
        return self.every is not None and step % self.every == 0

    def check(self, state: TrainState, position: Mapping[str, Any]) -> None:
        """Raise `TrainingStopped` on every process where copies of a parameter, the step or the data's position differ.

        Collective; nothing happens a second time after the same step, and where nothing lies twice.
        """
        step = int(state.step)
        if self.every is None or step == self.last or (jax.process_count() == 1 and not self.networks):  # fmt: skip
            return
        sums = {name: _own(made(getattr(state, name).trainable)) for name, (_, made) in self.networks.items()}  # fmt: skip
        mine = {"step": step, "position": dict(position), "sums": sums}
        everyone = self.meet.gather("replicas", mine)
        problems = [
            f"process {number} is at step {other['step']} of its data's position {other['position']}, process 0 at step {everyone[0]['step']} of "
            f"{everyone[0]['position']}, need the same"
            for number, other in enumerate(everyone)
            if (other["step"], other["position"]) != (everyone[0]["step"], everyone[0]["position"])
        ]
        for name, (parts, _) in self.networks.items():
            merged = {int(key): value for other in everyone for key, value in other["sums"][name].items()}  # fmt: skip
            problems += differing(name, parts, merged)
        if problems:
            since = "at the first look" if self.last is None else f"equal after step {self.last}"
            raise TrainingStopped(
                [
                    *problems[:MOST_NAMED],
                    f"seen after step {step}, {since}: a device, its "
                    "memory or a host computes or remembers wrongly, need healthy ones; take out what is named above and start again: "
                    "every checkpoint was compared before it was written",
                ]
            )
        self.last = step


def _own(sums: Array) -> dict[str, list[int]]:
    """The checksums of this process's devices, by device number."""
    return {str(one.device.id): np.ravel(one.data).tolist() for one in sums.addressable_shards}


def differing(
    network: str, parts: Mapping[str, list[list[jax.Device]]], sums: Mapping[int, Sequence[int]]
) -> list[str]:
    """A sentence for each parameter of which some devices hold other bits than the rest that should hold the same."""
    problems = []
    for leaf, (name, groups) in enumerate(parts.items()):
        for devices in groups:
            camps: dict[int, list[jax.Device]] = {}
            for device in devices:
                camps.setdefault(sums[device.id][leaf], []).append(device)
            if len(camps) > 1:
                most, *others = sorted(camps.values(), key=len, reverse=True)
                odd = [device for camp in others for device in camp]
                problems.append(
                    f"{network} parameter {name}: {_named(odd)} {'hold' if len(odd) > 1 else 'holds'} other bits than {_named(most)}"
                )
                break
    return problems


def _named(devices: Sequence[jax.Device]) -> str:
    some = ", ".join(f"{one.id} (process {one.process_index})" for one in devices[:MOST_NAMED])
    return f"device{'s' if len(devices) > 1 else ''} {some}" + (", …" if len(devices) > MOST_NAMED else "")  # fmt: skip
