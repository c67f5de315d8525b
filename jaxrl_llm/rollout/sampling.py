"""Logits to tokens: temperature, top-k, top-p and inverse-CDF sampling, all parameters traced.

A token is drawn with two uniform numbers: one picks a block of the vocabulary from the block sums, the other the token
inside it. A single float32 uniform could not reach tokens of probability 1e-7 fairly; noise over the whole vocabulary (Gumbel)
costs V random numbers per token. Where a tail token shares its block with a likely one, its probability is still rounded to a
multiple of 2^-24.

Left out on purpose: penalties, beam search, and filters that avoid the full sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

BLOCK = 128
"""Tokens per block of the two-level inverse CDF."""


class Sampling(NamedTuple):
    """Sampling parameters as traced scalars: `top_k = 0` and `top_p = 1` do not filter; `greedy` ignores all but the argmax."""

    temperature: Array
    top_k: Array
    top_p: Array
    greedy: Array


def make_sampling(
    temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, greedy: bool = False
) -> Sampling:
    """Sampling parameters from settings. Greedy scores at temperature 1 and does not filter."""
    if greedy:
        temperature, top_k, top_p = 1.0, None, 1.0
    return Sampling(
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k or 0),
        top_p=jnp.float32(top_p),
        greedy=jnp.bool_(greedy),
    )


def keep_top(logprobs: Array, top_k: Array, top_p: Array) -> Array:
    """Which tokens survive top-k, then top-p on what top-k left: `[B V]` log-probs -> `[B V]` booleans.

    Top-p keeps the smallest set of most likely tokens whose renormalised probability reaches `top_p` (Holtzman et al. 2020);
    the most likely token always stays. Equal probabilities are ordered by token id.
    """
    order = jnp.argsort(-logprobs, axis=-1, stable=True)
    ranks = jnp.argsort(order, axis=-1)
    count = jnp.where(top_k > 0, top_k, logprobs.shape[-1])
    sorted_probs = jnp.exp(jnp.take_along_axis(logprobs, order, axis=-1))
    inside = jnp.arange(logprobs.shape[-1]) < count
    sorted_probs = jnp.where(inside, sorted_probs, 0.0)
    sorted_probs = sorted_probs / jnp.sum(sorted_probs, axis=-1, keepdims=True)
    before = jnp.pad(jnp.cumsum(sorted_probs, axis=-1)[..., :-1], ((0, 0), (1, 0)))
    kept = jnp.sum(inside & ((before < top_p) | (top_p >= 1.0)), axis=-1, keepdims=True)
    return ranks < jnp.maximum(kept, 1)


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


def inverse_cdf(probs: Array, uniforms: Array) -> Array:
    """Draw a token per row: `probs [B V]` (need not sum to one), `uniforms [B 2]` in [0, 1) -> ids `[B]`.

    A token of probability 0 is never returned as long as the row has a positive one; a row without gives some id in range.
    """
    batch, vocabulary = probs.shape
    blocks = -(-vocabulary // BLOCK)
    padded = jnp.pad(probs, ((0, 0), (0, blocks * BLOCK - vocabulary)))
    grid = padded.reshape(batch, blocks, BLOCK)
    block = _pick(jnp.sum(grid, axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(grid, block[:, None, None], axis=1)[:, 0]
    return jnp.minimum(block * BLOCK + _pick(inside, uniforms[:, 1]), vocabulary - 1)


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
    logits = logits.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    logprobs = jax.nn.log_softmax(logits / params.temperature, axis=-1)
    filtering = (params.top_k > 0) | (params.top_p < 1.0)

    def plain(logprobs: Array) -> tuple[Array, Array]:
        return jnp.exp(logprobs), jnp.zeros(logprobs.shape[:1], jnp.float32)

    def filtered(logprobs: Array) -> tuple[Array, Array]:
        probs = jnp.where(keep_top(logprobs, params.top_k, params.top_p), jnp.exp(logprobs), 0.0)
        return probs, jnp.log(jnp.sum(probs, axis=-1))

    probs, log_mass = jax.lax.cond(filtering, filtered, plain, logprobs)
    drawn = inverse_cdf(probs, uniforms)
    tokens = jnp.where(params.greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens, chosen, chosen - log_mass, finite)


TRAIN, VALIDATE, BASELINE, SHUFFLE = range(4)
"""Purposes of random numbers: each has its own stream."""


def row_keys(seed: Array, step: Array, purpose: Array, prompt_ids: Array, samples: Array) -> Array:
    """One key per row `[B]`, from the seed, the step, the purpose, the prompt's id and the sample's number in its group."""
    base = jax.random.key(seed)
    base = jax.random.fold_in(jax.random.fold_in(base, step), purpose)

    def derive(prompt: Array, number: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(base, prompt), number)

    return jax.vmap(derive)(prompt_ids, samples)


def uniforms(keys: Array, position: Array) -> Array:
    """The two uniform numbers `[B 2]` of every row at one response position: multiples of 2^-24 in [0, 1).

    `jax.random.uniform` moves in steps of 2^-23 and steps over one token of probability 1e-7 in six.
    """
    bits = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, position), (2,)))(keys)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
