"""`evaluate`: prints held-out metrics of first weights or of a run's newest checkpoint, and writes nothing."""

import re

import pytest

from jaxrl_llm.commands import evaluate
from tests import rig


def evaluated(overrides, capfd, count=1):
    """Exit code, metrics printed as `name value`, and everything printed."""
    with rig.devices(count):
        code = evaluate.run(rig.words(overrides), prog="test")
    text = capfd.readouterr()
    found = re.findall(r"^(val/\S+) (\S+)$", text.out, re.MULTILINE)
    return code, {name: float(value) for name, value in found}, text.out + text.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    assert rig.run_here({"trainer.run_dir": folder, "trainer.total_training_steps": 3}) == 0
    return folder


def test_first_weights_in_a_fresh_folder(tmp_path, capfd):
    settings = {"trainer.run_dir": tmp_path / "run", "validation.n": 2}
    code, numbers, text = evaluated(settings, capfd)
    assert code == 0 and "weights of step 0 (package:" in text
    assert {f"val/arithmetic/acc/{name}" for name in ("mean@1", "mean@2", "best@2", "maj@2")} < set(
        numbers
    )
    assert numbers["val/arithmetic/acc/best@2"] >= numbers["val/arithmetic/acc/mean@2"]
    assert not (tmp_path / "run").exists()


def test_the_newest_checkpoint_gives_the_numbers_of_the_run(trained, capfd):
    before = rig.everything(trained)
    code, numbers, text = evaluated({"trainer.run_dir": trained}, capfd)
    assert code == 0 and "weights of step 3 (checkpoint)" in text
    last = {k: round(v, 4) for k, v in rig.rows(trained)[-1].items() if k.startswith("val/")}
    assert numbers == last
    assert rig.everything(trained) == before


def test_it_needs_held_out_prompts(tmp_path, capfd):
    settings = {"trainer.run_dir": tmp_path / "run", "data.val_files": "[]"}
    code, numbers, text = evaluated(settings, capfd)
    assert (code, numbers) == (64, {}) and "data.val_files: got an empty list" in text


def test_a_signal_ends_it_with_nothing_written(trained, capfd, monkeypatch):
    monkeypatch.setenv("JAXRL_FAULT_PLAN", "in_eval:3:term")
    before = rig.everything(trained)
    code, numbers, text = evaluated({"trainer.run_dir": trained}, capfd)
    assert (code, numbers) == (75, {}) and "nothing was written" in text
    assert rig.everything(trained) == before


def test_help(capfd):
    assert evaluate.run(["--help"], prog="python -m jaxrl_llm evaluate") == 0
    assert "usage: python -m jaxrl_llm evaluate" in capfd.readouterr().out
