"""Paths, overrides, files, resolution and identity of a configuration."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl_llm.config import (
    Config,
    changed,
    from_dict,
    identity,
    identity_digest,
    leaves,
    load,
    nearest,
    needs_critic,
    needs_reference,
    normal,
    override,
    override_all,
    resolve,
    to_dict,
    type_problems,
)
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.marks import is_operational

HEAD = "from jaxrl_llm.config import Config\nfrom jaxrl_llm.knobs import *\n"


def config_file(folder: Path, body: str, name: str = "tiny.py") -> str:
    file = folder / name
    file.write_text(HEAD + body)
    return str(file)


def value(config: Config, path: str) -> object:
    return {name: held for name, _, held in leaves(config)}[path]


# Overrides ---------------------------------------------------------------------------------------------------------------


def test_an_override_changes_one_leaf_and_nothing_else():
    before = Config()
    after = override(before, "actor.optim.lr", "3e-5")
    assert [path for path, _, _ in changed(before, after)] == ["actor.optim.lr"]
    assert after.actor.optim.lr == 3e-5
    assert before.actor.optim.lr == 1e-6


def test_every_leaf_takes_its_own_value_back_as_text():
    config = resolve(replace(Config(), trainer=replace(Config().trainer, seed=None)))
    for path, _, held in leaves(config):
        text = json.dumps(held) if isinstance(held, list | tuple) else str(held)
        assert override(config, path, text) == config, path


@pytest.mark.parametrize(
    "path",
    ["", "actor", "actor.", "actor.optim", "actor.optim.lr.x", "nope.lr", ".actor", "actor..optim"],
)
def test_paths_that_name_no_setting(path):
    with pytest.raises(KeyError):
        override(Config(), path, "1")


def test_later_overrides_win_and_all_problems_come_back():
    config, problems = override_all(
        Config(),
        [
            ("rollout.n", "4"),
            ("rollout.n", "8"),
            ("data.train_batch_sise", "8"),
            ("trainer.save_freq", "often"),
            ("actor", "x"),
            ("zzqqy", "1"),
        ],
    )
    assert config.rollout.n == 8
    assert len(problems) == 4
    assert "data.train_batch_size" in problems[0]
    assert problems[1] == "trainer.save_freq: got 'often', need int or none"
    assert "group of settings" in problems[2]
    assert "--help" in problems[3]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lerning_rate", "actor.optim.lr"),
        ("actor.lerning_rate", "actor.optim.lr"),
        ("learning_rate", "actor.optim.lr"),
        ("trainer.learning_rate", "actor.optim.lr"),
        ("critic.learning_rate", "critic.optim.lr"),
        ("num-epochs", "trainer.total_epochs"),
        ("trainer.num-epochs", "trainer.total_epochs"),
        ("data.train-batch-size", "data.train_batch_size"),
        ("actor.lr", "actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("critic.model.path", "critic.path"),
        ("total_epochs", "trainer.total_epochs"),
        ("actor.rollout.n", "rollout.n"),
        ("rollout.temprature", "rollout.temperature"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "actor.ppo_micro_batch_size_per_device",
        ),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "ref.param_offload"),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            "rollout.log_prob_micro_batch_size_per_device",
        ),
        ("trainer.n_gpus_per_node", "trainer.n_devices_per_node"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("beta", "actor.kl_loss_coef"),
        ("qwxz", None),
    ],
)
def test_the_nearest_name(typed, meant):
    assert nearest(Config(), typed) == meant


# Types and spelling ---------------------------------------------------------------------------------------------------------


def test_wrong_types_from_python_are_all_named():
    config = replace(
        Config(),
        actor=7,  # type: ignore[arg-type]
        rollout=replace(Config().rollout, n=2.5, stop="END"),  # type: ignore[arg-type]
        algorithm=replace(Config().algorithm, gamma=float("nan")),
    )
    assert [problem.partition(":")[0] for problem in type_problems(config)] == [
        "algorithm.gamma",
        "actor",
        "rollout.n",
        "rollout.stop",
    ]


def test_normal_gives_equal_settings_one_spelling():
    loose = replace(
        Config(),
        data=replace(Config().data, train_files=["a", "b"]),  # type: ignore[arg-type]
        algorithm=replace(Config().algorithm, gamma=1),
        actor=replace(Config().actor, optim=replace(Config().actor.optim, betas=[0, 1])),  # type: ignore[arg-type]
    )
    tight = normal(loose)
    assert tight.data.train_files == ("a", "b")
    assert json.dumps(tight.algorithm.gamma) == "1.0"
    assert tight.actor.optim.betas == (0.0, 1.0)
    assert type_problems(tight) == []
    assert normal(tight) == tight
    assert hash(tight) == hash(normal(tight))
    assert normal(Config()) == Config()


def test_normal_leaves_wrong_values_for_the_type_check():
    config = replace(Config(), actor=7)  # type: ignore[arg-type]
    assert normal(config).actor == 7


# Files ------------------------------------------------------------------------------------------------------------------------


def test_dict_round_trip():
    config = resolve(override(Config(), "rollout.stop", '["\\n", "x,y"]'))
    again, problems = from_dict(json.loads(json.dumps(to_dict(config))))
    assert problems == []
    assert again == config


def test_a_dict_reports_unknown_keys_and_wrong_values_together():
    _, problems = from_dict(
        {
            "actor": {"clip_ration": 1, "optim": {"lr": "1e-6"}},
            "rollout": 3,
            "modle": {},
            "data": {"train_files": ["a", 1]},
        }
    )
    assert len(problems) == 5
    assert "did you mean actor.clip_ratio?" in problems[0]
    assert problems[1] == "actor.optim.lr: got '1e-6', need float (finite)"
    assert problems[2].startswith("rollout: got a int") or problems[2].startswith("rollout: got 3")
    assert from_dict([1], Config)[1]  # type: ignore[arg-type]


def test_load_python_and_json(tmp_path):
    file = config_file(
        tmp_path, "def get_config(): return Config(rollout=RolloutKnobs(n=4, stop=['a']))\n"
    )
    config = load(file)
    assert (config.rollout.n, config.rollout.stop) == (4, ("a",))
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(to_dict(config)))
    assert load(str(saved)) == config
    assert not (tmp_path / "__pycache__").exists()


def test_an_edit_within_a_clock_tick_is_read(tmp_path):
    for n in (2, 3, 4):
        file = config_file(
            tmp_path, f"def get_config(): return Config(rollout=RolloutKnobs(n={n}))\n"
        )
        assert load(file).rollout.n == n


@pytest.mark.parametrize(
    ("name", "text", "needed"),
    [
        ("a.py", "def get_config(): return 1 / 0\n", "ZeroDivisionError"),
        ("a.py", "import no_such_module_here\n", "ModuleNotFoundError"),
        ("a.py", "def get_config(:\n", "SyntaxError"),
        ("a.py", "x = 1\n", "get_config"),
        ("a.py", "import sys; sys.exit(3)\n", "SystemExit"),
        ("a.py", "def get_config(): return {}\n", "gave dict"),
        ("a.yaml", "a: 1\n", "need a .py file"),
        ("a", "a: 1\n", "need a .py file"),
        ("a.json", "{", "not readable JSON"),
        ("a.json", "[1]", "got a list"),
        ("a.json", '{"rollout": {"n": NaN}}', "rollout.n"),
        ("a.json", "[" * 100000, "not readable JSON"),
    ],
)
def test_files_that_give_no_configuration(tmp_path, name, text, needed):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=needed) as caught:
        load(str(tmp_path / name))
    assert name in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "near.py").write_text("")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"near\.py"):
        load(str(tmp_path / "missing.py"))
    for path in (
        str(tmp_path),
        "",
        "\0",
        "x" * 5000,
        "~no_such_user_here/a.py",
        str(tmp_path / "b.json"),
    ):
        with pytest.raises(ConfigError):
            load(path)


def test_a_json_file_reports_every_problem(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"rollout": {"n": "4", "tempratur": 1}, "xyz": 1}')
    with pytest.raises(ConfigError) as caught:
        load(str(file))
    assert len(caught.value.problems) == 3


# Resolution -----------------------------------------------------------------------------------------------------------------------


def filled(**changes: str) -> Config:
    config = Config()
    for path, text in {
        "model.path": "m",
        **{k.replace("__", "."): v for k, v in changes.items()},
    }.items():
        config = override(config, path, text)
    return config


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("true", "full"), ("false", "none"), ("none", "none"), ("dots", "dots"), ("full", "full")],
)
def test_gradient_checkpointing_takes_names_and_verls_true_and_false(text, meaning):
    c = resolve(override(Config(), "model.enable_gradient_checkpointing", text))
    assert c.model.enable_gradient_checkpointing == meaning
    assert c.critic.enable_gradient_checkpointing == meaning
    other = override(Config(), "critic.enable_gradient_checkpointing", text)
    own = "full" if text == "none" else meaning  # a critic's none is its default: the model's
    assert resolve(other).critic.enable_gradient_checkpointing == own


def test_resolve_fills_what_other_settings_decide():
    c = resolve(
        filled(
            actor__clip_ratio="0.3",
            actor__ppo_micro_batch_size_per_device="8",
            actor__ppo_epochs="2",
            actor__loss_agg_mode="seq-mean-token-sum-norm",
            reward__functions="gsm8k,format",
            data__max_response_length="100",
            trainer__seed="5",
        )
    )
    assert (c.actor.clip_ratio_low, c.actor.clip_ratio_high, c.actor.loss_scale_factor) == (
        0.3,
        0.3,
        100.0,
    )
    assert (c.critic.enable, c.critic.path, c.critic.ppo_epochs, c.critic.ppo_mini_batch_size) == (
        True,
        "m",
        2,
        256,
    )
    assert c.critic.ppo_micro_batch_size_per_device == 8
    assert (
        c.rollout.log_prob_micro_batch_size_per_device
        == c.ref.log_prob_micro_batch_size_per_device
        == 8
    )
    assert c.reward.weights == (1.0, 1.0)
    assert (c.data.seed, c.data.val_batch_size, c.ref.path, c.model.tokenizer_path) == (
        5,
        1024,
        "m",
        "m",
    )
    assert c.critic.enable_gradient_checkpointing == c.model.enable_gradient_checkpointing == "full"
    assert needs_critic(c)
    assert not needs_reference(c)
    assert not needs_critic(resolve(filled(algorithm__adv_estimator="grpo")))
    assert needs_reference(filled(actor__use_kl_loss="true"))
    assert needs_reference(filled(algorithm__use_kl_in_reward="true"))


def test_resolve_keeps_what_was_given():
    c = resolve(
        filled(
            actor__clip_ratio_high="0.28",
            critic__path="v",
            data__seed="0",
            ref__path="r",
            trainer__seed="0",
        )
    )
    assert (c.actor.clip_ratio_low, c.actor.clip_ratio_high) == (0.2, 0.28)
    assert (c.critic.path, c.data.seed, c.ref.path, c.trainer.seed) == ("v", 0, "r", 0)
    assert c.actor.loss_scale_factor is None


@pytest.mark.parametrize("seed", ["1", "none"])
def test_resolve_is_idempotent(seed):
    once = resolve(
        filled(trainer__seed=seed, actor__loss_agg_mode="seq-mean-token-sum-norm"), "stem"
    )
    assert resolve(once, "other") == once


def test_a_resolved_config_goes_through_json_to_an_equal_run(tmp_path):
    config = resolve(
        filled(trainer__run_dir="runs/a", rollout__stop="[x]", algorithm__gamma="1"), "exp"
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_dict(config), indent=1))
    again = resolve(load(str(file)), "config")
    assert again == config
    assert again.trainer.run_dir == config.trainer.run_dir
    assert identity_digest(again) == identity_digest(config)


def test_the_run_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    c = resolve(filled(trainer__project_name="p"), "grpo")
    name = c.trainer.experiment_name
    assert name is not None
    assert name.startswith("grpo-") and len(name) == len("grpo-") + 8
    assert c.trainer.run_dir == str(tmp_path / "runs" / "p" / name)
    assert resolve(filled(trainer__run_dir="here")).trainer.run_dir == str(tmp_path / "here")
    assert resolve(filled(trainer__run_dir="~/x")).trainer.run_dir == str(tmp_path / "home" / "x")
    assert resolve(filled(trainer__run_dir="~no_such_user_here/x")).trainer.run_dir
    assert resolve(filled(trainer__experiment_name="e")).trainer.run_dir == str(
        tmp_path / "runs" / "jaxrl_llm" / "e"
    )


@pytest.mark.parametrize("stem", ["my config", "-x", "..", "a/b", "x" * 250, "", "é"])
def test_a_strange_file_name_still_gives_a_plain_run_name(stem):
    from jaxrl_llm.checks import NAME

    assert NAME.fullmatch(resolve(Config(), stem).trainer.experiment_name or "")


def test_a_drawn_seed_does_not_move_the_run_folder():
    first, second = (resolve(filled(trainer__seed="none")) for _ in range(2))
    assert first.trainer.seed != second.trainer.seed
    assert first.data.seed == first.trainer.seed
    assert first.trainer.run_dir == second.trainer.run_dir
    assert resolve(filled(trainer__seed="3")).trainer.run_dir != first.trainer.run_dir


# Identity -------------------------------------------------------------------------------------------------------------------------


OTHER = {
    bool: lambda v: not v,
    int: lambda v: v + 1,
    float: lambda v: v + 0.25,
    str: lambda v: v + "x",
    tuple: lambda v: (*v, "x"),
    type(None): lambda v: 7,
}


def _put(config, names, held):
    if len(names) > 1:
        held = _put(getattr(config, names[0]), names[1:], held)
    return dataclasses.replace(config, **{names[0]: held})


def test_the_digest_follows_identity_settings_and_no_other():
    base = Config()
    for path, declared, held in leaves(base):
        other = _put(base, path.split("."), OTHER[type(held)](held))
        moved = identity_digest(other) != identity_digest(base)
        assert moved != is_operational(declared), path
        assert (path in identity(base)) != is_operational(declared)


def test_the_digest_is_stable():
    loose = replace(Config(), algorithm=replace(Config().algorithm, gamma=1))
    assert identity_digest(normal(loose)) == identity_digest(Config())
    assert resolve(loose).trainer.run_dir == resolve(Config()).trainer.run_dir
    assert len(identity_digest(Config())) == 8
    int(identity_digest(Config()), 16)


def test_changed_lists_old_and_new():
    assert changed(Config(), filled(rollout__n="4")) == [
        ("model.path", "", "m"),
        ("rollout.n", 1, 4),
    ]


def test_value_helper_sees_every_leaf():
    assert value(Config(), "algorithm.kl_ctrl.horizon") == 10000
    assert len(list(leaves(Config()))) == len({path for path, _, _ in leaves(Config())})
