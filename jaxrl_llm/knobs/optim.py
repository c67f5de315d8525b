"""`actor.optim` and `critic.optim`: AdamW and its schedule."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class OptimKnobs:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with warm-up, schedule and global-norm clipping."""

    lr: float = operational(1e-6)
    """Peak learning rate. On resume the configured value wins over the stored one, with a line that says so."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up; the first runs at `lr / lr_warmup_steps`, not at 0."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after warm-up; cosine and linear end at `min_lr_ratio * lr` with the last optimizer step of the run."""
    min_lr_ratio: float = 0.0
    """Final share of the learning rate for cosine and linear."""
    weight_decay: float = 0.01
    """Decoupled weight decay on matrices; norms and biases are spared."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float | None = 1.0
    """Largest global norm of a gradient; `None` does not clip."""
