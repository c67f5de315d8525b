"""`model`: which network is trained and how it computes."""

from dataclasses import dataclass
from typing import Literal

Remat = Literal["none", "dots", "full"]
"""What the backward pass recomputes of a layer: nothing, element-wise arithmetic, everything."""


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
    enable_gradient_checkpointing: bool | Remat = "full"
    """What the backward pass computes again: `full` (or true) each layer from its input, about a third more arithmetic for memory that
    no longer grows with the layers' width; `dots` only cheap element-wise arithmetic, the outputs of projections and of attention
    are kept; `none` (or false) nothing."""
    attention: Literal["auto", "blocked", "splash", "flash", "ring", "reference"] = "auto"
    """Attention of scoring and training: `blocked` is exact and memory-efficient on every platform, `splash` needs a TPU, `flash`
    a GPU, `ring` splits each row over the devices of `mesh.context`, `reference` makes the whole matrix of scores; `auto` takes the
    platform's, and `ring` where `mesh.context` is more than 1."""
    use_remove_padding: bool = True
    """Store trajectories without padding when scoring and training; off, each prompt and response takes its full width. Changes
    time and memory, not the objective."""
    use_prefix_sharing: bool = True
    """Store and compute a prompt once for all responses of its group when scoring and training; off, once per response. Changes
    time and memory, not the objective."""
