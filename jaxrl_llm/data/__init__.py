"""Prompts: files -> rows -> token ids -> an order. Names are loaded on first use, so that reading rows needs no JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.data.prompts import PromptSet, build_prompts, shared_rows
    from jaxrl_llm.data.rows import Row, RowSet, load_rows
    from jaxrl_llm.data.stream import PromptStream, make_stream

HOMES = {
    "Row": "rows",
    "RowSet": "rows",
    "load_rows": "rows",
    "PromptSet": "prompts",
    "build_prompts": "prompts",
    "shared_rows": "prompts",
    "PromptStream": "stream",
    "make_stream": "stream",
}

__all__ = [
    "PromptSet",
    "PromptStream",
    "Row",
    "RowSet",
    "build_prompts",
    "load_rows",
    "make_stream",
    "shared_rows",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
