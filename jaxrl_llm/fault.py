"""Named fault points: places where a test makes a run die, stop, fail or stall; standard library only.

A point does nothing unless the environment variable `JAXRL_FAULT_PLAN` is set, so it may stay in the code that users run.
A plan is a comma-separated list of `POINT:STEP:ACTION`:

* `POINT` is one of `POINTS`; `STEP` an integer, or `*` for every step;
* `ACTION` is `kill` (SIGKILL to this process), `term` (SIGTERM to this process, which then goes on), `raise`
  (`InjectedFault`) or `sleep=SECONDS`.

An entry with a step fires once per process: a point inside a loop over micro-batches must not send two signals where the
test meant one. An entry with `*` fires at every call.

Left out on purpose: random faults (a test draws its own steps and writes them down) and faults in child processes (the
plan is inherited by children, but none of them calls `point`).
"""

import os
import signal
import time

from jaxrl_llm.errors import ConfigError

PLAN_VARIABLE = "JAXRL_FAULT_PLAN"

POINTS = (
    "after_data",
    "in_rollout",
    "in_reward",
    "after_advantage",
    "before_update",
    "after_update",
    "in_save",
    "in_delete",
    "in_eval",
    "in_export",
    "at_exit",
)
"""Every name that `point` is called with."""

_fired: set[str] = set()


class InjectedFault(RuntimeError):
    """The exception that the action `raise` throws; never thrown without a plan."""


def parse_plan(text: str) -> list[tuple[str, int | None, str]]:
    """Split a plan into `(point, step or None for any, action)`, in the order written.

    Raises `ConfigError` with every entry that is not understood. An empty text is an empty plan.
    """
    entries: list[tuple[str, int | None, str]] = []
    problems: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        fields = part.split(":")
        if len(fields) != 3:
            problems.append(
                f"{PLAN_VARIABLE}: got {part!r}, need POINT:STEP:ACTION; write three fields"
            )
            continue
        name, step, action = fields
        if name not in POINTS:
            problems.append(f"{PLAN_VARIABLE}: got point {name!r}, need one of {', '.join(POINTS)}")
        elif step != "*" and not step.isdecimal():
            problems.append(f"{PLAN_VARIABLE}: got step {step!r}, need a whole number or *")
        elif not _known_action(action):
            problems.append(
                f"{PLAN_VARIABLE}: got action {action!r}, need kill, term, raise or sleep=SECONDS"
            )
        else:
            entries.append((name, None if step == "*" else int(step), action))
    if problems:
        raise ConfigError(problems)
    return entries


def point(name: str, step: int | None = None) -> None:
    """Carry out what the plan says for this place and step; without a plan, return at once.

    `step=None` matches only entries with `*`. Raises `InjectedFault` for the action `raise`, `ConfigError` for a plan
    that is not understood.
    """
    text = os.environ.get(PLAN_VARIABLE)
    if not text:
        return
    for planned, at, action in parse_plan(text):
        if planned != name or (at is not None and at != step):
            continue
        if at is not None:
            entry = f"{planned}:{at}:{action}"
            if entry in _fired:
                continue
            _fired.add(entry)
        _act(name, step, action)


def reset() -> None:
    """Forget which entries have fired, so that one test process can use a plan twice."""
    _fired.clear()


def _known_action(action: str) -> bool:
    if action in ("kill", "term", "raise"):
        return True
    verb, _, seconds = action.partition("=")
    return verb == "sleep" and seconds.replace(".", "", 1).isdecimal()


def _act(name: str, step: int | None, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif action == "raise":
        raise InjectedFault(f"planned fault at {name}, step {step}")
    else:
        time.sleep(float(action.partition("=")[2]))
