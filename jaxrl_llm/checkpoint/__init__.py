"""Checkpoints: one Orbax tree and one manifest per step; save in the background, verify, restore, retention.

`files` knows the folder, `digest` the leaves, `saver` puts both together, `lock` keeps a second run out.
"""

from jaxrl_llm.checkpoint.digest import describe_mismatch, named_leaves, owned_copy, tree_digests
from jaxrl_llm.checkpoint.files import check_space
from jaxrl_llm.checkpoint.lock import RunLock
from jaxrl_llm.checkpoint.saver import Checkpointer, CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "RunLock",
    "check_space",
    "describe_mismatch",
    "named_leaves",
    "owned_copy",
    "tree_digests",
]
