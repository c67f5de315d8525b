"""Names that checks use before JAX is loaded."""

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from jaxrl_llm.algorithms import names
from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.knobs.algorithm import AlgorithmKnobs, KLKind


def test_sets_name_entries_of_the_table():
    assert set(ADVANTAGES) >= names.NEEDS_VALUES | names.GROUP_ESTIMATORS
    assert not names.NEEDS_VALUES & names.GROUP_ESTIMATORS
    assert names.needs_values("gae") and not names.needs_values("grpo")
    assert names.is_group("rloo") and not names.is_group("gae")


def test_the_table_holds_what_the_settings_offer():
    assert set(get_args(get_type_hints(AlgorithmKnobs)["adv_estimator"])) == set(ADVANTAGES)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+"), ("kl+", "k1+"),
        ("abs", "abs"), ("k2+", "k2+"), ("k3_unbiased", "k3_unbiased"),
    ],
)  # fmt: skip
def test_canonical(given, want):
    assert names.canonical(given) == want


def test_every_kind_of_the_settings_is_known():
    for kind in get_args(KLKind):
        assert names.canonical(kind) in names.KL_KINDS


@pytest.mark.parametrize("kind", ["k4", "full", "k3++", "+", "", "k3_unbiased+"])
def test_unknown_kinds_are_refused_with_the_known_ones(kind):
    with pytest.raises(ConfigError, match="needs one of k1, k2, k3"):
        names.canonical(kind)


def test_importing_names_loads_no_jax():
    code = "import sys, jaxrl_llm.algorithms.names; assert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
