"""No dead knobs: every setting has a proof that a run changes with it.

A proof is the name of another test, or a probe here: something that is built from two configurations which differ in this
setting alone, and must differ. Probes lower programs but compile none.
"""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_llm import assembly, layouts, networks, packing, step
from jaxrl_llm.checks import check
from jaxrl_llm.config import Config, leaves, load, override_all, resolve
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.records import Batch, Rollout
from jaxrl_llm.rewards import grader as graders
from jaxrl_llm.rewards.grader import Grade, Sample, make_grader
from tests import rig
from tests.test_step import FakeGrader, make_run, spread

SHORT = {"data.val_files": "[]"}
GAE = {"algorithm.adv_estimator": "gae"}
KL = {"actor.use_kl_loss": "true"}
REWARD_KL = {"algorithm.use_kl_in_reward": "true"}
ADAPTIVE = REWARD_KL | {"algorithm.kl_ctrl.type": "adaptive"}
DYNAMIC = {"actor.use_dynamic_bsz": "true"}
MINI = {"actor.ppo_mini_batch_size": 4}
COSINE = {"actor.optim.lr_scheduler_type": "cosine"}
CRITIC_COSINE = GAE | {"critic.optim.lr_scheduler_type": "cosine"}
SCALED = {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}
OVERLONG = {"data.max_prompt_length": 8, "data.truncation": "left"}


# What is built -----------------------------------------------------------------------------------------------------------


@cache
def _parts(settings, count):
    return rig.build(dict(settings), count=count)


def parts(settings, count=1):
    return _parts(tuple(sorted((SHORT | settings).items())), count)


def a_batch(of):
    """A made-up batch of this run's shapes, with everything that a loss may read, and the rollout it is packed from."""
    prompts, n = of.config.data.train_batch_size, of.config.rollout.n
    layout = of.layouts.actor
    width, length = layout.prompt_width, layout.response_width
    random, rows = np.random.default_rng(0), prompts * n
    ones = np.ones((rows, length), bool)
    rollout = Rollout(
        prompt_tokens=random.integers(3, 99, (prompts, width)).astype(np.int32),
        prompt_lengths=np.full((prompts,), width, np.int32),
        response_tokens=random.integers(3, 99, (rows, length)).astype(np.int32),
        response_lengths=np.full((rows,), length, np.int32),
        response_mask=ones,
        loss_mask=ones,
        sampler_logprobs=np.zeros((rows, length), np.float32),
        filtered_logprobs=None,
        end_reason=np.zeros((rows,), np.int32),
        policy_step=np.zeros((rows,), np.int32),
    )
    made: Batch = packing.make_batch(rollout, np.zeros(rows), np.ones(rows, bool), length)
    zero = np.zeros((rows, length), np.float32)
    whole = replace(made, old_logprobs=zero, ref_logprobs=zero, values=zero, advantages=zero, returns=zero)  # fmt: skip
    return whole, rollout


@cache
def lowered(name, settings, count=1):
    """The text of one program of a run."""
    of = parts(dict(settings), count)
    state: Any = networks.abstract_state(of)
    batch, rollout = a_batch(of)
    packs, _ = layouts.pack_all(of.layouts, rollout, of.mesh, seed=0, step=1)
    own, one = of.layouts, np.float32(1.0)
    programs: dict[str, Any] = {
        "actor": lambda: (of.actor.update, state.actor, batch, packs[own.actor], state.algorithm),
        "critic": lambda: (
            of.critic.update,
            state.critic,
            batch,
            packs[own.critic],
            state.algorithm,
        ),
        "score": lambda: (of.score, state.actor.trainable, packs[own.score], one),
        "reference": lambda: (of.score_reference, of.reference, packs[own.reference], one),
        "values": lambda: (of.values, state.critic.trainable, packs[own.critic]),
        "advantages": lambda: (of.prepare, batch, state.algorithm),
    }
    program, *arguments = programs[name]()
    return program.lower(*arguments).as_text()


def first_mini_batch(settings):
    """The batch rows that the first optimizer step learns from."""
    of = parts(settings)
    packs, _ = layouts.pack_all(of.layouts, a_batch(of)[1], of.mesh, seed=0, step=1)
    return np.asarray(packs[of.layouts.actor].members[0]).tolist()


def program(name):
    return lambda settings: lowered(name, tuple(sorted(settings.items())))


def built(read, count=1):
    """What `read` finds in the parts of a run, or why they cannot be built (a file that is not there was looked for)."""

    def probe(settings):
        try:
            return read(parts(settings, count))
        except (ConfigError, DataError) as problem:
            return problem.problems

    return probe


