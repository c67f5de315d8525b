"""From command-line words to a checked configuration; standard library only (tyro is loaded for `--help` alone)."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.checks import check, mentions
from jaxrl_llm.config import Config, leaves, load, normal, override_all, resolve, type_problems
from jaxrl_llm.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")

USAGE = """usage: {prog} --config=FILE [--config.SECTION.SETTING=VALUE ...]

FILE is a config (configs/*.py) or the config.json of a run. --SECTION.SETTING=VALUE works too.
--help lists every setting with its meaning, type and default; --completion=bash|zsh|tcsh prints a completion script."""


def split_words(words: list[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """Command-line words as (config file, overrides, problems). `--a.b=v`, `--a.b v` and `--config.a.b=v` are equal."""
    file: str | None = None
    pairs: list[tuple[str, str]] = []
    problems: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            problems.append(
                f"{word!r}: not understood; settings are written --SECTION.SETTING=VALUE"
            )
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            if position < len(words) and not words[position].startswith("--"):
                value = words[position]
                position += 1
            else:
                problems.append(f"--{name}: needs a value; write --{name}=VALUE")
                continue
        if name == "config":
            if file is not None:
                problems.append(f"--config: got {file} and {value}, need one file")
            file = value
        else:
            pairs.append((name.removeprefix("config."), value))
    return file, pairs, problems


def read_config(words: list[str], prog: str, devices: int | None = None) -> Config:
    """The checked and resolved configuration of a command line; see `read_run`."""
    return read_run(words, prog, devices)[0]


def read_run(words: list[str], prog: str, devices: int | None = None) -> tuple[Config, bool]:
    """The checked and resolved configuration of a command line, and whether its seed was drawn because none is given.

    Raises `ConfigError` with all problems at once: unknown names (with the nearest known one), bad values, failed checks.
    """
    file, pairs, problems = split_words(words)
    if file is None:
        problems += [
            f"--config is missing\n{USAGE.format(prog=prog)}",
            *override_all(Config(), pairs)[1],
        ]
        raise ConfigError(problems)
    try:
        config = load(file)
    except ConfigError as problem:
        raise ConfigError(
            [*problems, *problem.problems, *override_all(Config(), pairs)[1]]
        ) from problem
    config, refused = override_all(config, pairs)
    drawn = config.trainer.seed is None
    if not type_problems(normal(config)):
        config = _with_saved_seed(config, resolve(config, Path(file).stem))
    known = {path for path, _, _ in leaves(config)}
    asked = known & {problem.partition(":")[0] for problem in refused}
    problems += refused + [
        problem for problem in check(config, devices) if not mentions(problem, asked)
    ]
    if problems:
        raise ConfigError(problems)
    return config, drawn


def _with_saved_seed(asked: Config, resolved: Config) -> Config:
    """The seed that an earlier start of the same command drew, where this one would draw again."""
    saved = Path(resolved.trainer.run_dir or "") / "config.json"
    if (
        asked.trainer.seed is not None
        or asked.trainer.resume_mode == "disable"
        or not os.path.isfile(saved)
    ):
        return resolved
    try:
        drawn = load(str(saved)).trainer.seed
    except ConfigError:
        return resolved
    return replace(
        resolved,
        data=replace(resolved.data, seed=drawn if asked.data.seed is None else asked.data.seed),
        trainer=replace(resolved.trainer, seed=drawn),
    )


def wants_help(words: list[str], prog: str) -> bool:
    """Print help or a completion script if the words ask for it."""
    completion = [word.partition("=")[2] for word in words if word.startswith("--completion")]
    if not completion and not {"--help", "-h"} & set(words):
        return False
    if completion and (completion[0] or "bash") not in SHELLS:
        raise ConfigError(f"--completion: got {completion[0]!r}, need one of {', '.join(SHELLS)}")
    import tyro

    file = split_words([word for word in words if word.startswith("--config")])[0]
    default = load(file) if file else Config()
    arguments = ["--tyro-print-completion", completion[0] or "bash"] if completion else ["--help"]
    if not completion:
        print(USAGE.format(prog=prog), flush=True)
    try:
        tyro.cli(Config, default=default, args=arguments, prog=prog, use_underscores=True)
    except SystemExit:
        sys.stdout.flush()
    return True
