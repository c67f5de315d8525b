import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import DataError
from jaxrl_llm.models import families, transformer, weights
from tests.golden.models import tiny

CASE = "llama_biased_linear_tied"
CONFIG = families.from_hf(tiny.CASES[CASE])
UNTIED = replace(CONFIG, tie_embeddings=False)
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


class Held:
    """A `TensorSource` over arrays in memory that notes what was read."""

    def __init__(self, tensors):
        self.tensors, self.reads = tensors, []

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name, index=None):
        part = self.tensors[name][index or ()]
        self.reads.append((name, part.shape))
        return part


def tensors(config=CONFIG):
    return {n: tiny.values(CASE, n, s) for n, s in weights.expected_shapes(config).items()}


@pytest.fixture
def folder(tmp_path):
    return tiny.write_folder(tmp_path / "model", CASE, weights.expected_shapes(CONFIG))


def refused(source, config=CONFIG):
    with pytest.raises(DataError) as caught:
        weights.load_params(source, config)
    assert caught.value.exit_code == 65
    return caught.value.problems


def test_layout_by_hand():
    held = tensors(UNTIED)
    params = weights.load_params(Held(held), UNTIED)
    q = held["model.layers.1.self_attn.q_proj.weight"]
    k = held["model.layers.2.self_attn.k_proj.bias"]
    o = held["model.layers.0.self_attn.o_proj.weight"]
    size = UNTIED.head_size
    np.testing.assert_array_equal(params["layers"]["q"]["kernel"][1, :, 3], q[3 * size :].T)
    np.testing.assert_array_equal(params["layers"]["k"]["bias"][2, 1], k[size:])
    np.testing.assert_array_equal(params["layers"]["o"]["kernel"][0, 1], o[:, size : 2 * size].T)
    np.testing.assert_array_equal(params["head"]["kernel"], held["lm_head.weight"].T)
    np.testing.assert_array_equal(params["embed"]["kernel"], held["model.embed_tokens.weight"])
    plan = transformer.abstract_params(UNTIED)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, plan)


def test_two_shards_one_file_and_other_dtypes_agree(folder, tmp_path):
    whole = weights.load_params(weights.open_safetensors(folder), CONFIG)
    held = load_file(folder / FIRST) | load_file(folder / SECOND)
    for dtype, tolerance in ((np.float32, 0), (np.float16, 1e-3), (ml_dtypes.bfloat16, 2e-2)):
        single = tmp_path / np.dtype(dtype).name
        single.mkdir()
        save_file(
            {name: value.astype(dtype) for name, value in held.items()},
            single / "model.safetensors",
        )
        params = weights.load_params(weights.open_safetensors(single), CONFIG)
        jax.tree.map(
            lambda a, b, tolerance=tolerance: np.testing.assert_allclose(a, b, atol=tolerance),
            params,
            whole,
        )
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_sharded_loading_reads_only_parts_and_gives_the_same_numbers():
    sizes = {"N": "tensor", "K": "tensor", "F": "tensor", "D": "data", "H": None}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    plan = jax.tree.map(
        lambda dims: NamedSharding(mesh, PartitionSpec(*(sizes.get(letter) for letter in dims))),
        families.param_dims(UNTIED),
    )
    plan["layers"]["q"]["bias"] = NamedSharding(mesh, PartitionSpec(None, None, "data"))
    held = Held(tensors(UNTIED))
    sharded = weights.load_params(held, UNTIED, shardings=plan)
    q = [shape for name, shape in held.reads if name.endswith("0.self_attn.q_proj.weight")]
    assert q == [(12, 12)] * 4
    norm = [shape for name, shape in held.reads if name == "model.layers.0.input_layernorm.weight"]
    assert norm == [(12,)] * 2
    plain = weights.load_params(Held(tensors(UNTIED)), UNTIED)
    jax.tree.map(np.testing.assert_array_equal, sharded, plain)
    assert sharded["layers"]["up"]["kernel"].sharding.spec == PartitionSpec(None, "data", "tensor")


def test_dtype_of_the_parameters():
    params = weights.load_params(
        Held(tensors()),
        CONFIG,
        dtypes=jax.tree.map(lambda _: jnp.bfloat16, families.param_dims(CONFIG)),
    )
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))


