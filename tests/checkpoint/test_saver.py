"""Round trips of whole states, donation during a save, and saves that fail."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxrl_llm.checkpoint import (
    CheckpointError,
    owned_copy,
    saver,
    tree_digests,
)
from jaxrl_llm.records import TrainState
from tests.checkpoint.rig import (
    abstract,
    bits,
    file_limit,
    held,
    mesh_of,
    orbax_noise,
    planned,
    save_all,
    saver_for,
    sharded,
    small,
    train_state,
)


def test_whole_train_state_round_trips(tmp_path):
    state = sharded(mesh_of(8))(train_state(3))
    checkpointer, _ = saver_for(tmp_path / "c")
    run = {"config": {"lr": 1e-6, "name": "x"}, "best": float("-inf"), "rows": [1, 2]}
    checkpointer.save(3, state, run)
    checkpointer.wait()
    step, back, manifest = checkpointer.restore(abstract(state))
    assert step == 3 and manifest == run
    assert str(jax.tree.structure(back)) == str(jax.tree.structure(state))
    assert isinstance(back, TrainState) and back.critic is None
    assert bits(back) == bits(state)
    assert all(
        a.sharding == b.sharding
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True)
    )
    assert tree_digests(back) == tree_digests(state)
    document = checkpointer.manifest(3)
    assert document["format"] == 1 and document["libraries"]["jax"] == jax.__version__
    assert document["leaves"]["actor/trainable/layers/w"]["shape"] == [8, 16]


@pytest.mark.parametrize("shape", [(2, 4), (4,), (1,)])
def test_restores_bit_equal_on_another_mesh(tmp_path, shape):
    state = sharded(mesh_of(8))(train_state(2))
    checkpointer, _ = saver_for(tmp_path)
    checkpointer.save(2, state, {})
    checkpointer.wait()
    wanted = abstract(sharded(mesh_of(*shape))(train_state(1)))
    _, back, _ = checkpointer.restore(wanted)
    assert bits(back) == bits(state)
    assert back.actor.trainable["embed"].sharding == wanted.actor.trainable["embed"].sharding


def test_leaf_kinds(tmp_path):
    state = {
        "bf16": jnp.arange(5, dtype=jnp.bfloat16),
        "f8": jnp.ones((3,), jnp.float8_e4m3fn),
        "int4": jnp.ones((3,), jnp.int4),
        "flag": jnp.array([True, False]),
        "key": jax.random.key_data(jax.random.key(1)),
        "numpy": np.array([1.5, -0.0, np.nan]),
        "count": 7,
        "rate": 0.1,
        "none": None,
        "tuple": (jnp.float32(2), ()),
        "odd name.with [signs]": jnp.zeros((2, 0, 3)),
    }
    checkpointer, _ = saver_for(tmp_path)
    checkpointer.save(1, state, {})
    checkpointer.wait()
    wanted = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
        ),
        state,
    )
    _, back, _ = checkpointer.restore(wanted)
    assert str(jax.tree.structure(back)) == str(jax.tree.structure(state))
    assert bits(back) == bits(state)
    assert (back["count"], back["rate"]) == (7, 0.1)
    assert isinstance(back["numpy"], np.ndarray) and type(back["count"]) is int
    assert back["bf16"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_state_without_elements(tmp_path):
    checkpointer, _ = saver_for(tmp_path)
    checkpointer.save(1, {"a": jnp.zeros((0, 3))}, {})
    checkpointer.wait()
    assert checkpointer.restore({"a": jax.ShapeDtypeStruct((0, 3), jnp.float32)})[1]["a"].shape == (
        0,
        3,
    )


def test_donation_works_with_and_without_a_save_in_flight(tmp_path, monkeypatch):
    @partial(jax.jit, donate_argnums=0)
    def advance(state):
        return jax.tree.map(lambda leaf: leaf + 1, state)

    def addresses(state):
        return [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
        ]

    def donated(state):
        before = addresses(state)
        after = advance(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert addresses(after) == before
        return after

    checkpointer, _ = saver_for(tmp_path)
    alone = {"w": jnp.ones((64, 64)), "n": jnp.int32(0)}
    spread = sharded(mesh_of(8))({"w": jnp.ones((64, 64))})
    state = donated(advance({"alone": alone, "spread": spread}))
    wanted, expected = abstract(state), bits(jax.tree.map(owned_copy, state))
    with held(monkeypatch, 1):
        checkpointer.save(1, state, {})
        donated(donated(state))
        assert checkpointer._in_flight()
    checkpointer.wait()
    _, back, _ = checkpointer.restore(wanted)
    assert bits(jax.tree.map(owned_copy, back)) == expected
    donated(advance(back))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(back))


def test_a_view_of_the_live_array_would_turn_donation_off():
    """The reason for `owned_copy`: the plain way fails the test above."""
    bump = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    viewed, copied = bump(jnp.ones((64, 64))), bump(jnp.ones((64, 64)))
    view, copy = np.asarray(viewed), owned_copy(copied)
    bump(viewed), bump(copied)
    assert not viewed.is_deleted() and copied.is_deleted()
    assert (view == copy).all()


@orbax_noise
def test_full_disk_is_reported_at_the_next_check_and_saving_works_again(tmp_path):
    checkpointer, _ = saver_for(tmp_path, keep=1)
    save_all(checkpointer, [10])
    rng = np.random.default_rng(0)
    noise = {"w": jnp.asarray(rng.standard_normal((64, 64), np.float32)), "n": jnp.int32(20)}
    with file_limit(4096):
        checkpointer.save(20, noise, {})
        checkpointer._join()
    with pytest.raises(CheckpointError, match="step 20") as caught:
        checkpointer.check()
    assert caught.value.exit_code == 70
    checkpointer.check()
    assert checkpointer.steps() == [10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "owner.json"]
    checkpointer.save(20, noise, {})
    checkpointer.wait()
    assert checkpointer.steps() == [20]
    assert bits(checkpointer.restore(abstract(noise))[1]) == bits(noise)


def test_failure_of_the_final_save_is_raised_by_wait_and_by_close(tmp_path):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    for end in ("wait", "close"):
        checkpointer, _ = saver_for(tmp_path / "blocked")
        checkpointer.save(1, small(1), {})
        with pytest.raises(CheckpointError, match="step 1"):
            getattr(checkpointer, end)()


def test_settle_gives_the_failures_back_without_raising(tmp_path, monkeypatch):
    checkpointer, _ = saver_for(tmp_path)
    with planned(monkeypatch, "in_save:2:raise"):
        save_all(checkpointer, [1])
        checkpointer.save(2, small(2), {})
        (text,) = checkpointer.settle()
    assert "step 2" in text and "planned fault" in text
    checkpointer.wait()
    assert checkpointer.settle() == []


def test_fault_before_the_rename_leaves_no_step(tmp_path, monkeypatch):
    checkpointer, _ = saver_for(tmp_path, keep=1)
    save_all(checkpointer, [1])
    with planned(monkeypatch, "in_save:2:raise"):
        checkpointer.save(2, small(2), {})
        with pytest.raises(CheckpointError, match="planned fault"):
            checkpointer.wait()
    assert checkpointer.steps() == [1]
    assert checkpointer.restore(abstract(small(1)))[0] == 1


def test_manifest_that_is_not_json_fails_at_the_call(tmp_path):
    checkpointer, _ = saver_for(tmp_path)
    with pytest.raises(TypeError):
        checkpointer.save(1, small(1), {"bad": object()})
    assert checkpointer.steps() == []


def test_one_save_in_flight_the_second_waits_and_says_so(tmp_path, monkeypatch):
    checkpointer, log = saver_for(tmp_path)
    with held(monkeypatch, 2), held(monkeypatch, 1) as first:

        def said(line):
            log.append(line)
            first.set()

        checkpointer._log = said
        checkpointer.save(1, small(1), {})
        assert checkpointer._in_flight() and log == []
        checkpointer.save(2, small(2), {})
        assert checkpointer.steps() == [1] and checkpointer._in_flight()
    checkpointer.wait()
    assert len(log) == 2 and "step 2 waits for the save of step 1" in log[0]
    waited = re.search(r"step 2 waited (\d+\.\d) s", log[1])
    assert checkpointer.blocked_seconds >= float(waited[1]) - 0.05
    assert checkpointer.steps() == [1, 2]


def test_a_wait_has_a_limit(tmp_path, monkeypatch):
    checkpointer, _ = saver_for(tmp_path, limit_seconds=0.05)
    with held(monkeypatch, 1):
        checkpointer.save(1, small(1), {})
        with pytest.raises(CheckpointError, match="no end within 0 s"):
            checkpointer.wait()
    checkpointer._limit = 60.0
    checkpointer.wait()


def test_who_waits_for_a_save_gives_signs_of_life(tmp_path, monkeypatch):
    """Else a watchdog would end a run whose last save takes long."""
    monkeypatch.setattr(saver, "BEAT_SECONDS", 0.01)
    beats = []
    with held(monkeypatch, 1) as gate:

        def beat():
            beats.append(checkpointer._in_flight())
            if len(beats) == 3:
                gate.set()

        checkpointer, _ = saver_for(tmp_path, beat=beat)
        checkpointer.save(1, small(1), {})
        assert beats == []
        checkpointer.wait()
    assert len(beats) >= 3 and checkpointer.steps() == [1]


def test_saving_the_same_step_again(tmp_path):
    checkpointer, log = saver_for(tmp_path, keep=1)
    save_all(checkpointer, [5])
    inode = (tmp_path / "00000005").stat().st_ino
    save_all(checkpointer, [5])
    assert (tmp_path / "00000005").stat().st_ino == inode
    assert any("already there" in line for line in log)
    checkpointer.save(5, small(6), {"row": 50})
    checkpointer.wait()
    assert float(checkpointer.restore(abstract(small(1)))[1]["w"][0, 0]) == 6.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "owner.json"]


def test_kill_between_the_two_renames_of_a_replacement(tmp_path):
    """Built by hand: the old step has stepped aside, the new one has not arrived."""
    checkpointer, _ = saver_for(tmp_path, keep=1)
    save_all(checkpointer, [5])
    (tmp_path / "00000005").rename(tmp_path / "00000005.replaced")
    again, _ = saver_for(tmp_path, keep=1)
    assert again.steps() == [5]
    assert again.restore(abstract(small(5)))[0] == 5
    save_all(again, [5])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "owner.json"]


def test_importing_does_not_load_orbax():
    program = "import sys, jaxrl_llm.checkpoint; print('orbax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout.strip() == b"False"
    assert Path(saver.__file__).name == "saver.py"
