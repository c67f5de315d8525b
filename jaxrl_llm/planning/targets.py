"""Devices that can be planned for, and the words that name a number of them: `h100:8`, `h100:64`, `v5p:2x2x2`, `v5p:2x2x2*4`.

One table of facts per device, from the vendors' public documents; no JAX here.

Left out on purpose: partitioned devices, pods with broken links, and hosts with other than eight GPUs.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.checks import divided, mesh_shape
from jaxrl_llm.config import Config
from jaxrl_llm.errors import ConfigError

GPUS_PER_HOST = 8
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device: `memory` bytes of which `usable` may be filled, `hbm` bytes/s, `link` bytes/s that it sends to its neighbours and
    `network` bytes/s that it sends to other hosts (slices), both one way.

    `kind` is JAX's name of it and the key of `hardware.PEAKS`; `chip` are the numbers that a compiler for GPUs asks for.
    """

    name: str
    kind: str
    platform: str
    memory: int
    usable: float
    hbm: float
    link: float
    network: float
    chip: tuple[tuple[str, Any], ...] = ()


# NVIDIA: data sheets of A100 80GB SXM, H100 SXM5, H200 SXM, HGX B200 (memory bandwidth; NVLink, half of the two-way figure), CUDA
# programming guide, table of compute capabilities (cores, shared memory, registers); one 400 Gb/s network port per GPU as in DGX
# H100/H200/B200 (200 Gb/s in DGX A100). JAX takes 75 % of a GPU's memory unless XLA_CLIENT_MEM_FRACTION says otherwise.
# Google Cloud TPU system architecture pages: HBM, its bandwidth, inter-chip interconnect per chip (one way, all links together),
# data-centre network shared by a host's chips.
GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
GPU_SHARE = 0.75
TPU_SHARE = 0.976
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX's variable for the share of a GPU's memory that it takes, and its deprecated name."""


def _gpu(
    name: str,
    kind: str,
    *,
    memory: int,
    hbm: float,
    link: float,
    network: float,
    cores: int,
    fpus: int,
    shared: int,
    optin: int,
    l2: int,
    clock: float,
    capability: int,
) -> Device:
    chip = GPU | {
        "core_count": cores,
        "fpus_per_core": fpus,
        "shared_memory_per_core": shared,
        "memory_bandwidth": int(hbm),
        "l2_cache_size": l2,
        "clock_rate_ghz": clock,
        "device_memory_size": memory,
        "shared_memory_per_block_optin": optin,
        "cuda_compute_capability": {"major": capability},
    }
    return Device(
        name, kind, "gpu", memory, GPU_SHARE, hbm, link, network, tuple(sorted(chip.items()))
    )


def _tpu(name: str, kind: str, *, memory: int, hbm: float, link: float, network: float) -> Device:
    return Device(name, kind, "tpu", memory, TPU_SHARE, hbm, link, network)


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100", "NVIDIA A100-SXM4-80GB", memory=85100068864, hbm=2039.04e9, link=300e9, network=25e9, cores=108,
             fpus=64, shared=167936, optin=166912, l2=41943040, clock=1.41, capability=8),
        _gpu("h100", "NVIDIA H100 80GB HBM3", memory=84942979072, hbm=3352.32e9, link=450e9, network=50e9, cores=132,
             fpus=128, shared=233472, optin=232448, l2=52428800, clock=1.98, capability=9),
        _gpu("h200", "NVIDIA H200", memory=151397597184, hbm=4800e9, link=450e9, network=50e9, cores=132,
             fpus=128, shared=233472, optin=232448, l2=52428800, clock=1.98, capability=9),
        _gpu("b200", "NVIDIA B200", memory=191514411008, hbm=7672.32e9, link=900e9, network=50e9, cores=148,
             fpus=128, shared=233472, optin=232448, l2=132644864, clock=1.965, capability=10),
        _tpu("v5e", "TPU v5 lite", memory=16 * GIB, hbm=819e9, link=200e9, network=3.1e9),
        _tpu("v5p", "TPU v5", memory=95 * GIB, hbm=2765e9, link=600e9, network=6.25e9),
        _tpu("v6e", "TPU v6 lite", memory=32 * GIB, hbm=1640e9, link=448e9, network=6.25e9),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """So many of a device: `hosts` hosts of GPUs, or `slices` slices of TPUs whose chips form the torus `grid`."""

    device: Device
    count: int
    hosts: int
    grid: tuple[int, ...] = ()
    slices: int = 1

    @property
    def name(self) -> str:
        """The words that give this target."""
        if not self.grid:
            return f"{self.device.name}:{self.count}"
        torus = "x".join(map(str, self.grid))
        return f"{self.device.name}:{torus}" + (f"*{self.slices}" if self.slices > 1 else "")


WORDS = re.compile(r"(?P<name>[a-z]\w*):(?P<grid>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
TORUS = {"v5e": 2, "v6e": 2, "v5p": 3}
"""Axes of a TPU's torus."""
CHIPS_PER_HOST = 4
"""Hosts of a slice have 2x2 chips."""
LEAST = {"v5e": (2, 2), "v6e": (2, 2), "v5p": (2, 2, 1)}
SINGLE, SINGLES = (1, 1), ("v5e", "v6e")
"""One chip alone, and the devices that are rented so."""


