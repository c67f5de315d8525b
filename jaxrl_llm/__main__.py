"""`python -m jaxrl_llm COMMAND ...` (also installed as `jaxrl`): train, evaluate, export, plan."""

import importlib
import sys

COMMANDS = {
    "train": "train a policy from a config file",
    "evaluate": "measure held-out accuracy of a run's newest checkpoint, or of a config's first weights",
    "export": "write a run's newest policy as a Hugging Face folder",
    "plan": "compile a run for hardware that is not there: memory, work, whether it fits",
}


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m jaxrl_llm COMMAND [--config=FILE] [--SECTION.SETTING=VALUE ...]", *lines]
    )


def run(words: list[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 64
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(
            f"unknown command {name!r}; need one of {', '.join(COMMANDS)}\n{usage()}",
            file=sys.stderr,
        )
        return 64
    command = importlib.import_module(f"jaxrl_llm.commands.{name}")
    return int(command.run(rest, prog=f"python -m jaxrl_llm {name}"))


if __name__ == "__main__":
    sys.exit(run())
