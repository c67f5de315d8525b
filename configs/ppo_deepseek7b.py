"""PPO with a critic on GSM8K with deepseek-llm-7b-chat: verl's reference launch script, value for value, under our names.

Command:   python -m jaxrl_llm.main --config=configs/ppo_deepseek7b.py
Hardware:  8 devices of 80 GB on one host (set trainer.nnodes and n_devices_per_node to what you have)
Length:    105 steps = 15 epochs x (7,473 // 1,024); 1,024 trajectories per step
Expected:  not measured by us: no such hardware has been available to this project yet. Planned (python -m jaxrl_llm plan
           --config=configs/ppo_deepseek7b.py --hardware=h100:8): fits with 17 GB free per device, also on a100:8 and v5p:2x2x2; a step
           of full-length responses takes at least 27 s (docs/plan.md).

Data and renamed keys as in `grpo_deepseek7b.py`. The critic is a second copy of the model with a scalar head.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.knobs import (
    ActorKnobs,
    AlgorithmKnobs,
    CriticKnobs,
    DataKnobs,
    MeshKnobs,
    ModelKnobs,
    OptimKnobs,
    RewardKnobs,
    RolloutKnobs,
    TrainerKnobs,
)

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def get_config() -> Config:
    """The configuration of this run."""
    return Config(
        model=ModelKnobs(
            path="deepseek-ai/deepseek-llm-7b-chat",
            use_remove_padding=True,
            enable_gradient_checkpointing=True,
        ),
        data=DataKnobs(
            train_files=("$JAXRL_GSM8K_DIR/train.parquet",),
            val_files=("$JAXRL_GSM8K_DIR/test.parquet",),
            train_batch_size=1024,
            max_prompt_length=512,
            max_response_length=512,
            filter_overlong_prompts=True,
            truncation="error",
            instruction=INSTRUCTION,
        ),
        reward=RewardKnobs(functions=("gsm8k",)),
        algorithm=AlgorithmKnobs(adv_estimator="gae", gamma=1.0, lam=1.0, use_kl_in_reward=False),
        actor=ActorKnobs(
            ppo_mini_batch_size=256,
            ppo_micro_batch_size_per_device=16,
            use_kl_loss=False,
            optim=OptimKnobs(lr=1e-6),
            param_offload=False,
            optimizer_offload=False,
        ),
        critic=CriticKnobs(
            path="deepseek-ai/deepseek-llm-7b-chat",
            enable_gradient_checkpointing=True,
            ppo_micro_batch_size_per_device=32,
            optim=OptimKnobs(lr=1e-5),
            param_offload=False,
            optimizer_offload=False,
        ),
        rollout=RolloutKnobs(
            tensor_model_parallel_size=4,
            gpu_memory_utilization=0.4,
            log_prob_micro_batch_size_per_device=32,
        ),
        mesh=MeshKnobs(data=1, fsdp=None, tensor=1),
        trainer=TrainerKnobs(
            critic_warmup=0,
            logger=("console", "wandb"),
            project_name="verl_example_gsm8k",
            experiment_name="deepseek_llm_7b_function_rm",
            run_dir="runs/verl_example_gsm8k/ppo_deepseek7b",
            n_devices_per_node=8,
            nnodes=1,
            save_freq=20,
            test_freq=1,
            total_epochs=15,
        ),
    )
