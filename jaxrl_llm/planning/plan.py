"""The command's body: facts, a sketch by estimates, compiled figures in their place, then words or JSON.

Left out on purpose: parsing of command lines (see `commands.plan`).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxrl_llm.config import Config, to_dict
from jaxrl_llm.planning import advice, crew, facts, memory, report, targets, topology
from jaxrl_llm.planning.hlo import Traffic
from jaxrl_llm.planning.sheet import Plan, Row, sketch
from jaxrl_llm.planning.site import NoRoom

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""How XLA says that a program is too large for its device."""


def run(
    config: Config,
    target: targets.Target,
    *,
    estimate: bool,
    as_json: bool,
    jobs: int,
    timeout: float,
    limit: float,
    cache: str | None,
) -> int:
    """Make a plan, print it, and return the exit code; `timeout` and `limit` are the seconds of one program and of all of it."""
    begun = time.monotonic()
    out = sys.stderr if as_json else sys.stdout
    notes: list[str] = []

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    if not estimate:
        topology.check_compiler(target)
    known = facts.gather(config, notes.append)
    try:
        plan = sketch(config, known, target, notes)
    except NoRoom as problem:
        if not as_json:
            raise
        say(problem.report())
        told = {"fits": False, "complete": False, "problems": problem.problems}
        print(json.dumps(told))
        return problem.exit_code
    say(report.heading(plan))
    if not estimate:
        limits = crew.Limits(timeout, limit, begun)
        _compile(plan, known, say, jobs=jobs, limits=limits, cache=cache)
    plan.settle()
    found = [] if plan.fits else advice.what_to_change(plan, known)
    seconds = time.monotonic() - begun
    if as_json:
        if plan.hint:
            say(plan.hint)
        print(report.as_json(plan, found, seconds))
    else:
        say(report.body(plan, found, seconds))
    return 0 if plan.fits and plan.complete else 1


def _compile(
    plan: Plan,
    known: facts.Facts,
    say: Callable[[str], None],
    *,
    jobs: int,
    limits: crew.Limits,
    cache: str | None,
) -> None:
    """Put compiled figures in place of the estimates; the longest compilations come first."""
    by_name = {row.name: row for row in plan.rows}
    order = {
        "config": to_dict(plan.programs.config),
        "target": plan.target.name,
        "cache": cache,
        "facts": known.plain(),
    }
    estimated = {row.name: row.cost for row in plan.rows}
    for row in plan.rows:
        row.cost, row.source = None, "not finished"

    def tell(answer: dict[str, Any]) -> None:
        row = by_name[answer["name"]]
        _enter(row, answer, estimated[row.name])
        say(report.line(row, estimated[row.name]))

    names = sorted(by_name, key=_effort)
    platform = plan.target.device.platform
    answers = crew.compile_all(order, names, platform, jobs=jobs, limits=limits, tell=tell)
    if any("late" in answer for answer in answers):
        plan.hint = _go_on(cache)


def _go_on(cache: str | None) -> str:
    """What to do about a plan whose time was up."""
    if cache is None:
        return "Nothing was kept (--cache=none); give it more time with --limit=SECONDS, or a --cache for a second call to go on from."
    return f"What was compiled is kept in {cache}: the same command goes on from there; --limit=SECONDS gives it more time."


def _effort(name: str) -> int:
    """Updates take longest to compile, then what else runs all layers."""
    for place, word in enumerate(("update", "advance", "log-probs", "values", "prefill")):
        if word in name:
            return place
    return 9


def _enter(row: Row, answer: dict[str, Any], estimated: memory.Cost | None) -> None:
    if "error" in answer:
        row.source = answer["error"].splitlines()[0][:300]
        if OUT_OF_MEMORY in answer["error"]:
            row.cost, row.too_large = estimated, True
            row.source = f"estimated; too large for its compiler: {row.source}"
        return
    # A compiler that knows no host memory counts what is kept there among the arguments; a program has it on the device as well, as a
    # copy that it works on.
    moved = 0 if answer["host_arguments"] else row.host_arguments
    row.cost = memory.Cost(
        answer["arguments"] - moved, answer["results"], answer["temporaries"] + moved
    )
    row.traffic, row.source = Traffic(answer["sent"], answer["abroad"]), "compiled"
    row.seconds, row.cached = answer["seconds"], answer["cached"]
