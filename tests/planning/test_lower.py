"""What a plan lowers is what a run compiles, letter by letter: every program of whole runs, on one device and on eight."""

import hashlib
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm import assembly, packing, scoring, sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.planning import lower, site
from tests import rig

MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
SETTINGS: dict[str, Any] = {
    "trainer.total_training_steps": 2,
    "trainer.critic_warmup": 0,
    "trainer.save_freq": "none",
    "data.val_files": "[]",
    "trainer.logger": "console",
}


def digest(program: Any, *args: Any, **kwargs: Any) -> str:
    return hashlib.sha256(program.lower(*args, **kwargs).as_text().encode()).hexdigest()


class Recorder:
    """A jitted function that keeps the digest of every program it is called as."""

    def __init__(self, program: Any, seen: dict[str, set[str]], name: str) -> None:
        self.program, self.seen, self.name = program, seen, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.setdefault(self.name, set()).add(digest(self.program, *args, **kwargs))
        return self.program(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.program.lower(*args, **kwargs)


def recorded(parts: assembly.Parts, seen: dict[str, set[str]]) -> assembly.Parts:
    """The parts of a run with all their jitted functions recorded."""

    def of(holder: Any, *names: str) -> Any:
        made = {name: getattr(holder, name) for name in names}
        return replace(
            holder, **{n: Recorder(p, seen, n) for n, p in made.items() if p is not None}
        )

    engine = [field.name for field in fields(parts.engine) if hasattr(getattr(parts.engine, field.name), "lower")]  # fmt: skip
    critic = parts.critic and replace(
        parts.critic, update=Recorder(parts.critic.update, seen, "critic")
    )
    return replace(
        of(parts, "score", "score_reference", "values", "prepare"),
        actor=replace(parts.actor, update=Recorder(parts.actor.update, seen, "actor")),
        critic=critic,
        handover=of(parts.handover, "program"),
        engine=of(parts.engine, *engine),
    )


def run(settings: dict[str, Any], count: int, folder: Any) -> tuple[Any, dict[str, set[str]]]:
    """The parts of a finished run of two steps and the digests of the programs that it ran."""
    seen: dict[str, set[str]] = {}
    built = []

    def build(*args: Any) -> assembly.Parts:
        built.append(make(*args))
        return recorded(built[0], seen)

    make = assembly.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "build", build)
        code = rig.run_here(SETTINGS | settings | {"trainer.run_dir": folder}, count=count)
    assert code == 0
    return built[0], seen


@pytest.mark.parametrize(
    ("algorithm", "count", "settings"),
    [
        ("grpo", 8, MESH | {"rollout.tensor_model_parallel_size": 2, "rollout.max_num_seqs": 16}),
        ("ppo", 8, {"mesh.fsdp": 8, "mesh.data": 1}),
        ("rloo", 1, {"ref.param_offload": "true"}),
    ],
)
def test_every_program_of_a_run_is_planned(algorithm, count, settings, tmp_path):
    parts, seen = run(rig.ALGORITHMS[algorithm] | settings, count, tmp_path / "run")
    planned = lower.step_programs(parts, parts.config.data.train_batch_size)
    digests = {digest(one.fn, *one.args, **one.kwargs) for one in planned}
    ran = {name for name, programs in seen.items() if programs}
    assert {"actor", "prepare", "prefill", "advance"} <= ran
    strangers = {name: len(programs - digests) for name, programs in seen.items()}
    assert not any(strangers.values()), f"programs that no plan knows: {strangers}"
    assert {one.phase for one in planned if one.largest} >= {"gen", "adv", "update_actor"}


@pytest.fixture(scope="module")
def quick():
    """The programs of a tiny PPO run with a KL term, one device."""
    parts = rig.build(rig.ALGORITHMS["ppo"] | {"actor.use_kl_loss": "true"})
    return parts, lower.step_programs(parts, parts.config.data.train_batch_size)


def test_the_phases_come_in_the_order_of_a_step(quick):
    phases = list(dict.fromkeys(one.phase for one in quick[1]))
    assert phases == ["gen", "ref", "values", "adv", "update_critic", "update_actor"]