def parse(text: str) -> Target:
    """The target that `--hardware` names; `ConfigError` says which there are."""
    match = WORDS.fullmatch(text.strip().lower())
    if match is None or match["name"] not in DEVICES:
        raise ConfigError(
            f"--hardware: got {text!r}, need NAME:COUNT for GPUs ({_names('gpu')}) or NAME:TORUS for TPUs ({_names('tpu')}), as in "
            "h100:8, h100:64, v6e:4x4, v5p:2x2x2, and v5p:2x2x2*4 for four slices"
        )
    device = DEVICES[match["name"]]
    sizes = tuple(int(size) for size in match["grid"].split("x"))
    slices = int(match["slices"] or 1)
    if min(*sizes, slices) < 1:
        raise ConfigError(f"--hardware: got {text!r}, need sizes of 1 or more; as in h100:8")
    if device.platform == "gpu":
        return _gpus(device, sizes, slices, text)
    if len(sizes) != TORUS[device.name]:
        raise ConfigError(
            f"--hardware: got {text!r}, need {TORUS[device.name]} sizes for {device.name}, as in "
            f"{device.name}:{'x'.join('2' * TORUS[device.name])}"
        )
    single = sizes == SINGLE and device.name in SINGLES
    if not single and any(size % 2 for size in sizes[:2]):
        least = "x".join(map(str, LEAST[device.name]))
        alone = f", or {device.name}:1x1 for one chip" if device.name in SINGLES else ""
        raise ConfigError(
            f"--hardware: got {text!r}, but no slice has this shape: need even sizes on the first two axes, because a host has 2x2 "
            f"chips; as in {device.name}:{least}{alone}"
        )
    chips = math.prod(sizes)
    hosts = -(-chips // CHIPS_PER_HOST)
    return Target(device, chips * slices, hosts * slices, sizes, slices)


def _gpus(device: Device, sizes: tuple[int, ...], slices: int, text: str) -> Target:
    count = sizes[0]
    if len(sizes) > 1 or slices > 1 or (count > GPUS_PER_HOST and count % GPUS_PER_HOST):
        raise ConfigError(
            f"--hardware: got {text!r}, need one number of GPUs, up to {GPUS_PER_HOST} or whole hosts of {GPUS_PER_HOST}; as in "
            f"{device.name}:8 or {device.name}:64"
        )
    return Target(device, count, -(-count // GPUS_PER_HOST))


def decodes_on(target: Target) -> Target:
    """What the engine's programs, which run on the devices of one process, are compiled for: on TPUs its host alone.

    Within a larger slice the compiler for TPUs refuses sums over all chips of a host whose numbers are not the slice's first.
    """
    if not target.grid or target.hosts == 1:
        return target
    return Target(target.device, CHIPS_PER_HOST, 1, LEAST[target.device.name])


def _names(platform: str) -> str:
    return ", ".join(name for name, device in DEVICES.items() if device.platform == platform)


def misfits(config: Config, target: Target) -> list[str]:
    """What the division over the target's hosts, a process on each, forbids of settings that its device count allows."""
    if target.hosts == 1:
        return []
    shape = mesh_shape(config, target.count)
    return list(divided(config, shape, target.hosts, target.count // target.hosts))


def memory_share(device: Device) -> float:
    """The share of a device's memory that programs may fill; on GPUs the environment may say another than JAX's default.

    `ConfigError` where it says what JAX would refuse, or both names at once.
    """
    said = {name: os.environ[name] for name in (FRACTION, OLD_FRACTION) if os.environ.get(name)}
    if device.platform != "gpu" or not said:
        return device.usable
    if len(said) == 2:
        raise ConfigError(
            f"{FRACTION} and {OLD_FRACTION} are both set, need one of them; unset the latter, it is deprecated"
        )
    ((name, text),) = said.items()
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"{name}: got {text!r}, need a number above 0, at most 1; as in 0.9")
    return share


def expected(target: Target) -> dict[str, str]:
    """The settings that name the target's hosts and devices, in place of those that a run would insist on."""
    per_host = target.count // target.hosts
    return {"trainer.nnodes": str(target.hosts), "trainer.n_devices_per_node": str(per_host)}
