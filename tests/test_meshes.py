"""The same losses, gradients, log-probs and values on every mesh, and what crosses devices on the way.

The vocabulary is 32, so that tensor axes split the head too; 4 query and 2 key heads split over two devices, over four the keys stay
whole.
"""

import re
from dataclasses import replace
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import learner, scoring, sharding
from jaxrl_llm.knobs import ActorKnobs, CriticKnobs
from jaxrl_llm.models import families, transformer
from tests import tiny
from tests.test_learner import keep_gradient, placed, plan

CONFIG = replace(tiny.model(), vocab_size=32)
MESHES = {
    "data": {"data": 8},
    "all but context": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"tensor": 4},
    "context": {"context": 4},
    "all": {"fsdp": 2, "context": 2, "tensor": 2},
}
TEMPERATURE = 0.7
GROUPS = 8


def params_on(mesh, critic=False):
    """Random parameters of the tiny model with 32 tokens, by the strict rules."""
    values = transformer.init(CONFIG, jax.random.key(3))
    values = jax.tree.map(lambda x: x * 8.0 if x.ndim > 2 else x, values)
    dims = families.param_dims(CONFIG)
    if critic:
        values = {"trunk": values, "value_head": {"kernel": jnp.linspace(-1.0, 1.0, 16)}}
        dims = {"trunk": dims, "value_head": {"kernel": "D"}}
    return jax.device_put(values, sharding.param_shardings(mesh, dims, values))


def network_on(mesh):
    return replace(tiny.network(mesh), config=CONFIG)


def made_update(mesh, critic=False):
    """One optimizer step over the whole ragged batch whose gradient is kept, and its arguments."""
    rollout, batch = tiny.ragged(groups=GROUPS)
    if critic:
        loss = learner.make_critic_loss(network_on(mesh), CriticKnobs())
    else:
        knobs = ActorKnobs(use_kl_loss=True, entropy_coeff=0.01)
        loss = learner.make_actor_loss(network_on(mesh), knobs, TEMPERATURE, on_policy=False)
    optimizer, params = keep_gradient(), params_on(mesh, critic)
    state = learner.ModelState(trainable=params, frozen={}, opt_state=optimizer.init(params))
    steps = plan(prompts=GROUPS, mini_prompts=GROUPS)
    update = learner.make_update(loss, optimizer, lambda count: 1.0, steps, mesh)
    packed = tiny.packed(rollout, mesh, micro_rows=3)
    return update, (state, placed(mesh, batch), packed, tiny.algorithm())


def gradient(mesh, critic=False):
    update, arguments = made_update(mesh, critic)
    state, metrics = update(*arguments)
    return jax.device_get((state.opt_state.gradient, metrics["loss"], metrics["grad_norm"]))


def readings(mesh):
    """Log-probs, entropies, sums of squares of policy and reference, and values."""
    rollout, _ = tiny.ragged(groups=GROUPS)
    packed = tiny.packed(rollout, mesh, micro_rows=3)
    score = scoring.make_score(network_on(mesh), 3 * GROUPS, 7, full=True)
    values = scoring.make_values(network_on(mesh), 3 * GROUPS, 7)
    critic = params_on(mesh, critic=True)
    temperature = np.float32(TEMPERATURE)
    return jax.device_get((score(critic["trunk"], packed, temperature), values(critic, packed)))


@cache
def on_one_device(kind):
    mesh = tiny.mesh()
    return readings(mesh) if kind == "readings" else gradient(mesh, critic=kind == "critic")


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("actor", mesh) for mesh in MESHES]
    + [("critic", mesh) for mesh in ("all but context", "all")],
)
def test_losses_and_gradients_are_those_of_one_device(kind, mesh):
    got = gradient(tiny.mesh(**MESHES[mesh]), critic=kind == "critic")
    assert tiny.worst_difference(on_one_device(kind), got) <= 1e-5


@pytest.mark.parametrize("mesh", MESHES)
def test_log_probs_entropies_and_values_are_those_of_one_device(mesh):
    got = readings(tiny.mesh(**MESHES[mesh]))
    assert tiny.worst_difference(on_one_device("readings"), got) <= 1e-5


def test_a_head_that_forgets_the_other_parts_of_the_vocabulary_is_caught(monkeypatch):
    """The negative test: each device's own soft-max over its part."""
    plain = scoring.token_numbers

    def own(logits, chosen, entropy, squares, axis=None):
        del axis
        return plain(logits, jnp.minimum(chosen, logits.shape[-1] - 1), entropy, squares)

    monkeypatch.setattr(scoring, "token_numbers", own)
    got = readings(tiny.mesh(tensor=2))
    assert tiny.worst_difference(on_one_device("readings"), got) > 1e-2


def test_means_per_data_shard_are_caught(monkeypatch):
    """The negative test: denominators counted by each data shard for itself."""
    count = learner.masking.count

    def own(mask, groups, number):
        whole = count(mask, groups, number)
        return replace(whole, tokens=jnp.sum(mask[: mask.shape[0] // 2]) * 2.0)

    monkeypatch.setattr(learner.masking, "count", own)
    got = gradient(tiny.mesh(data=2))
    assert tiny.worst_difference(on_one_device("actor"), got) > 1e-3


# What crosses devices ----------------------------------------------------------------------------------------------------

COLLECTIVE = re.compile(r"= (.*) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def exchanged(text):
    """Kind and largest operand, in elements, of every collective of a compiled program between different devices."""
    found = []
    for line in text.splitlines():
        alone = "replica_groups={{0},{1}}" in line or "replica_groups=[2,1]<=[2]" in line
        if not alone and (match := COLLECTIVE.search(line)):
            shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", match[1])
            largest = max(prod(map(int, filter(None, shape.split(",")))) for shape in shapes)
            found.append((match[2], largest))
    return found


def test_logits_never_cross_devices():
    """A vocabulary of 512 in two parts: whatever is exchanged for the head is a number per token, or its kernel."""
    wide = replace(CONFIG, vocab_size=512)
    mesh, slots = tiny.mesh(tensor=2), 64
    network = replace(network_on(mesh), config=wide)
    hidden = jax.ShapeDtypeStruct((1, slots, 16), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, slots), jnp.int32)
    kernel = jax.ShapeDtypeStruct(
        (16, 512), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "tensor"))
    )

    def loss(kernel, hidden, targets):
        scores = scoring.token_scores(
            network, {"head": {"kernel": kernel}}, hidden, targets, jnp.float32(1.0)
        )
        return jnp.sum(scores.logprobs + 0.1 * scores.entropy)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(kernel, hidden, targets).compile()
    crossing = exchanged(compiled.as_text())
    assert crossing and max(size for _, size in crossing) <= slots * 16
    assert compiled.output_shardings[0].spec == jax.P(None, "tensor"), "its gradient stays split"
