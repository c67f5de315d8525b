"""`export`: the policy of a run's newest verified checkpoint as a Hugging Face folder that transformers loads."""

from pathlib import Path

from jaxrl_llm.cli import split_words
from jaxrl_llm.commands.train import guarded, quiet_libraries
from jaxrl_llm.errors import ConfigError

USAGE = """usage: {prog} --run_dir=FOLDER [--to=FOLDER] [--dtype=float32|bfloat16]

Writes config, weights and tokenizer of the newest checkpoint; --to defaults to FOLDER/export."""


def run(words: list[str], prog: str) -> int:
    """Export from a command line. Exit codes: 0, 64 (words), 65 (no or damaged checkpoint)."""
    return guarded(lambda: _export(words, prog))


def _export(words: list[str], prog: str) -> int:
    if {"--help", "-h"} & set(words):
        print(USAGE.format(prog=prog))
        return 0
    file, pairs, problems = split_words(words)
    options = dict(pairs)
    if file is not None:
        problems.append("--config: export reads the config.json of the run folder; leave it out")
    known = {"run_dir", "to", "dtype"}
    problems += [
        f"--{name}: no such option; need {', '.join(sorted(known))}"
        for name in options
        if name not in known
    ]
    if "run_dir" not in options:
        problems.append(f"--run_dir is missing\n{USAGE.format(prog=prog)}")
    dtype = options.get("dtype", "float32")
    if dtype not in ("float32", "bfloat16"):
        problems.append(f"--dtype: got {dtype!r}, need float32 or bfloat16")
    if problems:
        raise ConfigError(problems)
    folder = Path(options["run_dir"]).expanduser().absolute()
    quiet_libraries()
    from jaxrl_llm import trainer

    trainer.export(
        folder, Path(options.get("to", folder / "export")).expanduser().absolute(), dtype
    )
    return 0
