"""The host loop as a whole: killed, stopped, damaged, changed, and started again, on a run of six tiny steps.

Processes are killed for real; everything that ends in order runs inside the test process, on one of its devices.
"""

import json
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm import fault, runtime, trainer
from jaxrl_llm.checkpoint.lock import RunLock
from jaxrl_llm.commands import train
from jaxrl_llm.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
)
from tests import rig


def same_run(one, other):
    """Two run folders hold the same numbers: every metric bit for bit, every leaf, the data position, the samples."""
    rig.same_rows(rig.rows(one), rig.rows(other))
    assert [row["step"] for row in rig.rows(one)] == list(range(7))
    assert rig.steps(one)[-1] == rig.steps(other)[-1] == 6
    assert rig.digests(one) == rig.digests(other)
    assert rig.manifest(one)["run"] == rig.manifest(other)["run"]
    assert rig.completions(one) == rig.completions(other)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folders of undisturbed processes, one for each algorithm that a test asks for."""
    folders = {}

    def folder(algorithm, **settings):
        key = (algorithm, *settings.items())
        if key not in folders:
            target = tmp_path_factory.mktemp(algorithm) / "run"
            done = rig.run(rig.ALGORITHMS[algorithm] | settings | {"trainer.run_dir": target})
            assert done.returncode == EXIT_OK, done.stdout
            folders[key] = target
        return folders[key]

    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of an undisturbed GRPO run in this process."""
    folder = tmp_path_factory.mktemp("base") / "run"
    assert rig.run_here({"trainer.run_dir": folder}) == EXIT_OK
    return folder


@pytest.fixture
def copy(base, tmp_path):
    """A copy of the finished run that a test may spoil."""
    return shutil.copytree(base, tmp_path / "run")


# Killed --------------------------------------------------------------------------------------------------------------


def written(folder):
    return (folder / "metrics.jsonl").read_text().count("\n")


def killed(settings, plan, rows, saved):
    """Kill a run that its plan makes stand still, once it has written so many rows and the step `saved` is whole."""
    process, folder = rig.start(settings, plan=plan), settings["trainer.run_dir"]
    end = time.monotonic() + 300
    try:
        while saved not in rig.steps(folder) or written(folder) < rows:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.kill()
        out, _ = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, "")


def killed_and_restarted(settings, plan, rows=None, saved=None):
    """Kill a run, as planned or, with `rows`, by `killed`, and start the same command again; returns what the second one printed."""
    first = killed(settings, plan, rows, saved) if rows else rig.run(settings, plan=plan)
    assert first.returncode == -signal.SIGKILL, first.stdout
    second = rig.run(settings)
    assert second.returncode == EXIT_OK, second.stdout
    return second.stdout


@pytest.mark.parametrize(
    ("algorithm", "plan", "rows", "resumed"),
    [
        # the last step of the first epoch is the last one saved
        ("ppo", "before_update:6:sleep=300", 6, 5),
        # a row that no checkpoint knows is written twice
        ("grpo", "after_update:3:sleep=300", 4, 2),
        # a checkpoint is whole but has no name yet
        ("rloo", "in_save:4:kill", None, 2),
    ],
)
def test_a_killed_run_continues_bit_for_bit(algorithm, plan, rows, resumed, undisturbed, tmp_path):
    every = {"trainer.save_freq": 5 if algorithm == "ppo" else 2}
    settings = rig.ALGORITHMS[algorithm] | every | {"trainer.run_dir": tmp_path / "run"}
    out = killed_and_restarted(settings, plan, rows, resumed)
    assert f"resuming after step {resumed}\n" in out
    same_run(tmp_path / "run", undisturbed(algorithm, **every))


