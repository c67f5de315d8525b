"""Logits to tokens: temperature, top-k, top-p and inverse-CDF sampling, all parameters traced.

A token is drawn with two uniform numbers. The vocabulary is a grid of rows of `COLUMNS` tokens: one number picks a column from
the column sums, the other the token inside it. A single float32 uniform could not reach tokens of probability 1e-7 fairly; noise
over the whole vocabulary (Gumbel) costs V random numbers per token. Where a tail token shares its column with a likely one, its
probability is still rounded to a multiple of 2^-24.

The filters sort nothing: 30 sums over the vocabulary find the least probability that stays.

Left out on purpose: penalties and beam search.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

COLUMNS = 128
"""Columns of the two-level inverse CDF: token `t` stands in column `t % COLUMNS`. Sums over rows run along vector lanes."""

TOP_BIT = 29
"""The highest bit that is set in a float32 of at most 1."""


class Sampling(NamedTuple):
    """Sampling parameters as traced scalars: `top_k = 0` and `top_p = 1` do not filter; `greedy` ignores all but the argmax."""

    temperature: Any
    top_k: Any
    top_p: Any
    greedy: Any


def make_sampling(
    temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, greedy: bool = False
) -> Sampling:
    """Sampling parameters from settings, as host scalars. Greedy scores at temperature 1 and does not filter."""
    if greedy:
        temperature, top_k, top_p = 1.0, None, 1.0
    return Sampling(
        temperature=np.float32(temperature),
        top_k=np.int32(top_k or 0),
        top_p=np.float32(top_p),
        greedy=np.bool_(greedy),
    )


def filters(sampling: Sampling) -> Any:
    """Whether top-k or top-p leave anything out."""
    return (sampling.top_k > 0) | (sampling.top_p < 1)


# Which tokens stay ---------------------------------------------------------------------------------------------------


def _row_sums(values: Array) -> Array:
    """Sums over the vocabulary, `[B V] -> [B]`, always in the same order: a sum over more non-negative numbers is never smaller."""
    return jnp.sum(jnp.sum(_grid(values, 0.0), axis=1), axis=-1)


def _first(probs: Array, counted: Array, need: Array) -> Array:
    """The most likely tokens, ties by id, until `counted [B V]` sums to `need [B]` (greater than 0): booleans `[B V]`.

    `probs [B V]` are in [0, 1], whose bit patterns are ordered like the numbers: the least probability that stays is found bit
    by bit, one sum each, instead of by sorting.
    """

    def decide(index: Array, bits: Array) -> Array:
        trial = bits | (jnp.int32(1) << (TOP_BIT - index))
        least = jax.lax.bitcast_convert_type(trial, jnp.float32)
        enough = _row_sums(jnp.where(probs >= least[:, None], counted, 0.0)) >= need
        return jnp.where(enough, trial, bits)

    start = jnp.zeros(need.shape, jnp.int32)
    bits = jax.lax.fori_loop(0, TOP_BIT + 1, decide, start)
    least = jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
    above, tied = probs > least, probs == least

    def by_id() -> Array:
        missing = need - _row_sums(jnp.where(above, counted, 0.0))
        ids, top = jnp.arange(probs.shape[1]), probs.shape[1].bit_length() - 1

        def decide_last(index: Array, last: Array) -> Array:
            trial = last | (jnp.int32(1) << (top - index))
            before = _row_sums(jnp.where(tied & (ids < trial[:, None]), counted, 0.0))
            return jnp.where(before < missing, trial, last)

        last = jax.lax.fori_loop(0, top + 1, decide_last, start)
        return above | (tied & (ids <= last[:, None]))

    several = jnp.any(jnp.sum(tied, axis=-1) > 1)
    return jax.lax.cond(several, by_id, lambda: above | tied)


def keep_top(probs: Array, top_k: Array, top_p: Array) -> Array:
    """Which tokens survive top-k, then top-p on what top-k left: `[B V]` weights relative to the largest -> `[B V]` booleans.

    Top-p keeps the smallest set of most likely tokens whose renormalised probability reaches `top_p` (Holtzman et al. 2020);
    the most likely token always stays. Equal probabilities are ordered by token id.
    """
    batch, vocabulary = probs.shape
    everything = jnp.ones(probs.shape, bool)

    def likely() -> Array:
        count = jnp.minimum(top_k, vocabulary).astype(jnp.float32)
        return _first(probs, jnp.ones_like(probs), jnp.broadcast_to(count, (batch,)))

    def nucleus() -> Array:
        left = jnp.where(inside, probs, 0.0)
        need = jnp.maximum(top_p * _row_sums(left), jnp.finfo(jnp.float32).tiny)
        return _first(probs, left, need)

    inside = jax.lax.cond(top_k > 0, likely, lambda: everything)
    return inside & jax.lax.cond(top_p < 1.0, nucleus, lambda: everything)


# Drawing -------------------------------------------------------------------------------------------------------------


def _pick(weights: Array, uniform: Array) -> Array:
    """Index along the last axis with probability proportional to `weights`; never one of weight 0 unless all are.

    Parallel prefix sums are not monotone in the last bit, so an edge alone does not say that an index has weight.
    """
    edges = jnp.cumsum(weights, axis=-1)
    target = uniform[..., None] * edges[..., -1:]
    positive = weights > 0
    above = positive & (edges > target)
    last_positive = weights.shape[-1] - 1 - jnp.argmax(jnp.flip(positive, axis=-1), axis=-1)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last_positive)
    return index.astype(jnp.int32)


def _grid(values: Array, fill: float) -> Array:
    """`[B V]` as rows of columns `[B V/C C]`, padded with `fill`.

    Never pad one array with two values in a program: sharded over the vocabulary, XLA gives both the same padding.
    """
    batch, vocabulary = values.shape
    missing = -vocabulary % COLUMNS
    padded = jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill) if missing else values
    return padded.reshape(batch, -1, COLUMNS)


def _top(grid: Array) -> Array:
    return jnp.max(jnp.max(grid, axis=1), axis=-1)


def _column_sums(grid: Array, top: Array) -> Array:
    return jnp.sum(jnp.exp(grid - top[:, None, None]), axis=1)


def _draw(grid: Array, top: Array, sums: Array, uniforms: Array) -> Array:
    """Ids `[B]` from log-weights on the grid; the weights of the chosen column alone are computed a second time."""
    column = _pick(sums, uniforms[:, 0])
    inside = jnp.take_along_axis(grid, column[:, None, None], axis=2)[:, :, 0]
    return _pick(jnp.exp(inside - top[:, None]), uniforms[:, 1]) * COLUMNS + column


def inverse_cdf(log_weights: Array, uniforms: Array) -> Array:
    """Draw a token per row: `log_weights [B V]` (need not be normalised), `uniforms [B 2]` in [0, 1) -> ids `[B]`.

    A token of weight 0 (`-inf`) is never returned as long as the row has another; a row without gives some id in range.
    """
    grid = _grid(log_weights, -jnp.inf)
    top = _top(grid)
    drawn = _draw(grid, top, _column_sums(grid, top), uniforms)
    return jnp.minimum(drawn, log_weights.shape[1] - 1)


class Sampled(NamedTuple):
    """One token per row: ids `[B]`; `logprobs [B]` of the unfiltered tempered distribution; `filtered_logprobs [B]` of the
    distribution sampled from; `finite [B]`, whether the row's logits were numbers."""

    tokens: Array
    logprobs: Array
    filtered_logprobs: Array
    finite: Array


