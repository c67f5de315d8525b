from dataclasses import replace

import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models import families
from jaxrl_llm.models.families import ModelConfig, RopeScaling, from_hf, to_hf
from tests.golden.models import tiny

LLAMA = tiny.CASES["llama"]


@pytest.mark.parametrize("case", tiny.CASES)
def test_round_trip(case):
    config = from_hf(tiny.CASES[case])
    assert from_hf(to_hf(config)) == config
    assert hash(config) == hash(replace(config))


def test_both_generations_of_rotary_fields_are_read():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": tiny.LLAMA3}
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new |= {"rope_parameters": tiny.LLAMA3 | {"rope_theta": 5e5}}
    assert from_hf(old) == from_hf(new)
    assert from_hf(new).rope_theta == 5e5
    assert from_hf(new).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}).rope_scaling == (
        RopeScaling("linear", 4.0)
    )


def test_deepseek_llm_is_a_llama():
    config = from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": 100000,
            "eos_token_id": 100001,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 102400,
        }
    )
    assert config.head_size == 128 and config.eos_ids == (100001,)
    assert families.parameter_count(config) == 6_910_365_696


def test_what_a_family_fixes():
    assert from_hf(tiny.CASES["qwen2_tied"]).qkv_bias
    assert not from_hf(tiny.CASES["qwen2_tied"]).output_bias
    assert from_hf(tiny.CASES["qwen3"]).qk_norm
    assert from_hf(tiny.CASES["llama_biased_linear_tied"]).output_bias
    absent = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert from_hf(absent).num_kv_heads == LLAMA["num_attention_heads"]
    assert from_hf(LLAMA | {"eos_token_id": [5, 6]}).eos_ids == (5, 6)
    assert from_hf(LLAMA | {"eos_token_id": None, "bos_token_id": None}).eos_ids == ()


REFUSED = [
    ("hidden_act", {"hidden_act": "gelu"}),
    ("rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("rope_type", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}),
    ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
    ("num_local_experts", {"num_local_experts": 8}),
    ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    ("attention_dropout", {"attention_dropout": 0.1}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("head_dim", {"head_dim": 7}),
    ("head_dim", {"head_dim": None, "hidden_size": 25}),
    ("hidden_size", {"hidden_size": "24"}),
    ("vocab_size", {"vocab_size": True}),
    ("rms_norm_eps", {"rms_norm_eps": None}),
    ("rope_theta", {"rope_theta": 0}),
    ("mlp_bias", {"model_type": "qwen3", "mlp_bias": True}),
    ("attention_bias", {"model_type": "mistral", "attention_bias": True}),
    ("layer_types", {"model_type": "qwen3", "layer_types": ["linear_attention"] * 3}),
    ("layer_types", {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}),
    ("layer_types", {"layer_types": ["sliding_attention"] * 3}),
    ("sliding_window", {"model_type": "mistral", "sliding_window": 0}),
]


@pytest.mark.parametrize(("field", "changes"), REFUSED)
def test_refused_by_name(field, changes):
    base = tiny.CASES["qwen2_window"] if changes.get("model_type") == "qwen2" else LLAMA
    with pytest.raises(ConfigError, match=field) as caught:
        from_hf(base | changes)
    assert len(caught.value.problems) == 1
    assert caught.value.exit_code == 64


def test_all_problems_together_and_unknown_families_by_name():
    with pytest.raises(ConfigError) as caught:
        from_hf(
            LLAMA
            | {"hidden_act": "gelu", "rope_scaling": {"type": "yarn"}, "num_key_value_heads": 3}
        )
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match=r"model_type: got 'gemma3', need one of llama, qwen2"):
        from_hf(LLAMA | {"model_type": "gemma3"})
    with pytest.raises(ConfigError) as caught:
        from_hf({"model_type": "llama"})
    assert len(caught.value.problems) == 7


ODD = (
    True,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    [1, "x"],
    [[1]],
    {"a": []},
    {"rope_type": 5},
    10**30,
)
"""Values that a damaged or foreign `config.json` may hold anywhere."""


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("field", sorted(families.SIZES | families.NEUTRAL | {
    "rope_scaling": 0, "rope_parameters": 0, "rope_theta": 0, "rms_norm_eps": 0, "layer_types": 0,
    "eos_token_id": 0, "bos_token_id": 0, "sliding_window": 0, "model_type": 0,
}))  # fmt: skip
def test_odd_values_are_refused_or_harmless_and_never_a_traceback(family, field):
    refused = 0
    for value in ODD:
        try:
            hash(from_hf(LLAMA | {"model_type": family} | {field: value}))
        except ConfigError as error:
            refused += any(field in problem for problem in error.problems)
    ignored = field == "sliding_window" and family != "mistral"
    assert refused >= (0 if ignored else 4)


def test_sizes_beyond_any_array_and_files_without_an_object():
    with pytest.raises(ConfigError, match=r"hidden_size: got 2147483648, need a positive integer"):
        from_hf(LLAMA | {"hidden_size": 2**31})
    with pytest.raises(ConfigError, match="got a list, need an object"):
        from_hf([])  # type: ignore[arg-type]


def test_windows_that_need_not_be_refused():
    qwen = tiny.CASES["qwen2_window"]
    assert from_hf(qwen).sliding_window == 7
    assert from_hf(qwen | {"max_window_layers": 3}).sliding_window is None
    assert from_hf(qwen | {"use_sliding_window": False}).sliding_window is None
    assert from_hf(qwen | {"layer_types": ["sliding_attention"] * 3}).sliding_window == 7
    assert from_hf(qwen | {"layer_types": ["full_attention"] * 3}).sliding_window is None
    mistral = tiny.CASES["mistral_window"]
    assert from_hf(mistral | {"sliding_window": None}).sliding_window is None
    del (absent := dict(mistral))["sliding_window"]
    assert from_hf(absent).sliding_window == 4096


def test_to_hf_names_what_a_family_cannot_express():
    config = replace(from_hf(LLAMA), qk_norm=True, sliding_window=3)
    with pytest.raises(ConfigError) as caught:
        to_hf(config)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "qk_norm",
        "sliding_window",
    ]


def test_param_dims_by_hand():
    config = ModelConfig("llama", 5, 2, 6, 4, 2, 8, 7)
    dims = families.param_dims(config)
    assert dims["embed"]["kernel"] == "VD" and dims["head"]["kernel"] == "DV"
    assert dims["layers"]["q"] == {"kernel": "LDNH"}
    assert dims["layers"]["k"] == dims["layers"]["v"] == {"kernel": "LDKH"}
    assert dims["layers"]["o"] == {"kernel": "LNHD"}
    assert dims["layers"]["down"] == {"kernel": "LFD"}
    attention = 6 * 4 * 8 * 2 + 6 * 2 * 8 * 2
    by_hand = 2 * 5 * 6 + 2 * (attention + 3 * 6 * 7 + 2 * 6) + 6
    assert families.parameter_count(config) == by_hand
    assert families.parameter_count(replace(config, tie_embeddings=True)) == by_hand - 30


def test_token_ids_outside_the_vocabulary():
    config = from_hf(LLAMA)
    families.check_tokens(config, np.array([[0, 36]]))
    families.check_tokens(config, np.zeros((0, 4), int))
    for bad in (37, -1):
        with pytest.raises(DataError, match=rf"prompts\[1, 0\]: got token id {bad} \(1 such"):
            families.check_tokens(config, np.array([[0, 1], [bad, 2]]), "prompts")
