"""What surrounds a run on its processes: compilation cache, device counts, signals, the run folder and its saved
configuration.

In a run of several processes (which `joining` brings together) the folder, its lock and everything written into it but checkpoints are process 0's.
"""

import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxrl_llm import processes
from jaxrl_llm.checks import check, divided, mesh_shape
from jaxrl_llm.compilation_cache import write_whole_entries
from jaxrl_llm.config import (
    Config,
    changed,
    from_dict,
    identity,
    leaves,
    needs_critic,
    needs_reference,
    to_dict,
)
from jaxrl_llm.console import say, say_apart
from jaxrl_llm.errors import EXIT_INTERRUPTED, ConfigError
from jaxrl_llm.knobs import DistributedKnobs
from jaxrl_llm.paths import files_digest, resolve_model_path
from jaxrl_llm.processes import Meetings

CONFIG_FILE = "config.json"
LIBRARIES = (
    "jaxrl_llm",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "transformers",
)
MOST_DIFFERENCES = 20
LOOK_SECONDS = 1.0
"""How often a process that decodes looks whether another one was asked to stop, or has failed."""
SAME_SECONDS = 0.2
"""The same signal again within this time is the same request: `timeout` sends it to the process and to its group."""

Say = Callable[[str], None]


# Processes ---------------------------------------------------------------------------------------------------------------


def voice() -> Say:
    """How this process prints: process 0 everything; the others warnings only, with their number in front."""
    me = jax.process_index()
    return say if me == 0 else partial(say_apart, me)


def start_process(
    config: Config, meet: Meetings | None = None, *, drawn_seed: bool = False
) -> Config:
    """Switch the compilation cache on (an environment variable wins) and hold the settings against the real devices and against
    those of the other processes.

    Returns the configuration, with process 0's seed where seeds were drawn. `ConfigError` names what differs between processes and
    what the devices do not allow.
    """
    meet = meet or Meetings()
    write_whole_entries()
    folder = config.trainer.compilation_cache_dir
    if folder and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ConfigError(
            f"distributed.enable = {config.distributed.enable}: this is one of {jax.process_count()} processes of a TPU pod slice, but "
            "they are not joined, need enable = on; or hide the other hosts from JAX"
        )
    # Everybody comes, also those that were given a seed: what differs is then named below.
    seeds = meet.first("seeds", lambda: [config.trainer.seed, config.data.seed])
    if drawn_seed:
        config = _with_seeds(config, seeds)
    everyone = meet.gather("start", facts(config))
    problems = (
        differences(everyone) or check(config, jax.device_count()) or misfits(config, everyone)
    )
    if problems:
        raise ConfigError(problems)
    return config


def _with_seeds(config: Config, seeds: Sequence[int | None]) -> Config:
    return replace(
        config,
        trainer=replace(config.trainer, seed=seeds[0]),
        data=replace(config.data, seed=seeds[1]),
    )


def facts(config: Config) -> dict[str, Any]:
    """What has to be the same on every process, by name, and where this one runs (`host`)."""
    own = ("distributed.", "trainer.compilation_cache_dir")
    settings = {path: value for path, _, value in leaves(config) if not path.startswith(own)}
    versions = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[f"version of {name}"] = importlib.metadata.version(name)
    alone = jax.process_count() == 1
    return {
        "host": socket.gethostname(),
        "devices of a process": jax.device_count() if alone else jax.local_device_count(),
        "kind of device": jax.local_devices()[0].device_kind,
        "version of Python": ".".join(map(str, sys.version_info[:2])),
        "program text of jaxrl_llm": "" if alone else program_digest(),
        **versions,
        **settings,
    }


def program_digest() -> str:
    """Sixteen hex digits over the source files of the package: hosts with different copies differ in it."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a process differs from process 0, name by name, at most `MOST_DIFFERENCES`; `host` may differ."""
    first = everyone[0]
    found = [
        f"{name}: process {number} has {other.get(name)!r}, process 0 has {first.get(name)!r}, need the same on all {len(everyone)} "
        "processes; start them with the same files, versions and settings"
        for number, other in enumerate(everyone)
        for name in {**first, **other}
        if name != "host" and other.get(name) != first.get(name)
    ]
    rest = len(found) - MOST_DIFFERENCES
    return found[:MOST_DIFFERENCES] + ([f"and {rest} more differences"] if rest > 0 else [])


def compare_processes(meet: Meetings, what: Mapping[str, Any]) -> None:
    """Refuse to go on where processes hold different things (digests of data, tokenizer, reference), by name."""
    if problems := differences(meet.gather("compare", dict(what))):
        raise ConfigError(problems)


def compare_files(meet: Meetings, config: Config, more: Mapping[str, Any]) -> None:
    """Refuse to go on where the model files of the processes differ, or something else that they should share."""
    if jax.process_count() == 1:
        return
    models = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if needs_critic(config) else None,
        "ref.path": config.ref.path if needs_reference(config) else None,
    }
    digests = {
        f"files of {name}": files_digest(resolve_model_path(path))
        for name, path in models.items()
        if path
    }
    compare_processes(meet, {**more, **digests})


