"""Several real processes: saves from all of them, restores by any number, and what happens to one happens to all."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import fault
from jaxrl_llm.checkpoint import RunLock, tree_digests
from tests.checkpoint.peers import host_state
from tests.checkpoint.rig import mesh_of, saver_for
from tests.loopback import LIMIT_SECONDS, free_port

ROOT = Path(__file__).parents[2]


def launch(scenario, folder, count, devices):
    """Run a scenario of `peers` in `count` processes: exit codes, and what each has said by its first word."""
    address = f"localhost:{free_port()}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    environment.pop(fault.PLAN_VARIABLE, None)
    command = [sys.executable, "-m", "tests.checkpoint.peers", scenario, str(folder), address]
    peers = [
        subprocess.Popen(
            [*command, str(rank), str(count)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        with ThreadPoolExecutor(count) as pool:
            ended = list(pool.map(lambda peer: peer.communicate(timeout=LIMIT_SECONDS), peers))
    finally:
        for peer in peers:
            peer.kill()
    said = [
        {line.split()[0]: line for line in out.splitlines() if line.strip()} for out, _ in ended
    ]
    return [peer.returncode for peer in peers], said, "\n".join(error for _, error in ended)


def test_two_processes_save_fail_fall_back_and_die_together(tmp_path):
    folder = tmp_path / "checkpoints"
    alone, _ = saver_for(folder)
    alone.save(1, host_state(1), {"row": 10})
    alone.wait()
    assert alone.manifest(1)["format"] == 1

    codes, (first, second), errors = launch("pair", tmp_path, 2, devices=2)
    assert codes == [0, -signal.SIGKILL], errors
    assert first["digest"] == second["digest"] == f"digest {tree_digests(host_state(3))}"
    assert first["full"] == second["full"]
    assert "step 4: got on process 1 of 2: OSError" in first["full"]
    assert (
        "step 4" in first["fell"]
        and "on process 1 of 2: leaves with another digest" in first["fell"]
    )
    assert first["stop"] == second["stop"] and first["asked"] == second["asked"]
    assert "w (in state.p0001/00003.bin)" in first["stop"]
    assert "waited 1 s for process 1" in first["lost"] and "lost" not in second

    assert not list(folder.glob("00000005*"))
    again, log = saver_for(folder)
    mesh = mesh_of(2, 4)
    wanted = {
        name: jax.ShapeDtypeStruct(
            np.shape(leaf),
            leaf.dtype,
            sharding=NamedSharding(
                mesh, PartitionSpec(None, "tensor") if np.ndim(leaf) == 2 else PartitionSpec()
            ),
        )
        for name, leaf in host_state(0).items()
    }
    for step in (4, 3, 1):
        _, back, run = again.restore(wanted, step=step)
        assert run == {"row": 10 * step} and back["w"].sharding == wanted["w"].sharding
        assert all(np.array_equal(back[k], leaf) for k, leaf in host_state(step).items())
    assert again.restore(wanted)[0] == 4 and log == []
    assert again.manifest(4)["format"] == 2

    with RunLock(tmp_path / "held"):
        codes, said, errors = launch("four", tmp_path, 4, devices=1)
    assert codes == [0] * 4, errors
    for name, text in {"held": "in use by process", "apart": "on process 2 of 4"}.items():
        assert len({words[name] for words in said}) == 1 and text in said[0][name]


def test_process_0_killed_in_a_save_leaves_no_step(tmp_path):
    codes, (_, second), errors = launch("first_killed", tmp_path, 2, devices=1)
    assert codes[0] == -signal.SIGKILL, errors
    assert codes[1] in (0, -signal.SIGABRT) and ("lost" in second or codes[1]), errors
    (left,) = (tmp_path / "checkpoints").glob("00000005.saving-*")
    saver, log = saver_for(tmp_path / "checkpoints")
    assert saver.restore(host_state(0)) is None and saver.steps() == []
    assert str(left) in log[0]
    saver.save(5, host_state(5), {})
    saver.wait()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "00000005",
        "owner.json",
    ]
