"""Checkpoints: one manifest per step over one Orbax tree or the pieces of several processes; save in the background, verify, restore,
retention.

`files` knows the folder, `digest` the leaves, `pieces` their parts, `reading` brings them back, `saver` puts all together; `lock` keeps
a second run out, `together` makes several processes agree, `fingerprint` names a tree wherever it lies.
"""

from jaxrl_llm.checkpoint.digest import describe_mismatch, named_leaves, owned_copy
from jaxrl_llm.checkpoint.files import check_space
from jaxrl_llm.checkpoint.fingerprint import tree_digests
from jaxrl_llm.checkpoint.lock import RunLock
from jaxrl_llm.checkpoint.saver import Checkpointer, CheckpointError
from jaxrl_llm.checkpoint.together import run_lock

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "RunLock",
    "check_space",
    "describe_mismatch",
    "named_leaves",
    "owned_copy",
    "run_lock",
    "tree_digests",
]