def test_names_are_unique_and_one_of_each_kind_is_the_largest(quick):
    names = [one.name for one in quick[1]]
    assert len(names) == len(set(names))
    kinds = [one.name.split()[0].strip(",") for one in quick[1] if one.largest and one.phase == "gen"]  # fmt: skip
    assert len(kinds) == len(set(kinds)) and {"prefill", "advance"} <= set(kinds)
    widest = next(one for one in quick[1] if one.largest and one.name.startswith("advance"))
    lanes = {one.args[1].last.shape[0] for one in quick[1] if one.name.startswith("advance")}
    assert widest.args[1].last.shape[0] == max(lanes)


def test_open_loops_run_as_often_as_full_responses_fill_rows(quick):
    parts, planned = quick
    one = next(one for one in planned if one.phase == "update_actor")
    assert one.runs == lower.full_micro_batches(parts.layouts.actor)
    chunk = next(one for one in planned if one.name.startswith("advance"))
    assert chunk.runs == parts.config.rollout.decode_chunk


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"budget": 40},
        {"micro_rows": 1},
        {"budget": 96, "share": False},
        {"budget": 200, "shards": 4},
        {"budget": 64, "pad": True, "attention": "flash", "platform": "gpu"},
    ],
)
def test_rows_are_described_and_counted_as_packing_makes_them(how):
    """Against `packing.pack` of a whole batch of full length: shapes, types, and micro-batches that run."""
    layout = packing.make_layout(
        prompts=12, group=3, mini_prompts=6, prompt_width=16, response_width=24,
        shards=how.pop("shards", 2), passes=2, shuffle=True, **how,
    )  # fmt: skip
    host, _ = packing.pack(layout, lower.full_rollout(12, 3, 16, 24), [np.arange(12)] * 2)
    mesh = sharding.make_mesh(MeshShape(layout.shards, 1, 1), jax.devices()[: layout.shards])
    placed = scoring.place(host, mesh)
    planned = lower.packed_rows(layout, mesh)
    assert jax.tree.structure(planned) == jax.tree.structure(placed)
    for got, want in zip(jax.tree.leaves(planned), jax.tree.leaves(placed), strict=True):
        assert (got.shape, got.dtype, got.sharding) == (want.shape, want.dtype, want.sharding)
    assert host.micros.tolist() == [lower.full_micro_batches(layout)] * 4


def test_the_engine_for_a_host_alone_is_the_same_program():
    """On other devices, letter by letter; the weight hand-over stays where it is."""
    settings = {"mesh.data": 4, "rollout.tensor_model_parallel_size": 2, "rollout.max_num_seqs": 8}
    parts = rig.build(rig.ALGORITHMS["grpo"] | settings | {"rollout.stop": "[done]"}, count=4)
    prompts = parts.config.data.train_batch_size
    moved = site.on_a_host(parts, jax.devices()[4:8])
    pairs = zip(
        lower.rollout_programs(parts, prompts), lower.rollout_programs(moved, prompts), strict=True
    )
    for here, there in pairs:
        assert (here.name, here.runs) == (there.name, there.runs)
        if here.largest:
            assert digest(here.fn, *here.args, **here.kwargs) == digest(there.fn, *there.args, **there.kwargs), here.name  # fmt: skip
        used = {device for leaf in jax.tree.leaves(there.args) if leaf.sharding for device in leaf.sharding.device_set}  # fmt: skip
        first = 0 if here.name == "weight hand-over" else 4
        assert used == set(jax.devices()[first : first + 4]), here.name


def test_bytes_held_are_those_of_a_shard_in_its_memory():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = [
        jax.ShapeDtypeStruct((3, 5), np.float32, sharding=where),
        jax.ShapeDtypeStruct((7,), np.bool_),
        jax.ShapeDtypeStruct((2, 2), np.float32, sharding=where.with_memory_kind("pinned_host")),
    ]
    assert lower.held(tree) == 60 + 7
    assert lower.held(tree, host=True) == 16
