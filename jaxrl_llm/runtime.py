"""What surrounds a run on its process: compilation cache, device count, signals, the run folder and its saved configuration.

Left out on purpose: several processes (`jax.distributed`), which the run folder's rules do not yet know.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import jax

from jaxrl_llm.checks import check
from jaxrl_llm.config import Config, changed, from_dict, identity, to_dict
from jaxrl_llm.errors import EXIT_INTERRUPTED, ConfigError

CONFIG_FILE = "config.json"


def start_process(config: Config) -> None:
    """Switch the compilation cache on (an environment variable wins) and hold the settings against the real device count."""
    folder = config.trainer.compilation_cache_dir
    if folder and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    problems = check(config, jax.device_count())
    if problems:
        raise ConfigError(problems)


class StopRequested(BaseException):
    """Raised at a poll after a signal; not an error, so no `except Exception` swallows it."""


class Signals:
    """SIGTERM and SIGINT set a flag that `poll` turns into `StopRequested`; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def poll(self) -> None:
        """Raise `StopRequested` if a signal has come."""
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
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


def write_config(run_dir: Path, config: Config) -> None:
    """Save the resolved configuration aside and rename it into place."""
    target = run_dir / CONFIG_FILE
    aside = target.with_suffix(f".json.{os.getpid()}")
    aside.write_text(json.dumps(to_dict(config), indent=1) + "\n")
    os.replace(aside, target)


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
        elif not path.startswith(("trainer.resume", "trainer.run_dir")):
            say(f"{path}: {old!r} -> {new!r}")


@contextmanager
def run_folder(config: Config) -> Iterator[Path]:
    """Make the run folder and hold its lock; a second run in the same folder is refused."""
    from jaxrl_llm.checkpoint import RunLock

    run_dir = Path(config.trainer.run_dir or "")
    with RunLock(run_dir):
        yield run_dir
