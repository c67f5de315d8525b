"""What retention may delete, what is a leftover, what fits on the disk."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxrl_llm.checkpoint import (
    Checkpointer,
    check_space,
    files,
)
from jaxrl_llm.checkpoint.lock import start_ticks
from tests.checkpoint.rig import (
    abstract,
    save_all,
    saver_for,
    small,
)


def test_retention_keeps_the_newest(tmp_path):
    checkpointer, _ = saver_for(tmp_path, keep=2)
    save_all(checkpointer, [1, 2, 3, 4])
    assert checkpointer.steps() == [3, 4]
    everything, _ = saver_for(tmp_path, keep=None)
    save_all(everything, [5, 6])
    assert everything.steps() == [3, 4, 5, 6]
    with pytest.raises(ValueError):
        Checkpointer(tmp_path, keep=0)


def test_foreign_files_and_copied_steps_are_never_deleted(tmp_path):
    elsewhere, _ = saver_for(tmp_path / "other")
    save_all(elsewhere, [7])
    here = tmp_path / "here"
    checkpointer, log = saver_for(here, keep=1)
    save_all(checkpointer, [1])
    shutil.copytree(tmp_path / "other" / "00000007", here / "00000007")
    foreign = ["notes.txt", "12", "00000003.saving-me", "00000003.orbax-checkpoint-tmp", "best"]
    for name in foreign[:1]:
        (here / name).write_text("mine")
    for name in foreign[1:]:
        (here / name).mkdir()
        (here / name / "file").write_text("mine")
    (here / "00000002.deleting").symlink_to(tmp_path / "other")
    step, state, run = checkpointer.restore(abstract(small(7)))
    assert (step, int(state["n"]), run) == (7, 7, {"row": 70})
    assert any("adopting" in line for line in log)
    again, _ = saver_for(here, keep=1)
    save_all(again, [8, 9])
    assert again.steps() == [7, 9]
    assert all((here / name).exists() for name in foreign)
    assert (tmp_path / "other" / "00000007" / "manifest.json").exists()


def test_lost_owner_file_makes_old_steps_undeletable(tmp_path):
    checkpointer, _ = saver_for(tmp_path, keep=1)
    save_all(checkpointer, [1])
    (tmp_path / "owner.json").write_text("{")
    save_all(checkpointer, [2, 3])
    assert checkpointer.steps() == [1, 3]


def test_newer_steps_of_an_abandoned_continuation_step_aside(tmp_path):
    checkpointer, log = saver_for(tmp_path, keep=1)
    save_all(checkpointer, [30])
    save_all(checkpointer, [20])
    assert checkpointer.steps() == [20]
    assert (tmp_path / "00000030.aside-1" / "manifest.json").exists()
    assert any("moved to" in line for line in log)


def test_nothing_and_leftovers_only_are_a_fresh_start(tmp_path):
    checkpointer, log = saver_for(tmp_path / "absent")
    assert checkpointer.restore(abstract(small(1))) is None and checkpointer.steps() == []
    assert log == [] and not (tmp_path / "absent").exists()
    here = tmp_path / "here"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"00000004.saving-{dead.pid}", "00000002.deleting"):
        (here / name / "state").mkdir(parents=True)
    for step, started in {4: "1", 5: str(start_ticks(os.getppid()))}.items():
        other = here / f"0000000{step}.saving-{os.getppid()}"
        other.mkdir()
        (other / files.PROCESS).write_text(started)
    checkpointer, log = saver_for(here)
    assert checkpointer.restore(abstract(small(1))) is None
    assert len(log) == 3
    save_all(checkpointer, [6])
    left = sorted(path.name for path in here.iterdir())
    assert left == [f"00000005.saving-{os.getppid()}", "00000006", "owner.json"]


def test_check_space_counts_one_more_than_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=30_000_000))
    target = tmp_path / "not" / "yet"
    assert check_space(target, 10_000_000, 2) is None
    problem = check_space(target, 10_000_001, 2) or ""
    assert "0.030 GB free" in problem and "3 more" in problem
    assert check_space(target, 15_000_000, None) is None
    for step in (1, 2):
        (target / files.step_name(step)).mkdir(parents=True)
    assert check_space(target, 30_000_000, 2) is None
