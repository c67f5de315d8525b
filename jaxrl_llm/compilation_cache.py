"""JAX's compilation cache, made safe against processes that are killed or write at the same time.

JAX writes an entry in place and never writes one that is there already. Half an entry, of a process that was killed or is still
writing, costs every start that comes upon it a warning and a compilation, for good.

Left out on purpose: entries on object stores (they appear whole) and the cache with a size limit (JAX locks that one itself).
"""

import os
import threading
from pathlib import Path
from typing import Any


def write_whole_entries() -> None:
    """Let JAX write entries aside and rename them into place, from now on in this process. Does nothing where JAX's own way of
    writing is not known."""
    try:
        from jax._src.lru_cache import _CACHE_SUFFIX, LRUCache
    except ImportError:
        return

    written = LRUCache.put
    if hasattr(written, "plain"):
        return

    def put(self: Any, key: str, value: bytes) -> None:
        if not key or self.eviction_enabled or "://" in str(self.path):
            written(self, key, value)
            return
        target = Path(str(self.path), f"{key}{_CACHE_SUFFIX}")
        if target.exists():
            return
        aside = target.with_name(f"{key}.writing-{os.getpid()}-{threading.get_ident()}")
        try:
            aside.write_bytes(value)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    put.plain = written  # type: ignore[attr-defined]
    LRUCache.put = put  # type: ignore[method-assign]
