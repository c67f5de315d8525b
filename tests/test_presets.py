"""Presets change the settings of their algorithm and nothing else, and what they give passes the checks."""

from dataclasses import replace

import pytest

from jaxrl_llm.checks import check
from jaxrl_llm.config import Config, changed, needs_critic, needs_reference, override, resolve
from jaxrl_llm.presets import PRESETS, dr_grpo, grpo, ppo, rloo


def base() -> Config:
    c = override(Config(), "model.path", "m")
    return override(c, "data.train_files", "arithmetic:train:64")


ALLOWED = {
    "algorithm.adv_estimator", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty", "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type", "actor.loss_agg_mode",
    "actor.loss_scale_factor", "critic.enable", "critic.cliprange_value", "rollout.n",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_sound_idempotent_and_touches_its_algorithm_only(name):
    c = PRESETS[name](base())
    assert check(c) == []
    assert PRESETS[name](c) == c
    assert {path for path, _, _ in changed(base(), c)} <= ALLOWED


@pytest.mark.parametrize("first", PRESETS)
@pytest.mark.parametrize("second", PRESETS)
def test_a_preset_on_top_of_a_resolved_other_one_is_sound(first, second):
    c = resolve(PRESETS[second](resolve(PRESETS[first](base()))))
    alone = resolve(PRESETS[second](base()))
    assert check(c) == []
    assert needs_critic(c) == needs_critic(alone)
    assert needs_reference(c) == needs_reference(alone)
    assert c.algorithm.adv_estimator == alone.algorithm.adv_estimator
    assert c.actor.loss_agg_mode == alone.actor.loss_agg_mode
    assert c.actor.loss_scale_factor == alone.actor.loss_scale_factor


def test_what_each_preset_means():
    p = resolve(ppo(base()))
    assert (p.algorithm.adv_estimator, p.algorithm.lam, needs_critic(p), needs_reference(p)) == (
        "gae",
        0.95,
        True,
        False,
    )
    assert ppo(base(), lam=1.0).algorithm.lam == 1.0
    g = resolve(grpo(base()))
    assert (
        g.algorithm.adv_estimator,
        g.algorithm.norm_adv_by_std_in_grpo,
        g.actor.use_kl_loss,
    ) == ("grpo", True, True)
    assert (g.actor.kl_loss_type, g.actor.kl_loss_coef, needs_critic(g)) == ("k3", 0.001, False)
    d = resolve(dr_grpo(base()))
    assert (d.algorithm.norm_adv_by_std_in_grpo, d.actor.loss_agg_mode) == (
        False,
        "seq-mean-token-sum-norm",
    )
    assert d.actor.loss_scale_factor == 512.0
    assert not needs_reference(d)
    r = resolve(rloo(base()))
    assert (r.algorithm.adv_estimator, r.algorithm.kl_penalty, r.algorithm.use_kl_in_reward) == (
        "rloo",
        "k1",
        True,
    )
    assert not r.actor.use_kl_loss


@pytest.mark.parametrize("preset", [grpo, dr_grpo, rloo])
def test_group_presets_raise_a_group_of_one_and_keep_a_larger_one(preset):
    assert preset(base()).rollout.n == 2
    assert preset(replace(base(), rollout=replace(base().rollout, n=7))).rollout.n == 7
