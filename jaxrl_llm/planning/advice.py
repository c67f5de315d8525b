"""What to change when a plan does not fit, each with the bytes it frees in the fullest phase: the same plan, estimated anew.

Left out on purpose: changes of the experiment itself (batch sizes, lengths, algorithm), and searches over more than one setting.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxrl_llm import sharding
from jaxrl_llm.checks import check
from jaxrl_llm.config import Config, needs_critic, needs_reference, override, resolve
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning import facts, memory
from jaxrl_llm.planning.sheet import Plan, sketch
from jaxrl_llm.planning.targets import Target, misfits

Changes = tuple[tuple[str, str], ...]

LEAST = 10**8
"""Savings below so many bytes are not worth a word."""
STEPS = 4
"""Tries to find the number of slots that fits."""


@dataclass(frozen=True)
class Advice:
    """Settings to change, and the bytes per device that this frees in the phase that is furthest over."""

    changes: Changes
    saves: int
    enough: bool

    @property
    def words(self) -> str:
        """The settings as they are written on a command line."""
        return " ".join(f"--{path}={value}" for path, value in self.changes)


def what_to_change(plan: Plan, known: facts.Facts) -> list[Advice]:
    """Changes that free memory in the fullest phase, the largest saving first."""
    worst = plan.fullest
    known_peak = not plan.refused(worst)

    def peak(changes: Changes) -> int | None:
        """The estimated peak of the phase after some changes; `None` where they are refused."""
        config = _changed(plan.config, changes, plan.target)
        if config is None:
            return None
        try:
            made = sketch(config, known, plan.target, [])
        except ConfigError:
            return None
        return next((phase.peak for phase in made.phases if phase.name == worst.name), None)

    before = peak(())
    found: list[Advice] = []
    if before is None:
        return found
    for changes in [*candidates(plan, worst), _fewer_slots(plan, worst, before, peak)]:
        after = peak(changes) if changes else None
        if after is not None and before - after > LEAST:
            enough = known_peak and worst.peak - (before - after) <= plan.usable
            found.append(Advice(changes, before - after, enough))
    return sorted(found, key=lambda one: -one.saves)


def _fewer_slots(
    plan: Plan, worst: memory.Phase, before: int, peak: Callable[[Changes], int | None]
) -> Changes:
    """As many slots as fit, found in a few steps along the line; no change where slots do not matter."""
    cache = worst.resident.get("key/value cache", 0)
    slots = plan.programs.config.rollout.max_num_seqs
    if not cache or not slots:
        return ()
    shards = sharding.shards(plan.programs.rollout_mesh)
    each, over = (cache + worst.extra) / slots, worst.peak - plan.usable
    changes: Changes = ()
    for _ in range(STEPS):
        slots = int((slots - max(over / each, 1)) // shards * shards)
        if slots < shards:
            return ()
        changes = (("rollout.max_num_seqs", str(slots)),)
        after = peak(changes)
        if after is None:
            return ()
        over = worst.peak - (before - after) - plan.usable
        if over <= 0:
            break
    return changes


def _changed(config: Config, changes: Changes, target: Target) -> Config | None:
    """The settings with changes, or `None` where they are refused."""
    for path, value in changes:
        config = override(config, path, value)
    config = resolve(config)
    return None if check(config, target.count) or misfits(config, target) else config


def candidates(plan: Plan, worst: memory.Phase) -> Iterator[Changes]:
    """Settings that can free memory in a phase."""
    config: Config = plan.config
    networks = ["actor", "critic"] if needs_critic(config) else ["actor"]
    for name in networks:
        knobs = getattr(config, name)
        if not knobs.optimizer_offload:
            yield ((f"{name}.optimizer_offload", "true"),)
        if not knobs.param_offload:
            yield ((f"{name}.param_offload", "true"),)
    if needs_reference(config) and not config.ref.param_offload:
        yield (("ref.param_offload", "true"),)
    if worst.name == memory.GENERATION or worst.name == "weight hand-over":
        tensor = config.rollout.tensor_model_parallel_size
        if plan.programs.rollout_mesh.size % (2 * tensor) == 0:
            yield (("rollout.tensor_model_parallel_size", str(2 * tensor)),)
    else:
        yield from _training(config, worst)
    yield from _mesh(plan)


def _training(config: Config, worst: memory.Phase) -> Iterator[Changes]:
    name = "critic" if worst.name in ("update_critic", "values") else "actor"
    knobs = getattr(config, name)
    remat = config.model if name == "actor" else config.critic
    if str(remat.enable_gradient_checkpointing) != "full":
        owner = "model" if name == "actor" else "critic"
        yield ((f"{owner}.enable_gradient_checkpointing", "full"),)
    if worst.name.startswith("update") and knobs.grad_accumulation_dtype == "float32":
        yield ((f"{name}.grad_accumulation_dtype", "bfloat16"),)
    rows = knobs.ppo_micro_batch_size_per_device
    if rows and rows > 1:
        yield ((f"{name}.ppo_micro_batch_size_per_device", "1"),)
    longest = config.data.max_prompt_length + config.data.max_response_length
    budget = (
        (f"{name}.use_dynamic_bsz", "true"),
        (f"{name}.ppo_max_token_len_per_device", str(longest)),
    )
    yield budget


def _mesh(plan: Plan) -> Iterator[Changes]:
    shape, config = plan.programs.mesh.shape, plan.config
    if shape["data"] > 1:
        yield (("mesh.data", "1"), ("mesh.fsdp", str(shape["fsdp"] * shape["data"])))
    elif shape["fsdp"] > 1 and config.mesh.tensor == 1:
        yield (("mesh.tensor", "2"), ("mesh.fsdp", str(shape["fsdp"] // 2)))
