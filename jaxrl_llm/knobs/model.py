"""`model`: which network is trained and how it computes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelKnobs:
    """The policy network, its weights and its tokenizer."""

    path: str = ""
    """A Hugging Face folder, a hub id, a `.gguf` file, or `package:MODULE/RELATIVE/PATH` for files that an installed
    Python package carries. Required."""
    tokenizer_path: str | None = None
    """Where the tokenizer lies, if not with the weights; same forms as `path`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of activations and of the weights' copy used in matmuls; `auto` is float32 on CPU and bfloat16 elsewhere.
    Master weights, moments, norms, softmax and log-probs are float32 in either case."""
    enable_gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations: about a third more arithmetic for
    memory that no longer grows with the number of layers."""
    use_remove_padding: bool = True
    """Cut the columns of a batch to the bucket of its longest prompt and response before scoring and training; off, every
    row is `max_prompt_length + max_response_length` wide. Changes time and memory, not the objective."""
