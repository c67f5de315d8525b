"""Leaves in pieces: which process writes which part of an array, the files the parts lie in, and the whole put together again.

A piece is what one device holds of a leaf: a box, spelled as one `(start, stop)` per axis. In a run of several processes each writes
the pieces it owns, from its own memory, into its own sub-tree of the step folder: one file per leaf, the raw bytes of its pieces in C
order, one after the other. The manifest lists file, offset, box and digest of each, so any mesh and any number of processes can read
them.

Left out on purpose: balance between replicas (the process of the first one writes), compression, and merging of neighbouring boxes.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint import files
from jaxrl_llm.checkpoint.digest import array_digest, owned_copy

Box = tuple[tuple[int, int], ...]
Piece = tuple[Box, np.ndarray]

WRITERS = 4
"""Files written at the same time by one process."""


# Geometry ----------------------------------------------------------------------------------------------------------


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that an index of slices takes from an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The index that takes a box from its array."""
    return tuple(slice(start, stop) for start, stop in box)


def box_shape(box: Box) -> tuple[int, ...]:
    """Lengths of a box along the axes."""
    return tuple(stop - start for start, stop in box)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def owners(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
) -> dict[Box, int]:
    """The process that writes each box of an array: that of the first device, in the sharding's order, that holds it.

    An array that lies on devices of one process only is one that every process has for itself: process 0 writes it.
    """
    found: dict[Box, int] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(box_of(index, shape), process_of(device))
    alone = len({process_of(device) for device in sharding.device_set}) == 1
    return dict.fromkeys(found, 0) if alone else found


