"""Reading numbers off fixed weights: log-probs, entropies and values of packed trajectories, in pure, jitted functions.

One forward function serves scoring and training: `Network.slots` gives the hidden states that predict the response tokens of a
micro-batch, `token_scores` the head on them in chunks, so that logits over the vocabulary never exist for all of a row.

Left out on purpose: losses and updates (see `learner`), correction weights between sampler and trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
        if self.mesh.shape["context"] > 1:
            # A slot's predictor may lie with another device of the row: each gets the whole row, once.
            whole = NamedSharding(self.mesh, PartitionSpec(sharding.ROWS))
            hidden = jax.lax.with_sharding_constraint(hidden, whole)
        return jnp.take_along_axis(hidden, micro.predictors[..., None], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Per response token: log-prob at the sampling temperature, and where asked for entropy and the sum of squared probabilities."""

    logprobs: Array
    entropy: Array | None = None
    sum_pi_squared: Array | None = None


def head_chunk(slots: int, vocabulary: int, platform: str) -> int:
    """Slots of a row whose logits are made at once: a multiple of 64 (of 16) where rows are long enough."""
    most = HEAD_ELEMENTS.get(platform, HEAD_ELEMENTS_DEFAULT) // vocabulary
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
    never exists. Chunks that begin at slot `live` or behind are skipped and give 0. Every device works on its own rows, its own
    chunks of them (`context`) and its own part of the vocabulary (`tensor`): maxima and sums cross devices, logits never do. Over the
    data axes the head's kernel is whole: left to the compiler, each chunk would gather it and add up its gradient anew.
    """
    config, mesh = network.config, network.mesh
    name = "embed" if config.tie_embeddings else "head"
    rows, slots = targets.shape
    share = mesh.shape["context"]
    split = mesh.shape["tensor"] > 1 and config.vocab_size % mesh.shape["tensor"] == 0
    part = config.vocab_size // (mesh.shape["tensor"] if split else 1)
    chunk = head_chunk(-(-slots // share), part, sharding.platform(mesh))
    count = -(-slots // (chunk * share)) * share
    live = jnp.int32(slots if live is None else live)
    score: Callable[..., tuple[Array, ...]] = partial(
        _scores_of_chunks, network, axis="tensor" if split else None, entropy=entropy, squares=squares
    )  # fmt: skip

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * chunk - slots)) + ((0, 0),) * (x.ndim - 2))
        return padded.reshape(rows, count // share, share, chunk, *x.shape[2:])

    if mesh.size > 1:
        kernel = ("tensor", None) if config.tie_embeddings else (None, "tensor")
        whole, pieces = PartitionSpec(), PartitionSpec(sharding.ROWS, None, "context")
        score = jax.shard_map(
            score,
            mesh=mesh,
            in_specs=(PartitionSpec(*kernel) if split else whole, pieces, pieces, whole, whole),
            out_specs=pieces,
            check_vma=False,
        )
    found = score(params[name]["kernel"], chunks(hidden), chunks(targets), temperature, live)
    return Scores(*(x.reshape(rows, count * chunk)[:, :slots] for x in found))


def _scores_of_chunks(
    network: Network,
    kernel: Array,
    hidden: Array,
    targets: Array,
    temperature: Array,
    live: Array,
    *,
    axis: str | None,
    entropy: str | None,
    squares: bool,
) -> tuple[Array, ...]:
    """The numbers of `Scores` for the chunks `[R n 1 c]` of one device; with `axis` its kernel holds a part of the vocabulary."""
    rows, count, _, chunk = targets.shape
    share = network.mesh.shape["context"]
    offset = jax.lax.axis_index("context") if share > 1 else 0
    name = "embed" if network.config.tie_embeddings else "head"

    def score(states: Array, chosen: Array) -> tuple[Array, ...]:
        flat = states.reshape(rows * chunk, -1)
        logits = heads.logits(
            network.config, {name: {"kernel": kernel}}, flat, compute_dtype=network.dtype
        )
        logits = logits.reshape(rows, chunk, -1) / temperature
        return token_numbers(logits, chosen, entropy, squares, axis)

    def skip(states: Array, chosen: Array) -> tuple[Array, ...]:
        del states
        return (jnp.zeros(chosen.shape, jnp.float32),) * (1 + bool(entropy) + squares)

    # The checkpoint is around the condition: inside, the loop would keep a copy of the head's kernel per chunk.
    @partial(jax.checkpoint, prevent_cse=False)
    def one(piece: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        first, states, chosen = piece
        return jax.lax.cond(first < live, score, skip, states, chosen)

    first = (jnp.arange(count) * share + offset) * chunk
    by_chunk = (jnp.moveaxis(x[:, :, 0], 1, 0) for x in (hidden, targets))
    return tuple(
        jnp.moveaxis(part, 0, 1)[:, :, None] for part in jax.lax.map(one, (first, *by_chunk))
    )


def token_numbers(
    logits: Array, chosen: Array, entropy: str | None, squares: bool, axis: str | None = None
) -> tuple[Array, ...]:
    """Log-prob of `chosen [...]`, then where asked entropy and sum of squared probabilities, from float32 `logits [... V]`.

    With `axis`, the devices of that mesh axis hold consecutive parts of the vocabulary (Megatron-LM's vocabulary-parallel cross
    entropy, arXiv:1909.08053): three numbers per token are added up over them, and one maximum is taken.
    """
    if axis is None:
        total = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    else:
        here = chosen - jax.lax.axis_index(axis) * logits.shape[-1]
        ours = (here >= 0) & (here < logits.shape[-1])
        at = jnp.clip(here, 0, logits.shape[-1] - 1)[..., None]
        found = jnp.take_along_axis(logits, at, axis=-1)[..., 0]
        picked = jax.lax.psum(jnp.where(ours, found, 0.0), axis)
        top = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), axis)
        summed = jax.lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), axis)
        total = top + jnp.log(summed)
    add = partial(jax.lax.psum, axis_name=axis) if axis else lambda x: x
    parts = [picked - total]
    if entropy == "reading":
        logits, total = jax.lax.stop_gradient((logits, total))
    log_probs = logits - total[..., None]
    if entropy:
        parts.append(total - add(jnp.sum(jnp.exp(log_probs) * logits, axis=-1)))
    if squares:
        parts.append(add(jnp.sum(jnp.exp(2.0 * log_probs), axis=-1)))
    return tuple(parts)


# Over all micro-batches ------------------------------------------------------------------------------------------------


def row_specs(packed: Packed, lead: int) -> Packed:
    """Partitions of packed rows behind `lead` whole axes: rows over the data shards, tokens over the devices of a row too."""
    before, whole = (None,) * lead, PartitionSpec()
    rows, tokens = (PartitionSpec(*before, sharding.ROWS, *rest) for rest in ((), ("context",)))
    return Packed(
        tokens=tokens,
        positions=tokens,
        view=kernels.view_specs(packed.view, lead=lead),
        predictors=rows,
        targets=rows,
        slots=whole,
        rows=rows,
        starts=rows,
        lengths=rows,
        micros=whole,
        members=whole,
    )


def micro_batch(packed: Packed, mini: Array, index: Array, mesh: Mesh) -> Packed:
    """Micro-batch `index` of mini-batch `mini`: rows `[R ...]`, one per data shard."""

    def one(x: Array, partition: PartitionSpec) -> Array:
        x = jax.lax.dynamic_index_in_dim(x, mini, 0, keepdims=False)
        x = jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))

    specs, kept = row_specs(packed, 0), {"micros": packed.micros, "members": packed.members}
    names = [field.name for field in fields(Packed) if field.name not in kept]
    cut = {name: jax.tree.map(one, getattr(packed, name), getattr(specs, name)) for name in names}
    return Packed(**cut, **kept)


def place(packed: Packed, mesh: Mesh) -> Packed:
    """Host arrays on the mesh: rows over the data shards, counts and members everywhere."""
    shardings = jax.tree.map(
        lambda partition: NamedSharding(mesh, partition),
        row_specs(packed, 2),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return sharding.put(packed, shardings)


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
    network: Network, batch: int, width: int, *, full: bool = False, work: Params | None = None
) -> Callable[[Params, Packed, Array], Scores]:
    """A jitted `score(params, packed, temperature) -> Scores [B Tr]` of `batch` rows; with `full` also entropies and squares.

    `work` are the shardings that parameters kept elsewhere (in host memory) are moved to first.
    """

    def score(params: Params, packed: Packed, temperature: Array) -> Scores:
        params = sharding.move(params, work)

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


def make_values(
    network: Network, batch: int, width: int, *, work: Params | None = None
) -> Callable[[Params, Packed], Array]:
    """A jitted `values(critic_params, packed) -> [B Tr]`: the value before each response token; `work` as in `make_score`."""

    def values(params: Params, packed: Packed) -> Array:
        params = sharding.move(params, work)

        def one(micro: Packed) -> tuple[Array]:
            return (heads.values(params["value_head"], network.slots(params["trunk"], micro)),)

        return _over_rows(one, packed, batch, width, 1, network.mesh)[0]

    return jax.jit(values)
