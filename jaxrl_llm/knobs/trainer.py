"""`trainer`: length of the run, folders, logging, checkpoints."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class TrainerKnobs:
    """What surrounds the steps."""

    seed: int | None = 1
    """Seed of every random number of the run; `None` draws one and writes it to `config.json`."""
    total_epochs: int = operational(1)
    """Passes over the training prompts."""
    total_training_steps: int | None = operational(None)
    """Steps of the run; `None` takes `total_epochs` x (rows // `train_batch_size`)."""
    critic_warmup: int = 0
    """Full steps in which only the critic learns."""
    project_name: str = operational("jaxrl_llm")
    """Parent folder of the run and W&B project."""
    experiment_name: str | None = operational(None)
    """Name of the run; `None` takes the config's file name and 8 hex digits of the identity settings."""
    run_dir: str | None = operational(None)
    """Folder of the run; `None` takes `runs/<project_name>/<experiment_name>`."""
    logger: tuple[Literal["console", "jsonl", "tensorboard", "wandb"], ...] = operational(
        ("console", "jsonl", "tensorboard")
    )
    """Where metrics go."""
    log_completions_freq: int | None = operational(10)
    """Print and keep a table of sample completions every so many steps; `None` never does."""
    log_completions_count: int = operational(4)
    """Rows of that table."""
    save_freq: int | None = operational(None)
    """Steps between checkpoints; `None` saves only at the end."""
    test_freq: int | None = operational(None)
    """Steps between validations; `None` validates only before and after training."""
    val_before_train: bool = operational(True)
    """Validate before the first step."""
    max_ckpt_to_keep: int | None = operational(2)
    """Newest checkpoints that stay; `None` keeps all."""
    resume_mode: Literal["auto", "disable", "path"] = operational("auto")
    """`auto` continues the newest verified checkpoint of the run folder; `disable` starts anew and refuses a folder that holds a
    run; `path` continues `resume_from_path`."""
    resume_from_path: str | None = operational(None)
    """Checkpoint step folder for `resume_mode="path"`."""
    on_damaged_checkpoint: Literal["fall_back", "stop"] = operational("fall_back")
    """When the newest checkpoint fails verification: take the newest one that passes, or exit 65."""
    max_bad_steps: int = operational(5)
    """Bad steps in a row (non-finite loss, gradient, logits or rewards) after which the run stops with exit 70."""
    check_replicas_freq: int | None = operational(50)
    """Steps between comparisons of the trained parameters on devices that must hold the same (also at the start and before every
    checkpoint); where they differ the run stops with exit 70. `None` never compares."""
    nnodes: int | None = operational(None)
    """Expected number of hosts; a different number is refused. `None` takes what there is."""
    n_devices_per_node: int | None = operational(None)
    """Expected devices per host; a different number is refused. `None` takes what there is."""
    compilation_cache_dir: str | None = operational("~/.cache/jaxrl_llm/xla")
    """Folder of XLA's persistent compilation cache; `None` switches it off."""
    profile_steps: tuple[int, ...] = operational(())
    """Steps of which a JAX trace goes to `<run_dir>/profile/step_<N>`."""
