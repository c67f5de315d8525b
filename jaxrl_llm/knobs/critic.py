"""`critic`: the value network of PPO."""

from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.knobs.actor import LossAggregation
from jaxrl_llm.knobs.marks import operational
from jaxrl_llm.knobs.model import Remat
from jaxrl_llm.knobs.optim import OptimKnobs


@dataclass(frozen=True)
class CriticKnobs:
    """A second network with a scalar head; trained on clipped squared error."""

    enable: bool | None = None
    """`None` means: exactly when the advantage estimator needs values (`gae`)."""
    path: str | None = None
    """Weights of the critic's trunk; `None` takes `model.path`. The value head starts at zero."""
    enable_gradient_checkpointing: bool | Remat | None = None
    """`full` (true), `dots`, or false for nothing; `None` takes `model.enable_gradient_checkpointing`."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step; `None` takes the actor's."""
    ppo_micro_batch_size_per_device: int | None = None
    """Trajectories one device runs at once, in the update and for values; `None` takes the actor's."""
    use_dynamic_bsz: bool | None = None
    """Bound what a device runs at once by tokens; `None` takes the actor's."""
    ppo_max_token_len_per_device: int | None = None
    """Most stored tokens one device runs at once; `None` takes the actor's."""
    ppo_epochs: int | None = None
    """Passes over the batch; `None` takes the actor's."""
    cliprange_value: float | None = 0.5
    """Values may move this far from their old ones before the loss takes the worse error; `None` is off."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token value losses become one number."""
    optim: OptimKnobs = field(default_factory=lambda: OptimKnobs(lr=1e-5))
    """The critic's optimizer."""
    grad_accumulation_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of the gradient's sum over micro-batches; `bfloat16` halves its memory and rounds each addition."""
    param_offload: bool = operational(False)
    """Keep the critic's weights in (pinned) host memory between uses."""
    optimizer_offload: bool = operational(False)
    """Keep the critic's moments in (pinned) host memory between updates."""
