"""The table of reward functions: name -> how it is called, where it runs, which settings it takes.

Standard library only, and the graders load when they are first called: the check of a configuration
(`check_functions`) takes milliseconds and never imports math-verify.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.reward import RewardKnobs
from jaxrl_llm.rewards import custom

Called = tuple[Any, bool | None]
"""What a built-in returns: its result, and whether an answer was found (`None`: it looks for none)."""


@dataclass(frozen=True)
class Spec:
    """A built-in: `run(sample, **options)`, its options from the settings, whether it needs a killable process, what a
    fresh process should load before its first call, and whether it can compare with a gold answer."""

    run: Callable[..., Called]
    options: Callable[[RewardKnobs], dict[str, Any]]
    pooled: Callable[[RewardKnobs], bool]
    prepare: Callable[[], None] = lambda: None
    readable: Callable[[str], bool] = lambda gold: True


def _gsm8k(sample: Mapping[str, Any], *, method: str) -> Called:
    from jaxrl_llm.rewards import gsm8k

    found = gsm8k.extract(sample["response"], method=method) is not None
    return (
        gsm8k.score(sample["response"], sample["answer"], method=method) if found else 0.0
    ), found


def _gsm8k_readable(gold: str) -> bool:
    from jaxrl_llm.rewards import gsm8k

    return gsm8k.gold_number(gold) is not None


def _math(sample: Mapping[str, Any]) -> Called:
    from jaxrl_llm.rewards import math

    found = math.extract(sample["response"]) is not None
    return math.score(sample["response"], sample["answer"]), found


def _prepare_math() -> None:
    from jaxrl_llm.rewards import math

    math.prepare()


def _math_readable(gold: str) -> bool:
    from jaxrl_llm.rewards import math

    return math.readable_gold(gold)


def _format(sample: Mapping[str, Any], *, pattern: str) -> Called:
    from jaxrl_llm.rewards import format

    return format.score(sample["response"], pattern=pattern), None


def _length_penalty(sample: Mapping[str, Any], *, per_token: float) -> Called:
    from jaxrl_llm.rewards import length_penalty

    return length_penalty.score(sample["response_length"], per_token=per_token), None


def _own_pattern(knobs: RewardKnobs) -> bool:
    """A pattern of the user may backtrack for ever on hostile text, so it runs where it can be killed."""
    return knobs.format_pattern != RewardKnobs.format_pattern


TABLE: dict[str, Spec] = {
    "gsm8k": Spec(
        _gsm8k,
        lambda knobs: {"method": knobs.gsm8k_method},
        lambda knobs: False,
        readable=_gsm8k_readable,
    ),
    "math": Spec(_math, lambda knobs: {}, lambda knobs: True, _prepare_math, _math_readable),
    "format": Spec(_format, lambda knobs: {"pattern": knobs.format_pattern}, _own_pattern),
    "length_penalty": Spec(
        _length_penalty,
        lambda knobs: {"per_token": knobs.length_penalty_per_token},
        lambda knobs: False,
    ),
}
"""Built-in reward functions by name."""


def lookup(name: str) -> Spec:
    """The built-in of that name.

    Raises:
        ConfigError: an unknown name; the text lists the known ones.
    """
    if name not in TABLE:
        raise ConfigError(_unknown(name))
    return TABLE[name]


def check_functions(functions: tuple[str, ...]) -> list[str]:
    """Everything wrong with `reward.functions`, one text per problem; an empty list means good.

    Custom files are parsed, never imported.
    """
    if not functions:
        return [
            "reward.functions: got none, need at least one; the first is the correctness reward"
        ]
    found = []
    for name in functions:
        if custom.is_custom(name):
            found += custom.problems(name)
        elif name not in TABLE:
            found.append(_unknown(name))
    twice = sorted({name for name in functions if functions.count(name) > 1})
    if twice:
        found.append(f"reward.functions: {', '.join(twice)} listed twice; use reward.weights")
    return found


def check_settings(knobs: RewardKnobs) -> list[str]:
    """Everything wrong with the reward settings, the functions included."""
    found = check_functions(knobs.functions)
    if knobs.weights is not None and len(knobs.weights) != len(knobs.functions):
        found.append(
            f"reward.weights: got {len(knobs.weights)}, need one for each of the {len(knobs.functions)} functions"
        )
    try:
        re.compile(knobs.format_pattern)
    except re.error as error:
        found.append(f"reward.format_pattern: {knobs.format_pattern!r} does not compile: {error}")
    if not knobs.timeout_s > 0:
        found.append(f"reward.timeout_s: got {knobs.timeout_s}, need more than 0 seconds")
    if knobs.memory_limit_mb < 64:
        found.append(f"reward.memory_limit_mb: got {knobs.memory_limit_mb}, need at least 64")
    if knobs.num_workers is not None and knobs.num_workers < 1:
        found.append(f"reward.num_workers: got {knobs.num_workers}, need at least 1 or None")
    if None not in (knobs.clip_min, knobs.clip_max) and knobs.clip_min > knobs.clip_max:  # type: ignore[operator]
        found.append(f"reward.clip_min {knobs.clip_min} is above reward.clip_max {knobs.clip_max}")
    return found


def unreadable_golds(
    functions: tuple[str, ...], golds: Iterable[tuple[str, str]], shown: int = 5
) -> list[str]:
    """One warning per built-in that cannot compare with some gold answers, naming the first rows; [] where all are fine.

    `golds` are `(row id, gold answer)`. Such a row earns nothing whatever is answered, which looks like a hard prompt.
    Custom files are not asked. Nothing of a gold is evaluated.
    """
    golds, warnings = list(golds), []
    for name in functions:
        if name not in TABLE:
            continue
        bad = [(row, gold) for row, gold in golds if not TABLE[name].readable(gold)]
        if bad:
            rows = ", ".join(f"{row} ({gold[:40]!r})" for row, gold in bad[:shown])
            more = f" and {len(bad) - shown} more" if len(bad) > shown else ""
            warnings.append(
                f"warning: {name} cannot read the gold answers of {len(bad)} of {len(golds)} rows, so no response to them is"
                f" ever right: {rows}{more}; correct them or name them in data.exclude_ids"
            )
    return warnings


def labels(functions: tuple[str, ...]) -> tuple[str, ...]:
    """The short names used in metrics: built-ins by name, `FILE.py:FUNCTION` by `FUNCTION`, with the file's stem in
    front where that is taken, and in full where that is taken too."""
    chosen: list[str] = []
    for name in functions:
        options = [name]
        if custom.is_custom(name):
            path, _, function = name.rpartition(":")
            stem = re.split(r"[/\\]", path)[-1].removesuffix(".py")
            options = [function, f"{stem}.{function}", name]
        taken = {*chosen, *TABLE} if len(options) > 1 else set(chosen)
        chosen.append(next((option for option in options if option not in taken), name))
    return tuple(chosen)


def _unknown(name: str) -> str:
    return (
        f"reward.functions: got {name!r}, known are {', '.join(sorted(TABLE))}; your own function is written"
        " FILE.py:FUNCTION"
    )
