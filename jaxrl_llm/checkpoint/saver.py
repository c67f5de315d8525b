"""`Checkpointer`: background saves that commit by one rename, restores that verify every leaf, retention that cannot lose.

Orbax commits atomically but restores flipped bits without a word, reports a failed background save only at the next one, and
deletes old steps in place (all three measured). So Orbax only writes and reads the tree here; thread, commit, digests,
failure report and retention are ours.

The state travels as host arrays, by leaf name, and which mesh saved it plays no part in a restore. While a save runs, a process has
what it writes in host memory: the whole state in a run of one process, else the pieces it owns. A restore has a few leaves there.

In a run of several processes every process calls `save`, `check`, `wait` and `restore`, in the same order and from its main thread;
the folder must be shared. Each writes its pieces, process 0 makes folders, commits, prunes and logs, and nothing is committed unless
every process has written. The background threads meet over the coordination service: no device program runs there.

Left out on purpose: incremental saves, restoring in another dtype.
"""

import importlib.metadata
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_llm import fault, processes
from jaxrl_llm.checkpoint import files
from jaxrl_llm.checkpoint.arrays import placed, write_arrays
from jaxrl_llm.checkpoint.digest import (
    describe,
    describe_mismatch,
    digests_of,
    first_names,
    named_leaves,
    owned_copy,
)
from jaxrl_llm.checkpoint.pieces import Piece, merge_reports, own_pieces, write_pieces
from jaxrl_llm.checkpoint.reading import known_format, read_leaves
from jaxrl_llm.checkpoint.together import (
    PeerFailed,
    all_do,
    all_tell,
    first_does,
    first_line,
    fresh_tag,
)
from jaxrl_llm.errors import EXIT_INTERNAL, DataError, RunError

PyTree = Any
LIBRARIES = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SAVE_LIMIT_SECONDS = 3600.0
BEAT_SECONDS = 1.0
"""How often a caller that waits for a save gives a sign of life."""


class CheckpointError(RunError):
    """A checkpoint could not be saved: exit 70."""

    exit_code = EXIT_INTERNAL
    heading = "Checkpoint not saved"


