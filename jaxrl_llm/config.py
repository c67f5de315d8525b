"""The configuration of a run: assemble, load, override by path, resolve, identify, save. Standard library only.

A configuration is a nested frozen dataclass. One pure function, `override(config, path, text)`, serves the command line,
sweeps and script importers; problems are collected, never raised one by one. `resolve` fills every `None` that another
setting decides, so that the saved `config.json` holds the values that ran, and loading it gives the same run.

Left out on purpose: registries, string interpolation between settings, and settings that a subclass adds.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.algorithms.names import NEEDS_VALUES
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs import (
    ActorKnobs,
    AlgorithmKnobs,
    CriticKnobs,
    DataKnobs,
    DistributedKnobs,
    MeshKnobs,
    ModelKnobs,
    RefKnobs,
    RewardKnobs,
    RolloutKnobs,
    TrainerKnobs,
    ValidationKnobs,
)
from jaxrl_llm.knobs.marks import is_operational
from jaxrl_llm.values import normal_value, parse, type_problem


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelKnobs = field(default_factory=ModelKnobs)
    data: DataKnobs = field(default_factory=DataKnobs)
    reward: RewardKnobs = field(default_factory=RewardKnobs)
    algorithm: AlgorithmKnobs = field(default_factory=AlgorithmKnobs)
    actor: ActorKnobs = field(default_factory=ActorKnobs)
    critic: CriticKnobs = field(default_factory=CriticKnobs)
    ref: RefKnobs = field(default_factory=RefKnobs)
    rollout: RolloutKnobs = field(default_factory=RolloutKnobs)
    mesh: MeshKnobs = field(default_factory=MeshKnobs)
    validation: ValidationKnobs = field(default_factory=ValidationKnobs)
    trainer: TrainerKnobs = field(default_factory=TrainerKnobs)
    distributed: DistributedKnobs = field(default_factory=DistributedKnobs)


FOREIGN_NAMES = {
    "learning_rate": "actor.optim.lr",
    "lerning_rate": "actor.optim.lr",
    "num_epochs": "trainer.total_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "batch_size": "data.train_batch_size",
    "num_generations": "rollout.n",
    "beta": "actor.kl_loss_coef",
    "max_new_tokens": "data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "grad_clip": "actor.optim.clip_grad",
    "n_gpus_per_node": "trainer.n_devices_per_node",
    "ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_device",
    "ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_device",
    "log_prob_max_token_len_per_gpu": "rollout.log_prob_max_token_len_per_device",
    "log_prob_micro_batch_size_per_gpu": "rollout.log_prob_micro_batch_size_per_device",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "gae_lambda": "algorithm.lam",
    "world_size": "distributed.num_processes",
    "rank": "distributed.process_id",
}
"""Names from other trainers, as hints in error texts; none of them is accepted."""


# Paths ------------------------------------------------------------------------------------------------------------------


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:  # type: ignore[type-arg]
    """Every setting as (dotted path, dataclass field, value), in declaration order."""
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{declared.name}.")
        else:
            yield f"{prefix}{declared.name}", declared, value


def _hints(kind: Any) -> dict[str, Any]:
    return _cached_hints(kind)


@functools.cache
def _cached_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def nearest(config: Config, path: str) -> str | None:
    """The known path most like an unknown one: a neighbour, then another trainer's name, then the same last name elsewhere,
    each in the section that the path names where there is one."""
    known = [name for name, _, _ in leaves(config)]
    plain = path.replace("-", "_").removeprefix("actor_rollout_ref.")
    if plain in known:
        return plain
    section, _, last = plain.rpartition(".")
    top = plain.partition(".")[0] + "."
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section
    }
    if close := difflib.get_close_matches(last, siblings, n=1, cutoff=0.7):
        return siblings[close[0]]
    if last in FOREIGN_NAMES:
        target = FOREIGN_NAMES[last]
        here = top + target.partition(".")[2]
        return here if here in known else target
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    if elsewhere:
        return min(elsewhere, key=lambda name: not name.startswith(top))
    if close := difflib.get_close_matches(plain, known, n=1, cutoff=0.6):
        return close[0]
    lasts = {name.rpartition(".")[2]: name for name in reversed(known)}
    if close := difflib.get_close_matches(last, lasts, n=1, cutoff=0.7):
        return lasts[close[0]]
    return None


def value_at(config: Config, path: str) -> object:
    """The value of a dotted path."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


