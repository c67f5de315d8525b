"""The programs of a run on described devices: mesh, rollout mesh of the first host, slots that fit.

Left out on purpose: anything that compiles.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import programs, sharding
from jaxrl_llm.checks import mesh_shape
from jaxrl_llm.config import Config
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.networks import compute_dtype
from jaxrl_llm.planning.facts import Facts
from jaxrl_llm.planning.targets import Target, memory_share
from jaxrl_llm.planning.topology import local_devices
from jaxrl_llm.programs import Programs
from jaxrl_llm.rollout.engine import make_engine


class NoRoom(ConfigError):
    """Not even one sequence can be decoded beside the weights: exit 1, as for every plan that does not fit."""

    exit_code = 1
    heading = "It does not fit"


def usable_memory(target: Target) -> int:
    """Bytes of a device that programs can fill; on GPUs the environment may say another share than JAX's default."""
    return int(target.device.memory * memory_share(target.device))


def prompts_per_host(config: Config, target: Target) -> int:
    """Prompts of a step that one process samples from."""
    return config.data.train_batch_size // target.hosts


def build(config: Config, facts: Facts, target: Target, devices: Sequence[Any]) -> Programs:
    """All programs of a resolved configuration on these devices."""
    mesh = sharding.make_mesh(mesh_shape(config, target.count), devices)
    local, tensor = local_devices(devices), config.rollout.tensor_model_parallel_size
    if len(local) % tensor:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size = {tensor} does not divide the {len(local)} devices of a host of {target.name}; "
            f"set it to a divisor of {len(local)}"
        )
    rollout_mesh = programs.rollout_mesh_of(config, mesh, local)
    if config.rollout.max_num_seqs is None:
        slots = _slots(config, facts, target, rollout_mesh)
        config = replace(config, rollout=replace(config.rollout, max_num_seqs=slots))
    reader = programs.Reader(facts.stop_ids, lambda ids: "", facts.longest_prompt)
    return programs.build(
        config,
        facts.policy,
        facts.valuer,
        mesh,
        rollout_mesh,
        reader,
        total_steps=facts.total_steps,
    )


def on_a_host(made: Programs, devices: Sequence[Any]) -> Programs:
    """The same programs with the engine's on other devices than the first host's: as many, arranged alike.

    The weight hand-over stays where it is; what it returns is described on the new devices.
    """
    engine = made.engine
    mesh = Mesh(
        np.array(devices).reshape(made.rollout_mesh.devices.shape),
        made.rollout_mesh.axis_names,
        axis_types=made.rollout_mesh.axis_types,
    )
    moved = make_engine(
        engine.config,
        mesh,
        dtype=made.actor.network.dtype,
        stop_ids=engine.stop_ids,
        decode_text=engine.decode_text,
        stop_texts=engine.stop_texts,
        chunk=engine.chunk,
        max_num_seqs=engine.max_num_seqs,
        prompt_length=engine.prompt_width,
        response_length=engine.response_length,
    )

    def there(leaf: Any) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    handover = replace(made.handover, result=jax.tree.map(there, made.handover.result))
    return replace(made, rollout_mesh=mesh, engine=moved, handover=handover)


def _slots(config: Config, facts: Facts, target: Target, mesh: Mesh) -> int:
    dtype = compute_dtype(config.model.compute_dtype, sharding.platform(mesh))
    prompts = prompts_per_host(config, target)
    try:
        return programs.fitting_slots(
            config, facts.policy, dtype, mesh, usable_memory(target), prompts
        )
    except ConfigError as problem:
        raise NoRoom(problem.problems) from problem
