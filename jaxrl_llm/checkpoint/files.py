"""What lies in a checkpoint folder: step folders, their manifests, leftovers; standard library only.

```
<directory>/owner.json                which folder this is; steps of another owner are read, never deleted
<directory>/00000020/state/           Orbax tree, one entry per leaf: the format of one process
<directory>/00000020/state.p0001/     what process 1 of several wrote: one file per leaf (see `pieces`)
<directory>/00000020/manifest.json    written last: what the step holds, a digest per leaf or piece, the caller's manifest
<directory>/00000020.saving-4711/     a save in flight or cut short, by the id of the process that commits it
<directory>/00000010.deleting/        an old step being deleted
<directory>/00000020.replaced/        a step whose successor of the same number is about to take its place
<directory>/00000030.aside-1/         a step of an abandoned or damaged continuation; kept, never read
```

A step folder gets its number by one rename of a complete folder, so a number without a manifest is damage, not a save cut
short.

Left out on purpose: object stores (their renames are not atomic).
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint.lock import process_lives, start_ticks

ONE_TREE, PIECES = 1, 2
"""Formats: everything in one Orbax tree, with a digest per leaf; pieces of several processes, with a digest per piece."""
MANIFEST = "manifest.json"
OWNER = "owner.json"
STATE = "state"
REPORT = "report.json"
"""In a sub-tree of one of several processes, until the commit: its part of the manifest."""
PROCESS = "process"
"""In a `.saving` folder only: start time of the process, because process ids are used again."""

_STEP = re.compile(r"\d{8,}")
_SAVING = re.compile(r"(\d{8,})\.saving-(\d+)")
_DELETING = re.compile(r"\d{8,}\.deleting(-\d+)?")
_REPLACED = re.compile(r"(\d{8,})\.replaced")


class Damaged(Exception):
    """A step that cannot be trusted; the text says what is wrong with it."""


def step_name(step: int) -> str:
    """Folder name of a step: at least eight digits."""
    return f"{step:08d}"


def step_folders(directory: Path) -> dict[int, Path]:
    """Folders that claim to be a step, by number, ascending; whether they are whole is not looked at.

    `.replaced` stands in for its number while that is missing: a kill between two renames. A missing directory is empty.
    """
    numbered: dict[int, Path] = {}
    replaced: dict[int, Path] = {}
    for path in _entries(directory):
        if _STEP.fullmatch(path.name) and path.is_dir() and path.name == step_name(int(path.name)):
            numbered[int(path.name)] = path
        elif (match := _REPLACED.fullmatch(path.name)) and path.is_dir():
            replaced[int(match[1])] = path
    return dict(sorted((replaced | numbered).items()))


def leftovers(directory: Path) -> list[Path]:
    """Folders of ours that a dead process left: saves cut short and deletions not finished. Links are never ours."""
    found = []
    for path in _entries(directory):
        if path.is_symlink() or not path.is_dir():
            continue
        if match := _SAVING.fullmatch(path.name):
            if not _still_saving(path, int(match[2])):
                found.append(path)
        elif _DELETING.fullmatch(path.name):
            found.append(path)
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a step folder, checked against its own digest and its folder's number; raises `Damaged`."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({_short(error)})") from None
    if not isinstance(document, dict) or document.pop("digest", None) != _text_digest(document):
        raise Damaged(f"{MANIFEST} does not match its own digest")
    if document["step"] != int(folder.name.partition(".")[0]):
        raise Damaged(f"the folder says step {folder.name}, {MANIFEST} says {document['step']}")
    return document


def tree_name(process: int) -> str:
    """Name of the sub-tree that one of several processes writes."""
    return f"{STATE}.p{process:04d}"


def write_report(folder: Path, report: dict[str, Any]) -> str:
    """Leave a report for the process that commits; returns its digest."""
    write_json(folder / REPORT, report)
    return _text_digest(report)


def take_report(folder: Path, digest: str) -> dict[str, Any]:
    """Read a report and remove it; raises `Damaged` unless it is the one with this digest."""
    report = json.loads((folder / REPORT).read_bytes())
    if _text_digest(report) != digest:
        raise Damaged(f"{folder.name}/{REPORT} does not match its digest")
    (folder / REPORT).unlink()
    return report


def write_manifest(folder: Path, document: dict[str, Any]) -> None:
    """Write the manifest aside, flush it to disk, rename it; adds a digest of the document itself."""
    write_json(folder / MANIFEST, {**document, "digest": _text_digest(document)})


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file so that a reader finds the old text or the new one, whole."""
    aside = path.with_name(f"{path.name}.writing-{os.getpid()}")
    try:
        with open(aside, "w") as file:
            json.dump(document, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            found[str(path.relative_to(folder))] = path.stat().st_size
    return dict(sorted(found.items()))


def check_files(folder: Path, expected: dict[str, int]) -> None:
    """Raise `Damaged` for the first file that is missing or has another size than the manifest says."""
    for name, size in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise Damaged(f"file {name} cannot be read ({_short(error)})") from None
        if found != size:
            raise Damaged(f"file {name} has {found} bytes, {size} were written")


def read_owner(directory: Path) -> str | None:
    """Identity of a checkpoint folder; `None` when it has none that can be read."""
    try:
        found = json.loads((directory / OWNER).read_bytes())["owner"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def owner_of(directory: Path) -> str:
    """Identity of a checkpoint folder, made at the first save; a lost or unreadable one is replaced.

    After a loss the older steps belong to nobody, so retention keeps them: the safe side.
    """
    if found := read_owner(directory):
        return found
    made = uuid.uuid4().hex
    write_json(directory / OWNER, {"owner": made})
    return made


def is_ours(folder: Path, owner: str) -> bool:
    """Whether this checkpoint folder wrote the step: a readable manifest with its owner, and not a link."""
    if folder.is_symlink():
        return False
    try:
        return read_manifest(folder).get("owner") == owner
    except Damaged:
        return False


def free_name(directory: Path, stem: str) -> Path:
    """The first path `stem-1`, `stem-2`, ... that does not exist."""
    number = 1
    while (directory / f"{stem}-{number}").exists():
        number += 1
    return directory / f"{stem}-{number}"


def delete_step(folder: Path, before: Callable[[], None] = lambda: None) -> None:
    """Take a step out of the list by one rename, then delete it; `before` runs in between (fault point)."""
    stem = f"{folder.name.partition('.')[0]}.deleting"
    doomed = folder.with_name(stem)
    if doomed.exists():
        doomed = free_name(folder.parent, stem)
    os.rename(folder, doomed)
    sync_folder(folder.parent)
    before()
    shutil.rmtree(doomed)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(directory: Path, state_bytes: int, keep: int | None) -> str | None:
    """Problem text when the disk cannot hold `keep + 1` checkpoints of `state_bytes`; `None` when it can.

    `keep + 1` because the oldest goes only after the newest is whole. Steps that already lie there count as room, up to
    what will be deleted: they are part of the `keep`. `keep=None` asks for room for two.
    """
    count = 2 if keep is None else keep + 1
    place = Path(directory).absolute()
    present = min(len(step_folders(place)), count - 1) if keep is not None else 0
    need = (count - present) * state_bytes
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= need:
        return None
    return (
        f"checkpoints in {directory}: got {free / 1e9:.3f} GB free, need {need / 1e9:.3f} GB for "
        f"{count - present} more checkpoints of {state_bytes / 1e9:.3f} GB; free space, choose another trainer.run_dir or lower "
        "trainer.max_ckpt_to_keep"
    )


def begin_saving(directory: Path, step: int) -> Path:
    """A fresh folder for a save of this process, replacing what an earlier failure of its own may have left."""
    saving = directory / f"{step_name(step)}.saving-{os.getpid()}"
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir()
    try:
        (saving / PROCESS).write_text(str(start_ticks(os.getpid())))
    except OSError:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    return saving


def _still_saving(folder: Path, pid: int) -> bool:
    """Whether another living process is at work in a `.saving` folder."""
    if pid == os.getpid() or not process_lives(pid):
        return False
    try:
        return (folder / PROCESS).read_text() == str(start_ticks(pid))
    except OSError:
        return False


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _text_digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
