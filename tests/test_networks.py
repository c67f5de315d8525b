"""The trained networks: first state, what a restore expects, refusals, and a state read back without prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import networks
from jaxrl_llm.models import weights
from tests import rig

SHORT = {"data.val_files": "[]"}


@pytest.fixture(scope="module")
def plain():
    return rig.build({})


@pytest.fixture(scope="module")
def ppo():
    return rig.build(SHORT | rig.ALGORITHMS["ppo"])


def same_shapes(state, abstract):
    """Every leaf has the shape, dtype and placement that was described."""
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_the_first_state_is_what_a_restore_expects(plain, ppo):
    for parts in (plain, ppo):
        same_shapes(networks.first_state(parts), networks.abstract_state(parts))
    assert plain.critic is None and networks.first_state(plain).critic is None


def test_the_first_state_on_a_sharded_mesh():
    layout = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    parts = rig.build(SHORT | layout | rig.ALGORITHMS["ppo"], count=8)
    state = networks.first_state(parts)
    same_shapes(state, networks.abstract_state(parts))
    split = [leaf for leaf in jax.tree.leaves(state) if not leaf.sharding.is_fully_replicated]
    assert len(split) > 10


def test_the_first_state_holds_the_files_weights_and_zero_moments(plain, ppo):
    model, source = networks.open_model(plain.config.model.path)
    expected = weights.load_params(source, model)
    for state in (networks.first_state(plain).actor, networks.first_state(ppo).actor):
        for got, want in zip(
            jax.tree.leaves(state.trainable), jax.tree.leaves(expected), strict=True
        ):
            assert np.array_equal(got, want) and got.dtype == jnp.float32
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    critic = networks.first_state(ppo).critic.trainable
    assert not np.any(critic["value_head"]["kernel"])
    assert np.array_equal(jax.tree.leaves(critic["trunk"])[0], jax.tree.leaves(expected)[0])


def test_first_coefficients_and_counters():
    parts = rig.build(SHORT | rig.ALGORITHMS["rloo"] | {"actor.kl_loss_coef": 0.25})
    state = networks.first_state(parts)
    assert float(state.algorithm.kl_coef_reward) == np.float32(0.05)
    assert float(state.algorithm.kl_coef_loss) == 0.25
    assert all(int(leaf) == 0 for leaf in [state.step, *jax.tree.leaves(state.counters)])


def test_compute_dtype():
    assert networks.compute_dtype("auto", "cpu") == jnp.float32
    assert networks.compute_dtype("auto", "tpu") == jnp.bfloat16
    assert networks.compute_dtype("bfloat16", "cpu") == jnp.bfloat16


def test_a_saved_state_needs_neither_prompts_nor_the_runs_mesh(ppo):
    gone = rig.settings(
        rig.ALGORITHMS["ppo"] | {"data.train_files": "nowhere.jsonl", "mesh.tensor": 2}
    )
    with rig.devices(4):
        alone = networks.build_networks(gone)
    assert alone.mesh.shape["fsdp"] == 4
    wanted, described = networks.abstract_state(ppo), networks.abstract_state(alone)
    assert jax.tree.structure(wanted) == jax.tree.structure(described)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(described), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
