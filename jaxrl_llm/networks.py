"""The trained networks: opened from their files, placed on a mesh, given an optimizer, a compiled update and a first state.

What is here suffices to read a checkpoint back; prompts, engine and graders are `assembly`'s.

Left out on purpose: frozen layers and adapters (`ModelState.frozen` has room for them).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm import learner, scoring, sharding, tokenizer
from jaxrl_llm import optimizer as optimizers
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.config import Config, needs_critic
from jaxrl_llm.knobs import OptimKnobs
from jaxrl_llm.models import families, gguf, heads, kernels, transformer, weights
from jaxrl_llm.paths import is_gguf, resolve_model_path
from jaxrl_llm.records import Counters, ModelState, Params, TrainState


@dataclass(frozen=True)
class Trained:
    """One trained network: how it runs, its optimizer, where its parameters lie, its compiled update."""

    network: scoring.Network
    path: str
    optimizer: optax.GradientTransformation
    shardings: Params
    abstract: Params
    update: Callable[..., Any]


@dataclass(frozen=True)
class Networks:
    """What a saved state is read back into: the trained networks and their mesh, without prompts or an engine."""

    config: Config
    tokenizer: tokenizer.Tokenizer
    mesh: Mesh
    actor: Trained
    critic: Trained | None


class Holder(Protocol):
    """Whatever holds the trained networks: `Networks` or `assembly.Parts`."""

    @property
    def config(self) -> Config: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def actor(self) -> Trained: ...
    @property
    def critic(self) -> Trained | None: ...


def open_model(path: str) -> tuple[families.ModelConfig, weights.TensorSource]:
    """The model description and the tensors behind `model.path`: a GGUF file or a Hugging Face folder."""
    place = resolve_model_path(path)
    if is_gguf(place):
        source = gguf.open_gguf(place)
        return families.from_hf(source.hf_config), source
    return families.from_hf(weights.load_config(place)), weights.open_safetensors(place)


def compute_dtype(name: str) -> Any:
    """`auto` is float32 on CPU and bfloat16 on accelerators."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def scoring_temperature(config: Config) -> float:
    """The temperature of every log-prob: the sampler's, and 1 for greedy rollouts."""
    return config.rollout.temperature if config.rollout.do_sample else 1.0


def _trained(
    config: Config,
    mesh: Mesh,
    path: str,
    opened: tuple[families.ModelConfig, Any],
    *,
    optim: OptimKnobs,
    plan: learner.Plan,
    total_steps: int,
    remat: bool,
    critic: bool,
    on_policy: bool,
) -> Trained:
    model = opened[0]
    dims = families.param_dims(model)
    abstract = transformer.abstract_params(model)
    shardings = sharding.param_shardings(mesh, dims, abstract)
    if critic:
        shardings = {"trunk": shardings, "value_head": {"kernel": sharding.replicated(mesh)}}
        head = jax.ShapeDtypeStruct((model.width,), jnp.float32)
        abstract = {"trunk": abstract, "value_head": {"kernel": head}}
    network = scoring.Network(
        model,
        mesh,
        compute_dtype(config.model.compute_dtype),
        "full" if remat else "dots",
        kernels.choose(config.model.attention, jax.default_backend(), model.sliding_window),
    )
    schedule = optimizers.make_schedule(optim, total_steps * plan.optimizer_steps)
    optimizer = optimizers.make_optimizer(optim, schedule)
    if critic:
        loss_fn = learner.make_critic_loss(network, config.critic)
    else:
        loss_fn = learner.make_actor_loss(
            network, config.actor, scoring_temperature(config), on_policy
        )
    update = learner.make_update(loss_fn, optimizer, schedule, plan, mesh)
    return Trained(network, path, optimizer, shardings, abstract, update)


def _critic(
    config: Config,
    mesh: Mesh,
    opened: tuple[families.ModelConfig, Any],
    total: int,
) -> Trained:
    knobs = config.critic
    path = knobs.path or config.model.path
    if path != config.model.path:
        opened = open_model(path)
    return _trained(
        config, mesh, path, opened, optim=knobs.optim, plan=critic_plan(config), total_steps=total,
        remat=bool(knobs.enable_gradient_checkpointing), critic=True, on_policy=False,
    )  # fmt: skip


