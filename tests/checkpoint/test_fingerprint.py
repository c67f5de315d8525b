"""Fingerprints of trees: by hand, against a plain loop, and on any mesh."""

import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.checkpoint import fingerprint, tree_digests
from jaxrl_llm.checkpoint.pieces import box_of, own_pieces
from tests.checkpoint.rig import mesh_of, sharded

MASK = 2**64 - 1


def mixed(place, bits):
    """SplitMix64 of one element in Python's own integers; places count from 1."""
    word = (place * 0x9E3779B97F4A7C15 + bits) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def plain(array):
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    total = sum(mixed(place + 1, int(bits)) for place, bits in enumerate(words)) & MASK
    text = f"{ {'shape': list(array.shape), 'dtype': str(array.dtype)} }{total}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def test_the_mixing_is_splitmix64():
    """First outputs of the published generator seeded with 0."""
    assert [mixed(place, 0) for place in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("block", [7, 64, 2**14])
def test_against_a_plain_loop(monkeypatch, block):
    monkeypatch.setattr(fingerprint, "BLOCK", block)
    monkeypatch.setattr(fingerprint, "TASK", 3 * block)
    draw = np.random.default_rng(0)
    tree = {
        "w": draw.standard_normal((5, 6, 11)).astype(np.float32),
        "half": draw.standard_normal((9, 3)).astype(ml_dtypes.bfloat16),
        "wide": draw.standard_normal(20),
        "flags": draw.random(5) > 0.5,
        "scalar": np.array(-7, np.int32),
        "empty": np.zeros((0, 3), np.float32),
    }
    assert tree_digests(tree) == {name: plain(array) for name, array in tree.items()}


def test_the_same_on_every_mesh_and_split_between_any_processes():
    tree = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.arange(8.0)}
    alone = tree_digests(tree)
    for shape in ((8,), (2, 4), (1,)):
        assert tree_digests(sharded(mesh_of(*shape))(tree)) == alone
    leaf = sharded(mesh_of(8))(tree)["w"]
    with fingerprint.ThreadPoolExecutor(2) as pool:
        whole = fingerprint._leaf_sum(own_pieces(tree["w"]), (64, 32), pool)
        parts = [
            fingerprint._leaf_sum(
                own_pieces(leaf, process, lambda device: device.id // 2), (64, 32), pool
            )
            for process in range(4)
        ]
    assert len(set(parts)) == 4 and sum(parts) & MASK == whole


def test_every_bit_every_place_dtype_and_shape_count():
    base = np.zeros((4, 6), np.float32)
    variants = [base, base.astype(np.int32), base.reshape(6, 4), base.reshape(24), base[:3]]
    for place in range(24):
        for bit in (0, 13, 31):
            other = base.copy()
            other.reshape(-1).view(np.uint32)[place] ^= 1 << bit
            variants.append(other)
    swapped = np.arange(24, dtype=np.float32).reshape(4, 6)
    variants += [swapped, swapped[::-1], np.asfortranarray(swapped)[:, ::-1]]
    assert len({tree_digests({"a": variant})["a"] for variant in variants}) == len(variants)
    fortran = np.asfortranarray(swapped)
    assert tree_digests({"a": fortran}) == tree_digests({"a": swapped})


def test_blocks_cut_a_box_without_gaps():
    for box in (((0, 5), (3, 10), (0, 4)), ((2, 3), (0, 100)), (), ((4, 4), (0, 2))):
        seen = np.zeros([stop for _, stop in box], int)
        for block in fingerprint.blocks(box, 9):
            index = tuple(slice(*span) for span in block)
            assert box_of(index, seen.shape) == block and seen[index].size <= 9
            seen[index] += 1
        assert (seen[tuple(slice(*span) for span in box)] == 1).all()
        assert seen.sum() == np.prod([stop - start for start, stop in box], dtype=int)
