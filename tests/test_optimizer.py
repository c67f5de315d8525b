"""The optimizer: schedules, weight decay, where moments lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import optimizer
from jaxrl_llm.knobs import OptimKnobs
from tests import tiny


def test_schedules():
    warm = optimizer.make_schedule(OptimKnobs(lr=1.0, lr_warmup_steps=4), 20)
    assert [float(warm(step)) for step in (0, 1, 3, 4, 19)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = optimizer.make_schedule(
        OptimKnobs(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), 10
    )
    np.testing.assert_allclose(
        [float(cosine(step)) for step in (0, 5, 10, 50)], [2, 1.1, 0.2, 0.2], rtol=1e-6
    )
    linear = optimizer.make_schedule(
        OptimKnobs(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=2), 12
    )
    np.testing.assert_allclose(
        [float(linear(step)) for step in (0, 1, 2, 7, 12)], [0.5, 1, 1, 0.5, 0], rtol=1e-6
    )


def test_weight_decay_spares_norms_biases_and_the_value_head():
    tree = {
        "layers": {
            "q": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4))},
            "norm": {"scale": jnp.ones((2, 3))},
        },
        "value_head": {"kernel": jnp.ones(3)},
    }
    assert optimizer.decayed(tree) == {
        "layers": {"q": {"kernel": True, "bias": False}, "norm": {"scale": False}},
        "value_head": {"kernel": False},
    }


def test_moments_are_sharded_like_their_parameters():
    mesh = tiny.mesh(fsdp=4, tensor=2)
    params = tiny.params(mesh)
    adamw = optimizer.make_optimizer(OptimKnobs(), lambda count: 1e-3)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    state = optimizer.init_model_state(
        adamw, params, optimizer.place_state(adamw, params, shardings, mesh)
    )
    moments = optax.tree_utils.tree_get(state.opt_state, "mu")
    same = jax.tree.map(lambda p, m: p.sharding == m.sharding, state.trainable, moments)
    assert all(jax.tree.leaves(same))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(moments))
