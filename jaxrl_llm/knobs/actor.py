"""`actor`: the policy's loss and optimizer."""

from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.knobs.algorithm import KLKind
from jaxrl_llm.knobs.marks import operational
from jaxrl_llm.knobs.optim import OptimKnobs

LossAggregation = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
    "prompt-mean",
]


@dataclass(frozen=True)
class ActorKnobs:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347), loss-side KL, entropy, batches of the update."""

    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step (x `rollout.n` trajectories)."""
    ppo_micro_batch_size_per_device: int | None = None
    """The most trajectories of full length that one device makes room for at once in the update; shorter ones share that room.
    Rows are made smaller where larger ones would stay half empty. Never changes the gradient."""
    use_dynamic_bsz: bool = False
    """Bound what a device runs at once by tokens (`ppo_max_token_len_per_device`) instead of trajectories."""
    ppo_max_token_len_per_device: int = 16384
    """With `use_dynamic_bsz`: most tokens one device runs at once in the update, counted as stored (a shared prompt once). At least
    `data.max_prompt_length` + `data.max_response_length`. Never changes the gradient."""
    ppo_epochs: int = 1
    """Passes over the batch per step."""
    shuffle: bool = False
    """Draw mini-batches of whole groups in a new order in every pass."""
    clip_ratio: float = 0.2
    """The ratio of new to old probability is clipped to [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: float | None = None
    """Lower clip distance; `None` takes `clip_ratio`."""
    clip_ratio_high: float | None = None
    """Upper clip distance (clip-higher, DAPO arXiv:2503.14476); `None` takes `clip_ratio`."""
    clip_ratio_c: float | None = 3.0
    """Dual clip: with a negative advantage the loss is at most this multiple of it (arXiv:1912.09729); `None` is off."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm`; `None` takes `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add `kl_loss_coef` x KL(policy, reference) to the loss."""
    kl_loss_coef: float = 0.001
    """Weight (with an adaptive controller: first weight) of the KL loss."""
    kl_loss_type: KLKind = "k3"
    """KL estimator in the loss: k1/kl, k2/mse, k3/low_var_kl, abs; a trailing `+` takes k2's gradient."""
    optim: OptimKnobs = field(default_factory=OptimKnobs)
    """The policy's optimizer."""
    grad_accumulation_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of the gradient's sum over micro-batches; `bfloat16` halves its memory and rounds each addition."""
    param_offload: bool = operational(False)
    """Keep the policy's weights in (pinned) host memory between uses."""
    optimizer_offload: bool = operational(False)
    """Keep the policy's moments in (pinned) host memory between updates."""
