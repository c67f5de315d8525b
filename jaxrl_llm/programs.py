"""Everything that a step compiles, from settings, architectures and meshes alone: no weights, no data, no device that could run it.

The trainer builds its programs here, and a planner lowers the very same functions for hardware that is only described.

Left out on purpose: what programs work on (see `assembly`), and arguments to lower them with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import learner, scoring, sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.config import Config, needs_reference
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.layouts import Layouts, layouts_of
from jaxrl_llm.models import families, transformer
from jaxrl_llm.networks import (
    Trained,
    described,
    plan_of,
    scoring_temperature,
    trained_networks,
)
from jaxrl_llm.records import Params
from jaxrl_llm.rollout.decode import TILE
from jaxrl_llm.rollout.engine import Engine, make_engine
from jaxrl_llm.rollout.handover import Handover, make_handover
from jaxrl_llm.rollout.queue import PREFILL_TOKENS, previous_columns

PROMPT_STEP = 16
"""Prompt widths of the engine are multiples of this."""
TWICE = ("tpu",)
"""Platforms on which XLA lays keys and values out anew for a chunk, unless columns and heads are whole tiles."""


@dataclass(frozen=True)
class Reader:
    """What the engine needs of a tokenizer and of the prompts: ids that end a response, text from ids, the longest prompt."""

    stop_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    longest_prompt: int


@dataclass(frozen=True)
class Programs:
    """The compiled functions of a run, their shapes and places.

    `reference` says what the frozen reference is made of and where it lies between uses; `score` reads the policy's old log-probs,
    `score_reference` the reference's.
    """

    config: Config
    mesh: Mesh
    rollout_mesh: Mesh
    actor: Trained
    critic: Trained | None
    reference: Params | None
    layouts: Layouts
    engine: Engine
    handover: Handover
    score: Callable[..., scoring.Scores]
    score_reference: Callable[..., scoring.Scores]
    values: Callable[..., jax.Array] | None
    prepare: Callable[..., Any]
    temperature: float
    old_logprobs_needed: bool


def rollout_mesh_of(config: Config, mesh: Mesh, local: Sequence[jax.Device]) -> Mesh:
    """The mesh of one process's devices for decoding: data x tensor. The training mesh itself, where both are the same."""
    tensor = config.rollout.tensor_model_parallel_size
    shape = MeshShape(len(local) // tensor, 1, tensor)
    same = tuple(mesh.shape[axis] for axis in sharding.AXES) == (shape.data, 1, 1, shape.tensor)
    return mesh if same and len(local) == mesh.size else sharding.make_mesh(shape, local)


def build(
    config: Config,
    policy: families.ModelConfig,
    valuer: families.ModelConfig,
    mesh: Mesh,
    rollout_mesh: Mesh,
    reader: Reader,
    *,
    total_steps: int,
) -> Programs:
    """All programs of a resolved configuration whose `rollout.max_num_seqs` is settled; compiles nothing yet."""
    actor, critic = trained_networks(config, mesh, policy, valuer, total_steps)
    batch = (config.data.train_batch_size * config.rollout.n, config.data.max_response_length)
    reference, fetched = _reference(config, actor)
    return Programs(
        config=config,
        mesh=mesh,
        rollout_mesh=rollout_mesh,
        actor=actor,
        critic=critic,
        reference=reference,
        layouts=layouts_of(config, mesh, actor.network.attention),
        engine=_engine(config, policy, rollout_mesh, actor.network.dtype, reader),
        handover=make_handover(
            families.param_dims(policy),
            actor.abstract,
            mesh,
            rollout_mesh,
            actor.network.dtype,
            source=actor.placement.home.trainable,
        ),
        score=scoring.make_score(actor.network, *batch, work=actor.fetched),
        score_reference=scoring.make_score(actor.network, *batch, work=fetched),
        values=scoring.make_values(critic.network, *batch, work=critic.fetched) if critic else None,
        prepare=learner.make_advantages(
            config.algorithm,
            prompts=config.data.train_batch_size,
            kl_loss_type=config.actor.kl_loss_type if config.actor.use_kl_loss else None,
        ),
        temperature=scoring_temperature(config),
        old_logprobs_needed=plan_of(config).optimizer_steps > 1
        or config.algorithm.use_kl_in_reward,
    )


def _reference(config: Config, actor: Trained) -> tuple[Params | None, Params | None]:
    """What the reference is made of (the compute dtype's copy, in host memory with `ref.param_offload`), and where it scores if
    that is elsewhere."""
    if not needs_reference(config):
        return None, None
    offload = config.ref.param_offload
    home = sharding.on_host(actor.shardings) if offload else actor.shardings
    copy = transformer.compute_copy(actor.network.config, actor.network.dtype)
    return jax.tree.map(described, copy, home), actor.shardings if offload else None


def _engine(
    config: Config, model: families.ModelConfig, mesh: Mesh, dtype: Any, reader: Reader
) -> Engine:
    """The engine, with room for the longest prompt there is, in steps of `PROMPT_STEP`, rather than the longest allowed."""
    width = -(-reader.longest_prompt // PROMPT_STEP) * PROMPT_STEP
    return make_engine(
        model,
        mesh,
        dtype=dtype,
        stop_ids=() if config.rollout.ignore_eos else tuple(reader.stop_ids),
        decode_text=reader.decode,
        stop_texts=config.rollout.stop,
        chunk=config.rollout.decode_chunk,
        max_num_seqs=config.rollout.max_num_seqs,
        prompt_length=min(width, config.data.max_prompt_length),
        response_length=config.data.max_response_length,
    )


def relaid(model: families.ModelConfig, mesh: Mesh, columns: int) -> bool:
    """Whether a chunk holds keys and values of so many own columns twice: on the platforms of `TWICE`, where these and the heads are
    not whole tiles."""
    return sharding.platform(mesh) in TWICE and (columns % TILE[0], model.head_size % TILE[1]) != (
        0,
        0,
    )


def fitting_slots(
    config: Config, model: families.ModelConfig, dtype: Any, mesh: Mesh, limit: int, prompts: int
) -> int:
    """Sequences of full length that the devices of a rollout mesh hold beside the weights' copy and a bank of prompts.

    Counted with the second copy of keys that some moments need: old and new while they grow to the last columns or narrow to half
    of the slots, and all of them where `relaid`.

    `limit` is a device's memory in bytes, of which `rollout.gpu_memory_utilization` may be filled; `prompts` are sampled at once.
    Raises `ConfigError` where not even one fits.
    """
    longest = config.data.max_prompt_length
    limit_tokens = config.data.max_response_length
    columns = longest + limit_tokens
    tensor, shards = mesh.shape["tensor"], sharding.shards(mesh)
    token = 2 * model.num_layers * model.num_kv_heads * model.head_size * dtype.itemsize / tensor
    growing = columns + previous_columns(limit_tokens)
    twice = relaid(model, mesh, limit_tokens)
    each = token * max(2.0 * columns if twice else 1.5 * columns, growing)
    weights = dtype.itemsize * families.parameter_count(model) / tensor
    bank = token * min(max(PREFILL_TOKENS, longest), -(-prompts // shards) * longest)
    room = limit * config.rollout.gpu_memory_utilization - weights - bank
    per_shard = int(room // each)
    if per_shard < 1:
        raise ConfigError(
            f"rollout: {room / 2**30:.1f} GiB of a device are left for key/value caches, but one sequence needs "
            f"{each / 2**30:.1f} GiB; raise rollout.gpu_memory_utilization or "
            "tensor_model_parallel_size, or shorten the responses"
        )
    return per_shard * shards
