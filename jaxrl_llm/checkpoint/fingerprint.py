"""A fingerprint of every leaf of a tree that does not depend on where its parts lie.

Each element gives a 64-bit number from its bits and its place in the whole leaf; a leaf's fingerprint is their sum modulo 2^64.
A sum has no order: every process adds up what it owns, the sums of all processes are added, and mesh and number of processes
drop out. It tells accidents apart (chance 2^-64), not forgeries.

Left out on purpose: the checkpoints' own digests (`digest`): those say which piece is damaged and are of bytes on a disk.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_llm import processes
from jaxrl_llm.checkpoint.digest import describe, named_leaves
from jaxrl_llm.checkpoint.pieces import Box, Piece, box_shape, own_pieces, slices, whole
from jaxrl_llm.checkpoint.together import fresh_tag

PyTree = Any
BLOCK = 2**14
"""Elements mixed at a time: the intermediate numbers stay in the processor's cache."""
TASK = 2**22
"""Elements given to a thread at a time."""
MASK = 2**64 - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The odd constants of Steele, Lea and Flood's SplitMix64."""


def tree_digests(tree: PyTree) -> dict[str, str]:
    """Fingerprint of every leaf by path; dtype and shape are part of it. Collective in a run of several processes.

    The same on every mesh, sharding and number of processes. Bits count, not values. One leaf at a time is on the host, and of it
    only what this process owns.
    """
    leaves = named_leaves(tree)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        sums = {
            name: _leaf_sum(own_pieces(leaf), np.shape(leaf), pool) for name, leaf in leaves.items()
        }
    if jax.process_count() > 1:
        everyone = processes.gather(fresh_tag("fingerprint"), sums)
        sums = {name: sum(found[name] for found in everyone) & MASK for name in sums}
    return {
        name: hashlib.blake2b(f"{describe(leaf)}{sums[name]}".encode(), digest_size=16).hexdigest()
        for name, leaf in leaves.items()
    }


def _leaf_sum(pieces: list[Piece], shape: tuple[int, ...], pool: ThreadPoolExecutor) -> int:
    """The share of some pieces in the fingerprint of a leaf of this shape."""
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]

    def add_up(task: tuple[Box, np.ndarray, list[int]]) -> int:
        box, bits, starts = task
        return sum(_block_sum(bits, starts, block, strides) for block in blocks(box, BLOCK))

    tasks = [
        (part, array.view(f"u{array.dtype.itemsize}"), [start for start, _ in box])
        for box, array in pieces
        for part in blocks(whole(array.shape), TASK)
    ]
    return sum(pool.map(add_up, tasks)) & MASK


def _block_sum(bits: np.ndarray, starts: list[int], block: Box, strides: list[int]) -> int:
    """Sum of `mix(place * STEP + bits)` over a block; `starts` say where the array `bits` lies in its leaf, place 1 is the first."""
    mixed = np.full(box_shape(block), STEP, np.uint64)
    for axis, ((start, stop), offset, stride) in enumerate(
        zip(block, starts, strides, strict=True)
    ):
        places = np.arange(start + offset, stop + offset, dtype=np.uint64)
        places *= np.uint64(stride * STEP & MASK)
        mixed += places.reshape([-1 if other == axis else 1 for other in range(mixed.ndim)])
    mixed += bits[slices(block)]
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(SECOND)
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))


def blocks(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements, along the first axis that is longer than one."""
    lengths = box_shape(box)
    if 0 in lengths:
        return
    if math.prod(lengths) <= most:
        yield box
        return
    axis = next(axis for axis, length in enumerate(lengths) if length > 1)
    step = max(1, most // math.prod(lengths[axis + 1 :]))
    start, stop = box[axis]
    for begin in range(start, stop, step):
        yield from blocks((*box[:axis], (begin, min(begin + step, stop)), *box[axis + 1 :]), most)
