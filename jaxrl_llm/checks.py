"""Rules over a finished configuration; every rule reports, none raises. Standard library only.

The same rules run twice: without devices, in well under a second, before JAX loads; and again with the real device count.
Every problem says *got / need / do*.

Left out on purpose: anything that needs a file, a tokenizer or a model (those refuse with exit 65 where they are read).
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrl_llm.algorithms.names import GROUP_ESTIMATORS
from jaxrl_llm.algorithms.names import canonical as canonical_kl
from jaxrl_llm.config import (
    Config,
    needs_critic,
    needs_reference,
    normal,
    resolve,
    type_problems,
    value_at,
)
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.notices import notices as notices
from jaxrl_llm.rewards.table import check_settings


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes once the device count is known."""

    data: int
    fsdp: int
    tensor: int
    context: int = 1

    @property
    def shards(self) -> int:
        """Devices that hold different trajectories."""
        return self.data * self.fsdp


def mesh_shape(config: Config, devices: int) -> MeshShape:
    """Fill the open mesh axis from the device count; `ConfigError` with the equation when it does not come out."""
    knobs = config.mesh
    sizes = {"data": knobs.data, "fsdp": knobs.fsdp, "tensor": knobs.tensor}
    sizes["context"] = knobs.context
    open_axes = [name for name, size in sizes.items() if size is None]
    known = 1
    for size in sizes.values():
        known *= size or 1
    equation = " x ".join(
        f"{name} {size if size is not None else '?'}"
        for name, size in sizes.items()
        if name != "context" or size != 1
    )
    if len(open_axes) > 1:
        raise ConfigError(
            f"mesh: got {equation}, need at most one open axis; set all but one of {', '.join(open_axes)}"
        )
    if open_axes:
        if devices % known:
            raise ConfigError(
                f"mesh: {equation} over {devices} devices leaves {devices}/{known} for {open_axes[0]}; "
                f"need sizes whose product divides {devices}"
            )
        sizes[open_axes[0]] = devices // known
    elif known != devices:
        raise ConfigError(
            f"mesh: {equation} = {known} devices, but there are {devices}; set one axis to none to fill it"
        )
    return MeshShape(**{name: int(size or 1) for name, size in sizes.items()})