def build_networks(config: Config) -> Networks:
    """The trained networks alone, over whatever devices there are: enough to read a checkpoint of any mesh."""
    mesh = sharding.make_mesh(MeshShape(1, jax.device_count(), 1))
    actor, critic = trained_networks(config, mesh, open_model(config.model.path), total_steps=1)
    return Networks(config, read_tokenizer(config), mesh, actor, critic)


def read_tokenizer(config: Config) -> tokenizer.Tokenizer:
    """The tokenizer of `model.tokenizer_path`, with all stop ids."""
    return tokenizer.load(
        resolve_model_path(config.model.tokenizer_path or config.model.path),
        extra_stop_ids=config.rollout.stop_token_ids,
    )


def trained_networks(
    config: Config, mesh: Mesh, opened: tuple[families.ModelConfig, Any], total_steps: int
) -> tuple[Trained, Trained | None]:
    """Policy and, where the estimator needs values, critic, ready to load; `total_steps` shapes the schedules."""
    plan = plan_of(config)
    actor = _trained(
        config, mesh, config.model.path, opened, optim=config.actor.optim, plan=plan, total_steps=total_steps,
        remat=config.model.enable_gradient_checkpointing, critic=False, on_policy=plan.optimizer_steps == 1,
    )  # fmt: skip
    critic = _critic(config, mesh, opened, total_steps) if needs_critic(config) else None
    return actor, critic


def plan_of(config: Config) -> learner.Plan:
    """How the policy's batch is cut into passes and mini-batches."""
    return learner.Plan(
        prompts=config.data.train_batch_size,
        epochs=config.actor.ppo_epochs,
        mini_prompts=config.actor.ppo_mini_batch_size,
        shuffle=config.actor.shuffle,
    )


def critic_plan(config: Config) -> learner.Plan:
    """How the critic's batch is cut into passes and mini-batches."""
    plan, knobs = plan_of(config), config.critic
    return replace(
        plan,
        epochs=knobs.ppo_epochs or plan.epochs,
        mini_prompts=knobs.ppo_mini_batch_size or plan.mini_prompts,
    )


def _first_params(trained: Trained, critic: bool) -> Params:
    model, source = open_model(trained.path)
    trunk_shardings = trained.shardings["trunk"] if critic else trained.shardings
    trunk = weights.load_params(source, model, shardings=trunk_shardings)
    if not critic:
        return trunk
    head = jax.device_put(heads.init_value_head(model), trained.shardings["value_head"])
    return {"trunk": trunk, "value_head": head}


def first_state(parts: Holder) -> TrainState:
    """The state before the first step: weights from their files, fresh moments."""

    def fresh(trained: Trained, critic: bool) -> ModelState:
        params = _first_params(trained, critic)
        return optimizers.init_model_state(trained.optimizer, params, trained.shardings, parts.mesh)

    actor = fresh(parts.actor, critic=False)
    critic = fresh(parts.critic, critic=True) if parts.critic else None
    return TrainState(actor=actor, critic=critic, **scalars_of(parts))


def scalars_of(parts: Holder) -> dict[str, Any]:
    """Step, controllers and counters before the first step, replicated."""
    control, actor = parts.config.algorithm.kl_ctrl, parts.config.actor
    zero = jnp.zeros((), jnp.int32)
    scalars = {
        "step": zero,
        "algorithm": learner.init_algorithm_state(control.kl_coef, actor.kl_loss_coef),
        "counters": Counters(zero, zero, zero, zero),
    }
    return jax.device_put(scalars, sharding.replicated(parts.mesh))


def abstract_state(parts: Holder) -> TrainState:
    """Shapes, dtypes and shardings of the whole state, for a restore without loading weights first."""

    def described(trained: Trained) -> ModelState:
        placed = optimizers.state_shardings(
            trained.optimizer, trained.abstract, trained.shardings, parts.mesh
        )
        moments = jax.eval_shape(trained.optimizer.init, trained.abstract)

        def with_sharding(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return ModelState(
            trainable=jax.tree.map(with_sharding, trained.abstract, trained.shardings),
            frozen={},
            opt_state=jax.tree.map(with_sharding, moments, placed),
        )

    scalars = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), scalars_of(parts)
    )
    return TrainState(
        actor=described(parts.actor),
        critic=described(parts.critic) if parts.critic else None,
        **scalars,
    )
