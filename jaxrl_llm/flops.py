"""Matrix-product FLOPs of a model by hand: pure functions of its shape and of token counts.

A product of `[m k]` and `[k n]` is `2 m k n`. With `N` query heads, `K` key heads of size `H`, width `D`, hidden width `F`, `L` layers
and vocabulary `V` one forward pass costs

    trunk      2 L (D N H + 2 D K H + N H D + 3 D F)   per token
    attention  4 L N H                                 per pair of a query and a key that it sees
    head       2 D V                                   per scored token (2 D for a value head)

and the backward pass twice as much: one product for the inputs, one for the weights.

Left out on purpose: everything that is no matrix product (norms, softmax, rotations, sampling, the optimizer), padding, and pairs
that an attention computes only to mask them: these are FLOPs that a step needs, not those that a program spends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.models.families import ModelConfig


@dataclass(frozen=True)
class Work:
    """What a forward pass works on: `tokens` through the trunk, `pairs` of query and key, `scored` tokens through the head."""

    tokens: int
    pairs: int
    scored: int

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens, self.pairs + other.pairs, self.scored + other.scored
        )


# Per piece of the model ------------------------------------------------------------------------------------------------


def trunk(config: ModelConfig, tokens: int) -> int:
    """Projections and MLP of `tokens` tokens, forward: `2 L (2 D N H + 2 D K H + 3 D F)` each."""
    heads = config.num_heads + config.num_kv_heads
    per_layer = 2 * config.width * heads * config.head_size + 3 * config.width * config.hidden
    return 2 * config.num_layers * per_layer * tokens


def attention(config: ModelConfig, pairs: int) -> int:
    """Scores and weighted sums of `pairs` pairs, forward: `4 L N H` each."""
    return 4 * config.num_layers * config.num_heads * config.head_size * pairs


def head(config: ModelConfig, scored: int, *, values: bool = False) -> int:
    """Logits of `scored` tokens, forward: `2 D V` each; with `values` a value instead: `2 D`."""
    return 2 * config.width * (1 if values else config.vocab_size) * scored


# Tokens and pairs ------------------------------------------------------------------------------------------------------


def seen(first: np.ndarray | int, last: np.ndarray | int, window: int | None = None) -> int:
    """Pairs of the queries at positions `first` to `last - 1`, summed over arrays: `sum min(position + 1, window)`.

    `last < first` counts as no query.
    """

    def below(end: np.ndarray) -> np.ndarray:
        full = end if window is None else np.minimum(end, window)
        return full * (full + 1) // 2 + (end - full) * (window or 0)

    start = np.asarray(first, np.int64)
    return int(np.sum(below(np.maximum(np.asarray(last, np.int64), start)) - below(start)))


def trajectories(
    config: ModelConfig,
    prompt_lengths: Iterable[int],
    response_lengths: Iterable[int],
    *,
    share: bool = True,
) -> Work:
    """One pass over whole trajectories, `prompt_lengths [P]` and `response_lengths [P * G]`, members of a group adjacent.

    Each response token sees its prompt and its own response up to itself; every response token is scored. With `share` a
    prompt is read once per group, otherwise once per response. With `p` and `r` tokens and no window: `p (p + 1) / 2` pairs per
    prompt and `r p + r (r + 1) / 2` per response.
    """
    prompts, responses = _lengths(prompt_lengths, response_lengths)
    heads = np.asarray(prompt_lengths, np.int64) if share else prompts
    window = config.sliding_window
    total = int(responses.sum())
    pairs = seen(0, heads, window) + seen(prompts, prompts + responses, window)
    return Work(int(heads.sum()) + total, pairs, total)


def prefill(config: ModelConfig, prompt_lengths: Iterable[int]) -> Work:
    """Reading each prompt once, all but its last token, which its samples feed themselves: `p (p - 1) / 2` pairs, no head."""
    read = np.asarray(prompt_lengths, np.int64) - 1
    return Work(int(read.sum()), seen(0, read, config.sliding_window), 0)


def decode(
    config: ModelConfig, prompt_lengths: Iterable[int], response_lengths: Iterable[int]
) -> Work:
    """Sampling the responses: a token fed and a head per sampled token, of which the i-th (from 0) sees `p + i` keys."""
    prompts, responses = _lengths(prompt_lengths, response_lengths)
    total = int(responses.sum())
    pairs = seen(prompts - 1, prompts - 1 + responses, config.sliding_window)
    return Work(total, pairs, total)


def _lengths(
    prompt_lengths: Iterable[int], response_lengths: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response length of every trajectory `[P * G]`."""
    prompts = np.asarray(prompt_lengths, np.int64)
    responses = np.asarray(response_lengths, np.int64)
    return np.repeat(prompts, len(responses) // max(1, len(prompts))), responses


# Passes ----------------------------------------------------------------------------------------------------------------


def forward(config: ModelConfig, work: Work, *, values: bool = False) -> int:
    """One forward pass."""
    return (
        trunk(config, work.tokens)
        + attention(config, work.pairs)
        + head(config, work.scored, values=values)
    )


def recomputed(
    config: ModelConfig, work: Work, *, remat: str, values: bool = False, fused: bool = True
) -> int:
    """What the backward pass computes a second time.

    The head always, a value head never. A `fused` attention its scores, half of its forward pass (from the saved log-sum-exp);
    any other all of its forward pass, except under `remat="none"`. With `remat="full"` one more forward pass of attention and of
    the trunk, without the last product of a layer, whose result nothing asks for: `2 L D F` per token less. `dots` and `none`
    nothing of the projections.
    """
    again = 0 if values else head(config, work.scored)
    if fused:
        again += attention(config, work.pairs) // 2
    if remat == "full" or (remat == "dots" and not fused):
        again += attention(config, work.pairs)
    if remat == "full":
        last = 2 * config.num_layers * config.width * config.hidden * work.tokens
        again += trunk(config, work.tokens) - last
    return again


def update(
    config: ModelConfig, work: Work, *, remat: str, values: bool = False, fused: bool = True
) -> int:
    """Forward pass, backward pass (twice the forward pass) and what it recomputes: FLOPs that an update spends."""
    once = forward(config, work, values=values)
    return 3 * once + recomputed(config, work, remat=remat, values=values, fused=fused)


@dataclass(frozen=True)
class Step:
    """FLOPs of a training step without recomputation: sampling, scoring (log-probs and values), and the updates."""

    generated: int
    scored: int
    trained: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.generated + self.scored + self.trained


def step(
    config: ModelConfig,
    prompt_lengths: Iterable[int],
    response_lengths: Iterable[int],
    *,
    share: bool = True,
    log_probs: int = 0,
    epochs: int = 1,
    critic: ModelConfig | None = None,
    critic_epochs: int = 1,
) -> Step:
    """A training step on `prompt_lengths [P]` and `response_lengths [P * G]`.

    `log_probs` forward passes for old and reference log-probs, `epochs` passes of the policy's update (0: a step of the critic's
    warm-up); with a `critic` one forward pass for values and `critic_epochs` passes of its update.
    """
    prompts, responses = np.asarray(prompt_lengths), np.asarray(response_lengths)
    sampled = prefill(config, prompts) + decode(config, prompts, responses)
    work = trajectories(config, prompts, responses, share=share)
    policy = forward(config, work)
    values = 0 if critic is None else forward(critic, work, values=True)
    return Step(
        generated=forward(config, sampled),
        scored=log_probs * policy + values,
        trained=3 * (epochs * policy + critic_epochs * values),
    )
