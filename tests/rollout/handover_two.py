"""One of two processes that train together and decode alone: `python -m tests.rollout.handover_two PROCESS PORT FOLDER`.

Each has two CPU devices. Weights split over all four are handed over; then process 0 decodes, while process 1 does nothing until it has
seen process 0's result.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.models import families, transformer
from jaxrl_llm.rollout.handover import make_handover
from tests.rollout.rig import CONFIG, build, rollout

LIMIT_SECONDS = 120


def main(process: int, port: str, folder: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    mesh = sharding.make_mesh(MeshShape(1, 4, 1))
    own = sharding.make_mesh(MeshShape(1, 1, 2), jax.local_devices())
    dims, abstract = families.param_dims(CONFIG), transformer.abstract_params(CONFIG)
    source = sharding.param_shardings(mesh, dims, abstract)
    random = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, np.float32), abstract)
    handover = make_handover(dims, abstract, mesh, own, jnp.bfloat16, source=source)
    copy = handover(sharding.put(values, source))
    for leaf, plain in zip(jax.tree.leaves(copy), jax.tree.leaves(values), strict=True):
        assert leaf.is_fully_addressable and leaf.sharding.device_set == set(jax.local_devices())
        np.testing.assert_array_equal(np.asarray(leaf), plain.astype(leaf.dtype))
    mine, other = folder / "0.json", folder / "1.json"
    if process == 1:
        mine, other = other, mine
        deadline = time.monotonic() + LIMIT_SECONDS
        while not other.exists():
            assert time.monotonic() < deadline, "process 0 waits for process 1"
            time.sleep(0.05)
    result = rollout(build(own, dtype=jnp.bfloat16), copy)
    text = json.dumps({"devices": jax.device_count(), "tokens": result.response_tokens.tolist()})
    partial = mine.with_suffix(".part")
    partial.write_text(text)
    partial.rename(mine)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
