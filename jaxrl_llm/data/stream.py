"""The order of the training prompts: an endless, exactly resumable stream of row indices on a grain iterator.

The stream deals in indices of a prompt set, never in prompts: an order is a function of `(count, seed, epoch)`, so that a
weighted sampler can take the place of the shuffle by another entry in `ORDERS`. The order is the same for every process
count, because each process draws the global batch and keeps its own share of it; one number, the count of batches drawn,
is the whole state, the same on every process.

grain's own shuffle is not used: for few rows it is slow (measured: 7 ms an index at 11 rows, 50 ms at 2), it adds the epoch
to the seed (one run's second epoch is the first of the run with the next seed), and a resume would hang on its version.
Sorted Philox words cost microseconds, and numpy keeps that bit stream fixed.

Left out on purpose: reading and encoding (done once, before training), batches that cross an epoch's end, and processes
that prepare data (indices cost nothing).
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.errors import ConfigError

STATE_VERSION = 1

Order = Callable[[int, int, int], np.ndarray]
"""`(count, seed, epoch) -> indices [count]` of one epoch."""


def in_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The indices 0 .. count-1 in load order, in every epoch."""
    return np.arange(count)


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. count-1 from seed and epoch alone: the order that sorts `count` random 64-bit words."""
    key = hashlib.sha256(f"data order {seed} {epoch}".encode()).digest()[:16]
    words = np.random.Philox(key=int.from_bytes(key, "big")).random_raw(count)
    return np.argsort(words, kind="stable")


ORDERS: dict[str, Order] = {"in_order": in_order, "shuffled": shuffled}


class PromptStream:
    """An endless iterator over global batches of row indices, this process's share of each; made by `make_stream`."""

    def __init__(self, identity: dict[str, Any], share: slice, num_workers: int):
        import grain

        self._identity = identity
        self.steps_per_epoch: int = identity["count"] // identity["batch_size"]
        """Global batches in an epoch."""
        self.dropped_per_epoch: int = identity["count"] % identity["batch_size"]
        """Rows that do not fill a batch; other rows in every epoch where the order is shuffled."""
        batch = batch_reader(**identity, share=share)
        batches = grain.MapDataset.range(self.steps_per_epoch).repeat().map_with_index(batch)
        options = grain.ReadOptions(
            num_threads=num_workers, prefetch_buffer_size=2 * num_workers if num_workers else 0
        )
        self._iterator = iter(batches.to_iter_dataset(options))

    def next(self) -> np.ndarray:
        """This process's row indices of the next global batch, `[batch_size / process_count]`, int64."""
        batch: np.ndarray = next(self._iterator)
        return batch

    @property
    def drawn(self) -> int:
        """Global batches drawn since the start of the run."""
        return int(self._iterator.get_state()["next_index"])

    @property
    def epoch(self) -> int:
        """Completed epochs: 1 as soon as the last batch of the first epoch is drawn."""
        return self.drawn // self.steps_per_epoch

    def state(self) -> dict[str, Any]:
        """The exact position as a JSON-able dict, the same on every process and for every process count."""
        return {
            **self._identity,
            "version": STATE_VERSION,
            "grain": dict(self._iterator.get_state()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at `state`, from a stream of any process count.

        `ConfigError` lists every field (count, batch size, order, seed) in which the state differs from this stream: the
        position would mean other rows.
        """
        ours = {**self._identity, "version": STATE_VERSION}
        problems = [
            f"data stream: got {name} {state.get(name)!r} in the saved state and {value!r} now, need the same; "
            "restore the old setting or start another run"
            for name, value in ours.items()
            if state.get(name) != value
        ]
        position = state.get("grain")
        index = position.get("next_index") if isinstance(position, dict) else None
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 2**62:
            problems.append(
                f"data stream: got the position {position!r}, need a count of batches; use another checkpoint"
            )
        if problems:
            raise ConfigError(problems)
        self._iterator.set_state({"next_index": index})

    def close(self) -> None:
        """End the worker threads; the stream cannot be used afterwards."""
        self._iterator.close()


def make_stream(
    count: int,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    num_workers: int = 0,
) -> PromptStream:
    """A stream over row indices `0 .. count-1` in global batches of `batch_size`, each process keeping a contiguous share.

    Every epoch is `count // batch_size` batches; the rows left over are dropped (`dropped_per_epoch`). `num_workers`
    threads prepare batches ahead and never change the order. The seed may be any integer.

    Raises `ConfigError` where the rows do not fill one batch or the batch does not divide over the processes.
    """
    problems = []
    if batch_size < 1:
        problems.append(
            f"got train_batch_size {batch_size}, need 1 or more; set data.train_batch_size"
        )
    elif count < batch_size:
        do = f"set data.train_batch_size to at most {count}" if count else "name files with rows"
        problems.append(
            f"got {count} prompts for data.train_batch_size {batch_size}, need at least one whole batch; {do} or add rows"
        )
    if process_count < 1 or not 0 <= process_index < process_count:
        problems.append(
            f"got process {process_index} of {process_count}, need an index below the count"
        )
    elif batch_size >= 1 and batch_size % process_count:
        nearest = max(round(batch_size / process_count), 1) * process_count
        problems.append(
            f"got data.train_batch_size {batch_size} on {process_count} processes, need a multiple of {process_count}; "
            f"set data.train_batch_size to {nearest}"
        )
    if num_workers < 0:
        problems.append(f"got data.num_workers {num_workers}, need 0 or more; set it to 0")
    if problems:
        raise ConfigError(problems)
    order = "shuffled" if shuffle else "in_order"
    size = batch_size // process_count
    share = slice(process_index * size, (process_index + 1) * size)
    identity = {"count": count, "batch_size": batch_size, "order": order, "seed": seed}
    return PromptStream(identity, share, num_workers)


def batch_reader(
    count: int, batch_size: int, order: str, seed: int, share: slice
) -> Callable[[int, int], np.ndarray]:
    """`(batches drawn, step in epoch) -> share` of that batch; the orders of the last two epochs are kept."""
    steps = count // batch_size

    @functools.lru_cache(maxsize=2)
    def epoch_order(epoch: int) -> np.ndarray:
        return ORDERS[order](count, seed, epoch)

    def read(drawn: int, step: int) -> np.ndarray:
        start = step * batch_size
        return epoch_order(drawn // steps)[start : start + batch_size][share].copy()

    return read