def sample(logits: Array, uniforms: Array, params: Sampling) -> Sampled:
    """Sample from `softmax(logits / temperature)` after top-k and top-p: `logits [B V]`, `uniforms [B 2]`.

    A row with a non-finite logit (NaN or infinite) is flagged instead of sampled from silently; its token means nothing.
    """
    vocabulary = logits.shape[1]
    scaled = logits.astype(jnp.float32) / params.temperature
    grid = _grid(scaled, -jnp.inf)
    top = _top(grid)
    sums = _column_sums(grid, top)
    total = jnp.sum(sums, axis=-1)
    infinite = jnp.sum(jnp.sum(grid == -jnp.inf, axis=1), axis=-1)
    finite = jnp.isfinite(total) & (infinite == grid[0].size - vocabulary)

    def plain() -> tuple[Array, Array]:
        return _draw(grid, top, sums, uniforms), total

    def filtered() -> tuple[Array, Array]:
        keep = keep_top(jnp.exp(scaled - top[:, None]), params.top_k, params.top_p)
        left = _grid(jnp.where(keep, scaled, -jnp.inf), -jnp.inf)
        left_sums = _column_sums(left, top)
        return _draw(left, top, left_sums, uniforms), jnp.sum(left_sums, axis=-1)

    def greedy() -> tuple[Array, Array]:
        ids = jnp.arange(grid[0].size, dtype=jnp.int32).reshape(grid.shape[1:])
        best = jnp.where(grid == top[:, None, None], ids, vocabulary)
        return jnp.min(jnp.min(best, axis=1), axis=-1), total

    which = jnp.where(params.greedy, 2, filters(params).astype(jnp.int32))
    tokens, kept = jax.lax.switch(which, (plain, filtered, greedy))
    tokens = jnp.minimum(tokens, vocabulary - 1)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - top
    return Sampled(tokens, chosen - jnp.log(total), chosen - jnp.log(kept), finite)


TRAIN, VALIDATE, BASELINE, SHUFFLE = range(4)
"""Purposes of random numbers: each has its own stream."""


def row_keys(seed: Array, step: Array, purpose: Array, prompt_ids: Array, samples: Array) -> Array:
    """One key per row `[B]`, from the seed, the step, the purpose, the prompt's id and the sample's number in its group."""
    base = jax.random.key(seed)
    base = jax.random.fold_in(jax.random.fold_in(base, step), purpose)

    def derive(prompt: Array, number: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(base, prompt), number)

    return jax.vmap(derive)(prompt_ids, samples)


def uniforms(keys: Array, positions: Array) -> Array:
    """The two uniform numbers `[B 2]` of every row at its response position (`[B]`, or one for all): multiples of 2^-24 in [0, 1).

    `jax.random.uniform` moves in steps of 2^-23 and steps over one token of probability 1e-7 in six.
    """

    def bits(key: Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, position), (2,))

    drawn = jax.vmap(bits)(keys, jnp.broadcast_to(positions, keys.shape))
    return (drawn >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
