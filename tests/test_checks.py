"""Rules over a configuration: each fires with its numbers and stays silent otherwise, all at once, and none raises."""

import dataclasses
import os
from dataclasses import replace
from typing import Any

import pytest

from jaxrl_llm import checks
from jaxrl_llm.checks import MeshShape, check, mentions, mesh_shape, multiples
from jaxrl_llm.config import Config, leaves, override, resolve, value_at
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.notices import notices
from jaxrl_llm.values import type_problem


def config(**texts: str) -> Config:
    """A sound GRPO configuration with some settings replaced; `__` stands for a dot."""
    c = Config()
    sound = {
        "model.path": "m",
        "data.train_files": "arithmetic:train:64",
        "data.train_batch_size": "16",
        "actor.ppo_mini_batch_size": "8",
        "rollout.n": "4",
        "algorithm.adv_estimator": "grpo",
    }
    for path, text in {
        **sound,
        **{name.replace("__", "."): text for name, text in texts.items()},
    }.items():
        c = override(c, path, text)
    return c


def put(c: Any, path: str, value: object) -> Any:
    head, _, rest = path.partition(".")
    return replace(c, **{head: put(getattr(c, head), rest, value) if rest else value})


def only(problems: list[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_sound_configuration_has_no_problem():
    assert check(config()) == []
    assert check(config(), devices=8) == []
    assert check(resolve(config())) == []
    assert notices(resolve(config())) == []


def test_required_settings():
    assert len(check(replace(config(), model=Config().model))) == 1
    assert "data.train_files" in only(check(config(data__train_files="[]")))
    assert "reward.functions" in only(check(config(reward__functions="[]")))


PAIRS = [
    ("rollout__temperature", "0"),
    ("rollout__temperature", "-1"),
    ("rollout__top_p", "0"),
    ("rollout__top_p", "1.5"),
    ("rollout__top_k", "0"),
    ("rollout__decode_chunk", "0"),
    ("rollout__gpu_memory_utilization", "0"),
    ("data__max_prompt_length", "0"),
    ("data__max_response_length", "-5"),
    ("data__num_workers", "-1"),
    ("data__seed", "-1"),
    ("actor__optim__lr", "-1e-6"),
    ("actor__optim__betas", "0.9,1"),
    ("actor__optim__betas", "-0.1,0.9"),
    ("actor__optim__eps", "0"),
    ("actor__optim__clip_grad", "0"),
    ("actor__optim__min_lr_ratio", "1.1"),
    ("actor__ppo_epochs", "0"),
    ("actor__ppo_micro_batch_size_per_device", "0"),
    ("actor__clip_ratio", "0"),
    ("actor__clip_ratio", "1.5"),
    ("actor__clip_ratio_low", "1"),
    ("actor__clip_ratio_c", "1"),
    ("actor__entropy_coeff", "-0.1"),
    ("algorithm__lam", "1.01"),
    ("algorithm__gamma", "-0.1"),
    ("algorithm__kl_ctrl__horizon", "0"),
    ("critic__cliprange_value", "0"),
    ("critic__optim__lr", "-1"),
    ("trainer__save_freq", "0"),
    ("trainer__test_freq", "0"),
    ("trainer__test_freq", "-1"),
    ("trainer__total_epochs", "0"),
    ("trainer__seed", "-1"),
    ("trainer__seed", "2147483648"),
    ("trainer__max_ckpt_to_keep", "0"),
    ("trainer__critic_warmup", "-1"),
    ("trainer__logger", "[]"),
    ("trainer__logger", "jsonl,jsonl"),
    ("reward__timeout_s", "0"),
    ("reward__memory_limit_mb", "1"),
    ("reward__num_workers", "0"),
    ("reward__max_failed_share", "2"),
    ("reward__format_pattern", "("),
    ("reward__functions", "gsm8k,gsm8k"),
    ("reward__functions", "gsm8q"),
    ("reward__functions", "no_such_file.py:score"),
    ("reward__weights", "1,2"),
    ("rollout__stop", "['']"),
    ("rollout__stop_token_ids", "-1"),
    ("rollout__max_num_seqs", "0"),
    ("rollout__tensor_model_parallel_size", "0"),
    ("mesh__data", "0"),
    ("mesh__tensor", "-1"),
    ("validation__top_k", "5"),
    ("trainer__resume_mode", "path"),
    ("trainer__resume_from_path", "x"),
    ("actor__loss_scale_factor", "10"),
]


@pytest.mark.parametrize(("name", "text"), PAIRS, ids=[f"{name}={text}" for name, text in PAIRS])
def test_one_bad_value_gives_one_problem_that_names_it(name, text):
    problems = check(config(**{name: text}))
    path = name.replace("__", ".")
    last = path.rpartition(".")[2]
    assert last in only(
        [problem for problem in problems if mentions(problem, [path]) or last in problem]
    )
    assert len(problems) == 1


def test_numbers_stand_in_the_texts():
    assert "got 0.0, need a number above 0 to 1" in only(check(config(rollout__top_p="0")))
    assert "actor.clip_ratio: got 1.5" in only(check(config(actor__clip_ratio="1.5")))
    assert "none to switch it off" in only(check(config(trainer__test_freq="0")))


# H3: batches and devices --------------------------------------------------------------------------------------------------------


def test_batch_and_mini_batch():
    text = only(check(config(data__train_batch_size="20")))
    assert "20" in text and "8" in text and "16 or 24" in text
    text = only(check(config(data__train_batch_size="4")))
    assert "to 8," in text
    assert check(config(data__train_batch_size="20", actor__ppo_mini_batch_size="10")) == []


def test_the_critics_mini_batch_counts_only_with_a_critic():
    gae = {"algorithm__adv_estimator": "gae", "rollout__n": "1"}
    assert "critic.ppo_mini_batch_size = 5" in only(
        check(config(critic__ppo_mini_batch_size="5", **gae))
    )
    assert check(config(critic__ppo_mini_batch_size="5")) == []


def test_trajectories_over_devices():
    c = config(data__train_batch_size="25", actor__ppo_mini_batch_size="25")
    assert check(c) == []
    text = only(check(c, devices=8))
    assert "25 x 4 = 100 trajectories" in text
    assert "8 data shards" in text
    assert "24 or 26" in text
    for batch in (24, 26):
        assert (
            check(
                config(data__train_batch_size=str(batch), actor__ppo_mini_batch_size=str(batch)),
                devices=8,
            )
            == []
        )


def test_the_expected_device_count_is_checked_without_devices():
    assert check(config(trainer__nnodes="1", trainer__n_devices_per_node="8")) == []
    assert "64 trajectories" in only(
        check(config(trainer__nnodes="1", trainer__n_devices_per_node="3"))
    )
    assert "= 8 devices, but there are 4" in only(
        check(config(trainer__nnodes="2", trainer__n_devices_per_node="4"), devices=4)
    )
    text = only(check(config(rollout__tensor_model_parallel_size="3"), devices=8))
    assert "3 does not divide 8" in text and "1, 2, 4, 8" in text


@pytest.mark.parametrize(
    ("mesh", "devices", "shape"),
    [
        (("none", "1", "1"), 8, MeshShape(8, 1, 1)),
        (("none", "2", "2"), 8, MeshShape(2, 2, 2)),
        (("1", "none", "1"), 8, MeshShape(1, 8, 1)),
        (("2", "2", "none"), 8, MeshShape(2, 2, 2)),
        (("2", "4", "1"), 8, MeshShape(2, 4, 1)),
        (("none", "1", "1"), 1, MeshShape(1, 1, 1)),
    ],
)
def test_the_open_axis_takes_what_is_left(mesh, devices, shape):
    c = config(mesh__data=mesh[0], mesh__fsdp=mesh[1], mesh__tensor=mesh[2])
    assert mesh_shape(c, devices) == shape
    assert shape.data * shape.fsdp * shape.tensor == devices
    assert shape.shards == shape.data * shape.fsdp


@pytest.mark.parametrize(
    ("mesh", "devices", "equation"),
    [
        (("none", "3", "1"), 8, "data ? x fsdp 3 x tensor 1 over 8 devices leaves 8/3"),
        (("2", "2", "1"), 8, "data 2 x fsdp 2 x tensor 1 = 4 devices, but there are 8"),
        (("none", "none", "1"), 8, "at most one open axis"),
        (("none", "16", "1"), 8, "leaves 8/16"),
    ],
)
def test_a_mesh_that_does_not_come_out_shows_its_equation(mesh, devices, equation):
    c = config(mesh__data=mesh[0], mesh__fsdp=mesh[1], mesh__tensor=mesh[2])
    with pytest.raises(ConfigError) as caught:
        mesh_shape(c, devices)
    assert equation in str(caught.value)
    assert equation in only(check(c, devices))
    assert check(c) == []


def test_the_context_axis_is_one_of_the_mesh():
    c = config(mesh__data="1", mesh__fsdp="2", mesh__context="none")
    shape = mesh_shape(c, 8)
    assert shape == MeshShape(1, 2, 1, context=4) and shape.shards == 2
    with pytest.raises(ConfigError, match="data 1 x fsdp 2 x tensor 1 x context 3 = 6 devices"):
        mesh_shape(config(mesh__data="1", mesh__fsdp="2", mesh__context="3"), 8)


def test_rows_split_over_devices_need_ring_attention_and_as_many_devices_share_a_budget():
    assert check(config(mesh__context="2")) == []
    said = only(check(config(mesh__context="2", model__attention="blocked")))
    assert "model.attention = blocked with mesh.context = 2" in said and "use auto or ring" in said
    longest = config().data.max_prompt_length + config().data.max_response_length
    half = {
        "actor__use_dynamic_bsz": "true",
        "actor__ppo_max_token_len_per_device": str(longest // 2),
    }
    assert check(config(mesh__context="2", **half)) == []
    assert f"set it to {longest} or more" in "".join(check(config(**half)))


def test_nearest_multiples():
    assert multiples(20, 8) == "16 or 24"
    assert multiples(3, 8) == "8"


# H4, H5 --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_or_a_greedy_group_is_refused(estimator):
    text = only(check(config(rollout__n="1", algorithm__adv_estimator=estimator)))
    assert "rollout.n = 1" in text and estimator in text and "at least 2" in text
    assert "do_sample" in only(
        check(config(rollout__do_sample="false", algorithm__adv_estimator=estimator))
    )
    assert check(config(rollout__n="2", algorithm__adv_estimator=estimator)) == []
    assert (
        check(config(rollout__n="1", rollout__do_sample="false", algorithm__adv_estimator="gae"))
        == []
    )


def test_contradictions():
    assert "GAE needs values" in only(
        check(config(algorithm__adv_estimator="gae", critic__enable="false"))
    )
    assert "uses no values" in only(check(config(critic__enable="true")))
    assert "kl_loss_coef = 0" in only(
        check(config(actor__use_kl_loss="true", actor__kl_loss_coef="0"))
    )
    assert check(config(actor__kl_loss_coef="0")) == []
    assert "kl_ctrl.kl_coef = 0" in only(
        check(config(algorithm__use_kl_in_reward="true", algorithm__kl_ctrl__kl_coef="0"))
    )
    assert "use k3" in only(
        check(config(algorithm__use_kl_in_reward="true", algorithm__kl_penalty="k3+"))
    )
    assert (
        check(config(algorithm__use_kl_in_reward="true", algorithm__kl_penalty="low_var_kl")) == []
    )
    assert "clip_min" in only(check(config(reward__clip_min="1", reward__clip_max="0")))
    assert check(config(reward__clip_min="0", reward__clip_max="0")) == []
    assert "plain_template" in only(
        check(config(data__prompt_format="plain", data__plain_template="Q: A:"))
    )
    assert check(config(validation__top_k="5", validation__n="2")) == []
    assert (
        check(config(actor__loss_scale_factor="10", actor__loss_agg_mode="seq-mean-token-sum-norm"))
        == []
    )
    assert "critic.loss_agg_mode" in only(
        check(
            config(algorithm__adv_estimator="gae", critic__loss_agg_mode="seq-mean-token-sum-norm")
        )
    )


# All at once, never an exception -------------------------------------------------------------------------------------------------


def test_all_problems_come_together():
    c = config(
        rollout__n="1",
        data__train_batch_size="20",
        trainer__test_freq="0",
        mesh__fsdp="3",
        actor__optim__lr="-1",
    )
    c = put(put(c, "data.max_prompt_length", "many"), "algorithm.gamma", float("nan"))
    problems = check(c, devices=8)
    for word in (
        "max_prompt_length",
        "algorithm.gamma",
        "rollout.n",
        "train_batch_size",
        "test_freq",
        "fsdp 3",
        "optim.lr",
    ):
        assert any(word in problem for problem in problems), word
    assert len(problems) == 7


def test_a_wrong_type_brings_no_follow_on_problem():
    assert only(check(put(config(), "rollout.n", "four"))) == "rollout.n: got 'four', need int"
    assert only(check(put(config(), "model.path", 3))) == "model.path: got 3, need str"
    assert len(check(put(config(), "actor", None), devices=8)) == 1


ODD = [
    None, True, 0, -1, 1, 7, 2**70, -(2**70), 10**400, 0.0, -0.5, 1e308, 5e-324, float("nan"), float("inf"),
    "", "\0", "\n", "..", "-x", "~no_such_user/x", "/", "x" * 5000, "(", "[", "a.py:b", "\ud800", "é" * 200,
    (), ("",), ("\0",), ("\0.py:f",), ("a", "a"), (-1,), (0.0, 1.0), (float("nan"),), ["a"], {}, object(),
]  # fmt: skip


def test_no_rule_raises_on_odd_values():
    base = config()
    for path, declared, held in leaves(base):
        well_typed = [value for value in ODD if type_problem(declared.type, value) is None]
        for value in (*well_typed, object(), float("nan")):
            c = put(base, path, value)
            problems = check(c, devices=8)
            assert all(isinstance(problem, str) and problem for problem in problems), (path, value)
            if not problems and value != held:
                assert all(notices(resolve(c)))


def test_mentions_means_the_whole_name():
    assert mentions("rollout.n = 1 is bad", ["rollout.n"])
    assert mentions("set rollout.n.", ["rollout.n"])
    assert not mentions("rollout.name: got", ["rollout.n"])
    assert not mentions("my.rollout.n", ["rollout.n"])
    assert not mentions("anything", [])


def test_every_number_has_a_rule():
    """A setting that is a plain number is in one of the range tables or named in a rule."""
    ruled = set(f"{checks.POSITIVE} {checks.NOT_NEGATIVE} {checks.SHARES}".split())
    known = {path for path, _, _ in leaves(Config())}
    assert ruled <= known
    elsewhere = {
        "actor.clip_ratio_c", "reward.clip_min", "reward.clip_max", "reward.timeout_s", "reward.memory_limit_mb",
        "reward.num_workers",
    }  # fmt: skip
    numbers = {
        path
        for path, declared, _ in leaves(Config())
        if declared.type in (int, float, int | None, float | None)
    }
    assert numbers - ruled - elsewhere == set()
    assert value_at(Config(), "algorithm.kl_ctrl.horizon") == 10000


# Names and folders -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["project_name", "experiment_name"])
@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "a/../b",
        "/abs",
        "a/b",
        "a\\b",
        "nul\0",
        "new\nline",
        "a\n",
        "-rf",
        ".hidden",
        "x" * 300,
        "a b",
        "é",
        "a..b",
    ],
)
def test_names_stay_inside_the_output_root(field, name):
    problems = check(put(config(), f"trainer.{field}", name))
    assert any(problem.startswith(f"trainer.{field}: got") for problem in problems)
    assert all(
        problem.startswith(f"trainer.{field}") or "run_dir" in problem for problem in problems
    )


@pytest.mark.parametrize("name", ["a", "grpo-1a2b", "lr=1e-3", "v1.2", "_x", "0", "x" * 128])
def test_plain_names_are_taken(name):
    assert check(put(config(), "trainer.experiment_name", name)) == []


@pytest.mark.parametrize("run_dir", ["a\0b", "a\nb", "a\x1bb", "x" * 300, "é" * 200, "a/" * 600])
def test_run_dirs_that_no_file_system_takes(run_dir):
    assert "trainer.run_dir: got" in only(check(put(config(), "trainer.run_dir", run_dir)))


def test_the_run_dir_is_a_folder_or_free(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert check(config(trainer__run_dir=str(tmp_path))) == []
    assert check(config(trainer__run_dir=str(tmp_path / "new" / "deep"))) == []
    assert f"{file} is not a folder" in only(check(config(trainer__run_dir=str(file))))
    assert f"{file} is not a folder" in only(check(config(trainer__run_dir=str(file / "below"))))
    assert "dangling is not a folder" in only(
        check(config(trainer__run_dir=str(tmp_path / "dangling")))
    )
    assert not (tmp_path / "new").exists()


def test_a_run_dir_without_permission(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(
        closed, os.W_OK
    ):  # root may write anywhere: let the system call say what it says to others
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(closed))
    text = only(check(config(trainer__run_dir=str(closed / "run"))))
    assert f"{closed} is not writable" in text
    assert check(config(trainer__run_dir=str(tmp_path))) == []


def test_the_shape_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MeshShape(1, 1, 1).data = 2  # type: ignore[misc]
