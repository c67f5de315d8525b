"""Memory and traffic of a program without compiling it: arguments and results from shapes and places, temporaries from a model.

Temporaries are the sum of what lives at the worst moment of a program, each term from shapes: summed gradients, saved inputs of layers,
embedding and head gathered whole, copies that attention makes, a layer's activations. How many of each a compiler keeps at that
moment is a number per platform, fitted to compiled programs (`docs/plan.md` lists how far off it is).

Left out on purpose: CPUs, where compiling takes no longer than a plan may, and kinds of attention that no accelerator chooses by itself.
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import scoring, sharding
from jaxrl_llm.models.families import ModelConfig, parameter_count
from jaxrl_llm.networks import Trained, critic_plan, plan_of
from jaxrl_llm.packing import Layout
from jaxrl_llm.planning.hlo import Traffic
from jaxrl_llm.planning.lower import Lowering, held
from jaxrl_llm.planning.memory import Cost
from jaxrl_llm.planning.targets import Target
from jaxrl_llm.programs import Programs, relaid


@dataclass(frozen=True)
class Copies:
    """How many of each buffer a platform's compiler keeps at the worst moment.

    Updates: `gradients` sums of gradients and `kernels` shares of all parameters in the compute dtype at any moment. While the head's
    gradient is made: `tables` whole float32 tables where embedding and head are two (`hoisted` more where micro-batches are a loop,
    before which the embedding is laid out anew), `tied` where they are one, and `logits` of a chunk. While a layer's is: `cells` arrays
    of all cells of an attention's bins and the kernels of `layers` layers. At both: `wide` arrays of a row's tokens times the MLP's
    width. While the embedding's is, and there is a value head: `valued` tables and no saved inputs any more. `local` is the share of
    tables that is left where nothing has to be gathered.
    Scoring: `relaid` shares of the parameters that are laid out anew, `gathered` whole tables in the format that they are
    kept in, `spread` arrays of cells, `broad` wide arrays.
    Decoding: `own` copies of the lanes' keys and values where a chunk lays them out anew, `prompts` of the prompts' where own columns are
    the longer ones; `tile` rows of a tile in memory, below which kernels are laid out anew; `bank` copies of a bank in use.
    """

    gradients: float
    kernels: float
    tables: float
    hoisted: float
    tied: float
    logits: float
    valued: float
    local: float
    wide: float
    cells: float
    layers: float
    relaid: float
    gathered: float
    spread: float
    broad: float
    own: float
    prompts: float
    tile: int
    bank: float


COPIES = {
    "gpu": Copies(gradients=2, kernels=0, tables=5.5, hoisted=1, tied=3.8, logits=1, valued=2, local=0.45, wide=4, cells=9, layers=2,
                  relaid=0.33, gathered=1, spread=4, broad=1, own=0, prompts=0.5, tile=1, bank=1),
    "tpu": Copies(gradients=3, kernels=1, tables=9.2, hoisted=0, tied=6.2, logits=0, valued=4.2, local=0.53, wide=12, cells=0, layers=0,
                  relaid=0.5, gathered=0, spread=0, broad=8, own=1, prompts=0, tile=16, bank=0),
}  # fmt: skip
LANES = 128
"""Numbers in a row of a TPU's tile."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one device that the terms are made of; `gathered` says whether parameters are split over `fsdp`."""

    gradients: float
    copy: float
    layer: float
    saved: float
    table: float
    wide: float
    cells: float
    logits: float
    mask: float
    gathered: bool


