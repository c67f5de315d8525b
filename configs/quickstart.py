"""Quickstart: GRPO on the arithmetic task with the tiny model that the package ships; no network, no arguments.

Command:   python -m jaxrl_llm.main --config=configs/quickstart.py
"""

from jaxrl_llm.config import Config
from jaxrl_llm.knobs import (
    ActorKnobs,
    AlgorithmKnobs,
    CriticKnobs,
    DataKnobs,
    ModelKnobs,
    OptimKnobs,
    RewardKnobs,
    RolloutKnobs,
    TrainerKnobs,
)


def get_config() -> Config:
    """The configuration of this run."""
    return Config(
        model=ModelKnobs(
            path="package:jaxrl_llm/assets/tiny-arithmetic", enable_gradient_checkpointing=False
        ),
        data=DataKnobs(
            train_files=("arithmetic:train:4096",),
            val_files=("arithmetic:heldout:256",),
            train_batch_size=32,
            val_batch_size=256,
            max_prompt_length=32,
            max_response_length=64,
            prompt_format="plain",
        ),
        reward=RewardKnobs(functions=("gsm8k",)),
        algorithm=AlgorithmKnobs(adv_estimator="grpo"),
        actor=ActorKnobs(ppo_mini_batch_size=32, optim=OptimKnobs(lr=1e-3)),
        critic=CriticKnobs(optim=OptimKnobs(lr=1e-3)),
        rollout=RolloutKnobs(n=8, decode_chunk=16),
        trainer=TrainerKnobs(
            total_training_steps=30, save_freq=10, test_freq=10, project_name="quickstart"
        ),
    )
