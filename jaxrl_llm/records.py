"""The pytrees that cross module borders, and the alphabet of their axes.

One alphabet for comments, einsum strings and sharding rules:

=====  ==========================================  =====  ==========================================
`B`    sequences (trajectories), `B = P * G`       `L`    layers
`P`    prompts                                     `D`    width of the residual stream
`G`    group size: samples per prompt              `N`    query heads
`T`    token positions                             `K`    key/value heads
`S`    slots of a key/value cache                  `H`    head size
`R`    rows of a micro-batch                       `F`    hidden width of the MLP
                                                   `V`    vocabulary
=====  ==========================================  =====  ==========================================

Log-probs carry their time and origin in their name: `logprobs` (being trained), `old_logprobs` (at the start of the
update), `sampler_logprobs` (from the rollout), `ref_logprobs` (frozen reference). All of them, and every entropy, are of
`softmax(logits / rollout.temperature)` before top-k and top-p.

Left out on purpose: behaviour. Nouns hold; the verbs are functions elsewhere.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct

Array = Any
"""A JAX array on the devices or a NumPy array on the host, as the docstring of the record says."""
Params = dict[str, Any]

END_EOS, END_STOP, END_LENGTH = 0, 1, 2
"""Why a response ended: an end token, a stop text, or the length limit (truncated)."""


@dataclass(frozen=True)
class Prompt:
    """One prompt on the host: what is rolled out and what the graders are told.

    `ids` are exactly the token ids that are rolled out; `messages` the chat turns (or one user turn) they came from;
    `prompt_id` a stable non-negative integer, unique in its data set, from which random keys are derived; `row_id` is
    `FILE_STEM:LINE` for error texts.
    """

    ids: tuple[int, ...]
    text: str
    messages: tuple[dict[str, str], ...]
    answer: str
    data_source: str
    extra_info: dict[str, Any]
    prompt_id: int
    row_id: str


@dataclass(frozen=True)
class Rollout:
    """What the engine returns, on the host: `B = P * G` responses, members of a group adjacent.

    `prompt_tokens [P Tp]` left-padded with `prompt_lengths [P]`; `response_tokens [B Tr]` right-padded with
    `response_lengths [B]`; `response_mask [B Tr]` is made from lengths, never by comparing ids (pad may equal eos);
    `loss_mask [B Tr]` marks trained tokens; `sampler_logprobs [B Tr]` and, where a filter was on, `filtered_logprobs
    [B Tr]`; `end_reason [B]`; `policy_step [B]` is the step whose weights sampled the row. `bad` counts rows whose
    logits were not finite.
    """

    prompt_tokens: np.ndarray
    prompt_lengths: np.ndarray
    response_tokens: np.ndarray
    response_lengths: np.ndarray
    response_mask: np.ndarray
    loss_mask: np.ndarray
    sampler_logprobs: np.ndarray
    filtered_logprobs: np.ndarray | None
    end_reason: np.ndarray
    policy_step: np.ndarray
    bad: int = 0


@struct.dataclass
class Batch:
    """A rollout on the devices with everything the update needs, rows `B` sharded over the data axes.

    Everything is per response token `[B Tr]` or per row `[B]`; the tokens themselves lie in packed rows (`packing.Packed`). `mask`
    marks trained tokens, `valid` rows that may enter statistics, `group_ids` the prompt of a row. `weights` are sampler/trainer correction weights (ones without correction);
    `bootstrap` the value after the last token of a truncated response.
    """

    mask: Array
    sampler_logprobs: Array
    scores: Array
    group_ids: Array
    valid: Array
    old_logprobs: Array = None
    ref_logprobs: Array = None
    values: Array = None
    token_rewards: Array = None
    advantages: Array = None
    returns: Array = None
    weights: Array = None
    bootstrap: Array = None
    sum_pi_squared: Array = None
    greedy_scores: Array = None


@struct.dataclass
class ModelState:
    """One trained network: leaves the optimizer moves, leaves it does not (frozen layers, a base under adapters), moments."""

    trainable: Params
    frozen: Params
    opt_state: Any


@struct.dataclass
class AlgorithmState:
    """What an algorithm remembers between steps: KL coefficients of the two places and room for a moving baseline."""

    kl_coef_reward: Array
    kl_coef_loss: Array
    baseline: Array


@struct.dataclass
class Counters:
    """Counts that survive a resume: bad steps in all and in a row, updates skipped, and response tokens trained."""

    bad_steps: Array
    bad_in_a_row: Array
    skipped_updates: Array
    broken_reward_batches: Array


@struct.dataclass
class TrainState:
    """The whole state of a run. What is not in it does not exist after a resume."""

    step: Array
    actor: ModelState
    critic: ModelState | None
    algorithm: AlgorithmState
    counters: Counters
