"""Entries of JAX's compilation cache are whole or absent."""

from pathlib import Path

import pytest
from jax._src.lru_cache import LRUCache

from jaxrl_llm.compilation_cache import write_whole_entries


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache without a limit, as JAX makes it where none is set."""
    monkeypatch.setattr(LRUCache, "put", getattr(LRUCache.put, "plain", LRUCache.put))
    return LRUCache(str(tmp_path), max_size=-1)


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_an_entry_comes_back_and_the_first_one_stays(cache, tmp_path):
    write_whole_entries()
    put = LRUCache.put
    write_whole_entries()
    assert LRUCache.put is put
    assert cache.get("jit_f-1") is None
    cache.put("jit_f-1", b"program")
    cache.put("jit_f-1", b"another")
    assert cache.get("jit_f-1") == b"program" and names(tmp_path) == ["jit_f-1-cache"]
    with pytest.raises(ValueError, match="empty"):
        cache.put("", b"program")


@pytest.mark.parametrize("whole", [True, False])
def test_an_entry_cut_short_is_never_seen(cache, tmp_path, whole):
    """JAX's own way leaves half an entry for good, which is the reason for this."""
    if whole:
        write_whole_entries()

    def cut(self, data):
        with open(self, "wb") as file:
            file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", cut)
        patch.setattr(type(cache.path), "write_bytes", cut)
        with pytest.raises(KeyboardInterrupt):
            cache.put("jit_f-1", b"program")
    assert names(tmp_path) == ([] if whole else ["jit_f-1-cache"])
