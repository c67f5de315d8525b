"""Copies of parameters on several devices are compared: one flipped bit on one of them stops the run before a checkpoint is written."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import networks, replicas, sharding, step, trainer
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.errors import EXIT_INTERNAL, TrainingStopped
from jaxrl_llm.processes import Meetings
from tests import rig

MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 1}
POSITION = {"grain": {"next_index": 3}}


def flipped(array, number=1, bit=0):
    """The same array, with one bit of the last element of one device's part flipped."""
    pieces = []
    for piece in array.addressable_shards:
        data = np.array(piece.data)
        if piece.device.id == number:
            data.reshape(-1).view(np.uint32)[-1] ^= np.uint32(1 << bit)
        kind = array.sharding.memory_kind
        home = jax.sharding.SingleDeviceSharding(piece.device, memory_kind=kind)
        pieces.append(jax.device_put(data, home))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def damaged(state, name, number=1, which="actor"):
    """The state with a bit of a parameter flipped on one device."""
    model = getattr(state, which)

    def one(path, leaf):
        here = jax.tree_util.keystr(path, simple=True, separator=".")
        return flipped(leaf, number) if here == name else leaf

    params = jax.tree_util.tree_map_with_path(one, model.trainable)
    return replace(state, **{which: replace(model, trainable=params)})


# The checksum ------------------------------------------------------------------------------------------------------------


def plain(array):
    bits = np.ravel(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    return int(np.sum(bits * (2 * np.arange(bits.size, dtype=np.uint64) + 1)) % 2**32)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_checksum_is_the_plain_sum(shape, dtype):
    array = jax.random.normal(jax.random.key(len(shape)), shape, dtype)
    assert int(replicas.checksum(array)) == plain(np.asarray(array))


@pytest.mark.parametrize("bit", [0, 15, 31])
def test_every_flipped_bit_and_every_exchange_changes_it(bit):
    array = np.arange(1.0, 25.0, dtype=np.float32).reshape(2, 3, 4)
    whole = int(replicas.checksum(jnp.asarray(array)))
    for place in range(array.size):
        other = array.copy()
        other.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
        assert int(replicas.checksum(jnp.asarray(other))) != whole
    assert int(replicas.checksum(jnp.asarray(array[:, ::-1]))) != whole


def test_copies_are_the_devices_that_hold_one_part():
    mesh = sharding.make_mesh(MeshShape(2, 2, 1), jax.devices()[:4])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    assert [[one.id for one in group] for group in replicas.copies(spread, (4, 3))] == [[0, 2], [1, 3]]  # fmt: skip
    assert replicas.copies(sharding.rows(mesh), (4,)) == []
    assert len(replicas.copies(sharding.replicated(mesh), (4,))[0]) == 4


# The comparison ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ppo():
    """A PPO run's networks on 2 x 2 devices, with everything offloaded that can be, and the first state."""
    parts = rig.build(
        rig.ALGORITHMS["ppo"] | MESH | {"actor.param_offload": "true", "critic.param_offload": "true"}, count=4,
    )  # fmt: skip
    return parts, networks.first_state(parts)


def check(parts, state, every=1):
    one = replicas.ReplicaCheck(parts, Meetings(), every)
    one.check(state, POSITION)
    return one


def test_equal_copies_pass(ppo):
    assert check(*ppo).last == 0


@pytest.mark.parametrize(
    ("which", "name"), [("actor", "norm.scale"), ("critic", "value_head.kernel")]
)
def test_a_flipped_bit_is_found_and_named(ppo, which, name):
    parts, state = ppo
    bad = damaged(state, name, number=3, which=which)
    with pytest.raises(TrainingStopped) as stop:
        check(parts, bad)
    first, last = stop.value.problems
    assert re.match(rf"{which} parameter {re.escape(name)}: device 3 \(process 0\) holds other bits than device", first)  # fmt: skip
    assert "seen after step 0, at the first look" in last


def test_nothing_is_compared_where_it_is_switched_off(ppo):
    parts, state = ppo
    assert check(parts, damaged(state, "norm.scale"), every=None).last is None


def test_nothing_is_compared_on_one_device():
    parts = rig.build(rig.ALGORITHMS["grpo"])
    one = check(parts, networks.first_state(parts))
    assert one.networks == {} and one.last is None


class Twins:
    """Meetings with a second process that says the same but for some things."""

    def __init__(self, **other):
        self.other = other

    def gather(self, name, value):
        return [value, value | self.other]


def test_processes_at_another_step_or_position_are_named(ppo):
    parts, state = ppo
    one = replicas.ReplicaCheck(parts, Twins(step=4), 1)
    with pytest.raises(TrainingStopped, match=r"process 1 is at step 4 .* process 0 at step 0 of"):
        one.check(state, POSITION)
    one = replicas.ReplicaCheck(parts, Twins(position={"grain": {"next_index": 9}}), 1)
    with pytest.raises(TrainingStopped, match=r"process 1 .*'next_index': 9.*'next_index': 3"):
        one.check(state, POSITION)


@pytest.mark.parametrize("freq", [2, 50])
def test_a_run_stops_before_it_saves_what_differs(freq, tmp_path, monkeypatch, capsys):
    """A bit flips in step 3: found with the comparison after step 4 or before the checkpoint of step 3, which is not written."""
    real = step.train_step

    def hit(parts, run, state, number):
        state, row = real(parts, run, state, number)
        return damaged(state, "norm.scale", number=2) if number == 3 else state, row

    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.check_replicas_freq": freq,
        "trainer.save_freq": 3 if freq == 50 else 5,
        "trainer.test_freq": "none",
        "trainer.val_before_train": "false",
    }
    monkeypatch.setattr(trainer, "train_step", hit)
    assert rig.run_here(rig.ALGORITHMS["grpo"] | MESH | settings, count=4) == EXIT_INTERNAL
    said = capsys.readouterr().err
    assert "actor parameter norm.scale: device 2 (process 0) holds other bits" in said
    found, before = (3, 0) if freq == 50 else (4, 2)
    assert f"seen after step {found}, equal after step {before}" in said
    assert "every checkpoint was compared" in said
    assert rig.steps(tmp_path / "run") == []