POINTS = [point for point in fault.POINTS if point not in ("in_delete", "in_export")]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_anywhere_continues_bit_for_bit(point, step, undisturbed, tmp_path):
    algorithm = list(rig.ALGORITHMS)[(POINTS.index(point) + step // 2) % 3]
    every = {"trainer.test_freq": 1}
    step = {"in_save": step + 1, "at_exit": 6}.get(point, step)
    settings = rig.ALGORITHMS[algorithm] | every | {"trainer.run_dir": tmp_path / "run"}
    killed_and_restarted(settings, f"{point}:{step}:kill")
    same_run(tmp_path / "run", undisturbed(algorithm, **every))


# Stopped by a signal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "saved", "pending"),
    [
        ("in_rollout:1:term", None, False),
        ("in_rollout:3:term", 2, False),
        ("before_update:5:term", 5, False),
        ("in_eval:3:term", 3, True),
        ("in_eval:6:term", 6, True),
        ("in_save:4:term,in_reward:5:sleep=60", 4, False),
    ],
)
def test_sigterm_saves_the_last_finished_step(
    plan, saved, pending, base, tmp_path, monkeypatch, capfd
):
    came = []
    handle = runtime.Signals._handle

    def watched(self, number, frame):
        came.append(time.monotonic())
        handle(self, number, frame)

    def until_it_came(seconds):
        end = time.monotonic() + seconds
        while not came and time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(runtime.Signals, "_handle", watched)
    monkeypatch.setattr(fault, "time", SimpleNamespace(sleep=until_it_came))
    settings = {"trainer.run_dir": tmp_path / "run"}
    assert rig.run_here(settings, plan=plan) == EXIT_INTERRUPTED
    assert len(came) == 1 and time.monotonic() - came[0] < 30
    told = capfd.readouterr().err
    assert "the same command continues" in told
    steps = rig.steps(tmp_path / "run")
    assert (steps[-1] if steps else None) == saved
    if saved:
        assert f"step {saved} of 6 is saved" in told
        assert bool(rig.manifest(tmp_path / "run")["run"]["pending"]) == pending
    if pending:
        assert rig.rows(tmp_path / "run")[-1]["step"] == saved - 1
    assert rig.run_here(settings) == EXIT_OK
    same_run(tmp_path / "run", base)


def test_a_step_waiting_for_its_validation_may_be_interrupted_again(base, tmp_path):
    settings = {"trainer.run_dir": tmp_path / "run", "trainer.log_completions_freq": 3}
    for _ in range(2):
        assert rig.run_here(settings, plan="in_eval:3:term") == EXIT_INTERRUPTED
        assert rig.steps(tmp_path / "run") == [2, 3]
    assert rig.run_here(settings) == EXIT_OK
    rig.same_rows(rig.rows(tmp_path / "run"), rig.rows(base))
    samples = rig.completions(tmp_path / "run")["00000003.jsonl"]
    splits = [sample["split"] for sample in samples]
    assert splits == ["train"] * 4 + ["validation"] * 16


def test_a_second_sigterm_ends_at_once_and_leaves_the_checkpoint_before(tmp_path):
    plan = "in_rollout:4:term,in_save:3:sleep=100"
    process = rig.start({"trainer.run_dir": tmp_path / "run"}, plan=plan)
    try:
        for line in process.stdout:
            if "saving the last finished step" in line:
                break
        time.sleep(0.5)
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == EXIT_INTERRUPTED
        assert time.monotonic() - start < 20
    finally:
        process.kill()
        process.stdout.close()
    assert rig.steps(tmp_path / "run") == [2]
    assert rig.run_here({"trainer.run_dir": tmp_path / "run"}) == EXIT_OK
    assert rig.steps(tmp_path / "run") == [2, 4, 6]


def test_a_stop_after_a_failed_save_saves_that_step_again(tmp_path, capfd):
    plan = "in_save:2:raise,in_rollout:3:term"
    assert rig.run_here({"trainer.run_dir": tmp_path / "run"}, plan=plan) == EXIT_INTERRUPTED
    assert "checkpoint of step 2: got InjectedFault" in capfd.readouterr().out
    assert rig.steps(tmp_path / "run") == [2]


# Saves that fail -------------------------------------------------------------------------------------------------------


def test_a_save_in_flight_survives_an_error_in_the_loop(tmp_path):
    plan = "in_save:2:sleep=1.5,in_reward:3:raise"
    assert rig.run_here({"trainer.run_dir": tmp_path / "run"}, plan=plan) == EXIT_INTERNAL
    assert rig.steps(tmp_path / "run") == [2]


def test_a_failed_save_is_said_at_once_and_a_failed_last_save_is_an_error(tmp_path):
    done = rig.run(
        {"trainer.run_dir": tmp_path / "run", "trainer.logger": "console"}, file_blocks=100
    )
    assert done.returncode == EXIT_INTERNAL, done.stdout
    assert "Checkpoint not saved" in done.stdout
    told = done.stdout.index("checkpoint of step 2: got")
    assert told < done.stdout.index("step 6/6"), "the save of step 4 has waited for its end"
    assert rig.steps(tmp_path / "run") == []
    assert len(rig.rows(tmp_path / "run")) == 7


def test_an_earlier_save_that_failed_does_not_stop_training(tmp_path, capfd):
    settings = {"trainer.run_dir": tmp_path / "run"}
    assert rig.run_here(settings, plan="in_save:2:raise") == EXIT_OK
    assert "Checkpoint not saved" in capfd.readouterr().out
    assert rig.steps(tmp_path / "run") == [4, 6]


# Damaged ---------------------------------------------------------------------------------------------------------------


def flip_a_bit(folder):
    """Spoil the largest data file of a checkpoint."""
    files = [path for path in (folder / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_a_damaged_checkpoint_is_never_trained_on(copy, base, capfd):
    flip_a_bit(copy / "checkpoints/00000006")
    settings = {"trainer.run_dir": copy}
    before = rig.everything(copy)
    stop = settings | {"trainer.on_damaged_checkpoint": "stop"}
    assert rig.run_here(stop) == EXIT_DATA
    assert "checkpoint step 6" in capfd.readouterr().err
    assert rig.everything(copy) == before
    assert rig.run_here(settings) == EXIT_OK
    out = capfd.readouterr().out
    assert "checkpoint step 6" in out and "resuming after step 4" in out
    same_run(copy, base)


# Started again -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_changes_nothing(copy, capfd):
    before = rig.everything(copy)
    assert rig.run_here({"trainer.run_dir": copy}) == EXIT_OK
    out = capfd.readouterr().out
    assert "this run is finished: step 6 of 6" in out
    for way in ("total_training_steps", "run_dir", "resume_mode=disable"):
        assert way in out
    assert rig.everything(copy) == before


def test_more_steps_continue_a_finished_run(copy, tmp_path):
    longer = {"trainer.total_training_steps": 8}
    assert rig.run_here(longer | {"trainer.run_dir": copy}) == EXIT_OK
    assert rig.run_here(longer | {"trainer.run_dir": tmp_path / "fresh"}) == EXIT_OK
    rig.same_rows(rig.rows(copy), rig.rows(tmp_path / "fresh"))
    assert [row["step"] for row in rig.rows(copy)] == list(range(9))
    assert rig.digests(copy) == rig.digests(tmp_path / "fresh")


def test_a_changed_learning_rate_is_taken_and_said(copy, capfd):
    settings = {"trainer.run_dir": copy, "actor.optim.lr": 2e-3, "trainer.total_training_steps": 7}
    assert rig.run_here(settings) == EXIT_OK
    out = capfd.readouterr().out
    assert "actor.optim.lr: 0.001 -> 0.002; the configured learning rate wins" in out
    assert "trainer.total_training_steps: 6 -> 7" in out
    rates = [row["actor/lr"] for row in rig.rows(copy)[-2:]]
    assert rates == pytest.approx([1e-3, 2e-3])


def test_changed_identity_settings_are_refused_with_old_and_new(copy, capfd):
    before = rig.everything(copy)
    changed = {"rollout.temperature": 1.25, "trainer.seed": 5}
    assert rig.run_here({"trainer.run_dir": copy} | changed) == EXIT_CONFIG
    told = capfd.readouterr().err
    assert "rollout.temperature: the run in this folder has 1.5, got 1.25" in told
    assert "trainer.seed: the run in this folder has 1, got 5" in told
    assert rig.everything(copy) == before


def test_disable_refuses_a_folder_that_holds_a_run(copy, capfd):
    before = rig.everything(copy)
    assert rig.run_here({"trainer.run_dir": copy, "trainer.resume_mode": "disable"}) == EXIT_CONFIG
    assert "holds a run" in capfd.readouterr().err
    assert rig.everything(copy) == before


def test_a_run_continues_from_a_checkpoint_elsewhere(base, tmp_path, capfd):
    before = rig.everything(base)
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.resume_mode": "path",
        "trainer.resume_from_path": base / "checkpoints/00000004",
    }
    assert rig.run_here(settings) == EXIT_OK
    rig.same_rows(rig.rows(tmp_path / "run"), rig.rows(base)[5:])
    assert rig.digests(tmp_path / "run") == rig.digests(base)
    assert rig.everything(base) == before
    capfd.readouterr()
    assert rig.run_here(settings) == EXIT_OK
    assert "this run is finished: step 6 of 6" in capfd.readouterr().out


def test_a_path_into_the_same_folder_goes_back_to_that_step(copy, base, capfd):
    settings = {
        "trainer.run_dir": copy,
        "trainer.resume_mode": "path",
        "trainer.resume_from_path": copy / "checkpoints/00000004",
    }
    assert rig.run_here(settings) == EXIT_OK
    assert "resuming after step 4" in capfd.readouterr().out
    same_run(copy, base)


@pytest.mark.parametrize(
    ("name", "code"), [("checkpoints", EXIT_CONFIG), ("checkpoints/00000099", EXIT_CONFIG)]
)
def test_a_path_that_is_no_checkpoint_is_refused(name, code, base, tmp_path, capfd):
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.resume_mode": "path",
        "trainer.resume_from_path": base / name,
    }
    assert rig.run_here(settings) == code
    assert "need the folder of a checkpoint step" in capfd.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_changed_data_file_is_refused(tmp_path, capfd):
    questions = [{"question": f"{a}+1=", "answer": f"#### {a + 1}"} for a in range(10, 26)]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions))
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "data.train_files": file,
        "trainer.total_training_steps": 1,
        "trainer.val_before_train": "false",
    }
    assert rig.run_here(settings) == EXIT_OK
    questions[3]["answer"] = "#### 9"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions))
    before = rig.everything(tmp_path / "run")
    assert rig.run_here(settings | {"trainer.total_training_steps": 2}) == EXIT_CONFIG
    assert "train: the run was trained on" in capfd.readouterr().err
    assert rig.everything(tmp_path / "run") == before


