"""What accelerators can do at most: dense matrix-product rates by device kind, from the vendors' data sheets.

Left out on purpose: sparse rates, clocks below boost, partitioned devices (MIG), and kinds that JAX does not name one to one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Peak:
    """Dense rates of one device in TFLOP/s: bfloat16 with float32 sums, and float32 in full precision."""

    bfloat16: float
    float32: float


PASSES = 6
"""A full float32 product on a TPU is made of so many bfloat16 products (`jax.lax.Precision.HIGHEST`)."""


def _tpu(bfloat16: float) -> Peak:
    return Peak(bfloat16, bfloat16 / PASSES)


A100, H100_PCIE = Peak(312, 19.5), Peak(756, 51)
HOPPER, BLACKWELL = Peak(989, 67), Peak(2250, 75)
V5E, V5P, V6E = _tpu(197), _tpu(459), _tpu(918)
PEAKS = {
    # NVIDIA data sheets of A100, H100, H200, HGX B200, L4, L40S: tensor-core bfloat16 without sparsity, FP32 of the CUDA cores
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H200": HOPPER,
    "NVIDIA B200": BLACKWELL,
    "NVIDIA L4": Peak(121, 30.3),
    "NVIDIA L40S": Peak(362, 91.6),
    # Google Cloud TPU documentation, system architecture: peak per chip; JAX shows each of these chips as one device
    "TPU v4": _tpu(275),
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
}
"""Rates by `jax.Device.device_kind`."""


def peak_flops(kind: str, dtype: Any) -> float | None:
    """FLOP/s that a device of this kind can do in matrix products of a dtype; `None` where it is not known (CPUs among others)."""
    peak = PEAKS.get(kind)
    name = str(np.dtype(dtype))
    return None if peak is None or not hasattr(peak, name) else getattr(peak, name) * 1e12
