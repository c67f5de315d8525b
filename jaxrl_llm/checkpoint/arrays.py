"""Host arrays to and from an Orbax tree, and from the host to where the model wants them.

Left out on purpose: verification (`reading` compares digests: Orbax has none), and Orbax's own retention and background saves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np


def _orbax(handler: Callable[..., Any]) -> Any:
    """An Orbax checkpointer that never waits for other processes: a run of one writes it, any number read."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    return ocp.Checkpointer(
        handler(multiprocessing_options=options), multiprocessing_options=options
    )


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write all arrays that have elements: Orbax refuses the others, and shape and dtype are in the manifest."""
    stored = {name: array for name, array in arrays.items() if array.size}
    if not stored:
        path.mkdir()
        return
    import orbax.checkpoint as ocp

    with _orbax(ocp.StandardCheckpointHandler) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(stored))


@contextmanager
def open_tree(path: Path) -> Iterator[Callable[[str, Mapping[str, Any]], np.ndarray]]:
    """Open what `write_arrays` wrote; gives the function that reads one leaf, by name and its shape and dtype. Threads may call it.

    Leaves are asked for one by one, so an error belongs to a leaf and the others are not left behind half-read (one call for all of
    them litters stderr when a file is damaged).
    """
    import orbax.checkpoint as ocp

    def read(name: str, entry: Mapping[str, Any]) -> np.ndarray:
        shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
        if 0 in shape:
            return np.empty(shape, dtype)
        args = ocp.args.PyTreeRestore(
            item={name: jax.ShapeDtypeStruct(shape, dtype)},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        value = np.asarray(checkpointer.restore(path, args=args)[name])
        if value.shape != shape or value.dtype != dtype:
            raise TypeError(f"read as {value.dtype}{list(value.shape)}")
        return value

    with _orbax(ocp.PyTreeCheckpointHandler) as checkpointer:
        yield read


def placed(array: np.ndarray, like: Any) -> Any:
    """Put a verified host array where its model leaf lives."""
    if isinstance(like, np.ndarray | np.generic):
        return array
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return type(like)(array.item())
    if like.sharding is None:
        return jax.device_put(array)
    if like.sharding.is_fully_addressable:
        return jax.device_put(array, like.sharding)
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
