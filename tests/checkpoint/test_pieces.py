"""Pieces: who owns which, whether they make up the whole, and files that any number of processes can read."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoint import files, pieces
from jaxrl_llm.checkpoint.digest import describe
from jaxrl_llm.checkpoint.pieces import (
    box_shape,
    covers,
    merge_reports,
    needed_boxes,
    overlap,
    own_pieces,
    owners,
    read_whole,
    slices,
    whole,
    write_pieces,
)
from tests.checkpoint.rig import mesh_of


def pair(device):
    """Four processes of two devices."""
    return device.id // 2


def state():
    mesh = mesh_of(4, 2)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    draw = np.random.default_rng(0)
    return {
        "rows": put(draw.standard_normal((8, 6)).astype(np.float32), "data"),
        "both": put(draw.standard_normal((3, 8, 4)).astype(np.float32), None, "data", "tensor"),
        "columns": put(draw.standard_normal((5, 6)).astype(ml_dtypes.bfloat16), None, "tensor"),
        "same": put(np.arange(7, dtype=np.int32)),
        "scalar": put(np.float32(-0.0)),
        "empty": put(np.zeros((0, 3), np.float32)),
        "host": np.arange(6.0).reshape(2, 3).T,
        "number": 7,
    }


def written(tmp_path, tree):
    """What four processes write, one after the other."""
    reports = []
    for process in range(4):
        own = {name: own_pieces(leaf, process, pair) for name, leaf in tree.items()}
        reports.append(write_pieces(tmp_path, files.tree_name(process), own))
    return reports


def test_the_first_holder_owns_a_box():
    tree = state()
    found = owners(tree["rows"].sharding, (8, 6), pair)
    assert found == {((2 * k, 2 * k + 2), (0, 6)): k for k in range(4)}
    assert owners(tree["columns"].sharding, (5, 6), pair) == {
        ((0, 5), (0, 3)): 0,
        ((0, 5), (3, 6)): 0,
    }
    assert owners(tree["columns"].sharding, (5, 6), lambda device: device.id % 2) == {
        ((0, 5), (0, 3)): 0,
        ((0, 5), (3, 6)): 1,
    }
    assert owners(tree["same"].sharding, (7,), lambda device: 3 - device.id // 2) == {((0, 7),): 3}
    assert owners(tree["same"].sharding, (7,), lambda device: 2) == {((0, 7),): 0}


def test_ownership_is_that_of_the_first_replica():
    for leaf in state().values():
        if isinstance(leaf, jax.Array):
            first = {
                pieces.box_of(shard.index, leaf.shape): pair(shard.device)
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            }
            assert owners(leaf.sharding, leaf.shape, pair) == first


def test_a_process_copies_its_own_pieces_and_no_more():
    tree = state()
    for name, leaf in tree.items():
        found = [own_pieces(leaf, process, pair) for process in range(4)]
        boxes = [box for own in found for box, _ in own]
        assert covers(boxes, np.shape(leaf)) or 0 in np.shape(leaf)
        for box, array in [piece for own in found for piece in own]:
            assert array.flags.owndata and array.shape == box_shape(box)
            assert np.array_equal(array, np.asarray(leaf)[slices(box)])
        if name in ("host", "number", "columns", "same", "scalar"):
            assert found[1:] == [[], [], []]
    assert [sum(a.nbytes for _, a in own_pieces(tree["both"], k, pair)) for k in range(4)] == [
        96
    ] * 4


@pytest.mark.parametrize(
    ("boxes", "shape", "good"),
    [
        ([((0, 4), (0, 2)), ((0, 2), (2, 6)), ((2, 4), (2, 6))], (4, 6), True),
        ([((0, 4), (0, 2)), ((0, 2), (2, 6))], (4, 6), False),
        ([((0, 4), (0, 3)), ((0, 4), (2, 6))], (4, 6), False),
        ([((0, 2),), ((2, 4),), ((0, 2),)], (4,), False),
        ([((0, 2),), ((3, 4),), ((2, 3),)], (4,), True),
        ([((0, 5),)], (4,), False),
        ([((-1, 4),)], (4,), False),
        ([((0, 4),)], (4, 1), False),
        ([((2, 2),), ((0, 4),)], (4,), False),
        ([], (4,), False),
        ([], (0, 4), True),
        ([()], (), True),
        ([], (), False),
        ([(), ()], (), False),
    ],
)
def test_covers(boxes, shape, good):
    assert covers(boxes, shape) is good


def test_overlap():
    box = ((0, 2), (4, 6))
    assert overlap(box, ((1, 5), (5, 9))) and overlap((), ())
    assert not overlap(box, ((2, 5), (5, 9))) and not overlap(box, ((0, 2), (0, 4)))


def test_pieces_of_four_processes_make_up_the_state_again(tmp_path):
    tree = state()
    described = {name: describe(leaf) for name, leaf in tree.items()}
    leaves, sizes = merge_reports(described, written(tmp_path, tree))
    assert sizes == files.file_sizes(tmp_path)
    assert leaves["empty"] == {"shape": [0, 3], "dtype": "float32", "pieces": []}
    assert {piece["file"] for piece in leaves["both"]["pieces"]} == {
        f"state.p000{process}/00001.bin" for process in range(4)
    }
    for name, leaf in tree.items():
        found = read_whole(tmp_path, name, leaves[name])
        expected = np.asarray(leaf)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.tobytes() == expected.tobytes()


def test_states_that_differ_between_processes_are_refused(tmp_path):
    tree = state()
    described = {name: describe(leaf) for name, leaf in tree.items()}
    reports = written(tmp_path, tree)
    with pytest.raises(ValueError, match="leaf rows do not make up the whole"):
        merge_reports(described, reports[:3])
    with pytest.raises(ValueError, match="leaf rows do not make up the whole"):
        merge_reports({**described, "rows": {"shape": [8, 5], "dtype": "float32"}}, reports)
    with pytest.raises(ValueError, match="leaf number"):
        merge_reports({k: v for k, v in described.items() if k != "number"}, reports)
    with pytest.raises(ValueError, match="leaf more"):
        merge_reports({**described, "more": {"shape": [2], "dtype": "int8"}}, reports)


def test_damage_names_leaf_and_file_and_what_is_not_needed_is_not_read(tmp_path):
    tree = {"rows": state()["rows"]}
    described = {"rows": describe(tree["rows"])}
    entry = merge_reports(described, written(tmp_path, tree))[0]["rows"]
    path = tmp_path / "state.p0002" / "00000.bin"
    blob = bytearray(path.read_bytes())
    path.write_bytes(bytes([blob[0] ^ 1]) + blob[1:])
    with pytest.raises(files.Damaged, match=r"digest.*rows \(in state.p0002/00000.bin\)"):
        read_whole(tmp_path, "rows", entry)
    upper = read_whole(tmp_path, "rows", entry, [((0, 3), (2, 4))])
    assert np.array_equal(upper[:4], np.asarray(tree["rows"])[:4])
    with pytest.raises(files.Damaged):
        read_whole(tmp_path, "rows", entry, [((5, 8), (2, 4))])
    path.write_bytes(blob[:-1])
    with pytest.raises(files.Damaged, match="ends too early"):
        read_whole(tmp_path, "rows", entry)
    path.unlink()
    with pytest.raises(files.Damaged, match=r"rows.*FileNotFoundError"):
        read_whole(tmp_path, "rows", entry)
    with pytest.raises(files.Damaged, match="rows whose pieces"):
        read_whole(tmp_path, "rows", {**entry, "pieces": entry["pieces"][1:]})


def test_what_a_process_needs_of_a_leaf():
    array = state()["rows"]
    spelled = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    assert needed_boxes(array) is needed_boxes(spelled) is None
    assert needed_boxes(jax.ShapeDtypeStruct((2,), jnp.int32)) is needed_boxes(np.zeros(2)) is None
    assert needed_boxes(7) is needed_boxes(None) is None
    assert whole((2, 3)) == ((0, 2), (0, 3)) and whole(()) == ()
