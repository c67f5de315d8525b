"""`data`: which prompts are read, how they become ids, and in what order."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class DataKnobs:
    """Prompt files, limits and batch size. Batch sizes count prompts; trajectories are prompts x `rollout.n`."""

    train_files: tuple[str, ...] = ()
    """Files of training prompts: `.jsonl` or `.parquet`; `arithmetic:SPLIT:COUNT` for the generated task; `hub:ID:SPLIT`
    for a Hugging Face dataset. `~` and `$VARIABLES` are expanded. Required."""
    val_files: tuple[str, ...] = ()
    """Held-out prompts for validation, in the same forms; empty switches validation off."""
    train_batch_size: int = 1024
    """Prompts per training step."""
    val_batch_size: int | None = None
    """Prompts decoded at once in validation; `None` takes `train_batch_size`."""
    max_prompt_length: int = 512
    """Longest prompt in tokens, measured on exactly the ids that are rolled out."""
    max_response_length: int = 512
    """Most response tokens per sample, the stop token included."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length` at load, counted and printed."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt over the limit that was not filtered: refuse the row by name, or cut ids at the left, right or
    in the middle of the user's text (role markers stay)."""
    shuffle: bool = True
    """Draw a new order of the training prompts in every epoch, from the seed alone."""
    seed: int | None = None
    """Seed of the data order; `None` takes `trainer.seed`."""
    train_max_samples: int | None = None
    """Use the first so many training rows."""
    val_max_samples: int | None = None
    """Use the first so many validation rows."""
    prompt_format: Literal["chat", "plain"] = "chat"
    """`chat` renders the tokenizer's chat template; `plain` puts the text into `plain_template` and adds one BOS where the
    tokenizer has one."""
    plain_template: str = "{prompt}"
    """Text around a prompt in plain format; must contain `{prompt}`."""
    system_prompt: str | None = None
    """System message put before every prompt that has none (chat format)."""
    fold_system_prompt: bool = False
    """Put the system message at the head of the first user turn, for templates that refuse a system role."""
    instruction: str = ""
    """Text appended to every question read from a plain question/answer file (not to ready-made chat prompts), after one blank."""
    bad_rows: Literal["error", "skip"] = "error"
    """Broken rows (bad JSON, missing or empty fields): stop with file and line, or skip and count them."""
    max_bad_rows_share: float = 0.01
    """With `bad_rows="skip"`: the largest share of skipped rows that is still accepted."""
    exclude_ids: tuple[str, ...] = ()
    """Row ids (`FILE_STEM:LINE`, counted from 1) that are left out, for known label errors."""
    num_workers: int = operational(0)
    """Grain worker threads that prepare batches ahead of the step; 0 prepares them in the loop. Never changes the order."""