def covers(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether boxes take every element of an array exactly once.

    Counts on the grid that their borders draw. An array without elements needs no box.
    """
    boxes = list(boxes)
    if 0 in shape:
        return not boxes
    if any(
        len(box) != len(shape)
        or any(not 0 <= a < b <= size for (a, b), size in zip(box, shape, strict=True))
        for box in boxes
    ):
        return False
    borders = [
        {border: place for place, border in enumerate(sorted({0, size, *sum(spans, ())}))}
        for size, spans in zip(
            shape, zip(*boxes, strict=True) if boxes else [()] * len(shape), strict=True
        )
    ]
    count = np.zeros([len(places) - 1 for places in borders], np.int64)
    for box in boxes:
        count[tuple(slice(at[a], at[b]) for (a, b), at in zip(box, borders, strict=True))] += 1
    return bool((count == 1).all())


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes of one array have an element in common."""
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


# Out of the state ----------------------------------------------------------------------------------------------------


def own_pieces(
    leaf: Any,
    process: int | None = None,
    process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
) -> list[Piece]:
    """Host copies of the pieces of a leaf that this process writes; no others are copied.

    What is not an array on devices is the same on every process and written by process 0.
    """
    process = jax.process_index() if process is None else process
    if not isinstance(leaf, jax.Array):
        return [(whole(np.shape(leaf)), owned_copy(leaf))] if process == 0 else []
    mine = sorted(
        box
        for box, owner in owners(leaf.sharding, leaf.shape, process_of).items()
        if owner == process
    )
    if not mine:
        return []
    parts = {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
    for box in mine:
        parts[box].copy_to_host_async()
    pieces = []
    for box in mine:
        copy = np.empty(box_shape(box), leaf.dtype)
        copy[...] = np.asarray(parts[box])
        pieces.append((box, copy))
    return pieces


# To files and back ---------------------------------------------------------------------------------------------------


def write_pieces(saving: Path, tree: str, pieces: Mapping[str, Sequence[Piece]]) -> dict[str, Any]:
    """Write the pieces of this process below `saving/tree`, flushed to disk; returns what the manifest has to know.

    `{"leaves": {name: [piece as JSON data, ...]}, "files": {path: bytes}}`. Files are numbered by the leaf's place among all leaves.
    """
    folder = saving / tree
    folder.mkdir()

    def write(
        item: tuple[int, tuple[str, Sequence[Piece]]],
    ) -> tuple[str, list[dict[str, Any]], int]:
        number, (name, parts) = item
        path, entries, offset = folder / f"{number:05d}.bin", [], 0
        with open(path, "wb", buffering=0) as file:
            for box, array in parts:
                entries.append(
                    {
                        "file": f"{tree}/{path.name}",
                        "offset": offset,
                        "box": [list(span) for span in box],
                        "digest": array_digest(array),
                    }
                )
                _write_all(file.fileno(), np.ascontiguousarray(array).reshape(-1).view(np.uint8))
                offset += array.nbytes
            os.fsync(file.fileno())
        return name, entries, offset

    stored = [
        (number, (name, [piece for piece in parts if piece[1].size]))
        for number, (name, parts) in enumerate(pieces.items())
    ]
    with ThreadPoolExecutor(WRITERS) as pool:
        done = list(pool.map(write, [item for item in stored if item[1][1]]))
    files.sync_folder(folder)
    return {
        "leaves": {name: entries for name, entries, _ in done},
        "files": {entries[0]["file"]: size for _, entries, size in done},
    }


def merge_reports(
    described: Mapping[str, Mapping[str, Any]], reports: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Entries of the manifest's leaves, and sizes of the files, from what all processes have written; `ValueError` if not the whole."""
    leaves: dict[str, Any] = {name: {**entry, "pieces": []} for name, entry in described.items()}
    sizes: dict[str, int] = {}
    for report in reports:
        for name, entries in report["leaves"].items():
            leaves.setdefault(name, {"shape": [], "pieces": []})["pieces"] += entries
        sizes |= report["files"]
    for name, entry in leaves.items():
        if name not in described or not covers(boxes_in(entry), entry["shape"]):
            raise ValueError(
                f"the pieces of leaf {name} do not make up the whole: the processes hold different states"
            )
    return leaves, sizes


def _write_all(handle: int, data: np.ndarray) -> None:
    """Write all bytes: one call of the system takes about 2 GB at most."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def boxes_in(entry: Mapping[str, Any]) -> list[Box]:
    """The boxes of a leaf's pieces in a manifest."""
    return [tuple((a, b) for a, b in piece["box"]) for piece in entry["pieces"]]


def read_whole(
    folder: Path, name: str, entry: Mapping[str, Any], needed: Iterable[Box] | None = None
) -> np.ndarray:
    """One leaf put together from its verified pieces; raises `Damaged` with its name.

    With `needed`, only pieces that touch one of those boxes are read, and the rest of the array is undefined (and takes no memory).
    """
    boxes = boxes_in(entry)
    if not covers(boxes, entry["shape"]):
        raise files.Damaged(f"leaf {name} whose pieces do not make up the whole")
    array = np.empty(entry["shape"], np.dtype(entry["dtype"]))
    wanted = None if needed is None else list(needed)
    for box, piece in zip(boxes, entry["pieces"], strict=True):
        if wanted is not None and not any(overlap(box, other) for other in wanted):
            continue
        part = np.empty(box_shape(box), array.dtype)
        _read_all(folder / piece["file"], piece["offset"], part, name)
        if array_digest(part) != piece["digest"]:
            raise files.Damaged(
                f"leaves with another digest than was saved: {name} (in {piece['file']})"
            )
        array[slices(box)] = part
    return array


def _read_all(path: Path, offset: int, into: np.ndarray, name: str) -> None:
    view = memoryview(into.reshape(-1).view(np.uint8))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise files.Damaged(f"leaf {name}: file {path.name} ends too early")
                view = view[count:]
    except OSError as error:
        raise files.Damaged(
            f"leaves that cannot be read: {name} ({type(error).__name__}: {error.strerror})"
        ) from None


def needed_boxes(like: Any) -> list[Box] | None:
    """The boxes of a leaf that devices of this process will hold; `None`: all of it, for a host array or a sharding not given."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct) or sharding is None:
        return None
    if sharding.is_fully_addressable:
        return None
    indices = sharding.addressable_devices_indices_map(tuple(like.shape)).values()
    return list({box_of(index, like.shape) for index in indices})
