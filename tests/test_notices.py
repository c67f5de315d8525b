"""Settings without effect: one line where they were given, none where they act."""

import pytest

from jaxrl_llm.checks import check
from jaxrl_llm.config import Config, leaves, resolve
from jaxrl_llm.notices import UNUSED, notices
from tests.test_checks import config, only


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ref__path": "r"}, "ref.path not used"),
        ({"ref__param_offload": "true"}, "ref.param_offload not used: no KL"),
        ({"algorithm__kl_ctrl__type": "adaptive"}, "algorithm.kl_ctrl.type not used"),
        ({"actor__kl_loss_coef": "0.1"}, "actor.use_kl_loss is off"),
        (
            {"critic__param_offload": "true", "critic__grad_accumulation_dtype": "bfloat16"},
            "critic.param_offload, critic.grad_accumulation_dtype not used: this run has no critic",
        ),
        (
            {"algorithm__gamma": "0.9", "algorithm__lam": "0.9"},
            "algorithm.gamma, algorithm.lam not used: grpo",
        ),
        (
            {"algorithm__adv_estimator": "rloo", "algorithm__norm_adv_by_std_in_grpo": "false"},
            "the estimator is rloo",
        ),
        (
            {"actor__ppo_max_token_len_per_device": "4096"},
            "actor.ppo_max_token_len_per_device not used: actor.use_dynamic_bsz is off",
        ),
        (
            {"rollout__log_prob_max_token_len_per_device": "4096"},
            "rollout.log_prob_max_token_len_per_device not used",
        ),
        ({"trainer__test_freq": "5"}, "data.val_files is empty"),
        ({"trainer__critic_warmup": "5"}, "no critic"),
        ({"critic__path": "v"}, "critic.path not used"),
        (
            {
                "rollout__n": "1",
                "algorithm__adv_estimator": "gae",
                "rollout__do_sample": "false",
                "rollout__top_k": "5",
            },
            "do_sample is off",
        ),
        (
            {"data__filter_overlong_prompts": "true", "data__truncation": "left"},
            "data.truncation not used",
        ),
        (
            {"data__system_prompt": "s", "data__prompt_format": "plain"},
            "data.system_prompt not used",
        ),
        ({"data__plain_template": "Q {prompt}"}, "data.plain_template not used"),
        ({"reward__format_pattern": "x"}, "format is not among"),
        ({"actor__optim__min_lr_ratio": "0.1"}, "lr_scheduler_type is constant"),
        (
            {
                "actor__clip_ratio": "0.3",
                "actor__clip_ratio_low": "0.1",
                "actor__clip_ratio_high": "0.2",
            },
            "actor.clip_ratio not used",
        ),
        (
            {
                "algorithm__adv_estimator": "gae",
                "trainer__critic_warmup": "5",
                "trainer__total_training_steps": "5",
            },
            "never learns",
        ),
        ({"actor__shuffle": "true", "actor__ppo_mini_batch_size": "16"}, "one mini-batch"),
    ],
)
def test_a_setting_without_effect_gets_a_line(changes, words):
    c = config(**changes)
    assert check(c) == []
    assert words in only(notices(resolve(c)))


def test_used_settings_get_no_line():
    c = config(
        actor__use_kl_loss="true",
        actor__kl_loss_coef="0.1",
        algorithm__kl_ctrl__type="adaptive",
        algorithm__kl_ctrl__target_kl="0.2",
        ref__path="r",
        ref__param_offload="true",
        data__val_files="arithmetic:heldout:8",
        trainer__test_freq="5",
        reward__functions="gsm8k,format,length_penalty",
        reward__format_pattern="x",
        actor__optim__lr_scheduler_type="cosine",
        actor__optim__min_lr_ratio="0.1",
    )
    assert check(c) == []
    assert notices(resolve(c)) == []
    gae = config(
        algorithm__adv_estimator="gae",
        algorithm__lam="0.95",
        trainer__critic_warmup="3",
        critic__optim__lr="1e-4",
    )
    assert notices(resolve(gae)) == []


def test_the_table_of_unused_settings_names_settings():
    known = {path for path, _, _ in leaves(Config())}
    for paths, _ in UNUSED:
        assert set(paths.split()) <= known
