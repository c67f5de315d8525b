"""Recompute the golden logits with transformers and PyTorch: `python -m tests.golden.models.make_golden`.

Run it from the root of the checkout with the `parity` extra installed. Last run with transformers 5.24, PyTorch 2.13 (CPU,
float32, eager attention).
"""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden.models import tiny


def reference_logits(case: str) -> np.ndarray:
    """Float32 logits `[2 T V]` of a case from the transformers class of its family."""
    config = AutoConfig.for_model(**tiny.CASES[case])
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tiny.values(case, name, tuple(parameter.shape))))
        logits = model(torch.from_numpy(tiny.tokens(case)).long()).logits
    return logits.float().numpy()


def main() -> None:
    for case in tiny.CASES:
        logits = reference_logits(case)
        np.savez_compressed(tiny.HERE / f"{case}.npz", logits=logits)
        print(f"{case}: {logits.shape}, size of logits {np.abs(logits).mean():.3f}")


if __name__ == "__main__":
    main()
