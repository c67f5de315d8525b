"""Estimates: arguments and results are exact, temporaries within a tenth of what compilers for the real devices reported.

`measured.json` holds peak GB per device of programs compiled with jax 0.10.2: config, target, settings, programs.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxrl_llm.planning import estimate, lower, memory, sheet, targets
from tests import rig as runs
from tests.planning import rig

MEASURED = json.loads((Path(__file__).parent / "measured.json").read_text())


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join([*row[:2], *map(str, row[2].values())]))  # fmt: skip
def test_estimates_are_within_a_tenth_of_compiled_peaks(row):
    file, hardware, overrides, peaks = row
    _, plan = rig.sketched(f"{file}_deepseek7b", hardware, tuple(overrides.items()))
    costs = {one.name: one.cost.total / 1e9 for one in plan.rows}
    off = {name: costs[name] / peak - 1 for name, peak in peaks.items()}
    assert all(abs(share) < 0.10 for share in off.values()), off


@pytest.fixture(scope="module")
def parts():
    settings = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "rollout.max_num_seqs": 16}
    return runs.build(runs.ALGORITHMS["ppo"] | {"actor.use_kl_loss": "true"} | settings, count=8)


def test_arguments_and_results_are_those_of_the_compiled_programs(parts):
    """On eight fake devices, whose compiler counts both; results that take an argument's place are none, and of batch and packed rows a
    program need not read everything."""
    target = targets.parse("h100:8")
    for one in lower.step_programs(parts, parts.config.data.train_batch_size):
        if not one.largest:
            continue
        stats = one.lower().compile().memory_analysis()
        cost = estimate.cost(parts, one, target)
        unread = 0 if one.phase == "gen" else lower.held(one.args[1:])
        left_out = cost.arguments - stats.argument_size_in_bytes
        assert -64 <= left_out <= unread + 64, one.name
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        assert cost.results == pytest.approx(results, rel=0.5, abs=20_000), one.name


def test_what_stays_in_host_memory_is_worked_on_in_a_copy():
    plans = [
        rig.sketched("grpo_deepseek7b", "h100:8", (("ref.param_offload", value),))[1]
        for value in ("true", "false")
    ]
    off, on = ({row.name: row for row in plan.rows}["reference log-probs"] for plan in plans)
    assert off.host_arguments == plans[1].holdings.always["reference"]
    assert off.cost.total == on.cost.total
    assert off.cost.temporaries - on.cost.temporaries == off.host_arguments


def test_more_is_kept_where_less_is_computed_again():
    model = rig.sketched("grpo_deepseek7b", "h100:8")[1].programs.actor.network.config
    full, dots, none = (estimate.kept_width(model, remat, 1) for remat in ("full", "dots", "none"))
    assert full == 4096 and dots == 2 * 4096 + 3 * 4096 + 2 * 11008 and none > dots


def test_slots_leave_room_for_a_second_copy_where_heads_or_columns_are_part_of_a_tile():
    """32 heads of 128, and 64 of 64 with as many parameters and bytes of keys: on TPUs these take 2 of their own instead of 1.5."""
    for hardware, expected in (("v5p:2x2x2", [178, 134]), ("h100:8", [204, 204])):
        known, whole = rig.sketched("grpo_deepseek7b", hardware)
        model = replace(known.policy, head_size=64, num_heads=64, num_kv_heads=64)
        target = targets.parse(hardware)
        config = rig.settings("grpo_deepseek7b", {}, target)
        halves = sheet.sketch(config, replace(known, policy=model, valuer=model), target, [])
        slots = [plan.programs.config.rollout.max_num_seqs for plan in (whole, halves)]
        assert slots == expected
        on_tpu = hardware == "v5p:2x2x2"
        mesh = whole.programs.rollout_mesh
        for columns, again in ((1024, (False, on_tpu)), (1020, (on_tpu, on_tpu))):
            found = [estimate.relaid(one, mesh, columns) for one in (known.policy, model)]
            assert tuple(found) == again


def test_scaling_out_divides_what_is_split():
    """8 -> 64 -> 512 devices: states per device and FLOPs fall as 1/N; with 512 the groups of a mini-batch no longer divide evenly:
    a row of 3 of a group's 5 responses is the busiest."""
    overrides = (("rollout.max_num_seqs", 128),)
    plans = [
        rig.sketched("grpo_deepseek7b", f"h100:{count}", overrides)[1] for count in (8, 64, 512)
    ]
    states = [sum(plan.holdings.always.values()) for plan in plans]
    assert states[0] / states[1] == pytest.approx(8, rel=0.01)
    assert states[1] / states[2] == pytest.approx(8, rel=0.01)
    spent = [next(r for r in plan.rows if r.name == "actor update").work.flops for plan in plans]
    assert spent[0] / spent[1] == pytest.approx(8, rel=1e-6)
    assert spent[1] / spent[2] == pytest.approx(8 * (5632 / 2) / 3584, rel=1e-6)


def test_a_plan_by_estimates_compiles_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    rig.sketched.__wrapped__("ppo_deepseek7b", "v5p:2x2x2", ())


def test_phases_add_up_by_hand():
    held = memory.Holdings({"states": 100}, {"batch": 7}, {"cache": 50, "bank": 5}, {})

    def program(name: str, phase: str) -> lower.Lowering:
        return lower.Lowering(name, phase, None, ())

    made = [
        program("weight hand-over", "gen"),
        program("advance, 2 slots", "gen"),
        program("grow to 8, 2 slots", "gen"),
        program("old log-probs", "old_log_prob"),
        program("unknown", "update_actor"),
    ]
    costs = {
        "weight hand-over": memory.Cost(20, 10, 3),
        "advance, 2 slots": memory.Cost(60, 0, 9),
        "grow to 8, 2 slots": memory.Cost(25, 50, 1),
        "old log-probs": memory.Cost(30, 1, 40),
    }
    found = {phase.name: phase for phase in memory.phases(made, held, costs)}
    assert {name: phase.peak for name, phase in found.items()} == {
        "weight hand-over": 100 + 10 + 3,
        "gen": 100 + 55 + 26,
        "old_log_prob": 107 + 41,
    }
    assert found["gen"].largest == "grow to 8, 2 slots"
    assert found["gen"].programs == ["advance, 2 slots", "grow to 8, 2 slots"]
