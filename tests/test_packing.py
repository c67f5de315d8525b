"""Packing: rows worked by hand, budgets, whole groups, balance, shapes that no batch changes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_llm import packing
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.packing import make_batch, make_layout, pack, to_rows
from jaxrl_llm.records import Rollout


def example(**changes):
    """Two groups of two; every row ends in 9, which also pads and occurs in a prompt; the last response is not trained."""
    lengths = np.array([3, 1, 2, 2])
    mask = np.arange(3)[None, :] < lengths[:, None]
    loss_mask = mask.copy()
    loss_mask[3] = False
    made = Rollout(
        prompt_tokens=np.array([[9, 9, 9, 4], [9, 5, 9, 6]]),
        prompt_lengths=np.array([1, 3]),
        response_tokens=np.array([[7, 8, 9], [9, 9, 9], [7, 9, 9], [9, 9, 9]]),
        response_lengths=lengths,
        response_mask=mask,
        loss_mask=loss_mask,
        sampler_logprobs=np.where(mask, -1.5, 0.0),
        filtered_logprobs=None,
        end_reason=np.zeros(4, int),
        policy_step=np.zeros(4, int),
    )
    return replace(made, **changes)


def rollout(prompt_lengths, lengths, prompt_width=64, width=64, seed=0):
    """A rollout of the given lengths with random ids."""
    random = np.random.default_rng(seed)
    heads, lengths = np.asarray(prompt_lengths), np.asarray(lengths)
    within = np.arange(width) < lengths[:, None]
    return Rollout(
        prompt_tokens=random.integers(1, 99, (len(heads), prompt_width)),
        prompt_lengths=heads,
        response_tokens=random.integers(1, 99, (len(lengths), width)),
        response_lengths=lengths,
        response_mask=within,
        loss_mask=within,
        sampler_logprobs=np.zeros(within.shape),
        filtered_logprobs=None,
        end_reason=np.zeros(len(lengths), int),
        policy_step=np.zeros(len(lengths), int),
    )


ALL = np.ones(4, bool)


# The batch ---------------------------------------------------------------------------------------------------------------


def test_a_batch_worked_by_hand():
    scores = np.array([1.0, np.nan, 0.0, 2.0])
    batch = make_batch(example(), scores, np.isfinite(scores), 4)
    np.testing.assert_array_equal(
        batch.mask, [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(batch.scores, [1.0, 0.0, 0.0, 2.0])
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1])
    np.testing.assert_array_equal(batch.valid, [True, False, True, True])
    np.testing.assert_array_equal(batch.sampler_logprobs[:, 3], 0.0)
    kinds = (batch.mask.dtype, batch.sampler_logprobs.dtype, batch.group_ids.dtype)
    assert kinds == (np.bool_, np.float32, np.int32)
    with pytest.raises(ConfigError, match=r"width of 2, need at least 3"):
        make_batch(example(), scores, ALL, 2)


# Rows --------------------------------------------------------------------------------------------------------------------


def small(**changes):
    sizes = {
        "prompts": 2, "group": 2, "mini_prompts": 2, "prompt_width": 4, "response_width": 3, "shards": 1,
    }  # fmt: skip
    return make_layout(**(sizes | changes))


def test_a_row_worked_by_hand():
    """Both groups in one row: a prompt, its responses, the next group; positions go on from the prompt in every response."""
    packed, came_to = pack(small(budget=32), example())
    assert packed.tokens.shape == (1, 2, 1, 32)
    row = {name: getattr(packed, name)[0, 0, 0] for name in ("tokens", "positions", "predictors")}
    np.testing.assert_array_equal(row["tokens"][:12], [4, 7, 8, 9, 9, 5, 9, 6, 7, 9, 9, 9])
    np.testing.assert_array_equal(row["positions"][:12], [0, 1, 2, 3, 1, 0, 1, 2, 3, 4, 3, 4])
    np.testing.assert_array_equal(
        packed.view.segments[0, 0, 0][:13], [1, 2, 2, 2, 5, 6, 6, 6, 9, 9, 11, 11, 0]
    )
    np.testing.assert_array_equal(
        packed.view.prefix[0, 0, 0][:13], [1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 6, 6, 0]
    )
    np.testing.assert_array_equal(packed.targets[0, 0, 0][:9], [7, 8, 9, 9, 7, 9, 9, 9, 0])
    np.testing.assert_array_equal(row["predictors"][:8], [0, 1, 2, 0, 7, 8, 7, 10])
    np.testing.assert_array_equal(packed.rows[0, 0, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(packed.starts[0, 0, 0], [0, 3, 4, 6])
    np.testing.assert_array_equal(packed.lengths[0, 0, 0], [3, 1, 2, 2])
    assert packed.slots.tolist() == [[8, 0]] and packed.micros.tolist() == [1]
    np.testing.assert_array_equal(packed.members, [[0, 1, 2, 3]])
    assert (came_to.stored, came_to.verl, came_to.room) == (12, 16, 32)
    assert came_to.row()["packing/token_share"] == 12 / 32


def test_every_token_is_there_once_and_each_response_comes_back():
    random = np.random.default_rng(1)
    drawn = rollout(random.integers(1, 65, 12), random.integers(0, 65, 60))
    layout = make_layout(
        prompts=12, group=5, mini_prompts=6, prompt_width=64, response_width=64, shards=3, budget=500,
    )  # fmt: skip
    packed, came_to = pack(layout, drawn)
    assert came_to.split_groups == 0
    assert came_to.stored == (packed.view.segments != 0).sum()
    assert came_to.stored == drawn.prompt_lengths.sum() + drawn.response_lengths.sum()
    rows = packed.rows[packed.rows < 60]
    assert sorted(rows.tolist()) == list(range(60))
    for mini in range(2):
        inside = packed.rows[mini][packed.rows[mini] < 60]
        assert sorted(inside.tolist()) == sorted(packed.members[mini].tolist())
        for c in range(layout.micros):
            micro = jax.tree.map(lambda x, at=(mini, c): x[at], replace_counts(packed))
            back = np.asarray(to_rows(micro.targets, micro, 64))
            for place, row in enumerate(micro.rows.reshape(-1)):
                length = drawn.response_lengths[row] if row < 60 else 0
                want = drawn.response_tokens[row, :length] if row < 60 else []
                np.testing.assert_array_equal(back[place, :length], want)
                assert not back[place, length:].any()


def replace_counts(packed):
    return packed.replace(micros=packed.slots, members=packed.slots)


def test_predictors_are_the_columns_before():
    drawn = rollout([3, 9], [4, 0, 64, 1])
    packed, _ = pack(
        make_layout(
            prompts=2, group=2, mini_prompts=2, prompt_width=64, response_width=64, shards=1, budget=256,
        ),
        drawn,
    )  # fmt: skip
    tokens, segments = packed.tokens[0, 0, 0], packed.view.segments[0, 0, 0]
    for place, row in enumerate(packed.rows[0, 0, 0]):
        start, length = packed.starts[0, 0, 0, place], packed.lengths[0, 0, 0, place]
        columns = packed.predictors[0, 0, 0, start : start + length]
        head = drawn.prompt_tokens[row // 2, -1]
        want = [head, *drawn.response_tokens[row, : length - 1]] if length else []
        np.testing.assert_array_equal(tokens[columns], want)
        assert (segments[columns] != 0).all()


def test_groups_stay_whole_where_they_fit_and_a_larger_one_is_split_and_counted():
    whole = make_layout(
        prompts=16, group=5, mini_prompts=16, prompt_width=64, response_width=64, shards=1, budget=16 * 384,
    )  # fmt: skip
    assert whole.tokens == 16 * (64 + 5 * 64) and whole.responses == 80
    drawn = rollout(np.full(16, 64), np.full(80, 64))
    packed, came_to = pack(whole, drawn)
    assert packed.micros.tolist() == [1] and came_to.split_groups == 0
    assert came_to.row()["packing/token_share"] == 1.0
    tight = replace_budget(whole, 64 + 3 * 64)
    packed, came_to = pack(tight, drawn)
    assert came_to.split_groups == 16, "five responses of full length need two rows of three"
    assert came_to.stored == 16 * (2 * 64 + 5 * 64)
    assert came_to.verl == 16 * 5 * 128
    for mini_rows in packed.rows[0]:
        assert len({row // 5 for row in mini_rows.ravel() if row < 80}) <= 1


def replace_budget(layout, budget):
    names = ("prompts", "group", "mini_prompts", "prompt_width", "response_width", "shards")
    return make_layout(**{name: getattr(layout, name) for name in names}, budget=budget)


def gsm8k_like(prompts=256, group=5, seed=3):
    """Prompts of about 100 tokens and log-normal responses of about 200, cut at 1,024."""
    random = np.random.default_rng(seed)
    heads = np.clip(random.normal(100, 30, prompts).round(), 40, 256).astype(int)
    lengths = np.clip(random.lognormal(5.2, 0.5, prompts * group), 8, 1024).astype(int)
    return rollout(heads, lengths, 256, 1024)


@pytest.mark.parametrize("shards", [1, 4])
def test_rows_are_full_on_lengths_like_those_of_gsm8k(shards):
    layout = make_layout(
        prompts=256, group=5, mini_prompts=256, prompt_width=256, response_width=1024, shards=shards,
        budget=8192,
    )  # fmt: skip
    packed, came_to = pack(layout, gsm8k_like())
    assert came_to.row()["packing/token_share"] >= 0.95
    assert came_to.verl > 1.25 * came_to.stored
    loads = (packed.view.segments[0, : packed.micros[0]] != 0).sum(-1)
    assert loads.max() <= 8192 and (loads.max(1) - loads.min(1)).max() <= 0.02 * 8192


@pytest.mark.parametrize("seed", range(40))
def test_no_lengths_need_more_rows_than_there_are(seed):
    """Random layouts with random, longest and shortest trajectories; `pack` raises when first fit needs more than its bound."""
    random = np.random.default_rng(seed)
    group, shards = int(random.integers(1, 9)), int(random.choice([1, 2, 4]))
    prompts = int(random.integers(1, 9))
    way = random.choice(["budget", "micro_rows", "auto"])
    how = {"budget": {"budget": int(random.integers(80, 400))}, "micro_rows": {"micro_rows": int(random.integers(1, 12))}, "auto": {}}[way]  # fmt: skip
    layout = make_layout(
        prompts=prompts, group=group, mini_prompts=prompts, prompt_width=40, response_width=40, shards=shards,
        share=bool(random.integers(2)), **how,
    )  # fmt: skip
    shapes = set()
    for lengths in (
        random.integers(0, 41, prompts * group),
        np.full(prompts * group, 40),
        np.full(prompts * group, 1),
        np.where(random.random(prompts * group) < 0.2, 40, 1),
    ):
        packed, came_to = pack(
            layout, rollout(random.integers(1, 41, prompts), lengths, 40, 40, seed)
        )
        assert (packed.view.segments != 0).sum() == came_to.stored
        assert (packed.lengths.sum(-1) <= layout.tokens).all()
        assert came_to.room >= came_to.stored
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(packed)))
    assert len(shapes) == 1, "shapes follow from the layout alone"


def test_a_budget_below_one_trajectory_is_refused():
    with pytest.raises(ConfigError, match=r"budget of 100 .*64 \+ 64 = 128.*ppo_max_token_len"):
        make_layout(
            prompts=2, group=2, mini_prompts=2, prompt_width=64, response_width=64, shards=1, budget=100,
        )  # fmt: skip


def test_a_budget_is_never_exceeded_and_rows_are_no_longer_than_a_share():
    sizes = {
        "prompts": 64,
        "group": 8,
        "mini_prompts": 64,
        "prompt_width": 64,
        "response_width": 64,
    }
    assert make_layout(**sizes, shards=1, budget=1000).tokens == 960
    assert make_layout(**sizes, shards=1, budget=10**9).tokens == 64 * 576
    assert make_layout(**sizes, shards=8, budget=10**9).tokens == 8 * 576
    assert make_layout(**sizes, shards=1).tokens == 3 * 576 <= packing.SMALL_ROW["cpu"]
    assert make_layout(**sizes | {"prompts": 8, "mini_prompts": 8}, shards=1).tokens == 576


def test_orders_decide_which_prompts_share_a_mini_batch():
    layout = small(mini_prompts=1, passes=2)
    packed, came_to = pack(layout, example(), [np.array([1, 0]), np.array([0, 1])])
    np.testing.assert_array_equal(packed.members, [[2, 3], [0, 1], [0, 1], [2, 3]])
    assert came_to.verl == 32, "two passes"
    with pytest.raises(ConfigError, match=r"4 responses of 2 prompts, need 6 of 3"):
        pack(small(prompts=3, mini_prompts=3), example())


def test_padded_rows_take_their_full_width():
    layout = small(share=False, pad=True)
    packed, came_to = pack(layout, example())
    assert layout.tokens == 16, "two trajectories of 4 + 3, in blocks of 16"
    assert came_to.stored == 16 and came_to.room == 2 * 16
    assert packed.micros.tolist() == [2], "though 16 tokens without padding would fit one row"


def test_equal_prompts_are_separate_groups():  # F5
    twins = example(prompt_tokens=np.array([[9, 9, 9, 4]] * 2), prompt_lengths=np.array([1, 1]))
    batch = make_batch(twins, np.arange(4.0), ALL, 3)
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1])
    _, came_to = pack(small(), twins)
    assert came_to.stored == 1 + 4 + 1 + 4
