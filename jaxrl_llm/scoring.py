"""Reading numbers off fixed weights: log-probs, entropies and values of packed trajectories, in pure, jitted functions.

One forward function serves scoring and training: `Network.slots` gives the hidden states that predict the response tokens of a
micro-batch, `token_scores` the head on them in chunks, so that logits over the vocabulary never exist for all of a row.

Left out on purpose: losses and updates (see `learner`), correction weights between sampler and trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm import packing, sharding
from jaxrl_llm.models import heads, kernels, transformer
from jaxrl_llm.models.families import ModelConfig
from jaxrl_llm.packing import Packed
from jaxrl_llm.records import Params

Array = jax.Array

HEAD_ELEMENTS = {"cpu": 2**24}
"""Logits per row that exist at once, by platform (64 MB in float32 on CPUs)."""
HEAD_ELEMENTS_DEFAULT = 2**27
HEAD_CHUNKS = 4
"""A row's slots are cut into at least so many chunks, because chunks behind the last response token are skipped."""


@dataclass(frozen=True)
class Network:
    """A model as the learner sees it: what to run, in which precision, on which mesh, with which attention."""

    config: ModelConfig
    mesh: Mesh
    dtype: Any
    remat: str = "dots"
    attention: str = "blocked"

    def slots(self, params: Params, micro: Packed) -> Array:
        """Hidden states `[R T D]` of the slots of a micro-batch: slot s predicts response token s of its row."""
        hidden, _ = transformer.run(
            self.config,
            params,
            micro.tokens,
            micro.positions,
            micro.view.segments != 0,
            mixer=kernels.make_mixer(
                self.attention, window=self.config.sliding_window, mesh=self.mesh
            ),
            view=micro.view,
            compute_dtype=self.dtype,
            remat=self.remat,
            constrain=sharding.make_constrain(self.mesh),
        )
        return jnp.take_along_axis(hidden, micro.predictors[..., None], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Per response token: log-prob at the sampling temperature, and where asked for entropy and the sum of squared probabilities."""

    logprobs: Array
    entropy: Array | None = None
    sum_pi_squared: Array | None = None


def head_chunk(slots: int, vocabulary: int) -> int:
    """Slots of a row whose logits are made at once: a multiple of 64 (of 16) where rows are long enough."""
    most = HEAD_ELEMENTS.get(jax.default_backend(), HEAD_ELEMENTS_DEFAULT) // vocabulary
    wanted = max(1, min(most, -(-slots // HEAD_CHUNKS)))
    unit = 64 if wanted >= 64 else 16 if wanted >= 16 else 1
    return wanted // unit * unit


def token_scores(
    network: Network,
    params: Params,
    hidden: Array,
    targets: Array,
    temperature: Array,
    *,
    live: Array | int | None = None,
    entropy: str | None = "trained",
    squares: bool = False,
) -> Scores:
    """Log-probs of `targets [R S]` (entropy, and behind it sums of squared probabilities) from `hidden [R S D]`.

    Entropies are `"trained"`, only for `"reading"` (no gradient: the backward pass then skips them), or `None`.

    `softmax(logits / temperature)` in float32, chunk by chunk over the slots and recomputed in the backward pass: `[R S V]`
    never exists. Chunks that begin at slot `live` or behind are skipped and give 0. Every device of the data axes works on its
    own rows with the whole kernel of the head: left to the compiler, each chunk would gather it and add up its gradient anew.
    """
    name = "embed" if network.config.tie_embeddings else "head"
    live = jnp.int32(hidden.shape[1] if live is None else live)
    score: Callable[..., tuple[Array, ...]] = partial(
        _scores_of_rows, network, entropy=entropy, squares=squares
    )
    if network.mesh.size > 1:
        whole, rows = PartitionSpec(), PartitionSpec(sharding.ROWS)
        score = jax.shard_map(
            score,
            mesh=network.mesh,
            in_specs=(whole, rows, rows, whole, whole),
            out_specs=rows,
            axis_names=set(sharding.ROWS),
            check_vma=False,
        )
    return Scores(*score({name: params[name]}, hidden, targets, temperature, live))


def _scores_of_rows(
    network: Network,
    params: Params,
    hidden: Array,
    targets: Array,
    temperature: Array,
    live: Array,
    *,
    entropy: str | None,
    squares: bool,
) -> tuple[Array, ...]:
    """The numbers of `Scores` for rows of one device (of one group of devices that share a head), chunk by chunk."""
    rows, slots, _ = hidden.shape
    chunk = head_chunk(slots, network.config.vocab_size)
    count = -(-slots // chunk)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * chunk - slots)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, count, chunk, *x.shape[2:]), 1, 0)

    def score(states: Array, chosen: Array) -> tuple[Array, ...]:
        flat = states.reshape(rows * chunk, -1)
        logits = heads.logits(network.config, params, flat, compute_dtype=network.dtype)
        logits = logits.reshape(rows, chunk, -1) / temperature
        return token_numbers(logits, chosen, entropy, squares)

    def skip(states: Array, chosen: Array) -> tuple[Array, ...]:
        del states
        return (jnp.zeros(chosen.shape, jnp.float32),) * (1 + bool(entropy) + squares)

    # The checkpoint is around the condition: inside, the loop would keep a copy of the head's kernel per chunk.
    @partial(jax.checkpoint, prevent_cse=False)
    def one(piece: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        first, states, chosen = piece
        return jax.lax.cond(first < live, score, skip, states, chosen)

    pieces = (jnp.arange(count) * chunk, split(hidden), split(targets))
    parts = [
        jnp.moveaxis(part, 0, 1).reshape(rows, count * chunk)[:, :slots]
        for part in jax.lax.map(one, pieces)
    ]
    return tuple(parts)


def token_numbers(
    logits: Array, chosen: Array, entropy: str | None, squares: bool
) -> tuple[Array, ...]:
    """Log-prob of `chosen [...]`, then where asked entropy and sum of squared probabilities, from float32 `logits [... V]`."""
    total = jax.nn.logsumexp(logits, axis=-1)
    parts = [jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0] - total]
    if entropy == "reading":
        logits, total = jax.lax.stop_gradient((logits, total))
    log_probs = logits - total[..., None]
    if entropy:
        parts.append(total - jnp.sum(jnp.exp(log_probs) * logits, axis=-1))
    if squares:
        parts.append(jnp.sum(jnp.exp(2.0 * log_probs), axis=-1))
    return tuple(parts)


# Over all micro-batches ------------------------------------------------------------------------------------------------


def micro_batch(packed: Packed, mini: Array, index: Array, mesh: Mesh) -> Packed:
    """Micro-batch `index` of mini-batch `mini`: rows `[R ...]`, one per data shard."""

    def one(x: Array) -> Array:
        x = jax.lax.dynamic_index_in_dim(x, mini, 0, keepdims=False)
        return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)

    def row(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(one(x), sharding.rows(mesh))

    whole = {"slots": one(packed.slots), "micros": packed.micros, "members": packed.members}
    names = ("tokens", "positions", "view", "predictors", "targets", "rows", "starts", "lengths")
    return Packed(**whole, **{name: jax.tree.map(row, getattr(packed, name)) for name in names})


def place(packed: Packed, mesh: Mesh) -> Packed:
    """Host arrays on the mesh: rows over the data shards, counts and members everywhere."""
    rows, whole = sharding.rows(mesh, axis=2), sharding.replicated(mesh)
    spread = {"slots": whole, "micros": whole, "members": whole}
    names = ("tokens", "positions", "view", "predictors", "targets", "rows", "starts", "lengths")
    shardings = Packed(
        **spread,
        **{name: jax.tree.map(lambda _: rows, getattr(packed, name)) for name in names},
    )
    return jax.device_put(packed, shardings)


def _over_rows(
    fn: Callable[[Packed], tuple[Array, ...]],
    packed: Packed,
    batch: int,
    width: int,
    outputs: int,
    mesh: Mesh,
) -> tuple[Array, ...]:
    """Run `fn` on the micro-batches of the first pass and bring its `[R S]` results to batch rows `[B Tr]`."""

    def micro(index: Array, carry: tuple[tuple[Array, ...], Array]) -> Any:
        outs, mini = carry
        piece = micro_batch(packed, mini, index, mesh)
        where = piece.rows.reshape(-1)
        rows = tuple(packing.to_rows(x, piece, width) for x in fn(piece))
        return tuple(
            out.at[where].set(new, mode="drop") for out, new in zip(outs, rows, strict=True)
        ), mini

    def mini(number: Array, outs: tuple[Array, ...]) -> tuple[Array, ...]:
        return jax.lax.fori_loop(0, packed.micros[number], micro, (outs, number))[0]

    minis = batch // packed.members.shape[1]
    empty = (jnp.zeros((batch, width), jnp.float32),) * outputs
    outs = jax.lax.fori_loop(0, minis, mini, empty)
    return jax.lax.with_sharding_constraint(outs, sharding.rows(mesh))


def make_score(
    network: Network, batch: int, width: int, *, full: bool = False
) -> Callable[[Params, Packed, Array], Scores]:
    """A jitted `score(params, packed, temperature) -> Scores [B Tr]` of `batch` rows; with `full` also entropies and squares."""

    def score(params: Params, packed: Packed, temperature: Array) -> Scores:
        def one(micro: Packed) -> tuple[Array, ...]:
            scores = token_scores(
                network,
                params,
                network.slots(params, micro),
                micro.targets,
                temperature,
                live=micro.slots,
                entropy="reading" if full else None,
                squares=full,
            )
            parts = (scores.logprobs, scores.entropy, scores.sum_pi_squared)
            return tuple(part for part in parts if part is not None)

        return Scores(*_over_rows(one, packed, batch, width, 3 if full else 1, network.mesh))

    return jax.jit(score)


def make_values(network: Network, batch: int, width: int) -> Callable[[Params, Packed], Array]:
    """A jitted `values(critic_params, packed) -> [B Tr]`: the value before each response token."""

    def values(params: Params, packed: Packed) -> Array:
        def one(micro: Packed) -> tuple[Array]:
            return (heads.values(params["value_head"], network.slots(params["trunk"], micro)),)

        return _over_rows(one, packed, batch, width, 1, network.mesh)[0]

    return jax.jit(values)