def test_the_same_seed_repeats_and_another_does_not(base, tmp_path):
    assert rig.run_here({"trainer.run_dir": tmp_path / "again"}) == EXIT_OK
    same_run(tmp_path / "again", base)
    other = {"trainer.run_dir": tmp_path / "other", "trainer.seed": 2}
    assert rig.run_here(other | {"trainer.total_training_steps": 2}) == EXIT_OK
    mine, theirs = rig.rows(tmp_path / "other")[2], rig.rows(base)[2]
    assert mine["actor/grad_norm"] != theirs["actor/grad_norm"]
    assert rig.digests(tmp_path / "other", 2) != rig.digests(base, 2)


def test_the_saved_configuration_gives_the_same_run(base, tmp_path):
    words = [f"--config={base}/config.json", f"--trainer.run_dir={tmp_path}/run"]
    with rig.devices(1):
        assert train.run(words, prog="test") == EXIT_OK
    same_run(tmp_path / "run", base)
    saved = [
        json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "run")
    ]
    for config in saved:
        del config["trainer"]["run_dir"]
    assert saved[0] == saved[1]


def test_a_second_run_in_a_folder_is_refused(copy, capfd):
    before = rig.everything(copy)
    with RunLock(copy):
        assert rig.run_here({"trainer.run_dir": copy}) == EXIT_CONFIG
    assert "got a folder in use by process" in capfd.readouterr().err
    assert rig.everything(copy) == before


