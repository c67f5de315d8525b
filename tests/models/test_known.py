"""Facts of well-known models, against figures that their makers publish."""

import pytest

from jaxrl_llm.models import families
from jaxrl_llm.models.known import KNOWN, known_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-ai/deepseek-llm-7b-chat", 6.91),
        ("Qwen/Qwen2.5-0.5B", 0.494),
        ("Qwen/Qwen2.5-7B-Instruct", 7.616),
        ("Qwen/Qwen2.5-72B", 72.706),
        ("Qwen/Qwen3-8B", 8.191),
        ("Qwen/Qwen3-0.6B-Base", 0.596),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030),
        ("meta-llama/Llama-3.2-1B", 1.236),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.554),
        ("mistralai/Mistral-7B-v0.1", 7.242),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.711),
    ],
)
def test_parameter_counts(name, billions):
    assert families.parameter_count(known_model(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_the_reference_model():
    model = known_model("deepseek-ai/deepseek-llm-7b-chat")
    assert (model.num_layers, model.width, model.hidden) == (30, 4096, 11008)
    assert (model.num_heads, model.num_kv_heads, model.head_size) == (32, 32, 128)
    assert (model.vocab_size, model.max_position, model.tie_embeddings) == (102400, 4096, False)
    assert (model.rope_theta, model.rms_norm_eps) == (10000.0, 1e-6)
    assert model.eos_ids == (100001,)


def test_what_sets_families_apart():
    assert known_model("Qwen/Qwen2.5-3B").qkv_bias and known_model("Qwen/Qwen3-4B").qk_norm
    assert known_model("mistralai/Mistral-7B-v0.1").sliding_window == 4096
    assert known_model("mistralai/Mistral-7B-v0.3").sliding_window is None
    assert known_model("meta-llama/Meta-Llama-3-8B").rope_scaling is None
    assert known_model("meta-llama/Llama-3.2-3B").rope_scaling.factor == 32.0
    assert known_model("meta-llama/Llama-3.2-3B").head_size == 128


def test_every_entry_is_readable_and_others_are_unknown():
    assert all(known_model(name) is not None for name in KNOWN)
    assert known_model("deepseek-ai/deepseek-llm-7b-Chat") is None
