"""`train`: check the settings, then load JAX and run the trainer."""

import os
import sys
import traceback

from jaxrl_llm import cli
from jaxrl_llm.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, ConfigError, RunError


def run(words: list[str], prog: str) -> int:
    """Train from a command line; returns the exit code (0, 64, 65, 70 or 75)."""
    return guarded(lambda: _train(words, prog))


def _train(words: list[str], prog: str) -> int:
    if cli.wants_help(words, prog):
        return 0
    config = cli.read_config(words, prog)
    quiet_libraries()
    from jaxrl_llm import trainer

    return trainer.train(config)


def quiet_libraries() -> None:
    """Spare the user a library's advice that does not concern this program (that PyTorch is not installed)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def guarded(action) -> int:  # type: ignore[no-untyped-def]
    """Run a command and turn its errors into texts on standard error and fixed exit codes."""
    try:
        return int(action() or 0)
    except RunError as problem:
        print(problem.report(), file=sys.stderr, flush=True)
        return problem.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_INTERNAL
    except Exception:
        traceback.print_exc()
        print(
            "jaxrl_llm stopped on an internal error (exit 70); the traceback above says where.",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_INTERNAL


__all__ = ["ConfigError", "guarded", "run"]