def test_a_mended_reward_file_is_said_and_accepted(tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text("def score(response, answer, **rest):\n    return 1.0\n")
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "reward.functions": f"{file}:score",
        "data.val_files": "[]",
        "reward.num_workers": 1,
        "trainer.total_training_steps": 1,
    }
    assert rig.run_here(settings) == EXIT_OK
    file.write_text("def score(response, answer, **rest):\n    return 0.5\n")
    assert "has changed" not in capfd.readouterr().out
    assert rig.run_here(settings | {"trainer.total_training_steps": 2}) == EXIT_OK
    assert "its file has changed since step 1" in capfd.readouterr().out
    assert [row["critic/score/mean"] for row in rig.rows(tmp_path / "run")] == [1.0, 0.5]


# What a person sees ------------------------------------------------------------------------------------------------------


def test_without_answers_the_alarm_shows_raw_responses(tmp_path, capfd):
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "data.max_response_length": 2,
        "data.val_files": "[]",
        "trainer.total_training_steps": 2,
    }
    assert rig.run_here(settings) == EXIT_OK
    out = capfd.readouterr().out
    alarm = out[out.index("[no_answer]") :]
    assert all(f"\n  {number}: '" in alarm for number in (1, 2, 3))
    assert [row["reward/answer_found"] for row in rig.rows(tmp_path / "run")] == [0.0, 0.0]


