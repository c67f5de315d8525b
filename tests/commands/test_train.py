"""`train`: errors become texts and fixed exit codes; nothing heavy loads before the settings are checked."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm.commands import train
from jaxrl_llm.errors import ConfigError, DataError, Interrupted, RunError, TrainingStopped
from tests import rig


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            ConfigError(["one", "two"]),
            64,
            "Configuration refused (2 problems):\n  - one\n  - two\n",
        ),
        (DataError("broken"), 65, "Data refused (1 problem):\n  - broken\n"),
        (TrainingStopped("bad"), 70, "Training stopped (1 problem):\n  - bad\n"),
        (Interrupted("stop"), 75, "Interrupted (1 problem):\n  - stop\n"),
        (KeyboardInterrupt(), 75, "Interrupted.\n"),
    ],
)
def test_errors_become_exit_codes(error, code, said, capsys):
    def action():
        raise error

    assert train.guarded(action) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


def test_an_internal_error_shows_its_traceback(capsys):
    assert train.guarded(lambda: [][1]) == 70
    told = capsys.readouterr().err
    assert "IndexError" in told and "internal error (exit 70)" in told


@pytest.mark.parametrize("kind", [RuntimeError, RunError], ids=["here", "on another process"])
def test_a_full_device_says_what_to_turn(kind, capsys):
    def action():
        raise kind("RESOURCE_EXHAUSTED: 12.3 GiB")

    assert train.guarded(action) == 70
    said = capsys.readouterr().err
    assert "12.3 GiB" in said and "rollout.max_num_seqs or gpu_memory_utilization down" in said


def test_a_closed_pipe_is_no_traceback(capsys):
    def action():
        raise BrokenPipeError

    assert train.guarded(action) == 70
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (64, 64)])
def test_results_are_exit_codes(result, code):
    assert train.guarded(lambda: result) == code


def test_help_lists_settings_with_their_meaning(capfd):
    assert train.run(["--help"], prog="python -m jaxrl_llm.main") == 0
    out = capfd.readouterr().out
    assert "usage: python -m jaxrl_llm.main" in out and "--trainer.save-freq" in out.replace(
        "_", "-"
    )


def test_all_problems_come_at_once_and_before_jax(tmp_path):
    code = (
        "import sys\nfrom jaxrl_llm.commands import train\n"
        f"code = train.run(['--config={rig.CONFIG}', '--rollout.n=1', '--data.train_batch_siz=3', "
        "'--actor.optim.lr=fast'], 'x')\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'grain', 'transformers'} & set(sys.modules)\n"
        "print(code, sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=rig.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "64 []\n", done.stderr
    assert done.stderr.startswith("Configuration refused (3 problems):")
    for name in ("rollout.n = 1", "data.train_batch_siz", "actor.optim.lr"):
        assert name in done.stderr


def test_a_run_folder_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert rig.run_here({"trainer.run_dir": tmp_path / "file"}) == 64
    assert "is not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == ""


def test_a_relative_run_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rig.settings({"trainer.run_dir": "here"}).trainer.run_dir == str(tmp_path / "here")
    assert not os.path.exists(tmp_path / "here")
