"""`validation`: how held-out accuracy is measured."""

from dataclasses import dataclass

from jaxrl_llm.knobs.marks import operational


@dataclass(frozen=True)
class ValidationKnobs:
    """Greedy accuracy (`mean@1`) always; with `n` > 1 also sampled mean@n, best@n and maj@n."""

    n: int = operational(1)
    """Samples per prompt for mean@n, best@n and maj@n; 1 measures greedy decoding only."""
    temperature: float = operational(1.0)
    """Sampling temperature (`n` > 1)."""
    top_k: int | None = operational(None)
    """Sampling filter (`n` > 1)."""
    top_p: float = operational(1.0)
    """Sampling filter (`n` > 1)."""
