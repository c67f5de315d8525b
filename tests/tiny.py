"""Small models and batches that several test files share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import learner, packing, scoring, sharding
from jaxrl_llm.checks import MeshShape
from jaxrl_llm.models import families, transformer
from jaxrl_llm.records import AlgorithmState, Batch, Rollout

HF = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model() -> families.ModelConfig:
    """A Llama of two layers and a vocabulary of 29."""
    return families.from_hf(dict(HF))


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1) -> jax.sharding.Mesh:
    """A mesh over as many of the fake devices, from the first."""
    shape = MeshShape(data, fsdp, tensor, context)
    return sharding.make_mesh(shape, jax.devices()[: data * fsdp * tensor * context])


def network(on: jax.sharding.Mesh, remat: str = "dots", **changes: Any) -> scoring.Network:
    """The tiny model on a mesh, float32; with ring attention where rows are split."""
    if on.shape["context"] > 1:
        changes = {"attention": "ring"} | changes
    return scoring.Network(model(), on, jnp.dtype("float32"), remat, **changes)


def params(on: jax.sharding.Mesh, scale: float = 8.0) -> Any:
    """Random parameters, larger than at initialisation so that log-probs differ, placed by the rules."""
    config = model()
    values = transformer.init(config, jax.random.key(3))
    values = jax.tree.map(lambda x: x * scale if x.ndim > 2 else x, values)
    placed = sharding.param_shardings(on, families.param_dims(config), values)
    return jax.device_put(values, placed)


def ragged(
    groups: int = 4, group: int = 3, prompt: int = 5, response: int = 7
) -> tuple[Rollout, Batch]:
    """Host rows of uneven lengths: one without trained tokens, one truncated (full width); values of every kind filled in."""
    random = np.random.default_rng(0)
    rows = groups * group
    prompt_lengths = random.integers(1, prompt + 1, groups)
    lengths = random.integers(1, response, rows)
    lengths[1] = response
    heads = random.integers(3, 29, (groups, prompt)).astype(np.int32)
    heads = np.where(np.arange(prompt) >= (prompt - prompt_lengths)[:, None], heads, 0)
    within = np.arange(response)[None, :] < lengths[:, None]
    tokens = np.where(within, random.integers(3, 29, (rows, response)), 0).astype(np.int32)
    mask = within.copy()
    mask[5] = False

    def noise(scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal((rows, response))).astype(np.float32)

    logprobs = -np.abs(noise(2.0)) - 2.0
    rollout = Rollout(
        prompt_tokens=heads,
        prompt_lengths=prompt_lengths,
        response_tokens=tokens,
        response_lengths=lengths,
        response_mask=within,
        loss_mask=mask,
        sampler_logprobs=logprobs,
        filtered_logprobs=None,
        end_reason=np.zeros(rows, int),
        policy_step=np.zeros(rows, int),
    )
    scores = random.integers(0, 2, rows).astype(np.float32)
    batch = packing.make_batch(rollout, scores, np.ones(rows, bool), response)
    return rollout, batch.replace(
        old_logprobs=logprobs,
        ref_logprobs=logprobs + noise(0.1),
        values=noise(),
        advantages=noise(),
        returns=noise(),
    )


def ragged_batch(**sizes: int) -> Batch:
    """The batch of `ragged`."""
    return ragged(**sizes)[1]


def layout(rollout: Rollout, shards: int = 1, **changes: Any) -> packing.Layout:
    """Rows for a rollout of any size, all of it one mini-batch."""
    prompts = rollout.prompt_tokens.shape[0]
    sizes = {
        "prompts": prompts,
        "mini_prompts": prompts,
        "group": rollout.response_tokens.shape[0] // prompts,
        "prompt_width": rollout.prompt_tokens.shape[1],
        "response_width": rollout.response_tokens.shape[1],
    }
    return packing.make_layout(shards=shards, **(sizes | changes))


def packed(rollout: Rollout, on: jax.sharding.Mesh, **changes: Any) -> packing.Packed:
    """A rollout in packed rows on a mesh."""
    context = on.shape["context"]
    how = {"context": context, "attention": "ring" if context > 1 else "blocked"} | changes
    host, _ = packing.pack(layout(rollout, sharding.shards(on), **how), rollout)
    return scoring.place(host, on)


def padded(rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and segments `[B Tp + Tr]` of unpacked rows: a left-padded prompt, then a right-padded response."""
    width = rollout.prompt_tokens.shape[1]
    group = rollout.response_tokens.shape[0] // rollout.prompt_tokens.shape[0]
    heads = np.repeat(rollout.prompt_tokens, group, axis=0)
    first = width - np.repeat(rollout.prompt_lengths, group)[:, None]
    tokens = np.concatenate([heads, rollout.response_tokens], axis=1)
    columns = np.arange(tokens.shape[1])[None, :]
    real = (columns >= first) & (columns < width + rollout.response_lengths[:, None])
    positions = np.where(real, columns - first, 0)
    return np.where(real, tokens, 0), positions, real.astype(np.int32)


def algorithm() -> AlgorithmState:
    """KL coefficients of 0.1 in both places."""
    return learner.init_algorithm_state(0.1, 0.1)


def worst_difference(a: Any, b: Any) -> float:
    """The largest `max|a - b| / max|a|` over the leaves of two trees."""

    def one(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.max(np.abs(x - y)) / max(np.max(np.abs(x)), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, jax.device_get(a), jax.device_get(b))))
