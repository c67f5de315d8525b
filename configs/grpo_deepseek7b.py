"""GRPO on GSM8K with deepseek-llm-7b-chat: verl's reference launch script, value for value, under our names.

Command:   python -m jaxrl_llm.main --config=configs/grpo_deepseek7b.py
Hardware:  8 devices of 80 GB on one host (set trainer.nnodes and n_devices_per_node to what you have)
Length:    105 steps = 15 epochs x (7,473 // 1,024); 1,024 prompts x 5 samples = 5,120 trajectories per step
Expected:  not measured by us: no such hardware has been available to this project yet. Planned (python -m jaxrl_llm plan
           --config=configs/grpo_deepseek7b.py --hardware=h100:8): fits with 15 GB free per device, also on a100:8, v5p:2x2x2 and
           v6e:4x4; a step of full-length responses takes at least 214 s (docs/plan.md).

`ppo_micro_batch_size_per_device=80` bounds the room of a device; without a token budget rows hold at most 8,192 tokens (here one group
of 5, 5,632 tokens), so that 80 trajectories at once are never asked for. `use_dynamic_bsz` with `ppo_max_token_len_per_device` makes rows longer.

Data comes from $JAXRL_GSM8K_DIR (default ~/data/gsm8k): train.parquet / test.parquet in verl's schema, or GSM8K's own jsonl files
under the same names. Three keys of the script have no counterpart here: `rollout.name` (there is one engine, and it
calls the trainer's own forward function), `trainer.use_legacy_worker_impl` (there are no workers), and
`actor_rollout_ref.model.path` appears once as `model.path`. `trainer.n_gpus_per_node` is `trainer.n_devices_per_node`, and
`*_per_gpu` is `*_per_device`. Script and PPO twin share an experiment name, so each sets its own run folder.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.knobs import (
    ActorKnobs,
    AlgorithmKnobs,
    DataKnobs,
    MeshKnobs,
    ModelKnobs,
    OptimKnobs,
    RefKnobs,
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
            max_response_length=1024,
            filter_overlong_prompts=True,
            truncation="error",
            instruction=INSTRUCTION,
        ),
        reward=RewardKnobs(functions=("gsm8k",)),
        algorithm=AlgorithmKnobs(adv_estimator="grpo", use_kl_in_reward=False),
        actor=ActorKnobs(
            ppo_mini_batch_size=256,
            ppo_micro_batch_size_per_device=80,
            use_kl_loss=True,
            kl_loss_coef=0.001,
            kl_loss_type="low_var_kl",
            entropy_coeff=0.0,
            optim=OptimKnobs(lr=1e-6),
            param_offload=False,
            optimizer_offload=False,
        ),
        ref=RefKnobs(log_prob_micro_batch_size_per_device=160, param_offload=True),
        rollout=RolloutKnobs(
            n=5,
            tensor_model_parallel_size=2,
            gpu_memory_utilization=0.6,
            log_prob_micro_batch_size_per_device=160,
        ),
        mesh=MeshKnobs(data=1, fsdp=None, tensor=1),
        trainer=TrainerKnobs(
            critic_warmup=0,
            logger=("console", "wandb"),
            project_name="verl_example_gsm8k",
            experiment_name="deepseek_llm_7b_function_rm",
            run_dir="runs/verl_example_gsm8k/grpo_deepseek7b",
            n_devices_per_node=8,
            nnodes=1,
            save_freq=20,
            test_freq=1,
            total_epochs=15,
        ),
    )
