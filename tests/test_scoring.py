"""Scoring packed rows: log-probs by hand, any layout alike, no buffer of logits, agreement with the sampler."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import packing, scoring
from jaxrl_llm.models import heads, transformer
from jaxrl_llm.records import Prompt
from jaxrl_llm.rollout import sampling
from jaxrl_llm.rollout.engine import generate, make_engine
from tests import tiny
from tests.algorithms.golden import load


def plain_logits(params, rollout, temperature=1.0):
    """Logits `[B Tr V]` of unpacked rows in float64."""
    tokens, positions, segments = map(jnp.asarray, tiny.padded(rollout))
    hidden = transformer.apply(tiny.model(), params, tokens, positions, segments)
    width = rollout.response_tokens.shape[1]
    logits = heads.logits(tiny.model(), params, hidden[:, -width - 1 : -1])
    return np.asarray(logits, np.float64) / temperature


LAYOUTS = {
    "shared": {},
    "split": {"budget": 16},
    "two mini-batches": {"mini_prompts": 2, "micro_rows": 3},
    "own prompts": {"share": False, "budget": 40},
    "padded": {"share": False, "pad": True, "micro_rows": 5},
}


@pytest.mark.parametrize("rows", LAYOUTS)
def test_logprobs_entropy_and_squares_equal_a_plain_softmax(rows):
    mesh = tiny.mesh()
    rollout, batch = tiny.ragged()
    params = tiny.params(mesh)
    score = scoring.make_score(tiny.network(mesh), 12, 7, full=True)
    scores = score(params, tiny.packed(rollout, mesh, **LAYOUTS[rows]), np.float32(0.7))
    logits = plain_logits(params, rollout, 0.7)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logprobs, rollout.response_tokens[..., None], -1)[..., 0]
    probs = np.exp(logprobs)
    real = rollout.response_mask
    for got, want in (
        (scores.logprobs, picked),
        (scores.entropy, -(probs * logprobs).sum(-1)),
        (scores.sum_pi_squared, (probs**2).sum(-1)),
    ):
        np.testing.assert_allclose(np.asarray(got)[real], want[real], rtol=2e-5, atol=2e-5)
        assert not np.asarray(got)[~real].any()
    assert real[5].any() and not batch.mask[5].any(), "untrained tokens are scored too"


def test_scores_and_values_do_not_depend_on_devices():
    rollout, _ = tiny.ragged(groups=8)
    one, many = tiny.mesh(), tiny.mesh(data=2, fsdp=2, tensor=2)
    results = []
    for mesh in (one, many):
        packed = tiny.packed(rollout, mesh, micro_rows=2)
        params = tiny.params(mesh)
        critic = {"trunk": params, "value_head": {"kernel": jnp.linspace(-1.0, 1.0, 16)}}
        network = tiny.network(mesh)
        score, values = scoring.make_score(network, 24, 7), scoring.make_values(network, 24, 7)
        results.append((score(params, packed, np.float32(1.0)).logprobs, values(critic, packed)))
    assert tiny.worst_difference(*results) <= 1e-5


@pytest.mark.parametrize(
    "case", load("entropy_and_logprobs_from_logits"), ids=lambda case: case.name
)
def test_golden_logprobs_and_entropy(case):
    """With an identity head the hidden states are the logits; float64 inputs are computed in float32 here."""
    logits = jnp.asarray(case.inputs["logits"], jnp.float32)
    size = logits.shape[-1]
    config = replace(tiny.model(), vocab_size=size, width=size)
    network = replace(tiny.network(tiny.mesh()), config=config)
    head = {"head": {"kernel": jnp.eye(size)}}
    labels = jnp.asarray(case.inputs["labels"], jnp.int32)

    def entropy_sum(states):
        scores = scoring.token_scores(network, head, states, labels, jnp.float32(1.0))
        return jnp.sum(scores.entropy), scores

    gradient, scores = jax.grad(entropy_sum, has_aux=True)(logits)
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(scores.logprobs, case.array("logprobs"), **close)
    np.testing.assert_allclose(scores.entropy, case.array("entropy"), **close)
    np.testing.assert_allclose(gradient, case.array("grad_logits_of_entropy_sum"), **close)


def head_gradient(hidden, targets, live=None):
    mesh = tiny.mesh()
    network, params = tiny.network(mesh), tiny.params(mesh)

    def loss(params, hidden):
        scores = scoring.token_scores(network, params, hidden, targets, jnp.float32(1.0), live=live)
        return jnp.sum(scores.logprobs + 0.1 * scores.entropy)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden).compile()
    return compiled(params, hidden), compiled.as_text()


def test_chunked_head_equals_the_whole_one_and_its_buffer_never_exists(monkeypatch):
    hidden = jax.random.normal(jax.random.key(1), (3, 64, 16))
    targets = jax.random.randint(jax.random.key(2), (3, 64), 0, 29)
    monkeypatch.setattr(scoring, "HEAD_CHUNKS", 1)
    whole, text_whole = head_gradient(hidden, targets)
    monkeypatch.setattr(scoring, "HEAD_CHUNKS", 4)
    chunked, text = head_gradient(hidden, targets)
    assert tiny.worst_difference(whole, chunked) < 1e-5
    assert "f32[192,29]" in text_whole or "f32[3,64,29]" in text_whole
    for shape in ("[192,29]", "[3,64,29]", "[4,3,16,29]", "[4,48,29]"):
        assert shape not in text
    assert "[48,29]" in text or "[3,16,29]" in text


def test_chunks_behind_the_last_slot_are_skipped_and_give_nothing():
    hidden = jax.random.normal(jax.random.key(1), (2, 64, 16)).at[:, 32:].set(jnp.nan)
    targets = jnp.zeros((2, 64), jnp.int32)
    (_, d_hidden), _ = head_gradient(hidden, targets, live=jnp.int32(30))
    assert np.isfinite(d_hidden[:, :32]).all() and np.any(d_hidden[:, 16:32])
    assert not np.any(d_hidden[:, 32:])
    (_, spoiled), _ = head_gradient(hidden, targets, live=jnp.int32(33))
    assert np.isnan(spoiled).any(), "the next chunk is not skipped"


def test_a_head_chunk_is_bounded_by_elements_and_by_the_row():
    assert scoring.head_chunk(576, 4096, "cpu") == 128
    assert scoring.head_chunk(4608, 49152, "cpu") == 320
    assert scoring.head_chunk(7, 29, "cpu") == 2
    assert scoring.head_chunk(1, 2**30, "cpu") == 1


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(
    ("dtype", "most", "mean"), [("float32", 1e-4, 1e-5), ("bfloat16", 1, 1e-2)]
)
def test_sampler_and_training_forward_agree(dtype, most, mean, temperature):  # R6
    mesh = tiny.mesh()
    params = tiny.params(mesh, scale=2.0)
    engine = make_engine(
        tiny.model(), mesh, dtype=jnp.dtype(dtype), stop_ids=(2,), decode_text=str, chunk=8,
        prompt_length=6, response_length=16,
    )  # fmt: skip
    prompts = [
        Prompt(ids, "", (), "", "tiny", {}, n, f"rows:{n}")
        for n, ids in enumerate([(3, 4, 5), (9, 2, 8, 7, 6), (11,), (3, 4, 5)])
    ]
    drawn, _ = generate(
        engine, params, prompts, n=8, sampling=sampling.make_sampling(temperature), seed=1, step=1,
        purpose=sampling.TRAIN,
    )  # fmt: skip
    batch = packing.make_batch(drawn, np.zeros(32), np.ones(32, bool), 16)
    network = scoring.Network(tiny.model(), mesh, jnp.dtype(dtype))
    score = scoring.make_score(network, 32, 16)
    scores = score(params, tiny.packed(drawn, mesh), np.float32(temperature))
    gap = np.abs(np.asarray(scores.logprobs) - batch.sampler_logprobs)[batch.mask]
    assert gap.size > 200 and gap.max() < most and gap.mean() < mean
    texts = {
        group: {tuple(row) for row in drawn.response_tokens[batch.group_ids == group]}
        for group in (0, 3)
    }
    assert len(texts[0]) > 1 and texts[0] != texts[3], (
        "equal prompts are two groups with their own draws"
    )  # R7, F5
