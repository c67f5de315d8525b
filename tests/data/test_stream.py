"""Stream: every row once an epoch, the same batches for every process count, and exact continuation."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.data.stream import PromptStream, make_stream
from jaxrl_llm.errors import ConfigError


def stream(count: int = 11, **change: Any) -> PromptStream:
    return make_stream(count, **{"batch_size": 4, "shuffle": True, "seed": 0, **change})


def take(source: PromptStream, steps: int) -> list[list[int]]:
    return [source.next().tolist() for _ in range(steps)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def test_load_order_without_shuffle() -> None:
    ordered = stream(7, batch_size=3, shuffle=False)
    assert take(ordered, 5) == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert (ordered.steps_per_epoch, ordered.dropped_per_epoch) == (2, 1)


def test_every_epoch_is_another_order_of_distinct_rows() -> None:
    source = stream(12)
    epochs = [flat(take(source, 3)) for _ in range(4)]
    assert all(sorted(rows) == list(range(12)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 4
    partial = stream(11)
    dropped = [set(range(11)) - set(flat(take(partial, 2))) for _ in range(8)]
    assert all(len(rows) == 3 for rows in dropped)
    assert len(set().union(*dropped)) > 6


def test_order_is_fixed() -> None:
    """Golden: a changed order would silently change every run that is resumed."""
    assert take(stream(8), 4) == GOLDEN


GOLDEN = [[5, 3, 4, 0], [6, 1, 7, 2], [2, 0, 3, 1], [7, 6, 5, 4]]


def test_seeds_do_not_share_epochs() -> None:
    orders = []
    for seed in range(5):
        source = stream(12, seed=seed)
        orders += [tuple(flat(take(source, 3))) for _ in range(5)]
    assert len(set(orders)) == 25
    assert take(stream(seed=-3), 2) != take(stream(seed=3), 2)
    assert take(stream(seed=2**40), 2) == take(stream(seed=2**40), 2)


def test_first_rows_are_spread_evenly() -> None:
    source = stream(5, batch_size=5)
    counts = np.zeros((5, 5))
    for _ in range(2000):
        counts[np.arange(5), source.next()] += 1
    # 2000 epochs, 1/5 each: standard deviation sqrt(2000 * 0.2 * 0.8) = 17.9; five of them
    assert np.abs(counts - 400).max() < 90


def test_epoch_counts_completed_epochs() -> None:
    source = stream(11)
    epochs = []
    for _ in range(5):
        epochs.append(source.epoch)
        source.next()
    assert epochs == [0, 0, 1, 1, 2]
    assert source.drawn == 5


def test_one_row_and_one_batch() -> None:
    assert take(stream(1, batch_size=1), 3) == [[0], [0], [0]]
    whole = stream(4)
    assert [sorted(batch) for batch in take(whole, 2)] == [[0, 1, 2, 3]] * 2
    assert (whole.steps_per_epoch, whole.dropped_per_epoch, whole.epoch) == (1, 0, 2)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("processes", [2, 4])
def test_process_counts_give_the_same_global_batches(processes: int, shuffle: bool) -> None:
    alone = take(stream(shuffle=shuffle), 7)
    shares = [
        take(stream(shuffle=shuffle, process_index=n, process_count=processes), 7)
        for n in range(processes)
    ]
    assert all(len(batch) == 4 // processes for share in shares for batch in share)
    assert [flat(batches) for batches in zip(*shares, strict=True)] == alone


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("saved_at", [0, 1, 2, 3, 4, 5])
def test_a_fresh_stream_continues_exactly(saved_at: int, workers: int) -> None:
    """Steps per epoch are 2: before the first batch, in an epoch's middle, exactly at its end, in a later one."""
    through = take(stream(), 12)
    source = stream(num_workers=workers)
    assert take(source, saved_at) == through[:saved_at]
    state = json.loads(json.dumps(source.state()))
    ahead = take(source, 2)
    fresh = stream(num_workers=3 - workers)
    fresh.restore(state)
    assert (fresh.drawn, fresh.epoch) == (saved_at, saved_at // 2)
    assert fresh.state() == state
    rest = take(fresh, 12 - saved_at)
    assert rest == through[saved_at:]
    assert rest[:2] == ahead
    used = stream()
    take(used, 9)
    used.restore(state)
    assert take(used, 12 - saved_at) == through[saved_at:]
    for each in (source, fresh, used):
        each.close()


def test_the_epoch_after_a_restore_at_its_start_is_whole() -> None:
    source = stream(12)
    take(source, 3)
    fresh = stream(12)
    fresh.restore(source.state())
    assert sorted(flat(take(fresh, 3))) == list(range(12))
    assert fresh.epoch == 2


def test_restore_on_another_process_count() -> None:
    one = stream()
    take(one, 3)
    two = [stream(process_index=n, process_count=2) for n in range(2)]
    for each in two:
        each.restore(one.state())
    assert two[0].state() == two[1].state() == one.state()
    assert [flat(pair) for pair in zip(*(take(s, 4) for s in two), strict=True)] == take(one, 4)


@pytest.mark.parametrize(
    ("change", "name", "old", "new"),
    [
        ({"count": 12}, "count", "11", "12"),
        ({"batch_size": 2}, "batch_size", "4", "2"),
        ({"seed": 1}, "seed", "0", "1"),
        ({"shuffle": False}, "order", "'shuffled'", "'in_order'"),
    ],
)
def test_restore_refuses_another_stream(
    change: dict[str, Any], name: str, old: str, new: str
) -> None:
    other = stream(**change)
    with pytest.raises(ConfigError, match=f"got {name} {old} in the saved state and {new} now"):
        other.restore(stream().state())
    assert other.drawn == 0


def test_restore_lists_every_difference() -> None:
    with pytest.raises(ConfigError) as caught:
        stream(12, batch_size=3, seed=9).restore(stream().state())
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("position", [None, {}, {"next_index": -1}, {"next_index": "3"}, 3])
def test_restore_refuses_a_broken_position(position: Any) -> None:
    with pytest.raises(ConfigError, match="need a count of batches"):
        stream().restore({**stream().state(), "grain": position})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"count": 3}, "got 3 prompts for data.train_batch_size 4.*to at most 3"),
        ({"count": 0}, "got 0 prompts"),
        ({"batch_size": 0}, "need 1 or more"),
        (
            {"process_count": 3},
            "on 3 processes, need a multiple of 3; set data.train_batch_size to 3",
        ),
        ({"process_count": 2, "process_index": 2}, "process 2 of 2"),
        ({"num_workers": -1}, "num_workers"),
    ],
)
def test_streams_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        stream(**change)
