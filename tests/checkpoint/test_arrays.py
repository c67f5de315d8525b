"""Host arrays through an Orbax tree: what comes back, what is left out, and errors that belong to one leaf."""

import jax
import ml_dtypes
import numpy as np

from jaxrl_llm.checkpoint.arrays import first_line, placed, read_arrays, write_arrays

ARRAYS = {
    "actor/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "actor/half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "step": np.array(7, np.int32),
    "empty": np.empty((0, 3), np.float32),
}


def described(arrays):
    return {name: {"shape": list(a.shape), "dtype": a.dtype.name} for name, a in arrays.items()}


def test_arrays_come_back_bit_for_bit_empty_ones_too(tmp_path):
    write_arrays(tmp_path / "state", ARRAYS)
    found, errors = read_arrays(tmp_path / "state", described(ARRAYS))
    assert not errors and found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes()


def test_a_missing_leaf_is_an_error_of_that_leaf_alone(tmp_path):
    write_arrays(tmp_path / "state", ARRAYS)
    wanted = described(ARRAYS) | {"critic/w": {"shape": [2], "dtype": "float32"}}
    found, errors = read_arrays(tmp_path / "state", wanted)
    assert set(errors) == {"critic/w"} and found.keys() == ARRAYS.keys()


def test_arrays_are_placed_as_the_leaf_they_replace():
    array = ARRAYS["actor/w"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    there = placed(array, jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))
    assert there.sharding == sharding and np.array_equal(there, array)
    assert placed(array, np.zeros(1)) is array
    assert placed(np.array(7), 0) == 7 and type(placed(np.array(7), 0)) is int


def test_the_first_line_of_an_error_is_short():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "" and len(first_line(ValueError("x" * 900))) == 300
