"""Settings that were given and that a run cannot use without being wrong for it: one line each, never silence.

Left out on purpose: contradictions, which are refused (`jaxrl_llm.checks`), and settings at their defaults.
"""

from collections.abc import Callable

from jaxrl_llm.config import Config, needs_critic, needs_reference, resolve, value_at


def notices(config: Config) -> list[str]:
    """One line for every setting that was given and that this (resolved) run cannot use without being wrong for it."""
    c, plain = config, resolve(Config())
    lines = []
    for paths, why in UNUSED:
        reason = why(c)
        given = [path for path in paths.split() if value_at(c, path) != value_at(plain, path)]
        if reason and given:
            lines.append(f"{', '.join(given)} not used: {reason}")
    if not needs_reference(c) and c.ref.path not in (None, c.model.path):
        lines.append("ref.path not used: no KL term is on, so no reference is loaded")
    if not needs_critic(c) and c.critic.path not in (None, c.model.path):
        lines.append("critic.path not used: this run has no critic")
    if c.actor.clip_ratio not in (
        c.actor.clip_ratio_low,
        c.actor.clip_ratio_high,
        0.2,
    ) and None not in (
        c.actor.clip_ratio_low,
        c.actor.clip_ratio_high,
    ):
        lines.append("actor.clip_ratio not used: clip_ratio_low and clip_ratio_high are both set")
    steps = c.trainer.total_training_steps
    if needs_critic(c) and steps is not None and c.trainer.critic_warmup >= steps:
        lines.append(
            f"trainer.critic_warmup = {c.trainer.critic_warmup} covers all {steps} steps: the policy never learns"
        )
    return lines


Why = Callable[[Config], str | bool]

UNUSED: tuple[tuple[str, Why], ...] = (
    (
        "ref.param_offload algorithm.kl_ctrl.type",
        lambda c: not needs_reference(c) and "no KL term is on, so no reference is loaded",
    ),
    (
        "algorithm.kl_penalty algorithm.kl_ctrl.kl_coef",
        lambda c: not c.algorithm.use_kl_in_reward and "algorithm.use_kl_in_reward is off",
    ),
    (
        "actor.kl_loss_coef actor.kl_loss_type",
        lambda c: not c.actor.use_kl_loss and "actor.use_kl_loss is off",
    ),
    (
        "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon",
        lambda c: c.algorithm.kl_ctrl.type == "fixed" and "algorithm.kl_ctrl.type is fixed",
    ),
    (
        "algorithm.gamma algorithm.lam",
        lambda c: (
            c.algorithm.adv_estimator != "gae" and f"{c.algorithm.adv_estimator} discounts nothing"
        ),
    ),
    (
        "algorithm.norm_adv_by_std_in_grpo algorithm.group_eps",
        lambda c: (
            c.algorithm.adv_estimator != "grpo" and f"the estimator is {c.algorithm.adv_estimator}"
        ),
    ),
    (
        "critic.optim.lr critic.optim.lr_warmup_steps critic.optim.lr_scheduler_type critic.optim.weight_decay "
        "critic.optim.betas critic.optim.clip_grad critic.cliprange_value critic.loss_agg_mode critic.param_offload "
        "critic.optimizer_offload critic.grad_accumulation_dtype trainer.critic_warmup",
        lambda c: not needs_critic(c) and "this run has no critic",
    ),
    (
        "trainer.test_freq validation.n data.val_max_samples",
        lambda c: not c.data.val_files and "data.val_files is empty",
    ),
    (
        "rollout.temperature rollout.top_k rollout.top_p",
        lambda c: not c.rollout.do_sample and "rollout.do_sample is off",
    ),
    (
        "data.truncation",
        lambda c: (
            c.data.filter_overlong_prompts
            and "data.filter_overlong_prompts drops long prompts first"
        ),
    ),
    (
        "data.plain_template",
        lambda c: c.data.prompt_format == "chat" and "data.prompt_format is chat",
    ),
    (
        "data.system_prompt data.fold_system_prompt",
        lambda c: c.data.prompt_format == "plain" and "data.prompt_format is plain",
    ),
    ("data.max_bad_rows_share", lambda c: c.data.bad_rows == "error" and "data.bad_rows is error"),
    (
        "reward.gsm8k_method",
        lambda c: "gsm8k" not in c.reward.functions and "gsm8k is not among reward.functions",
    ),
    (
        "reward.format_pattern",
        lambda c: "format" not in c.reward.functions and "format is not among reward.functions",
    ),
    (
        "reward.length_penalty_per_token",
        lambda c: (
            "length_penalty" not in c.reward.functions
            and "length_penalty is not among reward.functions"
        ),
    ),
    (
        "actor.optim.min_lr_ratio",
        lambda c: (
            c.actor.optim.lr_scheduler_type == "constant"
            and "actor.optim.lr_scheduler_type is constant"
        ),
    ),
    (
        "actor.shuffle",
        lambda c: (
            c.actor.ppo_mini_batch_size == c.data.train_batch_size
            and "one mini-batch holds the whole batch"
        ),
    ),
    (
        "actor.ppo_micro_batch_size_per_device",
        lambda c: c.actor.use_dynamic_bsz and "actor.use_dynamic_bsz bounds tokens instead",
    ),
    (
        "actor.ppo_max_token_len_per_device",
        lambda c: not c.actor.use_dynamic_bsz and "actor.use_dynamic_bsz is off",
    ),
    (
        "critic.ppo_max_token_len_per_device",
        lambda c: (
            needs_critic(c)
            and not c.critic.use_dynamic_bsz
            and c.critic.ppo_max_token_len_per_device != c.actor.ppo_max_token_len_per_device
            and "critic.use_dynamic_bsz is off"
        ),
    ),
    (
        "rollout.log_prob_max_token_len_per_device",
        lambda c: (
            not c.rollout.log_prob_use_dynamic_bsz
            and c.rollout.log_prob_max_token_len_per_device != c.actor.ppo_max_token_len_per_device
            and "rollout.log_prob_use_dynamic_bsz is off"
        ),
    ),
    (
        "ref.log_prob_max_token_len_per_device",
        lambda c: (
            not c.ref.log_prob_use_dynamic_bsz
            and c.ref.log_prob_max_token_len_per_device
            != c.rollout.log_prob_max_token_len_per_device
            and "ref.log_prob_use_dynamic_bsz is off"
        ),
    ),
    (
        "trainer.log_completions_count",
        lambda c: c.trainer.log_completions_freq is None and "trainer.log_completions_freq is none",
    ),
    (
        "trainer.total_epochs",
        lambda c: (
            c.trainer.total_training_steps is not None and "trainer.total_training_steps is set"
        ),
    ),
)
"""Settings, and when and why a run does not use them; a line appears only where they differ from their defaults."""
