"""The bytes of safetensors files: every size verified before anything is read, slices read from the mapped file.

The format is parsed here from its published layout (8 bytes of header length, a JSON header, raw tensors), because sizes
are compared with the header first, and because slices and bfloat16 are read like everything else.

Left out on purpose: pickled weights (loading one runs its code) and quantised tensors.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import DataError

Index = tuple[slice, ...]
Entries = dict[str, tuple[Path, np.dtype, tuple[int, ...], int]]

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 100_000
"""Most tensors of one file; a whole model of hundreds of layers has a few thousand."""
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}


class TensorSource(Protocol):
    """Tensors by Hugging Face name, from whatever file format; `read` returns float32, float16 or bfloat16."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray: ...


class SafetensorsFolder:
    """A `TensorSource` over mapped files; `entries` gives for each name file, dtype, shape and offset in bytes."""

    def __init__(self, entries: Entries):
        self.entries = entries

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name][2]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        path, dtype, shape, offset = self.entries[name]
        if 0 in shape:
            return np.zeros(shape, dtype)[index or ()]
        return np.array(np.memmap(path, dtype, "r", offset, shape)[index or ()])


def ignorable(name: str) -> bool:
    """Whether a tensor is a buffer that follows from the config (rotary frequencies of older checkpoints)."""
    return name.endswith("rotary_emb.inv_freq")


def open_safetensors(folder: str | Path) -> SafetensorsFolder:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names, and verify every size.

    Raises one `DataError` with all problems: a shard that is missing or shorter or longer than its header says, a header
    that is absurd, an index that points outside the folder or disagrees with the shards, only pickled weights.
    """
    folder = Path(folder)
    index_file, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index_file.is_file():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DataError(f"{index_file}: got no weight_map, need tensor names and their shards")
    elif single.is_file():
        weight_map = None
    else:
        raise DataError(_nothing_to_open(folder))
    problems: list[str] = []
    entries: Entries = {}
    files = (
        ["model.safetensors"] if weight_map is None else sorted(set(map(str, weight_map.values())))
    )
    for name in files:
        if Path(name).name != name or name in ("", ".", "..") or len(os.fsencode(name)) > 255:
            problems.append(
                f"{index_file}: got the shard name {name[:300]!r}, need a file name inside the folder; do not use this index"
            )
        else:
            entries |= _shard_entries(folder / name, problems)
    for name, file in (weight_map or {}).items():
        if name not in entries and not problems:
            problems.append(f"{index_file}: got {name} in {file}, need a shard that contains it")
        elif name in entries and entries[name][0].name != file:
            problems.append(f"{name}: got it in {entries[name][0].name}, need it in {file} (index)")
    if problems:
        raise DataError(problems)
    return SafetensorsFolder(entries)


def _nothing_to_open(folder: Path) -> str:
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickled:
        return (
            f"{folder}: got only pickled weights ({', '.join(pickled)}), need safetensors: loading a pickle runs the "
            "code in it; convert the checkpoint to safetensors"
        )
    state = "no safetensors file" if folder.is_dir() else "no such folder"
    return f"{folder}: got {state}, need model.safetensors or model.safetensors.index.json; check the path"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `DataError` when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: got an unreadable file ({error}), need JSON; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: got {type(content).__name__}, need a JSON object; fetch it again")
    return content


def _shard_entries(path: Path, problems: list[str]) -> Entries:
    """Parse and verify one file's header; problems are appended and then nothing is returned."""
    if not path.is_file():
        problems.append(f"{path}: got no such shard, need every file of the index; fetch it again")
        return {}
    found = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little") if found >= 8 else -1
        if head > MAX_HEADER_BYTES or head < 2 or 8 + head > found:
            need = "at least 8 bytes" if head < 0 else f"{8 + head} bytes for its header"
            limit = (
                f" and a header of at most {MAX_HEADER_BYTES} bytes"
                if head > MAX_HEADER_BYTES
                else ""
            )
            problems.append(f"{path}: got {found} bytes, need {need}{limit}; fetch it again")
            return {}
        raw = file.read(head)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ValueError(f"{len(header)} tensors in one file, at most {MAX_TENSORS} are read")
        table: dict[str, tuple[str, tuple[int, ...], int, int]] = {
            name: _entry(entry) for name, entry in header.items()
        }
        end = max((entry[3] for entry in table.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(f"{path}: got a malformed header ({error}), need JSON; fetch it again")
        return {}
    if 8 + head + end != found:
        problems.append(
            f"{path}: got {found} bytes, need {8 + head + end} by its header; fetch it again"
        )
        return {}
    entries: Entries = {}
    for name, (kind, shape, start, stop) in table.items():
        if kind not in DTYPES:
            if not ignorable(name):
                problems.append(f"{path}: got {name} as {kind}, need one of {', '.join(DTYPES)}")
            continue
        size = math.prod(shape) * DTYPES[kind].itemsize
        if start < 0 or stop - start != size or min(shape, default=0) < 0:
            problems.append(
                f"{path}: got {stop - start} bytes for {name}, need {size} by its shape {shape}"
            )
            continue
        entries[name] = (path, DTYPES[kind], shape, 8 + head + start)
    return entries


def _entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    start, stop = entry["data_offsets"]
    return str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), int(start), int(stop)


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]], kind: str
) -> None:
    """Write tensors, given as shape and a function that makes the values, one after the other, then sync the file.

    `kind` is a key of `DTYPES`; values are converted to it. The metadata says `pt`, without which transformers refuses.
    """
    dtype, end = DTYPES[kind], 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (shape, _) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, make in tensors.values():
            file.write(np.ascontiguousarray(make(), dtype).tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes | str) -> None:
    """Write a small file and sync it."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
