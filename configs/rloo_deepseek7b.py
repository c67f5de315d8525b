"""RLOO on GSM8K with deepseek-llm-7b-chat: `grpo_deepseek7b.py` with the preset `rloo` on top.

Command:   python -m jaxrl_llm.main --config=configs/rloo_deepseek7b.py
Hardware:  8 devices of 80 GB on one host
Expected:  not measured by us: no such hardware has been available to this project yet.
"""

from dataclasses import replace
from pathlib import Path

from jaxrl_llm import presets
from jaxrl_llm.config import Config, load


def get_config() -> Config:
    """The configuration of this run."""
    base = load(str(Path(__file__).with_name("grpo_deepseek7b.py")))
    trainer = replace(base.trainer, run_dir="runs/verl_example_gsm8k/rloo_deepseek7b")
    return replace(presets.rloo(base), trainer=trainer)