class Checkpointer:
    """Saves and restores the state of one run in one folder.

    `keep` newest steps stay (`None`: all). `on_damage` says what a restore does with a newest step that fails verification:
    take an older one, or raise. `log` gets one line per notice. `limit_seconds` bounds every wait for a save in flight and for other
    processes (`processes.Missing` names those that do not come). `beat` is called about every second that a caller waits for a save
    in flight: writing may take longer than a watchdog likes.
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
        beat: Callable[[], None] = lambda: None,
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep: got {keep}, need at least 1 or None")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.on_damage = on_damage
        self.blocked_seconds = 0.0
        self._log = log
        self._limit = limit_seconds
        self._beat = beat
        self._thread: threading.Thread | None = None
        self._saving_step: int | None = None
        self._failures: deque[str] = deque()
        self._untold = False
        self._cleaned = False

    def save(self, step: int, state: PyTree, manifest: dict[str, Any]) -> None:
        """Copy the state to the host, then digest, write, commit and prune in the background.

        Blocks for the copy only, unless a save is still in flight: then first for that one, logged and timed. The state may be
        donated as soon as this returns. `manifest` must be plain JSON data; tuples come back as lists. A failure is
        raised by the next `check` or `wait`, on every process. In a run of one process, saving a step again with the same leaves and
        manifest does nothing; several processes write it anew.
        """
        start = time.perf_counter()
        run = json.loads(json.dumps(manifest))
        if self._in_flight():
            self._say(
                f"checkpoint of step {step} waits for the save of step {self._saving_step} in flight"
            )
            self._join()
            self._say(
                f"checkpoint of step {step} waited {time.perf_counter() - start:.1f} s for storage"
            )
        leaves = named_leaves(state)
        if jax.process_count() == 1:
            arrays = {name: owned_copy(leaf) for name, leaf in leaves.items()}
            work = partial(self._save_alone, step, arrays, run)
        else:
            described = {name: describe(leaf) for name, leaf in leaves.items()}
            pieces = {name: own_pieces(leaf) for name, leaf in leaves.items()}
            tag = fresh_tag(f"save-{step}")
            work = partial(self._save_together, step, described, pieces, run, tag)
        self._saving_step, self._untold = step, True
        self._thread = threading.Thread(
            target=self._in_background, args=(step, work), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        self.blocked_seconds += time.perf_counter() - start

    def check(self) -> None:
        """Raise `CheckpointError` for background saves that have failed and were not reported yet; cheap.

        Collective in a run of several processes, and the same answer on all: failures are raised once the save has ended everywhere.
        Without a save since the last answer nothing is exchanged.
        """
        self._report()

    def wait(self) -> None:
        """Wait until nothing is in flight and raise its failure; call it before the program ends. Collective, as `check`."""
        start = time.perf_counter()
        late: Sequence[str] = ()
        try:
            self._join()
        except CheckpointError as error:
            late = error.problems
        self.blocked_seconds += time.perf_counter() - start
        self._report(late)

    def settle(self) -> list[str]:
        """Wait for the save in flight, and return what has failed, without a word to other processes.

        For a process that ends with an error of its own: the others do not know and will not come to `wait`.
        """
        try:
            self._join()
        except CheckpointError as error:
            return list(error.problems)
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def close(self) -> None:
        """The same as `wait`; the object can be used again afterwards."""
        self.wait()

    def steps(self) -> list[int]:
        """Committed steps, ascending, as this process sees them: numbered folders with a manifest. Only `restore` verifies them."""
        folders = files.step_folders(self.directory)
        return [step for step, folder in folders.items() if (folder / files.MANIFEST).is_file()]

    def manifest(self, step: int) -> dict[str, Any]:
        """The whole manifest of a step, without reading arrays; the caller's part is under `run`. `DataError` if damaged."""
        try:
            folder = files.step_folders(self.directory)[step]
            return known_format(files.read_manifest(folder), folder)
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

        Collective in a run of several processes: they take the newest step that verifies on all of them, or raise the same error.
        """
        self._join()
        for path in files.leftovers(self.directory):
            self._say(f"ignoring {path}: a save or deletion cut short; the next save removes it")
        numbers = first_does(
            fresh_tag("steps"), lambda: list(files.step_folders(self.directory)), self._limit
        )
        if step is not None:
            if step not in numbers:
                raise DataError(self._refusal(step, "there is no such step"))
            numbers = [step]
        wanted = named_leaves(abstract_state)
        problems = []
        for number in reversed(numbers):
            load = partial(self._load, number, wanted)
            try:
                leaves, document = all_do(fresh_tag(f"restore-{number}"), load, self._limit)
            except files.Damaged as error:
                problems.append(self._refusal(number, str(error)))
                if self.on_damage == "stop":
                    break
                if step is None:
                    self._say(f"{problems[-1]}; trying the step before it")
                continue
            if document["owner"] != files.read_owner(self.directory):
                self._say(
                    f"adopting step {number} in {self.directory}: verified, saved in another folder, never deleted here"
                )
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
            return number, state, document["run"]
        if not problems:
            return None
        problems[-1] += (
            "; restore the files from a backup, move the damaged steps away to start anew"
            + (", or allow falling back to an older step" if self.on_damage == "stop" else "")
        )
        raise DataError(problems)

    def clean(self) -> None:
        """Remove what dead processes of ours left half-saved or half-deleted; foreign files stay. Only process 0 does."""
        if jax.process_index():
            return
        self._cleaned = True
        for path in files.leftovers(self.directory):
            self._say(f"removing {path}: left by a process that ended during a save or deletion")
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._say(f"could not remove {path}: {error}")

    def _refusal(self, step: int, reason: str) -> str:
        return (
            f"checkpoint step {step} in {self.directory}: got {reason}, need a complete, verified step "
            f"(committed here: {first_names(map(str, self.steps()), 20) or 'none'})"
        )

    def _say(self, text: str) -> None:
        if jax.process_index() == 0:
            self._log(text)

    def _in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is None:
            return
        # With several processes the thread itself waits for the others, and names those that do not come.
        limit = self._limit if jax.process_count() == 1 else 2 * self._limit
        deadline = time.monotonic() + limit
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, BEAT_SECONDS))
            self._beat()
        if self._thread.is_alive():
            raise CheckpointError(
                f"checkpoint of step {self._saving_step}: got no end within {limit:.0f} s, need storage that takes "
                f"it; look at the disk under {self.directory}"
            )
        self._thread = None

    def _report(self, late: Sequence[str] = ()) -> None:
        """Raise what has failed here or, in a run of several processes, on any of them; `late` is a save that does not end."""
        if jax.process_count() == 1:
            problems = [*late] or [self._failures.popleft() for _ in range(len(self._failures))]
        elif not self._untold:
            return
        else:
            mine = {
                "late": [*late],
                "busy": self._in_flight(),
                "failures": [*self._failures],
            }
            told = processes.gather(fresh_tag("check"), mine, self._limit)
            problems = _unique(text for said in told for text in said["late"])
            if not problems:
                if any(said["busy"] for said in told):
                    return
                problems = _unique(text for said in told for text in said["failures"])
                self._failures.clear()
                self._untold = False
        if problems:
            raise CheckpointError(problems)

    def _in_background(self, step: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            known = isinstance(error, PeerFailed | RunError)
            reason = first_line(error) if known else f"{type(error).__name__} ({first_line(error)})"
            self._failures.append(
                f"checkpoint of step {step}: got {reason}, need a complete step in "
                f"{self.directory}; older steps are untouched, free space or fix the folder and save again"
            )

    def _save_alone(self, step: int, arrays: dict[str, np.ndarray], run: Any) -> None:
        self._prepare()
        digests = digests_of(arrays)
        leaves = {
            name: {**describe(array), "digest": digests[name]} for name, array in arrays.items()
        }
        if self._already_there(step, leaves, run):
            self._say(f"checkpoint of step {step} is already there with the same contents")
            return
        saving = files.begin_saving(self.directory, step)
        with _removed_on_failure(saving):
            write_arrays(saving / files.STATE, arrays)
            (saving / files.PROCESS).unlink()
            sizes = files.file_sizes(saving)
            self._commit(
                saving, step, {"format": files.ONE_TREE, "leaves": leaves, "files": sizes}, run
            )

    def _save_together(
        self,
        step: int,
        described: dict[str, Any],
        pieces: dict[str, list[Piece]],
        run: Any,
        tag: str,
    ) -> None:
        """Three meetings: process 0 has made the folder; all have written their pieces; process 0 has committed."""
        me, count = jax.process_index(), jax.process_count()

        def begin() -> str:
            self._prepare()
            return files.begin_saving(self.directory, step).name

        def write() -> str:
            report = write_pieces(saving, files.tree_name(me), pieces)
            if me:
                fault.point("in_save", step)
            return files.write_report(saving / files.tree_name(me), report)

        def commit() -> None:
            trees = [saving / files.tree_name(process) for process in range(count)]
            reports = [files.take_report(*found) for found in zip(trees, digests, strict=True)]
            leaves, sizes = merge_reports(described, reports)
            (saving / files.PROCESS).unlink()
            made = {"format": files.PIECES, "processes": count, "leaves": leaves, "files": sizes}
            self._commit(saving, step, made, run)

        saving = self.directory / first_does(f"{tag}/begin", begin, self._limit)
        with _removed_on_failure(saving):
            digests = all_tell(f"{tag}/write", write, self._limit)
            first_does(f"{tag}/commit", commit, self._limit)

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._cleaned:
            self.clean()
        files.owner_of(self.directory)

    def _commit(self, saving: Path, step: int, made: dict[str, Any], run: Any) -> None:
        """Write the manifest, give the folder its number, and let old steps go."""
        owner = files.owner_of(self.directory)
        document = {
            **made,
            "step": step,
            "owner": owner,
            "libraries": _versions(),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "run": run,
        }
        files.write_manifest(saving, document)
        fault.point("in_save", step)
        final = self._rename_into_place(saving, files.step_name(step))
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
            for _ in read_leaves(folder, found):
                pass
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
                self._say(f"step {step} is newer than step {newest} just saved: moved to {aside}")
            ours = [step for step, folder in folders.items() if files.is_ours(folder, owner)]
            for step in ours[: -self.keep] if self.keep else []:
                self._delete(folders[step], step)
        except OSError as error:
            self._say(f"step {newest} is saved, but an older step could not be removed: {error}")

    def _retire(self, replaced: Path, step: int, owner: str) -> None:
        if files.is_ours(replaced, owner):
            self._delete(replaced, step)
            return
        aside = files.free_name(self.directory, f"{files.step_name(step)}.aside")
        replaced.rename(aside)
        self._say(f"another folder had the number of step {step}: moved to {aside}")

    def _delete(self, folder: Path, step: int) -> None:
        files.delete_step(folder, lambda: fault.point("in_delete", step))

    def _load(self, number: int, wanted: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Placed leaves of a step, every digest compared, and its manifest; `Damaged` or `DataError`."""
        folder = files.step_folders(self.directory).get(number)
        if folder is None:
            raise files.Damaged(
                f"no folder {files.step_name(number)} to be seen, though process 0 sees it: all processes need one shared run folder"
            )
        document = known_format(files.read_manifest(folder), folder)
        difference = describe_mismatch(
            document["leaves"], {name: describe(like) for name, like in wanted.items()}
        )
        if difference:
            raise DataError(
                f"checkpoint {folder}: got another tree than this run needs; use the model, optimizer and dtypes it was saved "
                f"with, or another run folder:\n{difference}"
            )
        files.check_files(folder, document["files"])
        leaves = {}
        for name, array in read_leaves(folder, document, wanted):
            leaves[name] = placed(array, wanted[name])
            del array
        return [leaves[name] for name in wanted], document


@contextmanager
def _removed_on_failure(saving: Path) -> Iterator[None]:
    """Take an unfinished save away again; in a run of several processes, process 0 does."""
    try:
        yield
    except BaseException:
        if jax.process_index() == 0:
            shutil.rmtree(saving, ignore_errors=True)
        raise


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