def multiples(value: int, of: int) -> str:
    """The nearest multiples of a number, in words."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def check(config: Config, devices: int | None = None) -> list[str]:
    """All problems of a configuration, wrong types first; with `devices`, also what the device count forbids.

    A setting of a wrong type stands at its default for the other rules, and what they then say about it is left out.
    """
    config = normal(config)
    problems = type_problems(config)
    broken = [problem.partition(":")[0] for problem in problems]
    for path in broken:
        config = _put(config, path.split("."), value_at(Config(), path))
    resolved = resolve(config)
    found = [problem for rule in RULES for problem in rule(resolved)]
    expected = devices
    if expected is None and resolved.trainer.nnodes and resolved.trainer.n_devices_per_node:
        expected = resolved.trainer.nnodes * resolved.trainer.n_devices_per_node
    if expected is not None and expected > 0:
        found += list(_devices(resolved, expected))
    return problems + [problem for problem in found if not mentions(problem, broken)]


def mentions(problem: str, paths: Iterable[str]) -> bool:
    """Whether a problem's text speaks of one of these settings."""
    return any(re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", problem) for path in paths)


def _put(config: Any, names: list[str], value: object) -> Any:
    if len(names) > 1:
        value = _put(getattr(config, names[0]), names[1:], value)
    return replace(config, **{names[0]: value})


def _required(c: Config) -> Iterator[str]:
    if not c.model.path:
        yield "model.path: got '', need a model; set a Hugging Face folder or id, a .gguf file or package:MODULE/PATH"
    if not c.data.train_files:
        yield "data.train_files: got an empty list, need at least one file of prompts"


POSITIVE = (
    "data.train_batch_size data.val_batch_size data.max_prompt_length data.max_response_length data.train_max_samples "
    "data.val_max_samples rollout.n rollout.top_k rollout.decode_chunk rollout.max_num_seqs "
    "rollout.tensor_model_parallel_size rollout.log_prob_micro_batch_size_per_device "
    "rollout.log_prob_max_token_len_per_device ref.log_prob_max_token_len_per_device "
    "actor.ppo_max_token_len_per_device critic.ppo_max_token_len_per_device "
    "ref.log_prob_micro_batch_size_per_device actor.ppo_mini_batch_size actor.ppo_micro_batch_size_per_device "
    "actor.ppo_epochs actor.loss_scale_factor critic.ppo_mini_batch_size critic.ppo_micro_batch_size_per_device "
    "critic.ppo_epochs actor.optim.eps critic.optim.eps actor.optim.clip_grad critic.optim.clip_grad "
    "rollout.temperature validation.n validation.temperature "
    "validation.top_k mesh.data mesh.fsdp mesh.tensor mesh.context algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl "
    "trainer.total_epochs trainer.total_training_steps trainer.save_freq trainer.test_freq trainer.max_ckpt_to_keep "
    "trainer.max_bad_steps trainer.check_replicas_freq trainer.log_completions_freq trainer.log_completions_count trainer.nnodes "
    "trainer.n_devices_per_node algorithm.group_eps actor.clip_ratio critic.cliprange_value "
    "distributed.num_processes distributed.initialization_timeout distributed.heartbeat_timeout distributed.wait_timeout "
    "distributed.watchdog_seconds"
)
NOT_NEGATIVE = (
    "actor.optim.lr critic.optim.lr actor.optim.lr_warmup_steps critic.optim.lr_warmup_steps actor.optim.weight_decay "
    "critic.optim.weight_decay actor.entropy_coeff actor.kl_loss_coef algorithm.kl_ctrl.kl_coef trainer.critic_warmup "
    "data.num_workers reward.length_penalty_per_token actor.clip_ratio_low actor.clip_ratio_high trainer.seed data.seed "
    "distributed.process_id"
)
SEED_LIMIT = 2**31
SHARES = (
    "algorithm.gamma algorithm.lam rollout.top_p validation.top_p rollout.gpu_memory_utilization "
    "data.max_bad_rows_share reward.max_failed_share actor.optim.min_lr_ratio critic.optim.min_lr_ratio"
)
TAKEN_FROM = {
    "critic.ppo_epochs": "actor.ppo_epochs",
    "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_device": "actor.ppo_micro_batch_size_per_device",
    "rollout.log_prob_micro_batch_size_per_device": "actor.ppo_micro_batch_size_per_device",
    "ref.log_prob_micro_batch_size_per_device": "rollout.log_prob_micro_batch_size_per_device",
    "critic.ppo_max_token_len_per_device": "actor.ppo_max_token_len_per_device",
    "rollout.log_prob_max_token_len_per_device": "actor.ppo_max_token_len_per_device",
    "ref.log_prob_max_token_len_per_device": "rollout.log_prob_max_token_len_per_device",
    "data.val_batch_size": "data.train_batch_size",
    "data.seed": "trainer.seed",
    "actor.clip_ratio_low": "actor.clip_ratio",
    "actor.clip_ratio_high": "actor.clip_ratio",
}
"""Settings that `resolve` fills from others: a bad value is reported once, where it was given."""
OPEN_AT_ZERO = {"rollout.top_p", "validation.top_p", "rollout.gpu_memory_utilization"}


def _taken_over(c: Config, path: str) -> bool:
    return path in TAKEN_FROM and value_at(c, path) == value_at(c, TAKEN_FROM[path])


def _ranges(c: Config) -> Iterator[str]:
    own = [path for path in f"{POSITIVE} {NOT_NEGATIVE}".split() if not _taken_over(c, path)]
    for path in (path for path in POSITIVE.split() if path in own):
        value = value_at(c, path)
        if isinstance(value, int | float) and value <= 0:
            extra = "; leave it out or set none to switch it off" if path.endswith("_freq") else ""
            yield f"{path}: got {value}, need more than 0{extra}"
    for path in (path for path in NOT_NEGATIVE.split() if path in own):
        value = value_at(c, path)
        if isinstance(value, int | float) and value < 0:
            yield f"{path}: got {value}, need 0 or more"
    for path in SHARES.split():
        value = value_at(c, path)
        low_ok = isinstance(value, int | float) and (
            value > 0 if path in OPEN_AT_ZERO else value >= 0
        )
        if isinstance(value, int | float) and not (low_ok and value <= 1):
            yield f"{path}: got {value}, need a number {'above 0' if path in OPEN_AT_ZERO else 'from 0'} to 1"
    for name in ("actor", "critic"):
        optim = getattr(c, name).optim
        if not all(0 <= beta < 1 for beta in optim.betas):
            yield f"{name}.optim.betas: got {optim.betas}, need two numbers from 0 to below 1"
    low = c.actor.clip_ratio_low
    if low is not None and low >= 1:
        name = "clip_ratio" if low == c.actor.clip_ratio else "clip_ratio_low"
        yield f"actor.{name}: got {low}, need less than 1 (the ratio is clipped at 1 - low); 0.2 is usual"
    if c.trainer.seed is not None and c.trainer.seed >= SEED_LIMIT:
        yield f"trainer.seed: got {c.trainer.seed}, need less than 2**31 = {SEED_LIMIT}"
    if c.actor.clip_ratio_c is not None and c.actor.clip_ratio_c <= 1:
        yield f"actor.clip_ratio_c: got {c.actor.clip_ratio_c}, need more than 1; none switches dual clip off"


def _batches(c: Config) -> Iterator[str]:
    batch = c.data.train_batch_size
    minis = {"actor": c.actor.ppo_mini_batch_size}
    if needs_critic(c) and c.critic.ppo_mini_batch_size is not None:
        minis["critic"] = c.critic.ppo_mini_batch_size
    for name, mini in minis.items():
        if mini > 0 and batch > 0 and batch % mini:
            yield (
                f"data.train_batch_size = {batch} prompts does not divide into mini-batches of "
                f"{name}.ppo_mini_batch_size = {mini}; set the batch to {multiples(batch, mini)}, or the mini-batch to "
                f"a divisor of {batch}"
            )


def _budgets(c: Config) -> Iterator[str]:
    longest = c.data.max_prompt_length + c.data.max_response_length
    budgets = {
        "actor.ppo_max_token_len_per_device": c.actor.use_dynamic_bsz,
        "critic.ppo_max_token_len_per_device": needs_critic(c) and c.critic.use_dynamic_bsz,
        "rollout.log_prob_max_token_len_per_device": c.rollout.log_prob_use_dynamic_bsz,
        "ref.log_prob_max_token_len_per_device": needs_reference(c)
        and c.ref.log_prob_use_dynamic_bsz,
    }
    for path, used in budgets.items():
        budget = value_at(c, path)
        if not isinstance(budget, int) or _taken_over(c, path):
            continue
        if used and c.mesh.context and 0 < budget * c.mesh.context < longest:
            yield (
                f"{path} = {budget} does not hold one trajectory of data.max_prompt_length + max_response_length = "
                f"{c.data.max_prompt_length} + {c.data.max_response_length} = {longest} tokens; set it to {-(-longest // c.mesh.context)} or more"
            )


def _estimators(c: Config) -> Iterator[str]:
    estimator = c.algorithm.adv_estimator
    if estimator in GROUP_ESTIMATORS:
        if c.rollout.n < 2:
            yield (
                f"rollout.n = {c.rollout.n} with adv_estimator={estimator}: a group needs at least 2 samples per prompt; "
                "set rollout.n to 4 or more, or use gae"
            )
        if not c.rollout.do_sample:
            yield (
                f"rollout.do_sample = false with adv_estimator={estimator}: all samples of a group would be equal and no "
                "advantage remains; switch do_sample on"
            )
    if estimator == "gae" and not needs_critic(c):
        yield "critic.enable = false with adv_estimator=gae: GAE needs values; leave critic.enable at none, or use grpo or rloo"
    if estimator != "gae" and needs_critic(c):
        yield f"critic.enable = true with adv_estimator={estimator}: it uses no values; leave critic.enable at none, or use gae"


def _kl(c: Config) -> Iterator[str]:
    if c.actor.use_kl_loss and c.actor.kl_loss_coef == 0:
        yield "actor.use_kl_loss is on with kl_loss_coef = 0: a reference would be loaded for nothing; switch it off or set a coefficient"
    if c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.use_kl_in_reward is on with kl_ctrl.kl_coef = 0: a reference would be loaded for nothing; "
            "switch it off or set a coefficient"
        )
    if c.algorithm.use_kl_in_reward and canonical_kl(c.algorithm.kl_penalty).endswith("+"):
        yield (
            f"algorithm.kl_penalty = {c.algorithm.kl_penalty}: the + forms differ only in their gradient, and a reward has "
            f"none; use {c.algorithm.kl_penalty.rstrip('+')}"
        )


