"""`train`: check the settings, then load JAX and run the trainer."""

import os
import sys
import traceback

from jaxrl_llm import cli
from jaxrl_llm.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, ConfigError, RunError

OUT_OF_MEMORY = """Out of device memory (the sizes stand in the message above). What to turn, in this order:
  in an update:   actor.ppo_micro_batch_size_per_device (and the critic's) down, model.enable_gradient_checkpointing=full,
                  actor.grad_accumulation_dtype=bfloat16
  while scoring:  rollout.log_prob_micro_batch_size_per_device and ref.log_prob_micro_batch_size_per_device down
  while decoding: rollout.max_num_seqs or gpu_memory_utilization down, rollout.tensor_model_parallel_size up,
                  actor.optimizer_offload and param_offload (and the critic's) on
  anywhere:       mesh.fsdp up, data.max_response_length down; python -m jaxrl_llm plan says what each would free. Finished checkpoints are untouched; the same command continues."""


def run(words: list[str], prog: str) -> int:
    """Train from a command line; returns the exit code (0, 64, 65, 70 or 75)."""
    return guarded(lambda: _train(words, prog))


def _train(words: list[str], prog: str) -> int:
    if cli.wants_help(words, prog):
        return 0
    config, drawn = cli.read_run(words, prog)
    quiet_libraries()
    from jaxrl_llm import trainer

    return trainer.train(config, drawn_seed=drawn)


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
        if "RESOURCE_EXHAUSTED" in str(problem):
            print(OUT_OF_MEMORY, file=sys.stderr, flush=True)
        return problem.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_INTERNAL
    except Exception as problem:
        traceback.print_exc()
        if "RESOURCE_EXHAUSTED" in str(problem):
            print(OUT_OF_MEMORY, file=sys.stderr, flush=True)
        print(
            "jaxrl_llm stopped on an internal error (exit 70); the traceback above says where.",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_INTERNAL


__all__ = ["ConfigError", "guarded", "run"]
