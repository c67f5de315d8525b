"""Which sample runs where: the scheduler alone, driven by made-up lengths."""

import numpy as np
import pytest

from jaxrl_llm.rollout import queue

LIMIT = 1024


def long_tailed(seed, count=512, spread=0.6):
    """Log-normal lengths of median `LIMIT / 8`, cut at the limit."""
    drawn = np.random.default_rng(seed).normal(np.log(LIMIT / 8), spread, count)
    return np.clip(np.exp(drawn), 1, LIMIT).astype(int)


def drive(schedule, lengths, chunk=32):
    """Run the schedule as the engine does; returns slot-steps, the prompts in the order of their prefill, and the steps of
    the longest shard, chunk by chunk."""
    left, slot_steps, read, lanes_of = np.zeros(schedule.layout.lanes, int), 0, [], {}
    in_bank, finished, generated, wall, shards = {}, 0, 0, 0, schedule.layout.shards
    while True:
        for fresh, units in schedule.fill():
            read.extend(fresh)
            share, per_bank = schedule.layout.share, schedule.layout.bank // schedule.layout.shards
            in_bank.update({schedule.places[prompt]: prompt for prompt in fresh})
            for lane in (unit * share + i for unit in units for i in range(share)):
                row = int(schedule.rows[lane])
                assert row not in lanes_of, "a sample began twice"
                place = schedule.places[row // schedule.n]
                assert in_bank[place] == row // schedule.n, "its prompt is no longer in the bank"
                assert place // per_bank == lane * schedule.layout.shards // len(left)
                lanes_of[row], left[lane] = lane, lengths[row]
        if (lanes := schedule.narrower()) is not None:
            before = schedule.active.sum()
            schedule.narrow(lanes)
            assert schedule.active.sum() == before
            left = np.take_along_axis(
                left.reshape(shards, -1), lanes.reshape(shards, -1), 1
            ).ravel()
        enough = schedule.enough()
        most = min(chunk, schedule.patience(finished, generated) or chunk)
        parts, longest = left.reshape(shards, -1), 0
        for shard, part in enumerate(parts):
            steps = 0
            while steps < most and (part > 0).sum() > enough[shard]:
                generated += int((part > 0).sum())
                part[:] = np.maximum(part - 1, 0)
                steps += 1
            slot_steps += steps * len(part)
            longest = max(longest, steps)
        assert longest, "a chunk without a step: the loop would never end"
        wall += longest
        over = schedule.active & (left == 0)
        finished += int(over.sum())
        schedule.finish(over)
        if not schedule.active.any() and not schedule.waiting:
            assert sorted(lanes_of) == list(range(len(lengths)))
            return slot_steps, read, wall


def make(prompts, n, allowed, shards=1, prompt_width=512):
    layout = queue.make_layout(
        prompts, n, max_num_seqs=allowed, shards=shards, prompt_width=prompt_width
    )
    return queue.Schedule(layout, prompts, n)


@pytest.mark.parametrize("spread", [0.5, 0.6, 0.8])
def test_slots_are_used_on_a_long_tailed_queue(spread):
    """64 slots, 64 prompts of 8: at least 0.90, where batches of 64 that wait for their longest reach about 0.3."""
    used, static = [], []
    for seed in range(5):
        lengths = long_tailed(seed, spread=spread)
        slot_steps, read, _ = drive(make(64, 8, 64), lengths)
        assert read == list(range(64))
        used.append(lengths.sum() / slot_steps)
        static.append(lengths.sum() / (64 * lengths.reshape(8, 64).max(axis=1).sum()))
    assert np.mean(used) >= 0.90
    assert np.mean(static) < 0.4


@pytest.mark.parametrize(
    ("prompts", "n", "allowed", "shards"),
    [(5, 3, None, 1), (5, 3, 4, 1), (7, 1, 3, 1), (3, 8, 1, 1), (9, 4, 20, 4), (40, 8, 100, 4), (1, 1, None, 8)],
)  # fmt: skip
def test_every_sample_runs_once_and_every_prompt_is_read_once(prompts, n, allowed, shards):
    schedule = make(prompts, n, allowed, shards, prompt_width=4096)
    assert schedule.layout.bank == min(2 * shards, -(-prompts // shards) * shards)
    lengths = np.random.default_rng(0).integers(1, 90, prompts * n)
    _, read, _ = drive(schedule, lengths)
    assert read == list(range(prompts))


def test_a_group_shares_a_unit_when_everything_fits():
    schedule = make(6, 4, 24)
    assert (schedule.layout.units, schedule.layout.share, schedule.layout.bank) == (6, 4, 6)
    assert list(schedule.fill()) == [(list(range(6)), [0, 1, 2, 3, 4, 5])]
    np.testing.assert_array_equal(schedule.rows, np.arange(24))
    assert not schedule.waiting and list(schedule.fill()) == []


def test_free_slots_take_the_next_samples_in_order():
    schedule = make(4, 2, 3)
    assert list(schedule.fill()) == [(list(range(4)), [0, 1, 2])]
    schedule.finish(np.array([False, True, True]))
    assert list(schedule.fill()) == [([], [1, 2])]
    np.testing.assert_array_equal(schedule.rows, [0, 3, 4])
    assert [schedule.places[row // 2] for row in schedule.rows] == [0, 1, 2]


def test_a_chunk_ends_when_a_sixteenth_is_free_and_samples_wait():
    schedule = make(64, 8, 64)
    list(schedule.fill())
    assert schedule.enough() == 60
    few = make(4, 2, 3)
    list(few.fill())
    assert few.enough() == 2


def test_decoding_narrows_to_the_active_slots_once_the_queue_is_empty():
    schedule = make(8, 8, None)
    list(schedule.fill())
    assert queue.widths(schedule.layout) == [64, 32, 8]
    assert schedule.enough() == 32 and schedule.narrower() is None
    schedule.finish(np.arange(64) % 2 == 0)
    lanes = schedule.narrower()
    np.testing.assert_array_equal(lanes, np.arange(1, 64, 2))
    schedule.narrow(lanes)
    np.testing.assert_array_equal(schedule.rows, np.arange(1, 64, 2))
    assert schedule.enough() == 8 and schedule.narrower() is None
    schedule.finish(np.arange(32) >= 5)
    lanes = schedule.narrower()
    assert len(lanes) == 8 and lanes[:5].tolist() == [0, 1, 2, 3, 4]
    schedule.narrow(lanes)
    assert schedule.enough() == 0 and schedule.active.sum() == 5


@pytest.mark.parametrize(
    ("needed", "limit", "expected"),
    [(1, 1024, 64), (64, 1024, 64), (65, 1024, 128), (129, 1024, 256), (600, 1000, 1000), (1, 10, 10)],
)  # fmt: skip
def test_columns_double_up_to_the_limit(needed, limit, expected):
    assert queue.columns(needed, limit) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(1024, 512), (1100, 1024), (1000, 512), (65, 64), (64, 0), (10, 0)]
)
def test_the_last_growth_starts_from_the_columns_before(limit, expected):
    assert queue.previous_columns(limit) == expected
    if expected:
        assert queue.columns(expected, limit) == expected
        assert queue.columns(expected + 1, limit) == limit


# Several shards ----------------------------------------------------------------------------------------------------------


def test_prompts_are_dealt_to_the_shard_with_the_least_to_do():
    """Five prompts of two samples on two shards of two lanes: two rounds of at most two prompts per shard."""
    schedule = make(5, 2, 4, shards=2)
    assert (schedule.layout.lanes, schedule.layout.bank) == (4, 4)
    assert list(schedule.fill()) == [([0, 1, 2, 3], [0, 1, 2, 3])]
    np.testing.assert_array_equal(schedule.rows, [0, 1, 2, 3])
    assert [list(queue) for queue in schedule.queues] == [[4, 5], [6, 7]]
    assert schedule.places == {0: 0, 1: 2, 2: 1, 3: 3}
    np.testing.assert_array_equal(schedule.enough(), [1, 1])
    schedule.finish(np.array([False, False, True, True]))
    assert list(schedule.fill()) == [([], [2, 3])]
    schedule.finish(np.array([False, False, False, True]))
    assert list(schedule.fill()) == [([4], [3])], "the first shard has two samples waiting"
    assert schedule.places[4] == 2
    np.testing.assert_array_equal(schedule.rows, [0, 1, 6, 8])
    np.testing.assert_array_equal(schedule.enough(), [1, 1])


def test_a_shard_for_which_nothing_waits_goes_on_to_its_last_lane():
    schedule = make(3, 4, 8, shards=2)
    list(schedule.fill())
    np.testing.assert_array_equal(schedule.enough(), [2, 2])
    schedule.finish(np.arange(8) == 6)
    assert list(schedule.fill()) == [([2], [6])]
    assert [list(queue) for queue in schedule.queues] == [[], [9, 10, 11]]
    np.testing.assert_array_equal(schedule.enough(), [0, 2])
    assert schedule.patience(0, 50) is None
    assert schedule.patience(4, 1280) == 20, "320 steps per end: one of 16 lanes after 20"
    assert schedule.patience(40, 100) == 1
    assert make(4, 2, 3).patience(4, 1280) is None


def test_narrowing_keeps_lanes_in_their_shard_and_waits_for_the_fullest():
    schedule = make(32, 1, None, shards=2)
    list(schedule.fill())
    assert queue.widths(schedule.layout) == [32, 16]
    schedule.finish(np.arange(32) < 15)
    assert schedule.narrower() is None
    schedule.finish(np.arange(32) >= 24)
    lanes = schedule.narrower()
    np.testing.assert_array_equal(lanes, [15, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7])
    before = schedule.rows.reshape(2, 16)
    kept = [before[0, 15], before[1, :8]]
    schedule.narrow(lanes)
    np.testing.assert_array_equal(schedule.rows, [kept[0], *[-1] * 7, *kept[1]])


@pytest.mark.parametrize(("prompts", "n", "allowed", "shards"), [(64, 8, 64, 4), (256, 8, 256, 8)])
def test_shards_wait_little_for_each_other(prompts, n, allowed, shards):
    """Useful steps of all slots over the time of the slowest shard: near that of a single shard of as many slots."""
    alone, together = [], []
    for seed in range(3):
        lengths = long_tailed(seed, prompts * n)
        alone.append(lengths.sum() / drive(make(prompts, n, allowed), lengths)[2])
        _, read, wall = drive(make(prompts, n, allowed, shards), lengths)
        together.append(lengths.sum() / wall)
        assert read == list(range(prompts))
    assert np.mean(together) > 0.85 * np.mean(alone)
