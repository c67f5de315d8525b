"""`plan`: what a run needs of hardware that is not there, before anything is rented: programs compiled for it, bytes, bounds on time."""

import os
from pathlib import Path

from jaxrl_llm import cli
from jaxrl_llm.commands.train import guarded, quiet_libraries
from jaxrl_llm.config import Config
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning import crew, targets

USAGE = """usage: {prog} --config=FILE --hardware=NAME:SIZE [--estimate] [--json] [--jobs=2] [--timeout=SECONDS] [--limit=SECONDS]
       [--cache=FOLDER|none] [--SECTION.SETTING=VALUE ...]

SIZE is a number of GPUs ({gpus}: h100:8, h100:64) or the torus of a TPU slice ({tpus}: v5p:2x2x2, v6e:4x4), with *N for N slices.
--estimate compiles nothing and takes seconds; --json prints one object; --timeout is for one program (default 600), --limit for the
whole plan (default {gpu_limit} for GPUs, {tpu_limit} for TPUs), which then stops with what it has; --cache keeps what was compiled
(default {cache}). Exit code 0: it fits; 1: it does not, or not every program could be compiled."""
CACHE = "~/.cache/jaxrl_llm/plan"
LIMITS = {"gpu": "300", "tpu": "720"}
"""Seconds of a whole plan by platform, where `--limit` says nothing else."""
OPTIONS = {"hardware": "", "estimate": "false", "json": "false", "jobs": "2", "timeout": "600", "cache": CACHE}  # fmt: skip
NAMES = (*OPTIONS, "limit")
SWITCHES = ("estimate", "json")


def run(words: list[str], prog: str) -> int:
    """Plan from a command line. Exit codes: 0 fits, 1 does not fit or is not complete, 64 (settings, hardware, a missing extra)."""
    return guarded(lambda: _plan(words, prog))


def _plan(words: list[str], prog: str) -> int:
    if {"--help", "-h"} & set(words):
        print(usage(prog))
        return 0
    options, rest = split(words)
    config, target = read(options, rest, prog)
    quiet_libraries()
    os.environ.update(crew.environment(target.device.platform))
    from jaxrl_llm.planning import topology

    topology.wake()
    from jaxrl_llm.planning import plan

    cache = None if options["cache"] == "none" else str(Path(options["cache"]).expanduser())
    return plan.run(
        config,
        target,
        estimate=options["estimate"] == "true",
        as_json=options["json"] == "true",
        jobs=int(options["jobs"]),
        timeout=float(options["timeout"]),
        limit=float(options.get("limit", LIMITS[target.device.platform])),
        cache=cache,
    )


def usage(prog: str) -> str:
    """What the command takes."""
    names = {"gpu": "", "tpu": ""}
    for platform in names:
        found = [one.name for one in targets.DEVICES.values() if one.platform == platform]
        names[platform] = ", ".join(found)
    return USAGE.format(
        prog=prog,
        gpus=names["gpu"],
        tpus=names["tpu"],
        cache=CACHE,
        gpu_limit=LIMITS["gpu"],
        tpu_limit=LIMITS["tpu"],
    )


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """This command's own options, and the words that are settings. `--json` alone means true; `limit` is there only if it was said."""
    options, rest, position = dict(OPTIONS), [], 0
    while position < len(words):
        word = words[position]
        position += 1
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in NAMES:
            rest.append(word)
            continue
        if not equals and name in SWITCHES:
            value = "true"
        elif not equals and position < len(words):
            value = words[position]
            position += 1
        options[name] = value
    return options, rest


def read(options: dict[str, str], words: list[str], prog: str) -> tuple[Config, targets.Target]:
    """The checked settings and the target; `ConfigError` with the problems of both at once.

    `trainer.nnodes` and `n_devices_per_node` are set to the target's: planning for other hardware than the settings expect is what
    this command is for.
    """
    problems: list[str] = []
    target: targets.Target | None = None
    if not options["hardware"]:
        problems.append(f"--hardware is missing\n{usage(prog)}")
    else:
        try:
            target = targets.parse(options["hardware"])
            targets.memory_share(target.device)
        except ConfigError as problem:
            problems += problem.problems
    problems += [
        f"--{name}: got {options[name]!r}, need true or false"
        for name in SWITCHES
        if options[name] not in ("true", "false")
    ]
    if not options["jobs"].isdigit() or int(options["jobs"]) not in (1, 2):
        problems.append(f"--jobs: got {options['jobs']!r}, need 1 or 2 compiling processes")
    problems += [
        f"--{name}: got {options[name]!r}, need whole seconds, 1 or more"
        for name in ("timeout", "limit")
        if name in options and not (options[name].isdecimal() and int(options[name]) > 0)
    ]
    if target is not None:
        words = [*words, *(f"--{path}={value}" for path, value in targets.expected(target).items())]
    config: Config | None = None
    try:
        config = cli.read_config(words, prog)
    except ConfigError as problem:
        problems += problem.problems
    if config is not None and target is not None:
        problems += targets.misfits(config, target)
    if problems or config is None or target is None:
        raise ConfigError(problems)
    return config, target
