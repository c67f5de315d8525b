"""The two front doors: `python -m jaxrl_llm` and `python -m jaxrl_llm.main`."""

import importlib
import subprocess
import sys

import pytest

from jaxrl_llm import __main__ as front
from tests import rig


def test_help_lists_every_command(capsys):
    assert front.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jaxrl_llm COMMAND")
    for name in front.COMMANDS:
        assert f"\n  {name} " in out
        assert callable(importlib.import_module(f"jaxrl_llm.commands.{name}").run)


def test_no_command_is_an_error_that_shows_the_usage(capsys):
    assert front.run([]) == 64
    assert "usage: python -m jaxrl_llm COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["trian", "--config=x", "os", "train.run", ""])
def test_an_unknown_command_lists_the_known_ones(word, capsys):
    assert front.run([word]) == 64
    told = capsys.readouterr().err
    assert f"unknown command {word!r}; need one of train, evaluate, export" in told


def test_words_go_to_the_command(capsys):
    assert front.run(["train", "--trainer.save_frq=2"]) == 64
    told = capsys.readouterr().err
    assert "--config is missing" in told and "usage: python -m jaxrl_llm train" in told
    assert "trainer.save_frq: no such setting; did you mean trainer.save_freq?" in told


@pytest.mark.parametrize("module", ["jaxrl_llm", "jaxrl_llm.main"])
def test_exit_codes_reach_the_shell(module):
    command = [sys.executable, "-m", module, *(["train"] if module == "jaxrl_llm" else [])]
    done = subprocess.run(
        [*command, f"--config={rig.CONFIG}", "--rollout.n=1"],
        cwd=rig.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.startswith("Configuration refused (1 problem):\n  - rollout.n = 1")