def test_saving_is_booked_to_the_step_that_waited(base):
    lines = (base / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line).get("timing_s/save_checkpoint") for line in lines]
    assert seconds[0] is None and seconds[1] == seconds[2] == seconds[4] == 0.0
    assert seconds[3] > 0 and seconds[5] > 0


def test_operational_settings_decide_what_is_written(base, tmp_path, capfd):
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.total_training_steps": 2,
        "trainer.logger": "jsonl,tensorboard",
        "trainer.log_completions_freq": 1,
        "trainer.log_completions_count": 2,
        "trainer.save_freq": 1,
        "trainer.test_freq": 1,
        "trainer.val_before_train": "false",
        "trainer.max_ckpt_to_keep": 1,
    }
    assert rig.run_here(settings) == EXIT_OK
    out = capfd.readouterr().out
    assert "step 1/2" not in out and "Samples of step" not in out
    folder = tmp_path / "run"
    assert list(folder.glob("tensorboard/*tfevents*")) and not (base / "tensorboard").exists()
    rows = rig.rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all("val/arithmetic/acc/mean@1" in row for row in rows)
    for samples in rig.completions(folder).values():
        splits = [sample["split"] for sample in samples]
        assert splits == ["train"] * 2 + ["validation"] * 16
    assert len(rig.completions(folder)) == 2
    assert rig.steps(folder) == [2] and rig.steps(base) == [2, 4, 6]
    assert (folder / "plots" / "training.png").is_file()


def test_chosen_steps_are_traced_and_late_compilations_are_named(tmp_path, capfd, monkeypatch):
    def of_two_shapes(x):
        return x * 3 + 17

    jitted = jax.jit(of_two_shapes)

    def with_a_change_of_shape(parts, run, state, step):
        result = train_step(parts, run, state, step)
        with run.phases("extra"):
            jitted(np.ones(3 if step < 4 else 5, np.float32))
        return result

    train_step = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", with_a_change_of_shape)
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "trainer.profile_steps": "2,3,9",
        "trainer.total_training_steps": 4,
        "data.val_files": "[]",
    }
    assert rig.run_here(settings) == EXIT_OK
    out = capfd.readouterr().out
    profile = tmp_path / "run" / "profile"
    assert sorted(path.name for path in profile.iterdir()) == ["step_2", "step_3"]
    for step in (2, 3):
        assert f"trace of step {step}: {profile}/step_{step} (" in out
    assert "trainer.profile_steps: [9] are no steps of this run (1 to 4)" in out
    [line] = [line for line in out.splitlines() if "recompiled" in line and "of_two_shapes" in line]
    assert " at step 4 (" in line and "float32[5] instead of float32[3]; lengths" in line


def test_processes_wait_for_each_other_as_long_as_is_set(monkeypatch):
    class Asked(Exception):
        pass

    def meetings(seconds):
        raise Asked(seconds)

    monkeypatch.setattr(trainer.processes, "Meetings", meetings)
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(Asked, match=r"^77$"):
            run(rig.settings({"distributed.wait_timeout": 77}))
