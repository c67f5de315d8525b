"""Which sample runs in which slot: plain host code that knows numbers of prompts, samples and lanes, but no tokens.

Left out on purpose: priorities and guesses of lengths. Samples start in the order of the queue.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

PREFILL_TOKENS = 8192
"""Prompt tokens that one data shard reads in one prefill, at least one prompt."""

NARROWER = (1, 2, 8)
"""Once the queue is empty, decoding goes on in this fraction of the slots as soon as the active ones fit."""

FEWEST = 8
"""Lanes per data shard below which narrowing ends."""

REFILL = 16
"""A chunk ends early when one in so many slots is free and samples wait."""

FIRST_COLUMNS = 64
"""Own columns that a lane begins with; they double until they hold the longest response."""


@dataclass(frozen=True)
class Layout:
    """Shapes of one rollout: `units` of `share` lanes, and prompts in a `bank` that are prefilled at once."""

    units: int
    share: int
    bank: int
    shards: int = 1

    @property
    def lanes(self) -> int:
        """Slots."""
        return self.units * self.share


def make_layout(
    prompts: int, n: int, *, max_num_seqs: int | None, shards: int, prompt_width: int
) -> Layout:
    """Shapes for `prompts` prompts of `n` samples on `shards` devices that hold different lanes.

    When everything fits at once a group shares a unit. Otherwise lanes are units of their own: refilling at once is worth more
    than sharing. There is at least one lane per shard, whatever `max_num_seqs` says.
    """
    per_shard = -(-prompts // shards)
    bank = min(per_shard, max(1, PREFILL_TOKENS // prompt_width)) * shards
    if max_num_seqs is None or per_shard * shards * n <= max_num_seqs:
        return Layout(per_shard * shards, n, bank, shards)
    most = min(max_num_seqs // shards, per_shard * n)
    return Layout(max(1, most) * shards, 1, bank, shards)


def widths(layout: Layout) -> list[int]:
    """Numbers of lanes that a rollout may go on with, descending, all multiples of the shards."""
    found = [layout.lanes]
    for part in NARROWER[1:]:
        lanes = -(-layout.lanes // (part * layout.shards)) * layout.shards
        if lanes >= FEWEST * layout.shards:
            found.append(lanes)
    return found


def columns(needed: int, limit: int) -> int:
    """Own columns that hold `needed` tokens of a response of at most `limit`: a power of two times `FIRST_COLUMNS`, or the limit."""
    room = FIRST_COLUMNS
    while room < needed:
        room *= 2
    return min(room, limit)


@dataclass
class Schedule:
    """The queue and what the lanes run: `rows [B]` is the sample in each lane, -1 where it is free.

    A free unit takes the next `share` samples of one prompt (so `share` divides `n`). Prompts enter the bank in order, `bank` at
    a time, each once.
    """

    layout: Layout
    prompts: int
    n: int
    rows: np.ndarray = field(init=False)
    started: int = field(init=False, default=0)
    in_bank: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rows = np.full((self.layout.lanes,), -1, np.int64)

    @property
    def waiting(self) -> bool:
        """Whether samples have not begun."""
        return self.started < self.prompts * self.n

    @property
    def active(self) -> np.ndarray:
        """Which lanes `[B]` run a sample."""
        return self.rows >= 0

    def free_units(self) -> np.ndarray:
        """Units whose lanes are all free, ascending."""
        return np.flatnonzero(~self.active.reshape(-1, self.layout.share).any(axis=1))

    def fill(self) -> Iterator[tuple[range | None, list[int]]]:
        """Begin what fits: yields prompts to be prefilled into the bank (or `None`) and the units that begin samples from it."""
        while self.waiting and len(free := self.free_units()):
            fresh = None
            if self.started == self.in_bank * self.n:
                fresh = range(self.in_bank, min(self.in_bank + self.layout.bank, self.prompts))
                self.in_bank = fresh.stop
            share, ready = self.layout.share, self.in_bank * self.n - self.started
            units = free[: ready // share].tolist()
            for unit in units:
                lanes = slice(unit * share, (unit + 1) * share)
                self.rows[lanes] = np.arange(self.started, self.started + share)
                self.started += share
            yield fresh, units

    def bank_row(self, prompt: int) -> int:
        """Where a prompt that was just prefilled stands in the bank."""
        return prompt % self.layout.bank

    def finish(self, lanes: np.ndarray) -> None:
        """These lanes `[B]` are free again."""
        self.rows[lanes] = -1

    def narrower(self) -> np.ndarray | None:
        """Lanes to go on with when far fewer are active and none wait: the active ones, filled up with free ones; or `None`."""
        active = int(self.active.sum())
        fitting = [width for width in widths(self.layout) if active <= width < len(self.rows)]
        if self.waiting or not active or not fitting:
            return None
        order = np.argsort(~self.active, kind="stable")
        return order[: fitting[-1]].astype(np.int32)

    def narrow(self, lanes: np.ndarray) -> None:
        """Go on with these lanes, each a unit of its own."""
        self.rows = self.rows[lanes]

    def enough(self) -> int:
        """How few active lanes end a chunk: enough free ones to refill, or few enough for fewer lanes; else none."""
        if self.waiting:
            return len(self.rows) - max(1, len(self.rows) // REFILL)
        active = int(self.active.sum())
        return max((width for width in widths(self.layout) if width < active), default=0)
