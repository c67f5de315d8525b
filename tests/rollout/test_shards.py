"""Data shards that decode side by side: what their programs exchange, how far each goes, and what is counted."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout import queue
from jaxrl_llm.rollout.shapes import engine_shapes
from tests import tiny
from tests.rollout.rig import (
    FEW,
    GREEDY,
    PROMPTS,
    RESPONSE,
    build,
    identical,
    rollout,
    same_up_to_ties,
    weights,
    with_stats,
)
from tests.rollout.test_shapes import described

ENDS = tuple(range(0, 150, 5))
TENSOR_GROUPS = {"[4,2]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}"}
"""How four data shards of two neighbouring devices are written."""


def exchanges(text):
    """Kind and replica groups of every exchange between devices in a compiled program."""
    found = re.findall(
        r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\((.*)",
        text,
    )
    groups = [re.search(r"replica_groups=(.*?), (?:use_|dimensions|to_apply|channel)", rest) for _, rest in found]  # fmt: skip
    return [(kind, group and group[1]) for (kind, _), group in zip(found, groups, strict=True)]


def test_no_program_exchanges_anything_outside_a_tensor_group(monkeypatch):
    """A loop whose shards stop at different steps would wait for ever; a permutation of any kind joins all devices."""
    monkeypatch.setattr(queue, "FIRST_COLUMNS", 4)
    monkeypatch.setattr(queue, "FEWEST", 1)
    mesh = tiny.mesh(4, 1, 2)
    engine = build(mesh, stop_ids=ENDS, response_length=8, max_num_seqs=8)
    kinds = {}
    for program in engine_shapes(engine, described(weights(mesh)), len(PROMPTS), 2):
        compiled = program.jitted.lower(*program.args, **program.kwargs).compile()
        kinds.setdefault(program.name.split(",")[0], []).extend(exchanges(compiled.as_text()))
    reading = {"prefill", "prefill into a bank in use", "advance"}
    assert kinds.keys() >= reading | {"begin", "insert", "narrow to 4", "grow to 8"}
    for name, found in kinds.items():
        assert bool(found) == (name in reading), (name, found)
        assert {kind for kind, _ in found} <= {"all-reduce", "all-gather"}
        assert {groups for _, groups in found} <= TENSOR_GROUPS, name


def test_every_shard_runs_its_own_number_of_steps(params, free):
    """Two lanes each and one long chunk; prompts end at different steps, the last shard has nothing to do."""
    mesh, steps = tiny.mesh(4, 1, 2), []
    engine = build(mesh, stop_ids=ENDS, chunk=RESPONSE)

    def advance(*args):
        state, window = engine.advance(*args)
        steps.append(np.asarray(window.steps))
        return state, window

    placed = weights(mesh)
    watching = replace(engine, advance=advance)
    result, stats = with_stats(watching, placed, prompts=PROMPTS[:3], slots=3)
    longest = result.response_lengths.reshape(3, 2).max(axis=1)
    assert len(steps) == 1 and len(set(longest.tolist())) == 3
    np.testing.assert_array_equal(steps[0], [*longest, 0])
    assert stats.decode_steps == longest.max()
    assert stats.slot_utilisation == pytest.approx(
        result.response_lengths.sum() / (2 * longest.sum())
    )
    same_up_to_ties(
        params, rollout(build(tiny.mesh(), stop_ids=ENDS), params), rollout(engine, placed)
    )


@pytest.mark.parametrize("changes", [{}, FEW, {"max_num_seqs": 8}])
def test_shards_side_by_side_give_the_bits_of_any_other_order(changes):
    mesh = tiny.mesh(4, 1, 2)
    engine, placed = replace(build(mesh, stop_ids=ENDS), **changes), weights(mesh)
    result, stats = with_stats(engine, placed)
    order = np.arange(12).reshape(6, 2)[::-1].ravel()
    identical(result, rollout(engine, placed, prompts=PROMPTS[::-1]), order=order)
    assert stats.prefill_tokens == 15, "each prompt once"


def test_a_shard_with_broken_logits_is_counted_and_keeps_nobody_waiting():
    mesh = tiny.mesh(4, 1, 2)
    broken = weights(mesh)
    broken["embed"]["kernel"] = broken["embed"]["kernel"].at[140].set(jnp.inf)
    broken = jax.device_put(broken, jax.tree.map(lambda x: x.sharding, weights(mesh)))
    assert rollout(build(mesh), broken, settings=GREEDY, prompts=PROMPTS[2:5], slots=3).bad == 2