# Values ------------------------------------------------------------------------------------------------------------------


def type_problems(config: Any, prefix: str = "") -> list[str]:
    """Every setting whose value is not of its declared type."""
    problems = []
    hints = _hints(type(config))
    for declared in dataclasses.fields(config):
        value, kind = getattr(config, declared.name), hints[declared.name]
        path = f"{prefix}{declared.name}"
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, kind):  # type: ignore[arg-type]
                problems.append(f"{path}: got {value!r}, need {getattr(kind, '__name__', kind)}")
            else:
                problems += type_problems(value, f"{path}.")
        elif problem := type_problem(kind, value):
            problems.append(f"{path}: {problem}")
    return problems


def normal(config: Any) -> Any:
    """The same settings with one spelling each: lists as tuples, whole numbers in float settings as floats.

    So a config file may write `gamma=1` or `train_files=["a.jsonl"]`, and equal settings have equal digests.
    """
    hints = _hints(type(config))
    return dataclasses.replace(
        config,
        **{
            name: normal(value) if _is_section(value) else normal_value(hints[name], value)
            for name, value in vars(config).items()
        },
    )


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def override(config: Any, path: str, text: str) -> Any:
    """The configuration with one setting replaced by the value that `text` spells; `ValueError` says what is wrong.

    `path` is dotted (`actor.optim.lr`). Accepted texts: `true/false`, `none`, numbers (finite), `[a,b]` or `a,b` for
    lists.
    """
    head, _, rest = path.partition(".")
    hints = _hints(type(config))
    if head not in hints:
        raise KeyError(path)
    value = getattr(config, head)
    if dataclasses.is_dataclass(value):
        if not rest:
            raise KeyError(path)
        return dataclasses.replace(config, **{head: override(value, rest, text)})
    if rest:
        raise KeyError(path)
    return dataclasses.replace(config, **{head: parse(hints[head], text)})


def override_all(config: Config, pairs: list[tuple[str, str]]) -> tuple[Config, list[str]]:
    """Apply overrides in order; what could not be applied comes back as problems, all of them."""
    problems = []
    for path, text in pairs:
        try:
            config = override(config, path, text)
        except KeyError:
            inside = [name for name, _, _ in leaves(config) if path and name.startswith(f"{path}.")]
            if inside:
                problems.append(
                    f"{path}: is a group of settings; set one of {', '.join(inside[:6])}{', …' if len(inside) > 6 else ''}"
                )
                continue
            close = nearest(config, path)
            hint = f"; did you mean {close}?" if close else "; --help lists all settings"
            problems.append(f"{path}: no such setting{hint}")
        except ValueError as problem:
            problems.append(f"{path}: {problem}")
    return config, problems


