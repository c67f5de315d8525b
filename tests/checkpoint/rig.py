"""What the checkpoint tests share: small states, a log, planned faults, a full disk."""

import resource
import threading
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm import fault
from jaxrl_llm.checkpoint import (
    Checkpointer,
)
from jaxrl_llm.records import AlgorithmState, Counters, ModelState, TrainState

# Orbax closes its event loop at the first failed leaf; what other leaves then report to it is noise on stderr.
orbax_noise = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def mesh_of(*shape):
    names = ("data", "tensor")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def sharded(mesh):
    """Put rows of every matrix on the mesh's first axis, everything else on all devices."""

    def place(leaf):
        leaf = jnp.asarray(leaf)
        spec = PartitionSpec(*mesh.axis_names[:1]) if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return partial(jax.tree.map, place)


def train_state(step=1, width=16):
    """A small whole run: matrices and biases, bf16, moments, no critic, an empty baseline."""
    keys = jax.random.split(jax.random.key(step), 3)
    params = {
        "embed": jax.random.normal(keys[0], (32, width)),
        "layers": {"w": jax.random.normal(keys[1], (8, width)), "b": jnp.arange(8.0) * step},
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    moments = jax.tree.map(lambda leaf: leaf + step, tx.init(params))
    frozen = {"base": jax.random.normal(keys[2], (8, 8), jnp.bfloat16)}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=jnp.int32(step),
        actor=ModelState(trainable=params, frozen=frozen, opt_state=moments),
        critic=None,
        algorithm=AlgorithmState(jnp.float32(0.1), jnp.float32(0.2), jnp.zeros((0,))),
        counters=Counters(zero, zero + step, zero, zero),
    )


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def bits(tree):
    return [(np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def small(step, rows=64):
    return {"w": jnp.full((rows, 64), float(step)), "n": jnp.int32(step)}


def saver_for(directory, keep=None, **options):
    log: list[str] = []
    return Checkpointer(directory, keep=keep, log=log.append, **options), log


def save_all(checkpointer, steps, rows=64):
    for step in steps:
        checkpointer.save(step, small(step, rows), {"row": step * 10})
        checkpointer.wait()


@contextmanager
def planned(monkeypatch, plan):
    fault.reset()
    monkeypatch.setenv(fault.PLAN_VARIABLE, plan)
    yield
    monkeypatch.delenv(fault.PLAN_VARIABLE)
    fault.reset()


@contextmanager
def held(monkeypatch, step):
    """The save of a step stands still before its commit until the event that this gives is set, at the latest by the end of the block."""
    gate, point = threading.Event(), fault.point

    def waits(name, at=None):
        if (name, at) == ("in_save", step):
            gate.wait(60)
        point(name, at)

    with monkeypatch.context() as patch:
        patch.setattr(fault, "point", waits)
        try:
            yield gate
        finally:
            gate.set()


@contextmanager
def file_limit(size):
    """No file of this process may grow beyond `size` bytes: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
