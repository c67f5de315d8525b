"""Leaves of a state by name: owned host copies, digests of them, and the difference between two trees.

A leaf is named by its path, parts joined with `/`: `actor/opt_state/0/mu/layers/w`. Containers without leaves (`None`,
`optax.EmptyState`) have no name; the tree that the caller restores into brings them back.

A digest is of one host array: a whole leaf where one process writes all, a piece of it where several do (`pieces`).

Left out on purpose: typed PRNG keys (keys are derived from the step here, never carried).
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import ConfigError

PyTree = Any
CHUNK_BYTES = 64 * 2**20
"""Bytes hashed as one piece. Pieces are hashed in parallel; the size is part of the format."""
DIGEST_BYTES = 16
MAX_LINES = 20


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves of a tree by path, in the tree's own order.

    Raises `ConfigError` when two leaves get one name (a dictionary key that holds `/`) or the tree is a bare leaf.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name or name in leaves:
            raise ConfigError(
                f"state: got {'two leaves named ' + repr(name) if name else 'a bare leaf without a name'}, need one "
                "path per leaf; rename a dictionary key or wrap the leaf in a dictionary"
            )
        leaves[name] = leaf
    return leaves


def owned_copy(leaf: Any) -> np.ndarray:
    """Copy a leaf to the host without leaving a view of it behind.

    `np.asarray(leaf)` caches a view inside the live array, and on CPU that view silently turns donation of its buffer
    off. Going shard by shard touches short-lived arrays only. Python numbers become 64-bit arrays. Raises `ValueError` for an
    array of which other processes hold a part: see `pieces.own_pieces`.
    """
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(f"got an array that other processes hold a part of ({leaf.sharding})")
    copy = np.empty(leaf.shape, leaf.dtype)
    parts = {str(shard.index): (shard.index, shard.data) for shard in leaf.addressable_shards}
    for _, data in parts.values():
        data.copy_to_host_async()
    for index, data in parts.values():
        copy[index] = np.asarray(data)
    return copy


def describe(leaf: Any) -> dict[str, Any]:
    """Shape and dtype of an array, a `ShapeDtypeStruct` or a Python number, as JSON can hold them."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return {"shape": list(leaf.shape), "dtype": str(np.dtype(leaf.dtype))}


def array_digest(array: np.ndarray, pool: ThreadPoolExecutor | None = None) -> str:
    """BLAKE2b of dtype, shape and the digests of `CHUNK_BYTES` pieces of the bytes, as hex.

    Bits count, not values: `-0.0` and `0.0` differ, equal NaN payloads agree. `pool` hashes pieces in parallel.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    pieces = [flat[start : start + CHUNK_BYTES] for start in range(0, flat.size, CHUNK_BYTES)]
    head = f"{np.dtype(array.dtype)}{list(array.shape)}".encode()
    digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    for part in (pool.map if pool and len(pieces) > 1 else map)(_piece_digest, pieces):
        digest.update(part)
    return digest.hexdigest()


def digests_of(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Digest of each host array, large ones piecewise in parallel, small ones side by side."""
    workers = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        small = [name for name, array in arrays.items() if array.nbytes <= CHUNK_BYTES]
        found = dict(
            zip(small, pool.map(lambda name: array_digest(arrays[name]), small), strict=True)
        )
        return {name: found.get(name) or array_digest(arrays[name], pool) for name in arrays}


def describe_mismatch(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Difference of two trees given as `path -> {"shape", "dtype"}` (or any text), at most 20 lines; empty when equal.

    Lines are `- path what` (only saved), `+ path what` (only wanted) and `! path saved ... wanted ...`; the last line
    counts what did not fit. Other keys of an entry, such as its digest, do not count.
    """
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in wanted:
            lines.append(f"- {name} {_spell(saved[name])}: only in the checkpoint")
        elif name not in saved:
            lines.append(f"+ {name} {_spell(wanted[name])}: wanted, not in the checkpoint")
        elif _spell(saved[name]) != _spell(wanted[name]):
            lines.append(f"! {name}: saved {_spell(saved[name])}, wanted {_spell(wanted[name])}")
    if len(lines) > MAX_LINES:
        hidden = len(lines) - (MAX_LINES - 1)
        lines = [*lines[: MAX_LINES - 1], f"... and {hidden} more differences"]
    return "\n".join(lines)


def first_names(names: Iterable[str], limit: int = 5) -> str:
    """The first few names for an error text, with the count of the rest."""
    listed = list(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest


def _piece_digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=DIGEST_BYTES).digest()


def _spell(entry: Any) -> str:
    if isinstance(entry, Mapping):
        return f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"
    return str(entry)
