"""Trajectories to rows of tokens and back: prompts once per group, no padding between, a budget of tokens per row.

A `Layout` fixes every shape from settings alone; `pack` fills rows with the trajectories at hand. A row holds whole groups, the
prompt first and its responses behind it; one row per data shard makes a micro-batch, and as many micro-batches run as there
are filled rows, so that neither lengths nor the number of rows change a compiled program. Log-probs and values are made in
the order of a row's response tokens (its *slots*) and brought back to `[rows of the batch, Tr]` by `to_rows`.

Left out on purpose: groups whose prompt is shared across rows, and an assignment of groups to devices that looks at
anything but token counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import kernels
from jaxrl_llm.records import Batch, Rollout

SMALL_ROW = {"cpu": 2048}
SMALL_ROW_DEFAULT = 8192
"""Without a token budget, rows hold at most so many tokens, by platform, or one trajectory of full length; whole groups of full
length, where one fits."""
ROWS_PER_SHARE = 8
"""Without a token budget, a device's share of a mini-batch is cut into about so many rows: coarser ones stay half empty."""
RESPONSES_PER_ROW = {"flash": 6}
RESPONSES_PER_ROW_DEFAULT = 32
"""A row takes at most so many times the responses of full length that it could hold, by kind of attention."""


def make_batch(
    rollout: Rollout, scores: np.ndarray, valid: np.ndarray, response_width: int
) -> Batch:
    """Host arrays of a `Batch` of `B = P * G` responses, `response_width` columns wide.

    `scores [B]` are rewards of whole responses, `valid [B]` says which rows may enter statistics and the loss; an invalid row
    trains nothing. A width that would cut tokens off raises `ConfigError`.
    """
    longest = int(rollout.response_lengths.max(initial=0))
    if longest > response_width:
        raise ConfigError(
            f"training rows: got a response width of {response_width}, need at least {longest}"
        )
    prompts = rollout.prompt_tokens.shape[0]
    group = rollout.response_tokens.shape[0] // prompts
    return Batch(
        mask=_fit(rollout.loss_mask, response_width) & valid[:, None],
        sampler_logprobs=_fit(rollout.sampler_logprobs, response_width).astype(np.float32),
        scores=np.where(valid, scores, 0.0).astype(np.float32),
        group_ids=np.repeat(np.arange(prompts, dtype=np.int32), group),
        valid=valid.astype(bool),
    )


def _fit(values: np.ndarray, width: int) -> np.ndarray:
    """Cut or pad columns on the right."""
    have = values.shape[1]
    return values[:, :width] if have >= width else np.pad(values, ((0, 0), (0, width - have)))


