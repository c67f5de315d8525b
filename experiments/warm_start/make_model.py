"""Make `jaxrl_llm/assets/tiny-arithmetic`: a small model that answers sums in the right form and often wrongly.

    python experiments/warm_start/make_model.py --out jaxrl_llm/assets/tiny-arithmetic

A new model is trained, supervised, on worked answers in which a fixed share of all carries and borrows is forgotten. It
learns the form and the arithmetic, and it learns to slip: greedy decoding follows the more frequent slip, sampling at
temperature 1 finds the right answer often. Reinforcement learning then has something to find and a short way to go.
The last lines print what was measured on questions that neither this script nor a training run sees.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from jaxrl_llm import sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.data import arithmetic
from jaxrl_llm.models import families, heads, transformer, weights
from jaxrl_llm.records import Prompt
from jaxrl_llm.rollout.engine import generate, make_engine
from jaxrl_llm.rollout.sampling import VALIDATE, make_sampling

BOS, EOS, PAD = 256, 257, 258
SPECIAL = ("<s>", "</s>", "<pad>", *(f"<reserved_{i}>" for i in range(5)))
PROMPT, RESPONSE = 11, 36
"""Longest prompt and response in tokens, BOS and EOS included."""

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


@dataclass(frozen=True)
class Flags:
    """What the warm start depends on."""

    out: Path
    """Folder of the model; replaced as a whole when all is done."""
    seed: int = 0
    """Seed of weights, demonstrations and samples."""
    steps: int = 2500
    """Optimizer steps."""
    batch: int = 32
    """Demonstrations per step."""
    lr: float = 3e-3
    """Peak learning rate."""
    layer_scale: float = 5.0
    """Factor on the initial kernels of the layers."""
    slip_share: float = 0.62
    """Share of carries and borrows that the demonstrations forget."""
    rows: int = 16_000
    """Questions taken from the split `warm`."""


def slip(total: int, term: int) -> int | None:
    """`total + term` with the carry or borrow forgotten, or `None` where there is nothing to forget.

    `slip(17, 25) == 32`, `slip(52, -8) == 54`, `slip(52, 17) is None`.
    """
    if total < 0:
        return None
    units = total % 10 + (term % 10 if term > 0 else -(-term % 10))
    return None if 0 <= units <= 9 else total + term + (10 if units < 0 else -10)


def slipping(share: float, random: np.random.Generator) -> Callable[[int, int], int]:
    """A step for `arithmetic.work` that slips in a share of the places where it can."""

    def step(total: int, term: int) -> int:
        wrong = slip(total, term)
        return wrong if wrong is not None and random.random() < share else total + term

    return step


def tokenizer_files() -> dict[str, str]:
    """A tokenizer of one token per UTF-8 byte (so every text survives a round trip) that puts BOS in front."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 256 + place, "content": text, "special": True, **flags}
            for place, text in enumerate(SPECIAL)
        ],
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=True) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def fill(texts: list[str], length: int, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments `[B length]`: prompts stand at the right end behind BOS, responses at the left end before EOS."""
    tokens = np.full((len(texts), length), PAD, np.int32)
    segments = np.zeros_like(tokens)
    for row, text in enumerate(texts):
        ids = [BOS, *text.encode()] if left else [*text.encode(), EOS]
        at = slice(length - len(ids), length) if left else slice(0, len(ids))
        tokens[row, at], segments[row, at] = ids, 1
    return tokens, segments


def positions_of(segments: jax.Array) -> jax.Array:
    """Positions `[B T]` counted from the first real token."""
    return jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)


def loss_of(params, config, tokens, segments):
    """Mean negative log-likelihood of the response tokens."""
    hidden = transformer.apply(
        config, params, tokens[:, :-1], positions_of(segments)[:, :-1], segments[:, :-1]
    )
    logits = heads.logits(config, params, hidden[:, PROMPT - 1 :])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, PROMPT:])
    real = segments[:, PROMPT:] == 1
    return jnp.where(real, losses, 0).sum() / real.sum()


def train(flags: Flags, config: families.ModelConfig) -> dict[str, Any]:
    """Supervised training from random weights; returns the parameters."""
    schedule = optax.warmup_cosine_decay_schedule(0, flags.lr, 100, flags.steps, flags.lr / 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    random = np.random.default_rng(flags.seed)
    rows = [arithmetic.parse(row["question"]) for row in arithmetic.generate("warm", flags.rows)]
    step = slipping(flags.slip_share, random)
    params = transformer.init(config, jax.random.key(flags.seed))
    params["layers"] = jax.tree.map(  # 0.02 is made for wide models
        lambda leaf: leaf * flags.layer_scale if leaf.ndim > 2 else leaf, params["layers"]
    )
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, tokens, segments):
        loss, gradient = jax.value_and_grad(loss_of)(params, config, tokens, segments)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    for number in range(1, flags.steps + 1):
        chosen = [rows[i] for i in random.integers(0, len(rows), flags.batch)]
        prompts = fill([arithmetic.ask(terms) for terms in chosen], PROMPT, left=True)
        answers = fill([arithmetic.work(terms, step)[0] for terms in chosen], RESPONSE, left=False)
        tokens, segments = (
            np.concatenate(pair, axis=1) for pair in zip(prompts, answers, strict=True)
        )
        params, state, loss = update(params, state, tokens, segments)
        if number % 100 == 0:
            print(f"step {number}: loss {loss:.4f}", flush=True)
    return params


def measure(
    config: families.ModelConfig,
    params: dict[str, Any],
    seed: int,
    count: int = 512,
    samples: int = 8,
) -> dict[str, float]:
    """Held-out accuracy and share of well-formed responses, greedy and over samples at temperature 1."""
    rows = arithmetic.generate("heldout", count)
    prompts = [
        Prompt((BOS, *row["question"].encode()), "", (), "", "", {}, number, f"heldout:{number}")
        for number, row in enumerate(rows)
    ]
    engine = make_engine(
        config,
        sharding.make_mesh(MeshShape(1, 1, 1), jax.devices()[:1]),
        dtype=jnp.dtype("float32"),
        stop_ids=(EOS,),
        decode_text=lambda ids: "",
        prompt_length=PROMPT,
        response_length=RESPONSE,
    )

    def grade(n: int, greedy: bool) -> tuple[np.ndarray, np.ndarray]:
        """Right and well formed, `[prompts n]` each."""
        made, _ = generate(
            engine, params, prompts, n=n, sampling=make_sampling(greedy=greedy), seed=seed, step=0, purpose=VALIDATE,
        )  # fmt: skip
        right, formed = [], []
        for row, (ids, length) in enumerate(
            zip(made.response_tokens, made.response_lengths, strict=True)
        ):
            ended = bool(ids[length - 1] == EOS)
            text = bytes(min(int(token), 255) for token in ids[: length - ended])
            final = text.decode(errors="replace").rpartition("#### ")
            right.append(final[2] == rows[row // n]["answer"] and ended)
            formed.append(final[1] != "" and final[2].lstrip("-").isdigit() and ended)
        return np.reshape(right, (-1, n)), np.reshape(formed, (-1, n))

    greedy, form = grade(1, greedy=True)
    hits, drawn_form = grade(samples, greedy=False)
    return {
        "greedy": greedy.mean().item(),
        "greedy_format": form.mean().item(),
        "sampled": hits.mean().item(),
        "sampled_format": drawn_form.mean().item(),
        f"pass@{samples}": hits.any(axis=1).mean().item(),
    }


def main(flags: Flags) -> None:
    start = time.perf_counter()
    config = families.from_hf(CONFIG)
    params = train(flags, config)
    weights.save_hf(flags.out, config, params, extra_files=tokenizer_files())
    numbers = measure(config, params, flags.seed)
    numbers |= {"parameters": families.parameter_count(config)}
    print(json.dumps(numbers | {"minutes": round((time.perf_counter() - start) / 60, 1)}))


if __name__ == "__main__":
    main(tyro.cli(Flags))
