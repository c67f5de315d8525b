"""The trained networks: opened from their files, placed on a mesh, given an optimizer, a compiled update and a first state.

What is here suffices to read a checkpoint back; prompts, engine and graders are `assembly`'s.

Left out on purpose: frozen layers and adapters (`ModelState.frozen` has room for them).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import learner, scoring, sharding, tokenizer
from jaxrl_llm import optimizer as optimizers
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.config import Config, needs_critic
from jaxrl_llm.models import families, gguf, heads, kernels, transformer, weights
from jaxrl_llm.paths import is_gguf, resolve_model_path
from jaxrl_llm.records import Counters, ModelState, Params, TrainState


@dataclass(frozen=True)
class Trained:
    """One trained network: how it runs, its optimizer, where its parameters compute (`shardings`, shapes in `abstract`) and where its
    state lies during an update and between, its compiled update."""

    network: scoring.Network
    path: str
    optimizer: optax.GradientTransformation
    shardings: Params
    abstract: Params
    placement: optimizers.Placement
    update: Callable[..., Any]

    @property
    def fetched(self) -> Params | None:
        """Where parameters that are kept in host memory go when they are read; `None` where they are at work already."""
        return None if self.placement.home.trainable == self.shardings else self.shardings

    @property
    def state(self) -> ModelState:
        """Shapes, dtypes and places of the state between uses."""
        moments = jax.eval_shape(self.optimizer.init, self.abstract)
        shapes = ModelState(trainable=self.abstract, frozen={}, opt_state=moments)
        return jax.tree.map(described, shapes, self.placement.home)


def described(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of an array that need not exist."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


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


def compute_dtype(name: str, platform: str) -> Any:
    """`auto` is float32 on CPU and bfloat16 on accelerators."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def scoring_temperature(config: Config) -> float:
    """The temperature of every log-prob: the sampler's, and 1 for greedy rollouts."""
    return config.rollout.temperature if config.rollout.do_sample else 1.0


def _trained(
    config: Config,
    mesh: Mesh,
    path: str,
    model: families.ModelConfig,
    *,
    plan: learner.Plan,
    total_steps: int,
    remat: str,
    critic: bool,
    on_policy: bool,
) -> Trained:
    knobs = config.critic if critic else config.actor
    dims: Any = families.param_dims(model)
    abstract = transformer.abstract_params(model)
    if critic:
        dims = {"trunk": dims, "value_head": {"kernel": "D"}}
        head = jax.ShapeDtypeStruct((model.width,), jnp.float32)
        abstract = {"trunk": abstract, "value_head": {"kernel": head}}
    shardings = sharding.param_shardings(mesh, dims, abstract)
    network = scoring.Network(
        model,
        mesh,
        compute_dtype(config.model.compute_dtype, sharding.platform(mesh)),
        remat,
        kernels.choose(
            config.model.attention,
            sharding.platform(mesh),
            model.sliding_window,
            mesh.shape["context"],
        ),
    )
    schedule = optimizers.make_schedule(knobs.optim, total_steps * plan.optimizer_steps)
    optimizer = optimizers.make_optimizer(knobs.optim, schedule)
    placement = optimizers.place_state(
        optimizer,
        abstract,
        shardings,
        mesh,
        param_offload=knobs.param_offload,
        optimizer_offload=knobs.optimizer_offload,
    )
    if critic:
        loss_fn = learner.make_critic_loss(network, config.critic)
    else:
        loss_fn = learner.make_actor_loss(
            network, config.actor, scoring_temperature(config), on_policy
        )
    update = learner.make_update(
        loss_fn,
        optimizer,
        schedule,
        plan,
        mesh,
        accumulate_in=knobs.grad_accumulation_dtype,
        placement=placement,
    )
    return Trained(network, path, optimizer, shardings, abstract, placement, update)


def build_networks(config: Config) -> Networks:
    """The trained networks alone, over as many devices as their width divides by: enough to read a checkpoint of any mesh."""
    models = models_of(config)
    fitting = math.gcd(*(model.width for model in models))
    count = max(n for n in range(1, jax.device_count() + 1) if fitting % n == 0)
    mesh = sharding.make_mesh(MeshShape(1, count, 1), jax.devices()[:count])
    actor, critic = trained_networks(config, mesh, *models, total_steps=1)
    return Networks(config, read_tokenizer(config), mesh, actor, critic)


def models_of(config: Config) -> tuple[families.ModelConfig, families.ModelConfig]:
    """The architectures of policy and critic (which may be one), read from their files."""
    policy = open_model(config.model.path)[0]
    path = config.critic.path
    other = needs_critic(config) and path is not None and path != config.model.path
    return policy, open_model(path)[0] if other and path else policy


def read_tokenizer(config: Config) -> tokenizer.Tokenizer:
    """The tokenizer of `model.tokenizer_path`, with all stop ids."""
    return tokenizer.load(
        resolve_model_path(config.model.tokenizer_path or config.model.path),
        extra_stop_ids=config.rollout.stop_token_ids,
    )


def trained_networks(
    config: Config,
    mesh: Mesh,
    policy: families.ModelConfig,
    valuer: families.ModelConfig,
    total_steps: int,
) -> tuple[Trained, Trained | None]:
    """Policy and, where the estimator needs values, critic, ready to load; `total_steps` shapes the schedules."""
    plan = plan_of(config)
    actor = _trained(
        config, mesh, config.model.path, policy, plan=plan, total_steps=total_steps,
        remat=str(config.model.enable_gradient_checkpointing), critic=False, on_policy=plan.optimizer_steps == 1,
    )  # fmt: skip
    if not needs_critic(config):
        return actor, None
    return actor, _trained(
        config, mesh, config.critic.path or config.model.path, valuer, plan=critic_plan(config), total_steps=total_steps,
        remat=str(config.critic.enable_gradient_checkpointing), critic=True, on_policy=False,
    )  # fmt: skip


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
    home = trained.placement.home.trainable
    trunk = weights.load_params(source, model, shardings=home["trunk"] if critic else home)
    if not critic:
        return trunk
    head = sharding.put(jax.device_get(heads.init_value_head(model)), home["value_head"])
    return {"trunk": trunk, "value_head": head}


def first_state(parts: Holder) -> TrainState:
    """The state before the first step: weights from their files, fresh moments."""

    def fresh(trained: Trained, critic: bool) -> ModelState:
        params = _first_params(trained, critic)
        return optimizers.init_model_state(trained.optimizer, params, trained.placement)

    actor = fresh(parts.actor, critic=False)
    critic = fresh(parts.critic, critic=True) if parts.critic else None
    scalars = sharding.put(scalars_of(parts), sharding.replicated(parts.mesh))
    return TrainState(actor=actor, critic=critic, **scalars)


def scalars_of(parts: Holder) -> dict[str, Any]:
    """Step, controllers and counters before the first step, on the host."""
    control, actor = parts.config.algorithm.kl_ctrl, parts.config.actor
    zero = np.zeros((), np.int32)
    return {
        "step": zero,
        "algorithm": learner.init_algorithm_state(control.kl_coef, actor.kl_loss_coef),
        "counters": Counters(zero, zero, zero, zero),
    }


def abstract_state(parts: Holder) -> TrainState:
    """Shapes, dtypes and shardings of the whole state, for a restore without loading weights first."""
    whole = sharding.replicated(parts.mesh)
    scalars = scalars_of(parts)
    return TrainState(
        actor=parts.actor.state,
        critic=parts.critic.state if parts.critic else None,
        **jax.tree.map(lambda leaf: described(leaf, whole), scalars),
    )