# Shapes ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """All shapes of packed rows: they follow from settings and never from a batch.

    `prompts` x `group` trajectories are cut into mini-batches of `mini_prompts`, with `shuffle` in `passes` drawn orders. A row holds at
    most `tokens` tokens and `responses` responses; `shards` rows make a micro-batch, and a mini-batch has at most `micros`.
    With `share` a prompt is stored once per group, otherwise once per response; with `pad` every prompt and response is given the room
    of its full width, as unpacked training would (what it does not use lies at the end of the row). `block` is the attention's block of tokens, `attention` its kind.
    """

    prompts: int
    group: int
    mini_prompts: int
    passes: int
    shuffle: bool
    prompt_width: int
    response_width: int
    shards: int
    tokens: int
    responses: int
    micros: int
    block: int
    share: bool
    pad: bool
    attention: str

    @property
    def mini_batches(self) -> int:
        """Optimizer steps per pass."""
        return self.prompts // self.mini_prompts


def block_size(attention: str, longest: int) -> int:
    """Tokens per attention block: 128 for accelerator kernels, else a power of two from 16 to 64 near half a trajectory (`ring`: to
    512, near an eighth)."""
    if attention in ("splash", "flash"):
        return 128
    if attention == "ring":
        return max(16, min(512, 2 ** math.floor(math.log2(max(longest // 8, 1)))))
    return max(16, min(64, 2 ** math.floor(math.log2(max(longest // 2, 1)))))


def make_layout(
    *,
    prompts: int,
    group: int,
    mini_prompts: int,
    prompt_width: int,
    response_width: int,
    shards: int,
    passes: int = 1,
    shuffle: bool = False,
    micro_rows: int | None = None,
    budget: int | None = None,
    share: bool = True,
    pad: bool = False,
    attention: str = "blocked",
    platform: str = "cpu",
    context: int = 1,
) -> Layout:
    """The layout of a batch under a budget of stored tokens per device, or rows of a size that wastes little.

    `budget` is the most tokens that a device works on at once (verl's `ppo_max_token_len_per_gpu`, counted as stored: a shared
    prompt once). Without one, rows are short enough to be full, and have at most the room of `micro_rows` trajectories of full
    length. Rows are never longer than a device's whole share of a mini-batch. Lengths are whole blocks: a budget is rounded down to
    them, and up where one trajectory needs it; on a mesh that splits rows over `context` devices a row holds as many times
    a device's budget, and its parts are whole blocks. Raises `ConfigError` for a budget below one trajectory.
    """
    single = prompt_width + response_width
    block = block_size(attention, single)
    unit = block * context
    rows = mini_prompts * group
    share_rows = -(-rows // shards)
    per_prompt = group if share else 1

    def stored(trajectories: int) -> int:
        return trajectories * response_width + -(-trajectories // per_prompt) * prompt_width

    whole = stored(share_rows)
    if budget is not None:
        row = budget * context
        if row < single:
            raise ConfigError(
                f"a token budget of {budget} per device"
                + (f" on {context} devices of a row" * (context > 1))
                + f" does not hold one trajectory of {prompt_width} + {response_width} = "
                f"{single} tokens; raise ppo_max_token_len_per_device (and log_prob_max_token_len_per_device)"
            )
        wanted = max(row // unit * unit, single)
    else:
        most = SMALL_ROW.get(platform, SMALL_ROW_DEFAULT) * context
        full = stored(min(per_prompt, share_rows))
        step = full if full <= most else 1
        wanted = max(single, min(most, whole // ROWS_PER_SHARE))
        wanted = max(single, min(-(-wanted // step), max(1, most // step)) * step)
        wanted = min(wanted, stored(min(micro_rows or share_rows, share_rows)))
    tokens = -(-min(wanted, whole) // unit) * unit
    crowd = RESPONSES_PER_ROW.get(attention, RESPONSES_PER_ROW_DEFAULT)
    responses = min(share_rows, max(crowd * tokens // response_width, per_prompt))
    fitting = min(max(1, (tokens - prompt_width) // response_width), responses)
    pieces = -(-per_prompt // fitting)
    most_pieces = rows // per_prompt * pieces
    most_tokens = rows // per_prompt * (pieces * prompt_width + per_prompt * response_width)
    most_rows = min(most_pieces, math.floor(2 * (most_tokens / tokens + rows / responses)) + 1)
    return Layout(
        prompts=prompts,
        group=group,
        mini_prompts=mini_prompts,
        passes=passes,
        shuffle=shuffle,
        prompt_width=prompt_width,
        response_width=response_width,
        shards=shards,
        tokens=tokens,
        responses=responses,
        micros=-(-most_rows // shards),
        block=block,
        share=share,
        pad=pad,
        attention=attention,
    )


# Filling rows ------------------------------------------------------------------------------------------------------------


@struct.dataclass
class Packed:
    """Rows of a batch, `[I C R ...]`: mini-batches (of all passes) x micro-batches x one row per data shard.

    `tokens`, `positions` `[.. T]` and `view` are what the model reads. Slot `s` of a row is its s-th response token:
    `targets [.. T]` is its id, `predictors [.. T]` the column whose hidden state predicts it, `slots [I C]` how many there are in
    the fullest row of a micro-batch. `rows [.. A]` names the batch row of each response (`B` = none), `starts` and
    `lengths [.. A]` its slots. `micros [I]` micro-batches hold tokens; `members [I b]` are the batch rows of a mini-batch.
    """

    tokens: Any
    positions: Any
    view: Any
    predictors: Any
    targets: Any
    slots: Any
    rows: Any
    starts: Any
    lengths: Any
    micros: Any
    members: Any


@dataclass(frozen=True)
class Packing:
    """What packing came to: `stored` tokens, `verl` tokens (every trajectory with its own prompt), `room` in the rows that run,
    `micro_batches` of all mini-batches, `split_groups` whose prompt is stored more than once."""

    stored: int
    verl: int
    room: int
    micro_batches: int
    split_groups: int

    def row(self) -> dict[str, float]:
        """Metrics of a step."""
        return {
            "packing/token_share": self.stored / max(1, self.room),
            "packing/stored_tokens": self.stored,
            "packing/verl_tokens": self.verl,
            "packing/micro_batches": self.micro_batches,
            "packing/split_groups": self.split_groups,
        }


@dataclass
class _Piece:
    """Responses of one group that lie in one row: batch rows, and the tokens they take with their prompt."""

    prompt: int
    rows: list[int]
    size: int
    row: int = field(default=-1)


def pack(
    layout: Layout, rollout: Rollout, orders: Sequence[np.ndarray] | None = None
) -> tuple[Packed, Packing]:
    """Rows for all mini-batches of `layout`; host arrays, and what they came to.

    `orders` are permutations of the prompts, one per pass: mini-batches are taken in that order (default: as they come).
    Groups stay whole where one fits a row; a larger one is split and its prompt stored again. Rows of a mini-batch are
    balanced by their tokens.
    """
    batch = layout.prompts * layout.group
    lengths = np.asarray(rollout.response_lengths)
    heads = np.asarray(rollout.prompt_lengths)
    if lengths.shape[0] != batch or heads.shape[0] != layout.prompts:
        raise ConfigError(
            f"packing: got {lengths.shape[0]} responses of {heads.shape[0]} prompts, need {batch} of {layout.prompts}"
        )
    orders = [np.arange(layout.prompts)] * layout.passes if orders is None else orders
    minis = [mini for order in orders for mini in np.reshape(order, (layout.mini_batches, -1))]
    out = _empty(layout, len(minis), batch)
    segments = np.zeros_like(out["tokens"])
    prefix = np.zeros_like(segments)
    stored = split = 0
    for i, mini in enumerate(minis):
        pieces = _pieces(layout, mini, heads, lengths)
        count = _assign(layout, pieces)
        out["micros"][i] = -(-count // layout.shards)
        out["members"][i] = (mini[:, None] * layout.group + np.arange(layout.group)).reshape(-1)
        split += len(pieces) - (len(mini) if layout.share else len(mini) * layout.group)
        order = np.argsort([-load for load in _loads(pieces, count)], kind="stable")
        place = np.empty(count, int)
        place[order] = np.arange(count)
        filled = np.zeros((count, 3), int)
        for piece in pieces:
            c, r = divmod(place[piece.row], layout.shards)
            where = (i, c, r)
            stored += _write(
                layout, out, segments, prefix, where, filled[piece.row], piece, rollout
            )
    room = int(out["micros"].sum()) * layout.shards * layout.tokens
    flat = lambda x: x.reshape(-1, layout.tokens)  # noqa: E731
    view = kernels.make_view(
        layout.attention,
        flat(segments),
        flat(prefix),
        flat(out["positions"]),
        block=layout.block,
        prompt_width=layout.prompt_width,
        response_width=layout.response_width,
        responses=layout.responses,
    )
    lead = segments.shape[:3]
    out["view"] = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), view)
    verl = len(orders) * int(lengths.sum() + layout.group * heads.sum())
    return Packed(**out), Packing(stored, verl, room, int(out["micros"].sum()), split)


def _empty(layout: Layout, minis: int, batch: int) -> dict[str, Any]:
    lead = (minis, layout.micros, layout.shards)
    names = ("tokens", "positions", "predictors", "targets")
    arrays: dict[str, Any] = {name: np.zeros((*lead, layout.tokens), np.int32) for name in names}
    for name in ("starts", "lengths"):
        arrays[name] = np.zeros((*lead, layout.responses), np.int32)
    arrays["rows"] = np.full((*lead, layout.responses), batch, np.int32)
    arrays["slots"] = np.zeros((minis, layout.micros), np.int32)
    arrays["micros"] = np.zeros((minis,), np.int32)
    arrays["members"] = np.zeros((minis, layout.mini_prompts * layout.group), np.int32)
    return arrays


def _pieces(
    layout: Layout, mini: np.ndarray, heads: np.ndarray, lengths: np.ndarray
) -> list[_Piece]:
    """The groups of a mini-batch, cut where they do not fit a row."""
    pieces = []
    for prompt in mini.tolist():
        head = layout.prompt_width if layout.pad else int(heads[prompt])
        current: _Piece | None = None
        for row in range(prompt * layout.group, (prompt + 1) * layout.group):
            size = layout.response_width if layout.pad else int(lengths[row])
            full = current is not None and (
                current.size + size > layout.tokens or len(current.rows) >= layout.responses
            )
            if current is None or full or not layout.share:
                current = _Piece(prompt, [], head)
                pieces.append(current)
            current.rows.append(row)
            current.size += size
    return pieces


def _loads(pieces: Sequence[_Piece], count: int) -> np.ndarray:
    return np.bincount([piece.row for piece in pieces], [piece.size for piece in pieces], count)


def _assign(layout: Layout, pieces: list[_Piece]) -> int:
    """Give every piece a row; returns the number of rows, in whole micro-batches and as few as two greedy rules find.

    First each piece, the largest first, into the emptiest row, then pieces change places between the fullest and the emptiest
    row as long as that evens them out. Where the fullest row is still too long: each into the first row that has room, which
    takes at most `2 * (tokens / T + responses / A) + 1` rows; `Layout.micros` allows them.
    """
    order = sorted(range(len(pieces)), key=lambda i: -pieces[i].size)
    sizes = np.array([(pieces[i].size, len(pieces[i].rows)) for i in order]).reshape(-1, 2)
    room = np.array([layout.tokens, layout.responses])
    least = max(int((-(-sizes.sum(0) // room)).max(initial=1)), 1)
    start = -(-least // layout.shards) * layout.shards
    for count in range(start, layout.micros * layout.shards + 1, layout.shards):
        for rule in (_evenly, _first_fit):
            rows = rule(sizes, room, count)
            if rows is not None:
                for i, row in zip(order, rows.tolist(), strict=True):
                    pieces[i].row = row
                return count
    raise AssertionError("first fit needs more rows than its bound")


def _first_fit(sizes: np.ndarray, room: np.ndarray, count: int) -> np.ndarray | None:
    """Rows of pieces `sizes [n 2]` (tokens, responses), each in the first of `count` rows with room; None where one fits nowhere."""
    loads, rows = np.zeros((count, 2), np.int64), np.zeros(len(sizes), np.int64)
    for i, size in enumerate(sizes):
        fits = (loads + size <= room).all(1)
        if not fits.any():
            return None
        rows[i] = np.argmax(fits)
        loads[rows[i]] += size
    return rows


def _evenly(sizes: np.ndarray, room: np.ndarray, count: int) -> np.ndarray | None:
    """Rows of equal length: the emptiest row takes the next piece, then swaps; None where that does not fit."""
    loads, rows = np.zeros((count, 2), np.int64), np.zeros(len(sizes), np.int64)
    for i, size in enumerate(sizes):
        rows[i] = np.argmin(loads[:, 0])
        loads[rows[i]] += size
    for _ in range(4 * count):
        full, empty = np.argmax(loads[:, 0]), np.argmin(loads[:, 0])
        gap = loads[full, 0] - loads[empty, 0]
        ours, theirs = np.flatnonzero(rows == full), np.flatnonzero(rows == empty)
        if not len(ours) or not len(theirs):
            break
        moves = sizes[ours, None, 0] - sizes[None, theirs, 0]
        a, b = np.unravel_index(np.argmin(np.abs(moves - gap / 2)), moves.shape)
        if not 0 < moves[a, b] < gap:
            break
        move = sizes[ours[a]] - sizes[theirs[b]]
        loads[full] -= move
        loads[empty] += move
        rows[ours[a]], rows[theirs[b]] = empty, full
    return rows if (loads <= room).all() else None


def _write(
    layout: Layout,
    out: dict[str, Any],
    segments: np.ndarray,
    prefix: np.ndarray,
    where: tuple[int, int, int],
    filled: np.ndarray,
    piece: _Piece,
    rollout: Rollout,
) -> int:
    """Write a piece into its row behind what is there; `filled` counts the row's columns, slots and responses. Returns its tokens."""
    column, slot, number = filled.tolist()
    head = int(rollout.prompt_lengths[piece.prompt])
    own = column + 1
    tokens, positions = out["tokens"][where], out["positions"][where]
    segment, sees = segments[where], prefix[where]
    end = column + head
    tokens[column:end] = rollout.prompt_tokens[
        piece.prompt, rollout.prompt_tokens.shape[1] - head :
    ]
    positions[column:end] = np.arange(head)
    segment[column:end] = sees[column:end] = own
    column, stored = end, head
    for row in piece.rows:
        length = int(rollout.response_lengths[row])
        stop = column + length
        ids = rollout.response_tokens[row, :length]
        tokens[column:stop] = ids
        positions[column:stop] = head + np.arange(length)
        segment[column:stop], sees[column:stop] = column + 1, own
        out["targets"][where][slot : slot + length] = ids
        predictors = out["predictors"][where][slot : slot + length]
        predictors[:] = np.arange(column - 1, stop - 1)
        predictors[:1] = end - 1
        out["rows"][where][number] = row
        out["starts"][where][number], out["lengths"][where][number] = slot, length
        column, slot = stop, slot + length
        number, stored = number + 1, stored + length
    filled[:] = column, slot, number
    i, c, _ = where
    out["slots"][i, c] = max(out["slots"][i, c], slot)
    return stored


# On the devices ----------------------------------------------------------------------------------------------------------


def to_rows(values: jax.Array, micro: Packed, width: int) -> jax.Array:
    """Slots `[R T]` of a micro-batch as response rows `[R*A width]`; 0 behind the end of a response."""
    columns = jnp.arange(width)
    at = jnp.minimum(micro.starts[..., None] + columns, values.shape[1] - 1)
    flat = at.reshape(at.shape[0], -1)
    found = jnp.take_along_axis(values, flat, axis=1).reshape(at.shape)
    inside = columns < micro.lengths[..., None]
    return jnp.where(inside, found, 0).reshape(-1, width)
