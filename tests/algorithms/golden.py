"""Loads golden cases and compares with them; see `tests/golden/README.md` for how to read the numbers."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

FOLDER = Path(__file__).parent.parent / "golden"
LOOSE = {"rtol": 1e-6, "atol": 1e-7}
SINGLE = {"rtol": 1e-5, "atol": 1e-6}
DOUBLE = {"rtol": 1e-10, "atol": 1e-14}


@dataclass(frozen=True)
class Case:
    """One golden case with its float inputs cast to its dtype."""

    file: str
    name: str
    dtype: str
    params: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, Any]

    @property
    def id(self) -> str:
        return f"{self.file}/{self.name}"

    def array(self, name: str) -> np.ndarray:
        """An output as an array of the case's dtype."""
        return np.asarray(self.outputs[name], self.dtype)

    def tolerance(self, *, whitened: bool = False) -> dict[str, float]:
        if self.dtype == "float32":
            return SINGLE
        return LOOSE if whitened else DOUBLE

    def groups(self) -> tuple[np.ndarray, int]:
        """String labels as integers, and how many there are."""
        labels, ids = np.unique(self.inputs["index"], return_inverse=True)
        return ids.astype(np.int32), len(labels)

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        with jax.enable_x64(self.dtype == "float64"):
            yield


def load(file: str) -> list[Case]:
    """All cases of `tests/golden/<file>.json`."""
    rows = json.loads((FOLDER / f"{file}.json").read_text())["cases"]
    return [
        Case(
            file,
            row["name"],
            row["dtype"],
            row.get("params", {}),
            {name: _cast(name, value, row["dtype"]) for name, value in row["inputs"].items()},
            row["outputs"],
        )
        for row in rows
    ]


def _cast(name: str, value: Any, dtype: str) -> np.ndarray:
    if "mask" in name:
        return np.asarray(value, bool)
    return np.asarray(value) if name in ("index", "labels") else np.asarray(value, dtype)


def by_id(case: Case) -> str:
    return case.id


def close(got: Any, want: Any, tolerance: dict[str, float], mask: np.ndarray | None = None) -> None:
    """`assert_allclose`, on the masked positions only where a mask is given."""
    got, want = np.asarray(got), np.asarray(want)
    if mask is not None:
        got, want = got[mask], want[mask]
    np.testing.assert_allclose(got, want, **tolerance)
