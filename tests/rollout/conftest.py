"""The tiny engine, its weights and a rollout without an end, built once."""

import pytest

from tests import tiny
from tests.rollout.rig import build, rollout, weights


@pytest.fixture(scope="session")
def params():
    return weights(tiny.mesh())


@pytest.fixture(scope="session")
def engine():
    return build(tiny.mesh())


@pytest.fixture(scope="session")
def free(engine, params):
    """Sampled at temperature 1, every row up to the limit."""
    return rollout(engine, params)
