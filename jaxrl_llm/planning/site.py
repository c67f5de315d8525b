"""The programs of a run on described devices: mesh, rollout mesh of the first host, slots that fit.

Left out on purpose: anything that compiles.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm import programs, sharding
from jaxrl_llm.checks import mesh_shape
from jaxrl_llm.config import Config
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.networks import compute_dtype
from jaxrl_llm.planning.facts import Facts
from jaxrl_llm.planning.targets import Target, memory_share
from jaxrl_llm.planning.topology import local_devices
from jaxrl_llm.programs import Programs


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


def _slots(config: Config, facts: Facts, target: Target, mesh: Mesh) -> int:
    dtype = compute_dtype(config.model.compute_dtype, sharding.platform(mesh))
    prompts = prompts_per_host(config, target)
    try:
        return programs.fitting_slots(
            config, facts.policy, dtype, mesh, usable_memory(target), prompts
        )
    except ConfigError as problem:
        raise NoRoom(problem.problems) from problem
