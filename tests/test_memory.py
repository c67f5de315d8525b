"""Memory does not grow with the steps of a run, measured on a process of its own."""

import json

import numpy as np

from jaxrl_llm.errors import EXIT_OK
from tests import rig

LIMIT = 4.0
"""MB between the steps 20 to 40 and 80 to 100. One batch per step that stays (63 KB of arrays here) is twice as much."""


def test_memory_is_flat_over_a_hundred_steps(tmp_path):
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.total_training_steps": 100,
        "trainer.save_freq": "none",
        "trainer.test_freq": "none",
        "trainer.log_completions_freq": "none",
        "trainer.logger": "jsonl",
        "data.val_files": "[]",
        "rollout.n": 8,
    }
    done = rig.run(settings)
    assert done.returncode == EXIT_OK, done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row["perf/rss_mb"] for row in map(json.loads, lines)}
    early, late = (np.mean([rows[step] for step in range(first, first + 21)]) for first in (20, 80))
    assert late - early < LIMIT, f"from {early:.1f} MB to {late:.1f} MB"