def misfits(config: Config, everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the division of the devices into processes and hosts forbids."""
    count, local = len(everyone), int(everyone[0]["devices of a process"])
    hosts: dict[str, int] = {}
    for other in everyone:
        hosts[other["host"]] = hosts.get(other["host"], 0) + local
    return [
        *_expected(config, hosts),
        *(divided(config, mesh_shape(config, count * local), count, local) if count > 1 else ()),
    ]


def _expected(config: Config, hosts: Mapping[str, int]) -> Iterator[str]:
    knobs = config.trainer
    if knobs.nnodes is not None and knobs.nnodes != len(hosts):
        yield (
            f"trainer.nnodes = {knobs.nnodes}, but the processes run on {len(hosts)} hosts ({', '.join(list(hosts)[:8])}); start on "
            f"{knobs.nnodes}, or set it to {len(hosts)} or none"
        )
    wanted = knobs.n_devices_per_node
    for host, devices in hosts.items():
        if wanted is not None and devices != wanted:
            yield (
                f"trainer.n_devices_per_node = {wanted}, but host {host} has {devices} devices in this run; set it to {devices} or "
                "none, or start on other hosts"
            )
            return


# Signals -----------------------------------------------------------------------------------------------------------------


class StopRequested(BaseException):
    """Raised at a poll after a signal; not an error, so no `except Exception` swallows it."""


class Signals:
    """SIGTERM and SIGINT set a flag that a poll turns into `StopRequested`; a second signal ends the process at once (the same one
    only after `SAME_SECONDS`).

    With several processes all of them have to stop at one place, whichever of them got the signal: only `agree` raises in the open,
    and `poll_apart` where a process works on its own and meets the others afterwards.
    """

    def __init__(self, meet: Meetings | None = None) -> None:
        self.requested = False
        self._first = (0, 0.0)
        self.meet = meet or Meetings()
        self._previous: dict[int, object] = {}
        self._looked = 0.0

    def poll(self) -> None:
        """Raise `StopRequested` if a signal has come; never with several processes."""
        if self.requested and jax.process_count() == 1:
            raise StopRequested

    def poll_apart(self) -> None:
        """Raise `StopRequested` if a signal has come to some process: the caller catches it and tells the others when they meet."""
        self.meet.pulse.beat()
        if self.requested:
            processes.post_stop()
            raise StopRequested
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            processes.heed()
            if processes.stop_posted():
                raise StopRequested

    def agree(self, name: str) -> None:
        """Raise `StopRequested` on every process if a signal has come to one of them."""
        if any(self.meet.gather(name, self.requested)):
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if self.requested:
            if number != self._first[0] or now - self._first[1] > SAME_SECONDS:
                os._exit(EXIT_INTERRUPTED)
            return
        self.requested, self._first = True, (number, now)
        name = signal.Signals(number).name
        with suppress(OSError):
            os.write(
                2, f"\n{name}: saving the last finished step; once more ends at once\n".encode()
            )

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


# Run folder --------------------------------------------------------------------------------------------------------------


def write_config(run_dir: Path, config: Config) -> None:
    """Save the resolved configuration aside and rename it into place; where this process stood among others is left out."""
    target = run_dir / CONFIG_FILE
    aside = target.with_suffix(f".json.{os.getpid()}")
    values = to_dict(replace(config, distributed=DistributedKnobs()))
    aside.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(aside, target)


def saved_config(run_dir: Path, meet: Meetings) -> Config | None:
    """`read_config` on process 0, for every process."""

    def read() -> dict[str, Any] | None:
        saved = read_config(run_dir)
        return None if saved is None else to_dict(saved)

    values = meet.first("saved configuration", read)
    return None if values is None else from_dict(values)[0]


def read_config(run_dir: Path) -> Config | None:
    """The configuration that a run folder was made with, if there is one."""
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        config, problems = from_dict(json.loads(file.read_text()))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{file} is not readable ({problem}); move it away or choose another trainer.run_dir"
        ) from problem
    if problems:
        raise ConfigError([f"{file}: {problem}" for problem in problems])
    return config


def adopt(saved: Config, config: Config) -> Config:
    """Take over what the first start resolved for its devices and the new configuration leaves open."""
    if config.rollout.max_num_seqs is None and saved.rollout.max_num_seqs is not None:
        config = replace(
            config, rollout=replace(config.rollout, max_num_seqs=saved.rollout.max_num_seqs)
        )
    return config


def compare(saved: Config, config: Config, say: Callable[[str], None]) -> None:
    """Refuse to continue a run with other identity settings; print operational ones that changed (the learning rate above all)."""
    shaping = identity(config)
    differences = changed(saved, config)
    problems = [
        f"{path}: the run in this folder has {old!r}, got {new!r}; restore it, or choose another trainer.run_dir or experiment_name"
        for path, old, new in differences
        if path in shaping
    ]
    if problems:
        raise ConfigError(problems)
    for path, old, new in differences:
        if path.endswith("optim.lr"):
            say(f"{path}: {old} -> {new}; the configured learning rate wins over the stored one")
        elif not path.startswith(("trainer.resume", "trainer.run_dir", "distributed.")):
            say(f"{path}: {old!r} -> {new!r}")


@contextmanager
def run_folder(config: Config) -> Iterator[Path]:
    """Make the run folder and hold its lock; a second run in the same folder is refused, on every process."""
    from jaxrl_llm.checkpoint import run_lock

    run_dir = Path(config.trainer.run_dir or "")
    with run_lock(run_dir, log=voice()):
        yield run_dir
