"""Plans of the reference runs by estimates, and of a tiny one."""

from functools import cache
from typing import Any

from jaxrl_llm.config import load, override_all, resolve
from jaxrl_llm.planning import facts, sheet, targets
from tests import rig


def settings(file: str, overrides: dict[str, Any], target: targets.Target) -> Any:
    """The settings of a config file for a target."""
    pairs = [(name, str(value)) for name, value in overrides.items()]
    pairs += targets.expected(target).items()
    config, problems = override_all(load(str(rig.ROOT / "configs" / f"{file}.py")), pairs)
    assert not problems, problems
    return resolve(config, "rig")


@cache
def sketched(file: str, hardware: str, overrides: tuple[tuple[str, Any], ...] = ()) -> Any:
    """The facts and the plan by estimates of a config file."""
    target = targets.parse(hardware)
    config = settings(file, dict(overrides), target)
    known = facts.gather(config, lambda text: None)
    return known, sheet.sketch(config, known, target, [])
