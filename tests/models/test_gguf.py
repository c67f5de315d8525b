"""GGUF files written small: config, names, the query/key order, block reads, tokenizer, refusals."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jaxrl_llm import tokenizer as tok
from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.models.gguf import open_gguf, tokenizer_files

gguf = pytest.importorskip("gguf")

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|start|>", "<|end|>", "<|eot|>", "<think>", *BYTES, "12", "th", "\u0120th"]
TYPES = [3, 3, 3, 4, *[1] * 256, 1, 1, 1]
MERGES = ["1 2", "t h", "\u0120 th"]
LAYERS, HEADS, KV, SIZE, WIDTH, HIDDEN = 2, 4, 2, 8, 32, 64
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def stored_order(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp keeps them: pair j of a head, parts p = 0, 1, lies at row 2j + p instead of p * H/2 + j."""
    size = matrix.shape[0] // heads
    out = np.empty_like(matrix)
    for head, pair, part in itertools.product(range(heads), range(size // 2), range(2)):
        out[head * size + 2 * pair + part] = matrix[head * size + part * (size // 2) + pair]
    return out


def tensors(rng: np.random.Generator, *, head: bool = False, bias: bool = False) -> dict[str, Any]:
    """Hugging Face tensors of a tiny Llama."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    made = {
        "model.embed_tokens.weight": normal(len(TOKENS), WIDTH),
        "model.norm.weight": normal(WIDTH),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        made[at + "input_layernorm.weight"] = normal(WIDTH)
        made[at + "post_attention_layernorm.weight"] = normal(WIDTH)
        for part, rows in (("q", HEADS), ("k", KV), ("v", KV)):
            made[f"{at}self_attn.{part}_proj.weight"] = normal(rows * SIZE, WIDTH)
            if bias:
                made[f"{at}self_attn.{part}_proj.bias"] = normal(rows * SIZE)
        made[at + "self_attn.o_proj.weight"] = normal(WIDTH, HEADS * SIZE)
        made[at + "mlp.gate_proj.weight"] = normal(HIDDEN, WIDTH)
        made[at + "mlp.up_proj.weight"] = normal(HIDDEN, WIDTH)
        made[at + "mlp.down_proj.weight"] = normal(WIDTH, HIDDEN)
    if head:
        made["lm_head.weight"] = normal(len(TOKENS), WIDTH)
    return made


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def write(
    path: Path,
    made: dict[str, np.ndarray],
    *,
    kind: Any = gguf.GGMLQuantizationType.F32,
    arch: str = "llama",
    pre: str = "smollm",
    model: str = "gpt2",
    tokens: list[str] = TOKENS,
    extra: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SIZE)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            key, value
        )
    for name, values in made.items():
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        heads = {"attn_q": HEADS, "attn_k": KV}.get(name.split(".")[-2])
        data = stored_order(values, heads) if heads else values
        if kind != gguf.GGMLQuantizationType.F32 and data.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def made() -> dict[str, np.ndarray]:
    return tensors(np.random.default_rng(0))


def test_tensors_come_back_under_hugging_face_names(tmp_path: Path) -> None:
    made = tensors(np.random.default_rng(1), head=True, bias=True)
    source = open_gguf(write(tmp_path / "m.gguf", made))
    assert source.names() == sorted(made)
    for name, values in made.items():
        assert source.shape(name) == values.shape
        assert source.read(name).dtype == np.float32
        np.testing.assert_array_equal(source.read(name), values)


def test_blocks_are_the_same_as_slices_of_the_whole(tmp_path: Path, made: dict[str, Any]) -> None:
    source = open_gguf(write(tmp_path / "m.gguf", made))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        whole = source.read(name)
        for block in ((slice(3, 17),), (slice(None), slice(5, 9)), (slice(8, 32, 2), slice(0, 4))):
            np.testing.assert_array_equal(source.read(name, block), whole[block])
    norm = "model.norm.weight"
    np.testing.assert_array_equal(source.read(norm, (slice(2, 5),)), made[norm][2:5])


@pytest.mark.parametrize(("kind", "bits"), [("F16", 11), ("BF16", 8), ("Q8_0", 7), ("Q4_1", 4)])
def test_dequantised_values(
    tmp_path: Path, made: dict[str, np.ndarray], kind: str, bits: int
) -> None:
    source = open_gguf(
        write(tmp_path / "m.gguf", made, kind=getattr(gguf.GGMLQuantizationType, kind))
    )
    for name, values in made.items():
        error = np.abs(source.read(name) - values).max()
        assert error <= np.abs(values).max() * 2.0 ** (1 - bits)
        assert (error > 0) == (values.ndim == 2)
        half = (slice(1, values.shape[0] // 2),)
        np.testing.assert_array_equal(source.read(name, half), source.read(name)[half])


def test_config_by_hand(tmp_path: Path, made: dict[str, np.ndarray]) -> None:
    config = open_gguf(write(tmp_path / "m.gguf", made)).hf_config
    expected = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert expected.items() <= config.items()


def test_config_follows_head_bias_and_linear_scaling(tmp_path: Path) -> None:
    made = tensors(np.random.default_rng(1), head=True, bias=True)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = open_gguf(write(tmp_path / "m.gguf", made, extra=scaling)).hf_config
    assert not config["tie_word_embeddings"] and config["attention_bias"]
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_other_architectures_and_features_are_refused_by_name(
    tmp_path: Path, made: dict[str, np.ndarray]
) -> None:
    with pytest.raises(ConfigError, match="'qwen2'; only 'llama'"):
        open_gguf(write(tmp_path / "q.gguf", made, arch="qwen2"))
    for key, value, message in (
        ("llama.expert_count", 8, "llama.expert_count is 8"),
        ("llama.rope.scaling.type", "yarn", "'yarn'; need none or linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_gguf(write(tmp_path / "x.gguf", made, extra={key: value}))
    with pytest.raises(ConfigError, match="rope_freqs"):
        open_gguf(write(tmp_path / "r.gguf", {**made, "rope_freqs.weight": np.ones(4, np.float32)}))
    with pytest.raises(DataError, match=r"1 tensors have no place.*blk.0.attn_sinks.weight"):
        sinks = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
        open_gguf(write(tmp_path / "s.gguf", {**made, **sinks}))


def test_broken_files(tmp_path: Path, made: dict[str, np.ndarray]) -> None:
    whole = write(tmp_path / "m.gguf", made).read_bytes()
    for name, content in (
        ("half", whole[: len(whole) // 2]),
        ("short", whole[:-1]),
        ("empty", b""),
        ("other", b"PK" + whole[2:]),
        ("head", whole[:300]),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.gguf cannot be read.*{len(content)} bytes"):
            open_gguf(path)
    with pytest.raises(DataError, match="None bytes"):
        open_gguf(tmp_path / "none.gguf")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxrl_llm\[smollm2\]'"):
        open_gguf("x.gguf")


def test_tokenizer_of_a_file(tmp_path: Path, made: dict[str, np.ndarray]) -> None:
    path = write(tmp_path / "m.gguf", made, extra={"tokenizer.ggml.eot_token_id": 2})
    loaded = tok.load(path)
    first = 4  # the byte alphabet starts here: "!" is 4
    digit, letter_a, space = first + 15, first + 64, first + 220
    assert loaded.encode("a 12 th") == [letter_a, space, digit + 1, digit + 2, 262]
    assert loaded.stop_ids == (1, 2) and loaded.bos_id == 0 and not loaded.adds_bos
    assert loaded.encode("<think>") == [3]
    assert loaded.chat([{"role": "user", "content": "a<|end|>"}]).count(1) == 1
    assert loaded.chat([{"role": "user", "content": "a"}])[:3] == [0, letter_a, 1]
    assert loaded.decode([0, letter_a, 1]) == "a"
    assert loaded.vocab_size == len(TOKENS)
    assert tok.load(path).digest == loaded.digest


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120x", "\u010a", "\u010a", "!"]),
        ("gpt-2", ["It", "'s", "\u01201234", "\u0120x", "\u010a", "\u010a", "!"]),
        ("llama-bpe", ["It", "'s", "\u0120", "123", "4", "\u0120x", "\u010a\u010a", "!"]),
        ("qwen2", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120x", "\u010a\u010a", "!"]),
    ],
)
def test_split_rules(
    tmp_path: Path, made: dict[str, np.ndarray], pre: str, pieces: list[str]
) -> None:
    fast, config = tokenizer_files(write(tmp_path / "m.gguf", made, pre=pre))
    assert [piece for piece, _ in fast.pre_tokenizer.pre_tokenize_str("It's 1234 x\n\n!")] == pieces
    assert config["add_bos_token"] is (pre == "llama-bpe")
    tok.load(tmp_path / "m.gguf")


def test_broken_tokenizers(tmp_path: Path, made: dict[str, np.ndarray]) -> None:
    for changed, message in (({"pre": "mystery"}, "'mystery'"), ({"model": "llama"}, "'llama'")):
        with pytest.raises(ConfigError, match=message + r".*model\.tokenizer_path"):
            tokenizer_files(write(tmp_path / "m.gguf", made, **changed))  # type: ignore[arg-type]
    twice = [*TOKENS[:-1], TOKENS[0]]
    with pytest.raises(DataError, match=r"263 tokens \(262 different\)"):
        tokenizer_files(write(tmp_path / "m.gguf", made, tokens=twice))


def test_gguf_does_not_import_jax(tmp_path: Path, made: dict[str, np.ndarray]) -> None:
    path = write(tmp_path / "m.gguf", made)
    code = (
        "import sys; from jaxrl_llm.models.gguf import open_gguf, tokenizer_files\n"
        f"open_gguf({str(path)!r}); tokenizer_files({str(path)!r})\n"
        "assert not {'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
