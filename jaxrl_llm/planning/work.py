"""Arithmetic and memory traffic of a step on full-length responses, and the least time they can take at a device's peak rates.

A time here is a bound, not a promise: matrix products at the data sheet's rate, each byte of weights and caches moved as seldom as
the programs allow, collectives at the links' rate, and nothing of it overlapped by waiting.

Left out on purpose: launches, host work, grading, and everything that is no matrix product.
"""

from dataclasses import dataclass

from jaxrl_llm import flops
from jaxrl_llm.hardware import peak_flops
from jaxrl_llm.models.families import ModelConfig, parameter_count
from jaxrl_llm.networks import Trained, critic_plan, plan_of
from jaxrl_llm.planning.lower import Lowering, busiest, held
from jaxrl_llm.planning.targets import Target
from jaxrl_llm.programs import Programs

Lengths = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Work:
    """Of the busiest device in one step: FLOPs of matrix products, bytes to and from its memory, and how often its program runs."""

    flops: float
    moved: float
    calls: int


@dataclass(frozen=True)
class Bound:
    """Seconds that arithmetic, memory and links need at least; the largest decides."""

    arithmetic: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self.arithmetic, self.memory, self.links)

    @property
    def by(self) -> str:
        """What decides it."""
        named = {"arithmetic": self.arithmetic, "memory": self.memory, "links": self.links}
        return max(named, key=named.__getitem__)


def of_step(programs: Programs, lowerings: list[Lowering], target: Target) -> dict[str, Work]:
    """The work of the largest programs of a step by name, per device, as if those of their kind did all of it."""
    config = programs.config
    full = [config.data.max_response_length] * (config.data.train_batch_size * config.rollout.n)
    lengths = [programs.engine.prompt_width] * config.data.train_batch_size, full
    found = {}
    for one in lowerings:
        if not one.largest:
            continue
        kind = one.name.split()[0].strip(",")
        if kind == "prefill":
            found[one.name] = _prefill(programs, one, lengths, target)
        elif kind == "advance":
            found[one.name] = _decode(programs, one, lengths, target)
        elif one.phase in ("old_log_prob", "ref"):
            found[one.name] = _score(programs, programs.actor, one, lengths)
        elif one.phase == "values":
            assert programs.critic is not None
            found[one.name] = _score(programs, programs.critic, one, lengths, values=True)
        elif one.phase == "update_actor":
            passes = plan_of(config).epochs
            found[one.name] = _update(programs, programs.actor, one, lengths, passes)
        elif one.phase == "update_critic":
            assert programs.critic is not None
            passes = critic_plan(config).epochs
            found[one.name] = _update(programs, programs.critic, one, lengths, passes, values=True)
        else:
            found[one.name] = Work(0, 2 * held(one.args), 1)
    return found


def _prefill(programs: Programs, one: Lowering, lengths: Lengths, target: Target) -> Work:
    """Every prompt once; the weights once per bank."""
    model, prompts = programs.engine.config, lengths[0]
    spent = flops.forward(model, flops.prefill(model, prompts)) / target.count
    bank, per_host = one.args[1].shape[0], len(prompts) // target.hosts
    calls = -(-per_host // bank)
    return Work(spent, calls * held(one.args[0]), calls)


def _decode(programs: Programs, one: Lowering, lengths: Lengths, target: Target) -> Work:
    """Every response token once; weights and caches once per token and slot, own columns half full on average."""
    model, (prompts, responses) = programs.engine.config, lengths
    spent = flops.forward(model, flops.decode(model, prompts, responses)) / target.count
    state = one.args[1]
    rounds = -(-len(responses) // (target.hosts * state.last.shape[0]))
    steps = rounds * programs.config.data.max_response_length
    step = held(one.args[0]) + held(state.prompt) + held(state.own) / 2
    return Work(spent, steps * step, -(-steps // programs.engine.chunk))


def _weights(model: ModelConfig, programs: Programs) -> float:
    """Bytes of the compute copy of the weights that one device works with."""
    return (
        parameter_count(model)
        * programs.actor.network.dtype.itemsize
        / programs.mesh.shape["tensor"]
    )


def _score(
    programs: Programs, trained: Trained, one: Lowering, lengths: Lengths, values: bool = False
) -> Work:
    """Every trajectory once; the weights once per micro-batch."""
    model = trained.network.config
    share = programs.config.model.use_prefix_sharing
    work = flops.trajectories(model, *lengths, share=share)
    layouts = programs.layouts
    layout = {"values": layouts.critic, "ref": layouts.reference}.get(one.phase, layouts.score)
    spent = flops.forward(model, work, values=values) * busiest(layout) / programs.mesh.size
    return Work(spent, one.runs * _weights(model, programs), 1)


def _update(
    programs: Programs,
    trained: Trained,
    one: Lowering,
    lengths: Lengths,
    passes: int,
    values: bool = False,
) -> Work:
    """Every trajectory `passes` times, forward, backward and what is computed again; per micro-batch the weights three times and the
    sums of gradients once to and fro, per optimizer step parameters and moments."""
    config, network = programs.config, trained.network
    work = flops.trajectories(network.config, *lengths, share=config.model.use_prefix_sharing)
    fused = network.attention != "reference"
    once = flops.update(network.config, work, remat=network.remat, values=values, fused=fused)
    plan = critic_plan(config) if values else plan_of(config)
    state = held(one.args[0]) + held(one.args[0], host=True)
    sums = parameter_count(network.config) * 4 / _parts(programs)
    micro = 3 * _weights(network.config, programs) + 2 * sums
    moved = plan.optimizer_steps * (one.runs * micro + 2 * state)
    busy = busiest(programs.layouts.critic if values else programs.layouts.actor)
    return Work(passes * once * busy / programs.mesh.size, moved, 1)


def _parts(programs: Programs) -> int:
    """Into how many parts parameters are split."""
    return programs.mesh.shape["fsdp"] * programs.mesh.shape["tensor"]


def bound(work: Work, sent: float, abroad: float, target: Target, dtype: object) -> Bound:
    """The least time of a program's work; `sent` and `abroad` are the bytes of one call."""
    device = target.device
    rate = peak_flops(device.kind, dtype) or float("inf")
    links = max((sent - abroad) / device.link, abroad / device.network) * work.calls
    return Bound(work.flops / rate, work.moved / device.hbm, links)
