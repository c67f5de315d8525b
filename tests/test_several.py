"""Runs of two processes over loopback, two fake devices each: they equal runs of one process, stop together, resume on any number of
processes, and end together where one has a problem."""

import json
import re
import shutil

import numpy as np
import pytest

from jaxrl_llm import processes
from jaxrl_llm.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
)
from tests import loopback, loopback_jobs, rig

GRPO = rig.ALGORITHMS["grpo"] | {"trainer.save_freq": 3}
ALONE = {"count": 1, "devices": 2 * loopback.DEVICES}


@pytest.fixture(scope="module")
def talked(tmp_path_factory):
    """The job of two processes that tell each other everything, and the folder with what process 0 found."""
    folder = tmp_path_factory.mktemp("talked")
    return loopback.job("talk", folder), folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of two processes, and what they printed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = loopback.train(GRPO | {"trainer.run_dir": folder})
    assert loopback.codes(ended) == [EXIT_OK, EXIT_OK]
    return folder, ended


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run after a signal to process 1 in the middle of the fourth rollout."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    ended = loopback.train(GRPO | {"trainer.run_dir": folder}, plans={1: "in_rollout:4:term"})
    assert loopback.codes(ended) == [EXIT_INTERRUPTED, EXIT_INTERRUPTED]
    return folder, ended


# Telling each other --------------------------------------------------------------------------------------------------------


def test_small_things_are_told(talked):
    found = json.loads((talked[1] / "found.json").read_text())
    assert [value["me"] for value in found["gathered"]] == [0, 1]
    assert all(np.isnan(value["nan"]) for value in found["gathered"])
    assert found["any"] == [True, False]
    assert found["first"] == [0, "made"]
    assert found["kept"] <= 3, "what all have read is forgotten"
    assert found["stop"] is True


@pytest.mark.parametrize("piece", [2**26, 16])
def test_rows_travel_bit_for_bit_in_any_number_of_pieces(talked, piece):
    found = json.loads((talked[1] / "found.json").read_text())
    assert found[f"bits {piece}"] is True
    assert found[f"dtypes {piece}"] == {
        "f64": "float64",
        "bool": "bool",
        "i8": "int8",
        "i64": "int64",
    }
    assert found[f"rows {piece}"] == {"i64": [2**40, 2**40 + 1], "i8": [-1, -1, -2, -2]}


def test_every_row_is_counted_by_one_process(talked):
    found = json.loads((talked[1] / "found.json").read_text())
    table = np.arange(24).reshape(8, 3)
    for name in ("spread", "whole"):
        assert [part[name] for part in found["own"]] == [table[:4].tolist(), table[4:].tolist()]
    assert found["host"] is True


def test_who_does_not_come_is_named_within_the_limit(talked):
    text, seconds = json.loads((talked[1] / "found.json").read_text())["lonely"]
    assert text.startswith("lonely: process 0 of 2 waited 1 s for process 1, need all of them")
    assert 1 <= seconds < 60


def test_a_parameter_that_differs_on_one_device_is_named_on_both(talked):
    first, second = json.loads((talked[1] / "found.json").read_text())["drifted"]
    assert first == second and len(first) == 2
    assert re.match(
        r"actor parameter norm.scale: device \d+ \(process 1\) holds other bits", first[0]
    )


def test_a_problem_of_one_process_ends_both_and_is_worded_once(talked):
    ended = talked[0]
    assert loopback.codes(ended) == [EXIT_DATA, EXIT_DATA]
    assert ended[0].out.count("the file of process 1 is broken") == 1
    assert "process 1: Data refused" in ended[0].out
    assert "broken" not in ended[1].out
    assert "process 1: ended with the others, exit 65; process 0 says why" in ended[1].out


# Learning ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_two_processes_learn_what_one_learns(talked, algorithm):
    """Uneven responses, a step in which process 1 has no trained token, a step in which its logits are not finite."""
    rows = json.loads((talked[1] / f"{algorithm}.json").read_text())
    leaves = np.load(talked[1] / f"{algorithm}.npz")
    with rig.devices(2 * loopback.DEVICES):
        expected, state = loopback_jobs.fed(algorithm, processes.Meetings())
    bad = expected[loopback_jobs.BAD_STEP - 1]
    assert bad["rollout/non_finite_rows"] == 16 and "actor/pg_loss" not in bad
    for row, other in zip(rows, expected, strict=True):
        assert json.dumps(row.pop("samples")) == json.dumps(other.pop("samples"))
        assert set(row) == set(other)
        for name, value in other.items():
            assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), name
    assert set(leaves) == set(state)
    for name, leaf in state.items():
        close = 5e-6 if "opt_state" in name else 1e-6
        assert np.max(np.abs(leaves[name] - leaf)) <= close * np.max(np.abs(leaf)), name


def test_a_whole_run_of_two_processes(undisturbed):
    """Held-out accuracy before training is that of one process; process 0 alone writes and prints."""
    folder, ended = undisturbed
    rows = rig.rows(folder)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(np.isfinite(row["actor/grad_norm"]) for row in rows[1:])
    assert all(row["training/bad_steps"] == 0 for row in rows[1:])
    assert "step 6/6" in ended[0].out and "held-out at step 6" in ended[0].out
    mine = [line for line in ended[1].out.splitlines() if not line.startswith("[Gloo]") and line]
    assert mine == []
    assert rig.steps(folder) == [3, 6]
    samples = rig.completions(folder)["00000000.jsonl"]
    assert len({sample["row_id"] for sample in samples}) == len(samples) == 16
    assert "distributed" not in json.dumps(rig.manifest(folder)["run"])
    saved = json.loads((folder / "config.json").read_text())["distributed"]
    assert saved["process_id"] is None and saved["coordinator_address"] is None


