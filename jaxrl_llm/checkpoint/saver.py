"""`Checkpointer`: background saves that commit by one rename, restores that verify every leaf, retention that cannot lose.

Orbax commits atomically but restores flipped bits without a word, reports a failed background save only at the next one, and
deletes old steps in place (all three measured). So Orbax only writes and reads the tree here; thread, commit, digests,
failure report and retention are ours.

The state travels as host arrays, flat by leaf name. Device memory never holds a second state, and which mesh saved it plays
no part in a restore. The price is host memory for one whole state while a save or a restore runs.

In a run of several processes every process calls `save` and `restore`; process 0 writes, all read, so the folder must be
shared. `check` and `wait` know about failures on process 0 only, and a `restore` in the middle of a run needs a barrier after
`wait`: the caller spreads both.

Left out on purpose: sharded writing by many hosts, incremental saves, restoring in another dtype.
"""

import importlib.metadata
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_llm import fault
from jaxrl_llm.checkpoint import files
from jaxrl_llm.checkpoint.arrays import first_line, placed, read_arrays, write_arrays
from jaxrl_llm.checkpoint.digest import (
    describe,
    describe_mismatch,
    digests_of,
    first_names,
    named_leaves,
    owned_copy,
)
from jaxrl_llm.errors import EXIT_INTERNAL, DataError, RunError

PyTree = Any
LIBRARIES = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SAVE_LIMIT_SECONDS = 3600.0


class CheckpointError(RunError):
    """A checkpoint could not be saved: exit 70."""

    exit_code = EXIT_INTERNAL
    heading = "Checkpoint not saved"