def test_everything_wrong_is_listed_at_once():
    held = tensors(UNTIED)
    del held["model.norm.weight"], held["lm_head.weight"]
    held["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
    held["model.layers.3.mlp.up_proj.weight"] = np.zeros((40, 24), np.float32)
    problems = refused(Held(held), UNTIED)
    assert [problem.split(":")[0] for problem in problems] == [
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    ]
    assert "got shape (3, 4), need (40, 24)" in problems[2]


def test_heads_and_tied_embeddings():
    held = tensors()
    assert "lm_head.weight" not in held
    plain = weights.load_params(Held(held), CONFIG)
    assert "head" not in plain
    same = held | {"lm_head.weight": held["model.embed_tokens.weight"].copy()}
    jax.tree.map(np.testing.assert_array_equal, weights.load_params(Held(same), CONFIG), plain)
    same["lm_head.weight"][-1, -1] += 1
    assert "differs from the embedding" in refused(Held(same))[0]
    assert "lm_head.weight: got nothing" in refused(Held(held), UNTIED)[0]


def test_rotary_buffers_are_ignored():
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    weights.load_params(Held(tensors() | extra), CONFIG)


@pytest.mark.parametrize("keep", [-1, -1000, 0.5, 4, 0])
def test_a_shard_that_was_cut_names_file_and_sizes(folder, keep):
    path = folder / SECOND
    whole = path.read_bytes()
    part = whole[: keep if isinstance(keep, int) else int(len(whole) * keep)]
    path.write_bytes(part)
    with pytest.raises(DataError) as caught:
        weights.open_safetensors(folder)
    assert len(caught.value.problems) == 1
    text = caught.value.problems[0]
    assert SECOND in text and f"got {len(part)} bytes" in text
    assert (f"need {len(whole)}" in text) == (len(part) >= 8)


def test_a_shard_that_is_too_long_or_absurd(folder):
    path = folder / FIRST
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match=f"got {len(whole) + 1} bytes, need {len(whole)} by"):
        weights.open_safetensors(folder)
    path.write_bytes((2**40).to_bytes(8, "little") + whole[8:])
    with pytest.raises(DataError, match="header of at most 100000000 bytes"):
        weights.open_safetensors(folder)
    path.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    with pytest.raises(DataError, match=f"{FIRST}: got a malformed header"):
        weights.open_safetensors(folder)


