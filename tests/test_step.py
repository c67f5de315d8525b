"""One step in this process: bad batches, rewards that fail, what is donated, loaded, and warmed up; one device and eight."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import metrics, networks, runtime, step, trainer
from jaxrl_llm.checkpoint import Checkpointer
from jaxrl_llm.console import Progress
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.rewards.grader import Grade, make_grader
from tests import rig

SHORT = {"data.val_files": "[]", "trainer.test_freq": "none", "trainer.save_freq": "none"}


class FakeGrader:
    """Grades by a function of (batch, group, member) instead of reading texts; remembers what it was shown.

    Batches count from 1; groups and their members from 0, in the order in which responses ended.
    """

    names = ("fake",)
    digests: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, score):
        self.score, self.batch, self.seen = score, 0, {}

    def submit(self, key, sample):
        self.seen[key] = sample

    def collect(self, keys):
        self.batch += 1
        groups: dict[str, list[int]] = {}
        grades = {}
        for key in keys:
            members = groups.setdefault(self.seen[key].prompt, [])
            members.append(key)
            group = list(groups).index(self.seen[key].prompt)
            value = self.score(self.batch, group, len(members) - 1)
            if isinstance(value, Exception):
                grades[key] = Grade(np.nan, {"fake": None}, None, f"Traceback: {value}")
            else:
                grades[key] = Grade(value, {"fake": None if np.isnan(value) else value})
        return grades


def make_run(folder, grader):
    """The happenings of a run without sinks."""
    return step.Run(
        folder=folder,
        signals=runtime.Signals(),
        grader=grader,
        keys=itertools.count(),
        log=metrics.MetricsLog(None),
        progress=Progress(9),
        saver=Checkpointer(folder / "checkpoints", keep=None, log=lambda text: None),
        phases=metrics.Phases(),
        compilations=metrics.CompileCounter(),
        history=[],
    )


def bits(tree):
    """Every leaf of a tree as its bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def spread(batch, group, member):
    """Half of every group is right."""
    return float(member % 2)


@pytest.fixture(scope="module")
def parts():
    """A plain GRPO run; its compiled programs serve every test here that changes no program."""
    return rig.build(SHORT)


@pytest.fixture
def fresh(parts, tmp_path):
    """A function that gives the first state and a run around a grading function."""

    def make(score=spread):
        parts.stream._iterator.set_state({"next_index": 0})
        return networks.first_state(parts), make_run(tmp_path, FakeGrader(score))

    return make


def poisoned(state):
    """One weight of the output side becomes NaN."""
    (name, final), *_ = [
        (name, leaf) for name, leaf in state.actor.trainable.items() if "norm" in name
    ]
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan), final)
    return replace(
        state, actor=replace(state.actor, trainable=state.actor.trainable | {name: broken})
    )


# Bad batches -----------------------------------------------------------------------------------------------------------


def test_nan_weights_are_caught_before_grading(parts, fresh):
    state, run = fresh()
    state = poisoned(state)
    before, counter = bits(state.actor), run.grader
    state, row = step.train_step(parts, run, state, 1)
    assert row["rollout/non_finite_rows"] == 32 and not counter.seen
    assert bits(state.actor) == before
    assert int(state.step) == 1 and row["training/global_step"] == 1
    assert int(state.counters.bad_steps) == int(state.counters.bad_in_a_row) == 1
    assert row["training/bad_steps"] == 1 and row["timing_s/step"] > 0
    assert not any(name.startswith("actor/") for name in row) and run.samples == []


def test_bad_steps_in_a_row_stop_the_run(parts, fresh):
    parts = replace(
        parts,
        config=replace(parts.config, trainer=replace(parts.config.trainer, max_bad_steps=2)),
    )
    state, run = fresh()
    state = poisoned(state)
    state, row = step.train_step(parts, run, state, 1)
    trainer._close_step(parts, run, state, 1, row)
    state, row = step.train_step(parts, run, state, 2)
    with pytest.raises(TrainingStopped, match=r"2 bad steps in a row.*max_bad_steps = 2") as stop:
        trainer._close_step(parts, run, state, 2, row)
    assert stop.value.exit_code == 70


