"""Errors that end a run with a fixed exit code; standard library only."""

from collections.abc import Sequence

EXIT_OK = 0
EXIT_CONFIG = 64
EXIT_DATA = 65
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 75


class RunError(Exception):
    """An error that a user can act on: a list of problems, each saying what was got, what is needed, what to do."""

    exit_code = EXIT_INTERNAL
    heading = "The run stopped"

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def report(self) -> str:
        """The text printed on standard error: a heading with the count, then one problem per line."""
        count = len(self.problems)
        head = f"{self.heading} ({count} problem{'s' if count != 1 else ''}):"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])


class ConfigError(RunError):
    """Bad configuration: exit 64."""

    exit_code = EXIT_CONFIG
    heading = "Configuration refused"


class DataError(RunError):
    """Bad data, weights, tokenizer or checkpoint: exit 65."""

    exit_code = EXIT_DATA
    heading = "Data refused"


class TrainingStopped(RunError):
    """Training cannot go on (too many bad steps, broken reward functions): exit 70."""

    exit_code = EXIT_INTERNAL
    heading = "Training stopped"


class Interrupted(RunError):
    """Stopped by a signal after a checkpoint: exit 75, the same command continues."""

    exit_code = EXIT_INTERRUPTED
    heading = "Interrupted"
