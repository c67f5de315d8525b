"""Host arrays to and from an Orbax tree, and from the host to where the model wants them.

Left out on purpose: verification (`saver` compares digests: Orbax has none), and Orbax's own retention and background saves.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

READERS = 4
"""Leaves read at the same time."""


def _orbax(handler: Callable[..., Any]) -> Any:
    """An Orbax checkpointer that never waits for other processes: process 0 writes alone, each one reads alone."""
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


def read_arrays(
    path: Path, leaves: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read what `write_arrays` wrote: host arrays by name, and for leaves that cannot be read the reason.

    `leaves` gives shape and dtype of each. Leaves are asked for one by one, several at a time: so an error belongs to a leaf, and
    the others are not left behind half-read (one call for all of them litters stderr when a file is damaged).
    """
    import orbax.checkpoint as ocp

    def read(name: str) -> np.ndarray | Exception:
        shape, dtype = tuple(leaves[name]["shape"]), np.dtype(leaves[name]["dtype"])
        if 0 in shape:
            return np.empty(shape, dtype)
        args = ocp.args.PyTreeRestore(
            item={name: jax.ShapeDtypeStruct(shape, dtype)},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            value = np.asarray(checkpointer.restore(path, args=args)[name])
        except MemoryError:
            raise
        except Exception as error:
            return error
        if value.shape != shape or value.dtype != dtype:
            return TypeError(f"read as {value.dtype}{list(value.shape)}")
        return value

    workers = READERS if jax.process_count() == 1 else 1
    with _orbax(ocp.PyTreeCheckpointHandler) as checkpointer, ThreadPoolExecutor(workers) as pool:
        found = dict(zip(leaves, pool.map(read, leaves), strict=True))
    arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
    errors = {
        name: f"{type(value).__name__}: {first_line(value)}"
        for name, value in found.items()
        if isinstance(value, Exception)
    }
    return arrays, errors


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters."""
    return next(iter(str(error).splitlines()), "")[:300]


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
