"""The shipped configurations: they load, pass the checks, name their command, and hold the values of verl's launch scripts."""

import ast
from pathlib import Path

import pytest

from jaxrl_llm.checks import check
from jaxrl_llm.config import changed, leaves, load, resolve

FOLDER = Path(__file__).parent.parent / "configs"
FILES = sorted(FOLDER.glob("*.py"))
GSM8K_TRAIN_ROWS = 7473


def values(name: str) -> dict[str, object]:
    return {path: value for path, _, value in leaves(load(str(FOLDER / name)))}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_config_is_sound_and_documented(file):
    config = load(str(file))
    assert check(config) == []
    resolved = resolve(config, file.stem)
    assert check(resolved) == []
    assert resolve(resolved, file.stem) == resolved
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert f"python -m jaxrl_llm.main --config=configs/{file.name}" in doc


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_docstring_says_hardware_and_expectation(file):
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert "Hardware:" in doc
    assert "Expected:" in doc


def test_no_two_shipped_configs_share_a_run_folder():
    folders = [resolve(load(str(file)), file.stem).trainer.run_dir for file in FILES]
    assert len(set(folders)) == len(FILES)


def test_the_quickstart_needs_no_network_and_no_device_count():
    config = load(str(FOLDER / "quickstart.py"))
    assert config.model.path.startswith("package:jaxrl_llm/")
    assert all(
        name.startswith("arithmetic:")
        for name in (*config.data.train_files, *config.data.val_files)
    )
    for devices in (1, 2, 4, 8):
        assert check(config, devices) == []


COMMON = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.filter_overlong_prompts": True,
    "data.truncation": "error",
    "model.path": "deepseek-ai/deepseek-llm-7b-chat",
    "model.use_remove_padding": True,
    "model.enable_gradient_checkpointing": True,
    "actor.optim.lr": 1e-6,
    "actor.ppo_mini_batch_size": 256,
    "actor.param_offload": False,
    "actor.optimizer_offload": False,
    "algorithm.use_kl_in_reward": False,
    "trainer.critic_warmup": 0,
    "trainer.logger": ("console", "wandb"),
    "trainer.project_name": "verl_example_gsm8k",
    "trainer.experiment_name": "deepseek_llm_7b_function_rm",
    "trainer.n_devices_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.save_freq": 20,
    "trainer.test_freq": 1,
    "trainer.total_epochs": 15,
}

GRPO = {
    **COMMON,
    "algorithm.adv_estimator": "grpo",
    "data.max_response_length": 1024,
    "actor.ppo_micro_batch_size_per_device": 80,
    "actor.use_kl_loss": True,
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "low_var_kl",
    "actor.entropy_coeff": 0.0,
    "rollout.n": 5,
    "rollout.log_prob_micro_batch_size_per_device": 160,
    "rollout.tensor_model_parallel_size": 2,
    "rollout.gpu_memory_utilization": 0.6,
    "ref.log_prob_micro_batch_size_per_device": 160,
    "ref.param_offload": True,
}

PPO = {
    **COMMON,
    "algorithm.adv_estimator": "gae",
    "data.max_response_length": 512,
    "actor.ppo_micro_batch_size_per_device": 16,
    "actor.use_kl_loss": False,
    "rollout.log_prob_micro_batch_size_per_device": 32,
    "rollout.tensor_model_parallel_size": 4,
    "rollout.gpu_memory_utilization": 0.4,
    "critic.optim.lr": 1e-5,
    "critic.path": "deepseek-ai/deepseek-llm-7b-chat",
    "critic.enable_gradient_checkpointing": True,
    "critic.ppo_micro_batch_size_per_device": 32,
    "critic.param_offload": False,
    "critic.optimizer_offload": False,
}


@pytest.mark.parametrize(
    ("name", "script"), [("grpo_deepseek7b.py", GRPO), ("ppo_deepseek7b.py", PPO)]
)
def test_every_value_of_the_launch_script(name, script):
    held = values(name)
    assert {path: held[path] for path in script} == script
    assert [Path(str(file)).name for file in held["data.train_files"]] == ["train.parquet"]  # type: ignore[attr-defined]
    assert [Path(str(file)).name for file in held["data.val_files"]] == ["test.parquet"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["grpo_deepseek7b.py", "ppo_deepseek7b.py"])
def test_the_reference_runs_have_105_steps_and_fit_their_devices(name):
    config = load(str(FOLDER / name))
    per_epoch = GSM8K_TRAIN_ROWS // config.data.train_batch_size
    assert per_epoch == 7
    assert config.trainer.total_epochs * per_epoch == 105
    assert config.trainer.total_training_steps is None
    assert check(config, devices=8) == []
    assert any("but there are 4" in problem for problem in check(config, devices=4))


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_the_other_algorithms_differ_from_grpo_in_their_settings_only(name):
    base = load(str(FOLDER / "grpo_deepseek7b.py"))
    other = load(str(FOLDER / f"{name}_deepseek7b.py"))
    paths = {path for path, _, _ in changed(base, other)}
    assert paths <= {
        "algorithm.adv_estimator",
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_penalty",
        "actor.use_kl_loss",
        "actor.loss_agg_mode",
        "trainer.run_dir",
    }
    assert {"actor.use_kl_loss", "trainer.run_dir"} <= paths
