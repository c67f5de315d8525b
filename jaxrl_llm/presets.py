"""Named algorithms as functions from a configuration to one that differs in their settings only; standard library only.

Use in a config file: `get_config = lambda: presets.rloo(base_config())`.

Left out on purpose: batch sizes, learning rates and models, which belong to a run and not to an algorithm.
"""

from collections.abc import Callable
from dataclasses import replace

from jaxrl_llm.config import Config


def ppo(c: Config, lam: float = 0.95) -> Config:
    """PPO with a critic: GAE, clipped values, no KL (arXiv:1707.06347)."""
    return replace(
        c,
        algorithm=replace(c.algorithm, adv_estimator="gae", lam=lam, use_kl_in_reward=False),
        actor=replace(
            c.actor, use_kl_loss=False, loss_agg_mode="token-mean", loss_scale_factor=None
        ),
        critic=replace(c.critic, enable=None, cliprange_value=0.5),
    )


def grpo(c: Config) -> Config:
    """GRPO: group-normalised advantages, k3 KL in the loss (arXiv:2402.03300)."""
    return replace(
        c,
        algorithm=replace(
            c.algorithm, adv_estimator="grpo", norm_adv_by_std_in_grpo=True, use_kl_in_reward=False
        ),
        actor=replace(
            c.actor,
            use_kl_loss=True,
            kl_loss_coef=0.001,
            kl_loss_type="k3",
            loss_agg_mode="token-mean",
            loss_scale_factor=None,
        ),
        critic=replace(c.critic, enable=None),
        rollout=replace(c.rollout, n=max(c.rollout.n, 2)),
    )


def dr_grpo(c: Config) -> Config:
    """Dr.GRPO: no division by the group's deviation, a constant length divisor, no KL (arXiv:2503.20783)."""
    return replace(
        c,
        algorithm=replace(
            c.algorithm, adv_estimator="grpo", norm_adv_by_std_in_grpo=False, use_kl_in_reward=False
        ),
        actor=replace(c.actor, use_kl_loss=False, loss_agg_mode="seq-mean-token-sum-norm"),
        critic=replace(c.critic, enable=None),
        rollout=replace(c.rollout, n=max(c.rollout.n, 2)),
    )


def rloo(c: Config) -> Config:
    """RLOO: leave-one-out baseline, k1 KL inside the reward (arXiv:2402.14740)."""
    return replace(
        c,
        algorithm=replace(
            c.algorithm, adv_estimator="rloo", use_kl_in_reward=True, kl_penalty="k1"
        ),
        actor=replace(
            c.actor, use_kl_loss=False, loss_agg_mode="token-mean", loss_scale_factor=None
        ),
        critic=replace(c.critic, enable=None),
        rollout=replace(c.rollout, n=max(c.rollout.n, 2)),
    )


PRESETS: dict[str, Callable[[Config], Config]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
