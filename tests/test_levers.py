"""The levers of memory, each read off a compiled program or off where arrays lie: what is recomputed, offloaded, narrower, donated."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_llm import layouts, networks, step
from jaxrl_llm.models import transformer
from jaxrl_llm.rollout.shapes import engine_shapes
from tests import rig, tiny
from tests.test_knobs_alive import a_batch
from tests.test_programs import WIDE, drawn, lowered
from tests.test_step import FakeGrader, make_run, spread

SHORT = {"data.val_files": "[]"}
DEEP = replace(tiny.model(), num_layers=8, width=64, hidden=192, max_position=512)


def temporaries(program):
    return program.compile().memory_analysis().temp_size_in_bytes


def test_what_is_recomputed_decides_how_much_a_backward_pass_keeps():
    """Per layer and token: everything; outputs of projections and attention; the residual stream alone."""
    rollout, kept = drawn(1, 7, 64, 64), {}
    for remat in transformer.REMAT:
        update, _, layout, _ = lowered(DEEP, rollout, budget=512, remat=remat)
        kept[remat] = temporaries(update)
    assert layout.tokens == 512
    tokens = 4 * layout.tokens * DEEP.num_layers
    heads = (2 * DEEP.num_heads + 2 * DEEP.num_kv_heads) * DEEP.head_size
    projections = tokens * (heads + 2 * DEEP.width + 2 * DEEP.hidden)
    assert kept["full"] < kept["dots"] < kept["none"]
    assert kept["dots"] - kept["full"] > 0.5 * projections
    assert kept["none"] - kept["dots"] > tokens * DEEP.width


def test_gradients_may_be_summed_in_bfloat16():
    """The sum is carried by the compiled loop over micro-batches, two bytes per parameter instead of four."""
    rollout, carried = drawn(4, 4, 32, 64), {}
    for kind in ("float32", "bfloat16"):
        update, _, layout, _ = lowered(WIDE, rollout, micro_rows=4, accumulate_in=kind)
        loops = re.findall(r"= \((.*)\) while\(", update.compile().as_text())
        carried[kind] = "".join(loops)
    assert layout.micros > 1
    gate = "bf16[1,128,512]"  # one layer, width 128, hidden 512
    assert gate in carried["bfloat16"] and gate not in carried["float32"]


OFFLOADED = {f"{who}.{what}": "true" for who in ("actor", "critic") for what in ("param_offload", "optimizer_offload")}  # fmt: skip


def places(tree):
    """Memory kinds of all arrays with an axis."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_offloaded_state_lies_in_host_memory_between_steps_and_learns_the_same(tmp_path):
    """PPO, policy and critic: parameters and moments; two steps, bit for bit."""
    ends = []
    for settings in ({}, OFFLOADED):
        parts = rig.build(
            SHORT | rig.ALGORITHMS["ppo"] | {"trainer.critic_warmup": 0} | settings, count=2
        )
        state, run = networks.first_state(parts), make_run(tmp_path, FakeGrader(spread))
        for number in (1, 2):
            kept = (state.actor.trainable, state.actor.opt_state, state.critic.trainable, state.critic.opt_state)  # fmt: skip
            assert places(kept) == {"pinned_host" if settings else "device"}
            state, _ = step.train_step(parts, run, state, number)
        ends.append(jax.device_get((state.actor, state.critic)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    text = parts.actor.update.lower(*update_arguments(parts)).as_text()
    assert text.count("pinned_host") >= 2 * len(jax.tree.leaves(parts.actor.abstract))


def update_arguments(parts):
    batch, rollout = a_batch(parts)
    packs, _ = layouts.pack_all(parts.layouts, rollout, parts.mesh, seed=0, step=1)
    state = networks.abstract_state(parts)
    return state.actor, batch, packs[parts.layouts.actor], state.algorithm


def test_each_lever_of_offloading_moves_its_own_part():
    for who, what in (("actor", "param_offload"), ("actor", "optimizer_offload")):
        parts = rig.build(SHORT | {f"{who}.{what}": "true"})
        state = networks.abstract_state(parts).actor
        moved = {"param_offload": state.trainable, "optimizer_offload": state.opt_state}
        for name, tree in moved.items():
            assert places(tree) == {"pinned_host" if name == what else "device"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_a_copy_in_the_precision_that_it_computes_in(dtype):
    """Norm scales stay float32; its log-probs are those of the float32 weights, bit for bit."""
    parts = rig.build(SHORT | {"actor.use_kl_loss": "true", "model.compute_dtype": dtype})
    kinds = {
        path[-1].key: leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(parts.frozen)
    }
    assert kinds == {"kernel": dtype, "scale": "float32"}
    _, rollout = a_batch(parts)
    packs, _ = layouts.pack_all(parts.layouts, rollout, parts.mesh, seed=0, step=1)
    rows, one = packs[parts.layouts.reference], np.float32(1.0)
    whole = networks.first_state(parts).actor.trainable
    np.testing.assert_array_equal(
        parts.score_reference(parts.frozen, rows, one).logprobs,
        parts.score(whole, rows, one).logprobs,
    )
    assert np.ptp(np.asarray(parts.score(whole, rows, one).logprobs)) > 0.1


def test_key_value_caches_are_given_to_the_next_chunk_and_not_copied():
    parts = rig.build(SHORT)
    programs = engine_shapes(parts.engine, parts.handover.result, 8, 4)
    advance = next(one for one in programs if one.name.startswith("advance"))
    compiled = advance.jitted.lower(*advance.args, **advance.kwargs).compile()
    state = advance.args[1]
    caches = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.own, state.prompt)))
    assert compiled.memory_analysis().alias_size_in_bytes >= caches
