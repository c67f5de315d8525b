"""What lies in a device's memory at the same time, phase by phase: states at home, copies, caches, and what a program adds.

Left out on purpose: fragmentation, and buffers of libraries outside JAX's share of the memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm import networks
from jaxrl_llm.planning.lower import Lowering, held
from jaxrl_llm.programs import Programs

GENERATION = "gen"


@dataclass(frozen=True)
class Holdings:
    """Bytes of one device that stay from program to program: `always` over the whole step, `learning` while scoring and updating,
    `sampling` during the rollout; `host` those of the device's share of its host's memory."""

    always: dict[str, int]
    learning: dict[str, int]
    sampling: dict[str, int]
    host: dict[str, int]


@dataclass(frozen=True)
class Cost:
    """Memory of one program on a device: arguments, results in places of their own, temporaries."""

    arguments: int
    results: int
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes that live at once while it runs."""
        return self.arguments + self.results + self.temporaries


@dataclass
class Phase:
    """A phase of a step: what lies there, the program that adds most, and the peak that comes of both."""

    name: str
    resident: dict[str, int]
    programs: list[str] = field(default_factory=list)
    extra: int = 0
    largest: str = ""

    @property
    def peak(self) -> int:
        """Bytes that live at once at the worst moment."""
        return sum(self.resident.values()) + self.extra


def holdings(programs: Programs, lowerings: Iterable[Lowering]) -> Holdings:
    """What a run keeps where."""
    found, host = _states(programs)
    made = list(lowerings)
    updates = [one for one in made if one.phase.startswith("update")]
    scores = [one for one in made if one.phase in ("old_log_prob", "ref", "values")]
    rows: dict[int, int] = {}
    for one in updates:
        rows[id(one.args[2])] = held(one.args[2])
    for one in scores:
        rows[id(one.args[1])] = held(one.args[1])
    learning = {"packed rows": sum(rows.values())}
    learning["batch"] = held(updates[-1].args[1])
    return Holdings(found, learning, _sampling(programs, made), host)


def _states(programs: Programs) -> tuple[dict[str, int], dict[str, int]]:
    """Training states and reference, on the device and in host memory."""
    parts: dict[str, Any] = {}
    state = networks.abstract_state(programs)
    for name, network in (("policy", state.actor), ("critic", state.critic)):
        if network is not None:
            parts[f"{name}: parameters"] = network.trainable
            parts[f"{name}: moments"] = network.opt_state
    if programs.reference is not None:
        parts["reference"] = programs.reference
    device = {name: held(tree) for name, tree in parts.items()}
    host = {name: held(tree, host=True) for name, tree in parts.items()}
    return {n: size for n, size in device.items() if size}, {n: s for n, s in host.items() if s}


def _sampling(programs: Programs, lowerings: list[Lowering]) -> dict[str, int]:
    """The copy of the weights, the caches of all slots at their longest, and the bank of prompts."""
    found = {}
    if programs.handover.program is not None:
        found["weights to decode with"] = held(programs.handover.result)
    chunks = [one for one in lowerings if one.name.startswith("advance") and one.largest]
    banks = [one for one in lowerings if one.name == "begin"]
    if chunks:
        found["key/value cache"] = held(chunks[0].args[1])
    if banks:
        found["bank of prompts"] = held(banks[0].args[0])
    return found


def phases(
    lowerings: Iterable[Lowering], holdings: Holdings, costs: dict[str, Cost]
) -> list[Phase]:
    """The phases of a step in order, each with the peak over those of its programs whose cost is known."""
    found: dict[str, Phase] = {}
    for one in lowerings:
        if one.name not in costs:
            continue
        name = "weight hand-over" if one.name == "weight hand-over" else one.phase
        inside = holdings.sampling if name == GENERATION else holdings.learning
        resident = holdings.always if name == "weight hand-over" else holdings.always | inside
        phase = found.setdefault(name, Phase(name, resident))
        phase.programs.append(one.name)
        extra = added(one, costs[one.name])
        if not phase.largest or extra > phase.extra:
            phase.extra, phase.largest = extra, one.name
    return list(found.values())


def added(lowering: Lowering, cost: Cost) -> int:
    """What a program needs beside what its phase holds: temporaries and results that take no argument's place.

    While own columns grow the old ones are still there; the new ones are counted with the cache.
    """
    if lowering.name.startswith("grow"):
        return cost.arguments + cost.temporaries
    return cost.results + cost.temporaries