def _rollout(c: Config) -> Iterator[str]:
    if c.data.prompt_format == "plain" and "{prompt}" not in c.data.plain_template:
        yield f"data.plain_template: got {c.data.plain_template!r}, need the text {{prompt}} in it"
    if any(not text for text in c.rollout.stop):
        yield "rollout.stop: got an empty text, need texts of at least one character"
    if any(token < 0 for token in c.rollout.stop_token_ids):
        yield f"rollout.stop_token_ids: got {list(c.rollout.stop_token_ids)}, need ids of 0 or more"


def _validation(c: Config) -> Iterator[str]:
    filters = (
        c.validation.top_k is not None
        or c.validation.top_p != 1.0
        or c.validation.temperature != 1.0
    )
    if c.validation.n == 1 and filters:
        yield "validation.temperature/top_k/top_p: set, but validation.n = 1 decodes greedily; need validation.n of 2 or more, or the defaults"


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}")


def _trainer(c: Config) -> Iterator[str]:
    for field in ("project_name", "experiment_name"):
        name = getattr(c.trainer, field)
        if name is not None and (not NAME.fullmatch(name) or ".." in name):
            yield (
                f"trainer.{field}: got {name!r}, need a plain name (letters, digits, _ . + = -, not starting with - or "
                "a dot, at most 128 characters)"
            )
    run_dir = c.trainer.run_dir or ""
    if not _sane(run_dir):
        yield (
            f"trainer.run_dir: got {run_dir[:80]!r} ({len(run_dir)} characters), need a path without control characters, "
            "of at most 1024 characters and 255 bytes per folder name"
        )
    elif run_dir:
        yield from _writable(run_dir)
    if c.trainer.resume_mode == "path" and not c.trainer.resume_from_path:
        yield "trainer.resume_mode = path: needs trainer.resume_from_path, the folder of a checkpoint step"
    if c.trainer.resume_mode != "path" and c.trainer.resume_from_path:
        yield f"trainer.resume_from_path is set, but resume_mode = {c.trainer.resume_mode}; set resume_mode=path"
    if not c.trainer.logger:
        yield "trainer.logger: got an empty list, need at least one of console, jsonl, tensorboard, wandb"
    if len(set(c.trainer.logger)) != len(c.trainer.logger):
        yield f"trainer.logger: got {', '.join(c.trainer.logger)}, need every name once; drop the repeated one"


