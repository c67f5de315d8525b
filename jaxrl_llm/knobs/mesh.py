"""`mesh`: how devices are arranged."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshKnobs:
    """Sizes of the mesh axes; at most one is `None` and takes what is left of the device count."""

    data: int | None = None
    """Copies of the model, each with its own trajectories."""
    fsdp: int | None = 1
    """Devices that share parameters and moments, each with its own trajectories."""
    tensor: int | None = 1
    """Devices that share each matrix product."""
    context: int | None = 1
    """Devices that share the tokens of each packed row (ring attention), for sequences too long for one device."""
