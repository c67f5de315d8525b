"""AdamW behind global-norm clipping: schedule, which leaves decay, and where its state lies.

Left out on purpose: other optimizers, and moments in a format other than float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm import sharding
from jaxrl_llm.knobs import OptimKnobs
from jaxrl_llm.records import ModelState, Params

Array = jax.Array


def make_schedule(knobs: OptimKnobs, total_steps: int) -> optax.Schedule:
    """Learning rate by optimizer step: linear warm-up from `lr / warmup`, then constant, cosine or linear."""
    warmup = knobs.lr_warmup_steps

    def schedule(count: Array) -> Array:
        count = jnp.asarray(count, jnp.float32)
        ramp = jnp.minimum(1.0, (count + 1) / max(1, warmup))
        left = jnp.clip((count - warmup) / max(1, total_steps - warmup), 0.0, 1.0)
        shape = {
            "constant": jnp.ones_like(left),
            "linear": 1.0 - left,
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * left)),
        }[knobs.lr_scheduler_type]
        if knobs.lr_scheduler_type != "constant":
            shape = knobs.min_lr_ratio + (1.0 - knobs.min_lr_ratio) * shape
        return knobs.lr * ramp * shape

    return schedule


def decayed(params: Params) -> Params:
    """Which leaves get weight decay: matrices, that is kernels of two axes or more; norms, biases and the value head are spared."""

    def one(path: tuple[Any, ...], leaf: Any) -> bool:
        return getattr(path[-1], "key", "") == "kernel" and leaf.ndim >= 2

    return jax.tree_util.tree_map_with_path(one, params)


def make_optimizer(knobs: OptimKnobs, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping, float32 moments."""
    adamw = optax.adamw(
        schedule,
        b1=knobs.betas[0],
        b2=knobs.betas[1],
        eps=knobs.eps,
        weight_decay=knobs.weight_decay,
        mask=decayed,
    )
    if knobs.clip_grad is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(knobs.clip_grad), adamw)


def state_shardings(
    optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh
) -> Any:
    """Shardings of an optimizer state: moments as their parameters, the rest replicated."""
    abstract = jax.eval_shape(optimizer.init, params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, placed: placed,
        abstract,
        shardings,
        transform_non_params=lambda _: sharding.replicated(mesh),
    )


@dataclass(frozen=True)
class Placement:
    """Where a network's state lies between uses (`home`) and during an update (`work`): two trees of shardings."""

    home: ModelState
    work: ModelState


def place_state(
    optimizer: optax.GradientTransformation,
    params: Params,
    shardings: Params,
    mesh: Mesh,
    *,
    param_offload: bool = False,
    optimizer_offload: bool = False,
) -> Placement:
    """Placement of parameters (of which `params` says the shapes) and moments; what is offloaded has its home in host memory.

    Counters stay on the devices: they are read between steps.
    """
    moments = state_shardings(optimizer, params, shardings, mesh)
    work = ModelState(trainable=shardings, frozen={}, opt_state=moments)
    home = work
    if param_offload:
        home = replace(home, trainable=sharding.on_host(shardings))
    if optimizer_offload:
        moved = optax.tree_utils.tree_map_params(
            optimizer, lambda where: where.with_memory_kind("pinned_host"), moments
        )
        home = replace(home, opt_state=moved)
    return Placement(home, work)


def init_model_state(
    optimizer: optax.GradientTransformation, params: Params, placement: Placement
) -> ModelState:
    """Fresh moments for placed parameters, at home."""
    moments = jax.jit(optimizer.init, out_shardings=placement.home.opt_state)(params)
    return ModelState(trainable=params, frozen={}, opt_state=moments)


def optimizer_count(opt_state: Any) -> Array:
    """Optimizer steps taken so far (skipped ones do not count)."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]
