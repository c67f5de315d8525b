"""Leaves of a step, read and verified a few at a time, whichever format they were written in.

Left out on purpose: placing them (`arrays.placed`), and what to do about damage (`saver`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint import files
from jaxrl_llm.checkpoint.arrays import open_tree
from jaxrl_llm.checkpoint.digest import array_digest
from jaxrl_llm.checkpoint.pieces import needed_boxes, read_whole
from jaxrl_llm.checkpoint.together import first_line
from jaxrl_llm.errors import DataError

READERS = 4
"""Leaves read at the same time."""
AHEAD_BYTES = 2**30
"""Leaves are read ahead up to this size; a larger one is on the host alone."""


def known_format(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest itself, or `DataError` for a format that this version does not read."""
    if document["format"] not in (files.ONE_TREE, files.PIECES):
        raise DataError(
            f"checkpoint {folder}: got format {document['format']}, need {files.ONE_TREE} or {files.PIECES}; use the version of "
            f"jaxrl_llm that wrote it ({document.get('libraries', {}).get('jaxrl_llm')})"
        )
    return document


def read_leaves(
    folder: Path, document: Mapping[str, Any], wanted: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Verified host arrays by name, in the order of the manifest; `Damaged` names the first leaf that cannot be trusted.

    Of a leaf in pieces that `wanted` spreads over several processes only what this process will hold is read. At most
    `AHEAD_BYTES` or one leaf wait for the caller.
    """
    leaves = document["leaves"]
    if document["format"] == files.PIECES:
        likes = wanted or {}
        yield from _ahead(
            lambda name: read_whole(folder, name, leaves[name], needed_boxes(likes.get(name))),
            leaves,
            READERS,
        )
        return
    with open_tree(folder / files.STATE) as read:

        def verified(name: str) -> np.ndarray:
            try:
                array = read(name, leaves[name])
            except MemoryError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise files.Damaged(f"leaves that cannot be read: {name} ({reason})") from None
            if array_digest(array) != leaves[name]["digest"]:
                raise files.Damaged(f"leaves with another digest than was saved: {name}")
            return array

        yield from _ahead(verified, leaves, READERS if jax.process_count() == 1 else 1)


def _ahead(
    read: Callable[[str], np.ndarray], leaves: Mapping[str, Any], workers: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Results of `read` in order, threads working ahead of the caller within `AHEAD_BYTES`."""
    waiting: deque[tuple[str, int, Future[np.ndarray]]] = deque()
    held = 0
    with ThreadPoolExecutor(workers) as pool:
        for name, entry in leaves.items():
            size = math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
            while waiting and (len(waiting) >= workers or held + size > AHEAD_BYTES):
                held -= waiting[0][1]
                yield _taken(waiting)
            waiting.append((name, size, pool.submit(read, name)))
            held += size
        while waiting:
            yield _taken(waiting)


def _taken(waiting: deque[tuple[str, int, Future[np.ndarray]]]) -> tuple[str, np.ndarray]:
    """The oldest result, which nothing here refers to any more."""
    name, _, future = waiting.popleft()
    try:
        return name, future.result()
    finally:
        del future  # its error refers to this frame: a cycle would keep leaves placed so far alive
