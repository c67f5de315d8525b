"""The quickstart learns: a short run of each algorithm here; seeds, the promised accuracy and the controls in the slow suite."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rig

ACC = "val/arithmetic/acc/mean@1"
FORMAT = "val/arithmetic/answer_found/mean@1"


def quickstart(folder: Path, **overrides: object) -> list[dict]:
    """The validation rows of `configs/quickstart.py` run as a process, exactly as a user would."""
    words = [f"--{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    command = [sys.executable, "-m", "jaxrl_llm.main", "--config=configs/quickstart.py"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run(
        [*command, f"--config.trainer.run_dir={folder}", *words],
        cwd=rig.ROOT,
        env=environment | {"PYTHONPATH": str(rig.ROOT)},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=900,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if ACC in row]


@pytest.mark.parametrize("estimator", ("grpo", "gae", "rloo"))
def test_a_short_run_learns(tmp_path: Path, estimator: str) -> None:
    rows = quickstart(
        tmp_path / "run",
        algorithm__adv_estimator=estimator,
        trainer__total_training_steps=8,
        trainer__test_freq=8,
        actor__optim__lr=6e-4,
        data__val_max_samples=128,
    )
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 8
    assert 0.3 <= rows[0][ACC] <= 0.6
    assert rows[-1][ACC] >= rows[0][ACC] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ("grpo", "gae", "rloo"))
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_the_promised_rise(tmp_path: Path, estimator: str, seed: int) -> None:
    rows = quickstart(tmp_path / "run", algorithm__adv_estimator=estimator, trainer__seed=seed)
    assert 0.3 <= rows[0][ACC] <= 0.5
    assert rows[-1][ACC] >= 0.85
    assert rows[0][FORMAT] >= 0.98, "the gain must be in answers, not in their form"


@pytest.mark.slow
def test_control_a_learning_rate_of_zero_moves_nothing(tmp_path: Path) -> None:
    rows = quickstart(tmp_path / "run", actor__optim__lr=0, actor__optim__weight_decay=0)
    assert all(abs(row[ACC] - rows[0][ACC]) <= 0.03 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_control_rewards_without_relation_to_answers_teach_nothing(
    tmp_path: Path, seed: int
) -> None:
    coin = tmp_path / "coin.py"
    coin.write_text(
        "import random\n\n\ndef coin(response):\n    return float(random.random() < 0.5)\n"
    )
    rows = quickstart(
        tmp_path / "run",
        reward__functions=f"gsm8k,{coin}:coin",
        reward__weights="0,1",
        trainer__seed=seed,
    )
    assert max(row[ACC] for row in rows) < 0.6
