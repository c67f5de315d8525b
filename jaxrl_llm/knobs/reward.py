"""`reward`: how a response becomes a number."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class RewardKnobs:
    """Reward functions, their weights, and the limits of the processes that run them."""

    functions: tuple[str, ...] = ("gsm8k",)
    """Names from the reward table (`gsm8k`, `math`, `format`, `length_penalty`) or `FILE.py:FUNCTION`; the first one is the
    correctness reward that validation reports as `acc`."""
    weights: tuple[float, ...] | None = None
    """One weight per function; `None` means 1 each. A function that abstains (`None`) adds nothing."""
    gsm8k_method: Literal["strict", "flexible"] = "strict"
    """`strict` pays only answers after `####`; `flexible` takes the last number of the response."""
    format_pattern: str = r"####\s*\S+"
    """Regular expression that `format` looks for; found pays 1, else 0."""
    length_penalty_per_token: float = 0.001
    """`length_penalty` pays minus this much for every response token."""
    clip_min: float | None = None
    """Lower bound of the summed reward; `None` leaves it open."""
    clip_max: float | None = None
    """Upper bound of the summed reward; `None` leaves it open."""
    timeout_s: float = 10.0
    """Wall-clock seconds one call may take before its worker is killed and the sample counts as failed."""
    memory_limit_mb: int = 2048
    """Address space of one reward worker in MB."""
    num_workers: int | None = operational(None)
    """Reward processes; `None` takes half the CPU cores, at least 1."""
    max_failed_share: float = 0.5
    """Share of failed reward calls in a batch above which the batch counts as broken; three broken batches in a row stop the
    run with the first traceback."""
