"""A plan as values: its programs with what they cost, what lives together, whether it fits; and the one made of estimates alone.

Left out on purpose: words (see `report`), advice (see `advice`) and compiled figures (see `plan`).
"""

from dataclasses import dataclass, field

from jaxrl_llm.config import Config
from jaxrl_llm.planning import estimate, facts, lower, memory, site, targets, topology, work
from jaxrl_llm.planning.hlo import Traffic
from jaxrl_llm.programs import Programs


@dataclass
class Row:
    """A program of the plan. `source` is `compiled`, `estimated`, or says why there is no figure; `cost` is `None` then.

    `too_large`: the compiler ran out of the device's memory; `cost` is the estimate.
    """

    name: str
    phase: str
    cost: memory.Cost | None
    work: work.Work
    traffic: Traffic
    source: str
    host_arguments: int = 0
    seconds: float = 0.0
    cached: bool = False
    too_large: bool = False

    @property
    def peak(self) -> int:
        """Bytes of the device while it runs, its arguments included."""
        return self.cost.total if self.cost else 0


@dataclass
class Plan:
    """Everything that a report says; `hint` is what to do about a plan that is not complete, if anything."""

    config: Config
    target: targets.Target
    programs: Programs
    lowerings: list[lower.Lowering]
    holdings: memory.Holdings
    rows: list[Row]
    notes: list[str]
    usable: int
    phases: list[memory.Phase] = field(default_factory=list)
    hint: str = ""

    @property
    def complete(self) -> bool:
        """Whether every program has figures."""
        return all(row.cost for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether every phase fits the memory that programs may fill, as far as there are figures."""
        return not any(phase.peak > self.usable or self.refused(phase) for phase in self.phases)

    @property
    def fullest(self) -> memory.Phase:
        """The phase that needs most: one that the compiler refused, else the one with the highest peak."""
        return max(self.phases, key=lambda phase: (self.refused(phase), phase.peak))

    def refused(self, phase: memory.Phase) -> bool:
        """Whether a program of a phase is too large for the device's memory by itself."""
        return any(row.too_large and row.name in phase.programs for row in self.rows)

    def settle(self) -> None:
        """Work out the phases from what is known of the programs."""
        costs = {row.name: row.cost for row in self.rows if row.cost}
        self.phases = memory.phases(self.lowerings, self.holdings, costs)


def sketch(config: Config, known: facts.Facts, target: targets.Target, notes: list[str]) -> Plan:
    """The plan by estimates alone: nothing is compiled, no compiler needed."""
    made = site.build(config, known, target, topology.stand_ins(target))
    lowerings = lower.step_programs(made, site.prompts_per_host(config, target))
    works = work.of_step(made, lowerings, target)
    rows = [
        Row(
            one.name,
            one.phase,
            estimate.cost(made, one, target),
            works[one.name],
            estimate.traffic(made, one, target),
            "estimated",
            host_arguments=lower.held(one.args, host=True),
        )
        for one in lowerings
        if one.largest
    ]
    plan = Plan(
        config,
        target,
        made,
        lowerings,
        memory.holdings(made, lowerings),
        rows,
        notes,
        site.usable_memory(target),
    )
    plan.settle()
    return plan
