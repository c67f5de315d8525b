"""Devices of a target as JAX sees them: those that its compiler knows, or stand-ins that only have a place in a mesh.

Left out on purpose: attached devices.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning.targets import GPUS_PER_HOST, SINGLE, Target

EXTRAS = {"gpu": "plan-gpu", "tpu": "plan-tpu"}
COMPILERS = {"gpu": "jax_plugins.xla_cuda12", "tpu": "libtpu"}
"""Modules that compile, by platform."""
CUDNN = "dnn_version_info { major: 9 minor: 10 patch: 0 }"


class Nobody:
    """The client of stand-ins: none of them is its own."""

    def process_index(self) -> int:
        """No process's number."""
        return -1


NOBODY = Nobody()


@dataclass(frozen=True)
class StandIn:
    """A device that has a place in a mesh and compiles nothing."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    client: Nobody = NOBODY


def stand_ins(target: Target) -> list[Any]:
    """The devices of a target without its compiler: enough to know what lies where."""
    per_host = math.ceil(target.count / target.hosts)
    return [
        StandIn(number, number // per_host, target.device.platform, target.device.kind)
        for number in range(target.count)
    ]


def devices(target: Target) -> list[Any]:
    """The devices of a target, described by its compiler; `ConfigError` names the extra where that is not installed."""
    from jax.experimental import topologies

    check_compiler(target)
    if target.device.platform == "gpu":
        wake()
        local = min(target.count, GPUS_PER_HOST)
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.device.name,
            topology=f"1x{target.hosts}x{local}",
            target_config=_gpu_text(target),
        ).devices
    else:
        options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
        if target.grid == SINGLE:
            options["chips_per_host_bounds"] = [1, 1, 1]
        torus = "x".join(map(str, target.grid))
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.device.name}:{torus}", **options
        ).devices
    if len(found) != target.count:
        raise ConfigError(
            f"--hardware: {target.name} has {len(found)} devices for the compiler, need {target.count}; choose another size"
        )
    return list(found)


def wake() -> None:
    """Load JAX and let it look for devices, which registers every plugin there is; what these say on the way concerns nobody."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        import jax

        jax.devices("cpu")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def check_compiler(target: Target) -> None:
    """Raise `ConfigError` naming the extra where the compiler of a target is not installed."""
    module = COMPILERS[target.device.platform]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        extra = EXTRAS[target.device.platform]
        raise ConfigError(
            f"--hardware={target.name}: its compiler is not installed; pip install 'jaxrl_llm[{extra}]', or plan without compiling: "
            "--estimate"
        )


def local_devices(found: Sequence[Any]) -> list[Any]:
    """The devices of the first host."""
    return [device for device in found if device.process_index == found[0].process_index]


def _gpu_text(target: Target) -> str:
    """XLA's description of a GPU, as text."""

    def text(fields: dict[str, Any]) -> str:
        return " ".join(
            f"{name} {{ {text(value)} }}" if isinstance(value, dict) else f"{name}: {value}"
            for name, value in fields.items()
        )

    return (
        f"gpu_device_info {{ {text(dict(target.device.chip))} }} "
        f'platform_name: "CUDA" {CUDNN} device_description_str: "{target.device.kind}"'
    )
