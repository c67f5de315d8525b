"""The command line from outside: exit codes, all problems at once, help, completion, and no JAX before a problem is found."""

import itertools
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.cli import read_config, read_run, split_words, wants_help
from jaxrl_llm.config import Config, leaves, load, resolve, to_dict
from jaxrl_llm.errors import ConfigError

ROOT = Path(__file__).parent.parent
QUICK = str(ROOT / "configs" / "quickstart.py")
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "transformers", "chex", "numpy")


def python(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def main(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "jaxrl_llm.main", *words, **kwargs)


# Words ---------------------------------------------------------------------------------------------------------------------


def test_the_three_ways_to_write_a_setting():
    file, pairs, problems = split_words(
        [
            "--config=f.py",
            "--a.b=1",
            "--config.a.b=2",
            "--a.b",
            "3",
            "--c.d=x=y",
            "--e.f=",
            "--g",
            "-1",
        ]
    )
    assert file == "f.py"
    assert pairs == [
        ("a.b", "1"),
        ("a.b", "2"),
        ("a.b", "3"),
        ("c.d", "x=y"),
        ("e.f", ""),
        ("g", "-1"),
    ]
    assert problems == []
    assert split_words(["--config", "f.py"])[0] == "f.py"


def test_words_that_mean_nothing():
    _, pairs, problems = split_words(["train", "--a.b", "--c.d=1", "-x", "--last"])
    assert pairs == [("c.d", "1")]
    assert len(problems) == 4
    assert "write --a.b=VALUE" in problems[1]
    assert "need one file" in split_words(["--config=a.py", "--config=b.py"])[2][0]


# Reading -------------------------------------------------------------------------------------------------------------------


def refused(words: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_config(words, "prog")
    return caught.value.problems


def test_a_sound_command_line_gives_a_resolved_configuration(tmp_path):
    config = read_config(
        [f"--config={QUICK}", "--rollout.n=4", f"--trainer.run_dir={tmp_path}"], "prog"
    )
    assert config.rollout.n == 4
    assert config.trainer.run_dir == str(tmp_path)
    assert resolve(config) == config
    assert (read_config([f"--config={QUICK}"], "prog").trainer.experiment_name or "").startswith(
        "quickstart-"
    )


def test_every_kind_of_problem_is_in_one_list():
    problems = refused(
        [
            f"--config={QUICK}",
            "stray",
            "--lerning_rate=1",
            "--num-epochs=1",
            "--actor.optim.lr=nan",
            "--rollout.n=1",
            "--trainer.test_freq=0",
            "--trainer.run_dir=/dev/null/x",
        ]
    )
    for word in (
        "'stray'",
        "actor.optim.lr?",
        "total_epochs?",
        "'nan'",
        "at least 2",
        "test_freq: got 0",
        "/dev/null",
    ):
        assert any(word in problem for problem in problems), word
    assert len(problems) == 7


def test_a_refused_value_brings_no_follow_on_problem(tmp_path):
    file = tmp_path / "one.py"
    file.write_text(Path(QUICK).read_text().replace("n=8", "n=1"))
    assert refused([f"--config={file}", "--rollout.n=four"]) == ("rollout.n: got 'four', need int",)


def test_a_broken_file_hides_no_misspelt_setting(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def get_config(): raise ValueError('no luck')\n")
    problems = refused([f"--config={file}", "--rollout.m=1", "stray"])
    assert len(problems) == 3
    assert any("no luck" in problem for problem in problems)
    assert any("rollout.m" in problem for problem in problems)
    problems = refused(["--rollout.m=1"])
    assert "--config is missing" in problems[0]
    assert "usage: prog" in problems[0]
    assert "rollout.m" in problems[1]


def test_the_devices_can_be_named(tmp_path):
    with pytest.raises(ConfigError, match="3 data shards"):
        read_config([f"--config={QUICK}"], "prog", devices=3)


def test_a_saved_run_gives_the_same_run(tmp_path):
    first = read_config([f"--config={QUICK}", f"--trainer.run_dir={tmp_path}"], "prog")
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(to_dict(first)))
    assert load(str(saved)) == first
    assert read_config([f"--config={saved}"], "prog") == first


def test_a_drawn_seed_is_found_again_by_the_same_command(tmp_path):
    words = [f"--config={QUICK}", "--trainer.seed=none", f"--trainer.run_dir={tmp_path}"]
    first = read_config(words, "prog")
    assert first.trainer.seed is not None
    assert read_run(words, "prog")[1] and not read_run([*words, "--trainer.seed=3"], "prog")[1]
    assert (
        read_config(words, "prog").trainer.seed != first.trainer.seed
    )  # nothing saved yet: drawn again
    (tmp_path / "config.json").write_text(json.dumps(to_dict(first)))
    assert read_config(words, "prog") == first
    assert read_config([*words, "--trainer.seed=3"], "prog").trainer.seed == 3
    assert (
        read_config([*words, "--trainer.resume_mode=disable"], "prog").trainer.seed
        != first.trainer.seed
    )
    (tmp_path / "config.json").write_text("{")
    assert read_config(words, "prog").trainer.seed != first.trainer.seed


# From outside ----------------------------------------------------------------------------------------------------------------


def test_a_refusal_is_fast_complete_and_exits_64():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = main(
        f"--config={QUICK}",
        "--lerning_rate=1",
        "--rollout.n=two",
        "--data.train_batch_size=33",
        "--trainer.seed=-1",
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4
    assert done.returncode == 64
    assert done.stdout == ""
    assert "Configuration refused (4 problems):" in done.stderr
    for word in ("actor.optim.lr", "'two'", "33", "trainer.seed"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--config is missing"),
        (["--rollout.n=2"], "--config is missing"),
        (["--config=no_such_file.py"], "need an existing file"),
        (["--config"], "needs a value"),
        (["--completion=fish"], "need one of bash, zsh, tcsh"),
        ([f"--config={QUICK}", "--model.path="], "model.path"),
    ],
)
def test_other_refusals(words, text):
    done = main(*words)
    assert (done.returncode, done.stdout) == (64, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_file_that_raises(tmp_path):
    file = tmp_path / "raises.py"
    file.write_text("def get_config():\n    return {}['missing']\n")
    done = main(f"--config={file}")
    assert done.returncode == 64
    assert "KeyError" in done.stderr
    assert "raises.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_heavy_loads_before_the_settings_are_sound():
    done = python(
        "-c",
        "import sys, json\n"
        "import jaxrl_llm.main, jaxrl_llm.config, jaxrl_llm.cli, jaxrl_llm.presets, jaxrl_llm.summary\n"
        f"jaxrl_llm.cli.read_config(['--config={QUICK}', '--rollout.n=4'], 'prog')\n"
        "print(json.dumps(sorted(sys.modules)))",
    )
    assert done.returncode == 0, done.stderr
    assert set(HEAVY).isdisjoint(json.loads(done.stdout))


def test_help_lists_every_setting_with_its_docstring():
    done = main("--help", COLUMNS="100", PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m jaxrl_llm.main --config=FILE")
    text = re.sub(r"[\s│]+", " ", done.stdout)  # the table without its frame and line breaks
    docs = field_docstrings()
    for path, declared, _ in leaves(Config()):
        assert f"--{path} " in text or f"--{path}," in text, path
        assert " ".join(docs[path].split())[:60] in text, path
        assert declared.name in path


def field_docstrings() -> dict[str, str]:
    """Docstrings under the fields of the settings, by dotted path, read from the source."""
    import ast
    import dataclasses
    import inspect
    import typing

    def walk(kind: type, prefix: str) -> dict[str, str]:
        body: list[Any] = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
        texts = {
            ast.unparse(field.target): ast.literal_eval(after.value)
            for field, after in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)
        }
        found: dict[str, str] = {}
        for name, hint in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(hint):
                found |= walk(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
            else:
                found[f"{prefix}{name}"] = texts[name]
        return found

    return walk(Config, "")


def test_help_shows_the_values_of_a_config_file():
    done = main(f"--config={QUICK}", "--help", COLUMNS="250")
    assert done.returncode == 0
    assert "tiny-arithmetic" in done.stdout
    assert main("-h").returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell):
    done = main(f"--completion={shell}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--actor.optim.lr" in done.stdout or "actor.optim.lr" in done.stdout
    assert "usage:" not in done.stdout.splitlines()[0]


def test_ordinary_words_ask_for_no_help():
    assert wants_help([f"--config={QUICK}", "--rollout.n=4"], "prog") is False


def test_the_list_of_commands():
    done = python("-m", "jaxrl_llm")
    assert done.returncode == 64
    assert python("-m", "jaxrl_llm", "--help").returncode == 0
    done = python("-m", "jaxrl_llm", "tarin")
    assert done.returncode == 64
    assert "train" in done.stderr
    done = python("-m", "jaxrl_llm", "train", "--rollout.m=1")
    assert done.returncode == 64
    assert "rollout.m" in done.stderr
