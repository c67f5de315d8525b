"""`evaluate`: held-out accuracy of a config's first weights or, in a run folder that has checkpoints, of the newest one."""

from jaxrl_llm import cli
from jaxrl_llm.commands.train import guarded, quiet_libraries


def run(words: list[str], prog: str) -> int:
    """Evaluate from a command line; prints one `name value` line per metric. Exit codes as `train`."""
    return guarded(lambda: _evaluate(words, prog))


def _evaluate(words: list[str], prog: str) -> int:
    if cli.wants_help(words, prog):
        return 0
    config, drawn = cli.read_run(words, prog)
    quiet_libraries()
    from jaxrl_llm import trainer

    return trainer.evaluate(config, drawn_seed=drawn)
