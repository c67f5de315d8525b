"""A plan in words and as JSON.

Left out on purpose: any figure that is not in the plan.
"""

import json
from dataclasses import asdict
from typing import Any

from jaxrl_llm import sharding
from jaxrl_llm.models.families import parameter_count
from jaxrl_llm.planning import work
from jaxrl_llm.planning.advice import Advice
from jaxrl_llm.planning.memory import Cost
from jaxrl_llm.planning.sheet import Plan, Row
from jaxrl_llm.planning.targets import FRACTION

GB = 1e9
ROOMY = 0.92
"""A share of a GPU's memory that leaves room for contexts and communication."""
PHASES = {
    "weight hand-over": "weight hand-over",
    "gen": "rollout",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
}


def heading(plan: Plan) -> str:
    """What is planned: model, devices, meshes, slots, assumptions."""
    made, config, target = plan.programs, plan.programs.config, plan.target
    model = made.actor.network.config
    device = target.device
    hosts = f"{target.hosts} host{'s' if target.hosts > 1 else ''}"
    lines = [
        f"{config.model.path}: {parameter_count(model) / 1e9:.2f} B parameters on {target.count} x {device.kind} ({hosts})",
        f"memory per device {device.memory / GB:.1f} GB, of which programs may fill {plan.usable / GB:.1f} GB{_share(plan)}",
        f"training mesh {_mesh(made.mesh)}; rollout mesh of a host {_mesh(made.rollout_mesh)}; "
        f"{config.rollout.max_num_seqs:,} slots per host",
        f"rows of {made.layouts.actor.tokens:,} tokens; {made.actor.network.attention} attention",
        "assumed: every prompt and every response has full length",
    ]
    return "\n".join([*lines, *plan.notes])


def _share(plan: Plan) -> str:
    if plan.target.device.platform != "gpu":
        return ""
    return f" (JAX takes 75 %; {FRACTION}, also read here, says otherwise)"


def _mesh(mesh: Any) -> str:
    sizes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    return " x ".join(sizes) or "1 device"


def line(row: Row, estimated: Cost | None) -> str:
    """A program, as it is finished."""
    if row.cost is None:
        return f"  {row.name}: {row.source}"
    cost, off = row.cost, ""
    if row.source == "compiled" and estimated is not None and cost.total:
        off = f", estimated {estimated.total / GB:.2f}"
    how = "cached" if row.cached else f"{row.seconds:.0f} s"
    if row.too_large:
        how = row.source
    return (
        f"  {row.name}: peak {cost.total / GB:.2f} GB (arguments {cost.arguments / GB:.2f}, results {cost.results / GB:.2f}, "
        f"temporaries {cost.temporaries / GB:.2f}{off}) [{how}]"
    )


def body(plan: Plan, advice: list[Advice], seconds: float) -> str:
    """Programs, phases, time, verdict and advice."""
    parts = ["", _programs(plan), "", _holdings(plan), "", _phases(plan), "", _verdict(plan)]
    if advice:
        parts.append(_advice(advice))
    parts.append(f"planned in {seconds:.0f} s")
    return "\n".join(parts)


