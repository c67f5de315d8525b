"""The parts of a run: what is said, where weights lie, the first state, slots, and refusals."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import assembly, networks
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models import families
from tests import rig

SHORT = {"data.val_files": "[]"}


@pytest.fixture(scope="module")
def plain():
    return rig.build({})


def test_steps_come_from_the_epochs_unless_they_are_set(plain):
    assert (plain.total_steps, plain.stream.steps_per_epoch) == (6, 5)
    twice = {"trainer.total_training_steps": "none", "trainer.total_epochs": 2}
    assert rig.build(SHORT | twice).total_steps == 10


def test_old_log_probs_are_scored_only_where_they_can_differ(plain):
    assert not plain.old_logprobs_needed
    several = {"actor.ppo_mini_batch_size": 4}, {"actor.ppo_epochs": 2}
    for settings in (*several, rig.ALGORITHMS["rloo"]):
        assert rig.build(SHORT | settings).old_logprobs_needed


def test_greedy_rollouts_are_scored_at_temperature_one(plain):
    assert plain.temperature == plain.config.rollout.temperature == 1.5
    greedy = replace(plain.config, rollout=replace(plain.config.rollout, do_sample=False))
    assert networks.scoring_temperature(greedy) == 1.0


def test_what_is_said_about_the_prompts(capsys):
    said = []
    cut = {"data.max_prompt_length": 8, "data.truncation": "left"}
    with rig.devices(1):
        assembly.build(rig.settings(cut | {"data.val_files": "arithmetic:train:3"}), said.append)
    lines = [line for line in said if line.startswith(("training:", "validation:"))]
    assert (
        lines[0].startswith("training: 40 prompts (") and "longer than the limit, cut" in lines[0]
    )
    assert any("3 validation prompts are training prompts too" in line for line in said)
    assert capsys.readouterr().out == ""


def test_the_fingerprint_follows_data_and_reference(plain):
    other = rig.build(SHORT | {"data.train_files": "arithmetic:train:41"})
    assert other.fingerprint["train"] != plain.fingerprint["train"]
    assert other.fingerprint["tokenizer"] == plain.fingerprint["tokenizer"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data.train_files": "arithmetic:train:7"}, "got 7 prompts for data.train_batch_size 8"),
        ({"data.max_response_length": 4096}, "positions; shorten one of them"),
        ({"model.path": "nowhere/at/all"}, "nowhere/at/all"),
        ({"data.max_prompt_length": 4}, "prompt"),
    ],
)
def test_what_cannot_be_built_is_refused_before_any_weights(settings, said):
    with pytest.raises((ConfigError, DataError), match=said):
        rig.build(SHORT | settings)


def test_a_reference_of_another_architecture_is_refused(plain, monkeypatch):
    open_model = networks.open_model

    def other(path):
        model, source = open_model(path)
        return replace(model, num_layers=model.num_layers + 1), source

    monkeypatch.setattr(assembly, "open_model", other)
    with pytest.raises(ConfigError, match=r"ref\.path: .*another architecture"):
        assembly._reference(plain, lambda text: None)


def test_the_rollout_mesh_is_the_training_mesh_where_both_have_one_shape(plain):
    assert plain.rollout_mesh is plain.mesh and plain.handover.program is None
    params = networks.first_state(plain).actor.trainable
    same = jax.tree.map(lambda one, other: one is other, plain.handover(params), params)
    assert all(jax.tree.leaves(same))
    two = rig.build(SHORT | {"rollout.tensor_model_parallel_size": 2}, count=8)
    shape = {"data": 4, "fsdp": 1, "context": 1, "tensor": 2}
    assert dict(two.rollout_mesh.shape) == shape
    first = networks.first_state(two).actor.trainable
    moved = two.handover(first)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(moved), strict=True):
        assert np.array_equal(one, other)
    assert jax.tree.leaves(moved)[0].sharding.mesh == two.rollout_mesh


def test_slots_fill_the_share_of_memory(plain, monkeypatch):
    """Worked by hand: what a share of a made-up device leaves after the weights and the batch's prompts, over the bytes of one cache and
    half of it again, which growing and narrowing hold for a moment."""
    model, config = plain.actor.network.config, plain.config
    columns = 16 + 24
    each = 2 * model.num_layers * columns * model.num_kv_heads * model.head_size * 4
    prompts = 8 * 16 * each // columns
    once, each = each, each * 3 // 2
    weights_bytes = 4 * families.parameter_count(model) + prompts

    def slots(limit, share):
        knobs = replace(config.rollout, gpu_memory_utilization=share, max_num_seqs=None)
        device = SimpleNamespace(memory_stats=lambda: limit and {"bytes_limit": limit})
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        return assembly.slots_for(
            replace(config, rollout=knobs), model, jnp.dtype("float32"), plain.mesh, lambda t: None
        )

    limit = 2 * (weights_bytes + 10 * each)
    assert slots(limit, 0.5) == 10
    assert slots(limit, 1.0) == int((limit - weights_bytes) // each) > 20
    assert slots(None, 0.5) is None
    monkeypatch.setattr(assembly.sharding, "platform", lambda mesh: "tpu")
    assert slots(limit, 0.5) == 10 * each // (2 * once) == 7, "keys are held twice there"
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"one sequence needs"):
        slots(2 * weights_bytes + each, 0.5)
