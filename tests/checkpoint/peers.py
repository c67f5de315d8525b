"""What one of several real processes does in `test_processes`: `python -m tests.checkpoint.peers SCENARIO FOLDER ADDRESS RANK COUNT`."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm import fault, processes
from jaxrl_llm.checkpoint import Checkpointer, CheckpointError, run_lock, tree_digests
from jaxrl_llm.checkpoint.lock import process_lives
from jaxrl_llm.compilation_cache import write_whole_entries
from jaxrl_llm.errors import ConfigError, DataError
from tests.checkpoint.rig import file_limit

SPECS = {"w": PartitionSpec("fsdp"), "c": PartitionSpec(None, "fsdp"), "r": PartitionSpec()}


def host_state(step):
    """The same numbers on every process."""
    draw = np.random.default_rng(step)
    return {
        "w": draw.standard_normal((64, 64)).astype(np.float32),
        "c": draw.standard_normal((3, 16)).astype(np.float32),
        "r": draw.standard_normal(5).astype(np.float32),
        "n": np.int32(step),
    }


def placed_state(step):
    """Spread over all devices of all processes; `n` is an array that each process has for itself."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    host = host_state(step)

    def put(name):
        where = NamedSharding(mesh, SPECS[name])
        return jax.make_array_from_callback(host[name].shape, where, lambda at: host[name][at])

    return {name: put(name) for name in SPECS} | {"n": jnp.int32(step)}


def like(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def holds(tree, step):
    """Whether the shards here hold the state of a step, bit for bit."""
    host = host_state(step)
    return all(
        np.array_equal(np.asarray(shard.data), host[name][shard.index])
        for name, leaf in tree.items()
        for shard in leaf.addressable_shards
    )


def raised(kind, act, *arguments, **options):
    try:
        act(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def pair(folder, me):
    """Save, fill the disk of one, damage the piece of one, kill one."""
    log = []
    saver = Checkpointer(folder / "checkpoints", keep=None, log=log.append, limit_seconds=30)
    wanted = like(placed_state(0))
    with run_lock(folder):
        step, back, run = saver.restore(wanted)
        assert (step, run) == (1, {"row": 10}) and holds(back, 1)
        assert back["w"].sharding == wanted["w"].sharding
        for step in (2, 3):
            saver.save(step, placed_state(step), {"row": 10 * step})
            saver.check()
        saver.wait()
        assert saver.restore(wanted)[0] == 3
        print("digest", tree_digests(placed_state(3)), flush=True)

        with file_limit(4096) if me == 1 else nullcontext():
            saver.save(4, placed_state(4), {"row": 40})
            print("full", raised(CheckpointError, saver.wait), flush=True)
        saver.check()
        assert saver.steps() == [1, 2, 3]
        # Process 0 tells of the failure before it clears up, and has cleared up when its own wait ends.
        assert me == 1 or not list(folder.glob("checkpoints/*saving*"))
        saver.save(4, placed_state(4), {"row": 40})
        saver.wait()

        piece = folder / "checkpoints/00000004/state.p0001/00003.bin"
        whole = piece.read_bytes()
        damaged_by_first(me, piece, bytes([whole[0] ^ 1]) + whole[1:])
        step, back, _ = saver.restore(wanted)
        assert step == 3 and holds(back, 3)
        del back
        assert (len(log) == 0) == (me != 0), log
        print("fell back", log[-1] if log else "", flush=True)
        strict = Checkpointer(folder / "checkpoints", keep=None, on_damage="stop", log=print)
        print("stop", raised(DataError, strict.restore, wanted), flush=True)
        print("asked", raised(DataError, saver.restore, wanted, step=4), flush=True)
        damaged_by_first(me, piece, whole)
        assert saver.restore(wanted)[0] == 4

        saver = Checkpointer(folder / "checkpoints", keep=None, log=print, limit_seconds=30)
        patient_until_gone(saver, processes.gather("pids", os.getpid())[1])
        if me == 1:
            os.environ[fault.PLAN_VARIABLE] = "in_save:5:kill"
        saver.save(5, placed_state(5), {"row": 50})
        print("lost", raised(processes.Missing, saver.wait), saver.settle(), flush=True)
    os._exit(0)  # the peer is gone: nobody to shut down with


def patient_until_gone(saver, peer):
    """Let a save wait for what the peer has written until it is gone, however slow it is, and no longer than a second from then on."""
    gather = processes.gather

    def gathered(tag, value, limit_seconds):
        if tag.endswith("/write") and peer != os.getpid():
            while process_lives(peer):
                time.sleep(0.05)
            saver._limit = limit_seconds = 1.0
        return gather(tag, value, limit_seconds)

    processes.gather = gathered


def damaged_by_first(me, path, blob):
    processes.barrier(f"before-{len(blob)}-{blob[0]}")
    if me == 0:
        path.write_bytes(blob)
    processes.barrier(f"after-{len(blob)}-{blob[0]}")


def four(folder, me):
    """Restore what two saved; start at once in empty folders; be refused together."""
    saver = Checkpointer(folder / "checkpoints", keep=None, log=print, limit_seconds=30)
    step, back, run = saver.restore(like(placed_state(0)))
    assert (step, run) == (4, {"row": 40}) and holds(back, 4)
    for attempt in range(5):
        here = folder / f"new-{attempt}"
        with run_lock(here, log=print):
            saver = Checkpointer(here / "checkpoints", keep=1, log=print, limit_seconds=30)
            assert saver.restore(like(back)) is None
            for step in (1, 2):
                saver.save(step, back, {"attempt": attempt})
            saver.wait()
            assert saver.steps() == [2] and saver.manifest(2)["processes"] == 4
        processes.barrier(f"{attempt}")
        assert not (here / "run.lock").exists()
    print("held", raised(ConfigError, run_lock(folder / "held").__enter__), flush=True)
    apart = folder / (f"apart-{me}" if me == 2 else "apart")
    lock = run_lock(apart, patience_seconds=0.3)
    print("apart", raised(ConfigError, lock.__enter__), flush=True)


def first_killed(folder, me):
    """Process 0, which hosts the coordinator, dies in a save."""
    saver = Checkpointer(folder / "checkpoints", keep=None, log=print, limit_seconds=20)
    if me == 0:
        os.environ[fault.PLAN_VARIABLE] = "in_save:5:kill"
    saver.save(5, placed_state(5), {})
    print("lost", raised(processes.Missing, saver.wait), flush=True)
    os._exit(0)


if __name__ == "__main__":
    scenario, place, address, rank, count = sys.argv[1:]
    write_whole_entries()
    jax.distributed.initialize(address, int(count), int(rank), initialization_timeout=200)
    {"pair": pair, "four": four, "first_killed": first_killed}[scenario](Path(place), int(rank))
