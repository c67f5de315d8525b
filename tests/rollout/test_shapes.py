"""What a planner lowers is what runs: the enumeration of a rollout's programs against the calls of real rollouts.

Enumerating and lowering puts nothing on a device.
"""

import hashlib
from dataclasses import replace

import jax
import pytest

from jaxrl_llm.rollout import queue
from jaxrl_llm.rollout.shapes import engine_shapes
from tests import tiny
from tests.rollout.rig import PROMPTS, RESPONSE, N, build, prompt, rollout, weights

PROGRAMS = ("prefill", "begin", "insert", "advance", "grow", "narrow")


def digest(lowered):
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def described(params):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )


def watched(engine, calls):
    """The engine; every call leaves its program's name and the digest of its text."""

    def watch(name):
        jitted = getattr(engine, name)

        def call(*args, **kwargs):
            calls.append((name, digest(jitted.lower(*args, **kwargs))))
            return jitted(*args, **kwargs)

        return call

    return replace(engine, **{name: watch(name) for name in PROGRAMS})


def enumerated(engine, params, prompts, n=N, slots=None):
    given = described(params)
    with jax.transfer_guard("disallow_explicit"):
        found = engine_shapes(engine, given, prompts, n, slots)
        texts = [digest(one.jitted.lower(*one.args, **one.kwargs)) for one in found]
    names = [program.name for program in found]
    assert len(set(names)) == len(names)
    return dict(zip(texts, names, strict=True))


@pytest.mark.parametrize(("shape", "allowed"), [((4, 1, 2), 8), ((1, 1, 1), 8), ((4, 1, 2), None)])
def test_a_rollout_runs_only_programs_of_the_enumeration(monkeypatch, shape, allowed):
    """Prompts of several rounds, keys that grow twice, slots that narrow while the longest responses go on."""
    monkeypatch.setattr(queue, "FIRST_COLUMNS", 4)
    monkeypatch.setattr(queue, "FEWEST", 1)
    mesh, calls = tiny.mesh(*shape), []
    params = weights(mesh)
    engine = build(mesh, stop_ids=tuple(range(0, 150, 5)), max_num_seqs=allowed)
    result = rollout(watched(engine, calls), params, slots=None)
    assert len(set(result.response_lengths.tolist())) > 3
    expected = enumerated(engine, params, len(PROMPTS))
    assert {text for _, text in calls} <= expected.keys()
    ran = {expected[text].split(",")[0] for _, text in calls}
    kinds = {"prefill", "begin", "grow to 8", "grow to 10", f"narrow to {4 if allowed else 8}"}
    kinds |= {"insert"} if allowed else set()
    kinds |= {"prefill into a bank in use"} if allowed and shape[0] > 1 else set()
    assert kinds <= ran
    if not allowed:
        assert not any(name.startswith("insert") for name in expected.values())


def test_a_rollout_without_ends_of_its_own_needs_three_programs_and_a_grown_one_more(params):
    engine = build(tiny.mesh())
    names = list(enumerated(engine, params, 6).values())
    assert names == ["prefill", "begin", f"advance, 12 slots, {RESPONSE} columns"]


def test_a_batch_smaller_than_its_slots_is_enumerated_with_its_slots(params):
    calls, prompts = [], [prompt(1, (3, 4)), prompt(2, (5,))]
    engine = build(tiny.mesh(), stop_ids=(7,))
    rollout(watched(engine, calls), params, prompts=prompts, n=4, slots=8)
    expected = enumerated(engine, params, 2, n=4, slots=8)
    assert {text for _, text in calls} <= expected.keys()
    assert "narrow to 16, 32 slots, 10 columns" in expected.values()
