"""`ref`: the frozen reference policy, loaded only when a KL term needs it."""

from dataclasses import dataclass

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class RefKnobs:
    """The policy that KL is measured against."""

    path: str | None = None
    """Weights of the reference; `None` takes `model.path`."""
    log_prob_micro_batch_size_per_device: int | None = None
    """Trajectories one device scores at once; `None` takes `rollout.log_prob_micro_batch_size_per_device`."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Bound what a device scores at once by tokens; `None` takes `rollout.log_prob_use_dynamic_bsz`."""
    log_prob_max_token_len_per_device: int | None = None
    """Most stored tokens one device scores at once; `None` takes `rollout.log_prob_max_token_len_per_device`."""
    param_offload: bool = operational(False)
    """Keep the reference in (pinned) host memory and move it to the devices only while it scores."""
