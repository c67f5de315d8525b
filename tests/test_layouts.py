"""Layouts: which uses of a batch share their rows, what decides their sizes, what draws mini-batches."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_llm import layouts, packing
from jaxrl_llm.layouts import Layouts, layouts_of, pack_all
from tests import rig, tiny

GAE = {"algorithm.adv_estimator": "gae"}
KL = {"actor.use_kl_loss": "true"}
ALL = GAE | KL
USES = ("actor", "critic", "score", "reference")
DYNAMIC = {"actor.use_dynamic_bsz": "true", "actor.ppo_max_token_len_per_device": 160}
"""The tiny run: 8 prompts of up to 16 tokens, 4 responses each of up to 24, mini-batches of 8 prompts unless set."""


def made(overrides=ALL, shards=1, attention="blocked") -> Layouts:
    return layouts_of(rig.settings(overrides), tiny.mesh(data=shards), attention)


def groups(found: Layouts) -> set[frozenset[str]]:
    """Which uses have equal layouts."""
    kinds = {getattr(found, use) for use in USES}
    return {frozenset(use for use in USES if getattr(found, use) == kind) for kind in kinds}


def apart(*alone: str) -> set[frozenset[str]]:
    """All uses alike but these, which are alike among themselves."""
    return {frozenset(alone), frozenset(USES) - frozenset(alone)}


SCORING = ("score", "reference")
SHARED = {
    "defaults": ({}, {frozenset(USES)}),
    "mini-batches": ({"actor.ppo_mini_batch_size": 4}, {frozenset(USES)}),
    "epochs": ({"actor.ppo_epochs": 3, "critic.ppo_epochs": 2}, {frozenset(USES)}),
    "everything follows the actor's rows": (
        {"actor.ppo_micro_batch_size_per_device": 2},
        {frozenset(USES)},
    ),
    "everything follows the actor's tokens": (DYNAMIC, {frozenset(USES)}),
    "rows of scoring": ({"rollout.log_prob_micro_batch_size_per_device": 2}, apart(*SCORING)),
    "tokens of scoring": (
        DYNAMIC | {"rollout.log_prob_max_token_len_per_device": 80},
        apart(*SCORING),
    ),
    "tokens instead of rows in scoring": (
        {
            "rollout.log_prob_use_dynamic_bsz": "true",
            "rollout.log_prob_max_token_len_per_device": 80,
        },
        apart(*SCORING),
    ),
    "rows of the reference": ({"ref.log_prob_micro_batch_size_per_device": 2}, apart("reference")),
    "tokens of the reference": (
        DYNAMIC | {"ref.log_prob_max_token_len_per_device": 80},
        apart("reference"),
    ),
    "rows of the critic": ({"critic.ppo_micro_batch_size_per_device": 2}, apart("critic")),
    "tokens of the critic": (
        {"critic.use_dynamic_bsz": "true", "critic.ppo_max_token_len_per_device": 80},
        apart("critic"),
    ),
    "mini-batches of the critic": ({"critic.ppo_mini_batch_size": 2}, apart("critic")),
    "shuffle with other epochs": (
        {
            "actor.shuffle": "true",
            "actor.ppo_mini_batch_size": 4,
            "actor.ppo_epochs": 2,
            "critic.ppo_epochs": 3,
        },
        apart("critic"),
    ),
}


@pytest.mark.parametrize("settings", SHARED)
def test_uses_share_rows_unless_their_settings_differ(settings):
    overrides, expected = SHARED[settings]
    assert groups(made(ALL | overrides)) == expected


def test_a_use_that_does_not_exist_needs_no_rows_of_its_own():
    """The critic's and the reference's sizes do not matter without a critic and a reference."""
    sizes = {"ref.log_prob_micro_batch_size_per_device": 2}
    grpo = {"algorithm.adv_estimator": "grpo"}
    assert groups(made(grpo | sizes)) == {frozenset(USES)}
    assert groups(made(grpo | KL | sizes)) == apart("reference")


@pytest.mark.parametrize(
    "unused",
    [
        {
            "rollout.log_prob_max_token_len_per_device": 80,
            "critic.ppo_max_token_len_per_device": 90,
        },
        DYNAMIC | {"ref.log_prob_micro_batch_size_per_device": 2},
    ],
)
def test_a_bound_that_does_not_hold_needs_no_rows_of_its_own(unused):
    """Tokens without dynamic batches, and trajectories with them."""
    assert groups(made(ALL | unused)) == {frozenset(USES)}


def test_scoring_with_sizes_of_its_own_takes_the_whole_batch_at_once():
    small = {"actor.ppo_mini_batch_size": 2, "actor.shuffle": "true", "actor.ppo_epochs": 2}
    found = made(small | KL | {"rollout.log_prob_micro_batch_size_per_device": 3})
    assert (found.actor.mini_prompts, found.actor.passes, found.actor.shuffle) == (2, 2, True)
    assert (found.score.mini_prompts, found.score.passes, found.score.shuffle) == (8, 1, False)
    assert found.score == found.reference
    plain = made(small)
    assert plain.score == plain.actor, "without them the policy's rows, in the order of a pass"


def test_sizes_worked_by_hand():
    """Rows in blocks of 16: room for at most so many trajectories of 24 behind prompts of 16, or the budget."""
    rows = made({"actor.ppo_micro_batch_size_per_device": 3}).actor
    assert rows.block == 16 and rows.tokens == 96, "16 + 3 x 24 = 88"
    assert made({"actor.ppo_micro_batch_size_per_device": 9}).actor.tokens == 112, "one group"
    own = {"model.use_prefix_sharing": "false", "actor.ppo_micro_batch_size_per_device": 3}
    assert made(own).actor.tokens == 128, "3 x 40 = 120"
    assert made(DYNAMIC).actor.tokens == 160
    assert made(DYNAMIC | {"actor.ppo_max_token_len_per_device": 175}).actor.tokens == 160
    assert made(DYNAMIC | {"actor.ppo_max_token_len_per_device": 99999}).actor.tokens == 896
    assert made({}).actor.tokens == 112, "one group of 16 + 4 x 24"
    assert made(DYNAMIC, attention="flash").actor.tokens == 128, "blocks of 128"


@pytest.mark.parametrize("group", [1, 5])
def test_rows_hold_a_trajectory_however_long_it_is(group):
    """Longer than rows are made without a setting; a bound of one trajectory gives the same."""
    long = max(packing.SMALL_ROW["cpu"], packing.SMALL_ROW_DEFAULT)
    sizes = {"prompts": 16, "mini_prompts": 16, "group": group, "shards": 1}
    sizes |= {"prompt_width": 512, "response_width": long}
    found = packing.make_layout(**sizes)
    assert found.tokens == long + 512 == packing.make_layout(**sizes, micro_rows=1).tokens


def test_settings_reach_every_layout():
    plain = made()
    assert all(getattr(plain, use).share and not getattr(plain, use).pad for use in USES)
    other = made(ALL | {"model.use_prefix_sharing": "false", "model.use_remove_padding": "false"})
    assert all(getattr(other, use).pad and not getattr(other, use).share for use in USES)
    spread = made(shards=4)
    assert all(getattr(spread, use).shards == 4 for use in USES)
    assert made(attention="flash").reference.attention == "flash"


# Packing all of them -----------------------------------------------------------------------------------------------------


def rollout():
    """A batch of the tiny run."""
    return tiny.ragged(groups=8, group=4, prompt=16, response=24)[0]


def order(found: Layouts, use: str = "actor", *, seed: int = 0, step: int = 1, batch=None):
    """The prompts of every mini-batch `[I mini_prompts]`, in the order of the optimizer steps."""
    packs, _ = pack_all(found, batch or rollout(), tiny.mesh(), seed=seed, step=step)
    members = np.asarray(packs[getattr(found, use)].members)
    assert (members.reshape(len(members), -1, 4) % 4 == np.arange(4)).all(), "whole groups"
    return (members[:, ::4] // 4).tolist()


SHUFFLED = {"actor.shuffle": "true", "actor.ppo_mini_batch_size": 4}


def test_without_shuffle_mini_batches_come_in_order():
    found = made({"actor.ppo_mini_batch_size": 4, "actor.ppo_epochs": 2})
    assert order(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("epochs", [1, 2])
def test_orders_follow_from_seed_and_step_and_nothing_else(epochs):
    found = made(SHUFFLED | {"actor.ppo_epochs": epochs})
    drawn = order(found)
    passes = np.reshape(drawn, (epochs, 8))
    assert (np.sort(passes) == np.arange(8)).all()
    assert len({tuple(one) for one in passes.tolist()}) == epochs, "every pass its own"
    assert passes[0].tolist() != list(range(8))
    np.random.default_rng(5).random(9)
    other = tiny.ragged(groups=8, group=4, prompt=3, response=5)[0]
    other = replace(
        rollout(), prompt_lengths=other.prompt_lengths, response_lengths=other.response_lengths
    )
    assert drawn == order(found) == order(found, batch=other)
    tight = made(SHUFFLED | {"actor.ppo_epochs": epochs} | DYNAMIC)
    assert drawn == order(tight), "however the rows are filled"
    assert drawn != order(found, seed=1) and drawn != order(found, step=2)
    assert order(found, seed=1) != order(found, step=2)


def test_a_critic_with_mini_batches_of_its_own():
    """It learns from its own mini-batches, drawn in the policy's order as far as both have passes."""
    sizes = {"critic.ppo_mini_batch_size": 2, "critic.ppo_epochs": 3}
    found = made(GAE | SHUFFLED | {"actor.ppo_epochs": 2} | sizes)
    assert (found.critic.mini_batches, found.critic.passes) == (4, 3)
    policy, critic = order(found), order(found, "critic")
    assert np.shape(policy) == (4, 4) and np.shape(critic) == (12, 2)
    assert np.ravel(policy).tolist() == np.ravel(critic)[:16].tolist()
    plain = made(GAE | {"actor.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 8})
    assert order(plain, "critic") == [list(range(8))]
    assert plain.score == plain.actor != plain.critic


def test_equal_layouts_are_packed_once_and_the_metrics_are_the_policys(monkeypatch):
    packed = []
    pack = packing.pack

    def counting(layout, *rest):
        packed.append(layout)
        return pack(layout, *rest)

    monkeypatch.setattr(layouts.packing, "pack", counting)
    found = made(ALL)
    packs, row = pack_all(found, rollout(), tiny.mesh(), seed=0, step=1)
    assert packed == [found.actor] and list(packs) == packed
    assert row == pack(found.actor, rollout())[1].row()
    packed.clear()
    found = made(ALL | {"rollout.log_prob_micro_batch_size_per_device": 2})
    packs, row = pack_all(found, rollout(), tiny.mesh(), seed=0, step=1)
    assert packed == [found.actor, found.score] and set(packs) == set(packed)
    assert row == pack(found.actor, rollout())[1].row()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(packs[found.score]))
