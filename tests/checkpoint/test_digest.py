"""Names, digests and differences of trees, by hand and as properties."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.checkpoint import (
    describe_mismatch,
    digest,
    named_leaves,
)
from jaxrl_llm.errors import ConfigError


def test_digest_by_hand_and_what_it_depends_on():
    import hashlib

    array = np.array([1, 2], np.uint8)
    inner = hashlib.blake2b(bytes([1, 2]), digest_size=16).digest()
    by_hand = hashlib.blake2b(b"uint8[2]" + inner, digest_size=16).hexdigest()
    assert digest.array_digest(array) == by_hand
    variants: list[np.ndarray] = [
        np.zeros(4, np.float32),
        np.zeros(4, np.int32),
        np.zeros((2, 2), np.float32),
        np.zeros(2, np.float64),
        np.array([0, 0, 0, -0.0], np.float32),
        np.zeros(8, ml_dtypes.bfloat16),
        np.zeros((0, 4), np.float32),
        np.zeros((4, 0), np.float32),
    ]
    assert len({digest.array_digest(variant) for variant in variants}) == len(variants)
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert digest.array_digest(fortran) == digest.array_digest(np.ascontiguousarray(fortran))


def test_digest_of_any_number_of_chunks(monkeypatch):
    host = {"w": np.asarray(jax.random.normal(jax.random.key(0), (64, 32))), "n": np.int32(3)}
    alone = {name: digest.array_digest(array) for name, array in host.items()}
    assert digest.digests_of(host) == alone
    monkeypatch.setattr(digest, "CHUNK_BYTES", 1000)
    chunked = digest.digests_of(host)
    assert chunked["w"] == digest.array_digest(host["w"]) != alone["w"]
    host["w"] = host["w"].copy()
    host["w"].view(np.uint32)[63, 31] ^= 1
    assert digest.digests_of(host) != chunked


def test_mismatch_is_a_short_diff():
    saved = {
        "same": {"dtype": "float32", "shape": [2], "digest": "x"},
        "gone": {"dtype": "int32", "shape": []},
        "other": {"dtype": "float32", "shape": [2, 3]},
    }
    wanted = {
        "same": {"dtype": "float32", "shape": [2]},
        "new": {"dtype": "bfloat16", "shape": [1]},
        "other": {"dtype": "bfloat16", "shape": [2, 4]},
    }
    assert describe_mismatch(saved, wanted).splitlines() == [
        "- gone int32[]: only in the checkpoint",
        "+ new bfloat16[1]: wanted, not in the checkpoint",
        "! other: saved float32[2,3], wanted bfloat16[2,4]",
    ]
    assert describe_mismatch(saved, saved) == ""
    many = {f"leaf{i:03}": {"dtype": "int8", "shape": [i]} for i in range(100)}
    lines = describe_mismatch(many, {}).splitlines()
    assert len(lines) == 20 and lines[-1] == "... and 81 more differences"
    twenty = dict(list(many.items())[:20])
    assert "more" not in describe_mismatch(twenty, {})


def test_names_that_collide_are_refused():
    with pytest.raises(ConfigError, match="a/b"):
        named_leaves({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(ConfigError, match="bare leaf"):
        named_leaves(jnp.zeros(2))
