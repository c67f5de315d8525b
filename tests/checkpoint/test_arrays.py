"""Host arrays through an Orbax tree: what comes back, and errors that belong to one leaf."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.checkpoint.arrays import open_tree, placed, write_arrays

ARRAYS = {
    "actor/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "actor/half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "step": np.array(7, np.int32),
    "empty": np.empty((0, 3), np.float32),
}


def described(array):
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def test_arrays_come_back_bit_for_bit_empty_ones_too(tmp_path):
    write_arrays(tmp_path / "state", ARRAYS)
    with open_tree(tmp_path / "state") as read:
        for name, array in ARRAYS.items():
            found = read(name, described(array))
            assert (found.shape, found.dtype) == (array.shape, array.dtype)
            assert found.tobytes() == array.tobytes()


def test_a_missing_leaf_is_an_error_of_that_leaf_alone(tmp_path):
    write_arrays(tmp_path / "state", ARRAYS)
    with open_tree(tmp_path / "state") as read:
        with pytest.raises(Exception, match=r"read as|critic"):
            read("critic/w", {"shape": [2], "dtype": "float32"})
        assert read("step", described(ARRAYS["step"])) == 7


def test_arrays_are_placed_as_the_leaf_they_replace():
    array = ARRAYS["actor/w"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    there = placed(array, jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))
    assert there.sharding == sharding and np.array_equal(there, array)
    assert placed(array, np.zeros(1)) is array
    assert placed(np.array(7), 0) == 7 and type(placed(np.array(7), 0)) is int
