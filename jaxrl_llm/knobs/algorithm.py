"""`algorithm`: how rewards become advantages."""

from dataclasses import dataclass, field
from typing import Literal

KLKind = Literal[
    "k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "kl", "mse", "low_var_kl", "kl+", "low_var_kl+"
]


@dataclass(frozen=True)
class KLControlKnobs:
    """Controller of the KL coefficient (Ziegler et al. 2019, arXiv:1909.08593)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the coefficient so that the measured KL approaches `target_kl`, wherever KL acts."""
    kl_coef: float = 0.001
    """Coefficient (`adaptive`: first coefficient) of the KL penalty inside the reward."""
    target_kl: float = 0.1
    """KL per token, in nats, that `adaptive` aims at."""
    horizon: int = 10000
    """Trajectories over which `adaptive` corrects a proportional error."""


@dataclass(frozen=True)
class AlgorithmKnobs:
    """Advantage estimator and reward-side KL."""

    adv_estimator: Literal["gae", "grpo", "rloo"] = "gae"
    """`gae` needs a critic; `grpo` and `rloo` compare the `rollout.n` samples of a prompt."""
    gamma: float = 1.0
    """Discount per token (`gae`)."""
    lam: float = 1.0
    """GAE lambda: 1 is the Monte-Carlo return minus the value, smaller leans on the critic."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group-relative advantages by the group's standard deviation; off is Dr.GRPO (arXiv:2503.20783)."""
    group_eps: float = 1e-6
    """Added to the group's standard deviation (`grpo`)."""
    use_kl_in_reward: bool = False
    """Subtract `kl_ctrl.kl_coef` x KL(policy, reference) from every token's reward before advantages."""
    kl_penalty: KLKind = "k1"
    """KL estimator inside the reward: k1/kl, k2/mse, k3/low_var_kl, abs."""
    kl_ctrl: KLControlKnobs = field(default_factory=KLControlKnobs)
    """Controller of the KL coefficient."""