class Checkpointer:
    """Saves and restores the state of one run in one folder.

    `keep` newest steps stay (`None`: all). `on_damage` says what a restore does with a newest step that fails verification:
    take an older one, or raise. `log` gets one line per notice. `limit_seconds` bounds every wait for a save in flight.
    Constructing and restoring write nothing; the folder is made, and leftovers of dead processes are removed, by the first
    `save` (or `clean`). `blocked_seconds` is the time that saving has kept its callers waiting so far.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None,
        on_damage: Literal["fall_back", "stop"] = "fall_back",
        log: Callable[[str], None] = print,
        limit_seconds: float = SAVE_LIMIT_SECONDS,
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep: got {keep}, need at least 1 or None")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.on_damage = on_damage
        self.blocked_seconds = 0.0
        self._log = log
        self._limit = limit_seconds
        self._thread: threading.Thread | None = None
        self._saving_step: int | None = None
        self._failures: deque[str] = deque()
        self._cleaned = False

    def save(self, step: int, state: PyTree, manifest: dict[str, Any]) -> None:
        """Copy the state to the host, then digest, write, commit and prune in the background.

        Blocks for the copy only, unless a save is still in flight: then first for that one, logged and timed. The state may be
        donated as soon as this returns. `manifest` must be plain JSON data; tuples come back as lists. A failure is
        raised by the next `check` or `wait`. Saving a step again with the same leaves and manifest does nothing.
        """
        start = time.perf_counter()
        run = json.loads(json.dumps(manifest))
        if self._in_flight():
            self._log(
                f"checkpoint of step {step} waits for the save of step {self._saving_step} in flight"
            )
            self._join()
            self._log(
                f"checkpoint of step {step} waited {time.perf_counter() - start:.1f} s for storage"
            )
        arrays = {name: owned_copy(leaf) for name, leaf in named_leaves(state).items()}
        if jax.process_index() == 0:
            self._saving_step = step
            self._thread = threading.Thread(
                target=self._save_in_background,
                args=(step, arrays, run),
                name=f"checkpoint-{step}",
                daemon=True,
            )
            self._thread.start()
        self.blocked_seconds += time.perf_counter() - start

    def check(self) -> None:
        """Raise `CheckpointError` for background saves that have failed and were not reported yet; cheap."""
        problems = []
        while self._failures:
            problems.append(self._failures.popleft())
        if problems:
            raise CheckpointError(problems)

    def wait(self) -> None:
        """Wait until nothing is in flight and raise its failure; call it before the program ends."""
        start = time.perf_counter()
        self._join()
        self.blocked_seconds += time.perf_counter() - start
        self.check()

    def close(self) -> None:
        """The same as `wait`; the object can be used again afterwards."""
        self.wait()

    def steps(self) -> list[int]:
        """Committed steps, ascending: numbered folders with a manifest. Their contents are verified by `restore` only."""
        folders = files.step_folders(self.directory)
        return [step for step, folder in folders.items() if (folder / files.MANIFEST).is_file()]

    def manifest(self, step: int) -> dict[str, Any]:
        """The whole manifest of a step, without reading arrays; the caller's part is under `run`. `DataError` if damaged."""
        try:
            folder = files.step_folders(self.directory)[step]
            return _known_format(files.read_manifest(folder), folder)
        except (KeyError, files.Damaged) as error:
            reason = error if isinstance(error, files.Damaged) else "there is no such step"
            raise DataError(self._refusal(step, str(reason))) from None

    def restore(
        self, abstract_state: PyTree, *, step: int | None = None
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Load the newest step whose every leaf verifies: `(step, state, the manifest given to save)`.

        `abstract_state` is the tree to fill: `jax.ShapeDtypeStruct` leaves, with shardings or without (default device); a
        concrete array stands for its own shape, dtype and sharding, a NumPy array or Python number comes back as one.
        `None` when there is no step at all. A damaged step is logged with its first bad leaf and skipped (`fall_back`), or
        raises `DataError` (`stop`, or a `step` asked for, or none left). Another tree, shape or dtype than wanted always raises
        `DataError` with the difference: nothing is cast, cut or padded.
        """
        self._join()
        for path in files.leftovers(self.directory):
            self._log(f"ignoring {path}: a save or deletion cut short; the next save removes it")
        folders = files.step_folders(self.directory)
        if step is not None:
            if step not in folders:
                raise DataError(self._refusal(step, "there is no such step"))
            folders = {step: folders[step]}
        wanted = named_leaves(abstract_state)
        problems = []
        for number, folder in sorted(folders.items(), reverse=True):
            try:
                arrays, run = self._verified(folder, wanted)
            except files.Damaged as error:
                problems.append(self._refusal(number, str(error)))
                if self.on_damage == "stop":
                    break
                if step is None:
                    self._log(f"{problems[-1]}; trying the step before it")
                continue
            leaves = [placed(arrays.pop(name), like) for name, like in wanted.items()]
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
            return number, state, run
        if not problems:
            return None
        problems[-1] += (
            "; restore the files from a backup, move the damaged steps away to start anew"
            + (", or allow falling back to an older step" if self.on_damage == "stop" else "")
        )
        raise DataError(problems)

    def clean(self) -> None:
        """Remove what dead processes of ours left half-saved or half-deleted; foreign files stay."""
        self._cleaned = True
        for path in files.leftovers(self.directory):
            self._log(f"removing {path}: left by a process that ended during a save or deletion")
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._log(f"could not remove {path}: {error}")

    def _refusal(self, step: int, reason: str) -> str:
        return (
            f"checkpoint step {step} in {self.directory}: got {reason}, need a complete, verified step "
            f"(committed here: {first_names(map(str, self.steps()), 20) or 'none'})"
        )

    def _in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is None:
            return
        self._thread.join(self._limit)
        if self._thread.is_alive():
            raise CheckpointError(
                f"checkpoint of step {self._saving_step}: got no end within {self._limit:.0f} s, need storage that takes "
                f"it; look at the disk under {self.directory}"
            )
        self._thread = None

    def _save_in_background(self, step: int, arrays: dict[str, np.ndarray], run: Any) -> None:
        try:
            self._commit(step, arrays, run)
        except Exception as error:
            self._failures.append(
                f"checkpoint of step {step}: got {type(error).__name__} ({first_line(error)}), need a complete step in "
                f"{self.directory}; older steps are untouched, free space or fix the folder and save again"
            )

    def _commit(self, step: int, arrays: dict[str, np.ndarray], run: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._cleaned:
            self.clean()
        owner = files.owner_of(self.directory)
        digests = digests_of(arrays)
        leaves = {
            name: {**describe(array), "digest": digests[name]} for name, array in arrays.items()
        }
        if self._already_there(step, leaves, run):
            self._log(f"checkpoint of step {step} is already there with the same contents")
            return
        name = files.step_name(step)
        saving = files.begin_saving(self.directory, step)
        try:
            write_arrays(saving / files.STATE, arrays)
            (saving / files.PROCESS).unlink()
            document = {
                "format": files.FORMAT_VERSION,
                "step": step,
                "owner": owner,
                "leaves": leaves,
                "files": files.file_sizes(saving),
                "libraries": _versions(),
                "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "run": run,
            }
            files.write_manifest(saving, document)
            fault.point("in_save", step)
            final = self._rename_into_place(saving, name)
        except BaseException:
            shutil.rmtree(saving, ignore_errors=True)
            raise
        files.check_files(final, files.read_manifest(final)["files"])
        self._prune(step, owner)

    def _already_there(self, step: int, leaves: dict[str, Any], run: Any) -> bool:
        folder = self.directory / files.step_name(step)
        try:
            found = files.read_manifest(folder)
            files.check_files(folder, found["files"])
        except files.Damaged:
            return False
        if found["leaves"] != leaves or found["run"] != run:
            return False
        try:
            _read_verified(folder, found["leaves"])
        except files.Damaged:
            return False
        return True

    def _rename_into_place(self, saving: Path, name: str) -> Path:
        """The commit. A folder already under that number steps aside first and stands in for it until the rename."""
        final, aside = self.directory / name, self.directory / f"{name}.replaced"
        if final.exists():
            if aside.exists():
                aside.rename(files.free_name(self.directory, f"{name}.aside"))
            final.rename(aside)
        saving.rename(final)
        files.sync_folder(self.directory)
        return final

    def _prune(self, newest: int, owner: str) -> None:
        """Delete what retention allows, now that step `newest` is whole. Trouble here is logged: the new step is safe."""
        try:
            replaced = self.directory / f"{files.step_name(newest)}.replaced"
            if replaced.exists():
                self._retire(replaced, newest, owner)
            folders = files.step_folders(self.directory)
            for step in [step for step in folders if step > newest]:
                aside = files.free_name(self.directory, f"{files.step_name(step)}.aside")
                folders.pop(step).rename(aside)
                self._log(f"step {step} is newer than step {newest} just saved: moved to {aside}")
            ours = [step for step, folder in folders.items() if files.is_ours(folder, owner)]
            for step in ours[: -self.keep] if self.keep else []:
                self._delete(folders[step], step)
        except OSError as error:
            self._log(f"step {newest} is saved, but an older step could not be removed: {error}")

    def _retire(self, replaced: Path, step: int, owner: str) -> None:
        if files.is_ours(replaced, owner):
            self._delete(replaced, step)
            return
        aside = files.free_name(self.directory, f"{files.step_name(step)}.aside")
        replaced.rename(aside)
        self._log(f"another folder had the number of step {step}: moved to {aside}")

    def _delete(self, folder: Path, step: int) -> None:
        files.delete_step(folder, lambda: fault.point("in_delete", step))

    def _verified(
        self, folder: Path, wanted: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Host arrays of a step, every digest compared, and the caller's manifest; `Damaged` or `DataError`."""
        document = _known_format(files.read_manifest(folder), folder)
        saved = document["leaves"]
        difference = describe_mismatch(
            saved, {name: describe(like) for name, like in wanted.items()}
        )
        if difference:
            raise DataError(
                f"checkpoint {folder}: got another tree than this run needs; use the model, optimizer and dtypes it was saved "
                f"with, or another run folder:\n{difference}"
            )
        files.check_files(folder, document["files"])
        arrays = _read_verified(folder, saved)
        if document["owner"] != files.read_owner(self.directory):
            self._log(f"adopting {folder}: verified, saved in another folder, never deleted here")
        return arrays, document["run"]


def _known_format(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    if document["format"] != files.FORMAT_VERSION:
        raise DataError(
            f"checkpoint {folder}: got format {document['format']}, need {files.FORMAT_VERSION}; use the version of "
            f"jaxrl_llm that wrote it ({document.get('libraries', {}).get('jaxrl_llm')})"
        )
    return document


def _read_verified(folder: Path, leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of a step folder with the digests in its manifest; `Damaged` names the leaves that differ."""
    arrays, errors = read_arrays(folder / files.STATE, leaves)
    if errors:
        reason = next(iter(errors.values()))
        raise files.Damaged(f"leaves that cannot be read: {first_names(errors)} ({reason})")
    digests = digests_of(arrays)
    bad = [name for name, entry in leaves.items() if digests[name] != entry["digest"]]
    if bad:
        raise files.Damaged(f"leaves with another digest than was saved: {first_names(bad)}")
    return arrays


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
