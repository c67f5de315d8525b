"""Marks on fields: identity (the default) or operational."""

from dataclasses import Field, field
from typing import Any, TypeVar

T = TypeVar("T")


def operational(default: T) -> T:
    """A field that does not shape the numbers of a run and may change between a save and a resume."""
    value: Any = field(default=default, metadata={"operational": True})
    return value


def is_operational(declared: Field) -> bool:  # type: ignore[type-arg]
    """Whether a dataclass field was made with `operational`."""
    return bool(declared.metadata.get("operational", False))