def _programs(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [
        ("program", "peak GB", "TFLOP", "sends GB", "crosses hosts", "runs", "from", "sent by")
    ]
    for row in plan.rows:
        peak = f"{row.peak / GB:.2f}" if row.cost else "-"
        sends = f"{row.traffic.total / GB:.1f}"
        abroad = f"{row.traffic.abroad / GB:.1f}"
        spent = f"{row.work.flops / 1e12:,.1f}"
        rows.append(
            (
                row.name,
                peak,
                spent,
                sends,
                abroad,
                str(row.work.calls),
                row.source[:60],
                _kinds(row),
            )
        )
    note = (
        "per device (the busiest); of the engine's programs the largest of each kind; TFLOP of a step's matrix products; sends: one run, loops "
        "multiplied out (micro-batches and decode steps as planned)"
    )
    return _table(rows) + "\n" + note


def _kinds(row: Row) -> str:
    """Collectives and the GB that each sends, the largest first; what is less than 0.05 is left out."""
    sent = sorted(row.traffic.sent.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{kind} {size / GB:,.1f}" for kind, size in sent if size >= 0.05 * GB)


def _holdings(plan: Plan) -> str:
    held = plan.holdings
    rows: list[tuple[str, ...]] = [("lies on a device", "GB", "when")]
    for when, part in (("always", held.always), ("while scoring and updating", held.learning), ("rollout", held.sampling)):  # fmt: skip
        rows += [(name, f"{size / GB:.2f}", when) for name, size in part.items()]
    per_host = plan.target.count // plan.target.hosts
    rows += [(f"{name}, in host memory", f"{size / GB:.2f}", f"always ({size * per_host / GB:.0f} GB per host)") for name, size in held.host.items()]  # fmt: skip
    return _table(rows)


def _phases(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [
        ("phase", "peak GB", "free GB", "at least s", "bound by", "largest program")
    ]
    bounds = bounds_of(plan)
    for phase in plan.phases:
        bound = bounds.get(phase.name)
        free = plan.usable - phase.peak
        rows.append(
            (
                PHASES[phase.name],
                f"{phase.peak / GB:.2f}",
                f"{free / GB:.2f}",
                f"{bound.seconds:.2f}" if bound else "-",
                bound.by if bound else "-",
                phase.largest,
            )
        )
    total = sum(bound.seconds for bound in bounds.values())
    return (
        _table(rows)
        + f"\na step takes at least {total:.0f} s: a bound from peak rates for full-length responses, not a promise"
    )


def bounds_of(plan: Plan) -> dict[str, work.Bound]:
    """The least time of each phase: that of its programs one after another."""
    found: dict[str, work.Bound] = {}
    dtype = plan.programs.actor.network.dtype
    for row in plan.rows:
        name = row.name if row.name == "weight hand-over" else row.phase
        one = work.bound(row.work, row.traffic.total, row.traffic.abroad, plan.target, dtype)
        old = found.get(name, work.Bound(0, 0, 0))
        found[name] = work.Bound(
            old.arithmetic + one.arithmetic, old.memory + one.memory, old.links + one.links
        )
    return found


def _verdict(plan: Plan) -> str:
    if plan.fits and plan.complete:
        worst = plan.fullest
        free = (plan.usable - worst.peak) / GB
        return f"It fits: {PHASES[worst.name]} is the fullest phase and leaves {free:.1f} GB per device."
    told = [
        f"It does not fit: {row.name} is too large for the device's memory by itself, says its compiler (its figures are estimated)."
        for row in plan.rows
        if row.too_large
    ]
    for phase in plan.phases:
        if phase.peak > plan.usable:
            over = (phase.peak - plan.usable) / GB
            told.append(
                f"It does not fit: {PHASES[phase.name]} needs {phase.peak / GB:.1f} GB per device, {over:.1f} GB more than there is."
            )
    device = plan.target.device
    more = (ROOMY * device.memory - plan.usable) / GB
    if told and device.platform == "gpu" and more > 1:
        told.append(f"{FRACTION}={ROOMY} would give programs {more:.1f} GB more.")
    missing: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.cost is None:
            missing.setdefault(row.source, []).append(row.name)
    if missing:
        named = [f"{'; '.join(names)} ({why})" for why, names in missing.items()]
        told.append(f"Not complete, no figures for: {'; '.join(named)}")
    if plan.hint:
        told.append(plan.hint)
    return "\n".join(told)


def _advice(advice: list[Advice]) -> str:
    rows = ["What frees memory there (estimated):"]
    rows += [
        f"  {one.words}  saves {one.saves / GB:.1f} GB{'; then it fits' if one.enough else ''}"
        for one in advice
    ]
    return "\n".join(rows)


def _table(rows: list[tuple[str, ...]]) -> str:
    """Columns: the first to the left, figures to the right, words to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numeric = [
        all(not row[i].strip("-").strip() or row[i].replace(",", "").replace(".", "").replace("-", "").isdigit() for row in rows[1:])
        for i in range(len(rows[0]))
    ]  # fmt: skip
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    )


def as_json(plan: Plan, advice: list[Advice], seconds: float) -> str:
    """The whole plan as one object."""
    bounds = bounds_of(plan)
    made = plan.programs
    return json.dumps(
        {
            "target": plan.target.name,
            "device": plan.target.device.kind,
            "devices": plan.target.count,
            "hosts": plan.target.hosts,
            "memory": plan.target.device.memory,
            "usable": plan.usable,
            "mesh": dict(made.mesh.shape),
            "rollout_mesh": dict(made.rollout_mesh.shape),
            "shards": sharding.shards(made.mesh),
            "slots": made.config.rollout.max_num_seqs,
            "row_tokens": made.layouts.actor.tokens,
            "notes": plan.notes,
            "holdings": asdict(plan.holdings),
            "programs": [_program(row) for row in plan.rows],
            "phases": [
                {
                    "name": phase.name,
                    "peak": phase.peak,
                    "free": plan.usable - phase.peak,
                    "resident": phase.resident,
                    "largest": phase.largest,
                    "bound": asdict(bounds[phase.name]) | {"by": bounds[phase.name].by},
                }
                for phase in plan.phases
            ],
            "advice": [
                {"changes": dict(one.changes), "saves": one.saves, "enough": one.enough}
                for one in advice
            ],
            "fits": plan.fits and plan.complete,
            "complete": plan.complete,
            "seconds": round(seconds, 1),
        }
    )


def _program(row: Row) -> dict[str, Any]:
    cost = asdict(row.cost) | {"peak": row.cost.total} if row.cost else None
    return {
        "name": row.name,
        "phase": row.phase,
        "source": row.source,
        "bytes": cost,
        "host_arguments": row.host_arguments,
        "flops": row.work.flops,
        "moved": row.work.moved,
        "calls": row.work.calls,
        "sent": row.traffic.sent,
        "abroad": row.traffic.abroad,
        "seconds": round(row.seconds, 1),
        "cached": row.cached,
    }
