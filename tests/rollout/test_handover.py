"""Weights on their way from the training mesh to the rollout mesh: values, types, places, what travels and what it costs."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import families, heads, transformer
from jaxrl_llm.rollout.handover import make_handover
from tests import tiny
from tests.loopback import free_port

CONFIG = families.from_hf(
    tiny.HF
    | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    | {"model_type": "qwen3", "attention_bias": True}
)
DIMS, ABSTRACT = families.param_dims(CONFIG), transformer.abstract_params(CONFIG)


def trained(mesh, host=False):
    """Random parameters as they are trained, norm scales and biases too, and their shardings."""
    source = sharding.param_shardings(mesh, DIMS, ABSTRACT)
    if host:
        source = sharding.on_host(source)
    random = np.random.default_rng(0)
    values = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape).astype(np.float32), ABSTRACT
    )
    return values, jax.device_put(values, source), source


def made(mesh, rollout_mesh, dtype, source):
    return make_handover(DIMS, ABSTRACT, mesh, rollout_mesh, dtype, source=source)


def cast(path, leaf):
    return leaf if path[-1].key == "scale" else np.asarray(jnp.asarray(leaf, jnp.bfloat16))


@pytest.mark.parametrize(
    ("train", "decode", "host"),
    [((1, 8, 1), (4, 1, 2), False), ((1, 8, 1), (4, 1, 2), True), ((2, 2, 2), (8, 1, 1), False), ((2, 2, 2), (2, 1, 4), True)],
)  # fmt: skip
def test_every_device_gets_the_cast_values_and_the_originals_stay(train, decode, host):
    mesh, rollout_mesh = tiny.mesh(*train), tiny.mesh(*decode)
    values, params, source = trained(mesh, host)
    handover = made(mesh, rollout_mesh, jnp.bfloat16, source)
    copy = handover(params)
    expected = jax.tree_util.tree_map_with_path(cast, values)

    def check(leaf, plain, wanted, original):
        assert leaf.dtype == plain.dtype and leaf.sharding == wanted.sharding
        assert leaf.sharding.mesh is rollout_mesh and len(leaf.addressable_shards) == 8
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), plain[shard.index])
        assert not original.is_deleted()

    jax.tree.map(check, copy, expected, handover.result, params)
    kernel = copy["layers"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 32, 64 // decode[2])


def test_a_process_takes_what_its_own_devices_hold():
    """Four of eight devices stand for one process: its arrays are complete and on its devices alone."""
    mesh = tiny.mesh(fsdp=8)
    values, params, source = trained(mesh)
    for first in (0, 4):
        shape = tiny.MeshShape(2, 1, 2)
        own = sharding.make_mesh(shape, jax.devices()[first : first + 4])
        copy = made(mesh, own, jnp.float32, source)(params)
        for leaf, plain in zip(jax.tree.leaves(copy), jax.tree.leaves(values), strict=True):
            assert leaf.sharding.device_set == set(own.devices.flat)
            np.testing.assert_array_equal(leaf, plain)


def test_devices_that_are_no_block_of_the_training_mesh_are_refused():
    mesh = tiny.mesh(fsdp=8)
    shape, source = tiny.MeshShape(2, 1, 2), sharding.param_shardings(mesh, DIMS, ABSTRACT)
    with pytest.raises(ConfigError, match="the 4 devices to decode on are no block of the 8"):
        made(mesh, sharding.make_mesh(shape, jax.devices()[2:6]), jnp.float32, source)


def test_where_nothing_changes_the_same_arrays_come_back():
    for mesh in (tiny.mesh(), tiny.mesh(data=4, tensor=2)):
        _, params, source = trained(mesh)
        handover = made(mesh, mesh, jnp.float32, source)
        assert handover.program is None
        same = jax.tree.map(lambda a, b: a is b, handover(params), params)
        assert all(jax.tree.leaves(same))
    mesh = tiny.mesh(data=2, fsdp=1, tensor=1)
    whole = made(mesh, tiny.mesh(), jnp.float32, trained(mesh)[2])
    assert whole.program is None, "complete on every device already"
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(whole(trained(mesh)[1]))} == {1}


def test_on_one_mesh_weights_are_cast_where_they_lie():
    mesh = tiny.mesh(fsdp=4, tensor=2)
    values, params, source = trained(mesh)
    handover = made(mesh, mesh, jnp.bfloat16, source)
    copy = handover(params)
    expected = jax.tree_util.tree_map_with_path(cast, values)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), copy, expected)
    assert jax.tree.map(lambda leaf: leaf.sharding, copy) == source
    assert not collectives(handover.program.lower(handover.source).compile())


def collectives(compiled):
    """Dtype and dims of what the exchanges of a program return."""
    found = []
    for line in compiled.as_text().splitlines():
        exchange = re.search(r" = (.*?) (all-gather|all-to-all|collective-permute|all-reduce)(-start)?\(", line)  # fmt: skip
        if exchange:
            found += [
                (kind, [int(size) for size in dims.split(",") if size])
                for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", exchange[1])
            ]
    return found


@pytest.mark.parametrize("host", [False, True])
def test_what_travels_is_narrow_and_no_leaf_is_gathered_whole(host):
    mesh, rollout_mesh = tiny.mesh(fsdp=8), tiny.mesh(data=4, tensor=2)
    handover = made(mesh, rollout_mesh, jnp.bfloat16, trained(mesh, host)[2])
    compiled = handover.program.lower(handover.source).compile()
    wide = [dims for kind, dims in collectives(compiled) if kind != "u16"]
    scales = [3 * 32, 3 * 8, 32]
    assert all(int(np.prod(dims)) in scales or np.prod(dims) < 3 * 32 for dims in wide), wide
    largest = max(2 * leaf.size // 2 for leaf in jax.tree.leaves(ABSTRACT))
    assert (
        max(2 * np.prod(dims) for kind, dims in collectives(compiled) if kind == "u16") == largest
    )
    memory = compiled.memory_analysis()
    cast_shards = sum(4 * leaf.size // 8 for leaf in jax.tree.leaves(ABSTRACT))
    assert memory.temp_size_in_bytes <= 3 * largest + host * cast_shards


def logprobs(params, dtype):
    tokens = np.random.default_rng(1).integers(0, 64, (2, 12)).astype(np.int32)
    columns = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)

    @jax.jit
    def run(params):
        hidden = transformer.apply(
            CONFIG, params, tokens, columns, np.ones_like(tokens), compute_dtype=dtype
        )
        return jax.nn.log_softmax(heads.logits(CONFIG, params, hidden, compute_dtype=dtype))

    return np.asarray(run(params))


def test_logprobs_of_the_copy_are_those_of_the_originals_bit_for_bit():
    mesh = tiny.mesh()
    _, params, source = trained(mesh)
    copy = made(mesh, mesh, jnp.bfloat16, source)(params)
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(copy)}
    assert kinds == {"bfloat16", "float32"}
    original = logprobs(params, jnp.bfloat16)
    np.testing.assert_array_equal(logprobs(copy, jnp.bfloat16), original)
    assert np.abs(original - logprobs(params, jnp.float32)).max() > 1e-3
    blunt = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), copy)
    assert (logprobs(blunt, jnp.bfloat16) != original).any(), "norm scales count"


def test_two_processes_hand_over_together_and_decode_alone(tmp_path):
    """Process 1 does nothing until process 0 has decoded: were there a joint step in it, both would wait for ever."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.rollout.handover_two"]
    running = [
        subprocess.Popen(
            [*command, process, port, str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for process in ("0", "1")
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1))
    assert first == second and first["devices"] == 4
    assert np.shape(first["tokens"]) == (12, 10)
