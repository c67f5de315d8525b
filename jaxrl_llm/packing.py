"""Trajectories to training rows: each row is one left-padded prompt and one right-padded response.

With `use_remove_padding` a batch is cut to the bucket of its longest prompt and longest response, so that a handful of
widths serves all batches.

Left out on purpose: several trajectories per row and a prompt stored once per group.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.records import Batch, Rollout


def buckets(longest: int, smallest: int = 16) -> tuple[int, ...]:
    """Widths that batches are cut to: `longest` and its halves down to `smallest`, ascending."""
    widths = [longest]
    while widths[-1] % 2 == 0 and widths[-1] // 2 >= smallest:
        widths.append(widths[-1] // 2)
    return tuple(sorted(widths))


def bucket(length: int, widths: Sequence[int]) -> int:
    """The smallest width that holds `length`; `ConfigError` when none does."""
    for width in widths:
        if length <= width:
            return width
    raise ConfigError(
        f"a batch of length {length} does not fit: got widths {list(widths)}, need one of at least {length}"
    )


def widths(
    rollout: Rollout, prompt_buckets: Sequence[int], response_buckets: Sequence[int], cut: bool
) -> tuple[int, int]:
    """Prompt and response width of the training rows: the largest buckets, or with `cut` those of the longest row."""
    if not cut:
        return prompt_buckets[-1], response_buckets[-1]
    longest_prompt = int(rollout.prompt_lengths.max())
    longest_response = max(1, int(rollout.response_lengths.max()))
    return bucket(longest_prompt, prompt_buckets), bucket(longest_response, response_buckets)


def make_rows(
    rollout: Rollout, scores: np.ndarray, valid: np.ndarray, prompt_width: int, response_width: int
) -> Batch:
    """Host arrays of a `Batch`: `B = P * G` rows of `prompt_width + response_width` columns.

    `scores [B]` are rewards of whole responses, `valid [B]` says which rows may enter statistics and the loss; an invalid row
    keeps its tokens but trains nothing. A width that would cut tokens off raises `ConfigError`.
    """
    longest = int(rollout.prompt_lengths.max()), int(rollout.response_lengths.max())
    if longest[0] > prompt_width or longest[1] > response_width:
        raise ConfigError(
            f"training rows: got widths {prompt_width} and {response_width}, need a prompt width of at least {longest[0]} and "
            f"a response width of at least {longest[1]}; take them from `widths`"
        )
    group = rollout.response_tokens.shape[0] // rollout.prompt_tokens.shape[0]
    prompts = _fit_left(rollout.prompt_tokens, prompt_width)
    tokens = np.concatenate(
        [np.repeat(prompts, group, axis=0), _fit_right(rollout.response_tokens, response_width)],
        axis=1,
    )
    prompt_lengths = np.repeat(rollout.prompt_lengths, group)
    columns = np.arange(tokens.shape[1])[None, :]
    first = (prompt_width - prompt_lengths)[:, None]
    last = prompt_width + rollout.response_lengths[:, None]
    real = (columns >= first) & (columns < last)
    return Batch(
        tokens=np.where(real, tokens, 0).astype(np.int32),
        segments=real.astype(np.int32),
        positions=np.where(real, columns - first, 0).astype(np.int32),
        mask=_fit_right(rollout.loss_mask, response_width) & valid[:, None],
        sampler_logprobs=_fit_right(rollout.sampler_logprobs, response_width).astype(np.float32),
        scores=np.where(valid, scores, 0.0).astype(np.float32),
        group_ids=np.repeat(np.arange(rollout.prompt_tokens.shape[0], dtype=np.int32), group),
        valid=valid.astype(bool),
    )


def _fit_left(tokens: np.ndarray, width: int) -> np.ndarray:
    """Cut or pad columns on the left (prompts are right-aligned)."""
    have = tokens.shape[1]
    return (
        tokens[:, have - width :] if have >= width else np.pad(tokens, ((0, 0), (width - have, 0)))
    )


def _fit_right(values: np.ndarray, width: int) -> np.ndarray:
    """Cut or pad columns on the right."""
    have = values.shape[1]
    return values[:, :width] if have >= width else np.pad(values, ((0, 0), (0, width - have)))