def called(kind):
    """What the rollout engine is asked for."""

    class Asked(Exception):
        pass

    def probe(settings):
        of = replace(parts(settings), handover=lambda params: params)
        asked = {}

        def generate(engine, params, prompts, **options):
            asked.update(options)
            raise Asked

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "generate", generate)
            state: Any = SimpleNamespace(actor=SimpleNamespace(trainable={}))
            run = make_run(Path("nowhere"), FakeGrader(spread))
            with pytest.raises(Asked):
                step.sample(of, run, state, of.train.prompts[:8], 1, kind)
        numbers = [float(value) for value in asked.pop("sampling")]
        return numbers, [(name, v) for name, v in asked.items() if not callable(v)]

    return probe


def resolved(path):
    """A setting that another one decides."""
    section, name = path.split(".")
    return lambda settings: getattr(getattr(rig.settings(settings), section), name)


def refused(settings):
    """What the checks say."""
    pairs = [(name, str(value)) for name, value in (rig.TINY | settings).items()]
    config, problems = override_all(load(str(rig.CONFIG)), pairs)
    return problems + check(resolve(config))


def graded(settings):
    """The grade of one response."""
    sample = Sample(prompt="1+1=?", response="It is 2.\nResult: 2", answer="2", response_length=10)
    with make_grader(rig.settings(settings).reward) as grader:
        grader.submit(0, sample)
        return repr(grader.collect([0])[0])


