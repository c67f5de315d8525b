"""`export`: the policy of a run as a folder that reads back bit for bit; the folder is whole or absent."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm import fault, networks, tokenizer
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.commands import evaluate, export
from jaxrl_llm.models import weights
from tests import rig


def exported(*words, count=1):
    with rig.devices(count):
        return export.run(list(words), prog="test")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A PPO run of two steps with a KL term, so that export has to leave a critic and a reference aside."""
    folder = tmp_path_factory.mktemp("export") / "run"
    settings = rig.ALGORITHMS["ppo"] | {
        "trainer.run_dir": folder,
        "trainer.critic_warmup": 0,
        "trainer.total_training_steps": 2,
        "mesh.data": 1,
    }
    assert rig.run_here(settings) == 0
    return folder


@pytest.fixture(scope="module")
def policy(trained):
    """The trained parameters, straight from the checkpoint."""
    settings = rig.ALGORITHMS["ppo"] | {"trainer.critic_warmup": 0, "mesh.data": 1}
    parts = rig.build(settings | {"trainer.total_training_steps": 2})
    saver = Checkpointer(trained / "checkpoints", keep=None, log=lambda text: None)
    return saver.restore(networks.abstract_state(parts))[1].actor.trainable


@pytest.mark.parametrize("count", [1, 3, 8])
def test_an_exported_policy_is_the_policy(trained, policy, count, tmp_path, capfd):
    """The mesh of the run plays no part: a run of one device is exported on eight, and on three, of which the width of
    64 leaves two."""
    before = rig.everything(trained)
    assert exported(f"--run_dir={trained}", f"--to={tmp_path}/hf", count=count) == 0
    assert f"step 2 -> {tmp_path}/hf" in capfd.readouterr().out
    model, source = networks.open_model(str(tmp_path / "hf"))
    params = weights.load_params(source, model)
    assert jax.tree.structure(params) == jax.tree.structure(policy)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(policy), strict=True):
        assert got.dtype == np.float32 and np.array_equal(got, want)
    original = rig.build({"data.val_files": "[]"}).tokenizer
    reader = tokenizer.load(tmp_path / "hf")
    assert reader.encode("12+3=?") == original.encode("12+3=?")
    assert reader.stop_ids == original.stop_ids
    assert reader.decode(reader.encode(" 7-2\n#### 5")) == " 7-2\n#### 5"
    assert rig.everything(trained) == before
    if count == 1:
        last = rig.rows(trained)[-1]["val/arithmetic/acc/mean@1"]
        words = rig.words({"model.path": tmp_path / "hf", "trainer.run_dir": tmp_path / "new"})
        with rig.devices(1):
            assert evaluate.run(words, prog="test") == 0
        assert f"val/arithmetic/acc/mean@1 {last:.4f}" in capfd.readouterr().out


def test_the_default_place_and_half_precision(trained, policy, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    assert exported(f"--run_dir={folder}", "--dtype=bfloat16") == 0
    described = json.loads((folder / "export" / "config.json").read_text())
    assert described["torch_dtype"] == "bfloat16"
    model, source = networks.open_model(str(folder / "export"))
    params = weights.load_params(source, model)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(policy), strict=True):
        assert np.array_equal(got, np.asarray(want).astype(jax.numpy.bfloat16).astype(np.float32))


def test_a_failed_export_leaves_no_folder(trained, tmp_path, monkeypatch):
    fault.reset()
    monkeypatch.setenv(fault.PLAN_VARIABLE, "in_export:2:raise")
    assert exported(f"--run_dir={trained}", f"--to={tmp_path}/hf") == 70
    assert list(tmp_path.iterdir()) == []
    fault.reset()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--run_dir is missing"),
        (["--run_dir=x", "--dtype=int8"], "--dtype: got 'int8'"),
        (["--run_dir=x", "--too=y"], "--too: no such option; need dtype, run_dir, to"),
        (["--run_dir=x", "--config=y"], "--config: export reads the config.json"),
        (["x"], "'x': not understood"),
    ],
)
def test_bad_words_are_refused(words, said, capfd):
    assert exported(*words) == 64
    assert said in capfd.readouterr().err


def test_a_folder_without_a_run_or_a_checkpoint(trained, tmp_path, capfd):
    assert exported(f"--run_dir={tmp_path}") == 65
    assert "holds no config.json" in capfd.readouterr().err
    shutil.copy(trained / "config.json", tmp_path)
    assert exported(f"--run_dir={tmp_path}") == 65
    assert "holds no checkpoint yet" in capfd.readouterr().err


def test_help(capfd):
    assert exported("--help") == 0
    assert "usage: test --run_dir=FOLDER" in capfd.readouterr().out