def test_a_batch_without_a_valid_reward_moves_nothing(parts, fresh):
    state, run = fresh(lambda batch, *who: np.nan if batch == 2 else spread(batch, *who))
    state, _ = step.train_step(parts, run, state, 1)
    before = bits(state.actor), bits(state.algorithm)
    state, row = step.train_step(parts, run, state, 2)
    assert (bits(state.actor), bits(state.algorithm)) == before
    assert row["reward/not_finite"] == 1.0 and row["reward/abstained"] == 32
    assert (int(state.counters.bad_steps), int(state.counters.bad_in_a_row)) == (1, 1)
    state, row = step.train_step(parts, run, state, 3)
    assert bits(state.actor) != before[0] and "actor/loss" in row
    assert (int(state.counters.bad_steps), int(state.counters.bad_in_a_row)) == (1, 0)


def test_only_rows_without_a_reward_are_dropped(parts, fresh, monkeypatch):
    """The first group loses two of its four members: the advantages of the other two are those of a group of two."""
    seen = []
    update = parts.actor.update

    def watch(state, batch, *rest):
        seen.append(jax.device_get(batch))
        return update(state, batch, *rest)

    parts = replace(parts, actor=replace(parts.actor, update=watch))
    state, run = fresh(
        lambda batch, group, member: (
            np.nan if (group, member) in ((0, 1), (0, 2)) else float(member == 0)
        )
    )
    state, row = step.train_step(parts, run, state, 1)
    batch = seen[0]
    out = np.flatnonzero(~batch.valid)
    assert len(out) == 2 and not batch.mask[out].any()
    left = [row for row in range(32) if row // 4 == out[0] // 4 and row not in out]
    right, wrong = sorted(left, key=lambda row: -batch.scores[row])
    # two members, rewards 1 and 0: (1 - 0.5) / sqrt(0.5) = 0.7071; of four, 1 0 0 0: 0.75 / 0.5 = 1.5
    assert batch.advantages[right][batch.mask[right]] == pytest.approx(np.sqrt(0.5), rel=1e-4)
    assert batch.advantages[wrong][batch.mask[wrong]] == pytest.approx(-np.sqrt(0.5), rel=1e-4)
    others = [row for row in range(32) if row // 4 != out[0] // 4 and batch.scores[row]]
    assert len(others) == 7 and all(batch.mask[others].any(axis=1))
    assert batch.advantages[others].max(axis=1) == pytest.approx(1.5, rel=1e-4)
    assert row["reward/not_finite"] == 2 / 32 and int(state.counters.bad_steps) == 0


def test_failing_reward_functions_stop_the_run_at_the_third_batch(parts, fresh):
    def score(batch, group, member):
        few = 4 * group + member < 17
        return ValueError(f"batch {batch}") if few else spread(batch, group, member)

    state, run = fresh(score)
    for number in (1, 2):
        state, row = step.train_step(parts, run, state, number)
        assert int(state.counters.broken_reward_batches) == number
        assert row["reward/failed"] == 17
    with pytest.raises(
        TrainingStopped, match=r"(?s)more than 50%.*3 batches in a row.*Traceback: batch 3"
    ):
        step.train_step(parts, run, state, 3)


def test_half_of_the_rewards_may_fail_and_a_good_batch_resets_the_count(parts, fresh):
    failing = {1: 17, 2: 17, 3: 16, 4: 17}

    def score(batch, group, member):
        few = 4 * group + member < failing[batch]
        return ValueError("no") if few else spread(batch, group, member)

    state, run = fresh(score)
    counts = []
    for number in failing:
        state, _ = step.train_step(parts, run, state, number)
        counts.append(int(state.counters.broken_reward_batches))
    assert counts == [1, 2, 0, 1]


def test_a_custom_reward_that_fails_reaches_the_row_and_the_error(parts, fresh, tmp_path):
    """The same through the real grader: the function raises on some responses and returns NaN on the others."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(response, answer, **rest):\n"
        "    if len(response) % 2:\n        raise RuntimeError('odd length')\n    return float('nan')\n"
    )
    knobs = replace(parts.config.reward, functions=(f"{file}:score",), weights=(1.0,))
    state, run = fresh()
    with make_grader(knobs) as grader:
        run.grader = grader
        before = bits(state.actor)
        for number in (1, 2):
            state, row = step.train_step(parts, run, state, number)
            assert row["reward/failed"] == 32.0 and bits(state.actor) == before
        with pytest.raises(TrainingStopped, match="mend the reward function"):
            step.train_step(parts, run, state, 3)


# Numbers of a good step ----------------------------------------------------------------------------------------------------


def test_the_first_failed_reward_call_is_printed_once(tmp_path, capsys):
    run = make_run(tmp_path, FakeGrader(spread))
    fine, failed = Grade(1.0, {}), Grade(float("nan"), {}, None, "Traceback: no such key 'answer'")
    for grades in ([fine], [fine, failed], [failed]):
        step._tell_first_failure(run, grades)
    assert capsys.readouterr().out.count("no such key 'answer'") == 1


def test_equal_groups_give_no_gradient_and_are_counted(parts, fresh):
    state, run = fresh(lambda *who: 1.0)
    state, row = step.train_step(parts, run, state, 1)
    assert row["actor/grad_norm"] == 0.0 and row["actor/pg_loss"] == 0.0
    assert row["groups/no_signal"] == row["groups/all_right"] == 1.0
    assert row["groups/all_wrong"] == 0.0 and int(state.counters.bad_steps) == 0


def test_equal_groups_leave_the_gradient_of_the_others_alone(parts, fresh):
    state, run = fresh(lambda batch, group, member: 1.0 if group else float(member % 2))
    _, row = step.train_step(parts, run, state, 1)
    assert row["actor/grad_norm"] > 0.0 and row["groups/no_signal"] == 7 / 8


def test_sampler_and_trainer_agree_before_anything_moves(parts, fresh):
    state, run = fresh()
    _, row = step.train_step(parts, run, state, 1)
    assert 0 <= row["rollout/logprob_gap/mean"] <= row["rollout/logprob_gap/max"] < 1e-4
    assert row["actor/ratio_deviation/first"] == row["actor/ratio_deviation/max"] == 0.0


def test_two_mini_batches_start_at_ratio_one_and_move_away(tmp_path):
    several = rig.build(SHORT | {"actor.ppo_mini_batch_size": 4, "actor.optim.lr": 1e-2})
    state, run = networks.first_state(several), make_run(tmp_path, FakeGrader(spread))
    _, row = step.train_step(several, run, state, 1)
    assert row["rollout/logprob_gap/max"] < 1e-4
    assert row["actor/ratio_deviation/first"] <= 1e-5
    assert row["actor/ratio_deviation/max"] > 1e-3 and row["actor/pg_clipfrac"] > 0


def test_the_old_state_is_donated_with_and_without_a_save_in_flight(parts, fresh):
    state, run = fresh()
    for number in (1, 2):
        if number == 2:
            run.saver.save(1, state, {})
        old, saved = state, bits(state.actor)
        state, _ = step.train_step(parts, run, state, number)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.actor))
    run.saver.wait()
    restored = run.saver.restore(networks.abstract_state(parts))
    assert restored is not None and bits(restored[1].actor) == saved


def test_a_signal_before_the_update_leaves_the_state_alone(parts, fresh):
    state, run = fresh()
    before = bits(state)

    def collect(keys):
        run.signals.requested = True
        return FakeGrader.collect(run.grader, keys)

    run.grader.collect = collect
    with pytest.raises(runtime.StopRequested):
        step.train_step(parts, run, state, 1)
    assert bits(state) == before


def test_padding_and_prompts_of_their_own_take_more_rows_and_change_no_step(tmp_path):
    rows, states = [], []
    for share, cut in (("true", "true"), ("false", "true"), ("false", "false")):
        changes = {"model.use_prefix_sharing": share, "model.use_remove_padding": cut}
        parts = rig.build(SHORT | {"data.max_prompt_length": 32} | changes)
        state, run = networks.first_state(parts), make_run(tmp_path, FakeGrader(spread))
        state, row = step.train_step(parts, run, state, 1)
        rows.append(row)
        states.append(jax.device_get(state.actor.trainable))
    shared, own, padded = rows
    assert shared["packing/stored_tokens"] < own["packing/stored_tokens"]
    assert (
        own["packing/stored_tokens"]
        == padded["packing/stored_tokens"]
        == own["packing/verl_tokens"]
    )
    assert padded["packing/token_share"] < 0.7 < own["packing/token_share"]
    for row in rows[1:]:
        assert row["actor/grad_norm"] == pytest.approx(shared["actor/grad_norm"], rel=1e-4)
        assert row["actor/pg_loss"] == pytest.approx(shared["actor/pg_loss"], abs=1e-5)


def test_samples_are_the_first_of_each_group(parts, fresh):
    state, run = fresh()
    step.train_step(parts, run, state, 1)
    assert len(run.samples) == 4 and {sample["score"] for sample in run.samples} <= {0.0, 1.0}
    assert {sample["split"] for sample in run.samples} == {"train"}
    shown = {sample.response for sample in run.grader.seen.values()}
    assert all(sample["response"] in shown for sample in run.samples)


def test_nan_weights_in_validation_stop_the_run(tmp_path):
    parts = rig.build({})
    state, run = poisoned(networks.first_state(parts)), make_run(tmp_path, FakeGrader(spread))
    with pytest.raises(TrainingStopped, match="16 responses had non-finite logits"):
        step.validate(parts, run, state, 4)


# Critic, reference, devices --------------------------------------------------------------------------------------------------


def test_critic_warm_up_is_exactly_so_many_steps(tmp_path):
    parts = rig.build(SHORT | rig.ALGORITHMS["ppo"] | {"trainer.critic_warmup": 2})
    state: Any = networks.first_state(parts)
    run = make_run(tmp_path, FakeGrader(spread))
    first, moved = bits(state.actor), []
    for number in (1, 2, 3):
        critic = bits(state.critic.trainable)
        state, row = step.train_step(parts, run, state, number)
        assert bits(state.critic.trainable) != critic and "critic/vf_loss" in row
        moved.append((bits(state.actor) != first, "actor/pg_loss" in row))
    assert moved == [(False, False), (False, False), (True, True)]


def test_a_reference_is_loaded_only_for_a_kl_term(parts):
    assert parts.reference is None and parts.fingerprint["reference"] == ""
    for on in ({"actor.use_kl_loss": "true"}, {"algorithm.use_kl_in_reward": "true"}):
        with_kl = rig.build(SHORT | on)
        assert with_kl.reference is not None
        kind, _, digest = with_kl.fingerprint["reference"].partition(":")
        assert kind == "float32" and len(digest) == 64


def test_an_offloaded_reference_scores_the_same(tmp_path):
    rows, places = [], []
    for offload in ("false", "true"):
        parts = rig.build(SHORT | rig.ALGORITHMS["grpo"] | {"ref.param_offload": offload})
        places.append({leaf.sharding.memory_kind for leaf in jax.tree.leaves(parts.frozen)})
        state, run = networks.first_state(parts), make_run(tmp_path, FakeGrader(spread))
        state, row = step.train_step(parts, run, state, 1)
        rows.append({name: value for name, value in row.items() if not rig.TIMES.search(name)})
    assert places == [{"device"}, {"pinned_host"}]
    assert rows[0] == rows[1] and rows[0]["actor/kl_loss"] > 0


@pytest.mark.parametrize(
    "layout",
    [
        {"rollout.tensor_model_parallel_size": 2},
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
        {"mesh.data": 2, "mesh.context": 2, "mesh.tensor": 2},
    ],
    ids=["decode_2", "mesh_2x2x2", "context_2"],
)
def test_eight_devices_take_the_same_first_step(layout, parts, fresh, tmp_path):
    """Tokens may part at near-ties (at most one row here); the numbers of the step stay together."""
    state, run = fresh()
    _, alone = step.train_step(parts, run, state, 1)
    many = rig.build(SHORT | layout, count=8)
    assert many.mesh.size == 8
    state, run = networks.first_state(many), make_run(tmp_path, FakeGrader(spread))
    _, spread_out = step.train_step(many, run, state, 1)
    for name in ("response_length/mean", "actor/entropy", "actor/grad_norm", "critic/score/mean"):
        assert spread_out[name] == pytest.approx(alone[name], rel=2e-2), name
    assert spread_out["actor/loss"] == pytest.approx(alone["actor/loss"], abs=2e-3)
    assert spread_out["rollout/logprob_gap/max"] < 1e-4
    assert spread_out["actor/ratio_deviation/first"] == 0.0


def stub(config: Any) -> Any:
    """Parts of which only the configuration is read."""
    return SimpleNamespace(config=config)


def test_sampling_follows_the_kind_of_rollout(parts):
    rollout = replace(parts.config.rollout, temperature=0.7, top_k=5, top_p=0.9)
    validation = replace(parts.config.validation, n=4, temperature=0.6, top_k=3, top_p=0.8)
    config = replace(parts.config, rollout=rollout, validation=validation)
    kinds = {kind: step._sampling(stub(config), kind) for kind in ("train", "greedy", "validate")}
    assert not kinds["train"].greedy and kinds["greedy"].greedy
    for kind, numbers in (("train", (0.7, 5, 0.9)), ("validate", (0.6, 3, 0.8))):
        got = kinds[kind]
        assert (float(got.temperature), int(got.top_k), float(got.top_p)) == pytest.approx(numbers)
    off = replace(config, rollout=replace(rollout, do_sample=False))
    assert step._sampling(stub(off), "train").greedy