# Files ---------------------------------------------------------------------------------------------------------------------


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested plain values, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(
    values: dict[str, Any], kind: Any = Config, prefix: str = ""
) -> tuple[Any, list[str]]:
    """A configuration from nested plain values; unknown keys and wrong types come back as problems."""
    problems: list[str] = []
    if not isinstance(values, dict):
        return kind(), [f"got a {type(values).__name__}, need a group of settings"]
    hints = _hints(kind)
    known = {declared.name for declared in dataclasses.fields(kind)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in known:
            close = nearest(Config(), path)
            problems.append(
                f"{path}: no such setting" + (f"; did you mean {close}?" if close else "")
            )
        elif dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                problems.append(f"{path}: got {value!r}, need a group of settings")
                continue
            arguments[name], inner = from_dict(value, hints[name], f"{path}.")
            problems += inner
        else:
            value = normal_value(hints[name], value)
            if problem := type_problem(hints[name], value):
                problems.append(f"{path}: {problem}")
            else:
                arguments[name] = value
    return kind(**arguments), problems


def load(path: str) -> Config:
    """Read a config file (Python with `get_config()`) or a run's `config.json`.

    Raises `ConfigError` when the file is missing, fails, or does not give a `Config`.
    """
    file = Path(os.path.expanduser(path))
    if not os.path.isfile(file):
        near = sorted(str(p) for p in file.parent.glob("*.py"))[:8] if file.parent.is_dir() else []
        raise ConfigError(
            f"--config: got {path!r}, need an existing file; there are {', '.join(near) or 'no config files there'}"
        )
    if file.suffix == ".json":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as problem:
            raise ConfigError(
                f"--config: {path} is not readable JSON ({problem}); mend the file"
            ) from problem
        config, problems = from_dict(values)
        if problems:
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        return config
    if file.suffix != ".py":
        raise ConfigError(
            f"--config: got {path!r}, need a .py file with get_config() or a config.json"
        )
    name = f"jaxrl_llm_config_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_Uncached(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except ConfigError:
        raise
    except (Exception, SystemExit) as problem:
        raise ConfigError(
            f"--config: {path} failed with {type(problem).__name__}: {problem}; mend the file"
        ) from problem
    if not isinstance(config, Config):
        raise ConfigError(
            f"--config: get_config() in {path} gave {type(config).__name__}, need jaxrl_llm.config.Config"
        )
    return normal(config)


class _Uncached(importlib.machinery.SourceFileLoader):
    """Runs a config file from its text: no bytecode beside it, so a second edit within a clock tick is never missed."""

    def get_code(self, fullname: str) -> types.CodeType:
        """The compiled text of the file as it is now."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


# Identity -------------------------------------------------------------------------------------------------------------------


def identity(config: Config) -> dict[str, Any]:
    """The settings that shape the numbers of a run, by path: everything not marked operational."""
    return {path: value for path, declared, value in leaves(config) if not is_operational(declared)}


def identity_digest(config: Config) -> str:
    """Eight hex digits over the identity settings."""
    text = json.dumps(identity(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def changed(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Settings that differ between two configurations as (path, old, new)."""
    before = {path: value for path, _, value in leaves(old)}
    return [(path, before[path], value) for path, _, value in leaves(new) if before[path] != value]


def resolve(config: Config, stem: str = "run") -> Config:
    """Fill every `None` that another setting decides; applying it twice changes nothing.

    `stem` is the config file's name without ending, used in the default experiment name. What the devices decide
    (`rollout.max_num_seqs`, open mesh axes, micro-batches of a whole share) stays `None` here.
    """
    c = normal(config)
    seed = c.trainer.seed if c.trainer.seed is not None else random.SystemRandom().randrange(2**31)
    actor = dataclasses.replace(
        c.actor,
        clip_ratio_low=c.actor.clip_ratio
        if c.actor.clip_ratio_low is None
        else c.actor.clip_ratio_low,
        clip_ratio_high=c.actor.clip_ratio
        if c.actor.clip_ratio_high is None
        else c.actor.clip_ratio_high,
        loss_scale_factor=_or(c.actor.loss_scale_factor, float(c.data.max_response_length))
        if c.actor.loss_agg_mode == "seq-mean-token-sum-norm"
        else c.actor.loss_scale_factor,
    )
    critic = dataclasses.replace(
        c.critic,
        enable=_or(c.critic.enable, c.algorithm.adv_estimator in NEEDS_VALUES),
        path=_or(c.critic.path, c.model.path),
        enable_gradient_checkpointing=_remat(
            _or(c.critic.enable_gradient_checkpointing, c.model.enable_gradient_checkpointing)
        ),
        ppo_mini_batch_size=_or(c.critic.ppo_mini_batch_size, c.actor.ppo_mini_batch_size),
        ppo_micro_batch_size_per_device=_or(
            c.critic.ppo_micro_batch_size_per_device, c.actor.ppo_micro_batch_size_per_device
        ),
        use_dynamic_bsz=_or(c.critic.use_dynamic_bsz, c.actor.use_dynamic_bsz),
        ppo_max_token_len_per_device=_or(
            c.critic.ppo_max_token_len_per_device, c.actor.ppo_max_token_len_per_device
        ),
        ppo_epochs=_or(c.critic.ppo_epochs, c.actor.ppo_epochs),
    )
    rollout, ref = _log_prob_sizes(c)
    resolved = dataclasses.replace(
        c,
        model=dataclasses.replace(
            c.model,
            tokenizer_path=_or(c.model.tokenizer_path, c.model.path),
            enable_gradient_checkpointing=_remat(c.model.enable_gradient_checkpointing),
        ),
        data=dataclasses.replace(
            c.data,
            seed=_or(c.data.seed, seed),
            val_batch_size=_or(c.data.val_batch_size, c.data.train_batch_size),
        ),
        reward=dataclasses.replace(
            c.reward, weights=_or(c.reward.weights, tuple(1.0 for _ in c.reward.functions))
        ),
        actor=actor,
        critic=critic,
        rollout=rollout,
        ref=dataclasses.replace(ref, path=_or(c.ref.path, c.model.path)),
        trainer=dataclasses.replace(c.trainer, seed=seed),
    )
    name = _or(
        c.trainer.experiment_name, f"{_plain(stem)}-{identity_digest(_undrawn(resolved, c))}"
    )
    run_dir = _or(c.trainer.run_dir, os.path.join("runs", c.trainer.project_name, name))
    trainer = dataclasses.replace(
        resolved.trainer,
        experiment_name=name,
        run_dir=str(Path(os.path.expanduser(run_dir)).absolute()),
    )
    return dataclasses.replace(resolved, trainer=trainer)


def _log_prob_sizes(c: Config) -> tuple[RolloutKnobs, RefKnobs]:
    """Sizes of scoring: the reference's default to those of old log-probs, and these to the actor's."""
    sizes = {
        "log_prob_micro_batch_size_per_device": c.actor.ppo_micro_batch_size_per_device,
        "log_prob_use_dynamic_bsz": c.actor.use_dynamic_bsz,
        "log_prob_max_token_len_per_device": c.actor.ppo_max_token_len_per_device,
    }
    own = {name: _or(getattr(c.rollout, name), value) for name, value in sizes.items()}
    frozen = {name: _or(getattr(c.ref, name), value) for name, value in own.items()}
    return dataclasses.replace(c.rollout, **own), dataclasses.replace(c.ref, **frozen)


def _undrawn(resolved: Config, asked: Config) -> Config:
    """The settings that name a run: a drawn seed does not, so that the same command finds its folder again."""
    if asked.trainer.seed is not None:
        return resolved
    return dataclasses.replace(
        resolved,
        data=dataclasses.replace(resolved.data, seed=asked.data.seed),
        trainer=dataclasses.replace(resolved.trainer, seed=None),
    )


def _plain(stem: str) -> str:
    """A file's stem as the start of a run's name."""
    return re.sub(r"[^A-Za-z0-9_+=-]", "_", stem)[:100].lstrip("+=-") or "run"


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _remat(value: Any) -> Any:
    """verl's true and false as names of what is recomputed."""
    return {True: "full", False: "none"}.get(value, value)


def needs_reference(config: Config) -> bool:
    """Whether some KL term makes the frozen reference necessary."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def needs_critic(config: Config) -> bool:
    """Whether a value network is trained (resolved configurations)."""
    return bool(config.critic.enable)
