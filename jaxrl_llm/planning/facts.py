"""What a plan knows of the run besides its settings: architectures, stop ids, longest prompt, length of the run.

Each comes from the files where they are here, else from a stated assumption. Nothing is downloaded and no weights are read.

Left out on purpose: guesses of response lengths (a plan assumes full-length ones).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxrl_llm.config import Config, needs_critic
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models import families, gguf, weights
from jaxrl_llm.models.known import KNOWN, known_model
from jaxrl_llm.paths import is_gguf, resolve_model_path

GSM8K_ROWS = 7473
"""Training questions of GSM8K, assumed where the training files are not here."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """Facts of a run that its settings do not state; plain values, so that processes can pass them on."""

    policy: families.ModelConfig
    valuer: families.ModelConfig
    stop_ids: tuple[int, ...]
    longest_prompt: int
    total_steps: int

    def plain(self) -> dict[str, Any]:
        """As nested plain values."""
        return asdict(self)


def from_plain(values: dict[str, Any]) -> Facts:
    """The inverse of `Facts.plain`, also behind JSON."""
    return Facts(
        policy=_model(values["policy"]),
        valuer=_model(values["valuer"]),
        stop_ids=tuple(values["stop_ids"]),
        longest_prompt=values["longest_prompt"],
        total_steps=values["total_steps"],
    )


def _model(values: dict[str, Any]) -> families.ModelConfig:
    scaling = values["rope_scaling"]
    return families.ModelConfig(
        **values
        | {
            "rope_scaling": families.RopeScaling(**scaling) if scaling else None,
            "eos_ids": tuple(values["eos_ids"]),
        }
    )


def gather(config: Config, say: Say) -> Facts:
    """The facts of a resolved configuration; every assumption is said."""
    policy = architecture(config.model.path, say)
    path = config.critic.path
    other = needs_critic(config) and path is not None and path != config.model.path
    valuer = architecture(path, say) if other and path else policy
    reader = _tokenizer(config)
    if reader is None:
        stops = tuple(policy.eos_ids) + config.rollout.stop_token_ids
        say(f"tokenizer: not here; {len(set(stops))} ids end a response")
        stops = tuple(dict.fromkeys(stops))
    else:
        stops = tuple(reader.stop_ids)
    longest, rows = _prompts(config, reader, policy, say)
    epoch = max(1, rows // config.data.train_batch_size)
    steps = config.trainer.total_training_steps or config.trainer.total_epochs * epoch
    return Facts(policy, valuer, stops, longest, steps)


def architecture(path: str, say: Say) -> families.ModelConfig:
    """The architecture behind `model.path`: from its files, or from what is known of a hub id that is not here.

    Raises `ConfigError` for a model that is neither.
    """
    try:
        place = resolve_model_path(path)
    except (ConfigError, DataError) as problem:
        known = known_model(path)
        if known is None:
            raise ConfigError(
                [
                    *problem.problems,
                    f"{path}: not on disk, and not a model whose architecture is known here; give a folder with its config.json, or one "
                    f"of {', '.join(sorted(KNOWN))}",
                ]
            ) from problem
        say(f"{path}: not on disk; its architecture is known ({known.num_layers} layers, width {known.width:,})")  # fmt: skip
        return known
    if is_gguf(place):
        return families.from_hf(gguf.open_gguf(place).hf_config)
    return families.from_hf(weights.load_config(place))


def _tokenizer(config: Config) -> Any:
    from jaxrl_llm import networks

    try:
        return networks.read_tokenizer(config)
    except (ConfigError, DataError):
        return None


def _prompts(
    config: Config, reader: Any, policy: families.ModelConfig, say: Say
) -> tuple[int, int]:
    """The longest prompt and the number of training prompts: from the files, or the longest allowed and GSM8K's."""
    if reader is not None:
        from jaxrl_llm import assembly

        def load(files: Sequence[str], limit: int | None, what: str) -> list[int]:
            chosen = assembly.load_prompts(
                config, tuple(files), limit, reader, policy.vocab_size, lambda text: None, what
            )
            return [len(prompt.ids) for prompt in chosen.prompts]

        data = config.data
        try:
            train = load(data.train_files, data.train_max_samples, "training")
            val = load(data.val_files, data.val_max_samples, "validation") if data.val_files else []
            return max(train + val), len(train)
        except (ConfigError, DataError, OSError):
            pass
    longest = config.data.max_prompt_length
    say(
        f"prompts: not read; as long as data.max_prompt_length = {longest} allows, and as many as GSM8K has ({GSM8K_ROWS:,})"
    )
    return longest, GSM8K_ROWS


def offline() -> None:
    """Keep hub libraries from the network; before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
