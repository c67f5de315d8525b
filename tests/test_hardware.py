import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.hardware import PEAKS, peak_flops
from tests import rig


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("TPU v4", 275e12, 275e12 / 6),
        ("TPU v5 lite", 197e12, 197e12 / 6),
        ("TPU v5", 459e12, 459e12 / 6),
        ("TPU v6 lite", 918e12, 918e12 / 6),
    ],
)
def test_rates_of_known_devices(kind, bfloat16, float32):
    assert peak_flops(kind, jnp.bfloat16) == pytest.approx(bfloat16)
    assert peak_flops(kind, np.float32) == pytest.approx(float32)


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v99"])
def test_an_unknown_device_has_no_rate(kind):
    assert peak_flops(kind, jnp.bfloat16) is None


def test_this_machine_has_no_rate_and_an_unknown_dtype_has_none():
    assert peak_flops(jax.devices("cpu")[0].device_kind, jnp.float32) is None
    assert peak_flops("NVIDIA H200", np.float64) is None


def test_no_device_is_faster_in_float32():
    assert all(0 < peak.float32 < peak.bfloat16 for peak in PEAKS.values())


def test_the_device_check_runs_through_on_this_machine():
    script = rig.ROOT / "benchmarks" / "device_check.sh"
    environment = rig.environment() | {"PYTHON": sys.executable}
    command = ["bash", str(script), "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    *rows, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["check"] for row in rows] == [
        "model", "decode", "pack", "attention", "logprob_gap", "update", "memory",
    ]  # fmt: skip
    assert not any("failed" in row or "skipped" in row for row in rows), rows
    summary = last["summary"]
    assert summary["tiny/update/mfu"] is None and summary["tiny/update/tflops"] > 0
    assert summary["tiny/attention/error"] < 1e-5 and summary["tiny/logprob_gap/max"] < 1e-4
    speeds = [summary[f"tiny/{name}/tokens_per_s"] for name in ("decode", "update")]
    assert min(speeds) > 0 and summary["seconds"] > 0