def pool(settings):
    """The limits of the reward processes (none is started)."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graders, "WorkerPool", lambda *limits: asked.append(limits))
        grader = make_grader(rig.settings({"reward.functions": "math"} | settings).reward)
        grader.prestart()
    return asked


def broken_batches(settings):
    """Whether a batch with one failure in two counts as broken."""
    of = parts(settings)
    state = networks.first_state(of)
    grades = [Grade(1.0, {}), Grade(float("nan"), {}, None, "failed")]
    return int(step._watch_rewards(of, state, grades).counters.broken_reward_batches)


def threads(settings):
    """What the data stream is made with."""
    asked = {}
    make = assembly.make_stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "make_stream", lambda *a, **k: asked.update(k) or make(*a, **k))
        rig.build(SHORT | settings)
    return asked


def coefficients(settings):
    """The first KL coefficients."""
    state = networks.scalars_of(parts(settings))["algorithm"]
    return float(state.kl_coef_reward), float(state.kl_coef_loss)


prompts = built(lambda of: [(prompt.row_id, prompt.ids) for prompt in of.train.prompts])
held_out = built(lambda of: of.val and len(of.val.prompts))
order = built(lambda of: assembly.make_stream(40, batch_size=8, shuffle=of.config.data.shuffle, seed=of.config.data.seed).next().tolist())  # fmt: skip
epoch = built(lambda of: (of.stream.steps_per_epoch, of.stream.state()))
steps = built(lambda of: of.total_steps)


def engine(name):
    return built(lambda of: getattr(of.engine, name))


many = built(lambda of: dict(of.mesh.shape), count=8)


# The table -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """`look` at a run with `value` and at one without; `around` are the settings that both share."""

    look: Any
    value: object
    around: dict = field(default_factory=dict)


BROKEN = "BROKEN.jsonl"
"""A file that the test writes: three good rows and a broken one."""

PROOFS: dict[str, str | Probe] = {
    "model.path": "tests/commands/test_export.py::test_an_exported_policy_is_the_policy",
    "model.tokenizer_path": Probe(built(lambda of: of.tokenizer.digest), "NOWHERE"),
    "model.compute_dtype": Probe(program("score"), "bfloat16"),
    "model.enable_gradient_checkpointing": Probe(program("actor"), "true"),
    "model.attention": Probe(program("actor"), "reference"),
    "model.use_remove_padding": Probe(built(lambda of: of.layouts.actor.pad), "false"),
    "model.use_prefix_sharing": Probe(program("actor"), "false"),
    "data.train_files": Probe(prompts, "arithmetic:train:41"),
    "data.val_files": Probe(held_out, "arithmetic:heldout:7"),
    "data.train_batch_size": Probe(epoch, 16),
    "data.val_batch_size": Probe(called("greedy"), 5),
    "data.max_prompt_length": Probe(built(lambda of: of.layouts.actor.prompt_width), 40),
    "data.max_response_length": Probe(engine("response_length"), 25),
    "data.filter_overlong_prompts": Probe(prompts, "true", OVERLONG),
    "data.truncation": Probe(prompts, "right", OVERLONG),
    "data.shuffle": Probe(order, "false"),
    "data.seed": Probe(order, 7),
    "data.train_max_samples": Probe(prompts, 20),
    "data.val_max_samples": Probe(held_out, 3, {"data.val_files": "arithmetic:heldout:7"}),
    "data.prompt_format": "tests/data/test_prompts.py::test_chat_question_with_instruction_and_system_prompt",
    "data.plain_template": Probe(prompts, "Q{prompt}"),
    "data.system_prompt": "tests/data/test_prompts.py::test_chat_question_with_instruction_and_system_prompt",
    "data.fold_system_prompt": "tests/data/test_prompts.py::test_folded_system_prompt",
    "data.instruction": Probe(prompts, "Go.", {"data.max_prompt_length": 40}),
    "data.bad_rows": Probe(
        prompts, "skip", {"data.train_files": BROKEN, "data.max_bad_rows_share": 0.5}
    ),
    "data.max_bad_rows_share": Probe(
        prompts, 0.5, {"data.train_files": BROKEN, "data.bad_rows": "skip"}
    ),
    "data.exclude_ids": "tests/data/test_rows.py::test_exclude_and_max_samples",
    "data.num_workers": Probe(threads, 2),
    "reward.functions": Probe(graded, "format"),
    "reward.weights": Probe(graded, "0.5", {"reward.gsm8k_method": "flexible"}),
    "reward.gsm8k_method": Probe(graded, "flexible"),
    "reward.format_pattern": "tests/rewards/test_grader.py::test_a_pattern_of_the_user_can_be_killed",
    "reward.length_penalty_per_token": Probe(graded, 0.5, {"reward.functions": "length_penalty"}),
    "reward.clip_min": Probe(graded, 0.25),
    "reward.clip_max": Probe(graded, 0.25, {"reward.gsm8k_method": "flexible"}),
    "reward.timeout_s": Probe(pool, 3.5),
    "reward.memory_limit_mb": Probe(pool, 700),
    "reward.num_workers": Probe(pool, 3),
    "reward.max_failed_share": Probe(broken_batches, 0.25),
    "algorithm.adv_estimator": Probe(program("advantages"), "rloo"),
    "algorithm.gamma": Probe(program("advantages"), 0.5, GAE),
    "algorithm.lam": Probe(program("advantages"), 0.5, GAE),
    "algorithm.norm_adv_by_std_in_grpo": Probe(program("advantages"), "false"),
    "algorithm.group_eps": Probe(program("advantages"), 0.5),
    "algorithm.use_kl_in_reward": Probe(program("advantages"), "true"),
    "algorithm.kl_penalty": Probe(program("advantages"), "k3", REWARD_KL),
    "algorithm.kl_ctrl.type": Probe(program("advantages"), "adaptive", REWARD_KL),
    "algorithm.kl_ctrl.kl_coef": Probe(coefficients, 0.5, REWARD_KL),
    "algorithm.kl_ctrl.target_kl": Probe(program("advantages"), 0.5, ADAPTIVE),
    "algorithm.kl_ctrl.horizon": Probe(program("advantages"), 777, ADAPTIVE),
    "actor.ppo_mini_batch_size": Probe(program("actor"), 4),
    "actor.ppo_micro_batch_size_per_device": Probe(program("actor"), 2),
    "actor.use_dynamic_bsz": Probe(
        program("actor"), "true", {"actor.ppo_max_token_len_per_device": 64}
    ),
    "actor.ppo_max_token_len_per_device": Probe(program("actor"), 64, DYNAMIC),
    "actor.ppo_epochs": Probe(program("actor"), 2),
    "actor.shuffle": Probe(first_mini_batch, "true", MINI),
    "actor.clip_ratio": Probe(program("actor"), 0.33, MINI),
    "actor.clip_ratio_low": Probe(program("actor"), 0.33, MINI),
    "actor.clip_ratio_high": Probe(program("actor"), 0.33, MINI),
    "actor.clip_ratio_c": Probe(program("actor"), 7.0, MINI),
    "actor.loss_agg_mode": Probe(program("actor"), "seq-mean-token-mean"),
    "actor.loss_scale_factor": Probe(program("actor"), 77.0, SCALED),
    "actor.entropy_coeff": Probe(program("actor"), 0.125),
    "actor.use_kl_loss": Probe(program("actor"), "true"),
    "actor.kl_loss_coef": Probe(coefficients, 0.5, KL),
    "actor.kl_loss_type": Probe(program("actor"), "k2", KL),
    "actor.grad_accumulation_dtype": Probe(program("actor"), "bfloat16"),
    "actor.param_offload": Probe(program("actor"), "true"),
    "actor.optimizer_offload": Probe(program("actor"), "true"),
    "critic.enable": Probe(refused, "true"),
    "critic.path": Probe(built(lambda of: of.critic.path), "NOWHERE", GAE),
    "critic.enable_gradient_checkpointing": Probe(program("critic"), "true", GAE),
    "critic.ppo_mini_batch_size": Probe(program("critic"), 4, GAE),
    "critic.ppo_micro_batch_size_per_device": Probe(program("values"), 2, GAE),
    "critic.use_dynamic_bsz": Probe(
        program("values"), "true", GAE | {"critic.ppo_max_token_len_per_device": 64}
    ),
    "critic.ppo_max_token_len_per_device": Probe(program("values"), 64, GAE | DYNAMIC),
    "critic.ppo_epochs": Probe(program("critic"), 2, GAE),
    "critic.cliprange_value": Probe(program("critic"), 0.33, GAE),
    "critic.loss_agg_mode": Probe(program("critic"), "token-sum", GAE),
    "critic.grad_accumulation_dtype": Probe(program("critic"), "bfloat16", GAE),
    "critic.param_offload": Probe(program("values"), "true", GAE),
    "critic.optimizer_offload": Probe(program("critic"), "true", GAE),
    "ref.path": Probe(built(lambda of: of.fingerprint["reference"]), "NOWHERE", KL),
    "ref.log_prob_micro_batch_size_per_device": Probe(program("reference"), 2, KL),
    "ref.log_prob_use_dynamic_bsz": Probe(
        program("reference"), "true", KL | {"ref.log_prob_max_token_len_per_device": 64}
    ),
    "ref.log_prob_max_token_len_per_device": Probe(program("reference"), 64, KL | DYNAMIC),
    "ref.param_offload": "tests/test_step.py::test_an_offloaded_reference_scores_the_same",
    "rollout.n": Probe(called("train"), 8),
    "rollout.temperature": Probe(called("train"), 0.7),
    "rollout.top_k": Probe(called("train"), 5),
    "rollout.top_p": Probe(called("train"), 0.5),
    "rollout.do_sample": Probe(called("train"), "false", GAE),
    "rollout.stop": Probe(engine("stop_texts"), "####"),
    "rollout.stop_token_ids": Probe(engine("stop_ids"), "77,78"),
    "rollout.ignore_eos": Probe(engine("stop_ids"), "true"),
    "rollout.decode_chunk": Probe(engine("chunk"), 6),
    "rollout.max_num_seqs": Probe(engine("max_num_seqs"), 8),
    "rollout.gpu_memory_utilization": "tests/test_assembly.py::test_slots_fill_the_share_of_memory",
    "rollout.tensor_model_parallel_size": Probe(
        built(lambda of: dict(of.rollout_mesh.shape), count=8), 2
    ),
    "rollout.log_prob_micro_batch_size_per_device": Probe(program("score"), 2),
    "rollout.log_prob_use_dynamic_bsz": Probe(
        program("score"), "true", {"rollout.log_prob_max_token_len_per_device": 64}
    ),
    "rollout.log_prob_max_token_len_per_device": Probe(program("score"), 64, DYNAMIC),
    "mesh.data": Probe(many, 2),
    "mesh.fsdp": Probe(many, 2),
    "mesh.tensor": Probe(many, 2),
    "mesh.context": Probe(many, 2),
    "validation.n": Probe(called("validate"), 3),
    "validation.temperature": Probe(called("validate"), 0.7, {"validation.n": 3}),
    "validation.top_k": Probe(called("validate"), 5, {"validation.n": 3}),
    "validation.top_p": Probe(called("validate"), 0.5, {"validation.n": 3}),
    "trainer.seed": Probe(called("train"), 9),
    "trainer.total_epochs": Probe(steps, 3, {"trainer.total_training_steps": "none"}),
    "trainer.total_training_steps": Probe(steps, 4),
    "trainer.critic_warmup": "tests/test_step.py::test_critic_warm_up_is_exactly_so_many_steps",
    "trainer.project_name": Probe(resolved("trainer.run_dir"), "elsewhere"),
    "trainer.experiment_name": Probe(resolved("trainer.run_dir"), "mine"),
    "trainer.run_dir": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.logger": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.log_completions_freq": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.log_completions_count": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.save_freq": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.test_freq": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.val_before_train": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.max_ckpt_to_keep": "tests/test_trainer.py::test_operational_settings_decide_what_is_written",
    "trainer.resume_mode": "tests/test_trainer.py::test_disable_refuses_a_folder_that_holds_a_run",
    "trainer.resume_from_path": "tests/test_trainer.py::test_a_run_continues_from_a_checkpoint_elsewhere",
    "trainer.on_damaged_checkpoint": "tests/test_trainer.py::test_a_damaged_checkpoint_is_never_trained_on",
    "trainer.max_bad_steps": "tests/test_step.py::test_bad_steps_in_a_row_stop_the_run",
    "trainer.check_replicas_freq": "tests/test_replicas.py::test_a_run_stops_before_it_saves_what_differs",
    "trainer.profile_steps": "tests/test_trainer.py::test_chosen_steps_are_traced_and_late_compilations_are_named",
    "trainer.nnodes": "tests/test_runtime.py::test_another_device_count_than_expected_is_refused",
    "trainer.n_devices_per_node": "tests/test_runtime.py::test_another_device_count_than_expected_is_refused",
    "trainer.compilation_cache_dir": "tests/test_runtime.py::test_the_compilation_cache_is_switched_on",
    "distributed.enable": "tests/test_joining.py::test_off_is_one_process_whatever_there_is",
    "distributed.coordinator_address": "tests/test_joining.py::test_settings_are_enough_and_no_cluster_is_asked",
    "distributed.num_processes": "tests/test_joining.py::test_settings_are_enough_and_no_cluster_is_asked",
    "distributed.process_id": "tests/test_joining.py::test_settings_are_enough_and_no_cluster_is_asked",
    "distributed.local_device_ids": "tests/test_joining.py::test_settings_are_enough_and_no_cluster_is_asked",
    "distributed.initialization_timeout": "tests/test_joining.py::test_what_jax_is_told",
    "distributed.heartbeat_timeout": "tests/test_joining.py::test_what_jax_is_told",
    "distributed.watchdog_seconds": "tests/test_several.py::test_a_process_that_stands_still_is_named_and_ends_both",
    "distributed.wait_timeout": "tests/test_trainer.py::test_processes_wait_for_each_other_as_long_as_is_set",
}
OPTIM = {
    "lr": Probe(None, 0.125),
    "lr_warmup_steps": Probe(None, 3),
    "lr_scheduler_type": Probe(None, "linear"),
    "min_lr_ratio": Probe(None, 0.125, {"actor": COSINE, "critic": CRITIC_COSINE}),
    "weight_decay": Probe(None, 0.125),
    "betas": Probe(None, "0.5,0.75"),
    "eps": Probe(None, 0.125),
    "clip_grad": Probe(None, "none"),
}
for _name, _probe in OPTIM.items():
    for _who in ("actor", "critic"):
        _around = _probe.around.get(_who, GAE if _who == "critic" else {})
        PROOFS[f"{_who}.optim.{_name}"] = Probe(program(_who), _probe.value, _around)

PROBES = {path: probe for path, probe in PROOFS.items() if isinstance(probe, Probe)}


def test_every_setting_has_a_proof():
    known = {path for path, _, _ in leaves(Config())}
    assert known - set(PROOFS) == set(), "settings without a proof"
    assert set(PROOFS) - known == set(), "proofs of settings that do not exist"


@pytest.mark.parametrize("node", sorted({p for p in PROOFS.values() if isinstance(p, str)}))
def test_the_named_tests_exist(node):
    file, _, name = node.partition("::")
    assert f"\ndef {name}(" in (rig.ROOT / file).read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Stand-ins in the table and the paths they mean."""
    folder = tmp_path_factory.mktemp("alive")
    good = [{"question": f"{a}+1=", "answer": f"#### {a + 1}"} for a in range(8)]
    lines = [json.dumps(row) for row in good]
    (folder / BROKEN).write_text("\n".join([*lines, "{", ""]))
    return {BROKEN: str(folder / BROKEN), "NOWHERE": str(folder / "nowhere")}


@pytest.mark.parametrize("path", PROBES)
def test_the_setting_changes_the_run(path, files):
    probe = PROBES[path]
    around = {name: files.get(value, value) for name, value in probe.around.items()}
    value = files.get(probe.value, probe.value)
    before, after = probe.look(around), probe.look(around | {path: value})
    assert before != after, f"{path} = {value} changes nothing"
    assert before == probe.look(around), f"{path}: the probe does not repeat"


def test_a_dead_setting_would_be_seen():
    """The probes tell a change from none: a setting that a program does not read leaves its text alone."""
    look = program("actor")
    assert look({}) == look({"trainer.save_freq": 9}) == look({"rollout.top_p": 0.5})