def _sane(path: str) -> bool:
    """Whether file systems take a path: encodable, no control characters, parts of at most 255 bytes."""
    try:
        sizes = [len(os.fsencode(part)) for part in Path(path).parts]
    except UnicodeEncodeError:
        return False
    return (
        not re.search(r"[\x00-\x1f\x7f]", path)
        and len(path) <= 1024
        and max(sizes, default=0) <= 255
    )


def _writable(run_dir: str) -> Iterator[str]:
    existing = run_dir
    while not os.path.lexists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        yield f"trainer.run_dir: {existing} is not a folder, need a folder or a free name; choose another path"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"trainer.run_dir: {existing} is not writable; choose another path or mend its permissions"


def _rewards(c: Config) -> Iterator[str]:
    yield from check_settings(c.reward)


def _unused(c: Config) -> Iterator[str]:
    if c.actor.loss_scale_factor is not None and c.actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"actor.loss_scale_factor is set, but loss_agg_mode = {c.actor.loss_agg_mode} does not divide by it; use "
            "seq-mean-token-sum-norm or leave it at none"
        )
    context = c.mesh.context or 1
    if context > 1 and c.model.attention not in ("auto", "ring"):
        yield (
            f"model.attention = {c.model.attention} with mesh.context = {context}: rows that are split over devices need ring; use auto or "
            "ring, or set mesh.context to 1"
        )
    if needs_critic(c) and c.critic.loss_agg_mode == "seq-mean-token-sum-norm":
        yield "critic.loss_agg_mode = seq-mean-token-sum-norm: need a mode without a scale; use token-mean"