def sizes(programs: Programs, trained: Trained, layout: Layout) -> Sizes:
    """The terms for a network on the rows of a layout."""
    network, mesh = trained.network, programs.mesh
    model, narrow = network.config, network.dtype.itemsize
    tensor, columns = mesh.shape["tensor"], layout.tokens // mesh.shape["context"]
    split = mesh.shape["fsdp"] * tensor
    vocabulary = model.vocab_size / tensor
    chunk = scoring.head_chunk(columns, int(vocabulary), sharding.platform(mesh))
    length = -(-(layout.prompt_width + layout.response_width) // 128) * 128
    heads = model.num_heads * model.head_size
    return Sizes(
        gradients=4 * parameter_count(model) / split,
        copy=narrow * parameter_count(model) / split,
        layer=narrow * _layer(model) / tensor,
        saved=narrow * model.num_layers * columns * kept_width(model, network.remat, tensor),
        table=4 * model.width * vocabulary,
        wide=narrow * columns * model.hidden / tensor,
        cells=narrow * layout.responses * length * heads / tensor if layout.attention == "flash" else 0,
        logits=4 * chunk * vocabulary,
        mask=4.0 * columns**2 if layout.attention == "splash" else 0,
        gathered=mesh.shape["fsdp"] > 1,
    )  # fmt: skip


def _layer(model: ModelConfig) -> float:
    """Parameters of one layer."""
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.width
    return (parameter_count(model) - tables) / model.num_layers


def kept_width(model: ModelConfig, remat: str, tensor: int) -> float:
    """Numbers per token and layer that the backward pass finds: the layer's input; with `dots` also outputs of projections; with
    `none` norms, rotated heads, the MLP's products and what attention keeps as well."""
    if remat == "full":
        return model.width
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    dots = 2 * model.width + (heads + 2 * model.hidden) / tensor
    if remat == "dots":
        return dots
    return dots + 3 * model.width + (heads + 2 * model.hidden) / tensor


def cost(programs: Programs, one: Lowering, target: Target) -> Cost:
    """Bytes of a program on one device."""
    kind = one.name.split()[0].strip(",")
    how = COPIES[target.device.platform]
    if kind in ENGINE:
        results, temporaries = ENGINE[kind](programs, one, how)
    elif one.phase == "adv":
        results, temporaries = held(one.args), 0
    elif one.phase.startswith("update"):
        results, temporaries = 0, _update(programs, one, how)
    else:
        results, temporaries = held_scores(programs), _score(programs, one, how)
    read = (one.args, _unread(one, kind))
    arguments, moved = (held(read[0], host) - held(read[1], host) for host in (False, True))
    return Cost(arguments, int(results), int(temporaries) + moved)


def _unread(one: Lowering, kind: str) -> Any:
    """Parameters that a program does not read, which are not handed to it: the head where there are no logits."""
    if kind == "prefill":
        return [one.args[0].get("head"), one.args[0]["norm"]]
    return one.args[0]["trunk"].get("head") if one.phase == "values" else None


def held_scores(programs: Programs) -> int:
    """Bytes of a float32 per response token of the batch, split over the data shards."""
    config = programs.config
    rows = config.data.train_batch_size * config.rollout.n
    return 4 * rows * config.data.max_response_length // sharding.shards(programs.mesh)


def _update(programs: Programs, one: Lowering, how: Copies) -> float:
    """The fullest of three moments of the backward pass: that of the head, of a layer, of the embedding (value heads)."""
    critic = one.phase == "update_critic"
    trained = programs.critic if critic else programs.actor
    assert trained is not None
    layout = programs.layouts.critic if critic else programs.layouts.actor
    size = sizes(programs, trained, layout)
    tied = trained.network.config.tie_embeddings
    hoisted = how.hoisted if layout.micros > 1 else 0
    table = size.table * (1 if size.gathered else how.local)
    kept = size.saved + how.wide * size.wide
    # The embedding, as it lies and as it is looked up, the gradient of the head, and the head.
    whole = 1 + hoisted + (0 if critic else 1 if tied else 2)
    layer = how.layers * size.layer if size.gathered else 0
    layers = kept + whole * table + how.cells * size.cells + layer
    if critic:
        last = (how.valued + hoisted) * table
    else:
        last = (
            kept + (how.tied if tied else how.tables + hoisted) * table + how.logits * size.logits
        )
    return how.gradients * size.gradients + how.kernels * size.copy + size.mask + max(layers, last)


def _score(programs: Programs, one: Lowering, how: Copies) -> float:
    """What stays, and the fullest of three moments: the embedding's, a layer's, the head's."""
    critic = one.phase == "values"
    trained = programs.critic if critic else programs.actor
    assert trained is not None
    layouts = programs.layouts
    layout = {"values": layouts.critic, "ref": layouts.reference}.get(one.phase, layouts.score)
    size = sizes(programs, trained, layout)
    narrow = trained.network.dtype.itemsize / 4
    # Kept as float32, but the reference in the compute dtype.
    kept = narrow if one.phase == "ref" else 1.0
    table = size.table if size.gathered else 0
    whole = how.gathered * kept * table
    layers = how.spread * size.cells + how.broad * size.wide + size.mask
    head = whole + size.logits
    head += narrow * size.table * ((kept == 1 or not how.gathered) + (kept < 1 and not how.gathered))  # fmt: skip
    if trained.network.config.tie_embeddings:
        # Read both ways: narrow copies in both layouts; kept narrow, the one that is gathered stays for the head.
        head += narrow * how.gathered * table if kept == 1 else 0
        layers += whole if kept < 1 else 0
    relaid = how.relaid * kept * size.gradients if size.gathered and (kept == 1 or how.gathered) else 0  # fmt: skip
    looked_up = whole if how.gathered else narrow * table
    return relaid + max(looked_up, layers, 0 if critic else head)


# Rollout ---------------------------------------------------------------------------------------------------------------


def _handover(programs: Programs, one: Lowering, how: Copies) -> tuple[float, float]:
    """The largest leaf gathered, and a third of a device's share on its way; nothing where every device has all of it."""
    model, mesh = programs.engine.config, programs.mesh
    narrow = programs.actor.network.dtype.itemsize
    largest = max(model.num_layers * model.hidden, model.vocab_size) * model.width * narrow
    split = mesh.shape["fsdp"] * mesh.shape["tensor"]
    way = largest / programs.rollout_mesh.shape["tensor"] + 0.35 * narrow * parameter_count(model) / split  # fmt: skip
    return held(programs.handover.result), way if split > 1 else 0


def _prefill(programs: Programs, one: Lowering, how: Copies) -> tuple[float, float]:
    """Scores of one layer, a few activations, and a copy of the bank that is in use."""
    model, mesh = programs.engine.config, programs.rollout_mesh
    rows = one.args[1].shape[0] // sharding.shards(mesh)
    width, tensor = one.args[1].shape[1], mesh.shape["tensor"]
    narrow = programs.actor.network.dtype.itemsize
    scores = 4 * rows * model.num_heads / tensor * width * width
    wide = narrow * rows * width * (1.5 * model.width + 2 * model.hidden / tensor)
    bank = _bank(model, rows, width, tensor, narrow)
    kept = one.args[3] is not None
    return 0 if kept else bank, scores + wide + (how.bank * bank if kept else 0)


def _bank(model: ModelConfig, rows: int, width: int, tensor: int, narrow: int) -> float:
    return 2 * narrow * model.num_layers * rows * model.num_kv_heads / tensor * width * model.head_size  # fmt: skip


def _advance(programs: Programs, one: Lowering, how: Copies) -> tuple[float, float]:
    """A layer's MLP, logits thrice, and the copies that a compiler makes to lay keys and kernels out anew."""
    state, model, mesh = one.args[1], programs.engine.config, programs.rollout_mesh
    lanes = state.last.shape[0] // sharding.shards(mesh)
    longer = state.own.columns > state.prompt.columns
    own = how.own * held(state.own) * relaid(model, mesh, state.own.columns)
    keys = own + how.prompts * held(state.prompt) * longer
    kernels = _relaid_kernels(programs, how.tile) if how.tile > 1 else 0
    return 0, keys + kernels + 12 * lanes * model.vocab_size + 2 * model.width * model.hidden


def _relaid_kernels(programs: Programs, tile: int) -> float:
    """Kernels whose last axes do not fill tiles: those of queries, keys and values with few heads, two of an MLP of odd width."""
    model, tensor = programs.engine.config, programs.rollout_mesh.shape["tensor"]
    heads = [model.num_heads / tensor, model.num_kv_heads / tensor, model.num_kv_heads / tensor]
    rows = sum(one * model.head_size for one in heads if one < tile)
    odd = model.hidden / tensor if model.hidden / tensor % LANES else 0
    narrow = programs.actor.network.dtype.itemsize
    return narrow * model.num_layers * model.width * (rows + 2 * odd)


def _grow(programs: Programs, one: Lowering, how: Copies) -> tuple[float, float]:
    return held(one.args) * one.kwargs["columns"] / one.args[0].columns, 0


def _narrow(programs: Programs, one: Lowering, how: Copies) -> tuple[float, float]:
    """Lanes copied twice: some of all arrays, or all of those with equal columns, where pieces of these are taken at once."""
    state, lanes = one.args
    share = lanes.shape[0] / state.last.shape[0]
    units = lanes.shape[0] / state.seen.shape[0]
    return held(state.own) * share + held(state.prompt) * units, 0


def _insert(programs: Programs, one: Lowering, how: Copies) -> tuple[float, float]:
    return 0, 0


ENGINE: dict[str, Any] = {
    "weight": _handover,
    "prefill": _prefill,
    "insert": _insert,
    "advance": _advance,
    "grow": _grow,
    "narrow": _narrow,
}
"""Results and temporaries of the engine's programs, by the first word of their names."""


# Traffic ---------------------------------------------------------------------------------------------------------------


def traffic(programs: Programs, one: Lowering, target: Target) -> Traffic:
    """Bytes that a device sends in one call: weights gathered and gradients scattered over `fsdp`, gradients summed over `data`,
    activations summed over `tensor`."""
    kind = one.name.split()[0].strip(",")
    if kind == "weight":
        return _spread(held(programs.handover.result), programs.mesh.size, "all-gather", target)
    if kind in ENGINE or one.phase == "adv":
        return _decoded(programs, one, kind, target)
    critic = one.phase in ("values", "update_critic")
    trained = programs.critic if critic else programs.actor
    assert trained is not None
    update = one.phase.startswith("update")
    mesh, model = programs.mesh, trained.network.config
    weights = parameter_count(model) * trained.network.dtype.itemsize / mesh.shape["tensor"]
    plan = critic_plan(programs.config) if critic else plan_of(programs.config)
    passes = one.runs * (plan.optimizer_steps if update else 1)
    found = Traffic()
    found.add(_spread(weights, mesh.shape["fsdp"], "all-gather", target), passes * (2 if update else 1))  # fmt: skip
    if update:
        found.add(_spread(weights, mesh.shape["fsdp"], "reduce-scatter", target), passes)
        sums = 4 * parameter_count(model) / (mesh.shape["tensor"] * mesh.shape["fsdp"])
        found.add(_spread(2 * sums, mesh.shape["data"], "all-reduce", target), passes)
    return found


def _decoded(programs: Programs, one: Lowering, kind: str, target: Target) -> Traffic:
    """Two sums of activations per layer over the tensor axis, of every token that is fed."""
    model, mesh = programs.engine.config, programs.rollout_mesh
    if kind not in ("prefill", "advance"):
        return Traffic()
    rows = one.args[1].last.shape[0] if kind == "advance" else math.prod(one.args[1].shape)
    tokens = rows / sharding.shards(mesh) * one.runs
    size = 2 * model.num_layers * tokens * model.width * programs.actor.network.dtype.itemsize
    return _spread(2 * size, mesh.shape["tensor"], "all-reduce", target)


def _spread(size: float, devices: int, kind: str, target: Target) -> Traffic:
    """A collective of `size` bytes over so many devices, neighbours first."""
    if devices == 1:
        return Traffic()
    per_node = target.count // (target.slices if target.grid else target.hosts)
    nodes = max(1, devices // per_node)
    abroad = size * (nodes - 1) / nodes / min(per_node, devices)
    return Traffic({kind: size * (devices - 1) / devices}, abroad)
