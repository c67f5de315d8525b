"""Which sample runs in which slot: plain host code that knows numbers of prompts, samples and lanes, but no tokens.

Lanes, units and bank rows belong to data shards, contiguous and alike. A prompt is dealt to one shard, where it is read and where
all its samples run, so that no key ever moves between shards.

Left out on purpose: priorities and guesses of lengths (samples start in the order of their shard's queue), and samples that leave
their shard: once all prompts are dealt, a shard that has finished its own stands idle.
"""

from collections import deque
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
"""A chunk ends when one in so many slots is free and samples wait; on several shards, when so many are expected to be."""

FIRST_COLUMNS = 64
"""Own columns that a lane begins with; they double until they hold the longest response."""


@dataclass(frozen=True)
class Layout:
    """Shapes of one rollout: `units` of `share` lanes, and prompts in a `bank` that are prefilled at once; all split evenly over
    the shards."""

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
    than sharing; and several shards read their prompts in two rounds or more, so that one that is ahead is dealt more of the rest.
    There is at least one lane per shard, whatever `max_num_seqs` says.
    """
    per_shard = -(-prompts // shards)
    bank = min(per_shard, max(1, PREFILL_TOKENS // prompt_width))
    if max_num_seqs is None or per_shard * shards * n <= max_num_seqs:
        return Layout(per_shard * shards, n, bank * shards, shards)
    if shards > 1:
        bank = min(bank, -(-per_shard // 2))
    most = min(max_num_seqs // shards, per_shard * n)
    return Layout(max(1, most) * shards, 1, bank * shards, shards)


def widths(layout: Layout) -> list[int]:
    """Numbers of lanes that a rollout may go on with, descending, all multiples of the shards."""
    found = [layout.lanes]
    for part in NARROWER[1:]:
        lanes = -(-layout.lanes // (part * layout.shards)) * layout.shards
        if FEWEST * layout.shards <= lanes < found[-1]:
            found.append(lanes)
    return found


def columns(needed: int, limit: int) -> int:
    """Own columns that hold `needed` tokens of a response of at most `limit`: a power of two times `FIRST_COLUMNS`, or the limit."""
    room = FIRST_COLUMNS
    while room < needed:
        room *= 2
    return min(room, limit)


def previous_columns(limit: int) -> int:
    """Own columns from which a lane grows to the last ones, or 0 where it has them from the start."""
    room = FIRST_COLUMNS
    while room * 2 < limit:
        room *= 2
    return room if room < limit else 0


@dataclass
class Schedule:
    """The queue and what the lanes run: `rows [B]` is the sample in each lane, -1 where it is free.

    `dealt` prompts have been given to shards, in order; `queues` are the samples that wait in each, and `places` the bank row of
    each dealt prompt. A free unit takes the next `share` samples of its shard, all of one prompt (so `share` divides `n`). Each
    prompt is read once.
    """

    layout: Layout
    prompts: int
    n: int
    rows: np.ndarray = field(init=False)
    dealt: int = field(init=False, default=0)
    queues: list[deque[int]] = field(init=False)
    places: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = np.full((self.layout.lanes,), -1, np.int64)
        self.queues = [deque() for _ in range(self.layout.shards)]

    @property
    def waiting(self) -> bool:
        """Whether samples have not begun."""
        return self.dealt < self.prompts or any(self.queues)

    @property
    def active(self) -> np.ndarray:
        """Which lanes `[B]` run a sample."""
        return self.rows >= 0

    def by_shard(self, lanes: np.ndarray) -> np.ndarray:
        """A value per lane `[B]` as `[shards B/shards]`."""
        return lanes.reshape(self.layout.shards, -1)

    def free_units(self) -> list[int]:
        """Units whose lanes are all free, ascending."""
        return np.flatnonzero(~self.active.reshape(-1, self.layout.share).any(axis=1)).tolist()

    def shard_of(self, unit: int) -> int:
        """The shard that holds a unit."""
        return unit * self.layout.shards // self.layout.units

    def fill(self) -> Iterator[tuple[list[int], list[int]]]:
        """Begin what fits: yields prompts to be prefilled into the bank (perhaps none) and the units that begin samples from it.

        As soon as one shard with a free unit has nothing to begin, prompts are dealt to all free rows of the bank.
        """
        share = self.layout.share
        while self.waiting and (free := self.free_units()):
            dry = any(not self.queues[self.shard_of(unit)] for unit in free)
            fresh = self._deal() if dry and self.dealt < self.prompts else []
            units = []
            for unit in free:
                queue = self.queues[self.shard_of(unit)]
                if queue:
                    samples = [queue.popleft() for _ in range(share)]
                    self.rows[unit * share : (unit + 1) * share] = samples
                    units.append(unit)
            if not units:
                return
            yield fresh, units

    def _deal(self) -> list[int]:
        """Give the next prompts to free rows of the bank, each to the shard with the least to do; returns them."""
        layout, first = self.layout, self.dealt
        per_shard = layout.bank // layout.shards
        load = self.by_shard(self.active).sum(axis=1).tolist()
        free: list[list[int]] = []
        for shard, queue in enumerate(self.queues):
            used = {self.places[sample // self.n] for sample in queue}
            rows = range(shard * per_shard, (shard + 1) * per_shard)
            free.append([row for row in rows if row not in used])
            load[shard] += len(queue)
        while self.dealt < self.prompts and any(free):
            shard = min((one for one in range(layout.shards) if free[one]), key=load.__getitem__)
            self.places[self.dealt] = free[shard].pop(0)
            self.queues[shard].extend(range(self.dealt * self.n, (self.dealt + 1) * self.n))
            load[shard] += self.n
            self.dealt += 1
        return list(range(first, self.dealt))

    def finish(self, lanes: np.ndarray) -> None:
        """These lanes `[B]` are free again."""
        self.rows[lanes] = -1

    def narrower(self) -> np.ndarray | None:
        """Lanes to go on with when far fewer are active and none wait, counted within each shard: the active ones, filled up with
        free ones, equally many per shard; or `None`."""
        active, shards = self.by_shard(self.active), self.layout.shards
        most = int(active.sum(axis=1).max())
        fitting = [width for width in widths(self.layout) if most * shards <= width < active.size]
        if self.waiting or not most or not fitting:
            return None
        order = np.argsort(~active, axis=1, kind="stable")
        return order[:, : fitting[-1] // shards].astype(np.int32).ravel()

    def narrow(self, lanes: np.ndarray) -> None:
        """Go on with these lanes, each a unit of its own."""
        rows = np.take_along_axis(self.by_shard(self.rows), self.by_shard(lanes), axis=1)
        self.rows = rows.ravel()

    def enough(self) -> np.ndarray:
        """How few active lanes end a shard's part of a chunk, `[shards]`.

        A single shard ends it when enough lanes are free to refill, or few enough are active for fewer lanes. One of several would
        then stand idle until the others end theirs, and its active lanes with it: it goes on until half its lanes are free, or,
        when nothing waits for it, all.
        """
        lanes = len(self.rows) // self.layout.shards
        if self.layout.shards > 1:
            waits = [bool(queue) or self.dealt < self.prompts for queue in self.queues]
            return np.where(waits, lanes // 2, 0).astype(np.int32)
        if self.waiting:
            return np.array([lanes - max(1, lanes // REFILL)], np.int32)
        active = int(self.active.sum())
        fewer = max((width for width in widths(self.layout) if width < active), default=0)
        return np.array([fewer], np.int32)

    def patience(self, finished: int, generated: int) -> int | None:
        """After how many steps one slot in `REFILL` is expected to be free, when `finished` of the `generated` tokens so far were
        last ones; `None`: no bound (a single shard sees its free lanes itself, or none wait, or nothing is known yet)."""
        if self.layout.shards == 1 or not self.waiting or not finished:
            return None
        return max(1, generated // (finished * REFILL))
