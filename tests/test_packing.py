"""Bucket widths and training rows, by hand-worked example."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.packing import bucket, buckets, make_rows, widths
from jaxrl_llm.records import Rollout


def example() -> Rollout:
    """Two prompts of 1 and 3 tokens, two responses each of 3, 1, 2 and 2; id 9 is end and padding, and stands in a prompt."""
    lengths = np.array([3, 1, 2, 2])
    mask = np.arange(3) < lengths[:, None]
    loss_mask = mask.copy()
    loss_mask[3] = False
    logprobs = np.array([[-1, -2, -3], [-4, 0, 0], [-5, -6, 0], [-7, -8, 0]], np.float64)
    return Rollout(
        prompt_tokens=np.array([[9, 9, 9, 4], [9, 5, 9, 6]]),
        prompt_lengths=np.array([1, 3]),
        response_tokens=np.array([[7, 8, 9], [9, 9, 9], [7, 9, 9], [9, 9, 9]]),
        response_lengths=lengths,
        response_mask=mask,
        loss_mask=loss_mask,
        sampler_logprobs=logprobs,
        filtered_logprobs=None,
        end_reason=np.zeros(4, int),
        policy_step=np.zeros(4, int),
    )


ALL = np.ones(4, bool)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (512, (16, 32, 64, 128, 256, 512)),
        (96, (24, 48, 96)),
        (24, (24,)),
        (32, (16, 32)),
        (500, (125, 250, 500)),
        (16, (16,)),
        (7, (7,)),
        (1, (1,)),
    ],
)
def test_buckets_are_halves_that_stay_at_or_above_sixteen(longest, expected):
    assert buckets(longest) == expected


def test_the_smallest_bucket_is_a_parameter():
    assert buckets(16, 4) == (4, 8, 16)
    assert buckets(12, 1) == (3, 6, 12)


def test_a_length_takes_the_smallest_width_that_holds_it():
    assert [bucket(n, (16, 32, 64)) for n in (0, 1, 16, 17, 32, 33, 64)] == [
        16,
        16,
        16,
        32,
        32,
        64,
        64,
    ]
    with pytest.raises(ConfigError, match=r"length 65 does not fit.*\[16, 32, 64\].*at least 65"):
        bucket(65, (16, 32, 64))


def test_widths_are_the_largest_or_those_of_the_longest_row():
    rollout = example()
    assert widths(rollout, (1, 2, 4), (1, 2, 4), cut=False) == (4, 4)
    assert widths(rollout, (1, 2, 4), (1, 2, 4), cut=True) == (4, 4)
    assert widths(rollout, (1, 3, 4), (1, 3, 4), cut=True) == (3, 3)
    none = replace(rollout, response_lengths=np.zeros(4, int))
    assert widths(none, (3, 4), (1, 2), cut=True) == (3, 1)
    with pytest.raises(ConfigError):
        widths(rollout, (1, 2), (4,), cut=True)


def test_rows_worked_by_hand():
    """Padding is 0 whatever id padded the rollout; the 9 inside a prompt and the 9 that ends a response are tokens."""
    scores = np.array([1.0, 0.5, 0.0, 2.0])
    batch = make_rows(example(), scores, ALL, 4, 3)
    np.testing.assert_array_equal(
        batch.tokens,
        [
            [0, 0, 0, 4, 7, 8, 9],
            [0, 0, 0, 4, 9, 0, 0],
            [0, 5, 9, 6, 7, 9, 0],
            [0, 5, 9, 6, 9, 9, 0],
        ],
    )
    np.testing.assert_array_equal(
        batch.segments,
        [
            [0, 0, 0, 1, 1, 1, 1],
            [0, 0, 0, 1, 1, 0, 0],
            [0, 1, 1, 1, 1, 1, 0],
            [0, 1, 1, 1, 1, 1, 0],
        ],
    )
    np.testing.assert_array_equal(
        batch.positions,
        [
            [0, 0, 0, 0, 1, 2, 3],
            [0, 0, 0, 0, 1, 0, 0],
            [0, 0, 1, 2, 3, 4, 0],
            [0, 0, 1, 2, 3, 4, 0],
        ],
    )
    np.testing.assert_array_equal(batch.mask, [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(batch.sampler_logprobs, example().sampler_logprobs)
    np.testing.assert_array_equal(batch.scores, scores)
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1])
    np.testing.assert_array_equal(batch.valid, ALL)
    dtypes = (
        batch.tokens.dtype,
        batch.positions.dtype,
        batch.mask.dtype,
        batch.sampler_logprobs.dtype,
    )
    assert dtypes == (np.int32, np.int32, np.bool_, np.float32)
    assert batch.old_logprobs is None and batch.advantages is None


def test_equal_prompts_are_separate_groups():  # F5
    rollout = example()
    twins = replace(
        rollout, prompt_tokens=rollout.prompt_tokens[[0, 0]], prompt_lengths=np.array([1, 1])
    )
    batch = make_rows(twins, np.arange(4.0), ALL, 4, 3)
    np.testing.assert_array_equal(batch.tokens[:, :4], [[0, 0, 0, 4]] * 4)
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1])


def test_an_invalid_row_keeps_its_tokens_and_trains_nothing():
    scores = np.array([np.nan, 0.5, 0.0, 2.0])
    whole = make_rows(example(), np.zeros(4), ALL, 4, 3)
    batch = make_rows(example(), scores, np.isfinite(scores), 4, 3)
    np.testing.assert_array_equal(batch.tokens, whole.tokens)
    np.testing.assert_array_equal(batch.segments, whole.segments)
    np.testing.assert_array_equal(batch.mask[0], [False, False, False])
    np.testing.assert_array_equal(batch.mask[1:], whole.mask[1:])
    np.testing.assert_array_equal(batch.scores, [0.0, 0.5, 0.0, 2.0])
    np.testing.assert_array_equal(batch.valid, [False, True, True, True])


@pytest.mark.parametrize("prompt_width", [3, 4, 6])
@pytest.mark.parametrize("response_width", [3, 5])
def test_width_moves_tokens_but_changes_none(prompt_width, response_width):
    batch = make_rows(example(), np.zeros(4), ALL, prompt_width, response_width)
    whole = make_rows(example(), np.zeros(4), ALL, 4, 3)
    assert batch.tokens.shape == (4, prompt_width + response_width)
    assert batch.mask.shape == batch.sampler_logprobs.shape == (4, response_width)
    for row in range(4):
        real, same = batch.segments[row] == 1, whole.segments[row] == 1
        np.testing.assert_array_equal(batch.tokens[row][real], whole.tokens[row][same])
        np.testing.assert_array_equal(batch.positions[row][real], np.arange(real.sum()))
        assert not batch.tokens[row][~real].any()
    np.testing.assert_array_equal(batch.mask[:, :3], whole.mask)
    assert not batch.mask[:, 3:].any()
    first = (batch.segments[:, prompt_width:] == 1).sum(axis=1)
    np.testing.assert_array_equal(first, example().response_lengths)


@pytest.mark.parametrize(("prompt_width", "response_width"), [(2, 3), (4, 2)])
def test_a_width_that_would_cut_tokens_off_is_refused(prompt_width, response_width):
    with pytest.raises(ConfigError, match=r"prompt .*3.* response .*3"):
        make_rows(example(), np.zeros(4), ALL, prompt_width, response_width)