# Stopping and resuming -------------------------------------------------------------------------------------------------------


def test_a_signal_to_one_process_stops_both_with_one_checkpoint(stopped):
    folder, ended = stopped
    assert rig.steps(folder) == [3]
    assert ended[0].out.count("step 3 of 6 is saved") == 1
    assert "SIGTERM" in ended[1].out and "SIGTERM" not in ended[0].out


def test_two_processes_resume_exactly(stopped, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    ended = loopback.train(GRPO | {"trainer.run_dir": folder})
    assert loopback.codes(ended) == [EXIT_OK, EXIT_OK]
    rig.same_rows(rig.rows(folder), rig.rows(undisturbed[0]))
    assert rig.manifest(folder)["leaves"] == rig.manifest(undisturbed[0])["leaves"]
    assert rig.completions(folder) == rig.completions(undisturbed[0])


def same_batches(folder, undisturbed):
    """The run went on with the prompts that the undisturbed one had, in their order, and ended at the same place in the data."""
    shown, expected = rig.completions(folder), rig.completions(undisturbed)
    for name in ("00000004.jsonl", "00000006.jsonl"):
        assert [s["row_id"] for s in shown[name]] == [s["row_id"] for s in expected[name]]
    for row, other in zip(rig.rows(folder)[4:], rig.rows(undisturbed)[4:], strict=True):
        for name in ("step", "prompt_length/mean", "prompt_length/max", "training/epoch"):
            assert row[name] == other[name], name
    assert rig.manifest(folder)["run"]["stream"] == rig.manifest(undisturbed)["run"]["stream"]


def test_one_process_goes_on_where_two_stopped(stopped, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    ended = loopback.train(GRPO | {"trainer.run_dir": folder}, **ALONE)
    assert loopback.codes(ended) == [EXIT_OK]
    assert "resuming after step 3" in ended[0].out
    same_batches(folder, undisturbed[0])


def test_two_processes_go_on_where_one_stopped(undisturbed, tmp_path):
    settings = GRPO | {"trainer.run_dir": tmp_path / "run"}
    alone = loopback.train(settings, plans={0: "in_rollout:4:term"}, **ALONE)
    assert loopback.codes(alone) == [EXIT_INTERRUPTED]
    first = rig.rows(tmp_path / "run")[0]["val/arithmetic/acc/mean@1"]
    assert first == rig.rows(undisturbed[0])[0]["val/arithmetic/acc/mean@1"]
    ended = loopback.train(settings)
    assert loopback.codes(ended) == [EXIT_OK, EXIT_OK]
    assert "resuming after step 3" in ended[0].out
    same_batches(tmp_path / "run", undisturbed[0])


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_and_ends_both(tmp_path):
    settings = GRPO | {"trainer.run_dir": tmp_path / "run", "distributed.watchdog_seconds": 5}
    ended = loopback.train(settings, plans={1: "before_update:4:sleep=200"})
    assert loopback.codes(ended) == [EXIT_INTERNAL, EXIT_INTERNAL]
    for number, one in enumerate(ended):
        assert f"process {number}: no process has got on for" in one.out
        assert "process 1 holds it up" in one.out and "process 0 at update_actor" in one.out
    assert "fault.py" in ended[1].out, "the stack shows where it stands"
    assert rig.steps(tmp_path / "run") == [3]


@pytest.mark.slow
def test_a_last_save_that_takes_long_is_no_standstill(tmp_path):
    """It takes longer than the watchdog's limit, which ten steps of this run stay far below."""
    more = {"trainer.run_dir": tmp_path / "run", "trainer.save_freq": 6}
    settings = GRPO | more | {"distributed.watchdog_seconds": 2}
    ended = loopback.train(settings, plans={0: "in_save:6:sleep=60"})
    assert loopback.codes(ended) == [EXIT_OK, EXIT_OK]
    assert rig.steps(tmp_path / "run") == [6]


# Starting --------------------------------------------------------------------------------------------------------------------


def test_a_process_with_another_setting_is_refused_and_named(tmp_path):
    other = {1: {"actor.optim.lr": 0.25, "data.val_max_samples": 3}}
    ended = loopback.train(GRPO | {"trainer.run_dir": tmp_path / "run"}, own=other)
    assert loopback.codes(ended) == [EXIT_CONFIG, EXIT_CONFIG]
    assert "actor.optim.lr: process 1 has 0.25, process 0 has 0.001, need the same" in ended[0].out
    assert "data.val_max_samples: process 1 has 3, process 0 has None" in ended[0].out
    assert "(3 problems)" in ended[0].out, "the name of the run follows from its settings"
    assert "process 0 says why" in ended[1].out
    assert not (tmp_path / "run").exists()


def test_four_processes_start_in_an_empty_folder_twenty_times(tmp_path):
    ended = loopback.job("folders", tmp_path, count=4, devices=1)
    assert loopback.codes(ended) == [EXIT_OK] * 4
    assert sorted(path.name for path in tmp_path.glob("*/deep/*")) == ["config.json"] * 20