def test_header_bombs_are_refused(folder):  # S7
    path = folder / FIRST
    for header in (b'{"a":' + b"[" * 100_000, b"[]", b'{"a":5}', b'{"a":{"data_offsets":[0]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(DataError, match=f"{FIRST}: got a malformed header"):
            weights.open_safetensors(folder)
    empty = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    many = b"{" + b",".join(b'"%d":%s' % (n, empty) for n in range(100_001)) + b"}"
    path.write_bytes(len(many).to_bytes(8, "little") + many)
    with pytest.raises(DataError, match="100001 tensors in one file, at most 100000"):
        weights.open_safetensors(folder)
    (folder / "config.json").write_bytes(b'{"model_type":' + b"[" * 100_000)
    with pytest.raises(DataError, match=r"config\.json: got an unreadable file"):
        weights.load_config(folder)


def test_a_tensor_whose_bytes_do_not_fit_its_shape(folder):
    path = folder / FIRST
    whole = path.read_bytes()
    assert b'"shape":[37,24]' in whole
    path.write_bytes(whole.replace(b'"shape":[37,24]', b'"shape":[37,23]'))
    with pytest.raises(
        DataError, match=r"got 3552 bytes for model\.embed_tokens\.weight, need 3404"
    ):
        weights.open_safetensors(folder)


def test_unsupported_dtypes(tmp_path):
    save_file({"model.norm.weight": np.ones(3, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.norm\.weight as I8"):
        weights.open_safetensors(tmp_path)


def test_missing_shards_and_bad_indices(folder):
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def problem(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(DataError) as caught:
            weights.open_safetensors(folder)
        return "\n".join(caught.value.problems)

    name = "model.norm.weight"
    for outside in (
        "../other.safetensors",
        str(folder / FIRST),
        "a/b.safetensors",
        "..",
        "x" * 300,
    ):
        assert "inside the folder" in problem(good["weight_map"] | {name: outside})
    assert "no weight_map" in problem({})
    assert "need a shard that contains it" in problem(good["weight_map"] | {"ghost": FIRST})
    moved = FIRST if good["weight_map"][name] == SECOND else SECOND
    assert "(index)" in problem(good["weight_map"] | {name: moved})
    (folder / SECOND).unlink()
    assert f"{SECOND}: got no such shard" in problem(good["weight_map"])
    index.write_text("{")
    with pytest.raises(DataError, match="need JSON"):
        weights.open_safetensors(folder)


def test_pickled_weights_and_empty_folders(tmp_path):
    with pytest.raises(DataError, match="no safetensors file"):
        weights.open_safetensors(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        weights.open_safetensors(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DataError, match=r"only pickled weights \(pytorch_model.bin\).*runs the"):
        weights.open_safetensors(tmp_path)
    with pytest.raises(DataError, match=r"config.json"):
        weights.load_config(tmp_path)


@pytest.mark.parametrize("limit", [10**9, 20_000])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_saved_folders_load_again(tmp_path, limit, config):
    params = weights.load_params(Held(tensors(config)), config)
    target = tmp_path / "deep" / "export"
    copied = tmp_path / "tokenizer.json"
    copied.write_text("{}")
    extra = {"a.txt": "text", "b.bin": b"\1", "tokenizer.json": copied}
    weights.save_hf(target, config, params, max_shard_bytes=limit, extra_files=extra)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert shards[0] == ("model.safetensors" if limit > 10**6 else shards[0])
    assert len(shards) == 1 or len(shards) > 3
    loaded: dict[str, np.ndarray] = {}
    for shard in shards:
        loaded |= load_file(target / shard)
        assert len(shards) == 1 or (target / shard).stat().st_size < limit + 4096
    assert loaded.keys() == tensors(config).keys()
    for name, value in tensors(config).items():
        np.testing.assert_array_equal(loaded[name], value)
    assert families.from_hf(weights.load_config(target)) == config
    again = weights.load_params(weights.open_safetensors(target), config)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert (target / "a.txt").read_text() == "text" and (target / "b.bin").read_bytes() == b"\1"
    assert (target / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in target.parent.iterdir()] == ["export"]


def test_saving_in_bfloat16_from_sharded_parameters(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    plan = jax.tree.map(
        lambda dims: NamedSharding(
            mesh, PartitionSpec(*("data" if d == "D" else None for d in dims))
        ),
        families.param_dims(CONFIG),
    )
    params = weights.load_params(Held(tensors()), CONFIG, shardings=plan)
    weights.save_hf(tmp_path / "out", CONFIG, params, dtype="bfloat16")
    assert weights.load_config(tmp_path / "out")["dtype"] == "bfloat16"
    source = weights.open_safetensors(tmp_path / "out")
    for name, value in tensors().items():
        np.testing.assert_array_equal(source.read(name), value.astype(ml_dtypes.bfloat16))


def test_saving_replaces_an_older_folder_and_a_failure_leaves_it(tmp_path):
    params = weights.load_params(Held(tensors()), CONFIG)
    target = tmp_path / "out"
    weights.save_hf(target, CONFIG, params, extra_files={"old.txt": "old"})
    broken = params | {"norm": {"scale": np.ones(5, np.float32)}}
    with pytest.raises(ValueError, match="reshape"):
        weights.save_hf(target, CONFIG, broken)
    assert (target / "old.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    weights.save_hf(target, CONFIG, params)
    assert not (target / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(target)


def test_saving_refuses_names_and_dtypes(tmp_path):
    params = weights.load_params(Held(tensors()), CONFIG)
    for name in ("../up", "config.json", "x.safetensors"):
        with pytest.raises(DataError, match="extra_files"):
            weights.save_hf(tmp_path / "out", CONFIG, params, extra_files={name: "x"})
    with pytest.raises(DataError, match="dtype: got 'int8'"):
        weights.save_hf(tmp_path / "out", CONFIG, params, dtype="int8")
    assert not list(tmp_path.iterdir())
