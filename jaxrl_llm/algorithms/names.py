"""Names of estimators and KL kinds, and what each needs; standard library only, so that checks load no JAX.

Left out on purpose: the functions behind the names (`advantages.ADVANTAGES`, `kl.estimate`); a test holds both together.
"""

from jaxrl_llm.errors import ConfigError

NEEDS_VALUES = frozenset({"gae"})
"""Advantage estimators that need a critic."""

GROUP_ESTIMATORS = frozenset({"grpo", "rloo"})
"""Advantage estimators that compare the samples of a prompt and so need at least 2 of them."""

KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names of KL estimators -> ours."""

KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "k3_unbiased")
"""Canonical KL estimators."""


def needs_values(name: str) -> bool:
    """Whether the advantage estimator `name` needs a critic."""
    return name in NEEDS_VALUES


def is_group(name: str) -> bool:
    """Whether the advantage estimator `name` compares the samples of one prompt."""
    return name in GROUP_ESTIMATORS


def canonical(kind: str) -> str:
    """The canonical name of a KL estimator: `low_var_kl+` -> `k3+`; an unknown one raises `ConfigError` listing the known."""
    plus = "+" if kind.endswith("+") else ""
    base = kind.removesuffix("+")
    name = KL_ALIASES.get(base, base) + plus
    if name not in KL_KINDS:
        known = ", ".join([*KL_KINDS, *KL_ALIASES])
        raise ConfigError(f"KL estimator got {kind!r}, needs one of {known}: choose one of them")
    return name
