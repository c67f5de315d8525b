"""A tiny engine with its prompts, how rollouts are compared, and the plain forward pass they are compared with."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.models import families, heads, transformer
from jaxrl_llm.records import Prompt
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.engine import generate, make_engine
from jaxrl_llm.rollout.sampling import make_sampling
from tests import tiny

CONFIG = replace(tiny.model(), vocab_size=150)
WIDTH, RESPONSE, CHUNK, N = 8, 10, 3, 2
NEVER = (-1, -1)
FEW = {"max_num_seqs": 4}
"""Four slots for twelve samples: refilled, and other shapes than the rest, so tokens may differ at near ties."""
GREEDY, PLAIN = make_sampling(greedy=True), make_sampling(1.0)
IDS = ((5, 0, 6), (0, 9), (140, 4, 5, 6, 7), (8,), (3, 3, 3, 3, 3, 3, 3, 3), (149, 0))


def text(ids):
    """One letter per token; id 2 is special and shows nothing."""
    return "".join(chr(0x4E00 + token) for token in ids if token != 2)


def prompt(number, ids):
    return Prompt(tuple(ids), "", (), "", "tiny", {}, number, f"rows:{number + 1}")


PROMPTS = [prompt(10 + number, ids) for number, ids in enumerate(IDS)]


def build(mesh, **changes):
    settings = {
        "dtype": jnp.float32, "stop_ids": NEVER, "decode_text": text, "chunk": CHUNK,
        "prompt_length": WIDTH, "response_length": RESPONSE,
    }  # fmt: skip
    return make_engine(CONFIG, mesh, **(settings | changes))


def weights(mesh):
    """Large enough that neither is the model almost uniform nor a sample almost greedy."""
    values = transformer.init(CONFIG, jax.random.key(3))
    values = jax.tree.map(lambda x: x * 8.0 if x.ndim > 1 else x, values)
    placed = sharding.param_shardings(mesh, families.param_dims(CONFIG), values)
    return jax.device_put(values, placed)


def rollout(engine, params, settings=PLAIN, prompts=PROMPTS, n=N, slots=6, **more):
    return with_stats(engine, params, settings, prompts, n, slots, **more)[0]


def with_stats(engine, params, settings=PLAIN, prompts=PROMPTS, n=N, slots=6, **more):
    stream = {"seed": 1, "step": 7, "purpose": sampling.TRAIN} | more
    return generate(engine, params, prompts, n=n, sampling=settings, slots=slots, **stream)


@jax.jit
def forward(params, tokens):
    """Logits of whole rows `[B T]` that begin at column 0; what comes behind a column cannot change it."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = transformer.apply(CONFIG, params, tokens, columns, jnp.ones_like(tokens))
    return heads.logits(CONFIG, params, hidden)


def response_logits(params, result, prompts=PROMPTS):
    """Logits `[B Tr V]` before every response token, from one forward pass over prompt and response."""
    group = len(result.response_tokens) // len(prompts)
    rows = np.zeros((len(prompts) * group, WIDTH + RESPONSE), np.int32)
    starts = np.repeat([len(one.ids) for one in prompts], group)
    for row, first in enumerate(starts):
        rows[row, :first] = prompts[row // group].ids
        rows[row, first : first + RESPONSE] = result.response_tokens[row]
    logits = np.asarray(forward(params, rows), np.float64)
    return np.stack([logits[row, n - 1 : n - 1 + RESPONSE] for row, n in enumerate(starts)])


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def same_up_to_ties(params, one, other, settings=PLAIN, prompts=PROMPTS):
    """Equal tokens up to a position whose uniform number lies within 1e-4 of an edge (greedy: gap of the best two below
    1e-4), fewer than 0.5 % such positions or a single one, log-probs of equal prefixes within 1e-5."""
    logits, group, ties = (
        response_logits(params, one, prompts),
        len(one.response_tokens) // len(prompts),
        0,
    )
    for row in range(len(one.response_tokens)):
        a, b = one.response_tokens[row], other.response_tokens[row]
        equal = np.cumprod(a == b).astype(bool)
        np.testing.assert_allclose(
            one.sampler_logprobs[row][equal], other.sampler_logprobs[row][equal], atol=1e-5, rtol=0
        )
        if equal.all():
            continue
        ties += 1
        at = int(np.argmin(equal))
        if settings.greedy:
            best = np.sort(logits[row, at])[-2:]
            assert best[1] - best[0] < 1e-4
            continue
        key = sampling.row_keys(
            *map(np.uint32, (1, 7, sampling.TRAIN)),
            np.int32([prompts[row // group].prompt_id]),
            np.int32([row % group]),
        )
        first, second = np.asarray(sampling.uniforms(key, jnp.int32(at)))[0]
        probs = np.exp(log_softmax(logits[row, at] / float(settings.temperature)))
        grid = np.pad(probs, (0, 106)).reshape(2, 128)
        edges = np.cumsum(grid.sum(axis=0))
        inner = np.cumsum(grid, axis=0) / grid.sum(axis=0)
        assert min(np.abs(first - edges).min(), np.abs(second - inner).min()) < 1e-4
    assert ties <= max(1, 0.005 * one.response_tokens.size)


def identical(one, other, rows=slice(None), order=slice(None)):
    for name in ("response_tokens", "sampler_logprobs", "response_lengths", "end_reason"):
        np.testing.assert_array_equal(getattr(one, name)[rows], getattr(other, name)[order])