def _devices(c: Config, devices: int) -> Iterator[str]:
    if c.trainer.nnodes and c.trainer.n_devices_per_node:
        wanted = c.trainer.nnodes * c.trainer.n_devices_per_node
        if wanted != devices:
            yield (
                f"trainer.nnodes x n_devices_per_node = {c.trainer.nnodes} x {c.trainer.n_devices_per_node} = {wanted} devices, "
                f"but there are {devices}; run on {wanted}, or set both to what there is (or none)"
            )
            return
    tensor = c.rollout.tensor_model_parallel_size
    if tensor > 0 and devices % tensor:
        divisors = ", ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)
        yield f"rollout.tensor_model_parallel_size = {tensor} does not divide {devices} devices; set it to one of {divisors}"
    if any(size is not None and size < 1 for size in vars(c.mesh).values()):
        return
    try:
        shape = mesh_shape(c, devices)
    except ConfigError as problem:
        yield from problem.problems
        return
    batch, n = c.data.train_batch_size, c.rollout.n
    if batch > 0 and n > 0 and batch * n % shape.shards:
        yield (
            f"data.train_batch_size x rollout.n = {batch} x {n} = {batch * n} trajectories do not divide over {shape.shards} "
            f"data shards; set train_batch_size to {multiples(batch, shape.shards // math.gcd(n, shape.shards))}"
        )


def divided(config: Config, shape: MeshShape, count: int, local: int) -> Iterator[str]:
    """What `count` processes with `local` devices each forbid."""
    group = shape.tensor * shape.context
    if local % group:
        yield (
            f"mesh: context {shape.context} x tensor {shape.tensor} = {group} devices, but each of the {count} processes has {local}, "
            f"need a divisor of {local} so that these devices share a host; lower one of the two, or give fsdp the rest"
        )
    decode = config.rollout.tensor_model_parallel_size
    if local % decode:
        yield (
            f"rollout.tensor_model_parallel_size = {decode} does not divide the {local} devices of a process, and each process decodes "
            f"on its own; set it to a divisor of {local}"
        )
    batch = config.data.train_batch_size
    if batch % count:
        yield (
            f"data.train_batch_size = {batch} prompts do not divide over {count} processes, of which each samples its own; set it to "
            f"{multiples(batch, count)}"
        )


RULES = (
    _required,
    _ranges,
    _batches,
    _budgets,
    _estimators,
    _kl,
    _rollout,
    _validation,
    _trainer,
    _rewards,
    _unused,
)
"""Every rule that needs no device count."""
