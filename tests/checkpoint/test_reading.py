"""Reading ahead of the caller: in order, and within a number of bytes."""

import threading

import numpy as np
import pytest

from jaxrl_llm.checkpoint import reading


def entries(*sizes):
    return {f"leaf{i}": {"shape": [size], "dtype": "uint8"} for i, size in enumerate(sizes)}


def read_and_count(leaves, monkeypatch, most, workers):
    """Names in the order they came, and the most bytes that were read and not yet taken."""
    monkeypatch.setattr(reading, "AHEAD_BYTES", most)
    gate, held, peak = threading.Lock(), [0], [0]

    def read(name):
        with gate:
            held[0] += leaves[name]["shape"][0]
            peak[0] = max(peak[0], held[0])
        return np.zeros(leaves[name]["shape"], np.uint8)

    names = []
    for name, array in reading._ahead(read, leaves, workers):
        names.append(name)
        with gate:
            held[0] -= array.nbytes
    return names, peak[0]


def test_leaves_come_in_order_and_few_wait(monkeypatch):
    leaves = entries(*[10] * 20)
    names, peak = read_and_count(leaves, monkeypatch, 1000, 4)
    assert names == list(leaves) and peak <= 40
    names, peak = read_and_count(leaves, monkeypatch, 25, 4)
    assert names == list(leaves) and peak <= 20


def test_a_leaf_above_the_limit_is_read_alone(monkeypatch):
    names, peak = read_and_count(entries(100, 5, 100, 5, 5), monkeypatch, 20, 4)
    assert len(names) == 5 and peak == 100


def test_an_error_comes_at_its_leaf():
    def read(name):
        if name == "leaf1":
            raise OSError("gone")
        return np.zeros(1, np.uint8)

    found = reading._ahead(read, entries(1, 1, 1), 2)
    assert next(found)[0] == "leaf0"
    with pytest.raises(OSError, match="gone"):
        next(found)
