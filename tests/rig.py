"""A tiny whole run for the tests of the host loop: as a process of its own, or inside the test process on one device."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_llm import assembly, fault, sharding
from jaxrl_llm.checks import check
from jaxrl_llm.commands import train
from jaxrl_llm.config import Config, load, override_all, resolve

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart.py"
TINY = {
    "data.train_files": "arithmetic:train:40",
    "data.val_files": "arithmetic:heldout:16",
    "data.train_batch_size": 8,
    "data.val_batch_size": 16,
    "data.max_prompt_length": 16,
    "data.max_response_length": 24,
    "rollout.n": 4,
    "rollout.decode_chunk": 8,
    "rollout.temperature": 1.5,
    "actor.ppo_mini_batch_size": 8,
    "actor.optim.lr": 1e-3,
    "trainer.total_training_steps": 6,
    "trainer.save_freq": 2,
    "trainer.test_freq": 3,
    "trainer.max_ckpt_to_keep": "none",
    "trainer.log_completions_freq": 2,
    "trainer.project_name": "tests",
    "trainer.logger": "console,jsonl",
}
"""40 training prompts in batches of 8: the first epoch ends with step 5."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.95, "trainer.critic_warmup": 1},
    "grpo": {
        "algorithm.adv_estimator": "grpo",
        "actor.use_kl_loss": "true",
        "actor.kl_loss_coef": 0.01,
        "actor.ppo_mini_batch_size": 4,
        "actor.shuffle": "true",
    },
    "rloo": {
        "algorithm.adv_estimator": "rloo",
        "algorithm.use_kl_in_reward": "true",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "algorithm.kl_ctrl.horizon": 200,
    },
}

TIMES = re.compile(r"timing_s/|perf/|compil")
"""Metrics that a clock or this process's memory decides; everything else must repeat bit for bit."""


# A process of its own ------------------------------------------------------------------------------------------------


def words(overrides: dict[str, Any]) -> list[str]:
    """Command-line words of a tiny run with these settings on top."""
    settings = TINY | overrides
    return [f"--config={CONFIG}", *(f"--{name}={value}" for name, value in settings.items())]


def environment(plan: str = "", devices: int = 1) -> dict[str, str]:
    """The environment of a run: the suite's compilation cache, a fault plan, and one device unless more are asked for."""
    flags = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "device_count" not in flag and "collective_call" not in flag
    ]
    if devices > 1:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    ours = {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT), fault.PLAN_VARIABLE: plan}
    return dict(os.environ) | ours


def start(overrides: dict[str, Any], *, plan: str = "", file_blocks: int | None = None) -> Any:
    """Start a run as a process; `plan` is a fault plan, `file_blocks` a limit on the size of every file it writes (KiB)."""
    command = [sys.executable, "-m", "jaxrl_llm.main", *words(overrides)]
    if file_blocks is not None:
        command = ["bash", "-c", f'ulimit -f {file_blocks}; exec "$@"', "limited", *command]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(plan),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(
    overrides: dict[str, Any], *, plan: str = "", file_blocks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end; `stdout` holds both streams."""
    process = start(overrides, plan=plan, file_blocks=file_blocks)
    try:
        out, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, "")


# In the test process -------------------------------------------------------------------------------------------------


@contextmanager
def devices(count: int) -> Any:
    """Let the parts of a run see the first `count` of the fake devices only."""
    make = sharding.make_mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: count)
        patch.setattr(jax, "local_devices", lambda: jax.devices()[:count])
        patch.setattr(
            sharding, "make_mesh", lambda shape, on=None: make(shape, on or jax.devices()[:count])
        )
        yield


def run_here(overrides: dict[str, Any], *, plan: str = "", count: int = 1) -> int:
    """The same command in this process, on `count` fake devices; returns the exit code. Prints as the command does."""
    with devices(count), pytest.MonkeyPatch.context() as patch:
        patch.setenv(fault.PLAN_VARIABLE, plan)
        fault.reset()
        try:
            return train.run(words(overrides), prog="rig")
        finally:
            fault.reset()


def settings(overrides: dict[str, Any]) -> Config:
    """The resolved configuration of a tiny run; a bad one fails the test."""
    pairs = [(name, str(value)) for name, value in (TINY | overrides).items()]
    config, problems = override_all(load(str(CONFIG)), pairs)
    config = resolve(config, "rig")
    assert not problems + check(config), problems + check(config)
    return config


def build(overrides: dict[str, Any], *, count: int = 1) -> assembly.Parts:
    """The parts of a tiny run on `count` fake devices."""
    with devices(count):
        return assembly.build(settings(overrides), lambda text: None)


# What a run leaves -----------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metric rows of a run folder, times aside."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not TIMES.search(name)}
        for line in lines
    ]


def same_rows(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Assert that two metric streams are equal bit for bit (NaN equals NaN)."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for left, right in zip(one, other, strict=True):
        assert set(left) == set(right), f"step {left['step']}: other metrics"
        different = [name for name in left if repr(left[name]) != repr(right[name])]
        assert not different, {name: (left[name], right[name]) for name in different}


def steps(folder: Path) -> list[int]:
    """The committed checkpoints of a run folder."""
    found = [path.parent.name for path in folder.glob("checkpoints/*/manifest.json")]
    return sorted(int(name) for name in found if name.isdigit())


def manifest(folder: Path, step: int | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint, the newest one unless a step is named."""
    step = steps(folder)[-1] if step is None else step
    return json.loads((folder / f"checkpoints/{step:08d}/manifest.json").read_text())


def digests(folder: Path, step: int | None = None) -> dict[str, str]:
    """The digest of every leaf of a checkpoint: parameters, moments, controllers, counters, step."""
    return {name: leaf["digest"] for name, leaf in manifest(folder, step)["leaves"].items()}


def completions(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every file of samples, by file name."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "completions").glob("*.jsonl")
    }


def everything(folder: Path) -> dict[str, bytes]:
    """The contents of every file under a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
